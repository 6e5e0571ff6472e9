"""Train a text → image → video chain with your own reward, through the public API alone.

    python examples/train_chain.py --iterations 10
    python examples/train_chain.py --t2i /models/FLUX.1-dev --i2v /models/Wan2.1-I2V-14B

With no model folders it uses the embedded pair. Each iteration generates a tree of K images per
prompt and M videos per image, scores the videos, gives each stage its credit, and updates both
transformers. The last weights are published into a second pair of instances that only serve.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.media import write_mp4
from workflow_rl.models import build_flux_t2i_card, build_wan_i2v_card
from workflow_rl.request import make_request
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.composite import CompositeReward
from workflow_rl.rewards.registry import RewardTerm
from workflow_rl.training.methods.base import new_instance
from workflow_rl.training.methods.workflow_rl import build_workflow_rl
from workflow_rl.training.rollout import rollout_loop
from workflow_rl.training.weight_sync import WeightRole

PROMPTS = [
    "a red circle moving left",
    "a blue square moving right",
    "a green triangle moving up",
    "a yellow circle moving down",
]


class Brightness:
    """A reward: mean brightness of the last frame. Put your own model here.

    A sample that cannot be scored gets NaN and a reason in ``failures``, never a number.
    """

    name = "brightness"
    media_kind = "video"

    def __call__(self, batch: RewardBatch) -> RewardScores:
        last_frames_BCHW = batch.media[:, :, -1]
        return RewardScores(last_frames_BCHW.float().flatten(1).mean(1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--t2i", type=Path, help="FluxPipeline folder; default: the embedded one")
    parser.add_argument("--i2v", type=Path, help="WanImageToVideoPipeline folder")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--images", type=int, default=4, help="images K per prompt")
    parser.add_argument("--videos", type=int, default=2, help="videos M per image")
    parser.add_argument("--output", type=Path, default=Path("outputs/example"))
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> None:
    """Refuse what would train nothing, or fail only at the end."""
    for name, least in (("iterations", 1), ("images", 2), ("videos", 1)):
        given = getattr(arguments, name)
        if given < least:
            why = "; an image is compared with others of its prompt" if name == "images" else ""
            raise UserError(f"--{name} is {given}, expected {least} or more{why}")
    if arguments.output.exists() and not arguments.output.is_dir():
        raise UserError(f"--output {arguments.output} is a file; give a folder")


def main() -> None:
    arguments = parse_arguments()
    check(arguments)
    cards = build_flux_t2i_card(arguments.t2i), build_wan_i2v_card(arguments.i2v)
    method = build_workflow_rl(
        *cards,
        device="cuda" if torch.cuda.is_available() else "cpu",
        reward=CompositeReward([RewardTerm(Brightness())]),
        num_samples_per_prompt=arguments.images,
        num_videos_per_image=arguments.videos,
        rollout_steps=6,
        sde_kind="cps",
        t2i_lr=1.5e-4,
        i2v_lr=5e-5,
        normalisation="batch",
    )
    for iteration in range(arguments.iterations):
        batch = {"prompts": PROMPTS, "seeds": [0] * len(PROMPTS)}
        _, metrics = method.managed_train_step(batch, iteration)
        print(
            f"{iteration}: reward {metrics['reward_mean']:.4f}"
            f"  grad norm {metrics['grad_norm/t2i']:.3g} {metrics['grad_norm/i2v']:.3g}"
            f"  C2 {metrics['c2_max_log_ratio/t2i']:g} {metrics['c2_max_log_ratio/i2v']:g}"
        )

    servers = [new_instance(card) for card in cards]
    for policy, server in zip(method.policies, servers, strict=True):
        publication = policy.publish(WeightRole.STUDENT, server)
        print(f"{policy.name}: version {publication.version}, {publication.num_tensors} tensors")
    image, _ = rollout_loop(
        servers[0], "denoise", make_request("t2i", PROMPTS[0]), profile=ExecutionProfile.SERVE
    )
    video, _ = rollout_loop(
        servers[1],
        "denoise",
        make_request("i2v", PROMPTS[0], image=image[0]),
        profile=ExecutionProfile.SERVE,
    )
    print(write_mp4(arguments.output / "video.mp4", video[0], fps=8))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
