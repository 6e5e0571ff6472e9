"""What a reward and who asks it say to each other: JSON, with the media in base64.

Documented in docs/reward_serving.md. A server and a process of a reward's own speak the same.
"""

import base64
import io
import json
import math
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.media import read_mp4, write_mp4
from workflow_rl.rewards.base import (
    FLOAT32_MAX,
    MediaKind,
    RewardBatch,
    RewardScores,
    all_failed,
)
from workflow_rl.rewards.pixels import to_pil

PROTOCOL = 1
MediaFormat = Literal["png", "mp4", "float32"]
DEFAULT_FPS = 8.0
"""Rate of an MP4 whose batch names none; the batch's own, not the file's, is what a reward sees."""
MAX_VALUES = 2**30
"""Numbers that one sample's media may hold once decoded: a small file can be a huge video."""
MAX_REASON = 300
LENGTH = struct.Struct("<Q")
"""What goes before each message on a pipe: its bytes."""


class ProtocolError(ValueError):
    """A message is not what the protocol says."""


def to_json(document: dict[str, Any]) -> bytes:
    """A message as it is sent; floats read back exactly."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def from_json(body: bytes) -> dict[str, Any]:
    """A message as it was sent.

    Raises
    ------
    ProtocolError
        It is no JSON object.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("not JSON") from None
    if not isinstance(document, dict):
        raise ProtocolError(f"a {type(document).__name__}, not a JSON object")
    return document


def encode_request(batch: RewardBatch, reward: str, media: MediaFormat) -> dict[str, Any]:
    """A request to score a batch.

    Raises
    ------
    ValueError
        The media are not finite, or images that shall go as MP4.
    """
    ids = unique_ids(batch.sample_ids)
    samples: list[dict[str, Any]] = []
    for row, sample_id in enumerate(ids):
        sample = {"id": sample_id, "prompt": batch.prompts[row]}
        if batch.group_ids:
            sample["group"] = batch.group_ids[row]
        fps = DEFAULT_FPS if batch.fps is None else batch.fps
        samples.append(sample | {"media": encode_media(batch.media[row], media, fps)})
    return {
        "protocol": PROTOCOL,
        "reward": reward,
        "media_kind": batch.media_kind,
        "fps": batch.fps,
        "samples": samples,
    }


def unique_ids(sample_ids: Sequence[str]) -> list[str]:
    """The ids, with ``#2`` and so on after one that was there before."""
    seen: set[str] = set()
    unique = []
    for sample_id in sample_ids:
        name, number = sample_id, 1
        while name in seen:
            number += 1
            name = f"{sample_id}#{number}"
        seen.add(name)
        unique.append(name)
    return unique


