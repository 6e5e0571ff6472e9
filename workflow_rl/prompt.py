"""A prompt of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, and the texts of stages that have their own.

    Parameters
    ----------
    prompt
        What the chain is asked for: the reward sees it, and the noise identity holds it.
    stage_prompts
        Stage name → that stage's own text, such as an image prompt and a motion prompt.
    """

    prompt: str
    stage_prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def text_for(self, stage: str) -> str:
        """Return the text that a stage is given."""
        return self.stage_prompts.get(stage, self.prompt)
