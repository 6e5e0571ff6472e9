"""Media and scores arrive as they were sent, and what is too large does not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rewards.remote.conftest import Videos
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.remote import protocol
from workflow_rl.rewards.remote.protocol import (
    MediaFormat,
    ProtocolError,
    decode_media,
    decode_request,
    decode_results,
    encode_media,
    encode_request,
    encode_results,
    from_json,
    to_json,
)


def test_a_request_arrives_as_it_was_sent(videos: Videos) -> None:
    batch = videos(3, groups=2)
    reward, read = decode_request(from_json(to_json(encode_request(batch, "r", "float32"))))
    assert reward == "r"
    assert torch.equal(read.media, batch.media)
    assert (list(read.prompts), list(read.sample_ids)) == (batch.prompts, batch.sample_ids)
    assert (list(read.group_ids), read.media_kind, read.fps) == (batch.group_ids, "video", 8.0)


@pytest.mark.parametrize(("kind", "shape"), [("image", (3, 6, 4)), ("video", (3, 5, 6, 4))])
def test_png_is_lossless_from_8_bits_on(kind: protocol.MediaKind, shape: tuple[int, ...]) -> None:
    media = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)) / 255
    assert torch.equal(decode_media(encode_media(media, "png", 8.0), kind), media)


def test_an_mp4_keeps_size_and_frames_and_nearly_the_values() -> None:
    ramp = torch.linspace(0, 1, 5).view(1, 5, 1, 1).expand(3, 5, 16, 24)
    read = decode_media(encode_media(ramp, "mp4", 8.0), "video")
    assert read.shape == ramp.shape
    assert (read - ramp).abs().max() < 0.03
    assert encode_media(ramp[:, 0], "mp4", 8.0)["format"] == "png"


@pytest.mark.parametrize("media_format", ["png", "mp4"])
def test_a_small_file_that_holds_a_huge_video_is_refused(
    media_format: MediaFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = encode_media(torch.zeros(3, 9, 16, 16), media_format, 8.0)
    monkeypatch.setattr(protocol, "MAX_VALUES", 3 * 9 * 16 * 16)
    assert decode_media(sent, "video").shape == (3, 9, 16, 16)
    monkeypatch.setattr(protocol, "MAX_VALUES", 3 * 9 * 16 * 16 - 1)
    with pytest.raises(ProtocolError, match="too large once decoded"):
        decode_media(sent, "video")


@settings(max_examples=50)
@given(
    values=st.lists(
        st.one_of(st.none(), st.floats(width=32, allow_nan=False, allow_infinity=False)), min_size=1
    ),
    data=st.data(),
)
def test_scores_arrive_in_any_order_and_failures_stay_failures(
    values: list[float | None], data: st.DataObject
) -> None:
    ids = [f"s{row % 3}" for row in range(len(values))]
    scores = torch.tensor([float("nan") if value is None else value for value in values])
    failures = {row: "too dark" for row, value in enumerate(values) if value is None}
    sent = protocol.unique_ids(ids)
    batch = RewardBatch(ids, sent, torch.zeros(len(ids), 3, 1, 1), "image")
    document = encode_results(batch, RewardScores(scores, failures, {"half": scores / 2}))
    document["results"] = data.draw(st.permutations(document["results"]))
    read = decode_results(from_json(to_json(document)), ids)
    assert torch.equal(read.scores.nan_to_num(7.0), scores.nan_to_num(7.0))
    assert read.failures == failures
    if len(failures) < len(values):
        assert torch.equal(read.components["half"].nan_to_num(7.0), (scores / 2).nan_to_num(7.0))
