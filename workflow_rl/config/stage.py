"""One stage of the chain: its model, how it samples and how it trains."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from workflow_rl.config.base import ConfigModel
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.config.memory import MemoryConfig
from workflow_rl.enums import CFGBatching, GuidanceMode, Sampler, SDEKind

StageTask = Literal["t2i", "i2v"]


class OptimizerConfig(ConfigModel):
    """AdamW and its learning-rate schedule, one per stage."""

    lr: float = Field(1e-5, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="Decay rates of AdamW's two moments, each in [0, 1)."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    eps: float = Field(1e-8, gt=0, description="Term in AdamW's denominator.")
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Iterations over which the learning rate rises to its peak, from "
        "lr / warmup_steps in the first.",
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="Course of the learning rate after the warm-up."
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Final learning rate over the peak, for cosine and linear."
    )

    @model_validator(mode="after")
    def _check_betas(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {list(self.betas)}; give two numbers in [0, 1)")
        return self


class WindowConfig(ConfigModel):
    """Which denoising steps are stochastic, and so are trained (MixGRPO, arXiv 2507.21802)."""

    mode: Literal["all", "fixed", "random", "sliding"] = Field(
        "all",
        description="all: every step but the last; fixed: `size` steps from `start`; random: "
        "`size` consecutive steps drawn anew each iteration; sliding: `size` steps that move on.",
    )
    start: int = Field(0, ge=0, description="First step of a fixed or sliding window (0-based).")
    size: int | None = Field(
        None, ge=1, description="Steps in the window; needed by every mode but `all`."
    )
    stride: int = Field(1, ge=1, description="Steps by which a sliding window moves.")
    every: int = Field(1, ge=1, description="Iterations between two moves of a sliding window.")

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.mode == "all" and (self.size is not None or self.start != 0):
            raise ValueError(
                "mode 'all' takes no start or size; leave them out or use mode 'fixed'"
            )
        if self.mode != "all" and self.size is None:
            raise ValueError(f"mode '{self.mode}' needs a size; give the number of steps")
        return self


class SDEConfig(ConfigModel):
    """How noise enters the sampler during rollout."""

    kind: SDEKind = Field(
        "flow_sde", description="Law of a stochastic step; `ode` has no noise and cannot train."
    )
    noise_scale: float = Field(
        0.7, gt=0, description="Noise scale a; for `cps` in (0, 1], where 1 is full re-noising."
    )
    window: WindowConfig = Field(WindowConfig(), description="Which steps are stochastic.")

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.kind == "cps" and self.noise_scale > 1:
            raise ValueError(f"noise_scale is {self.noise_scale}; kind 'cps' takes at most 1")
        return self


class EMAConfig(ConfigModel):
    """Exponential moving average of the trained weights."""

    decay: float | None = Field(
        None, gt=0, lt=1, description="Decay per optimiser step; null keeps no average."
    )


class StageConfig(ConfigModel):
    """One model of the chain."""

    task: StageTask = Field(description="What the model does: t2i or i2v.")
    model: Path | None = Field(
        None,
        description="Diffusers folder, or the id of one on the Hugging Face hub, such as "
        "`black-forest-labs/FLUX.1-dev`; null is the embedded model of the task.",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Branch, tag or commit of a hub id; null is its main branch. A run writes the "
        "commit that it used.",
    )
    variant: str | None = Field(
        None,
        min_length=1,
        description="Variant of the weight files, such as `fp16`; a component without it gives its "
        "plain files. null is the plain files.",
    )
    samples: int = Field(
        4, ge=1, description="Outputs per input: K images per prompt, M videos per image."
    )
    num_inference_steps: int = Field(6, ge=1, description="Denoising steps, rollout and training.")
    guidance_scale: float | None = Field(
        None, ge=0, description="Guidance; null is the family's neutral value."
    )
    guidance: GuidanceMode | None = Field(
        None,
        description="How guidance_scale acts: none, cfg (classifier-free) or embedded (an input of "
        "a distilled model); null is as the checkpoint has it.",
    )
    guidance_scale_2: float | None = Field(
        None,
        ge=0,
        description="Guidance of the second expert of a model that has two (Wan 2.2 A14B); null is "
        "guidance_scale.",
    )
    cfg_batching: CFGBatching = Field(
        "sequential",
        description="How classifier-free guidance runs its two forward passes: one by one, or "
        "`batched` as one of twice the batch; equal up to rounding.",
    )
    cfg_normalization: float | None = Field(
        None,
        gt=0,
        description="Cap on the norm of a guided velocity, over that under the prompt alone; "
        "Z-Image only (1 for its `true`). null is no cap.",
    )
    cfg_truncation: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Guidance stops where 1 - sigma is above this; Z-Image only. null is never.",
    )
    sampler: Sampler = Field(
        "euler",
        description="euler: the steps that rollout builds on. checkpoint: the folder's own "
        "scheduler, for serving and frozen stages.",
    )
    negative_prompt: str | None = Field(
        None,
        description="Text to steer away from; needs classifier-free guidance.",
    )
    height: int | None = Field(
        None,
        ge=1,
        description="Pixels; null is the checkpoint's size (t2i), the conditioning image's (i2v).",
    )
    width: int | None = Field(
        None,
        ge=1,
        description="Pixels; null is the checkpoint's size (t2i), the conditioning image's (i2v).",
    )
    num_frames: int | None = Field(
        None,
        ge=1,
        description="Frames of a video; null is 81, 9 for the embedded model. Not for t2i.",
    )
    fps: float | None = Field(
        None,
        gt=0,
        le=240,
        description="Frames per second of the videos, where the model is told (LTX-Video); null is "
        "the family's rate.",
    )
    max_sequence_length: int | None = Field(
        None,
        ge=1,
        description="Text tokens, at most the family's limit; null is what it usually takes.",
    )
    train_modules: tuple[str, ...] = Field(
        (),
        description="Sub-modules that train, by a dotted part of their name such as "
        "`time_text_embed.text_embedder`; empty trains the whole transformer.",
    )
    lora: LoRAConfig | None = Field(
        None,
        description="Train low-rank adapters beside frozen weights, and hold the KL to the model "
        "without them; null trains the weights themselves.",
    )
    freeze: bool = Field(False, description="Keep this stage's weights; it still samples.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="This stage's optimiser.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm is clipped to this.")
    ppo_clip: float = Field(
        1e-3, gt=0, lt=1, description="PPO clips the ratio of each step to 1 ± this."
    )
    kl_weight: float = Field(
        0.01,
        ge=0,
        description="Weight β of the KL to the frozen reference, through step means; "
        "step_weighting weighs the KL of a step as it does the log-ratio.",
    )
    sde: SDEConfig = Field(SDEConfig(), description="The stochastic steps of rollout.")
    step_weighting: Literal["gaussian", "cps", "guard"] = Field(
        "guard",
        description="Weight of each step in the objective: gaussian (1/2s²) lets low-noise steps "
        "dominate; cps multiplies by 2s²; guard by s (GRPO-Guard).",
    )
    ema: EMAConfig = Field(EMAConfig(), description="Average of the weights over steps.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type the model computes in; sampler arithmetic is float32."
    )
    memory: MemoryConfig = Field(MemoryConfig(), description="Ways to need less memory.")
    kernel: str | None = Field(
        None, description="Kernel of the SDE step (`workflow-rl kernels`); null chooses by device."
    )
    rollout_batch_size: int = Field(16, ge=1, description="Samples per forward pass in rollout.")
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples per forward and backward pass in training; null is "
        "rollout_batch_size, with which the recomputed log-prob is bit-identical.",
    )

    @property
    def training_batch_size(self) -> int:
        """Samples per forward and backward pass in training."""
        return self.rollout_batch_size if self.micro_batch_size is None else self.micro_batch_size

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        if self.task == "t2i" and self.num_frames is not None:
            raise ValueError(
                f"num_frames is {self.num_frames}, but a t2i stage makes images; leave it out"
            )
        if self.task == "t2i" and self.fps is not None:
            raise ValueError(f"fps is {self.fps:g}, but a t2i stage makes images; leave it out")
        if (self.height is None) != (self.width is None):
            raise ValueError("give height and width together, or neither")
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora is None:
            return self
        if self.train_modules:
            raise ValueError(
                "lora and train_modules are both given, but with a LoRA only its adapters train; "
                "leave train_modules out and name layers in lora.targets"
            )
        if self.freeze and self.lora.init is None:
            raise ValueError(
                "lora is given without init, but the stage is frozen, so it would change nothing; "
                "leave lora out or give lora.init"
            )
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.freeze:
            return self
        stochastic = self.num_inference_steps - 1
        if stochastic < 1:
            raise ValueError(
                "num_inference_steps is 1, but the last step is deterministic and nothing would "
                "train; use at least 2 or freeze the stage"
            )
        if self.sde.kind == "ode":
            raise ValueError(
                "sde.kind is 'ode', which has no log-prob to train; use flow_sde, cps or "
                "dance_sde, or freeze the stage"
            )
        window = self.sde.window
        if window.size is not None and window.start + window.size > stochastic:
            last = window.start + window.size - 1
            raise ValueError(
                f"sde.window covers steps {window.start} to {last}, but of "
                f"{self.num_inference_steps} steps only 0 to {stochastic - 1} can be stochastic; "
                "make the window smaller or num_inference_steps larger"
            )
        return self
