"""What the pre-training is asked for and what it reports: recipes and stage records."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workflow_rl.embedded.optimise import Recipe

IMAGE_VAE = Recipe(steps=1000, batch_size=16, learning_rate=2e-3, ema_decay=0.995)
STILLS = Recipe(steps=2300, batch_size=16, learning_rate=3e-3, ema_decay=0.995)
CLIPS = Recipe(steps=1250, batch_size=8, learning_rate=1.2e-3, ema_decay=0.99)
DECODER = Recipe(steps=1800, batch_size=8, learning_rate=1.2e-3, ema_decay=0.995)
IMAGE_TRANSFORMER = Recipe(steps=5000, batch_size=64, learning_rate=2e-3)
VIDEO_TRANSFORMER = Recipe(steps=2500, batch_size=64, learning_rate=2e-3)


@dataclass(frozen=True)
class PretrainRecipe:
    """How much each stage learns. The defaults take about an hour of two CPU cores."""

    image_vae: Recipe = IMAGE_VAE
    image_transformer: Recipe = IMAGE_TRANSFORMER
    video_vae_stills: Recipe = STILLS
    video_vae_clips: Recipe = CLIPS
    video_decoder: Recipe = DECODER
    video_transformer: Recipe = VIDEO_TRANSFORMER
    image_pool: int = 16384
    video_pool: int = 8192

    def parts(self) -> dict[str, Recipe]:
        """The recipes by the name under which their loss is reported."""
        return {
            "image vae": self.image_vae,
            "image transformer": self.image_transformer,
            "video vae, stills": self.video_vae_stills,
            "video vae, clips": self.video_vae_clips,
            "video decoder": self.video_decoder,
            "video transformer": self.video_transformer,
        }

    def scaled(self, factor: float) -> PretrainRecipe:
        """The same recipe with `factor` times the steps and encoded samples (at least one)."""

        def scale(recipe: Recipe) -> Recipe:
            return replace(recipe, steps=max(1, round(recipe.steps * factor)))

        return PretrainRecipe(
            image_vae=scale(self.image_vae),
            image_transformer=scale(self.image_transformer),
            video_vae_stills=scale(self.video_vae_stills),
            video_vae_clips=scale(self.video_vae_clips),
            video_decoder=scale(self.video_decoder),
            video_transformer=scale(self.video_transformer),
            image_pool=max(1, round(self.image_pool * factor)),
            video_pool=max(1, round(self.video_pool * factor)),
        )


@dataclass(frozen=True)
class StageRecord:
    """What a finished stage took, in seconds, and where its losses ended, by part."""

    name: str
    seconds: float
    losses: dict[str, float]
