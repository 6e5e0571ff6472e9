"""The report: self-contained, complete, and safe with whatever a run wrote."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic import PROMPTS, Size, make_run
from workflow_rl.errors import UserError
from workflow_rl.report.build import build_report
from workflow_rl.report.embed import Embedder
from workflow_rl.report.run_data import read_run
from workflow_rl.report.views.failures import failure_causes, failures

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'


class Page(HTMLParser):
    """Every tag with its attributes, and the text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "quickstart")


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return Page(build_report(run_dir))


def edit_json_lines(path: Path, change: Any) -> None:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_nothing_is_loaded_from_outside(page: Page) -> None:
    for _, attributes in page.tags:
        for name in ("src", "href", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#"))
    style = "".join(re.findall(r"url\(|@import", page.text))
    assert style == ""
    assert not page.all("link")


def test_videos_play_on_their_own_and_have_a_name(page: Page) -> None:
    videos = page.all("video")
    assert len(videos) == 2 * 2 + 2 * 2 * 4  # 2 prompts before and after; 2 x 2 groups of 2 x 2
    for video in videos:
        assert {"autoplay", "muted", "loop", "playsinline"} <= set(video)
        assert str(video["src"]).startswith("data:video/mp4;base64,")
        assert "a red square" in str(video["aria-label"])
    assert all(image["alt"] for image in page.all("img"))
    assert all(svg["aria-label"] for svg in page.all("svg"))


def test_the_header_says_what_happened(page: Page) -> None:
    assert "The mean reward rose: 0.1" in page.text
    assert "4 samples of 2 prompts" in page.text
    assert "95 % interval +0." in page.text
    assert "64 samples in 4 iterations" in page.text  # x 4 prompts x 2 images x 2 videos


def test_every_part_is_there(page: Page) -> None:
    ids = {attributes.get("id") for _, attributes in page.tags}
    sections = {"reward", "videos", "groups", "stages", "variance", "failures", "configuration"}
    assert sections <= ids
    for text in ("PPO ratio", "KL to the reference", "C2: largest", "start_position", "timed out"):
        assert text in page.text
    assert "strange/new_metric" in page.text
    assert "fingerprint" in page.text


def test_prompts_are_text_and_nothing_else(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")

    def inject(line: dict[str, Any]) -> None:
        line["prompts"] = [EVIL] * len(line["prompts"])
        line["components"][EVIL] = [0.5] * len(line["prompts"])
        line["failures"] = {"0": EVIL}

    edit_json_lines(run_dir / "evaluations.jsonl", inject)
    edit_json_lines(run_dir / "metrics.jsonl", lambda line: line.update({EVIL: 1.0}))
    for path in (run_dir / "rollouts").glob("*.json"):
        rollout = json.loads(path.read_text(encoding="utf-8"))
        rollout["groups"][0]["prompt"] = EVIL
        rollout["groups"][0]["children"][0]["children"][0]["failed"] = EVIL
        path.write_text(json.dumps(rollout), encoding="utf-8")
    clean = Page(build_report(make_run(tmp_path / "clean")))
    page = Page(build_report(run_dir))
    assert EVIL in page.text
    assert len(page.all("script")) == len(clean.all("script")) == 1
    assert all(image.get("onerror") is None and image["src"] != "x" for image in page.all("img"))
    assert "<script>alert" not in (run_dir / "report.html").read_text(encoding="utf-8")


def test_a_path_does_not_leave_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    embed = Embedder(run_dir, 1000)
    for path in ("../secret.png", str(tmp_path / "secret.png"), "config.yaml"):
        assert embed(path).source is None
    assert embed.missing == 3


def test_media_beyond_the_budget_are_linked(run_dir: Path, tmp_path: Path) -> None:
    page = Page(build_report(run_dir, media_budget=0))
    sources = [str(video["src"]) for video in page.all("video")]
    assert all((run_dir / source).is_file() for source in sources)
    assert "not in this page but beside it" in page.text
    build_report(run_dir)


def test_rollouts_keep_their_half_of_the_budget(run_dir: Path) -> None:
    compared = [run_dir / f"evaluation/iteration_{done:08d}" for done in (0, 4)]
    size = sum(path.stat().st_size for folder in compared for path in folder.iterdir())
    page = Page(build_report(run_dir, media_budget=size))
    embedded = [str(video["src"]).startswith("data:") for video in page.all("video")]
    pairs, rollouts = embedded[:4], embedded[4:]
    assert any(pairs)
    assert any(rollouts)
    assert not all(rollouts)
    build_report(run_dir)


def test_a_missing_file_is_shown_as_missing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    next((run_dir / "evaluation").rglob("*.mp4")).unlink()
    page = Page(build_report(run_dir))
    assert "1 images or videos are missing" in page.text


@pytest.mark.parametrize("iterations", [0, 1])
def test_a_run_without_an_evaluation_has_a_report(tmp_path: Path, iterations: int) -> None:
    run_dir = make_run(tmp_path / "run", Size(iterations=iterations), evaluate=False)
    assert "not evaluated so far" in Page(build_report(run_dir)).text


def test_failed_samples_leave_their_pair_and_are_counted(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")

    def fail_first(line: dict[str, Any]) -> None:
        line["scores"][0] = None
        line["failures"] = {"0": "the judge answered prose"}

    edit_json_lines(run_dir / "evaluations.jsonl", fail_first)
    page = Page(build_report(run_dir))
    assert "3 samples of 2 prompts" in page.text
    counted = dict(failures(read_run(run_dir)))
    assert counted["evaluation samples without a reward"] == 3
    assert ("evaluation", "the judge answered prose", 3) in failure_causes(read_run(run_dir))
    assert counted["training samples without a reward"] == 1


def test_skipped_updates_are_counted_by_their_total(tmp_path: Path) -> None:
    """Three in two iterations, the first of which had two: a run may go on after a skip."""
    run_dir = make_run(tmp_path / "run")

    def skip(line: dict[str, Any]) -> None:
        number = line["iteration"]
        line["skipped_updates/t2i"] = min(number, 1)
        line["skipped_updates_total/t2i"] = [0, 2, 3][min(number, 2)]

    edit_json_lines(run_dir / "metrics.jsonl", skip)
    counted = dict(failures(read_run(run_dir)))
    assert counted["updates of t2i skipped for a value that was not finite"] == 3


def test_evaluations_of_other_samples_are_not_compared(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")

    def rename_start(line: dict[str, Any]) -> None:
        if line["iteration"] == 0:
            line["prompts"] = [PROMPTS[5]] * len(line["prompts"])

    edit_json_lines(run_dir / "evaluations.jsonl", rename_start)
    page = Page(build_report(run_dir))
    assert "of different samples" in page.text
    assert "interval +" not in page.text


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"iteration": 4, "rewa')
    assert read_run(run_dir).iterations == [1, 2, 3, 4]


def test_no_run_is_a_one_line_fault_and_writes_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="no run"):
            build_report(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("evaluations.jsonl", '{"iteration": 0, "prompts": [], "seeds": []}\n'),
        ("evaluations.jsonl", '{"iteration": 0, "prompts": [], "seeds": [0], "scores": [1.0]}\n'),
        ("evaluations.jsonl", '{"iteration": 0, "prompts": [], "seeds": [], "scores": null}\n'),
        ("rollouts/iteration_00000004.json", '{"iteration": 4}'),
        ("rollouts/iteration_00000004.json", "{"),
        ("guards.json", '{"guards": []}'),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path: Path, name: str, content: str) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}.* restore what the run wrote") as told:
        build_report(run_dir)
    assert "\n" not in str(told.value)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    path = run_dir / "metrics.jsonl"
    path.write_text("{}}\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(UserError, match=r"metrics\.jsonl line 1"):
        build_report(run_dir)
    assert not (run_dir / "report.html").exists()
