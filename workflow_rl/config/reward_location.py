"""Where a reward runs, if not in the process of the run."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from workflow_rl.config.base import ConfigModel


class ProcessConfig(ConfigModel):
    """A process of the reward's own; `process: {}` takes the run's own environment."""

    python: Path | None = Field(
        None,
        description="Interpreter of a virtual environment that has workflow-rl and what the "
        "reward needs; null is that of the run.",
    )
    env: dict[str, str] = Field(
        {}, description="Environment variables, such as {CUDA_VISIBLE_DEVICES: '1'}."
    )
    batch_size: int = Field(8, ge=1, description="Samples that it is sent at a time.")
    restarts: int = Field(
        5,
        ge=0,
        description="Times that it is started again while one stage's samples are scored.",
    )


class ServerConfig(ConfigModel):
    """A server that speaks the protocol of docs/reward_serving.md."""

    url: str = Field(pattern=r"^https?://[^/?#]+", description="Address, such as http://gpu7:8400.")
    reward: str | None = Field(
        None, description="What the server calls the reward; null is its name or callable."
    )
    media: Literal["png", "mp4", "float32"] = Field(
        "png",
        description="How media are sent: png rounds them to 8 bits and is lossless from there, "
        "float32 is exact and large, mp4 is small and lossy (images go as png).",
    )
    batch_size: int = Field(8, ge=1, description="Samples per request.")
    in_flight: int = Field(4, ge=1, description="Requests at a time.")
    retries: int = Field(4, ge=0, description="Repeats of a request that got no answer.")
    request_timeout_s: float = Field(
        300.0, gt=0, description="Seconds that one try of one request may take."
    )
    wait_s: float = Field(
        0.0,
        ge=0,
        description="Seconds to wait at the start for a server that does not answer yet, such as "
        "one that loads a model.",
    )
