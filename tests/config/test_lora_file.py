"""A LoRA file against a model folder, by their headers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from workflow_rl.config.lora import LoRAConfig
from workflow_rl.config.lora_file import LORA_FILE, METADATA, check_lora, lora_layout
from workflow_rl.errors import UserError

LINEARS = {"blocks.0.to_q": (6, 4), "blocks.0.ff.net.2": (4, 8), "blocks.1.to_q": (6, 4)}
INDEX = {
    "transformer": ["diffusers", "X"],
    "vae": ["diffusers", "Y"],
    "transformer_2": [None, None],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in two shards, with a convolution and a norm beside its linear layers."""
    transformer = tmp_path / "model" / "transformer"
    transformer.mkdir(parents=True)
    weights = {f"{name}.weight": np.zeros(shape, np.float16) for name, shape in LINEARS.items()}
    save_file({"norm.weight": np.zeros(4), **weights}, transformer / "a-00001.safetensors")
    save_file({"conv.weight": np.zeros((4, 4, 2, 2))}, transformer / "a-00002.safetensors")
    return tmp_path / "model"


def _lora(
    path: Path, rank: int = 2, changes: Mapping[str, tuple[int, ...] | None] | None = None
) -> dict[str, np.ndarray]:
    """Write a LoRA for the two ``to_q``; a change replaces or (None) drops a tensor."""
    tensors = {}
    for block in (0, 1):
        tensors[f"transformer.blocks.{block}.to_q.lora_A.weight"] = np.ones((rank, 4))
        tensors[f"transformer.blocks.{block}.to_q.lora_B.weight"] = np.ones((6, rank))
    for key, shape in (changes or {}).items():
        tensors.pop(key, None)
        if shape is not None:
            tensors[key] = np.ones(shape)
    save_file(tensors, path)
    return tensors


def _check(folder: Path, lora: LoRAConfig, index: Mapping[str, object] = INDEX) -> None:
    check_lora(folder, index, ("to_q",), lora, "stages.t2i.lora")


def test_layers_are_found_by_their_endings() -> None:
    def modules(targets: tuple[str, ...] | str | None) -> tuple[str, ...]:
        lora = LoRAConfig.model_validate({"targets": targets})
        return lora_layout(lora, LINEARS, ("to_q",), "t", ["t"], "lora").modules

    assert modules(None) == ("blocks.0.to_q", "blocks.1.to_q")
    assert modules(("net.2", "1.to_q")) == ("blocks.0.ff.net.2", "blocks.1.to_q")
    assert modules("all-linear") == tuple(LINEARS)


def test_alpha_is_twice_the_rank_unless_given() -> None:
    for alpha, expected in ((None, 8.0), (3.0, 3.0)):
        lora = LoRAConfig(rank=4, alpha=alpha)
        assert lora_layout(lora, LINEARS, ("to_q",), "t", ["t"], "lora").alpha == expected


@pytest.mark.parametrize("target", ["o_q", "conv", "norm", "to_q.weight", "blocks"])
def test_a_target_that_matches_no_linear_layer_is_one_line(folder: Path, target: str) -> None:
    _check(folder, LoRAConfig(targets=("to_q",)))
    with pytest.raises(UserError, match=rf"'{target}' names no linear .* ff.net.2, to_q, or all"):
        _check(folder, LoRAConfig(targets=("to_q", target)))


