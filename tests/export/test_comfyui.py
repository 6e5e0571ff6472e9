"""Names that ComfyUI accepts, held to the stock library's converters and to ComfyUI's rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from diffusers.loaders.single_file_utils import (
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_wan_transformer_to_diffusers,
)
from safetensors.torch import load_file, safe_open

from tests.export.conftest import GetRun
from workflow_rl.errors import UserError
from workflow_rl.export.comfyui import LAYOUTS, lora_keys
from workflow_rl.export.comfyui_files import original_tensors
from workflow_rl.export.options import ExportFormat, ExportOptions, KeyFormat
from workflow_rl.export.run import export_run

Tensors = dict[str, torch.Tensor]
LORA, MERGED = ExportFormat.LORA, ExportFormat.MERGED


def _coded(model: torch.nn.Module) -> Tensors:
    """Return tensors by the names of ``model``, with its rows and one column of random values."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn((tensor.shape[0], 1)[: tensor.ndim], generator=generator)
        for name, tensor in model.state_dict().items()
    }


def _full_width_flux() -> Tensors:
    """The stock converter knows FLUX's real width alone: its rows, but one column, are small."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True)
    return _coded(model)


def _equal(converted: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(converted[name], tensor), name


def test_the_stock_converter_takes_flux_back() -> None:
    tensors = _full_width_flux()
    original = original_tensors("flux", tensors)
    assert original["single_blocks.1.linear1.weight"].shape[0] == 7 * 3072
    assert "double_blocks.0.img_attn.norm.query_norm.scale" in original
    _equal(convert_flux_transformer_checkpoint_to_diffusers(original), tensors)


def test_the_stock_converter_takes_wan_back() -> None:
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            ffn_dim=32,
            num_layers=2,
            image_dim=8,
            added_kv_proj_dim=24,
        )
    tensors = _coded(model)
    original = original_tensors("wan", tensors)
    assert "blocks.1.cross_attn.k_img.weight" in original
    assert "head.modulation" in original
    _equal(convert_wan_transformer_to_diffusers(dict(original)), tensors)


def _comfyui_weights(family: str, lora: Tensors, native: Tensors) -> Tensors:
    """Return what ComfyUI's LoRA loader makes of ``native``; every key of ``lora`` must be used.

    Its rule, from ``comfy/lora.py`` and ``comfy/weight_adapter/lora.py``: a map from the LoRA's
    names to weights has ``diffusion_model.<name>`` for each weight and, for FLUX,
    ``transformer.<name in diffusers>`` for each layer or its rows; the weight gets B A times alpha
    over A's rows, or times 1 without a tensor ``alpha``.
    """
    patched = {name: tensor.clone() for name, tensor in native.items()}
    used = set()
    for key in [name.removesuffix(".lora_A.weight") for name in lora if name.endswith("A.weight")]:
        a, b = lora[f"{key}.lora_A.weight"], lora[f"{key}.lora_B.weight"]
        alpha = lora.get(f"{key}.alpha")
        used |= {f"{key}.lora_A.weight", f"{key}.lora_B.weight", f"{key}.alpha"}
        update = (b @ a) * (1.0 if alpha is None else alpha.item() / len(a))
        if key.startswith("diffusion_model."):
            patched[f"{key.removeprefix('diffusion_model.')}.weight"] += update
            continue
        place = LAYOUTS[family].layer(key.removeprefix("transformer."))
        assert family == "flux"
        assert place is not None
        if place.swapped:
            update = torch.cat(update.chunk(2)[::-1])
        width = len(b) // 4 if place.part == 3 else len(b)  # q, k, v are a fourth of the MLP
        start = place.part * width
        patched[f"{place.name}.weight"][start : start + len(b)] += update
    assert used == lora.keys()
    return patched


def _file(get_run: GetRun, name: str, kind: str, form: ExportFormat, folder: Path) -> Path:
    run = get_run(name, kind)
    options = ExportOptions(run.stage, form, folder, key_format=KeyFormat.COMFYUI)
    export_run(run.dir, options)
    (file,) = folder.iterdir()
    assert file.name == f"{run.dir.name}-{run.stage}.safetensors"
    return file


@pytest.mark.parametrize(("name", "family"), [("flux-dev", "flux"), ("wan-2.1", "wan")])
def test_comfyui_loads_the_lora(get_run: GetRun, tmp_path: Path, name: str, family: str) -> None:
    lora = load_file(_file(get_run, name, "lora", LORA, tmp_path / "lora"))
    merged = load_file(_file(get_run, name, "lora", MERGED, tmp_path / "merged"))
    folder = get_run(name, "lora").model / "transformer"
    base = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    patched = _comfyui_weights(family, lora, original_tensors(family, base))
    assert patched.keys() == merged.keys()
    for key, tensor in merged.items():
        torch.testing.assert_close(patched[key], tensor, atol=1e-6, rtol=0)
    assert {float(v) for k, v in lora.items() if k.endswith(".alpha")} == {5.0}


def test_the_names_of_a_wan_lora() -> None:
    """As in the LoRAs that people share for ComfyUI."""
    layers = ["blocks.3.attn1.to_q", "blocks.0.attn2.to_out.0", "blocks.0.ffn.net.0.proj"]
    assert list(lora_keys("wan", layers).values()) == [
        "diffusion_model.blocks.3.self_attn.q",
        "diffusion_model.blocks.0.cross_attn.o",
        "diffusion_model.blocks.0.ffn.0",
    ]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_stock_single_file_loader_takes_the_merged_file(
    get_run: GetRun, tmp_path: Path, kind: str
) -> None:
    """It reads the files that ComfyUI reads."""
    run = get_run("wan-2.1", kind)
    file = _file(get_run, "wan-2.1", kind, MERGED, tmp_path / "out")
    config = str(run.model / "transformer")
    transformer = WanTransformer3DModel.from_single_file(str(file), config=config)
    pipeline = run.case.pipeline_class.from_pretrained(run.model, transformer=transformer)
    assert float((run.made_by_stock(pipeline) - run.made_by_us()).abs().max()) <= 1e-5
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata()["workflow_rl.stage"] == "i2v"


@pytest.mark.parametrize("family", LAYOUTS)
def test_what_is_not_mapped_is_refused(family: str) -> None:
    with pytest.raises(UserError, match=rf"^blocks\.0\.new of this {family} model has no"):
        lora_keys(family, ["blocks.0.new"])
    with pytest.raises(UserError, match="and 1 more"):
        original_tensors(family, {"a.weight": torch.zeros(1), "b": torch.zeros(1)})
