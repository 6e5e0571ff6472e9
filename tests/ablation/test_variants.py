"""Each variant differs from the reference in one thing, and what makes no sense is left out."""

from pathlib import Path
from typing import Any

import pytest

from tests.ablation.made_up import make_config
from workflow_rl.ablation.variants import build_variants
from workflow_rl.config import RunConfig
from workflow_rl.errors import UserError


def _leaves(value: Any, path: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        return {
            key: leaf
            for name, v in value.items()
            for key, leaf in _leaves(v, f"{path}.{name}").items()
        }
    return {path[1:]: repr(value)}


def _changed(one: RunConfig, other: RunConfig) -> list[str]:
    """Return the dotted keys whose values differ."""
    ours, theirs = _leaves(one.model_dump()), _leaves(other.model_dump())
    return sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))


def _stages(*stages: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(("t2i", "i2v"), stages, strict=False))


def test_each_differs_from_the_reference_in_one_thing(tmp_path: Path) -> None:
    variants = build_variants(make_config(tmp_path))
    configs = {variant.name: variant.config for variant in variants.variants}
    reference = configs[variants.reference]
    assert variants.reference == "nested"
    assert {name: _changed(reference, config) for name, config in configs.items()} == {
        "nested": [],
        "shared": ["credit.rule"],
        "only_t2i": ["stages.i2v.freeze"],
        "only_i2v": ["stages.t2i.freeze"],
        "constant": ["rewards"],
    }
    assert [reward.name for reward in configs["constant"].rewards] == ["constant"]
    assert configs["only_t2i"].stages["i2v"].freeze


def test_the_configuration_s_own_credit_rule_does_not_matter(tmp_path: Path) -> None:
    one, other = (
        build_variants(make_config(tmp_path, credit={"rule": rule}))
        for rule in ("nested", "shared")
    )
    assert one == other


def test_one_video_per_image_leaves_nested_credit_out(tmp_path: Path) -> None:
    stages = _stages({"task": "t2i", "samples": 4}, {"task": "i2v", "samples": 1})
    variants = build_variants(make_config(tmp_path, stages=stages, credit={"rule": "shared"}))
    assert variants.select(None) == ["shared", "only_t2i", "only_i2v", "constant"]
    assert variants.reference == "shared"
    assert "stages.i2v.samples is 1" in variants.left_out["nested"]


def test_a_chain_of_one_stage_has_shared_credit_and_the_constant(tmp_path: Path) -> None:
    stages = _stages({"task": "t2i", "samples": 4})
    variants = build_variants(make_config(tmp_path, stages=stages, rewards=[{"name": "jpeg_size"}]))
    assert variants.select(None) == ["shared", "constant"]
    assert set(variants.left_out) == {"nested", "only_t2i"}


def test_a_frozen_stage_is_not_trained_alone(tmp_path: Path) -> None:
    stages = _stages({"task": "t2i", "samples": 2, "freeze": True}, {"task": "i2v", "samples": 2})
    variants = build_variants(make_config(tmp_path, stages=stages))
    assert variants.select(None) == ["nested", "shared", "constant"]
    assert "frozen in the configuration" in variants.left_out["only_t2i"]
    assert "nested is that already" in variants.left_out["only_i2v"]


def test_a_stage_that_is_frozen_gets_no_fresh_adapter(tmp_path: Path) -> None:
    stages = _stages(
        {"task": "t2i", "samples": 2, "lora": {}}, {"task": "i2v", "samples": 2, "lora": {}}
    )
    configs = {
        v.name: v.config for v in build_variants(make_config(tmp_path, stages=stages)).variants
    }
    only = configs["only_i2v"].stages
    assert (only["t2i"].lora, only["t2i"].freeze) == (None, True)
    assert only["i2v"].lora == configs["nested"].stages["i2v"].lora is not None


def test_what_is_chosen_is_trained_in_the_order_of_all(tmp_path: Path) -> None:
    variants = build_variants(make_config(tmp_path))
    assert variants.select(["constant", "nested"]) == ["nested", "constant"]
    with pytest.raises(UserError, match=r"--only nestd: no such variant; .*nested"):
        variants.select(["nestd"])


def test_what_was_left_out_says_why_when_it_is_chosen(tmp_path: Path) -> None:
    stages = _stages({"task": "t2i", "samples": 4}, {"task": "i2v", "samples": 1})
    variants = build_variants(make_config(tmp_path, stages=stages, credit={"rule": "shared"}))
    with pytest.raises(UserError, match=r"--only nested: left out here, stages\.i2v\.samples is 1"):
        variants.select(["nested"])
