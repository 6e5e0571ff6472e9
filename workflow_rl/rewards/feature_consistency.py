"""How alike the frames of a video are to a vision network."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.pixels import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    normalise,
    resize_uint8,
    to_uint8,
)
from workflow_rl.rewards.weights import Lazy, load_pretrained, pick_device, pick_dtype


def imagenet_pixels(images_BCHW: Tensor, size: int) -> Tensor:
    """Shorter side to ``size`` (bilinear, without a crop) and normalised, as VBench does."""
    height, width = images_BCHW.shape[2:]
    short = min(height, width)
    new = (int(size * height / short), int(size * width / short))
    resized_BCHW = resize_uint8(to_uint8(images_BCHW), new, "bilinear", antialias=False)
    return normalise(resized_BCHW, IMAGENET_MEAN, IMAGENET_STD)


class Features:
    """The [CLS] vector of DINO or DINOv2, of length 1.

    Parameters
    ----------
    model : str
        Folder or hub name.
    size : int
        Shorter side in pixels.
    """

    def __init__(
        self, model: str, size: int, device: str | None, dtype: str, batch_size: int
    ) -> None:
        self.source = model
        self.size = size
        self.device = pick_device(device)
        self.dtype = pick_dtype(dtype, self.device)
        self.batch_size = batch_size
        self.model = Lazy(self._load)

    def _load(self) -> nn.Module:
        from transformers import AutoModel

        model: nn.Module = load_pretrained(AutoModel, self.source, unused=[r"^pooler\."])
        return model.to(self.device, self.dtype)

    def __call__(self, video_CTHW: Tensor) -> Tensor:
        """Features of the frames, float32 ``[T, D]`` on the CPU."""
        model = self.model.get()
        # DINOv2 fits its position codes to any size by itself; ViT must be told.
        fit = {"interpolate_pos_encoding": True} if model.config.model_type == "vit" else {}  # type: ignore[union-attr]
        features = []
        for frames_BCHW in video_CTHW.movedim(1, 0).split(self.batch_size):
            pixels_BCHW = imagenet_pixels(frames_BCHW, self.size).to(self.device, self.dtype)
            hidden_BLD = model(pixel_values=pixels_BCHW, **fit).last_hidden_state
            features.append(F.normalize(hidden_BLD[:, 0].float(), dim=-1).cpu())
        return torch.cat(features)


class SubjectConsistency:
    """Mean similarity of each frame to the one before and to the first, in [0, 1].

    ½·[max(0, cos(f_t, f_{t−1})) + max(0, cos(f_t, f_1))], mean over t ≥ 2, of DINO features:
    VBench's subject consistency (Huang et al. 2023, arXiv 2311.17982). Higher keeps the subject;
    a frozen video scores 1, so pair it with a reward of motion.

    Parameters
    ----------
    model : str
        Folder or hub name of a DINO or DINOv2 network; VBench's is ``facebook/dino-vitb16``.
    size, device, dtype, batch_size
        Shorter side in pixels; where the network runs (None: a GPU where there is one) and in
        which precision; frames per call.
    """

    name = "subject_consistency"
    media_kind = "video"

    def __init__(
        self,
        model: str = "facebook/dino-vitb16",
        size: int = 224,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        self.features = Features(model, size, device, dtype, batch_size)

    def load(self) -> None:
        """Load the network."""
        self.features.model.get()

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score ``videos_BCTHW``; a video of one frame fails."""
        return RewardScores(torch.stack([self._score(video) for video in batch.media]))

    def _score(self, video_CTHW: Tensor) -> Tensor:
        features_TD = _several(self.features, video_CTHW)
        to_previous = (features_TD[1:] * features_TD[:-1]).sum(1).clamp(min=0)
        to_first = (features_TD[1:] @ features_TD[0]).clamp(min=0)
        return (to_previous + to_first).mean() / 2


class FirstFrameConsistency:
    """Cosine similarity of later frames to the first, in [−1, 1]; higher keeps the first frame.

    Where a video begins with a given image, this is how well it keeps to that image. Features are
    DINOv2's (Oquab et al. 2023, arXiv 2304.07193). A frozen video scores 1, so pair it with a
    reward of motion.

    Parameters
    ----------
    reduce : {"mean", "min"}
        Over the later frames.
    model, size, device, dtype, batch_size
        As for :class:`SubjectConsistency`.
    """

    name = "first_frame_consistency"
    media_kind = "video"

    def __init__(
        self,
        reduce: Literal["mean", "min"] = "mean",
        model: str = "facebook/dinov2-base",
        size: int = 224,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        if reduce not in ("mean", "min"):
            raise UserError(f"reduce is {reduce!r}: give mean or min")
        self.reduce = reduce
        self.features = Features(model, size, device, dtype, batch_size)

    def load(self) -> None:
        """Load the network."""
        self.features.model.get()

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score ``videos_BCTHW``; a video of one frame fails."""
        return RewardScores(torch.stack([self._score(video) for video in batch.media]))

    def _score(self, video_CTHW: Tensor) -> Tensor:
        features_TD = _several(self.features, video_CTHW)
        to_first = features_TD[1:] @ features_TD[0]
        return to_first.amin() if self.reduce == "min" else to_first.mean()


def _several(features: Features, video_CTHW: Tensor) -> Tensor:
    """Features of a video of two frames or more."""
    if video_CTHW.shape[1] < 2:
        raise ValueError("a video of one frame cannot be compared with itself")
    return features(video_CTHW)
