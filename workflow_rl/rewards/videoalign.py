"""VideoAlign: visual quality, motion quality and text alignment of a video, by Qwen2-VL-2B."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.pixels import resize_uint8, to_uint8
from workflow_rl.rewards.prompt_template import read_template
from workflow_rl.rewards.qwen_vl import (
    EMBEDDING,
    LORA,
    QwenReader,
    merge_lora,
    rename,
    smart_resize,
)
from workflow_rl.rewards.weights import (
    Lazy,
    load_pretrained,
    pick_device,
    pick_dtype,
    read_tensors,
    weight_file,
)

DIMENSIONS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS)
TEMPLATE = ("DETAILED_PROMPT_WITH_SPECIAL_TOKEN",)
MIN_PIXELS = 128 * 28 * 28
MAX_PIXELS = 256 * 28 * 28
FPS = 2.0
MAX_FRAMES = 768
NORMS = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
"""Mean and standard deviation of each score over the authors' data."""

HEAD = "rm_head.weight"


def frame_positions(length: int, video_fps: float, fps: float) -> list[int]:
    """Frames to look at: ``fps`` a second, evenly, an even number and at least 4 if there are.

    ``smart_nframes`` of ``vision_process.py`` as of the end of 2024, which rounds to the nearest
    even number; the one in today's ``qwen-vl-utils`` rounds down.

    Raises
    ------
    ValueError
        Fewer than 2 frames.
    """
    if length < 2:
        raise ValueError("VideoAlign needs a video of 2 frames or more")
    most = min(length, MAX_FRAMES) // 2 * 2
    wanted = min(max(length / video_fps * fps, 4), most)
    count = min(round(wanted / 2) * 2, most)
    positions: list[int] = torch.linspace(0, length - 1, count).round().long().tolist()
    return positions


@dataclass(frozen=True)
class FrameRules:
    """Which frames of a video are shown, and how large.

    Attributes
    ----------
    fps : float
        Frames a second.
    max_pixels : int
        Of a frame, at most.
    """

    fps: float
    max_pixels: int


@dataclass(frozen=True)
class _Loaded:
    """What a reward reads videos with."""

    reader: QwenReader
    head_KD: Tensor
    norms: dict[str, tuple[float, float]]
    template: str
    frames: FrameRules


def head_scores(hidden_3D: Tensor, head_KD: Tensor) -> Tensor:
    """Raw VQ, MQ and TA: each token by its own row of the head, or all by the one row."""
    scores_3K = hidden_3D @ head_KD.T
    return scores_3K.diagonal() if len(head_KD) == 3 else scores_3K[:, 0]


