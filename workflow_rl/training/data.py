"""Which prompts an iteration sees: a pure function, so that the data cursor is the iteration."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from workflow_rl.config import PromptRecord
from workflow_rl.errors import UserError


@dataclass(frozen=True)
class PromptSchedule:
    """Shuffled passes over the prompts, ``per_iteration`` at a time, none twice in a batch.

    A pass leaves out the remainder that does not fill a batch; each pass is shuffled anew.
    """

    prompts: tuple[PromptRecord, ...]
    per_iteration: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.per_iteration <= len(self.prompts):
            raise UserError(
                f"data.prompts_per_iteration is {self.per_iteration}, but there are "
                f"{len(self.prompts)} prompts; use between 1 and {len(self.prompts)}"
            )

    def at(self, iteration: int) -> Sequence[PromptRecord]:
        """Return the prompts of an iteration (0-based)."""
        batches_per_pass = len(self.prompts) // self.per_iteration
        number, batch = divmod(iteration, batches_per_pass)
        digest = hashlib.blake2b(f"prompts|{self.seed}|{number}".encode(), digest_size=8).digest()
        order = list(self.prompts)
        random.Random(int.from_bytes(digest, "little")).shuffle(order)
        return order[batch * self.per_iteration : (batch + 1) * self.per_iteration]
