"""What a diffusers folder's JSON tells before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from workflow_rl.config import StageConfig
from workflow_rl.config.families import FAMILIES
from workflow_rl.config.model_folder import check_model_folder
from workflow_rl.errors import UserError

FLUX = {"model_index.json": {"_class_name": "FluxPipeline"}}
FLUX_VAE = {
    "vae/config.json": {"block_out_channels": [8, 16, 32]},
    "transformer/config.json": {"guidance_embeds": False},
}
WAN: dict[str, Any] = {
    "model_index.json": {"_class_name": "WanImageToVideoPipeline"},
    "vae/config.json": {"scale_factor_spatial": 4, "scale_factor_temporal": 4},
    "transformer/config.json": {"patch_size": [1, 2, 2]},
}
WAN_I2V = "WanImageToVideoPipeline"
WAN_TRANSFORMER = ["diffusers", "WanTransformer3DModel"]
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A whole safetensors file."""
SECOND = {
    "transformer_2/diffusion_pytorch_model.safetensors": NO_TENSORS,
    "transformer_2/config.json": {},
}


def _folder(path: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            (path / name).write_text(json.dumps(content))
    return path


def _check(folder: Path, **stage: Any) -> str:
    """Return the one-line message of the refusal."""
    with pytest.raises(UserError) as caught:
        check_model_folder(folder, "stages.x.model", StageConfig(**stage))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_good_folders_pass(tmp_path: Path) -> None:
    flux = _folder(tmp_path / "flux", FLUX | FLUX_VAE)
    wan = _folder(tmp_path / "wan", WAN)
    stage = StageConfig(task="t2i", height=64, width=40)
    assert check_model_folder(flux, "k", stage).name == "flux"
    stage = StageConfig(task="i2v", height=32, width=48, num_frames=9)
    assert check_model_folder(wan, "k", stage).name == "wan"


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    assert "no folder" in _check(tmp_path / "none", task="t2i")
    assert "has no model_index.json" in _check(tmp_path, task="t2i")
    (tmp_path / "model_index.json").write_text("{")
    assert "is not JSON" in _check(tmp_path, task="t2i")


def test_unsupported_family_names_the_supported(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"model_index.json": {"_class_name": "FooPipeline"}})
    message = _check(folder, task="t2i")
    assert "FooPipeline" in message
    assert all(name in message for name in FAMILIES)


def test_video_model_in_an_image_stage(tmp_path: Path) -> None:
    message = _check(_folder(tmp_path, WAN), task="t2i")
    assert "whose task is i2v, but the stage's is t2i" in message


def test_text_longer_than_the_family_takes(tmp_path: Path) -> None:
    ltx = _ltx_folder(tmp_path / "ltx")
    assert "stages.x.max_sequence_length is 200, but ltx takes at most 128 text tokens" in _check(
        ltx, task="i2v", max_sequence_length=200
    )
    later = _ltx_folder(tmp_path / "later", "LTXConditionPipeline")
    stage = StageConfig(task="i2v", max_sequence_length=256)
    assert check_model_folder(later, "k", stage).max_text_tokens == 256
    wan = _folder(tmp_path / "wan", WAN)
    assert "wan takes at most 512 text tokens" in _check(wan, task="i2v", max_sequence_length=513)


def test_frame_rate_is_for_models_that_are_told_it(tmp_path: Path) -> None:
    wan = _folder(tmp_path / "wan", WAN)
    assert "stages.x.fps is 24, but a wan model is told no frame rate" in _check(
        wan, task="i2v", fps=24.0
    )
    stage = StageConfig(task="i2v", fps=24.0)
    assert check_model_folder(_ltx_folder(tmp_path / "ltx"), "k", stage).takes_fps


def _ltx_folder(path: Path, pipeline: str = "LTXPipeline") -> Path:
    vae = {"spatio_temporal_scaling": [True] * 3, "patch_size": 4, "patch_size_t": 1}
    files = {"model_index.json": {"_class_name": pipeline}, "vae/config.json": vae}
    return _folder(path, files)


@pytest.mark.parametrize(
    ("files", "file", "lacks"),
    [
        (FLUX | FLUX_VAE, "vae/config.json", "block_out_channels"),
        (WAN, "transformer/config.json", "patch_size"),
    ],
)
def test_a_key_that_a_file_lacks(
    tmp_path: Path, files: dict[str, Any], file: str, lacks: str
) -> None:
    task = "t2i" if files["model_index.json"] == FLUX["model_index.json"] else "i2v"
    message = _check(_folder(tmp_path, files | {file: {}}), task=task)
    assert f"{file} has no '{lacks}'; download the model again" in message


