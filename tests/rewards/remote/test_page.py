"""The page on reward serving: its configurations are valid, its table has the protocol's words."""

import json
import re
from pathlib import Path

import pytest

from tests.rewards.remote.conftest import Videos
from workflow_rl.config.loader import load_rewards
from workflow_rl.config.reward_location import ServerConfig
from workflow_rl.rewards.remote.protocol import decode_request, encode_request
from workflow_rl.rewards.remote.server import MAX_CONNECTIONS, ServerSettings

PAGE = (Path(__file__).parents[3] / "docs" / "reward_serving.md").read_text(encoding="utf-8")
CONFIGURATIONS = re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_a_configuration_on_the_page_is_valid(text: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.yaml").write_text(text)
    assert len(load_rewards(tmp_path / "rewards.yaml")) == 2


def test_the_request_of_the_page_is_one(videos: Videos) -> None:
    (text,) = re.findall(r"printf '(.+?)' \"", PAGE, re.DOTALL)
    media = encode_request(videos(1), "", "mp4")["samples"][0]["media"]["data"][0]
    reward, batch = decode_request(json.loads(text % media))
    assert (reward, batch.media.shape) == ("motion_amount", (1, 3, 3, 8, 8))


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    settings = ServerSettings()
    limits = dict(re.findall(r"\| `(--[a-z-]+)` \| (\d+)", PAGE))
    assert limits == {
        "--queue": str(settings.capacity),
        "--max-body-mb": str(settings.max_body // 2**20),
        "--batch-size": str(settings.batch_size),
        "--wait-ms": f"{settings.wait_s * 1000:g}",
    }
    assert f"{MAX_CONNECTIONS} connections" in PAGE
    assert f"retries: {ServerConfig(url='http://x').retries}\n" in PAGE