def test_a_lora_for_this_model_is_accepted(folder: Path, tmp_path: Path) -> None:
    _lora(tmp_path / "my.safetensors")
    _lora(tmp_path / LORA_FILE)
    for init in (tmp_path / "my.safetensors", tmp_path):
        _check(folder, LoRAConfig(rank=2, init=init))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.0.to_q.lora_A.weight": (2, 4)}, "has the key 'blocks.0.to_q.lora_A.weight'"),
        ({"transformer.blocks.0.to_q.lora_down.weight": (2, 4)}, "lora_A.weight, lora_B.weight"),
        ({"text_encoder.x.lora_A.weight": (2, 4)}, "has the key 'text_encoder.x.lora_A.weight'"),
        (
            {
                "transformer.double.0.qkv.lora_A.weight": (2, 4),
                "transformer.double.0.qkv.lora_B.weight": (6, 2),
            },
            "LoRA for another model: 1 of its 3 layers, such as 'double.0.qkv'",
        ),
        ({"transformer.blocks.0.to_q.lora_A.weight": (2, 5)}, "to_q is 6×4, but the file has A"),
        ({"transformer.blocks.0.to_q.lora_B.weight": (7, 2)}, "made for this model"),
        ({"transformer.blocks.0.to_q.lora_B.weight": None}, "B None"),
        (
            {
                "transformer.blocks.0.to_q.lora_A.weight": (3, 4),
                "transformer.blocks.0.to_q.lora_B.weight": (6, 3),
            },
            "has rank 2, 3, but rank is 2; use a LoRA of one rank",
        ),
    ],
)
def test_a_lora_that_does_not_fit_is_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, tuple[int, ...] | None], message: str
) -> None:
    _lora(tmp_path / "my.safetensors", changes=changes)
    with pytest.raises(UserError, match=r"stages\.t2i\.lora\.init: ") as fault:
        _check(folder, LoRAConfig(rank=2, init=tmp_path / "my.safetensors"))
    assert message in str(fault.value)


def test_another_rank_is_one_line(folder: Path, tmp_path: Path) -> None:
    _lora(tmp_path / "my.safetensors", rank=4)
    with pytest.raises(UserError, match="has rank 4, but rank is 32; set rank: 4"):
        _check(folder, LoRAConfig(init=tmp_path / "my.safetensors"))


def test_a_file_that_is_missing_or_damaged_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file .*nowhere; give a \.safetensors file"):
        _check(folder, LoRAConfig(init=tmp_path / "nowhere"))
    with pytest.raises(UserError, match=f"no file .*{LORA_FILE}"):
        _check(folder, LoRAConfig(init=tmp_path))
    (tmp_path / "bad.safetensors").write_bytes(b"no header")
    with pytest.raises(UserError, match="not a whole safetensors file"):
        _check(folder, LoRAConfig(init=tmp_path / "bad.safetensors"))


def test_a_model_without_weights_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no \.safetensors weights"):
        _check(tmp_path, LoRAConfig())


def test_two_transformers_start_from_two_files(folder: Path, tmp_path: Path) -> None:
    (folder / "transformer_2").symlink_to(folder / "transformer")
    index = INDEX | {"transformer_2": ["diffusers", "X"]}
    (tmp_path / "transformer").mkdir()
    _lora(tmp_path / "transformer" / LORA_FILE)
    with pytest.raises(UserError, match=f"transformer_2/{LORA_FILE}"):
        _check(folder, LoRAConfig(rank=2, init=tmp_path), index)
    (tmp_path / "transformer_2").mkdir()
    _lora(tmp_path / "transformer_2" / LORA_FILE)
    _check(folder, LoRAConfig(rank=2, init=tmp_path), index)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (None, None),
        (json.dumps({"transformer.lora_alpha": 6}), 6.0),
        (json.dumps({"transformer.r": 2}), None),
    ],
)
def test_alpha_in_the_header(tmp_path: Path, metadata: str | None, expected: float | None) -> None:
    path = tmp_path / "my.safetensors"
    save_file(_lora(path), path, {METADATA: metadata} if metadata else None)
    lora = LoRAConfig(rank=2, init=path)
    assert lora_layout(lora, LINEARS, (), "t", ["t"], "lora").alpha == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (json.dumps({"transformer.use_dora": True}), "uses use_dora"),
        (json.dumps({"transformer.lora_alpha": "6"}), "has the alpha '6', expected a number above"),
        ('{"transformer.lora_alpha": NaN}', "has the alpha nan"),
        (json.dumps({"transformer.lora_alpha": 0}), "has the alpha 0, expected"),
    ],
)
def test_a_header_that_is_not_supported(tmp_path: Path, metadata: str, message: str) -> None:
    path = tmp_path / "my.safetensors"
    save_file(_lora(path), path, {METADATA: metadata})
    with pytest.raises(UserError, match=message):
        lora_layout(LoRAConfig(rank=2, init=path), LINEARS, (), "t", ["t"], "lora")
