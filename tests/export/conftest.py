"""Runs on a tiny checkpoint of every family, with LoRA and with full weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.export.tiny_run import LORA, TinyRun, make_run
from tests.models import (
    test_flux,
    test_flux2,
    test_ltx,
    test_qwen_image,
    test_sd3,
    test_wan,
    test_wan22,
    test_wan_ti2v,
    test_z_image,
)
from tests.models.contract import FamilyCase

A14B = test_wan22.TestWanA14B.case.name
"""The case with two experts."""
CASES: dict[str, FamilyCase] = {
    case.name: case
    for case in (
        test_flux.TestFluxDev.case,
        test_wan.TestWan21.case,
        test_wan22.TestWanA14B.case,
    )
}
OTHER_CASES: dict[str, FamilyCase] = {
    case.name: case
    for case in (
        test_flux.TestFluxSchnell.case,
        test_flux2.TestFlux2KleinBase.case,
        test_sd3.TestSD35Medium.case,
        test_qwen_image.TestQwenImage.case,
        test_z_image.TestZImage.case,
        test_ltx.TestLTX.case,
        test_ltx.TestLTXCondition.case,
        test_wan_ti2v.TestWanTI2V.case,
    )
}
ALL_CASES = CASES | OTHER_CASES
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
        case, model = ALL_CASES[name], folder / name
        if not model.exists():
            case.save(model)
        if (name, kind) not in runs:
            run_dir = folder / f"run-{name}-{kind.replace(' ', '-')}"
            runs[name, kind] = make_run(case, model, run_dir, **KINDS[kind])
        return runs[name, kind]

    return get
