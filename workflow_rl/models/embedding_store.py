"""Text embeddings on disk: one safetensors file each, under a digest of all they depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from workflow_rl.card import ModelCard
from workflow_rl.errors import UserError
from workflow_rl.instance import CacheKey

logger = logging.getLogger(__name__)

CHECKSUM = "blake2b"
TEXT = "text"


def checkpoint_identity(card: ModelCard) -> str:
    """Return a digest of the files of every component that training leaves alone.

    It is of their names, sizes and times of change: another checkpoint under the same name has
    another identity, and no weight is read. A folder that was copied without its times is another.
    """
    digest = hashlib.sha256()
    for component in sorted(set(card.components) - set(card.policies)):
        for path in sorted((card.source / component).rglob("*")):
            if path.is_file():
                status = path.stat()
                name = path.relative_to(card.source).as_posix()
                digest.update(f"{name}|{status.st_size}|{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


class EmbeddingStore:
    """Keeps the outputs of text encoders as the checkpoint has them, for this and later runs.

    Runs may share a folder: a file appears whole or not at all. A file that is damaged is
    reported, and computed and written again. Outputs of other weights than the checkpoint's (a
    weights version above 0, an adapter) are not kept.

    Parameters
    ----------
    folder
        Made if missing.
    card
        The model; its :func:`checkpoint_identity` is part of every key.
    device
        Where loaded tensors go. Its type is part of every key, since devices round differently.

    Raises
    ------
    UserError
        If the folder cannot be made.
    """

    def __init__(self, folder: Path, card: ModelCard, device: torch.device) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"memory.embedding_cache {folder} cannot be made ({error.strerror}); "
                "give a folder that can be written"
            ) from None
        self.folder = folder
        self.device = device
        self._identity = checkpoint_identity(card)

    def path_of(self, key: CacheKey) -> Path:
        """Return the file of ``key``."""
        parts = (
            self._identity,
            key.model_id,
            key.components,
            key.dtype,
            self.device.type,
            key.content,
            key.options,
        )
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return self.folder / f"{digest}.safetensors"

    def load(self, key: CacheKey) -> dict[str, torch.Tensor] | None:
        """Return the tensors of ``key`` on the device; None if there are none, or they are damaged.

        A damaged file is warned of.
        """
        path = self.path_of(key)
        if not _is_checkpoint(key) or not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                kept = (file.metadata() or {}).get(CHECKSUM)
        except (SafetensorError, OSError) as error:
            logger.warning("%s is damaged (%s); the text is encoded again", path, error)
            return None
        if kept != _checksum(tensors):
            logger.warning("%s is damaged (its checksum differs); the text is encoded again", path)
            return None
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def save(self, key: CacheKey, value: dict[str, torch.Tensor]) -> None:
        """Write the tensors of ``key``.

        Raises
        ------
        UserError
            If the disk refuses.
        """
        if not _is_checkpoint(key):
            return
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in value.items()}
        path = self.path_of(key)
        building = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file(tensors, building, metadata={CHECKSUM: _checksum(tensors), TEXT: key.content})
            building.replace(path)
        except (SafetensorError, OSError) as error:
            building.unlink(missing_ok=True)
            raise UserError(
                f"cannot write into memory.embedding_cache {self.folder} ({_one_line(error)}); "
                "make room, or give another folder"
            ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _is_checkpoint(key: CacheKey) -> bool:
    return not any(key.versions) and not any(key.adapters)


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
