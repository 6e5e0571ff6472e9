"""VideoAlign: visual quality, motion quality and text alignment of a video, by Qwen2-VL-2B."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.pixels import resize_uint8, to_uint8
from workflow_rl.rewards.prompt_template import read_template
from workflow_rl.rewards.qwen_vl import QwenReader, merge_lora, rename, smart_resize
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
NORMS = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
"""Mean and standard deviation of each score over the authors' data."""

HEAD = "rm_head.weight"


def frame_positions(length: int, video_fps: float, fps: float) -> list[int]:
    """Frames to look at: ``fps`` a second, evenly, an even number and at least 4 if there are.

    Raises
    ------
    ValueError
        Fewer than 2 frames.
    """
    if length < 2:
        raise ValueError("VideoAlign needs a video of 2 frames or more")
    most = length // 2 * 2
    wanted = min(max(length / video_fps * fps, 4), most)
    count = min(round(wanted / 2) * 2, most)
    positions: list[int] = torch.linspace(0, length - 1, count).round().long().tolist()
    return positions


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
    fps : float
        Frames a second that it looks at.
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
        fps: float = 2.0,
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

    def _load(self) -> tuple[QwenReader, Tensor, dict[str, tuple[float, float]], str]:
        if self.template is None:
            raise UserError(
                "VideoAlign reads the prompt in a text of its authors: set template to the file "
                "prompt_template.py of github.com/KwaiVGI/VideoAlign"
            )
        template = read_template(self.template, TEMPLATE, TOKENS)
        config = read_config(self.checkpoint)
        state = read_checkpoint(self.checkpoint, config["peft_lora_config"], self.base)
        head_KD = state.pop(HEAD, None)
        if head_KD is None or len(head_KD) not in (1, 3) or not head_KD.isfinite().all():
            raise UserError(f"{self.checkpoint} has no {HEAD} of 1 or 3 rows: download it again")
        reader = QwenReader.load(self.base, state, TOKENS, self.device, self.dtype)
        if head_KD.shape[1] != reader.model.config.text_config.hidden_size:
            raise UserError(f"{self.checkpoint}: {HEAD} does not fit {self.base}")
        return reader, head_KD.float(), read_norms(config), template

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score ``videos_BCTHW``; without ``fps`` the batch fails."""
        reader, head_KD, norms, template = self.loaded.get()
        if batch.fps is None:
            raise ValueError("VideoAlign needs the frames per second of the video")
        rows = []
        for video_CTHW, prompt in zip(batch.media, batch.prompts, strict=True):
            frames_TCHW = video_frames(video_CTHW, batch.fps, self.fps)
            rows.append(head_scores(reader.read(frames_TCHW, "video", template, prompt), head_KD))
        parts = {
            name: (raw_B - norms[name][0]) / norms[name][1]
            for name, raw_B in zip(DIMENSIONS, torch.stack(rows).unbind(1), strict=True)
        }
        total = torch.stack([factor * parts[name] for name, factor in self.weights.items()]).sum(0)
        return RewardScores(total, components=parts)


def video_frames(video_CTHW: Tensor, video_fps: float, fps: float) -> Tensor:
    """The frames that the network sees, on its grid (bicubic), uint8 ``[T, 3, H, W]``."""
    positions = frame_positions(video_CTHW.shape[1], video_fps, fps)
    frames_TCHW = to_uint8(video_CTHW[:, positions].movedim(1, 0))
    height, width = frames_TCHW.shape[2:]
    size = smart_resize(height, width, MIN_PIXELS, MAX_PIXELS)
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


def read_norms(config: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each part: the checkpoint's, else the published ones."""
    given = config.get("inference_config")
    if not given:
        return dict(NORMS)
    return {name: (float(given[f"{name}_mean"]), float(given[f"{name}_std"])) for name in NORMS}


def read_checkpoint(folder: Path, lora: Mapping[str, Any], base: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint, LoRA merged, under the names of ``Qwen2VLModel``.

    The newest ``checkpoint-<n>/`` holds ``model.safetensors``, or ``adapter_model.safetensors``
    and ``non_lora_state_dict.safetensors`` on top of the weights of ``base``.

    Raises
    ------
    UserError
        It holds neither.
    """
    steps = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not steps:
        raise UserError(f"{folder} has no folder checkpoint-<n>: give the checkpoint's folder")
    rank, alpha = lora["lora_r"], lora["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if lora.get("use_rslora") else rank)
    if (steps[-1] / "model.safetensors").is_file():
        return merge_lora(rename(read_tensors(steps[-1] / "model.safetensors")), scale)
    from transformers import Qwen2VLModel

    files = ("non_lora_state_dict.safetensors", "adapter_model.safetensors")
    paths = [weight_file(str(steps[-1] / file)) for file in files]
    state = dict(load_pretrained(Qwen2VLModel, base, unused=[r"^lm_head\."]).state_dict())
    for path in paths:
        state |= rename(read_tensors(path))
    return merge_lora(state, scale)
