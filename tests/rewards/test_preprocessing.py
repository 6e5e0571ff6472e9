"""What each network is shown of noise is what the published code would show it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPImageProcessorPil, Qwen2VLImageProcessorPil, ViTConfig, ViTModel

from tests.rewards import published_pixels as published
from tests.rewards.qwen_checkpoints import (
    LORA,
    VIDEO_TEMPLATE,
    save_hps,
    save_videoalign,
    write_config,
)
from tests.rewards.test_clip_scores import head_state, open_clip_shapes
from tests.rewards.test_image_reward import shapes as image_reward_shapes
from tests.rewards.tiny_networks import EOS, by_formula, clip_words, save_clip, save_tensors
from tests.rewards.tiny_qwen import HIDDEN, reward_model, save_base
from workflow_rl.errors import UserError
from workflow_rl.rewards import hpsv3, videoalign
from workflow_rl.rewards.aesthetic import Aesthetic
from workflow_rl.rewards.base import Reward, RewardBatch, score_safely
from workflow_rl.rewards.clip_scores import CONTEXT, ClipScore, PickScore, tokenise
from workflow_rl.rewards.feature_consistency import FirstFrameConsistency, SubjectConsistency
from workflow_rl.rewards.hpsv2 import HPSv2
from workflow_rl.rewards.hpsv3 import PreferenceHead
from workflow_rl.rewards.image_reward import TEXT_TOKENS, ImageReward
from workflow_rl.rewards.videoalign import VideoAlign, frame_positions

SIDE = 16
"""Of the tiny networks' images."""

SIZES = [(9, 13), (11, 7), (61, 97), (203, 122), (20, 39), (39, 20), (16, 16), (17, 16), (16, 31)]
"""Smaller and larger than `SIDE`, both orientations; some leave 15 pixels over for the crop."""


def noise(height: int, width: int, frames: int | None = None) -> Tensor:
    """Random numbers in [0, 1], not of 8 bits, as models make them; ``[2, 3, (T,) H, W]``."""
    shape = (2, 3, height, width) if frames is None else (2, 3, frames, height, width)
    return torch.rand(shape, generator=torch.Generator().manual_seed(height))


def as_file(media: Tensor) -> published.Bytes:
    """The bytes that a file of it holds, channels last."""
    return np.round(media.movedim(-3, -1).numpy() * 255).astype(np.uint8)


