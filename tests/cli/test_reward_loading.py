"""A reward that cannot load ends the run before a model is loaded, in one line."""

from pathlib import Path

import pytest

from tests.cli.conftest import Invoke


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("{name: vlm_judge}", "vlm_judge needs args.model"),
        ("{name: pickscore, args: {model: no/such}}", "cannot load no/such"),
        ("{name: aesthetic, args: {weights: head.pth}}", "pickles are not read"),
        ("{name: imagereward, weight: 0}, {name: constant}", "there is no weight file"),
        ("{name: jpeg_size, args: {frames: median}}", "frames.reduce is 'median'"),
    ],
)
def test_train(invoke: Invoke, workspace: Path, reward: str, says: str) -> None:
    before = sorted(workspace.rglob("*"))
    result = invoke("train", "run.yaml", f"rewards=[{reward}]")
    assert says in result.one_line_error()
    assert sorted(workspace.rglob("*")) == before