class VideoAlign:
    """Sum of visual quality (VQ), motion quality (MQ) and text alignment (TA); higher is better.

    Liu et al. 2025 (arXiv 2501.13918), also called VideoReward. Each part is in standard deviations
    of the authors' data, about −0.5 to 0.5 for today's models, and a component of its own. More
    frames score higher: compare videos of one length and frame rate. Under optimisation VQ makes
    animation and dotted textures.

    Parameters
    ----------
    checkpoint : str
        Folder with ``model_config.json`` and ``checkpoint-<n>/``; its ``.pth`` files converted to
        safetensors, see docs/rewards.md.
    template : str or None
        File with the text that the prompt is read in: ``prompt_template.py`` of VideoAlign.
    base : str
        Folder or hub name of Qwen2-VL-2B-Instruct.
    weights : mapping of str to float or None
        Factors of VQ, MQ and TA in the sum; those left out count 0. None: each counts 1.
    fps : float or None
        Frames a second that it looks at; None: as the checkpoint was trained, 2 where published.
    device, dtype
        Where the network runs and in which precision; None: a GPU in bfloat16, or the CPU in
        float32. The head is in float32.
    """

    name = "videoalign"
    media_kind = "video"

    def __init__(
        self,
        checkpoint: str = "VideoReward",
        template: str | None = None,
        base: str = "Qwen/Qwen2-VL-2B-Instruct",
        weights: Mapping[str, float] | None = None,
        fps: float | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        self.weights = dict.fromkeys(DIMENSIONS, 1.0) if weights is None else dict(weights)
        if not self.weights or not self.weights.keys() <= set(DIMENSIONS):
            raise UserError(f"weights names {', '.join(self.weights)}: give some of VQ, MQ, TA")
        self.checkpoint = Path(checkpoint).expanduser()
        self.template = template
        self.base = base
        self.fps = fps
        self.device = pick_device(device)
        self.dtype = pick_dtype(dtype, self.device)
        self.loaded = Lazy(self._load)

    def load(self) -> None:
        """Load the network, its head and the template."""
        self.loaded.get()

    def _load(self) -> "_Loaded":
        if self.template is None:
            raise UserError(
                "VideoAlign reads the prompt in a text of its authors: set template to the file "
                "prompt_template.py of github.com/KwaiVGI/VideoAlign"
            )
        template = read_template(self.template, TEMPLATE, TOKENS)
        config = read_config(self.checkpoint)
        frames = read_frames(config)
        if self.fps is not None:
            frames = replace(frames, fps=self.fps)
        state = read_checkpoint(self.checkpoint, config, self.base)
        head_KD = state.pop(HEAD, None)
        if head_KD is None or len(head_KD) not in (1, 3) or not head_KD.isfinite().all():
            raise UserError(f"{self.checkpoint} has no {HEAD} of 1 or 3 rows: download it again")
        reader = QwenReader.load(self.base, state, TOKENS, self.device, self.dtype)
        if head_KD.shape[1] != reader.model.config.text_config.hidden_size:
            raise UserError(f"{self.checkpoint}: {HEAD} does not fit {self.base}")
        return _Loaded(reader, head_KD.float(), read_norms(config), template, frames)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score ``videos_BCTHW``; without ``fps`` the batch fails."""
        loaded = self.loaded.get()
        if batch.fps is None:
            raise ValueError("VideoAlign needs the frames per second of the video")
        rows = []
        for video_CTHW, prompt in zip(batch.media, batch.prompts, strict=True):
            frames_TCHW = video_frames(video_CTHW, batch.fps, loaded.frames)
            hidden_3D = loaded.reader.read(frames_TCHW, "video", loaded.template, prompt)
            rows.append(head_scores(hidden_3D, loaded.head_KD))
        parts = {
            name: (raw_B - loaded.norms[name][0]) / loaded.norms[name][1]
            for name, raw_B in zip(DIMENSIONS, torch.stack(rows).unbind(1), strict=True)
        }
        total = torch.stack([factor * parts[name] for name, factor in self.weights.items()]).sum(0)
        return RewardScores(total, components=parts)


def video_frames(video_CTHW: Tensor, video_fps: float, frames: FrameRules) -> Tensor:
    """The frames that the network sees, on its grid (bicubic), uint8 ``[T, 3, H, W]``."""
    positions = frame_positions(video_CTHW.shape[1], video_fps, frames.fps)
    frames_TCHW = to_uint8(video_CTHW[:, positions].movedim(1, 0))
    height, width = frames_TCHW.shape[2:]
    size = smart_resize(height, width, MIN_PIXELS, frames.max_pixels)
    return resize_uint8(frames_TCHW, size, "bicubic", antialias=True)


def read_config(folder: Path) -> dict[str, Any]:
    """``model_config.json`` of a checkpoint.

    Raises
    ------
    UserError
        It is not there or not what this reward reads.
    """
    path = folder / "model_config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind = config["data_config"]["prompt_template_type"]
        lora = config["peft_lora_config"]
        if not {"lora_r", "lora_alpha"} <= lora.keys():
            raise KeyError("lora_r, lora_alpha")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error!r}): give the checkpoint's folder"
        ) from error
    if kind != "detailed_special":
        raise UserError(f"{path} has the template {kind!r}: only detailed_special can be read")
    return config


def read_frames(config: Mapping[str, Any]) -> FrameRules:
    """How the checkpoint was shown frames: its ``data_config``, else the published values.

    Raises
    ------
    UserError
        It was shown a fixed number of frames, or others than evenly spaced ones.
    """
    data = config["data_config"]
    kind, count = data.get("sample_type", "uniform"), data.get("num_frames")
    fps, pixels = data.get("fps", FPS), data.get("max_frame_pixels", MAX_PIXELS)
    if kind != "uniform" or count is not None:
        raise UserError(
            f"model_config.json has sample_type {kind!r} and num_frames {count}: only evenly "
            f"spaced frames by fps (uniform and null) can be shown"
        )
    if not all(isinstance(number, int | float) and number > 0 for number in (fps, pixels)):
        raise UserError(
            f"model_config.json has fps {fps!r} and max_frame_pixels {pixels!r}: download it again"
        )
    return FrameRules(float(fps), int(pixels))


def read_norms(config: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each part: the checkpoint's, else the published ones."""
    given = config.get("inference_config")
    if not given:
        return dict(NORMS)
    return {name: (float(given[f"{name}_mean"]), float(given[f"{name}_std"])) for name in NORMS}


def read_checkpoint(folder: Path, config: Mapping[str, Any], base: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint, LoRA merged, under the names of ``Qwen2VLModel``.

    The newest ``checkpoint-<n>/`` holds ``model.safetensors``, or ``adapter_model.safetensors``
    with ``adapter_config.json`` and ``non_lora_state_dict.safetensors`` on top of the weights of
    ``base``. Only what was frozen in training comes from ``base``.

    Parameters
    ----------
    config : mapping
        What :func:`read_config` returned.

    Raises
    ------
    UserError
        It holds neither, or the second without a tensor that was trained.
    """
    steps = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not steps:
        raise UserError(f"{folder} has no folder checkpoint-<n>: give the checkpoint's folder")
    lora = config["peft_lora_config"]
    rank, alpha = lora["lora_r"], lora["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if lora.get("use_rslora") else rank)
    if (steps[-1] / "model.safetensors").is_file():
        return merge_lora(rename(read_tensors(steps[-1] / "model.safetensors")), scale)
    from transformers import Qwen2VLModel

    files = ("non_lora_state_dict.safetensors", "adapter_model.safetensors")
    paths = [weight_file(str(steps[-1] / file)) for file in files]
    targets = read_targets(steps[-1] / "adapter_config.json")
    model = load_pretrained(Qwen2VLModel, base, unused=[r"^lm_head\."])
    trained: dict[str, Tensor] = {}
    for path in paths:
        trained |= rename(read_tensors(path))
    check_trained(steps[-1], trained, trained_in_full(model, config))
    check_lora(steps[-1], trained, lora_layers(model, targets), rank)
    return merge_lora(dict(model.state_dict()) | trained, scale)


def read_targets(path: Path) -> str | list[str]:
    """``target_modules`` of PEFT's ``adapter_config.json``: names or their ends, or one pattern.

    Raises
    ------
    UserError
        The file is not there, or says nothing of the kind.
    """
    try:
        targets = json.loads(path.read_text(encoding="utf-8"))["target_modules"]
        if isinstance(targets, str):
            re.compile(targets)
            return targets
        return [str(target) for target in targets]
    except (OSError, ValueError, KeyError, TypeError, re.error) as error:
        raise UserError(
            f"{path} does not say which layers have a LoRA ({error!r}): download it again, "
            f"next to adapter_model.safetensors"
        ) from error


def lora_layers(model: nn.Module, targets: str | list[str]) -> dict[str, tuple[int, int]]:
    """Linear layers of ``Qwen2VLModel`` that ``targets`` name, with their inputs and outputs.

    By PEFT's rule: a list names modules or ends of their names, a text is a regular expression for
    the whole name. The names are those in the authors' model, of before transformers 4.52 or since.
    """

    def is_target(name: str) -> bool:
        names = (re.sub(r"^language_model\.", "model.", name), f"model.{name}")
        if isinstance(targets, str):
            return any(re.fullmatch(targets, alias) for alias in names)
        return any(f".{alias}".endswith(f".{target}") for alias in names for target in targets)

    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_target(name)
    }


def trained_in_full(model: nn.Module, config: Mapping[str, Any]) -> list[str]:
    """Tensors that a checkpoint with LoRA must hold whole, by the authors' ``train_reward.py``.

    The head; the embeddings, as ``base`` has none of the special tokens; and of the vision tower
    what was neither frozen nor given a LoRA: in the published recipe, all of it.
    """
    names = [HEAD, EMBEDDING]
    if config["peft_lora_config"].get("vision_lora"):
        return names
    recipe = config.get("model_config") or {}
    tower = not recipe.get("freeze_vision_tower", False)
    merger = recipe.get("tune_merger", tower)
    return names + [
        name
        for name, _ in model.named_parameters()
        if name.startswith("visual.") and (merger if ".merger." in name else tower)
    ]


def check_trained(step: Path, trained: Mapping[str, Tensor], names: list[str]) -> None:
    """Raise a UserError that names the first tensor that was trained in full and is missing."""
    for name in names:
        if name not in trained:
            raise UserError(
                f"{step} lacks {name}, which was trained and is not in the base model: download "
                f"and convert non_lora_state_dict again"
            )


def check_lora(
    step: Path, trained: Mapping[str, Tensor], layers: Mapping[str, tuple[int, int]], rank: int
) -> None:
    """Raise a UserError unless each of ``layers``, and no other, has its A and B of ``rank``."""
    wanted: dict[str, tuple[int, int]] = {}
    for layer, (inputs, outputs) in layers.items():
        wanted |= {f"{layer}.A": (rank, inputs), f"{layer}.B": (outputs, rank)}
    if not wanted:
        raise UserError(
            f"{step}: target_modules of adapter_config.json name no layer of the base model: "
            f"give the base it was made from, or download adapter_config.json again"
        )
    halves = {
        f"{match[1]}.{match[2]}": tensor
        for name, tensor in trained.items()
        if (match := LORA.fullmatch(name))
    }
    mend = "download adapter_model.safetensors and adapter_config.json again"
    for half, shape in wanted.items():
        layer, which = half.rsplit(".", 1)
        if half not in halves:
            raise UserError(f"{step} lacks {layer}.lora_{which}.weight: {mend}")
        if halves[half].shape != shape:
            raise UserError(
                f"{step}: {layer}.lora_{which}.weight has shape {tuple(halves[half].shape)}, "
                f"the layer needs {shape}: {mend}"
            )
    for half in sorted(halves.keys() - wanted.keys()):
        layer, which = half.rsplit(".", 1)
        raise UserError(
            f"{step} has {layer}.lora_{which}.weight, of no layer that adapter_config.json "
            f"names: {mend}"
        )
