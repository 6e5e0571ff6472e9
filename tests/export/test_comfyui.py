"""Names that ComfyUI accepts, held to the stock library's converters and to ComfyUI's rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, safe_open

from tests.export.comfyui_names import LORA_BY_DIFFUSERS_NAME, ORIGINAL_NAMES
from tests.export.conftest import A14B, ALL_CASES, GetRun
from tests.export.tiny_run import TinyRun
from workflow_rl.config.families import FAMILIES
from workflow_rl.errors import UserError
from workflow_rl.export.comfyui import lora_keys, tensor_places
from workflow_rl.export.comfyui_files import original_tensors
from workflow_rl.export.comfyui_layouts import LAYOUTS
from workflow_rl.export.options import ExportFormat, ExportOptions, KeyFormat
from workflow_rl.export.run import export_run

Tensors = dict[str, torch.Tensor]
LORA, MERGED = ExportFormat.LORA, ExportFormat.MERGED
NOT_FLUX = [name for name in ALL_CASES if not name.startswith("flux-")]
"""The stock converter knows FLUX.1's real width alone."""


def _index(run: TinyRun) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((run.model / "model_index.json").read_text())
    return index


def _family(run: TinyRun) -> str:
    return FAMILIES[_index(run)["_class_name"]].name


def _base(run: TinyRun, component: str = "transformer") -> Tensors:
    files = (run.model / component).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _stock_converter(class_name: str) -> Callable[[Tensors], Tensors]:
    """Return what diffusers turns a file under the authors' names into a model's tensors with."""
    convert: Callable[[Tensors], Tensors]
    convert = SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"]
    return convert


