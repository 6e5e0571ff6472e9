"""Names of checkpoint folders, for who looks for checkpoints without PyTorch."""

import re
from pathlib import Path

FOLDER = re.compile(r"iteration_(\d{8,})")


def checkpoint_folders(root: Path) -> list[Path]:
    """Return the checkpoint folders in `root`, damaged ones too, oldest first."""
    if not root.is_dir():
        return []
    found = [(m, path) for path in root.iterdir() if (m := FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]


def iterations_done(root: Path) -> int:
    """Return after how many iterations the newest checkpoint in `root` was written, 0 without."""
    folders = checkpoint_folders(root)
    return int(folders[-1].name.partition("_")[2]) if folders else 0