def encode_media(media: Tensor, media_format: MediaFormat, fps: float) -> dict[str, Any]:
    """An image ``CHW`` or a video ``CTHW`` in [0, 1] as JSON types.

    ``png`` rounds to 8 bits and is lossless from there; ``mp4`` is H.264, small and lossy;
    ``float32`` is exact.
    """
    if media_format == "float32":
        values = media.detach().to("cpu", torch.float32).contiguous().numpy()
        raw = values.astype("<f4", copy=False).tobytes()
        return {"format": "float32", "shape": list(media.shape), "data": [_text(raw)]}
    if media_format == "mp4" and media.dim() == 4:
        with tempfile.TemporaryDirectory() as folder:
            video = media.detach().float().cpu().clamp(0, 1)
            path = write_mp4(Path(folder) / "video.mp4", video, fps, min_side=1)
            return {"format": "mp4", "data": [_text(path.read_bytes())]}
    frames = media.unsqueeze(0) if media.dim() == 3 else media.movedim(1, 0)
    return {"format": "png", "data": [_text(_png(image)) for image in to_pil(frames)]}


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return file.getvalue()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode_request(document: dict[str, Any]) -> tuple[str, RewardBatch]:
    """The reward that a request names, and its batch.

    Raises
    ------
    ProtocolError
        It does not keep to the protocol; says where.
    """
    if document.get("protocol") != PROTOCOL:
        raise ProtocolError(f"protocol is {document.get('protocol')!r}, this is {PROTOCOL}")
    reward, kind = document.get("reward"), document.get("media_kind")
    fps, samples = document.get("fps"), document.get("samples")
    if not isinstance(reward, str):
        raise ProtocolError("reward is not a text")
    if kind not in ("image", "video"):
        raise ProtocolError(f"media_kind is {kind!r}, neither image nor video")
    if not (fps is None or (_is_number(fps) and 0 < fps <= FLOAT32_MAX)):
        raise ProtocolError(f"fps is {fps!r}, not a number above 0")
    if not isinstance(samples, list) or not samples:
        raise ProtocolError("samples is not a list with one sample or more")
    ids, prompts, groups, media = zip(*(_sample(sample, kind) for sample in samples), strict=True)
    if len(set(ids)) < len(ids):
        raise ProtocolError("two samples have one id")
    if len({tuple(item.shape) for item in media}) > 1:
        raise ProtocolError("the media of a request differ in shape")
    if (None in groups) != all(group is None for group in groups):
        raise ProtocolError("some samples have a group and some have none")
    group_ids = () if None in groups else groups
    return reward, RewardBatch(prompts, ids, torch.stack(media), kind, fps, group_ids)


def _sample(sample: Any, kind: MediaKind) -> tuple[str, str, str | None, Tensor]:
    """Id, prompt, group and media of one sample."""
    if not isinstance(sample, dict):
        raise ProtocolError("a sample is not a JSON object")
    sample_id, prompt, group = sample.get("id"), sample.get("prompt"), sample.get("group")
    if not isinstance(sample_id, str) or not isinstance(prompt, str):
        raise ProtocolError("a sample has no id or no prompt that is a text")
    if not isinstance(group, str | None):
        raise ProtocolError(f"sample {sample_id!r}: group is not a text")
    try:
        return sample_id, prompt, group, decode_media(sample.get("media"), kind)
    except ProtocolError as error:
        raise ProtocolError(f"sample {sample_id!r}: {error}") from None


def decode_media(media: Any, kind: MediaKind) -> Tensor:
    """An image ``CHW`` or a video ``CTHW``, float32 in [0, 1].

    Raises
    ------
    ProtocolError
        The media cannot be read, or are of another kind.
    """
    if not isinstance(media, dict) or not isinstance(media.get("data"), list):
        raise ProtocolError("media is not a JSON object with a list data")
    parts = [_bytes(item) for item in media["data"]]
    if not parts or (len(parts) > 1 and not (media.get("format") == "png" and kind == "video")):
        raise ProtocolError(f"media has {len(parts)} entries in data")
    decoded = _read(media, parts, kind)
    axes = 3 if kind == "image" else 4
    if decoded.dim() != axes or decoded.shape[0] != 3 or 0 in decoded.shape:
        raise ProtocolError(f"media of shape {tuple(decoded.shape)} are no RGB {kind}")
    return decoded


def _read(media: dict[str, Any], parts: list[bytes], kind: MediaKind) -> Tensor:
    match media.get("format"):
        case "float32":
            return _read_float32(parts[0], media.get("shape"))
        case "png":
            frames_CHW = _read_pngs(parts)
            return frames_CHW[0] if kind == "image" else torch.stack(frames_CHW, 1)
        case "mp4":
            return _read_mp4(parts[0])
        case other:
            raise ProtocolError(f"media format {other!r} is none of png, mp4 and float32")


def _bytes(item: Any) -> bytes:
    try:
        return base64.b64decode(item, validate=True)
    except (TypeError, ValueError):
        raise ProtocolError("an entry of data is not base64") from None


