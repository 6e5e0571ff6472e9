"""The README of an embedded model folder: what it is, how it was made, where its losses ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workflow_rl.embedded.records import PretrainRecipe, StageRecord

TEXT = """# {title}

A small real {pipeline} checkpoint of WorkflowRL's embedded world: one coloured shape on a dark
ground, 32x32 pixels, 9 frames, captions such as `a red circle moving left`. Licence: Apache-2.0,
as the rest of the repository; the training data is drawn by `workflow_rl/embedded/world.py`.

```python
{usage}
```

## How it was made

`workflow-rl pretrain-tiny`, seed {seed}, two CPU cores, float32 weights (VAE convolutions of the
video model train in bfloat16). The text encoders are random and frozen.

| stage | steps | batch | peak learning rate | last loss |
|---|---|---|---|---|
{rows}

| stage | minutes |
|---|---|
{times}

Pools of encoded samples: {image_pool} images, {video_pool} clips. The optimiser is AdamW with a
linear warm-up over 5% of the steps and a cosine to zero; the weights are exponential averages.
Losses: weighted absolute plus twice squared error (VAEs), mean squared velocity error
(transformers).
"""

USAGE = {
    "FluxPipeline": """from diffusers import FluxPipeline

pipeline = FluxPipeline.from_pretrained("tiny-flux-t2i")
image = pipeline("a red circle moving left", height=32, width=32, num_inference_steps=6,
                 guidance_scale=1.0, max_sequence_length=16).images[0]""",
    "WanImageToVideoPipeline": """from diffusers import WanImageToVideoPipeline

pipeline = WanImageToVideoPipeline.from_pretrained("tiny-wan-i2v")
video = pipeline(image, "a red circle moving left", height=32, width=32, num_frames=9,
                 num_inference_steps=6, guidance_scale=1.0, max_sequence_length=16).frames[0]""",
}


def write_readme(
    folder: Path, pipeline: str, seed: int, recipe: PretrainRecipe, records: Sequence[StageRecord]
) -> None:
    """Write `folder/README.md`; `pipeline` is the class name, a key of `USAGE`."""
    losses = {name: loss for record in records for name, loss in record.losses.items()}
    rows = [
        f"| {name} | {part.steps} | {part.batch_size} | {part.learning_rate:g} "
        f"| {losses[name]:.4f} |"
        for name, part in recipe.parts().items()
    ]
    times = [f"| {record.name} | {record.seconds / 60:.1f} |" for record in records]
    text = TEXT.format(
        title=folder.name,
        pipeline=f"`{pipeline}`",
        usage=USAGE[pipeline],
        seed=seed,
        rows="\n".join(rows),
        times="\n".join(times),
        image_pool=recipe.image_pool,
        video_pool=recipe.video_pool,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
