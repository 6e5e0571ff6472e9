"""Files that appear whole or not at all, under their own name only when all of them is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def renamed_when_whole(path: Path) -> Iterator[Path]:
    """Give a temporary name beside ``path``; rename it to ``path`` unless the block raises.

    The folder is made where it is missing. What was at ``path`` stays until then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, whole or not at all."""
    with renamed_when_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
