"""What an export reads, what it writes besides the weights, and that it is whole or not there."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.export.conftest import A14B, CASES, GetRun
from tests.export.tiny_run import ITERATION, LORA, TinyRun, checkpoint, make_run
from workflow_rl import __version__
from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.export.metadata import base_model_name
from workflow_rl.export.options import ExportFormat, ExportOptions, KeyFormat
from workflow_rl.export.run import export_run
from workflow_rl.training.weight_sync import WeightRole

FLUX, WAN = "flux-dev", "wan-2.1"


def _export(run: TinyRun, output: Path, form: str = "merged", **options: Any) -> Path:
    return export_run(run.dir, ExportOptions(run.stage, ExportFormat(form), output, **options))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _same(first: Path, second: Path) -> bool:
    ours, theirs = _tensors(first), _tensors(second)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def own_run(get_run: GetRun, tmp_path: Path) -> TinyRun:
    """A run of a copy of the model that the test may change."""
    model = tmp_path / "flux"
    shutil.copytree(get_run(FLUX, "full").model, model)
    return make_run(CASES[FLUX], model, tmp_path / "run")


@pytest.mark.parametrize(
    ("form", "kind", "keys"),
    [
        ("lora", "lora", "diffusers"),
        ("lora", "lora", "comfyui"),
        ("merged", "lora", "diffusers"),
        ("merged", "full", "diffusers"),
        ("merged", "full", "comfyui"),
        ("diffusers", "lora", "diffusers"),
        ("diffusers", "full", "diffusers"),
    ],
)
def test_a_file_says_where_it_is_from(
    get_run: GetRun, tmp_path: Path, form: str, kind: str, keys: str
) -> None:
    run = get_run(A14B, kind)
    out = _export(run, tmp_path / "out", form, key_format=KeyFormat(keys))
    others = ("vae", "text_encoder")
    headers = {}
    for file in (path for path in out.rglob("*.safetensors") if path.parent.name not in others):
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata()
        headers[header["workflow_rl.component"]] = header
    assert headers.keys() == {"transformer", "transformer_2"}
    expected = {
        "base_model": A14B,
        "family": "wan",
        "version": __version__,
        "run": run.dir.name,
        "run_fingerprint": run.config.fingerprint(),
        "stage": "i2v",
        "iteration": str(ITERATION),
        "weights": "student",
    }
    for header in headers.values():
        assert header["format"] == "pt"
        assert {key: header[f"workflow_rl.{key}"] for key in expected} == expected
        trained = "LoRA" if kind == "lora" else "weights"
        method = header["workflow_rl.method"]
        assert method == f"PPO-clip on the {trained} of the chain, nested credit, flow_sde steps"
        assert not any(str(tmp_path.parent) in value for value in header.values())


def test_a_folder_of_the_hubs_cache_is_named_by_its_id(tmp_path: Path) -> None:
    cached = tmp_path / "models--black-forest-labs--FLUX.1-dev" / "snapshots" / "0a1b"
    assert base_model_name(cached) == "black-forest-labs/FLUX.1-dev"
    assert base_model_name(tmp_path / "my-flux") == "my-flux"


def test_which_checkpoint_and_whose_weights(own_run: TinyRun, tmp_path: Path) -> None:
    said: list[str] = []
    checkpoint(own_run.config, 3)
    with pytest.raises(UserError, match="no checkpoint of iteration 9; it has 3"):
        _export(own_run, tmp_path / "none", iteration=9)
    early = ExportOptions("t2i", ExportFormat.MERGED, tmp_path / "3", "student")
    export_run(own_run.dir, early, said.append)
    assert said == [f"the run has done 3 of its {ITERATION} iterations"]
    checkpoint(own_run.config, ITERATION)
    student = _export(own_run, tmp_path / "student", weights="student")
    assert _same(student, _export(own_run, tmp_path / "default"))
    assert _same(tmp_path / "3", _export(own_run, tmp_path / "again", iteration=3))
    assert not _same(student, tmp_path / "3")
    assert not _same(student, _export(own_run, tmp_path / "ema", weights="ema"))


def test_the_weights_are_those_that_evaluate_takes(get_run: GetRun, tmp_path: Path) -> None:
    model = get_run(FLUX, "full").model
    run = make_run(CASES[FLUX], model, tmp_path / "run", top={"evaluation": {"weights": "ema"}})
    default = _export(run, tmp_path / "default")
    assert _same(default, _export(run, tmp_path / "ema", weights="ema"))
    assert not _same(default, _export(run, tmp_path / "student", weights="student"))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(own_run: TinyRun, tmp_path: Path) -> None:
    newest = checkpoint(own_run.config, ITERATION + 1)
    before = _export(own_run, tmp_path / "before", iteration=ITERATION)
    (newest / "state.json").write_text("{}")
    said: list[str] = []
    options = ExportOptions("t2i", ExportFormat.MERGED, tmp_path / "out")
    export_run(own_run.dir, options, said.append)
    assert "is damaged" in said[0]
    assert _same(before, tmp_path / "out")
    with pytest.raises(UserError, match="is damaged"):
        _export(own_run, tmp_path / "none", iteration=ITERATION + 1)


def test_shards_are_kept(own_run: TinyRun, tmp_path: Path) -> None:
    whole = _export(own_run, tmp_path / "whole")
    folder = own_run.model / "transformer"
    transformer = FluxTransformer2DModel.from_pretrained(folder)
    shutil.rmtree(folder)
    transformer.save_pretrained(folder, max_shard_size="60KB")
    shards = sorted(path.name for path in folder.iterdir())
    assert len(shards) > 3
    out = _export(own_run, tmp_path / "out", "diffusers")
    assert sorted(path.name for path in (out / "transformer").iterdir()) == shards
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert json.loads((out / "transformer" / index).read_text()) == json.loads(
        (folder / index).read_text()
    )
    assert _same(whole / "transformer", out / "transformer")
    for path in (out / "transformer").glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata()["workflow_rl.base_model"] == "flux"
    loaded = FluxTransformer2DModel.from_pretrained(out / "transformer")
    assert all(torch.equal(t, loaded.state_dict()[k]) for k, t in _tensors(whole).items())


def test_a_variant_goes_out_of_the_names(get_run: GetRun, tmp_path: Path) -> None:
    case, model = CASES[FLUX], tmp_path / "flux"
    pipeline = case.pipeline_class.from_pretrained(get_run(FLUX, "full").model)
    pipeline.save_pretrained(model, variant="fp16", max_shard_size="60KB")
    run = make_run(case, model, tmp_path / "run", variant="fp16")
    out = _export(run, tmp_path / "out", "diffusers")
    assert not [path for path in out.rglob("*") if "fp16" in path.name]
    stock = run.made_by_stock(case.pipeline_class.from_pretrained(out))
    assert float((stock - run.made_by_us()).abs().max()) <= 1e-5


def test_only_what_loads_is_copied_and_weights_are_linked(own_run: TinyRun, tmp_path: Path) -> None:
    (own_run.model / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    (own_run.model / "flux1-dev.safetensors").write_bytes(b"the same again")
    (own_run.model / "LICENSE.md").write_text("terms")
    out = _export(own_run, tmp_path / "out", "diffusers")
    assert (out / "LICENSE.md").read_text() == "terms"
    assert not list(out.rglob("*.bin"))
    assert not list(out.glob("*.safetensors"))
    for component in ("vae", "text_encoder", "text_encoder_2"):
        (ours,) = (out / component).glob("*.safetensors")
        assert ours.samefile(own_run.model / component / ours.name)
    for path in out.rglob("*.json"):
        assert not path.samefile(own_run.model / path.relative_to(out)), "an edit would reach both"
    (trained,) = (out / "transformer").glob("*.safetensors")
    assert not trained.samefile(own_run.model / "transformer" / trained.name)


def test_a_bfloat16_stage_is_exported_to_the_bit(get_run: GetRun, tmp_path: Path) -> None:
    """Wan keeps modulation and norms in float32 in a bfloat16 model; the file does too."""
    model = get_run(WAN, "full").model
    run = make_run(CASES[WAN], model, tmp_path / "run", dtype="bfloat16")
    served = run.served(WeightRole.STUDENT).component("transformer").state_dict()
    assert {tensor.dtype for tensor in served.values()} == {torch.float32, torch.bfloat16}
    written = _tensors(_export(run, tmp_path / "out"))
    assert written.keys() == served.keys()
    for name, tensor in served.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name], tensor), name
    loaded = WanTransformer3DModel.from_pretrained(
        tmp_path / "out" / "transformer", torch_dtype=torch.bfloat16
    )
    assert all(torch.equal(t, served[name]) for name, t in loaded.state_dict().items())


def test_a_bfloat16_base_is_merged_as_it_is_served(get_run: GetRun, tmp_path: Path) -> None:
    """The adapter was trained beside the rounded base, so the sum begins with that."""
    model = get_run(FLUX, "full").model
    run = make_run(CASES[FLUX], model, tmp_path / "run", dtype="bfloat16", lora=LORA)
    transformer: Any = run.served(WeightRole.STUDENT).component("transformer")
    layer = transformer.x_embedder
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer.weight.float() + layer.scaling["default"] * (b @ a)
    written = _tensors(_export(run, tmp_path / "out", dtype="float32"))
    torch.testing.assert_close(written["x_embedder.weight"], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", ["lora", "merged"])
def test_another_dtype(get_run: GetRun, tmp_path: Path, form: str) -> None:
    run = get_run(FLUX, "lora")
    half = _tensors(_export(run, tmp_path / "half", form, dtype="bfloat16"))
    full = _tensors(_export(run, tmp_path / "full", form, dtype="float32"))
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, full[name].bfloat16()) for name, tensor in half.items())


def test_an_exported_lora_is_one_to_start_from(get_run: GetRun, tmp_path: Path) -> None:
    run = get_run(FLUX, "lora")
    folder = _export(run, tmp_path / "lora", "lora")
    begin = {"rank": LORA["rank"], "init": folder}
    other = make_run(CASES[FLUX], run.model, tmp_path / "run", lora=begin)
    assert not torch.equal(other.made_by_us(), run.made_by_us())
    shutil.rmtree(other.dir / "checkpoints")
    start = checkpoint(other.config, 1, noise=0.0)
    assert start.is_dir()
    assert torch.equal(other.made_by_us(), run.made_by_us())
    merged = _export(other, tmp_path / "merged")
    assert _same(merged, _export(run, tmp_path / "expected"))


# Nothing is written where something is wrong.


@contextmanager
def _nothing_new(folder: Path) -> Iterator[None]:
    before = sorted(folder.rglob("*"))
    yield
    assert sorted(folder.rglob("*")) == before


def test_no_checkpoint(own_run: TinyRun, tmp_path: Path) -> None:
    shutil.rmtree(own_run.dir / "checkpoints")
    with (
        _nothing_new(tmp_path),
        pytest.raises(UserError, match="has no checkpoint yet; let `workflow-rl train` go on"),
    ):
        _export(own_run, tmp_path / "made" / "out")


def test_another_base_model(own_run: TinyRun, tmp_path: Path) -> None:
    (file,) = (own_run.model / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["proj_out.bias"]
    save_file(tensors, file, metadata={"format": "pt"})
    with (
        _nothing_new(tmp_path),
        pytest.raises(UserError, match=r"transformer\.proj_out\.bias .* has nothing of that name"),
    ):
        _export(own_run, tmp_path / "made" / "out", "diffusers")
    file.unlink()
    with _nothing_new(tmp_path), pytest.raises(UserError, match="holds no weights in safetensors"):
        _export(own_run, tmp_path / "made" / "out")


def test_weights_that_are_not_finite(own_run: TinyRun, tmp_path: Path) -> None:
    checkpoint(own_run.config, ITERATION + 1, noise=float("nan"))
    with _nothing_new(tmp_path), pytest.raises(UserError, match="is not finite; use an earlier"):
        _export(own_run, tmp_path / "out")


def test_values_beyond_float16(own_run: TinyRun, tmp_path: Path) -> None:
    checkpoint(own_run.config, ITERATION + 1, noise=1e5)
    with _nothing_new(tmp_path), pytest.raises(UserError, match="beyond float16; use --dtype"):
        _export(own_run, tmp_path / "out", dtype="float16")


def test_a_full_disk_leaves_nothing(get_run: GetRun, tmp_path: Path) -> None:
    run = get_run(FLUX, "full")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with _nothing_new(tmp_path), pytest.raises(WorkflowRLError, match="make room") as caught:
            _export(run, tmp_path / "made" / "out", "diffusers")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not isinstance(caught.value, UserError)


def test_a_target_that_appears_meanwhile_stays(
    get_run: GetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workflow_rl.export import run as module

    run, write = get_run(FLUX, "lora"), module.write_lora

    def slow(*arguments: Any) -> Path:
        (tmp_path / "out").mkdir()
        return write(*arguments)

    monkeypatch.setattr(module, "write_lora", slow)
    with pytest.raises(UserError, match="exists already"):
        _export(run, tmp_path / "out", "lora")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not list((tmp_path / "out").iterdir())


def test_what_a_killed_export_left_is_cleared_away(get_run: GetRun, tmp_path: Path) -> None:
    (tmp_path / ".tmp-out").mkdir()
    (tmp_path / ".tmp-out" / "half").write_text("")
    out = _export(get_run(FLUX, "lora"), tmp_path / "out", "lora")
    assert list(tmp_path.iterdir()) == [out]
    assert [path.name for path in out.iterdir()] == ["pytorch_lora_weights.safetensors"]
