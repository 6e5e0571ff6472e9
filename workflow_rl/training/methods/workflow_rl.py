"""The text-to-image-to-video method: two stages, named in the constructor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from workflow_rl.card import ModelCard
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.window import SDEWindow
from workflow_rl.models.lora import attach_lora, check_card_lora
from workflow_rl.request import DiffusionParams
from workflow_rl.rewards.composite import CompositeReward
from workflow_rl.rewards.registry import build_rewards
from workflow_rl.training.methods.base import new_instance
from workflow_rl.training.methods.chain import ChainRLMethod, ChainSettings
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.settings import OptimizerSettings, StageSettings
from workflow_rl.workflow import T2I_I2V, StagePlan
from workflow_rl.workflow.workflow import check_stage_card

DEFAULT_REWARD: Sequence[dict[str, object]] = ({"name": "frame_change"},)
"""Amount of motion: needs no weights and fits any prompt. Give your own for anything real."""


class WorkflowRLMethod(ChainRLMethod):
    """End-to-end RL over text → image → video.

    Parameters
    ----------
    t2i_student, i2v_student
        The policies; trained in place, and the ones that serve.
    t2i_reference, i2v_reference
        Frozen starts for the KL; may be None with ``beta=0``, and where the student has a LoRA:
        then the start is the student without it.
    reward
        A weighted sum of rewards on the video (or the image); None: ``DEFAULT_REWARD``.
    num_samples_per_prompt
        Images K per prompt.
    num_videos_per_image
        Videos M per image; ``nested`` credit needs at least 2.
    rollout_steps
        Denoising steps of both stages.
    t2i_lr, i2v_lr
        Learning rates of AdamW, constant.
    beta
        Weight of the KL to the reference, both stages.
    adv_clip_max
        Advantages are clipped to plus or minus this.
    ppo_clip
        Half width of the PPO interval.
    sde_kind, sde_noise_scale, sde_window
        The stochastic steps of both stages.
    step_weighting
        ``gaussian``, ``cps`` or ``guard``.
    credit
        Rule of :func:`workflow_rl.training.credit.assign_credit`. None: ``nested`` where M >= 2,
        else ``shared``.
    t2i_params, i2v_params
        Size, frames, guidance and text length of a stage; its steps, SDE kind and noise scale
        are always ``rollout_steps``, ``sde_kind`` and ``sde_noise_scale``.
    rollout_batch_size, micro_batch_size
        Samples per forward pass; equal ones keep recomputed log-probs equal to the bit.
    train_t2i, train_i2v
        Freeze a stage with False.
    ema_decay
        Decay of the moving averages; None keeps none.
    chain
        Remaining fields of :class:`ChainSettings`, such as ``normalisation``, ``leave_one_out``
        and ``c2_tolerance``.
    """

    def __init__(
        self,
        t2i_student: ModelInstance,
        i2v_student: ModelInstance,
        t2i_reference: ModelInstance | None,
        i2v_reference: ModelInstance | None,
        *,
        reward: CompositeReward | None = None,
        num_samples_per_prompt: int = 4,
        num_videos_per_image: int = 1,
        rollout_steps: int = 4,
        t2i_lr: float = 1e-5,
        i2v_lr: float = 1e-5,
        beta: float = 0.01,
        adv_clip_max: float = 5.0,
        ppo_clip: float = 1e-3,
        sde_kind: str = "flow_sde",
        sde_noise_scale: float = 0.7,
        sde_window: SDEWindow | None = None,
        step_weighting: str = "cps",
        credit: str | None = None,
        t2i_params: DiffusionParams | None = None,
        i2v_params: DiffusionParams | None = None,
        rollout_batch_size: int = 16,
        micro_batch_size: int | None = None,
        max_grad_norm: float = 1.0,
        train_t2i: bool = True,
        train_i2v: bool = True,
        ema_decay: float | None = None,
        **chain: Any,
    ) -> None:
        _check_chain(t2i_student.card, i2v_student.card)
        t2i = _StageArguments(t2i_params, num_samples_per_prompt, t2i_lr, train_t2i)
        i2v = _StageArguments(i2v_params, num_videos_per_image, i2v_lr, train_i2v)
        sampling = _Sampling(rollout_steps, sde_kind, sde_noise_scale, rollout_batch_size)
        common = {
            "window": sde_window or SDEWindow(),
            "ppo_clip": ppo_clip,
            "kl_weight": beta,
            "step_weighting": step_weighting,
            "max_grad_norm": max_grad_norm,
            "micro_batch_size": micro_batch_size,
            "ema_decay": ema_decay,
        }
        super().__init__(
            T2I_I2V,
            [
                StagePolicy(t2i.settings("t2i", sampling, common), t2i_student, t2i_reference),
                StagePolicy(i2v.settings("i2v", sampling, common), i2v_student, i2v_reference),
            ],
            reward or build_rewards(DEFAULT_REWARD),
            ChainSettings(
                credit_rule=credit or ("nested" if num_videos_per_image > 1 else "shared"),
                advantage_clip=adv_clip_max,
                **chain,
            ),
        )


class _Sampling(NamedTuple):
    """How both stages are sampled."""

    steps: int
    sde_kind: str
    sde_noise_scale: float
    batch_size: int


class _StageArguments(NamedTuple):
    """What the constructor is told of one stage."""

    params: DiffusionParams | None
    samples: int
    lr: float
    train: bool

    def settings(self, name: str, sampling: _Sampling, common: Mapping[str, Any]) -> StageSettings:
        params = replace(
            self.params or DiffusionParams(),
            num_inference_steps=sampling.steps,
            sde_kind=sampling.sde_kind,
            sde_noise_scale=sampling.sde_noise_scale,
            sde_steps=(),
        )
        return StageSettings(
            stage=T2I_I2V.stage(name),
            plan=StagePlan(params, self.samples, sampling.batch_size),
            optimizer=OptimizerSettings(lr=self.lr),
            freeze=not self.train,
            **common,
        )


def _check_chain(t2i_card: ModelCard, i2v_card: ModelCard) -> None:
    """Raise a UserError unless the two cards make the chain."""
    if t2i_card.source == i2v_card.source:
        raise UserError(f"both stages are {t2i_card.source}; give a t2i and an i2v model")
    for stage, card in zip(T2I_I2V.stages, (t2i_card, i2v_card), strict=True):
        check_stage_card(T2I_I2V, stage, card)


def build_workflow_rl(
    t2i_card: ModelCard,
    i2v_card: ModelCard,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    t2i_lora: LoRAConfig | None = None,
    i2v_lora: LoRAConfig | None = None,
    lora_seed: int = 0,
    **kwargs: Any,
) -> WorkflowRLMethod:
    """Load students and references of two cards and build the method.

    Parameters
    ----------
    device, dtype
        Where and in which dtype the models live.
    t2i_lora, i2v_lora
        Adapters to train; None trains the weights themselves.
    lora_seed
        Seed of a new LoRA's A.
    kwargs
        Arguments of :class:`WorkflowRLMethod`. No reference is loaded with ``beta=0``, nor
        for a stage that is frozen or has a LoRA.
    """
    _check_chain(t2i_card, i2v_card)
    stages = {
        "t2i": (t2i_card, t2i_lora, kwargs.get("train_t2i", True)),
        "i2v": (i2v_card, i2v_lora, kwargs.get("train_i2v", True)),
    }
    has_kl = kwargs.get("beta", 0.01) > 0
    for name, (card, lora, _) in stages.items():
        if lora is not None:
            check_card_lora(card, lora, where=f"{name}_lora")
    students, references = [], []
    for name, (card, lora, trains) in stages.items():
        student = new_instance(card, device=device, dtype=dtype)
        if lora is not None:
            attach_lora(student, lora, where=f"{name}_lora", seed=lora_seed)
        needs_reference = has_kl and trains and lora is None
        students.append(student)
        references.append(
            new_instance(card, device=device, dtype=dtype) if needs_reference else None
        )
    return WorkflowRLMethod(*students, *references, **kwargs)
