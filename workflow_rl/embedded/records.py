"""What the pre-training is asked for and what it reports: recipes and stage records."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from workflow_rl.embedded.optimise import Recipe


@dataclass(frozen=True)
class PretrainRecipe:
    """How much each stage learns. The defaults take about forty minutes of two CPU cores."""

    image_vae: Recipe = field(
        default=Recipe(1000, batch_size=16, learning_rate=2e-3, ema_decay=0.995)
    )
    image_transformer: Recipe = field(default=Recipe(4000, batch_size=64, learning_rate=2e-3))
    video_vae_stills: Recipe = field(
        default=Recipe(2300, batch_size=16, learning_rate=3e-3, ema_decay=0.995)
    )
    video_vae_clips: Recipe = field(
        default=Recipe(1350, batch_size=8, learning_rate=1.2e-3, ema_decay=0.995)
    )
    video_decoder: Recipe = field(
        default=Recipe(2000, batch_size=8, learning_rate=1.2e-3, ema_decay=0.995)
    )
    video_transformer: Recipe = field(default=Recipe(4000, batch_size=64, learning_rate=2e-3))
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
            *(scale(recipe) for recipe in self.parts().values()),
            image_pool=max(1, round(self.image_pool * factor)),
            video_pool=max(1, round(self.video_pool * factor)),
        )


@dataclass(frozen=True)
class StageRecord:
    """What a finished stage took, in seconds, and where its losses ended, by part."""

    name: str
    seconds: float
    losses: dict[str, float]
