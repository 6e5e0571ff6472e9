"""docs/rewards.md says of each reward what its class says."""

import inspect
import json
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workflow_rl.cli.preflight import check_rewards_import
from workflow_rl.config import RunConfig
from workflow_rl.config.yaml_text import parse_yaml
from workflow_rl.rewards.media_needs import MEDIA_NEEDS
from workflow_rl.rewards.registry import REWARDS, build_reward

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
COLUMNS = 9
SOURCES = ("model", "tokenizer", "weights", "base", "clip", "checkpoint")
"""Arguments whose default names what is loaded."""


def rows() -> dict[str, list[str]]:
    """Cells of the table by the name of the reward."""
    table = PAGE.partition("## Table")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row for row in cells}


def test_the_table_has_every_reward_and_no_other_in_order() -> None:
    assert list(rows()) == sorted(REWARDS)


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_a_row_agrees_with_the_class(name: str) -> None:
    row = rows()[name]
    assert len(row) == COLUMNS
    assert all(row)
    reward = build_reward({"name": name}).reward
    kinds = {"any": "image + video", "image": "image", "video": "video"}
    assert row[1] == kinds[reward.media_kind]
    for argument, parameter in inspect.signature(type(reward)).parameters.items():
        if argument in SOURCES and isinstance(parameter.default, str):
            assert f"`{parameter.default}`" in row[7], argument


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_the_extra_is_one_and_is_the_one_that_the_class_asks_for(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extra = rows()[name][8]
    module = sys.modules[type(build_reward({"name": name}).reward).__module__]
    asked = set(re.findall(r'import_extra\("\w+", "(\w+)"', inspect.getsource(module)))
    if "load_opencv" in vars(module):
        asked.add("flow")
    if "VlmJudge" in vars(module):
        asked.add("judge")
    assert asked == ({extra.strip("`")} if extra != "–" else set())
    assert asked <= set(project["project"]["optional-dependencies"])


def test_the_page_says_what_each_reward_needs() -> None:
    table = PAGE.partition("## What they need")[2].partition("\n\nThe others")[0]
    found = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \| (.+) \|$", table, flags=re.MULTILINE)
    assert [name for name, *_ in found] == list(MEDIA_NEEDS)
    assert set(MEDIA_NEEDS) <= set(REWARDS)
    for name, frames, size, fps in found:
        needs = MEDIA_NEEDS[name]
        side = f"{needs.side} × {needs.side}" if needs.side > 1 else "–"
        assert frames == (str(needs.frames) if needs.video else "–"), name
        assert size == side + (", exactly" if needs.exact else ""), name
        assert fps == ("yes" if needs.fps else "no"), name
        assert needs.video == (build_reward({"name": name}).reward.media_kind == "video"), name


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.+?)```", PAGE, flags=re.DOTALL))
def test_an_example_is_a_configuration_that_can_be_built(example: str) -> None:
    chain = {"stages": {"t2i": {"task": "t2i"}, "i2v": {"task": "i2v"}}, "output_dir": "x"}
    written = parse_yaml(example) | chain | {"data": {"prompts": "x.txt"}}
    check_rewards_import(RunConfig.model_validate_json(json.dumps(written)))


def test_the_script_of_the_page_converts_a_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = re.findall(r"```python\n(.+?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "convert.py").write_text(script)
    tied = torch.arange(6.0).view(2, 3)
    torch.save({"state_dict": {"a": tied, "b": tied.T}}, tmp_path / "x.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["convert.py", "x.pt", "x.safetensors"])
    runpy.run_path("convert.py")
    found = load_file(tmp_path / "x.safetensors")
    assert found["a"].tolist() == tied.tolist()
    assert found["b"].tolist() == tied.T.tolist()