def _equal(converted: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(converted[name], tensor), name


def test_the_stock_converter_takes_flux_back() -> None:
    """At its real width: all rows, but one column of random values."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn((tensor.shape[0], 1)[: tensor.ndim], generator=generator)
        for name, tensor in model.state_dict().items()
    }
    original = original_tensors("flux", tensors)
    assert original["single_blocks.1.linear1.weight"].shape[0] == 7 * 3072
    _equal(_stock_converter("FluxTransformer2DModel")(original), tensors)


@pytest.mark.parametrize("name", NOT_FLUX)
def test_the_stock_converter_takes_every_tensor_back(get_run: GetRun, name: str) -> None:
    run = get_run(name, "lora")
    tensors = _base(run)
    original = original_tensors(_family(run), tensors)
    _equal(_stock_converter(_index(run)["transformer"][1])(original), tensors)


@pytest.mark.parametrize("name", ALL_CASES)
def test_a_model_has_its_authors_names(get_run: GetRun, name: str) -> None:
    """Converters leave names alone that they don't know: those of diffusers pass them too."""
    run = get_run(name, "lora")
    family = _family(run)
    for original in original_tensors(family, _base(run)):
        assert re.fullmatch(ORIGINAL_NAMES[family], original), original


def _comfyui_weights(family: str, lora: Tensors, base: Tensors) -> Tensors:
    """Return what ComfyUI's LoRA loader makes of a base; every key of ``lora`` must be used.

    Its rule, from ``comfy/lora.py`` and ``comfy/weight_adapter/lora.py``: a map from the LoRA's
    names to weights has ``diffusion_model.<name>`` for each weight and, for some families,
    ``transformer.<name in diffusers>`` for each layer or its rows; the weight gets B A times alpha
    over A's rows, or times 1 without a tensor ``alpha``.
    """
    patched = {k: tensor.clone() for k, tensor in original_tensors(family, base).items()}
    places = tensor_places(family, base)
    used = set()
    for key in [name.removesuffix(".lora_A.weight") for name in lora if name.endswith("A.weight")]:
        a, b = lora[f"{key}.lora_A.weight"], lora[f"{key}.lora_B.weight"]
        alpha = lora.get(f"{key}.alpha")
        used |= {f"{key}.lora_A.weight", f"{key}.lora_B.weight", f"{key}.alpha"}
        update = (b @ a) * (1.0 if alpha is None else alpha.item() / len(a))
        prefix, _, layer = key.partition(".")
        if prefix == "diffusion_model":
            patched[f"{layer}.weight"] += update
            continue
        assert prefix == "transformer"
        assert re.fullmatch(LORA_BY_DIFFUSERS_NAME[family], layer), key
        place = places[f"{layer}.weight"]
        if place.swapped:
            update = torch.cat(update.chunk(2)[::-1])
        width = len(b) // 4 if place.part == 3 else len(b)  # q, k, v are a fourth of the MLP
        start = place.part * width
        patched[place.name][start : start + len(b)] += update
    assert used == lora.keys()
    return patched


def _files(
    get_run: GetRun, name: str, kind: str, form: ExportFormat, folder: Path
) -> dict[str, Path]:
    """Return the file of each transformer, exported for ComfyUI."""
    run = get_run(name, kind)
    options = ExportOptions(run.stage, form, folder, key_format=KeyFormat.COMFYUI)
    export_run(run.dir, options)
    stem = f"{run.dir.name}-{run.stage}"
    found = sorted(path.name for path in folder.iterdir())
    if name != A14B:
        assert found == [f"{stem}.safetensors"]
        return {"transformer": folder / found[0]}
    components = ("transformer", "transformer_2")
    assert found == [f"{stem}-{component}.safetensors" for component in components]
    return {c: folder / file for c, file in zip(components, found, strict=True)}


@pytest.mark.parametrize("name", ALL_CASES)
def test_comfyui_loads_the_lora(get_run: GetRun, tmp_path: Path, name: str) -> None:
    run = get_run(name, "lora")
    loras = _files(get_run, name, "lora", LORA, tmp_path / "lora")
    merged = _files(get_run, name, "lora", MERGED, tmp_path / "merged")
    for component, file in loras.items():
        lora = load_file(file)
        patched = _comfyui_weights(_family(run), lora, _base(run, component))
        expected = load_file(merged[component])
        assert patched.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(patched[key], tensor, atol=1e-6, rtol=0)
        assert {float(v) for k, v in lora.items() if k.endswith(".alpha")} == {5.0}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (
            "wan",
            {
                "blocks.3.attn1.to_q": "diffusion_model.blocks.3.self_attn.q",
                "blocks.0.attn2.to_out.0": "diffusion_model.blocks.0.cross_attn.o",
                "blocks.0.ffn.net.0.proj": "diffusion_model.blocks.0.ffn.0",
            },
        ),
        (
            "ltx",
            {
                "proj_in": "diffusion_model.patchify_proj",
                "transformer_blocks.0.ff.net.2": "diffusion_model.transformer_blocks.0.ff.net.2",
            },
        ),
        (
            "flux2",
            {
                "transformer_blocks.0.attn.to_q": "transformer.transformer_blocks.0.attn.to_q",
                "single_stream_modulation.linear": "diffusion_model.single_stream_modulation.lin",
            },
        ),
        ("sd3", {"transformer_blocks.1.attn2.to_q": "transformer.transformer_blocks.1.attn2.to_q"}),
        (
            "qwen_image",
            {"transformer_blocks.0.img_mod.1": "transformer.transformer_blocks.0.img_mod.1"},
        ),
        ("z_image", {"layers.0.attention.to_k": "transformer.layers.0.attention.to_k"}),
    ],
)
def test_the_names_of_a_lora(family: str, names: dict[str, str]) -> None:
    """As in the LoRAs that people share for ComfyUI."""
    assert lora_keys(family, names) == names


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "lora") for name in NOT_FLUX), ("wan-2.1", "full")]
)
def test_the_stock_single_file_loader_takes_the_merged_file(
    get_run: GetRun, tmp_path: Path, name: str, kind: str
) -> None:
    """It reads the files that ComfyUI reads."""
    run = get_run(name, kind)
    parts = {}
    for component, file in _files(get_run, name, kind, MERGED, tmp_path / "out").items():
        loader = getattr(diffusers, _index(run)[component][1])
        parts[component] = loader.from_single_file(str(file), config=str(run.model / component))
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["workflow_rl.component"] == component
    pipeline = run.case.pipeline_class.from_pretrained(run.model, **parts)
    assert float((run.made_by_stock(pipeline) - run.made_by_us()).abs().max()) <= 1e-5


@pytest.mark.parametrize("family", LAYOUTS)
def test_what_is_not_mapped_is_refused(family: str) -> None:
    with pytest.raises(UserError, match=rf"^blocks\.0\.new of this {family} model has no"):
        lora_keys(family, ["blocks.0.new"])
    with pytest.raises(UserError, match="and 1 more"):
        original_tensors(family, {"a.weight": torch.zeros(1), "b": torch.zeros(1)})
