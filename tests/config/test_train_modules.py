"""Which weights ``train_modules`` may name."""

from __future__ import annotations

import re

import pytest

from workflow_rl.config.train_modules import check_parts
from workflow_rl.errors import UserError

KEY = "stages.i2v.train_modules"
PARAMETERS = ("blocks.0.attn1.to_q.weight", "blocks.1.attn1.to_q.weight", "proj_out.bias")
ONE = [f"transformer.{name}" for name in PARAMETERS]
TWO = ONE + [f"transformer_2.{name}" for name in PARAMETERS]


@pytest.mark.parametrize("names", [ONE, TWO])
@pytest.mark.parametrize("parts", [(), ("to_q",), ("blocks.1", "proj_out")])
def test_a_part_is_a_run_of_whole_names(names: list[str], parts: tuple[str, ...]) -> None:
    check_parts(names, parts, KEY)


@pytest.mark.parametrize("part", ["to", "blocks.2", "to_q.blocks"])
def test_a_part_that_names_nothing_is_refused_with_what_there_is(part: str) -> None:
    says = f"{KEY} names '{part}', which is no part of the model; its modules are blocks, proj_out"
    with pytest.raises(UserError, match=f"^{re.escape(says)}$"):
        check_parts(ONE, ("to_q", part), KEY)


def test_each_expert_has_a_part_that_trains() -> None:
    """Steps of an expert without one would have no gradient."""
    check_parts(TWO, ("transformer_2.blocks", "transformer.proj_out"), KEY)
    says = (
        f"{KEY} names no part of transformer, and each of transformer and transformer_2 has steps"
    )
    with pytest.raises(UserError, match=f"^{re.escape(says)}.*; name a part of each"):
        check_parts(TWO, ("transformer_2.blocks", "transformer_2.proj_out"), KEY)
