"""Whether an image shows the text that its prompt puts in quotes."""

import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores
from workflow_rl.rewards.frames import FrameReduction, FramesArg, score_frames
from workflow_rl.rewards.pixels import to_uint8
from workflow_rl.rewards.weights import Lazy, import_extra

QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”|(?<!\w)\'([^\']+)\'(?!\w)|‘([^’]+)’|「([^」]+)」')
"""Text in quotes; an apostrophe inside a word opens none."""


def quoted_text(prompt: str) -> str:
    """The parts of a prompt in quotes, joined by spaces; empty if there are none."""
    found = (next(filter(None, match.groups())) for match in QUOTED.finditer(prompt))
    return " ".join(found)


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """Insertions, deletions and substitutions between two texts (Levenshtein)."""
    above = list(range(len(second) + 1))
    for row, left in enumerate(first, 1):
        line = [row]
        for column, right in enumerate(second, 1):
            line.append(min(above[column] + 1, line[-1] + 1, above[column - 1] + (left != right)))
        above = line
    return above[-1]


def text_match(read: str, wanted: str) -> float:
    """1 − distance / length of ``wanted``, in [0, 1]; 1 where the text is among what was read.

    Upper and lower case and white space do not count. The formula of Flow-GRPO (arXiv 2505.05470).
    """
    read, wanted = ("".join(text.lower().split()) for text in (read, wanted))
    if wanted in read:
        return 1.0
    return 1.0 - min(edit_distance(read, wanted), len(wanted)) / len(wanted)


class OcrTextMatch:
    """How well the text in an image matches the one in quotes in the prompt, in [0, 1].

    Reads with PP-OCRv6 (package ``rapidocr``, whose wheel holds the weights), on the CPU. An image
    without text scores 0; a prompt without quotes fails.

    Parameters
    ----------
    min_confidence : float
        Lines read with less are noise.
    min_side : int
        Images whose shorter side is smaller are enlarged to it before text is looked for: larger
        finds smaller text and takes longer.
    threads : int
        Of the runtime.
    frames : str or mapping
        See :class:`~workflow_rl.rewards.frames.FrameReduction`.
    """

    name = "ocr"
    media_kind: AcceptedKind = "any"

    def __init__(
        self,
        min_confidence: float = 0.5,
        min_side: int = 480,
        threads: int = 1,
        frames: FramesArg | None = None,
    ) -> None:
        self.params = {
            "Global.log_level": "error",
            "Global.use_cls": False,
            "Global.text_score": min_confidence,
            "Det.limit_side_len": min_side,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
        }
        self.frames = FrameReduction.parse({"every": 4} if frames is None else frames)
        self.engine = Lazy(self._load)

    def load(self) -> None:
        """Load the three networks from the package."""
        self.engine.get()

    def _load(self) -> object:
        import_extra("onnxruntime", "ocr", f"reward {self.name}")
        return import_extra("rapidocr", "ocr", f"reward {self.name}").RapidOCR(params=self.params)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score images or videos."""
        return score_frames(batch, self.frames, self._score_images)

    def _score_images(self, images: RewardBatch) -> RewardScores:
        scores = torch.full((len(images),), torch.nan)
        failures: dict[int, str] = {}
        pixels_BHWC = to_uint8(images.media).movedim(1, 3).numpy()
        for row, prompt in enumerate(images.prompts):
            wanted = quoted_text(prompt)
            if wanted.strip():
                scores[row] = text_match(self.read(pixels_BHWC[row]), wanted)
            else:
                failures[row] = "the prompt has no text in quotes"
        return RewardScores(scores, failures)

    def read(self, image_HWC: NDArray[np.uint8]) -> str:
        """All text in an RGB image, line by line; empty if there is none."""
        result = self.engine.get()(np.ascontiguousarray(image_HWC[..., ::-1]))  # type: ignore[operator]
        return " ".join(result.txts or ())
