"""Which expert a run's stochastic steps leave untrained, told before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from workflow_rl.loop.schedule import euler_sigmas
from workflow_rl.training.policy import StagePolicy


def untrained_experts(policy: StagePolicy, iterations: int, seed: int) -> list[str]:
    """Return one line for each expert of a stage that no SDE step of the run falls to.

    Of two experts each makes the steps on its side of a boundary; the SDE window chooses which
    steps train.

    Parameters
    ----------
    iterations, seed
        Of the run: a window may be drawn, or move.
    """
    settings = policy.settings
    if settings.freeze or len(policy.components) < 2:
        return []
    params = settings.plan.params.filled(policy.student.card.defaults)
    count = params.num_inference_steps
    adapter = policy.student.adapter
    spec = adapter.schedule(params)
    timesteps = euler_sigmas(spec, count)[:-1] * spec.config["num_train_timesteps"]
    makers = [adapter.policy_at(float(timestep), params) for timestep in timesteps]
    trained = sorted(
        {step for at in range(iterations) for step in settings.window.steps(count, at, seed)}
    )
    reached = {makers[step] for step in trained}
    return [
        _line(policy.name, expert, [i for i, m in enumerate(makers) if m == expert], trained)
        for expert in policy.components
        if expert not in reached
    ]


def _line(stage: str, expert: str, own: Sequence[int], trained: Sequence[int]) -> str:
    makes = f"makes steps {_ranges(own)}" if own else "makes none of the steps"
    return (
        f"stage {stage!r}: {expert} {makes} and the SDE window covers {_ranges(trained)}, so "
        f"{expert} will not train; change stages.{stage}.sde.window or num_inference_steps"
    )


def _ranges(steps: Sequence[int]) -> str:
    """Return ascending numbers as text: ``0 to 2, 5``."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts)
