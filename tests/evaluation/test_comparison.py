"""What is said of candidates' scores: what was trained on apart, failures, and strict files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workflow_rl.evaluation.comparison import TOTAL, Comparison, ScoredCandidate, compare
from workflow_rl.evaluation.diversity import distances
from workflow_rl.report.comparison import headline, views, write_before_after, write_comparison

PROMPTS = ["a", "a", "b", "b", "c", "c"]
SEEDS = [0, 1] * 3


def _candidate(
    label: str,
    scores: dict[str, list[float]],
    trained_on: tuple[str, ...] | None = (),
    failures: dict[int, str] | None = None,
    shape: tuple[int, ...] = (9, 480, 832),
) -> ScoredCandidate:
    generator = torch.Generator().manual_seed(len(label))
    return ScoredCandidate(
        label,
        {"argument": label, "kind": "run", "iteration": 5, "weights": "student"}
        | {"shapes": [list(shape)]},
        trained_on,
        torch.tensor(next(iter(scores.values()))),
        {name: torch.tensor(values) for name, values in scores.items()},
        failures or {},
        np.ones(len(PROMPTS), dtype=bool),
        distances([torch.rand(8, generator=generator) for _ in PROMPTS], PROMPTS),
    )


def _compare(*candidates: ScoredCandidate, **options: Any) -> Comparison:
    sources = {name: [name.partition("/")[0]] for name in candidates[0].measures}
    settings = {"prompts_file": "prompts.txt", "left_out": 0}
    return compare(candidates, PROMPTS, SEEDS, sources, samples=50, settings=settings, **options)


START = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_a_candidate_was_trained_on_is_its_own() -> None:
    """Each is told apart by its own training; of a folder nothing is known."""
    names = ("motion", "motion/travel", "sharpness")
    scores = dict.fromkeys(names, START)
    comparison = _compare(
        _candidate("start", scores),
        _candidate("moved", scores, ("motion",)),
        _candidate("sharp", scores, ("sharpness",)),
        _candidate("folder", scores, None),
    )
    tables = {view.title: [row[0] for row in view.rows] for view in views(comparison)}
    assert tables == {
        "means": [*names, "diversity"],
        "moved against start: rewards trained on": ["motion", "motion/travel"],
        "moved against start: rewards not trained on": ["sharpness"],
        "moved against start: diversity": ["diversity"],
        "sharp against start: rewards trained on": ["sharpness"],
        "sharp against start: rewards not trained on": ["motion", "motion/travel"],
        "sharp against start: diversity": ["diversity"],
        "folder against start: rewards": list(names),
        "folder against start: diversity": ["diversity"],
    }


def test_a_sum_is_trained_on_where_a_part_of_it_was() -> None:
    """A run that was trained on something else was not trained to raise this sum."""
    scores = {"motion": START, "sharpness": START}
    candidates = [
        _candidate("start", scores),
        _candidate("moved", scores, ("motion",)),
        _candidate("other", scores, ("x",)),
        _candidate("folder", scores, None),
    ]
    sources = {TOTAL: ["motion", "sharpness"]} | {name: [name] for name in scores}
    found = compare(candidates, PROMPTS, SEEDS, sources, samples=10)
    assert [found.trained(i, TOTAL) for i in range(4)] == [False, True, False, None]
    assert [found.trained(i, "motion") for i in range(4)] == [False, True, False, None]


def test_differences_are_to_the_baseline_wherever_it_stands() -> None:
    up = [value + 1 for value in START]
    first = _compare(_candidate("low", {"m": START}), _candidate("high", {"m": up}))
    last = _compare(_candidate("high", {"m": up}), _candidate("low", {"m": START}), baseline=1)
    for comparison, place in ((first, 1), (last, 0)):
        against = comparison.against[place]
        assert against is not None
        assert comparison.against[1 - place] is None
        pair = against.measures["m"]
        assert (pair.difference.mean, pair.win_rate) == (1, 1)


def test_one_seed_has_no_diversity(tmp_path: Path) -> None:
    prompts = list("abcdef")
    apart = distances([torch.zeros(1)] * 6, prompts)
    few = [replace(_candidate(name, {"m": START}), distances=apart) for name in ("one", "two")]
    settings = {"prompts_file": "prompts.txt", "left_out": 0}
    alone = compare(few, prompts, [0] * 6, {"m": ["m"]}, samples=10, settings=settings)
    assert [view.title for view in views(alone)] == [
        "means",
        "two against one: rewards",
    ]
    for page in write_comparison(alone, tmp_path)[1:]:
        assert "<b>diversity" not in page.read_text()
        assert "0 of 6" not in page.read_text()


def test_samples_of_other_sizes_are_told() -> None:
    one = _candidate("one", {"m": START})
    assert headline(_compare(one, _candidate("same", {"m": START}))).endswith("2 seeds")
    told = headline(_compare(one, _candidate("small", {"m": START}, shape=(9, 32, 64))))
    assert "one 832×480 9 frames, small 64×32 9 frames" in told


def test_failures_leave_pairs_out_and_files_stay_strict(tmp_path: Path) -> None:
    """Where nothing is left, every figure is unknown, in words that are JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lost = [math.nan] * len(PROMPTS)
    some = [math.nan, *START[1:]]
    comparison = _compare(
        _candidate("start", {"m": START, "n": START}),
        _candidate("after", {"m": some, "n": lost}, ("m",), {0: "m: timed out"}),
    )
    figures, page, _ = write_comparison(comparison, tmp_path)
    found = json.loads(figures.read_text(), parse_constant=refuse)["candidates"][1]
    pair = found["rewards"]["m"]["against_baseline"]
    assert (pair["difference"]["count"], pair["difference"]["failed"]) == (5, 1)
    assert pair["baseline"] == np.mean(START[1:]), "over the pairs that are left"
    assert found["rewards"]["n"]["mean"]["mean"] is None
    assert found["failures"] == {"m: timed out": 1}
    text = page.read_text()
    assert "5 of 6" in text
    assert "- after: 1 failed: m: timed out" in text
    before_after = write_before_after(comparison, tmp_path)
    written = json.loads(before_after.read_text(), parse_constant=refuse)
    assert written["components"]["n"]["difference"] is None
    assert (written["iteration"], written["reward"]["failed_pairs"]) == (5, 1)
    assert not list(tmp_path.glob(".*")), "no temporary file is left"


def test_the_page_escapes_and_opens_offline(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    comparison = _compare(_candidate(name, {"m": START}), _candidate("b", {"m": START}, ("m",)))
    page = write_comparison(comparison, tmp_path)[2].read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=|url\(|@import", page)


def test_a_measure_that_nothing_has_gets_no_chart(tmp_path: Path) -> None:
    """A box with a title and no chart looks like a page that is broken."""
    lost = [math.nan] * len(PROMPTS)
    names = ("one", "two")
    comparison = _compare(*(_candidate(name, {"m": START, "n": lost}) for name in names))
    page = write_comparison(comparison, tmp_path)[2].read_text()
    charts = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert charts
    assert all("<svg" in chart for chart in charts)
