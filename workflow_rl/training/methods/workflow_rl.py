"""The text-to-image-to-video method: two stages, named in the constructor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workflow_rl.card import ModelCard
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.window import SDEWindow
from workflow_rl.request import DiffusionParams
from workflow_rl.rewards.composite import CompositeReward
from workflow_rl.rewards.registry import build_rewards
from workflow_rl.training.methods.base import new_instance
from workflow_rl.training.methods.chain import ChainRLMethod, ChainSettings
from workflow_rl.training.policy import OptimizerSettings, StagePolicy, StageSettings
from workflow_rl.workflow import T2I_I2V, Catalog, StagePlan

DEFAULT_REWARD: Sequence[dict[str, object]] = ({"name": "frame_change"},)
"""Amount of motion: needs no weights and fits any prompt. Give your own for anything real."""


class WorkflowRLMethod(ChainRLMethod):
    """End-to-end RL over text → image → video.

    Parameters
    ----------
    t2i_student, i2v_student
        The policies; trained in place, and the ones that serve.
    t2i_reference, i2v_reference
        Frozen starts for the KL; may be None with ``beta=0``.
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
    credit, normalisation, leave_one_out
        See :func:`workflow_rl.training.credit.assign_credit`. None: ``nested`` where M >= 2, else
        ``shared``.
    t2i_params, i2v_params
        Sampling parameters of a stage where they differ from the ones above.
    rollout_batch_size, micro_batch_size
        Samples per forward pass; equal ones keep recomputed log-probs equal to the bit.
    train_t2i, train_i2v
        Freeze a stage with False.
    ema_decay
        Decay of the moving averages; None keeps none.
    chain
        Remaining fields of :class:`ChainSettings`, such as ``c2_tolerance``.
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
        normalisation: str = "group",
        leave_one_out: bool = False,
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
        shared_params = DiffusionParams(
            num_inference_steps=rollout_steps, sde_kind=sde_kind, sde_noise_scale=sde_noise_scale
        )
        instances = {"t2i": (t2i_student, t2i_reference), "i2v": (i2v_student, i2v_reference)}
        samples = {"t2i": num_samples_per_prompt, "i2v": num_videos_per_image}
        params = {"t2i": t2i_params or shared_params, "i2v": i2v_params or shared_params}
        lr = {"t2i": t2i_lr, "i2v": i2v_lr}
        train = {"t2i": train_t2i, "i2v": train_i2v}
        _check_chain(t2i_student.card, i2v_student.card)
        policies = [
            StagePolicy(
                StageSettings(
                    stage=stage,
                    plan=StagePlan(params[stage.name], samples[stage.name], rollout_batch_size),
                    optimizer=OptimizerSettings(lr=lr[stage.name]),
                    window=sde_window or SDEWindow(),
                    ppo_clip=ppo_clip,
                    kl_weight=beta,
                    step_weighting=step_weighting,
                    max_grad_norm=max_grad_norm,
                    micro_batch_size=micro_batch_size,
                    ema_decay=ema_decay,
                    freeze=not train[stage.name],
                ),
                *instances[stage.name],
            )
            for stage in T2I_I2V.stages
        ]
        super().__init__(
            T2I_I2V,
            policies,
            reward or build_rewards(DEFAULT_REWARD),
            ChainSettings(
                credit_rule=credit or ("nested" if num_videos_per_image > 1 else "shared"),
                normalisation=normalisation,
                leave_one_out=leave_one_out,
                advantage_clip=adv_clip_max,
                **chain,
            ),
        )


def _check_chain(t2i_card: ModelCard, i2v_card: ModelCard) -> None:
    """Raise a UserError unless the two cards make the chain."""
    if t2i_card.model_id == i2v_card.model_id:
        raise UserError(f"both stages are {t2i_card.model_id!r}; give a t2i and an i2v model")
    catalog = Catalog()
    catalog.register_model(t2i_card)
    catalog.register_model(i2v_card)
    catalog.register_workflow(T2I_I2V, {"t2i": t2i_card.model_id, "i2v": i2v_card.model_id})


def build_workflow_rl(
    t2i_card: ModelCard,
    i2v_card: ModelCard,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> WorkflowRLMethod:
    """Load students and references of two cards and build the method.

    Parameters
    ----------
    device, dtype
        Where and in which dtype the models live.
    kwargs
        Arguments of :class:`WorkflowRLMethod`. With ``beta=0`` no reference is loaded.
    """
    _check_chain(t2i_card, i2v_card)
    needs_reference = kwargs.get("beta", 0.01) > 0
    students = [new_instance(card, device=device, dtype=dtype) for card in (t2i_card, i2v_card)]
    references = [
        new_instance(card, device=device, dtype=dtype) if needs_reference else None
        for card in (t2i_card, i2v_card)
    ]
    return WorkflowRLMethod(*students, *references, **kwargs)