def test_size_the_model_cannot_make(tmp_path: Path) -> None:
    flux = _folder(tmp_path / "flux", FLUX | FLUX_VAE)
    assert "stages.x.height is 63, but this model makes multiples of 8; use 64" in _check(
        flux, task="t2i", height=63, width=64
    )
    wan = _folder(tmp_path / "wan", WAN)
    assert "stages.x.width is 40, but this model makes multiples of 16; use 32" in _check(
        wan, task="i2v", height=32, width=40
    )
    assert "num_frames is 10, but this model makes 4·n + 1 frames; use 9" in _check(
        wan, task="i2v", num_frames=10
    )


def test_one_frame_of_a_model_whose_first_frame_is_given(tmp_path: Path) -> None:
    ltx, wan = _ltx_folder(tmp_path / "ltx"), _folder(tmp_path / "wan", WAN)
    ti2v = {"model_index.json": {"_class_name": "WanPipeline", "expand_timesteps": True}}
    says = "stages.x.num_frames is 1, but this model's first frame is the image that it is given"
    for folder, fewest in ((ltx, 9), (_folder(tmp_path / "ti2v", WAN | ti2v), 5)):
        message = _check(folder, task="i2v", num_frames=1)
        assert says in message
        assert message.endswith(f"use {fewest} or more")
    assert check_model_folder(wan, "k", StageConfig(task="i2v", num_frames=1)).name == "wan"


FLUX_DEV = {"transformer/config.json": {"guidance_embeds": True}}
EXPERTS = {"boundary_ratio": 0.9, "transformer_2": WAN_TRANSFORMER}
KLEIN = {"model_index.json": {"_class_name": "Flux2KleinPipeline", "is_distilled": True}}
Z_IMAGE = {"model_index.json": {"_class_name": "ZImagePipeline"}}
WAN_WITH_CLIP = {"transformer/config.json": {"patch_size": [1, 2, 2], "image_dim": 8}}
WAN_A14B = {"model_index.json": WAN["model_index.json"] | EXPERTS}


@pytest.mark.parametrize(
    ("files", "stage", "fault"),
    [
        (FLUX, {"guidance": "embedded"}, "asks for embedded guidance (guidance_scale None), but"),
        (FLUX | FLUX_DEV, {"guidance": "cfg", "guidance_scale": 2}, "has only embedded; leave"),
        (FLUX | FLUX_DEV, {"negative_prompt": "blur"}, "ignored: guidance is embedded; leave it"),
        (KLEIN, {"guidance_scale": 4}, "asks for cfg guidance (guidance_scale 4.0), but this"),
        (FLUX, {"guidance": "none", "guidance_scale": 3}, "guidance is none, but guidance_scale"),
        (FLUX, {"guidance": "cfg"}, "guidance is cfg, but guidance_scale is None, and this"),
        (FLUX, {"negative_prompt": "blur"}, "guidance is none; set guidance_scale > 1 or leave"),
        (Z_IMAGE, {"negative_prompt": "blur"}, "set guidance_scale > 0 or leave it out"),
        (FLUX, {"guidance_scale": 3, "guidance_scale_2": 2}, "guidance_scale_2 needs a model of"),
        (FLUX, {"guidance_scale": 3, "cfg_truncation": 0.5}, "cfg_truncation needs a Z-Image"),
        (Z_IMAGE, {"cfg_normalization": 1}, "cfg_normalization needs a Z-Image model and class"),
    ],
)
def test_guidance_that_the_model_lacks_or_ignores(
    tmp_path: Path, files: dict[str, Any], stage: dict[str, Any], fault: str
) -> None:
    message = _check(_folder(tmp_path, FLUX_VAE | files), task="t2i", **stage)
    assert message.startswith("stages.x")
    assert fault in message


@pytest.mark.parametrize(
    ("files", "stage"),
    [
        (FLUX, {}),
        (FLUX, {"guidance_scale": 3.0, "negative_prompt": "blur"}),
        (FLUX, {"guidance": "none", "guidance_scale": 1.0}),
        (FLUX | FLUX_DEV, {}),
        (FLUX | FLUX_DEV, {"guidance": "embedded", "guidance_scale": 2.0}),
        (KLEIN, {"guidance_scale": 1.0}),
        (Z_IMAGE, {"guidance_scale": 0.5, "negative_prompt": "blur"}),
        (Z_IMAGE, {"guidance_scale": 4.0, "cfg_normalization": 1.0, "cfg_truncation": 0.5}),
    ],
)
def test_guidance_that_the_model_has(
    tmp_path: Path, files: dict[str, Any], stage: dict[str, Any]
) -> None:
    check_model_folder(_folder(tmp_path, FLUX_VAE | files), "k", StageConfig(task="t2i", **stage))


