"""Every component that ``model_index.json`` names has its files, before anything loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from workflow_rl.config.component_files import check_components
from workflow_rl.errors import UserError

INDEX = {
    "_class_name": "WanImageToVideoPipeline",
    "boundary_ratio": None,
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "image_processor": ["transformers", "CLIPImageProcessor"],
    "feature_extractor": ["transformers", "CLIPFeatureExtractor"],
    "transformer_2": [None, None],
}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
FILES = {
    "tokenizer": "spiece.model",
    "scheduler": "scheduler_config.json",
    "image_processor": "preprocessor_config.json",
    "feature_extractor": "preprocessor_config.json",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for component, file in FILES.items():
        (tmp_path / component).mkdir()
        (tmp_path / component / file).write_text("{}")
        (tmp_path / component / "other.json").write_text("{}")
    (tmp_path / "transformer").mkdir()
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / WEIGHTS)
    return tmp_path


def test_a_whole_folder_gives_its_weight_files(folder: Path) -> None:
    assert check_components(folder, INDEX)["transformer"].files == (folder / WEIGHTS,)


@pytest.mark.parametrize(("component", "file"), FILES.items())
def test_a_component_without_its_file_is_named(folder: Path, component: str, file: str) -> None:
    """Of an empty tokenizer transformers makes one to which all prompts are alike."""
    (folder / component / file).unlink()
    with pytest.raises(
        UserError, match=f"{component} has none of .*{file.rpartition('.')[2]}.*again"
    ):
        check_components(folder, INDEX)


def test_a_module_without_weights_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match="transformer holds no weights in safetensors"):
        check_components(folder, INDEX)


def test_a_component_of_another_library_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    index = INDEX | {"scheduler": ["my_models", "MyScheduler"]}
    with pytest.raises(UserError) as caught:
        check_components(folder, index)
    message = str(caught.value)
    assert "names a MyScheduler of the library 'my_models' for its scheduler" in message
    assert "loaded from diffusers and transformers alone; save the model with" in message


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json", "vocab.txt"])
def test_a_vocabulary_comes_in_several_formats(folder: Path, file: str) -> None:
    (folder / "tokenizer" / "spiece.model").rename(folder / "tokenizer" / file)
    check_components(folder, INDEX)
