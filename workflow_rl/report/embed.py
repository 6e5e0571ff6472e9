"""Puts images and videos into the page itself, as long as it stays of a moderate size."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MEGABYTE = 1_000_000
MIME_TYPES = {".png": "image/png", ".mp4": "video/mp4"}


@dataclass(frozen=True)
class Medium:
    """An image or a video of the page.

    ``source`` is a data URI, or the file's path relative to the page when the page would have
    become too large, or None when there is no file: ``missing`` says why.
    """

    kind: str
    source: str | None
    path: str
    missing: str = ""


class Embedder:
    """Turns paths below a run directory into sources for the page.

    Parameters
    ----------
    root : Path
        The run directory, where the page will lie.
    budget : int
        Bytes of media to put into the page; what comes after it is linked.
    """

    def __init__(self, root: Path, budget: int) -> None:
        self._root = root.resolve()
        self._left = budget
        self._known: dict[str, Medium] = {}
        self._linked_bytes = 0

    def __call__(self, path: str | None) -> Medium:
        """Return the medium at ``path``, relative to the run directory.

        A path that leaves the run directory, or is neither PNG nor MP4, counts as missing. None is
        a medium that the run could not write.
        """
        if path is None:
            return Medium("image", None, "", "not written")
        if path not in self._known:
            self._known[path] = self._load(path)
        return self._known[path]

    @contextmanager
    def leaving(self, share: float) -> Iterator[None]:
        """Leave a share of the room that is left to what comes after the block."""
        kept = int(share * self._left)
        self._left -= kept
        try:
            yield
        finally:
            self._left += kept

    @property
    def missing(self) -> int:
        """Number of media whose file is not there."""
        return sum(medium.source is None for medium in self._known.values())

    @property
    def linked(self) -> int:
        """Number of media that are not in the page but beside it."""
        sources = [medium.source for medium in self._known.values()]
        return sum(source is not None and not source.startswith("data:") for source in sources)

    @property
    def linked_megabytes(self) -> float:
        """Size of the media beside the page."""
        return self._linked_bytes / MEGABYTE

    def _load(self, path: str) -> Medium:
        suffix = PurePosixPath(path).suffix
        kind = "video" if suffix == ".mp4" else "image"
        file = (self._root / path).resolve()
        inside = file.is_relative_to(self._root)
        if suffix not in MIME_TYPES or not inside or not file.is_file():
            return Medium(kind, None, path, "missing")
        size = file.stat().st_size
        if size > self._left:
            self._linked_bytes += size
            return Medium(kind, file.relative_to(self._root).as_posix(), path)
        self._left -= size
        content = base64.b64encode(file.read_bytes()).decode("ascii")
        return Medium(kind, f"data:{MIME_TYPES[suffix]};base64,{content}", path)