def test_the_second_of_two_experts_may_have_its_own_scale(tmp_path: Path) -> None:
    stage = StageConfig(task="i2v", guidance_scale=3.5, guidance_scale_2=4.0)
    check_model_folder(_folder(tmp_path, WAN | WAN_A14B | SECOND), "k", stage)


@pytest.mark.parametrize("null", [None, [None, None]], ids=str)
@pytest.mark.parametrize(
    ("files", "task", "part"),
    [
        (FLUX | FLUX_VAE, "t2i", "tokenizer_2"),
        (FLUX | FLUX_VAE, "t2i", "vae"),
        (Z_IMAGE | FLUX_VAE, "t2i", "text_encoder"),
        (WAN | WAN_WITH_CLIP, "i2v", "image_encoder"),
    ],
)
def test_a_part_that_is_null_is_named(
    tmp_path: Path, files: dict[str, Any], task: str, part: str, null: object
) -> None:
    index = {"model_index.json": files["model_index.json"] | {part: null}}
    message = _check(_folder(tmp_path, files | index), task=task)
    assert f"has null for its {part} in model_index.json" in message


@pytest.mark.parametrize("null", [None, [None, None]], ids=str)
def test_a_part_that_a_model_does_not_use_may_be_null(tmp_path: Path, null: object) -> None:
    nulls = dict.fromkeys(("image_encoder", "image_processor", "transformer_2"), null)
    index = {"model_index.json": WAN["model_index.json"] | nulls}
    check_model_folder(_folder(tmp_path, WAN | index), "k", StageConfig(task="i2v"))


def test_missing_component_is_named(tmp_path: Path) -> None:
    assert "vae/config.json is missing" in _check(_folder(tmp_path, FLUX), task="t2i")


@pytest.mark.parametrize(
    ("pipeline", "mark", "fault"),
    [
        (WAN_I2V, {"boundary_ratio": 0.9}, "boundary_ratio 0.9 but no transformer_2"),
        (WAN_I2V, {"transformer_2": WAN_TRANSFORMER}, "a transformer_2 but no boundary_ratio"),
        ("WanPipeline", {}, "a text-to-video model that takes no first frame"),
        ("WanPipeline", {"boundary_ratio": 0.875, "transformer_2": WAN_TRANSFORMER}, "text-to-vid"),
    ],
)
def test_wan_folders_that_cannot_work_are_refused_before_loading(
    tmp_path: Path, pipeline: str, mark: dict[str, Any], fault: str
) -> None:
    index = WAN["model_index.json"] | {"_class_name": pipeline} | mark
    folder = _folder(tmp_path, WAN | {"model_index.json": index})
    message = _check(folder, task="i2v")
    assert message.startswith("stages.x.model: ")
    assert fault in message


@pytest.mark.parametrize(
    ("pipeline", "mark"),
    [
        (WAN_I2V, {"boundary_ratio": 0.9, "transformer_2": WAN_TRANSFORMER}),
        (WAN_I2V, {"expand_timesteps": True}),
        ("WanPipeline", {"expand_timesteps": True}),
    ],
)
def test_wan_2_2_folders_are_known(tmp_path: Path, pipeline: str, mark: dict[str, Any]) -> None:
    index = WAN["model_index.json"] | {"_class_name": pipeline} | mark
    folder = _folder(tmp_path, WAN | SECOND | {"model_index.json": index})
    assert check_model_folder(folder, "k", StageConfig(task="i2v")).name == "wan"


def test_wan_2_1_keys_are_not_wan_2_2(tmp_path: Path) -> None:
    absent: dict[str, Any] = {
        "expand_timesteps": False,
        "boundary_ratio": None,
        "transformer_2": [None, None],
    }
    index = WAN["model_index.json"] | absent
    folder = _folder(tmp_path, WAN | {"model_index.json": index})
    assert check_model_folder(folder, "k", StageConfig(task="i2v")).name == "wan"


def test_each_family_builds_its_cards(tmp_path: Path) -> None:
    from workflow_rl.models import build_card
    from workflow_rl.request import TaskType

    for pipeline, family in FAMILIES.items():
        index = {"_class_name": pipeline, "expand_timesteps": pipeline == "WanPipeline"}
        folder = _folder(tmp_path / family.name, {"model_index.json": index})
        card = build_card(folder, TaskType(family.task))
        assert (card.family, card.task) == (family.name, family.task)
