"""What each kind of pass of a stage costs, counted on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from workflow_rl.config import StageConfig
from workflow_rl.enums import GuidanceMode
from workflow_rl.planning.inputs import (
    TRANSFORMER_INPUTS,
    text_bytes,
    vae_decode,
    vae_first_frames,
    vae_latents,
)
from workflow_rl.planning.measure import Cost, cost_with_grad, cost_without_grad
from workflow_rl.planning.modules import META
from workflow_rl.planning.sizes import Geometry
from workflow_rl.planning.stacks import cost_of_stacks
from workflow_rl.planning.texts import TextLengths

Passes = Literal["one", "sequential", "batched"]
"""Forward passes of one step: one, or two for classifier-free guidance."""


@dataclass
class StageModel:
    """The modules of a stage without weights, what of them trains, and what its passes cost.

    A cost is counted once, however often it is asked for.

    Parameters
    ----------
    modules
        By component, on the meta device, with the stage's LoRA attached.
    trained
        What trains, as ``component.parameter``.
    size
        Sizes of one sample.
    cfg_above
        A guidance scale above this is classifier-free guidance.
    texts
        Lengths of the run's texts; None: all are as long as ``size`` says.
    """

    modules: Mapping[str, Any]
    trained: Mapping[str, nn.Parameter]
    size: Geometry
    cfg_above: float = 1.0
    texts: TextLengths | None = None
    _counted: dict[tuple[Any, ...], Cost] = field(default_factory=dict)

    @property
    def transformer(self) -> Any:
        """The transformer that a step goes through; where there are two experts, both are alike."""
        return self.modules["transformer"]

    def _forward(self, batch: int, text_tokens: int | None) -> torch.Tensor:
        make = TRANSFORMER_INPUTS[type(self.transformer).__name__]
        inputs = make(self.transformer, self.size.of(batch, text_tokens))
        output: Any = self.transformer(**inputs, return_dict=False)[0]
        return torch.stack(output) if isinstance(output, list) else output

    def step(self, batch: int, passes: Passes, text_tokens: int | None = None) -> Cost:
        """Return the cost of one denoising step without gradient.

        Texts are the longest where ``text_tokens`` does not say how long they are.
        """
        if passes == "sequential":
            return self.step(batch, "one", text_tokens).twice()
        rows = 2 * batch if passes == "batched" else batch
        key = ("step", rows, text_tokens)
        if key not in self._counted:
            self._counted[key] = cost_of_stacks(
                self.transformer,
                lambda: cost_without_grad(lambda: self._forward(rows, text_tokens)),
            )
        return self._counted[key]

    def training_step(
        self, batch: int, passes: Passes, text_tokens: int | None = None, *, checkpointing: bool
    ) -> Cost:
        """Return the cost of one denoising step with its backward pass; nothing if it is frozen."""
        if not self.trained:
            return Cost()
        if passes == "sequential":
            one = self.training_step(batch, "one", text_tokens, checkpointing=checkpointing)
            return one.twice()
        rows = 2 * batch if passes == "batched" else batch
        key = ("training", rows, text_tokens, checkpointing)
        if key not in self._counted:
            own = [p for name, p in self.trained.items() if name.startswith("transformer.")]
            if checkpointing:
                self.transformer.enable_gradient_checkpointing()
            self._counted[key] = cost_of_stacks(
                self.transformer,
                lambda: cost_with_grad(lambda: self._forward(rows, text_tokens), own),
            )
            if checkpointing:
                self.transformer.disable_gradient_checkpointing()
        return self._counted[key]

    def decode(self, batch: int, stage: StageConfig) -> Cost:
        """Return the cost of decoding a batch."""
        vae = self._vae(stage)
        latents = vae_latents(vae, self.size.of(batch))
        key = ("decode", batch, stage.memory.vae_slicing, stage.memory.vae_tiling)
        if key not in self._counted:
            self._counted[key] = cost_without_grad(lambda: vae_decode(vae, latents))
        return self._counted[key]

    def encode(self, batch: int, stage: StageConfig) -> Cost:
        """Return the cost of encoding the first frames of a batch; nothing for an image model."""
        if stage.task != "i2v":
            return Cost()
        vae = self._vae(stage)
        frames = vae_first_frames(vae, self.size.of(batch))
        key = ("encode", batch, stage.memory.vae_slicing, stage.memory.vae_tiling)
        if key not in self._counted:
            self._counted[key] = cost_without_grad(lambda: vae.encode(frames).latent_dist.mode())
        return self._counted[key]

    def _vae(self, stage: StageConfig) -> Any:
        vae = self.modules["vae"]
        vae.use_slicing, vae.use_tiling = stage.memory.vae_slicing, stage.memory.vae_tiling
        return vae

    def text(self) -> Cost:
        """Return the cost of encoding one text with every text encoder, one after the other."""
        costs = [self._text_of(name) for name in self.text_encoders]
        return Cost(sum(c.flops for c in costs), 0, max((c.peak for c in costs), default=0))

    def _text_of(self, name: str) -> Cost:
        encoder = self.modules[name]
        tokens = self.size.text_tokens if self.texts is None else self.texts.encoded
        if encoder.config.model_type == "clip_text_model":
            tokens = encoder.config.max_position_embeddings
        ids = torch.empty((1, tokens), device=META, dtype=torch.long)
        if ("text", name) not in self._counted:
            self._counted["text", name] = cost_without_grad(lambda: encoder(ids)[0])
        return self._counted["text", name]

    def image(self) -> Cost:
        """Return the cost of encoding one image with the image encoder, where there is one."""
        encoder = self.modules.get("image_encoder")
        if encoder is None:
            return Cost()
        side = encoder.config.image_size
        pixels = torch.empty((1, 3, side, side), device=META, dtype=encoder.dtype)
        if ("image",) not in self._counted:
            self._counted["image",] = cost_without_grad(lambda: encoder(pixels)[0])
        return self._counted["image",]

    @property
    def text_encoders(self) -> list[str]:
        """Names of the text encoders."""
        return [name for name in self.modules if name.startswith("text_encoder")]

    def embedding_bytes(self) -> int:
        """Return the bytes of one text's embeddings, on average."""
        make = TRANSFORMER_INPUTS[type(self.transformer).__name__]
        tokens = None if self.texts is None else self.texts.usual(1)
        return text_bytes(make(self.transformer, self.size.of(1, tokens)))


def passes_of(stage: StageConfig, model: StageModel) -> Passes:
    """Return how many forward passes a step of the stage takes, and how."""
    if stage.guidance is not None:
        guided = stage.guidance is GuidanceMode.CFG
    elif model.transformer.config.get("guidance_embeds", False):
        guided = False
    else:
        guided = stage.guidance_scale is not None and stage.guidance_scale > model.cfg_above
    return stage.cfg_batching if guided else "one"
