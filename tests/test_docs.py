"""The generated page is what the configuration models say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_configuration_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generated", DOCS / "generate_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert script.render() == page, "run `python docs/generate_configuration.py`"
