"""What every test relies on: no network, a fixed number of threads."""

import os

# Before torch or huggingface_hub is imported: both read these once, at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

for _contract in (
    "case",
    "contract",
    "given_contract",
    "lora_contract",
    "memory_contract",
    "training_contract",
):
    pytest.register_assert_rewrite(f"tests.models.{_contract}")

# Machines are shared: how long an example takes says nothing.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
