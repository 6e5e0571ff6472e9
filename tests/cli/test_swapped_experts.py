"""Two experts swapped with an image model, through the commands: trained, stopped, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.cli.conftest import Invoke
from tests.tiny_models import save_flux, save_wan

EXPERTS = ("transformer", "transformer_2")


def _config() -> dict[str, Any]:
    stage = {"samples": 2, "num_inference_steps": 3, "optimizer": {"lr": 1e-3}}
    return {
        "output_dir": "swapped",
        "stages": {
            "t2i": {"task": "t2i", "model": "models/flux", "height": 32, "width": 32, **stage},
            "i2v": {"task": "i2v", "model": "models/a14b", "num_frames": 5, **stage},
        },
        "data": {"prompts": "prompts.txt", "prompts_per_iteration": 1},
        "rewards": [{"name": "frame_change"}],
        "training": {"iterations": 2, "checkpoint": {"every": 1}, "swap_stages": True},
        "evaluation": {"seeds_per_prompt": 1, "bootstrap_samples": 100},
        "logging": {"tensorboard": False},
    }


def _metrics(run: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def _weights(run: str) -> dict[str, torch.Tensor]:
    files = sorted(Path(run, "checkpoints/iteration_00000002").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_both_experts_train_swapped_and_after_a_stop(invoke: Invoke, workspace: Path) -> None:
    save_flux(Path("models/flux"), guidance_embeds=False, dynamic_shift=False)
    save_wan(Path("models/a14b"), image_encoder=False, boundary_ratio=0.9)
    Path("two.yaml").write_text(yaml.safe_dump(_config(), sort_keys=False))
    for arguments in (
        ("train", "two.yaml"),
        ("train", "two.yaml", "output_dir=stopped", "training.iterations=1"),
        ("resume", "stopped", "training.iterations=2"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 0, result.stderr
        assert "will not train" not in result.stdout
    weights = _weights("swapped")
    for expert in EXPERTS:
        (base_file,) = Path("models/a14b", expert).glob("*.safetensors")
        base = load_file(base_file)
        prefix = f"i2v/weights/{expert}."
        trained = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        assert trained.keys() == base.keys()
        assert any(not torch.equal(tensor, base[name]) for name, tensor in trained.items())
    assert _metrics("stopped") == _metrics("swapped")
    again = _weights("stopped")
    assert again.keys() == weights.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
