"""One typed generation job: what to make, by which task, and which sample it is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, get_args

import torch

from workflow_rl.enums import CFGBatching, GuidanceMode, Sampler, SDEKind
from workflow_rl.errors import UserError


class TaskType(StrEnum):
    """What a request turns into what. Declared by the caller, never guessed from the inputs."""

    T2I = "t2i"
    I2V = "i2v"
    T2V = "t2v"


@dataclass(frozen=True)
class SampleId:
    """Who a sample is. Its noise depends on this and on nothing else.

    Parameters
    ----------
    run_seed
        Seed of the run, or of one evaluation or ``generate`` call.
    prompt
        The prompt of the chain (not a stage's own text), so that all stages of one sample agree.
    path
        Position in the tree below the prompt: ``(i,)`` is image i, ``(i, j)`` video j of image i.
        Where the image is a given first frame, i is the digest of its file.
    draw
        Which visit of the prompt this is: a prompt that comes back in a later iteration draws
        fresh noise.
    """

    run_seed: int
    prompt: str
    path: tuple[int, ...]
    draw: int = 0

    def child(self, index: int) -> SampleId:
        """Return the identity of the ``index``-th sample made from this one."""
        return replace(self, path=(*self.path, index))

    def __str__(self) -> str:
        return f"{self.prompt!r}/{'.'.join(map(str, self.path))} (seed {self.run_seed}.{self.draw})"


@dataclass(frozen=True)
class DiffusionParams:
    """Sampling parameters of one request.

    Parameters
    ----------
    num_inference_steps
        Denoising steps n; the schedule has n + 1 sigmas.
    guidance
        How the scale acts. None: as the checkpoint has it (classifier-free where the scale asks
        for it).
    guidance_scale
        None: the family's neutral value (no classifier-free guidance; 3.5 where it is embedded).
    guidance_scale_2
        Scale of the second expert of a model that has two. None: ``guidance_scale``.
    cfg_batching
        How classifier-free guidance runs its two passes; equal up to rounding.
    cfg_normalization
        Cap on the norm of a guided velocity, over that under the prompt alone; Z-Image only. None:
        no cap.
    cfg_truncation
        Guidance stops where 1 - sigma is above this; Z-Image only. None: never.
    sampler
        ``euler`` takes our Euler steps; ``checkpoint`` serves with the folder's own scheduler.
    height, width
        Pixels. None: what the checkpoint declares, or the size of the conditioning image.
    num_frames
        Frames of a video; ignored by image tasks.
    fps
        Frames per second at which a video plays. None: the family's rate.
    max_sequence_length
        Text tokens. None: the tokenizer's ``model_max_length``, at most 512.
    sde_kind, sde_noise_scale
        The SDE of the stochastic steps and its noise scale a; used in ``ROLLOUT`` only.
    sde_steps
        Indices of the steps that are stochastic in ``ROLLOUT``. The last step never is.
    kernel
        Name of the ``FLOW_SDE_STEP`` kernel. None: the platform's choice.
    """

    num_inference_steps: int = 6
    guidance: GuidanceMode | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    cfg_batching: CFGBatching = "sequential"
    cfg_normalization: float | None = None
    cfg_truncation: float | None = None
    sampler: Sampler = "euler"
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: float | None = None
    max_sequence_length: int | None = None
    sde_kind: str = "flow_sde"
    sde_noise_scale: float = 0.7
    sde_steps: tuple[int, ...] = ()
    kernel: str | None = None

    def __post_init__(self) -> None:
        for name, names in (
            ("sde_kind", SDEKind),
            ("cfg_batching", CFGBatching),
            ("sampler", Sampler),
        ):
            value, known = getattr(self, name), get_args(names)
            if value not in known:
                raise UserError(f"{name} is {value!r}; use one of {', '.join(known)}")
        if self.cfg_normalization is not None and self.cfg_normalization <= 0:
            raise UserError(
                f"cfg_normalization is {self.cfg_normalization}; give a number above 0, or leave "
                "it out for no cap"
            )
        if self.num_inference_steps < 1:
            raise UserError(
                f"num_inference_steps is {self.num_inference_steps}; it must be at least 1"
            )
        last = self.num_inference_steps - 1
        outside = [s for s in self.sde_steps if not 0 <= s < last]
        if outside and last == 0:
            raise UserError(
                f"sde_steps is {list(self.sde_steps)}, but with 1 step none can be stochastic "
                "(the last step is deterministic); raise num_inference_steps or leave it empty"
            )
        if outside:
            raise UserError(
                f"sde_steps {outside} cannot be stochastic with {self.num_inference_steps} steps: "
                f"choose from 0 to {last - 1} (the last step is deterministic)"
            )

    def filled(self, defaults: DiffusionParams) -> DiffusionParams:
        """Return these parameters with every None replaced by the value in ``defaults``."""
        missing = {
            f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None
        }
        return replace(self, **missing)


@dataclass(frozen=True)
class Request:
    """One generation job. Build it with :func:`make_request`.

    ``image_CHW`` is the conditioning image in [0, 1] (``I2V`` only); requests made from the same
    image hold the same tensor object, so that it is encoded once. ``latents`` overrides the
    initial noise (shape: the adapter's ``latent_shape``); ``stage`` names the stage in the noise
    identity.
    """

    task: TaskType
    prompt: str
    sample: SampleId
    params: DiffusionParams = field(default_factory=DiffusionParams)
    negative_prompt: str | None = None
    image_CHW: torch.Tensor | None = None
    latents: torch.Tensor | None = None
    stage: str = ""


def _task_type(name: TaskType | str) -> TaskType:
    try:
        return TaskType(name)
    except ValueError:
        raise UserError(
            f"there is no task {str(name)!r}; use one of {', '.join(TaskType)}"
        ) from None


def make_request(
    task: TaskType | str,
    prompt: str,
    *,
    seed: int = 0,
    sample: SampleId | None = None,
    params: DiffusionParams | None = None,
    negative_prompt: str | None = None,
    image: torch.Tensor | None = None,
    latents: torch.Tensor | None = None,
    stage: str | None = None,
    **param_fields: Any,
) -> Request:
    """Build a :class:`Request`.

    Parameters
    ----------
    task
        ``t2i``, ``i2v`` or ``t2v``.
    prompt
        Text for this model.
    seed, sample
        Identity of the sample; ``sample`` wins, else ``SampleId(seed, prompt, (0,))``.
    params, param_fields
        Sampling parameters, whole or by field (``num_inference_steps=6``); not both.
    image
        [C, H, W] in [0, 1]; needed by ``i2v`` and refused by the others.
    latents
        Initial latents [*latent_shape]; None draws them from the identity.
    stage
        Name of the stage in the noise identity; None: the task's value.

    Raises
    ------
    UserError
        If the task and the inputs do not fit.
    """
    task = _task_type(task)
    if params is not None and param_fields:
        raise UserError(f"pass params or {sorted(param_fields)}, not both")
    if task is TaskType.I2V and image is None:
        raise UserError("an i2v request needs an image [C, H, W] in [0, 1]; none was given")
    if task is not TaskType.I2V and image is not None:
        raise UserError(f"a {task} request takes no image; declare the task i2v to condition on it")
    if image is not None and (image.ndim != 3 or image.shape[0] != 3):
        raise UserError(f"image must be [3, H, W]; got {tuple(image.shape)}")
    return Request(
        task=task,
        prompt=prompt,
        sample=sample or SampleId(seed, prompt, (0,)),
        params=params or DiffusionParams(**param_fields),
        negative_prompt=negative_prompt,
        image_CHW=image,
        latents=latents,
        stage=stage if stage is not None else task.value,
    )