def shown(reward: Reward, network: nn.Module, media: Tensor, fps: float = 8.0) -> Tensor:
    """What ``network`` gets as its pixels while ``reward`` scores ``media``."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.extend(tensor for name, tensor in kwargs.items() if name.startswith("pixel_values"))

    hook = network.register_forward_pre_hook(keep, with_kwargs=True)
    kind, names = ("image" if media.dim() == 4 else "video"), ["0", "1"]
    result = score_safely(reward, RewardBatch(["a b", "c"], names, media, kind, fps))  # type: ignore[arg-type]
    hook.remove()
    assert result.failures == {}
    return torch.cat(seen)


def nearly(found: Tensor, expected: Any, tolerance: float = 2e-6) -> None:
    """Equal but for the rounding of float32."""
    wanted = torch.as_tensor(np.asarray(expected), dtype=torch.float32)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_clip(tmp_path_factory.mktemp("clip"))


# --- CLIP and BLIP


def clipscore(clip: str, folder: Path) -> tuple[Reward, nn.Module]:
    reward = ClipScore(clip)
    return reward, reward.loaded.get()[0]


def aesthetic(clip: str, folder: Path) -> tuple[Reward, nn.Module]:
    reward = Aesthetic(save_tensors(folder / "head.safetensors", head_state()), clip)
    return reward, reward.loaded.get()[0]


def image_reward(clip: str, folder: Path) -> tuple[Reward, nn.Module]:
    weights = save_tensors(folder / "w.safetensors", by_formula(image_reward_shapes()))
    reward = ImageReward(weights, clip)  # CLIP's words do: the text is not looked at here
    return reward, reward.loaded.get()[0].vision


@pytest.mark.parametrize("make", [clipscore, aesthetic, image_reward])
def test_clipscore_aesthetic_and_imagereward_are_shown_what_openais_transform_makes(
    make: Callable[[str, Path], tuple[Reward, nn.Module]], clip: str, tmp_path: Path
) -> None:
    reward, network = make(clip, tmp_path)
    for size in SIZES:
        media = noise(*size)
        expected = [published.openai_clip(image, SIDE) for image in as_file(media)]
        nearly(shown(reward, network, media), expected)


def test_pickscore_is_shown_what_clips_processor_in_transformers_makes(clip: str) -> None:
    processor = CLIPImageProcessorPil(  # preprocessor_config.json of laion/CLIP-ViT-H-14, smaller
        do_resize=True,
        size={"shortest_edge": SIDE},
        resample=3,
        do_center_crop=True,
        crop_size={"height": SIDE, "width": SIDE},
        do_normalize=True,
        image_mean=list(published.CLIP[0]),
        image_std=list(published.CLIP[1]),
    )
    reward = PickScore(clip, clip)
    for size in SIZES:
        media = noise(*size)
        expected = processor(list(as_file(media)), return_tensors="np").pixel_values
        nearly(shown(reward, reward.loaded.get()[0], media), expected)


def test_hpsv2_is_shown_numbers_resized_and_padded_as_published(clip: str, tmp_path: Path) -> None:
    weights = save_tensors(tmp_path / "hps.safetensors", by_formula(open_clip_shapes()))
    reward = HPSv2(weights, clip)
    overshoot = 0.0
    for size in SIZES:
        media = noise(*size)
        found = shown(reward, reward.loaded.get()[0], media)
        nearly(found, [published.hpsv2(image, SIDE) for image in as_file(media)], 5e-6)
        overshoot = max(overshoot, float(found.max()))
    assert overshoot > (1 - 0.40821073) / 0.27577711 + 0.1  # whiter than white: not of 8 bits


def test_long_prompts_are_cut_before_the_token_that_ends_them_as_published() -> None:
    whole = clip_words()("a b " * 60).input_ids
    for length in (CONTEXT, TEXT_TOKENS, 10):
        (cut,) = tokenise(clip_words(), ["a b " * 60], length).input_ids.tolist()
        assert cut == [*whole[: length - 1], EOS]
    assert (CONTEXT, TEXT_TOKENS) == (77, 35)


# --- DINO


@pytest.mark.parametrize("make", [SubjectConsistency, FirstFrameConsistency])
def test_dino_is_shown_what_vbenchs_transform_makes(
    make: Callable[..., Reward], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(**shape, image_size=24, patch_size=8, intermediate_size=16)
    ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    reward = make(model=str(tmp_path), size=24)
    for height, width in ((9, 13), (11, 7), (61, 97), (203, 122), (24, 24), (24, 31)):
        media = noise(height, width, frames=3)
        found = shown(reward, reward.features.model.get(), media)  # type: ignore[attr-defined]
        frames = [frame for video in as_file(media.movedim(1, 2)) for frame in video]
        for pixels, frame in zip(found, frames, strict=True):
            expected, exact = published.vbench_dino(frame, 24)
            tie = np.abs(exact - np.floor(exact) - 0.5).transpose(2, 0, 1) < 1e-3
            assert tie.mean() < 0.05 or max(height, width) < 30
            nearly(pixels[torch.from_numpy(~tie)], expected[~tie])
            assert np.abs(pixels.numpy() - expected)[tie].max(initial=0) < 1.01 / 255 / 0.224


# --- Qwen2-VL


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    save_base(folder / "base")
    return folder


QWEN_SIZES = [(301, 517), (613, 404), (900, 611), (97, 143), (448, 448)]
"""Nearly the published number of pixels, more, fewer and as many."""


def test_hpsv3_is_shown_what_qwens_processor_makes_of_the_published_size(base: Path) -> None:
    model = reward_model(hpsv3.TOKENS)
    reward = save_hps(base, (model, PreferenceHead(HIDDEN).eval()))
    network = reward.loaded.get()[0].model
    pixels = 256 * 28 * 28  # prepare_batch in hpsv3/inference.py of MizzenAI/HPSv3
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": pixels, "longest_edge": pixels})
    for height, width in QWEN_SIZES:
        media = noise(height, width)
        expected = processor(list(as_file(media)), return_tensors="np")
        rows, columns = published.qwen_size(height, width, pixels, pixels)
        assert expected.image_grid_thw[0].tolist() == [1, rows // 14, columns // 14]
        nearly(shown(reward, network, media), expected.pixel_values)


@pytest.fixture
def video_reward(base: Path, tmp_path: Path) -> VideoAlign:
    (tmp_path / "base").symlink_to(base / "base")
    write_config(tmp_path)
    (tmp_path / "template.txt").write_text(VIDEO_TEMPLATE)
    model = reward_model(videoalign.TOKENS)
    return save_videoalign(tmp_path, model, torch.randn(3, HIDDEN), "full")[0]


def check_video(reward: VideoAlign, media: Tensor, fps: float, shown_fps: float, most: int) -> None:
    """Assert that a video is shown as published."""
    found = shown(reward, reward.loaded.get().reader.model, media, fps)
    positions = published.videoalign_positions(media.shape[2], fps, shown_fps)
    expected, ties = [], []
    for video in as_file(media.movedim(1, 2)):
        exact = [published.videoalign_frame(video[t], 128 * 28 * 28, most) for t in positions]
        frames = [published.normalised(np.round(frame) / 255, published.CLIP) for frame in exact]
        expected.append(published.qwen_patches(np.stack(frames)))
        near = [np.abs(f - np.floor(f) - 0.5).transpose(2, 0, 1) < 1e-2 for f in exact]
        ties.append(published.qwen_patches(np.stack(near)))
    wanted, tie = np.concatenate(expected), np.concatenate(ties).astype(bool)
    assert found.shape == wanted.shape
    assert tie.mean() < 0.03
    nearly(found[torch.from_numpy(~tie)], wanted[~tie])
    assert np.abs(found.numpy() - wanted)[tie].max(initial=0) < 1.01 / 255 / 0.26


@pytest.mark.parametrize(
    ("size", "frames", "fps"),
    [((301, 517), 9, 16.0), ((613, 404), 11, 4.4), ((97, 143), 5, 8.0), ((211, 397), 4, 24.0)],
)
def test_videoalign_is_shown_the_published_frames_and_pixels(
    video_reward: VideoAlign, size: tuple[int, int], frames: int, fps: float
) -> None:
    check_video(video_reward, noise(*size, frames), fps, 2.0, 256 * 28 * 28)


def test_videoalign_keeps_to_the_frames_of_its_checkpoint(
    video_reward: VideoAlign, tmp_path: Path
) -> None:
    data = {"prompt_template_type": "detailed_special", "fps": 4.0, "max_frame_pixels": 130_000}
    write_config(tmp_path, data_config=data)
    check_video(video_reward, noise(301, 517, 17), 8.0, 4.0, 130_000)
    write_config(tmp_path, data_config=data)
    other = VideoAlign(str(tmp_path), video_reward.template, video_reward.base, fps=2.0)
    check_video(other, noise(301, 517, 17), 8.0, 2.0, 130_000)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample_type": "multi_pts"}, "sample_type 'multi_pts'"),
        ({"num_frames": 16}, "num_frames 16"),
        ({"fps": "2"}, "fps '2'"),
        ({"max_frame_pixels": None}, "max_frame_pixels None"),
    ],
)
def test_frames_that_cannot_be_shown_so_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = {"data_config": {"prompt_template_type": "detailed_special"} | changes}
    with pytest.raises(UserError, match=words):
        videoalign.read_frames(config | {"peft_lora_config": LORA})


@pytest.mark.parametrize("fps", [1.0, 2.0, 7.9, 8.0, 16.0, 23.976, 24.0, 60.0])
def test_videoalign_takes_the_published_frames(fps: float) -> None:
    for length in (*range(2, 40), 81, 121, 241, 2000):
        assert frame_positions(length, fps, 2.0) == published.videoalign_positions(length, fps, 2.0)
