"""How alike the image model's gradients are for captions that differ in one word.

    python -m benchmarks.gradient_overlap

For the same noise and the same change asked of the velocity, the cosine between the gradients under
two captions says how much a policy-gradient step for one caption also moves the other (the
normalised neural tangent kernel, Jacot et al. 2018). At 1 the model cannot learn to treat the two
captions differently; what it learns for one it does for both.
"""

from __future__ import annotations

import torch

from workflow_rl.instance import ModelInstance
from workflow_rl.loop.noise import INIT_STEP, NoiseKey, draw_noise
from workflow_rl.models import build_flux_t2i_card
from workflow_rl.models.common import collate
from workflow_rl.request import Request, SampleId, make_request
from workflow_rl.training.methods.base import new_instance

BASE = "a red circle moving left"
OTHERS = {
    "direction": "a red circle moving right",
    "shape": "a red square moving left",
    "colour": "a blue circle moving left",
}
TIMESTEP = 800.0
BATCH = 8


def noise(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the same noise for every caption, [BATCH, *shape]."""
    keys = [NoiseKey(SampleId(0, "overlap", (i,)), name, INIT_STEP) for i in range(BATCH)]
    return draw_noise(shape, keys)


def gradient(instance: ModelInstance, caption: str) -> torch.Tensor:
    """Return the flat gradient of <velocity, direction of change> under a caption."""
    adapter = instance.adapter
    request: Request = make_request("t2i", caption)
    params = adapter.resolve(request)
    request = make_request("t2i", caption, params=params)
    conditioning = collate(adapter.encode(instance, [request] * BATCH))
    shape = adapter.latent_shape(params)
    latents, change = noise("latents", shape), noise("change", shape)
    parameters = list(adapter.trainable("transformer").values())
    for parameter in parameters:
        parameter.requires_grad_(True)
        parameter.grad = None
    velocity = adapter.velocity("transformer", latents, TIMESTEP, conditioning, params)
    (velocity * change).sum().backward()
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def main() -> None:
    """Print the cosines for the embedded image model."""
    instance = new_instance(build_flux_t2i_card())
    base = gradient(instance, BASE)
    for word, caption in OTHERS.items():
        cosine = torch.cosine_similarity(base, gradient(instance, caption), dim=0)
        print(f"another {word}: {float(cosine):.3f}  ({BASE!r} and {caption!r})")


if __name__ == "__main__":
    main()
