"""From a configuration to the method that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from workflow_rl.card import ModelCard
from workflow_rl.config import RunConfig, StageConfig
from workflow_rl.config.hub import model_path
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.window import SDEWindow
from workflow_rl.models import build_card
from workflow_rl.models.lora import attach_lora
from workflow_rl.models.memory import apply_memory, use_attention_backend
from workflow_rl.request import DiffusionParams, TaskType
from workflow_rl.rewards.registry import build_rewards
from workflow_rl.training.hardware import DTYPES, check_attention, choose_device
from workflow_rl.training.methods.chain import ChainRLMethod, ChainSettings
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.residency import send_to_sleep
from workflow_rl.training.settings import OptimizerSettings, StageSettings
from workflow_rl.workflow import Catalog, StagePlan, Workflow, WorkflowStage


def workflow_of(workflow_id: str, stages: Mapping[str, StageConfig]) -> Workflow:
    """Return the declared chain; :func:`stage_cards` checks it."""
    return Workflow(
        workflow_id,
        tuple(WorkflowStage(name, TaskType(stage.task)) for name, stage in stages.items()),
    )


def stage_cards(workflow: Workflow, stages: Mapping[str, StageConfig]) -> dict[str, ModelCard]:
    """Return each stage's card, after registering the cards and the chain in a catalog.

    Raises
    ------
    UserError
        If the chain cannot be threaded, a card does another task than its stage, or an id is taken.
    """
    catalog = Catalog()
    models = {}
    for stage in workflow.stages:
        card = stage_card(stage.name, stages[stage.name])
        # Two stages may use one model, or two folders of one name.
        models[stage.name] = f"{stage.name}:{card.model_id}"
        catalog.register_model(card, models[stage.name])
    catalog.register_workflow(workflow, models)
    return dict(catalog.cards_of(workflow.workflow_id))


def stage_card(name: str, stage: StageConfig) -> ModelCard:
    """Return the card of a stage's model; of one that is named by its hub id, after that."""
    folder = model_path(stage, f"stages.{name}.model")
    card = replace(build_card(folder, TaskType(stage.task)), variant=stage.variant)
    if folder is None or folder == stage.model:
        return card
    return replace(card, model_id=str(stage.model))


def stage_plan(stage: StageConfig) -> StagePlan:
    """Return how a stage is sampled."""
    return StagePlan(
        params=DiffusionParams(
            num_inference_steps=stage.num_inference_steps,
            guidance=stage.guidance,
            guidance_scale=stage.guidance_scale,
            guidance_scale_2=stage.guidance_scale_2,
            cfg_batching=stage.cfg_batching,
            cfg_normalization=stage.cfg_normalization,
            cfg_truncation=stage.cfg_truncation,
            sampler=stage.sampler,
            height=stage.height,
            width=stage.width,
            num_frames=stage.num_frames,
            fps=stage.fps,
            max_sequence_length=stage.max_sequence_length,
            sde_kind=stage.sde.kind,
            sde_noise_scale=stage.sde.noise_scale,
            kernel=stage.kernel,
        ),
        samples=stage.samples,
        slots=stage.rollout_batch_size,
        negative_prompt=stage.negative_prompt,
    )


def stage_settings(stage: WorkflowStage, config: StageConfig, total_steps: int) -> StageSettings:
    """Return how a stage samples and trains."""
    return StageSettings(
        stage=stage,
        plan=stage_plan(config),
        optimizer=OptimizerSettings(**config.optimizer.model_dump(), total_steps=total_steps),
        window=SDEWindow(**config.sde.window.model_dump()),
        ppo_clip=config.ppo_clip,
        kl_weight=config.kl_weight,
        step_weighting=config.step_weighting,
        max_grad_norm=config.max_grad_norm,
        micro_batch_size=config.micro_batch_size,
        ema_decay=config.ema.decay,
        train_modules=config.train_modules,
        freeze=config.freeze,
    )


def load_stage(
    name: str, stage: StageConfig, card: ModelCard, device: torch.device, seed: int = 0
) -> ModelInstance:
    """Load a stage's model, with its LoRA where it has one; ``seed`` draws a new LoRA's A."""
    instance = load_card(card, device=device, dtype=DTYPES[stage.dtype])
    apply_memory(instance, stage.memory)
    if stage.lora is not None:
        attach_lora(instance, stage.lora, where=f"stages.{name}.lora", seed=seed)
    return instance


def load_reference(card: ModelCard, stage: StageConfig, device: torch.device) -> ModelInstance:
    """Load the frozen start of a stage; only its policies are kept: it encodes and decodes nothing.

    It computes as the student does, with the same attention.
    """
    reference = load_card(card, device=device, dtype=DTYPES[stage.dtype])
    reference.drop_weights(set(reference.adapter.modules) - set(card.policies))
    if stage.memory.attention_backend is not None:
        use_attention_backend(reference, stage.memory.attention_backend)
    return reference


def build_method(config: RunConfig) -> ChainRLMethod:
    """Load the rewards and models of a configuration and build its method."""
    device = choose_device(config.training.device)
    check_attention(config.stages, device)
    rewards = build_rewards([reward.model_dump() for reward in config.rewards])
    rewards.load()  # one that cannot is told before the models are loaded
    workflow = workflow_of(config.workflow, config.stages)
    cards = stage_cards(workflow, config.stages)
    policies = []
    for stage in workflow.stages:
        options = config.stages[stage.name]
        settings = stage_settings(stage, options, config.training.iterations)
        card = cards[stage.name]
        student = load_stage(stage.name, options, card, device, config.seed)
        # With a LoRA the reference is the student with its adapters off.
        trains_weights = options.lora is None and not options.freeze
        reference = None
        if trains_weights and options.kl_weight > 0:
            reference = load_reference(card, options, device)
        policies.append(StagePolicy(settings, student, reference))
        if config.training.swap_stages:  # before the next stage is loaded
            send_to_sleep(policies[-1])
    return ChainRLMethod(
        workflow,
        policies,
        rewards,
        ChainSettings(
            credit_rule=config.credit.rule,
            normalisation=config.credit.normalisation,
            leave_one_out=config.credit.leave_one_out,
            advantage_clip=config.credit.advantage_clip,
            combine=config.credit.combine,
            combine_over=config.credit.combine_over or "prompt",
            updates_per_iteration=config.training.updates_per_iteration,
            c2_tolerance=config.training.c2_tolerance,
            max_skipped_updates=config.training.max_skipped_updates,
            swap_stages=config.training.swap_stages,
            seed=config.seed,
        ),
    )
