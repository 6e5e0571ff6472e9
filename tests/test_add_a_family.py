"""The code of ``docs/families/add_a_family.md``, run: it ends with the contract's tests passing.

The blocks of a file are joined into a module, which is imported under the name that it would have.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import pytest

from workflow_rl.config import families

PAGE = Path(__file__).parents[1] / "docs" / "families" / "add_a_family.md"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MODULES = {
    "workflow_rl/models/sketch.py": "workflow_rl.models.sketch",
    "tests/tiny_models/sketch.py": "tests.tiny_models.sketch",
    "tests/models/test_sketch.py": "tests.models.test_sketch",
}


def _blocks() -> dict[str, str]:
    """Return the page's code by what its first line says it is; continued blocks are joined."""
    joined: dict[str, str] = {}
    for language, block in _FENCE.findall(PAGE.read_text(encoding="utf-8")):
        first, _, code = block.partition("\n")
        assert language == "python", f"a block that no test runs: {first}"
        assert first.startswith("# "), f"a block that does not say its file: {first}"
        name = first.removeprefix("# ")
        file = name.removesuffix(", continued")
        assert (file != name) == (file in joined), f"out of order: {first}"
        joined[file] = joined[file] + "\n" + code if file in joined else code
    return joined


def _module(name: str, code: str, patch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(name)
    patch.setitem(sys.modules, name, module)
    exec(compile(code, name, "exec"), vars(module))
    return module


def _family(blocks: dict[str, str]) -> dict[str, families.Family]:
    """Return the entry, as it would be in FAMILIES."""
    scope: dict[str, Any] = dict(vars(families))
    code = blocks["workflow_rl/config/families.py, above FAMILIES"]
    entry = blocks["workflow_rl/config/families.py, in FAMILIES"]
    exec(f"{code}\n_ENTRY = {{\n{entry}}}", scope)
    result: dict[str, families.Family] = scope["_ENTRY"]
    return result


def _load() -> tuple[pytest.MonkeyPatch, dict[str, str], dict[str, ModuleType]]:
    """Import the page's modules, in its order."""
    blocks = _blocks()
    patch = pytest.MonkeyPatch()
    stock = _module("sketch_pipeline", blocks["sketch_pipeline.py"], patch)
    patch.setattr(diffusers, "SketchPipeline", stock.SketchPipeline, raising=False)
    modules = {file: _module(name, blocks[file], patch) for file, name in _MODULES.items()}
    return patch, blocks, modules


_PATCH, _BLOCKS, _LOADED = _load()
TestSketch: Any = _LOADED["tests/models/test_sketch.py"].TestSketch


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """The entry is in FAMILIES while these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        for pipeline, family in _family(_BLOCKS).items():
            patch.setitem(families.FAMILIES, pipeline, family)
        yield
    _PATCH.undo()


def test_every_block_is_run() -> None:
    entries = {name for name in _BLOCKS if name.startswith("workflow_rl/config/families.py")}
    assert set(_BLOCKS) == {"sketch_pipeline.py", *_MODULES} | entries
    assert len(entries) == 2
