"""A training run: the algorithm in order, with checkpoints, evaluation and a clean stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from workflow_rl.config import RunConfig, load_prompts
from workflow_rl.config.more_iterations import record_iterations
from workflow_rl.config.run_dir import locked_run_dir
from workflow_rl.errors import WorkflowRLError
from workflow_rl.evaluation.chain import Evaluation, evaluate_chain
from workflow_rl.evaluation.media_files import LostMedia, write_first_samples
from workflow_rl.rewards.failures import failure_causes
from workflow_rl.runtime.driver import OnProgress, ProgressEvent
from workflow_rl.training.build import build_method
from workflow_rl.training.checkpoint import (
    latest_valid,
    load_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from workflow_rl.training.data import PromptSchedule
from workflow_rl.training.expert_steps import untrained_experts
from workflow_rl.training.gallery import save_groups
from workflow_rl.training.guards import GuardError, Guards
from workflow_rl.training.iteration_log import IterationLog
from workflow_rl.training.methods.chain import ChainRLMethod
from workflow_rl.training.metrics_log import MetricsLog
from workflow_rl.training.signals import graceful_stop
from workflow_rl.training.texts import cache_on_disk, encode_and_drop
from workflow_rl.training.weight_sync import WeightRole
from workflow_rl.workflow import StagePlan

EVALUATIONS_FILE = "evaluations.jsonl"


class RunListener(Protocol):
    """Who is told how a run goes. The command line shows it; tests and notebooks need none."""

    def message(self, text: str) -> None:
        """Take one line for the user."""
        ...

    def progress(self, stage: str, event: ProgressEvent) -> None:
        """A denoising step of a batch is done, in rollout or evaluation."""
        ...

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        """Iteration ``number`` (1-based) of ``total`` is done."""
        ...

    def evaluation(self, number: int, evaluation: Evaluation) -> None:
        """The weights after ``number`` iterations were evaluated."""
        ...


class SilentListener:
    """Says nothing."""

    def message(self, text: str) -> None:
        """Drop the line."""

    def progress(self, stage: str, event: ProgressEvent) -> None:
        """Drop the event."""

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        """Drop the figures."""

    def evaluation(self, number: int, evaluation: Evaluation) -> None:
        """Drop the figures."""


class Run:
    """The parts of a run, and what happens around its iterations."""

    def __init__(self, config: RunConfig, listener: RunListener) -> None:
        self.config = config
        self.listener = listener
        self.dir: Path = config.output_dir
        self.evaluations = IterationLog(self.dir / EVALUATIONS_FILE)
        self.method: ChainRLMethod = build_method(config)
        self.method.on_progress = self.progress_of
        self.guards = Guards(config.guards, self.dir)
        stages = list(config.stages)
        records = load_prompts(config.data.prompts, stages)
        held_out = config.data.eval_prompts
        self.eval_prompts = records if held_out is None else load_prompts(held_out, stages)
        self.schedule = PromptSchedule(
            tuple(records), config.data.prompts_per_iteration, config.seed
        )

    def progress_of(self, stage: str) -> OnProgress:
        """Return the callback that tells the listener of a stage's steps."""
        return partial(self.listener.progress, stage)

    def restore(self) -> int:
        """Load the newest whole checkpoint, forget what came after it; return its iteration.

        Without a checkpoint the run begins anew, so that the evaluation before training, which is
        done again, is forgotten too.

        Raises
        ------
        GuardError
            If a guard stopped the run, and its configuration does not let it go on.
        """
        root = self.dir / "checkpoints"
        remove_leftovers(root)
        path = latest_valid(root, on_skip=self.listener.message)
        start = 0
        if path is not None:
            start, tensors, state = load_checkpoint(path)
            self.method.load_state(tensors, state["method"])
            self.guards.restore(state.get("guards"), self.listener.message)
            drifted = self.guards.stop_reason()
            if drifted is not None:
                raise GuardError(drifted)
            is_complete = start == self.config.training.iterations
            how = (
                f"all {start} iterations were done"
                if is_complete
                else f"going on after iteration {start}"
            )
            self.listener.message(f"{how} (from {path})")
        else:
            self.listener.message(f"no whole checkpoint in {root}: beginning anew")
        self.evaluations.truncate_after(-1 if path is None else start)
        self.guards.alarms.truncate_after(start - 1)
        return start

    def prepare_texts(self) -> None:
        """Set up the embedding caches; encode all prompts where text encoders are then dropped.

        It comes after `restore`: declaring the restored versions empties the caches.
        """
        records = [*self.schedule.prompts, *self.eval_prompts]
        for policy in self.method.policies:
            memory = self.config.stages[policy.name].memory
            cache_on_disk(policy.student, memory.embedding_cache, self.dir)
            if memory.drop_text_encoders:
                self.method.wake(policy.name)
                encode_and_drop(policy, records)

    def checkpoint(self, done: int) -> None:
        """Write everything that resume needs after ``done`` iterations."""
        save_checkpoint(
            self.dir / "checkpoints",
            done,
            self.method.state_tensors(),
            {"method": self.method.state_values(), "guards": self.guards.state()},
            keep=self.config.training.checkpoint.keep,
        )

    def evaluate(self, done: int) -> Evaluation:
        """Evaluate the weights after ``done`` iterations; write figures and videos."""
        options = self.config.evaluation
        role = WeightRole.EMA if options.weights == "ema" and done > 0 else WeightRole.STUDENT
        with ExitStack() as stack:
            instances = {
                policy.name: stack.enter_context(
                    policy.serving(WeightRole.STUDENT if policy.settings.freeze else role)
                )
                for policy in self.method.policies
            }
            evaluation = evaluate_chain(
                self.method.workflow,
                instances,
                evaluation_plans(self.method, self.config),
                self.method.reward,
                self.eval_prompts,
                seeds_per_prompt=options.seeds_per_prompt,
                on_progress=self.progress_of,
                wake=self.method.wake,
            )
        rows = list(range(0, len(evaluation.scores), options.seeds_per_prompt))
        folder = f"evaluation/iteration_{done:08d}"
        lost = LostMedia()
        media = write_first_samples(self.dir, folder, evaluation.outputs, rows, lost)
        line = {**evaluation.to_json(), "media_rows": rows, "media": media, **lost.to_json()}
        self.evaluations.append(done, line)
        self.listener.evaluation(done, evaluation)
        self.tell(lost)
        return evaluation

    def save_rollouts(self, done: int) -> LostMedia:
        """Keep groups of iteration ``done`` to look at, when they are due; return what was lost."""
        rollouts, lost = self.config.logging.rollouts, LostMedia()
        every = self.config.evaluation.every if rollouts.every is None else rollouts.every
        due = is_due(done, self.config.training.iterations, every)
        if due and self.method.last is not None:
            lost = save_groups(self.dir, done, self.method.last, rollouts.groups)
            self.tell(lost)
        return lost

    def failures(self, done: int) -> dict[str, dict[str, int]]:
        """Return why leaves of the last iteration failed, and tell the listener."""
        if self.method.last is None:
            return {}
        scores = self.method.last.scores
        causes = failure_causes(scores)
        for label, counts in causes.items():
            reasons = ", ".join(f"{reason} ({count})" for reason, count in counts.items())
            self.listener.message(
                f"iteration {done}: {label} failed for {sum(counts.values())} of "
                f"{len(scores.total)} samples: {reasons}"
            )
        return causes

    def unscored(self) -> str | None:
        """Return why no sample of the last iteration has a score, None where one has."""
        if self.method.last is None or self.method.last.scores.total.isfinite().any():
            return None
        return next(iter(self.method.last.scores.failures.values()))

    def watch(self, iteration: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Measure the guards, tell the listener of those that drift; return their metrics."""
        outputs = () if self.method.last is None else self.method.last.outputs
        found, alarms = self.guards.look(iteration, outputs, metrics)
        for alarm in alarms:
            self.listener.message(f"warning: {alarm.warning()}")
        return found

    def tell(self, lost: LostMedia) -> None:
        """Tell the listener of files that the disk refused."""
        if lost.causes:
            self.listener.message(str(lost))


def evaluation_plans(method: ChainRLMethod, config: RunConfig) -> dict[str, StagePlan]:
    """Return each stage's plan with the evaluation's batch size and number of steps."""
    options = config.evaluation
    plans = {}
    for policy in method.policies:
        plan = policy.settings.plan
        steps = options.num_inference_steps or plan.params.num_inference_steps
        plans[policy.name] = replace(
            plan,
            slots=options.batch_size,
            params=replace(plan.params, num_inference_steps=steps, sde_steps=()),
        )
    return plans


def train(
    config: RunConfig, *, resume: bool = False, listener: RunListener | None = None
) -> int | None:
    """Run the training that ``config`` describes, in its run directory.

    Parameters
    ----------
    resume
        Go on from the newest whole checkpoint; the result is that of a run never stopped.
    listener
        Is told how it goes.

    Returns
    -------
    int or None
        The number of iterations done, if a signal stopped the run early; None if it is complete.
    """
    listener = listener or SilentListener()
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)

    def say_so(signal_name: str) -> None:
        text = (
            f"{signal_name}: the run stops after this iteration, with a checkpoint; "
            "Ctrl-C once more stops it now, without one"
        )
        # Not in the handler: what it interrupted may hold the lock of the console.
        threading.Thread(target=listener.message, args=(text,), daemon=True).start()

    with locked_run_dir(config.output_dir), graceful_stop(say_so) as stop:
        run = Run(config, listener)
        start = run.restore() if resume else 0
        goes_on = record_iterations(config, start) if resume else None
        if goes_on is not None:
            listener.message(goes_on)
        for policy in run.method.policies:
            for line in untrained_experts(policy, config.training.iterations, config.seed):
                listener.message(line)
        run.prepare_texts()
        with open_log(config) as log:
            log.truncate_after(start - 1)
            return _iterate(run, start, log, lambda: stop.requested)


def open_log(config: RunConfig) -> MetricsLog:
    """Return the run's metrics log, with the services that the configuration names."""
    logging = config.logging
    return MetricsLog(
        config.output_dir,
        tensorboard=logging.tensorboard,
        wandb=None if logging.wandb is None else logging.wandb.model_dump(),
        trackio=None if logging.trackio is None else logging.trackio.model_dump(),
    )


def _iterate(
    run: Run, start: int, log: MetricsLog, stop_requested: Callable[[], bool]
) -> int | None:
    config, method = run.config, run.method
    total = config.training.iterations
    patience = config.training.max_unscored_iterations
    left = patience
    if start == 0:
        run.evaluate(0)
    for iteration in range(start, total):
        began = time.perf_counter()
        prompts = run.schedule.at(iteration)
        batch = {"prompts": prompts, "seeds": [config.seed] * len(prompts)}
        losses, metrics = method.managed_train_step(batch, iteration)
        metrics |= {name: float(loss) for name, loss in losses.items()}
        metrics |= run.watch(iteration, metrics)
        seconds = time.perf_counter() - began
        done = iteration + 1
        lost = run.save_rollouts(done)
        causes = {"reward_failure_causes": run.failures(done)}
        log.log(iteration, {**metrics, **lost.to_json(), **causes}, {"iteration": seconds})
        run.listener.iteration(done, total, metrics | {"time/iteration": seconds})
        unscored = run.unscored()
        left = patience if unscored is None else left - 1
        if is_due(done, total, config.evaluation.every):
            run.evaluate(done)
        drifted = run.guards.stop_reason()
        stopping = (stop_requested() or drifted is not None or left == 0) and done < total
        if stopping or is_due(done, total, config.training.checkpoint.every):
            run.checkpoint(done)
        if left == 0:
            raise WorkflowRLError(_nothing_scored(patience, unscored))
        if drifted is not None:
            raise GuardError(drifted)
        if stopping:
            return done
    return None


def _nothing_scored(iterations: int, reason: str | None) -> str:
    return (
        f"no sample had a score in {iterations} iterations in a row ({reason}); the checkpoint is "
        "written: mend the reward and resume, or raise training.max_unscored_iterations in the "
        "run's config.yaml"
    )


def is_due(done: int, total: int, every: int) -> bool:
    """Say whether something that happens every ``every`` iterations, and at the end, is due."""
    return done == total or (every > 0 and done % every == 0)
