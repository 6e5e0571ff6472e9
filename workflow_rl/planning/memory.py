"""The bytes of one stage: what it holds, and the peak of each phase of its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from workflow_rl.config import StageConfig
from workflow_rl.instance import DEFAULT_CACHE_BYTES
from workflow_rl.planning.costs import StageModel, passes_of
from workflow_rl.planning.modules import POLICIES, num_bytes
from workflow_rl.planning.work import Work

FLOAT32 = 4
CHECKSUM = 24
"""Bytes per value of the tensor whose checksum is taken (``weights_checksum``): words, positions
and their product, each in 64 bits."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage; all are on the GPU, but for ``trajectories`` and media.

    Parameters
    ----------
    weights
        By component, without the text encoders where they are dropped.
    dropped
        Text encoders that are there when the run starts, and dropped then.
    reference
        A frozen copy of the transformers, which a LoRA needs none of.
    masters
        float32 copies of what trains in 16 bits.
    optimizer
        AdamW's two moments.
    ema
        The average of what trains.
    embeddings
        Cached text embeddings; they stay on the GPU while the stage sleeps.
    gradients
        Of what trains, until the optimiser steps.
    optimizer_step
        float32 gradients of 16-bit weights, and AdamW's working copy.
    kept_plain, kept_checkpointed
        What autograd keeps between the forward and the backward pass of one step, without and with
        gradient checkpointing.
    peak_plain, peak_checkpointed
        The most that one step's forward and backward pass holds, the kept included.
    activations
        That of the two which the configuration has.
    rollout, decode, encode
        Peak of a forward pass without gradient, of decoding and of encoding a batch.
    text
        Peak of encoding one text.
    evaluation, evaluation_copy
        Peak of rollout, decoding or encoding at the evaluation's batch size, and the student's
        weights that wait while averaged ones are evaluated.
    checksum, transfer
        Peak of the checksum of what is published, and of publishing averaged weights: what they
        replace is kept until they have arrived whole.
    loading
        The reference as it is loaded, before all but its transformers is dropped.
    captured
        The part of the trajectories that is a batch's, which is on the GPU while it is made.
    trajectories, media
        What an iteration keeps in the CPU's memory.
    joining
        What is there twice, for a moment, when it is made in several batches: a batch's media, or
        the trajectories.
    evaluation_media, evaluation_joining
        What an evaluation keeps there, and what of it is there twice.
    """

    weights: Mapping[str, int]
    dropped: int
    reference: int
    masters: int
    optimizer: int
    ema: int
    embeddings: int
    gradients: int
    optimizer_step: int
    kept_plain: int
    kept_checkpointed: int
    peak_plain: int
    peak_checkpointed: int
    activations: int
    rollout: int
    decode: int
    encode: int
    text: int
    evaluation: int
    evaluation_copy: int
    checksum: int
    transfer: int
    loading: int
    captured: int
    trajectories: int
    media: int
    joining: int
    evaluation_media: int
    evaluation_joining: int

    @property
    def resident(self) -> int:
        """Bytes that stay from iteration to iteration, without the embeddings."""
        held = sum(self.weights.values()) + self.reference + self.masters
        return held + self.optimizer + self.ema

    @property
    def phases(self) -> dict[str, int]:
        """Peak bytes beyond `resident`, by phase of the stage's work."""
        return {
            "start": self.dropped + max(self.text, self.loading),
            "evaluation": max(self.evaluation, self.transfer) + self.evaluation_copy,
            "encode": max(self.encode, self.text),
            "rollout": self.captured + self.rollout,
            "decode": self.captured + self.decode,
            "training": self.gradients + self.activations,
            "optimizer": self.gradients + self.optimizer_step,
            "publication": self.checksum,
        }

    @property
    def peak(self) -> int:
        """Peak bytes of the stage alone, without the embeddings."""
        return self.resident + max(self.phases.values())


