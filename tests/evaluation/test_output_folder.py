"""An evaluation's folder appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from workflow_rl.errors import UserError
from workflow_rl.evaluation.output_folder import check_output, whole_folder


def test_what_is_interrupted_leaves_the_earlier_evaluation(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    with pytest.raises(KeyboardInterrupt), whole_folder(folder) as building:  # noqa: PT012
        (building / "comparison.json").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    for text in ("first", "second"):
        with whole_folder(folder) as building:
            (building / "comparison.json").write_text(text)
        check_output(folder)
        assert (folder / "comparison.json").read_text() == text
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_foreign_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="no evaluation's"):
        check_output(tmp_path)