def _read_float32(raw: bytes, shape: Any) -> Tensor:
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise ProtocolError(f"shape is {shape!r}, not a list of whole numbers above 0")
    if math.prod(shape) * 4 != len(raw):
        raise ProtocolError(f"{len(raw)} bytes are no float32 of shape {shape}")
    values = np.frombuffer(raw, "<f4").astype(np.float32).reshape(shape)
    return torch.from_numpy(values)


def _read_pngs(parts: list[bytes]) -> list[Tensor]:
    frames: list[Tensor] = []
    values = 0
    for data in parts:
        try:
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                values += 3 * image.width * image.height
                if values > MAX_VALUES:
                    raise ProtocolError("the media are too large once decoded")
                pixels_HWC = np.array(image.convert("RGB"))
        except (OSError, SyntaxError, Image.DecompressionBombError):
            raise ProtocolError("an entry of data is no whole PNG") from None
        frames.append(torch.from_numpy(pixels_HWC).permute(2, 0, 1).float() / 255)
    if len({frame.shape for frame in frames}) > 1:
        raise ProtocolError("the frames differ in size")
    return frames


def _read_mp4(data: bytes) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        path.write_bytes(data)
        try:
            return read_mp4(path, max_values=MAX_VALUES)
        except UserError:
            raise ProtocolError("data is no whole MP4, or too large once decoded") from None


def encode_results(batch: RewardBatch, scores: RewardScores) -> dict[str, Any]:
    """The answer to a request: per sample its id and a score, or why there is none."""
    results: list[dict[str, Any]] = []
    for row, sample_id in enumerate(batch.sample_ids):
        components = {
            name: _finite_or_none(float(values[row])) for name, values in scores.components.items()
        }
        if row in scores.failures:
            outcome: dict[str, Any] = {"failure": scores.failures[row]}
        else:
            outcome = {"score": float(scores.scores[row])}
        results.append({"id": sample_id} | outcome | {"components": components})
    return {"protocol": PROTOCOL, "results": results}


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def decode_results(document: dict[str, Any], sample_ids: Sequence[str]) -> RewardScores:
    """The scores in an answer, matched by id; whatever is not a proper score is a failure.

    Parameters
    ----------
    sample_ids : sequence of str
        Those of the batch that was sent, before they were made unique.
    """
    ids = unique_ids(sample_ids)
    rows = {sample_id: row for row, sample_id in enumerate(ids)}
    results = document.get("results")
    if document.get("protocol") != PROTOCOL or not isinstance(results, list):
        return all_failed(len(ids), "the answer holds no results of this protocol")
    scores = all_failed(len(ids), "the answer has nothing for this sample")
    answered: set[int] = set()
    for result in results:
        row = rows.get(str(result.get("id"))) if isinstance(result, dict) else None
        if row is None:
            continue  # of a sample that was not asked for; one that is missing keeps its failure
        if row in answered:
            scores.scores[row] = math.nan
            scores.failures[row] = "the answer has this sample twice"
            continue
        answered.add(row)
        _take_result(scores, row, result)
    return scores


def _take_result(scores: RewardScores, row: int, result: dict[str, Any]) -> None:
    """Write one result into the scores, which hold a failure there."""
    components = result.get("components", {})
    for name, value in components.items() if isinstance(components, dict) else ():
        if _is_number(value) and abs(value) <= FLOAT32_MAX:
            whole = scores.components.setdefault(name, torch.full_like(scores.scores, math.nan))
            whole[row] = float(value)
    score, failure = result.get("score"), result.get("failure")
    if failure is not None:
        scores.failures[row] = " ".join(str(failure).split())[:MAX_REASON]
    elif not _is_number(score):
        scores.failures[row] = f"the answer's score is a {type(score).__name__}, not a number"
    elif not abs(score) <= FLOAT32_MAX:
        scores.failures[row] = f"the answer's score is {str(score)[:40]}, not a finite float32"
    else:
        scores.scores[row] = float(score)
        del scores.failures[row]


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