def stage_memory(
    stage: StageConfig, model: StageModel, work: Work, weights_evaluated: str
) -> StageMemory:
    """Return the bytes of one stage.

    Parameters
    ----------
    work
        What an iteration does.
    weights_evaluated
        ``student`` or ``ema``.
    """
    weights = {name: num_bytes(module) for name, module in model.modules.items()}
    everything = sum(weights.values())
    dropped = 0
    if stage.memory.drop_text_encoders:
        dropped = sum(weights.pop(name) for name in model.text_encoders)
    reference = sum(weights[name] for name in POLICIES if name in weights)
    if not work.with_reference or stage.lora is not None:
        reference = 0
    trained = list(model.trained.values())
    count = sum(p.numel() for p in trained)
    own = sum(p.numel() * p.element_size() for p in trained)
    sixteen_bit = sum(p.numel() for p in trained if p.element_size() < FLOAT32)
    passes = passes_of(stage, model)
    plain = model.training_step(work.training_batch, passes, checkpointing=False)
    checkpointed = model.training_step(work.training_batch, passes, checkpointing=True)
    used = checkpointed if stage.memory.gradient_checkpointing else plain
    checksum = CHECKSUM * max((p.numel() for p in trained), default=0)
    rounded = sum(p.numel() * p.element_size() for p in trained if p.element_size() < FLOAT32)
    size = model.size
    one = 3 * size.frames * size.height * size.width * FLOAT32
    trajectories = _trajectories(model, work)
    captured = trajectories * work.rollout_batch // work.samples
    uses_copy = weights_evaluated == "ema" and not stage.freeze
    return StageMemory(
        weights=weights,
        dropped=dropped,
        reference=reference,
        masters=FLOAT32 * sixteen_bit,
        optimizer=2 * FLOAT32 * count,
        ema=FLOAT32 * count if stage.ema.decay is not None and trained else 0,
        embeddings=_embeddings(stage, work.texts_cached * model.embedding_bytes()),
        gradients=own,
        optimizer_step=FLOAT32 * (sixteen_bit + count),
        kept_plain=plain.kept,
        kept_checkpointed=checkpointed.kept,
        peak_plain=plain.peak,
        peak_checkpointed=checkpointed.peak,
        activations=used.peak,
        rollout=model.step(work.rollout_batch, passes).peak,
        decode=model.decode(work.rollout_batch, stage).peak,
        encode=_encode_peak(stage, model, min(work.rollout_batch, work.conditions)),
        text=model.text().peak,
        evaluation=_evaluation_peak(stage, model, work.evaluation_batch),
        evaluation_copy=own if uses_copy else 0,
        checksum=checksum,
        transfer=own + rounded + checksum if uses_copy else 0,
        loading=everything if reference else 0,
        captured=captured,
        trajectories=trajectories,
        media=work.samples * one,
        joining=_joining(work.samples, work.rollout_batch, one, trajectories),
        evaluation_media=work.evaluated * one,
        evaluation_joining=_joining(work.evaluated, work.evaluation_batch, one, 0),
    )


def _joining(samples: int, batch: int, one: int, trajectories: int) -> int:
    return max(batch * one, trajectories) if samples > batch else 0


def _embeddings(stage: StageConfig, total: int) -> int:
    """Return the bytes of cached embeddings: all where they can't be made again, else bounded."""
    if stage.memory.drop_text_encoders and stage.memory.embedding_cache is False:
        return total
    return min(total, DEFAULT_CACHE_BYTES)


def _encode_peak(stage: StageConfig, model: StageModel, batch: int) -> int:
    if stage.task != "i2v":
        return 0
    return max(model.encode(max(1, batch), stage).peak, model.image().peak)


def _evaluation_peak(stage: StageConfig, model: StageModel, batch: int) -> int:
    passes = passes_of(stage, model)
    return max(
        model.step(batch, passes).peak,
        model.decode(batch, stage).peak,
        _encode_peak(stage, model, batch),
    )


def _trajectories(model: StageModel, work: Work) -> int:
    """Return the bytes of an iteration's behaviour record, float32.

    Of T trained steps it holds the T + 1 states around them and T means; of a first frame its
    latents, or what of the transformer's input is not the state.
    """
    latents = torch.Size(model.size.latent_CTHW).numel() * FLOAT32
    states = 2 * work.trained_steps + 1 if work.trained_steps else 0
    total = work.samples * states * latents
    if work.conditions:
        channels, _, rows, columns = model.size.latent_CTHW
        extra = int(model.transformer.config.in_channels) - channels
        one_frame = channels * rows * columns * FLOAT32
        total += work.conditions * (latents // channels * extra if extra > 0 else one_frame)
    return total
