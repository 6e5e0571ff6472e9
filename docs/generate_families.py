"""Writes docs/families/README.md: every model family, from the table of families and its tests.

Run it by hand after a change there: ``python docs/generate_families.py``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workflow_rl.config.families import FAMILIES, Family

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families" / "README.md"
TESTS = ROOT / "tests" / "models"
ARCHITECTURES = ROOT / "workflow_rl" / "planning" / "architectures"

HEAD = """# Model families

Generated from `workflow_rl/config/families.py` by `docs/generate_families.py`; run the script again
after a change there. To add one: [Add a model family](add_a_family.md).

The family of a folder is read from its `model_index.json`. Every family is held to one contract
(`tests/models/contract.py`): what is served equals the stock pipeline's output to 1e-5 in float32,
log-probs recomputed for training equal the captured ones exactly, a training step moves what should
train and nothing else, and a chain with another family trains.

**Verified at which size.** The contract runs on tiny checkpoints of the real classes with random
weights, on a CPU, in the named tests. No published weights have been run. Where a published shape
is named, `workflow-rl plan` builds it without weights. What else was checked at published sizes,
and what was not, is on the family's page.
"""

C2_HEAD = """
## Recomputed log-probs (C2)

The largest |log-ratio| on-policy that the contract measures, over three SDEs: log-probs recomputed
for training, with gradient, against those captured in the rollout, in the same batch. In float32
for every guidance of the case, in bfloat16 for the last of them. Each figure is an equality in a
test.
"""
C2_COLUMNS = ("checkpoint of the contract", "task", "float32", "bfloat16")

COLUMNS = (
    "family",
    "pipeline class in `model_index.json`",
    "task",
    "guidance",
    "layers of a LoRA by default",
    "contract on tiny checkpoints",
    "published shapes",
)


def render() -> str:
    """Return the page."""
    by_name: dict[str, dict[str, Family]] = defaultdict(dict)
    for pipeline, family in FAMILIES.items():
        by_name[family.name][pipeline] = family
    rows = [_row(name, entries) for name, entries in by_name.items()]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return HEAD + "\n" + _table(lines) + C2_HEAD + "\n" + _table(_c2_lines())


def _table(lines: Iterable[Iterable[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _c2_lines() -> list[Sequence[str]]:
    """Return the figure of every contract's case: its tests hold it to what they measure."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    cases = importlib.import_module("tests.models.contract").family_cases().values()
    rows = [[f"`{case.name}`", case.task, "0", f"{case.c2_bfloat16:g}"] for case in cases]
    return [C2_COLUMNS, ["---"] * len(C2_COLUMNS), *rows]


def _row(name: str, entries: Mapping[str, Family]) -> list[str]:
    families = list(entries.values())
    return [
        f"[{name}]({name}.md)",
        _code(entries),
        _same(family.task for family in families),
        _same(", ".join(guidance_modes(family)) for family in families),
        _same(_code(family.lora_targets) for family in families),
        ", ".join(f"[{path.name}](../../tests/models/{path.name})" for path in test_files(name)),
        _code(_architectures(entries)) or "none",
    ]


def _code(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _same(values: Any) -> str:
    """Return the value that all entries of a family share."""
    (value,) = set(values)
    return str(value)


def guidance_modes(family: Family) -> list[str]:
    """Return every mode that some folder of the family has.

    Families tell them by keys of a folder's JSON: here none is set, and then all are.
    """
    found = {*family.guidances(lambda path: {}), *family.guidances(lambda path: _AllSet())}
    return sorted(found, key=["none", "cfg", "embedded"].index)


class _AllSet(dict[str, Any]):
    """A JSON object in which every key is set."""

    def get(self, key: str, default: Any = None) -> Any:
        return True

    def __missing__(self, key: str) -> Any:
        return True


def test_files(name: str) -> list[Path]:
    """Return the test files of a family: ``test_NAME...``, of no family with a longer name."""
    names = {family.name for family in FAMILIES.values()}

    def owner(stem: str) -> str:
        return max((n for n in names if stem.startswith(f"test_{n}")), key=len, default="")

    held = (path for path in sorted(TESTS.glob("test_*.py")) if owner(path.stem) == name)
    return [path for path in held if "FamilyContract" in path.read_text(encoding="utf-8")]


def _architectures(pipelines: Mapping[str, Family]) -> Sequence[str]:
    """Return the names of the published shapes under one of ``pipelines``."""
    found = []
    for path in sorted(ARCHITECTURES.glob("*.json")):
        index = json.loads(path.read_text(encoding="utf-8"))["files"]["model_index.json"]
        if index["_class_name"] in pipelines:
            found.append(path.stem)
    return found


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
