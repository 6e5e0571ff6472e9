"""Runs on tiny FLUX and Wan checkpoints, with LoRA and with full weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.export.tiny_run import LORA, TinyRun, make_run
from tests.models import test_flux, test_wan
from tests.models.contract import FamilyCase

CASES: dict[str, FamilyCase] = {
    case.name: case for case in (test_flux.TestFluxDev.case, test_wan.TestWan21.case)
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora": LORA},
    "default lora": {"lora": {"rank": 4}},
    "full": {},
}

GetRun = Callable[[str, str], TinyRun]


@pytest.fixture(scope="session")
def get_run(tmp_path_factory: pytest.TempPathFactory) -> GetRun:
    """Return the run of a case and a kind; it is made once. Tests only read it."""
    folder = tmp_path_factory.mktemp("export")
    runs: dict[tuple[str, str], TinyRun] = {}

    def get(name: str, kind: str) -> TinyRun:
        model: Path = folder / name
        if not model.exists():
            CASES[name].save(model)
        if (name, kind) not in runs:
            run_dir = folder / f"run-{name}-{kind.replace(' ', '-')}"
            runs[name, kind] = make_run(CASES[name], model, run_dir, **KINDS[kind])
        return runs[name, kind]

    return get
