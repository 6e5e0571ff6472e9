"""Text embeddings of a run: kept on disk, and made up front where text encoders are dropped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from workflow_rl.config import PromptRecord
from workflow_rl.instance import ModelInstance
from workflow_rl.models.embedding_store import EmbeddingStore
from workflow_rl.training.policy import StagePolicy

RUN_FOLDER = "embeddings"
"""Where a run keeps its embeddings, unless it is given another folder."""


def cache_on_disk(instance: ModelInstance, where: bool | Path, run_dir: Path) -> None:
    """Keep the text embeddings of ``instance`` in a folder; True: in the run's, False: nowhere."""
    if where is False:
        return
    folder = run_dir / RUN_FOLDER if where is True else where
    instance.caches.store = EmbeddingStore(folder, instance.card, instance.platform.device)


def encode_and_drop(policy: StagePolicy, records: Iterable[PromptRecord]) -> None:
    """Encode every text that a stage will meet, then free its text encoders.

    Without a store on disk the cache is unbounded from here on: what it lost could not be made
    again.
    """
    student, plan = policy.student, policy.settings.plan
    if student.caches.store is None:
        student.caches.max_bytes = None
    for text in dict.fromkeys(record.text_for(policy.name) for record in records):
        student.adapter.encode_prompts(student, [(text, plan.negative_prompt)], plan.params)
    student.drop_weights(set(student.adapter.text_encoders) & set(student.adapter.modules))
