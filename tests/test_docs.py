"""The generated pages are what the code says, and what they link to is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("name", ["generate_configuration", "generate_families"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    script = _script(name)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.render() == page, f"run `python docs/{name}.py`"


def test_the_index_of_families_tells_what_a_variant_has() -> None:
    """A family whose checkpoints differ in guidance has the modes of all of them."""
    script = _script("generate_families")
    modes = {name: script.guidance_modes(family) for name, family in script.FAMILIES.items()}
    assert modes["FluxPipeline"] == ["none", "cfg", "embedded"]
    assert modes["LTXPipeline"] == ["none", "cfg"]
    assert [path.name for path in script.test_files("flux")] == ["test_flux.py"]


@pytest.mark.parametrize("page", sorted((DOCS / "families").glob("*.md")), ids=lambda p: p.name)
def test_what_a_page_on_families_links_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).is_file()]
    assert missing == []
