"""The pages in a real browser, at the widths of a desktop and of a phone."""

import json
from pathlib import Path
from typing import get_args

import pytest

from tests.ablation.test_write import make_result
from tests.evaluation.test_comparison import START, _candidate, _compare
from tests.report.browser import look_at, needs_browser
from tests.report.synthetic import Size, add_guards, make_run
from workflow_rl.ablation.write import write_all
from workflow_rl.config.guards import GuardKind
from workflow_rl.evaluation.comparison import ScoredCandidate
from workflow_rl.report.build import build_report
from workflow_rl.report.comparison import write_comparison

pytestmark = [needs_browser, pytest.mark.parametrize("width", [390, 1280])]

FILTERS = """
  const { elements } = inner.forms.filters;
  const set = (name, value) => {
    elements[name].value = value;
    elements[name].dispatchEvent(new Event("input", { bubbles: true }));
  };
  const shown = () => [...inner.querySelectorAll(".group")].filter((g) => !g.hidden)
    .map((g) => [Number(g.dataset.iteration), g.dataset.kind]);
  const width = inner.documentElement.clientWidth;
  told.wide = inner.documentElement.scrollWidth - width;
  told.outside = [...inner.querySelectorAll(".group *, .filters *")]
    .filter((e) => e.getBoundingClientRect().right > width + 0.5).length;
  told.first = shown();
  elements.earlier.click();
  told.earlier = shown();
  set("iteration", "");
  told.all = shown();
  set("kind", "best");
  told.best = shown();
  set("kind", "failures");
  told.failures = shown().length;
  set("kind", "");
  set("prompt", "RED SQUARE MOVING RIGHT");
  told.prompt = shown().length;
  set("prompt", "");
  set("low", "99");
  told.range = shown().length;
  set("low", "");
  set("sort", "old");
  told.old = shown().map(([iteration]) => iteration);
  const visible = (stage) => [...inner.querySelectorAll(`li[data-stage=${stage}] > .sample img,
    li[data-stage=${stage}] > .sample video`)].filter((e) => e.getClientRects().length).length;
  told.pictures = [visible("t2i"), visible("i2v")];
  set("stage", "t2i");
  told.images = [visible("t2i"), visible("i2v")];
  set("stage", "i2v");
  told.videos = [visible("t2i"), visible("i2v")];
  set("stage", "");
  set("reward", "travel");
  const first = inner.querySelector(".group:not([hidden])");
  told.rewards = [...new Set([...first.querySelectorAll(".reward")].map((e) => e.textContent))];
  told.credits = Object.fromEntries([...inner.querySelectorAll(".group")].map((group) => {
    const credits = [...group.querySelectorAll("li[data-stage] > .sample")].map((sample) => [
      sample.querySelector(".name").textContent,
      sample.querySelector(".chip")?.textContent ?? null,
    ]);
    const { iteration, prompt } = group.dataset;
    return [`${iteration}: ${prompt}`, Object.fromEntries(credits)];
  }));
  told.unnamed = [...elements].filter((e) => !e.labels?.length && !e.textContent.trim()
    && e.tagName !== "OUTPUT").length;
"""
FITS = """
  const width = inner.documentElement.clientWidth;
  told.wide = inner.documentElement.scrollWidth - width;
  const outside = (e) => e.getBoundingClientRect().right > width + 0.5;
  told.outside = [...inner.body.querySelectorAll("*")]
    .filter((e) => !e.closest("nav, .skip, svg") && outside(e))
    .filter((e) => !e.parentElement.closest(".scroll, pre")).map((e) => e.tagName);
  told.scrolled = [...inner.querySelectorAll(".scroll")]
    .filter((e) => e.scrollWidth > e.clientWidth).length;
  const seen = (e) => e.getClientRects().length > 0 && e.getBoundingClientRect().height > 10;
  told.plots = [...inner.querySelectorAll("svg.chart")].filter(seen)
    .map((e) => e.getAttribute("aria-label"));
  told.marks = inner.querySelectorAll("svg.chart :is(.line, .dot)").length;
  told.tables = [...inner.querySelectorAll("table")].filter(seen)
    .map((e) => [...e.querySelectorAll("tbody tr")].filter(seen).map((r) => r.textContent));
"""


def saved_credits(run: Path) -> dict[str, dict[str, str | None]]:
    """Return each saved group's samples with their advantages to two decimals, None if failed."""
    groups: dict[str, dict[str, str | None]] = {}
    for path in run.glob("rollouts/*.json"):
        rollout = json.loads(path.read_text())
        for group in rollout["groups"]:
            nodes = [node for child in group["children"] for node in (child, *child["children"])]
            groups[f"{rollout['iteration']}: {group['prompt']}"] = {
                f"{node['stage']} {'.'.join(str(place + 1) for place in node['path'])}": None
                if node["failed"]
                else f"{node['advantage']:+.2f}".replace("-", "\N{MINUS SIGN}")
                for node in nodes
            }
    return groups


def test_the_page_fits_and_its_filters_change_what_is_shown(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path / "run", Size(branches=3))
    build_report(run)
    told = look_at(run / "report.html", width, FILTERS)
    assert (told["wide"], told["outside"], told["unnamed"]) == (0, 0, 0)
    assert [iteration for iteration, _ in told["first"]] == [4, 4]
    assert [iteration for iteration, _ in told["earlier"]] == [2, 2]
    assert sorted(kind for _, kind in told["first"]) == ["best", "worst"]
    assert len(told["all"]) == 4
    assert [kind for _, kind in told["best"]] == ["best", "best"]
    assert (told["failures"], told["prompt"], told["range"]) == (4, 2, 0)
    assert told["rewards"] == ["2.00"]  # of the samples, the sentences and the heading
    assert told["old"] == [2, 2, 4, 4]
    assert told["credits"] == saved_credits(run)
    images, videos = 4 * 3, 4 * 9
    assert told["pictures"] == [images, videos]
    assert told["images"] == [images, 0]
    assert told["videos"] == [0, videos]


def test_every_part_of_the_report_fits(tmp_path: Path, width: int) -> None:
    """Within an ablation, with an evaluation of its own."""
    make_result(tmp_path)
    out = tmp_path / "runs"
    write_all(make_result(tmp_path, seeds=(0,)), out)
    run = make_run(out / "made" / "seed0")
    folder = run / "evaluations" / "a_name_of_two_candidates_vs_another"
    write_comparison(_compare(*_candidates(2)), folder)
    told = look_at(build_report(run), width, FITS)
    assert (told["wide"], told["outside"]) == (0, [])
    assert any(label.startswith("reward: ") for label in told["plots"])
    tables = ["".join(rows) for rows in told["tables"]]
    shown = ("reward0.", "start_position", "diversity0.295", "candidate_number_1", "only_t2i")
    for text in shown:
        assert any(text in table for table in tables), (text, tables)


def test_the_tables_of_guards_are_cards_on_a_phone(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path / "run")
    add_guards(run, get_args(GuardKind))
    told = look_at(build_report(run), width, FITS)
    assert (told["wide"], told["outside"], told["scrolled"]) == (0, [], 0)
    guards = next(rows for rows in told["tables"] if "brightness/t2i2 alarms" in rows[0])
    assert len(guards) == 2 * len(get_args(GuardKind))


def _candidates(count: int) -> list[ScoredCandidate]:
    scores = {"videoalign/a_part_with_a_long_name": START, "m": [1e-5 * x for x in START]}
    return [_candidate(f"candidate_number_{i}@150@student", scores, ("m",)) for i in range(count)]


def test_the_page_of_an_evaluation_fits(tmp_path: Path, width: int) -> None:
    """Long names and many candidates included."""
    comparison = _compare(*_candidates(4))
    page = write_comparison(comparison, tmp_path)[2]
    told = look_at(page, width, FITS)
    assert (told["wide"], told["outside"]) == (0, [])
    assert told["scrolled"] == 0 or width > 640  # on a phone a row is a card
    assert told["marks"] > 0
    means, *others = told["tables"]
    assert len(means) == 3
    assert len(others) == 3 * 3  # three candidates against the first: two kinds and diversity
    assert len(told["plots"]) == 3 + len(others)


def test_the_page_of_an_ablation_fits(tmp_path: Path, width: int) -> None:
    write_all(make_result(tmp_path), tmp_path)
    told = look_at(tmp_path / "ablation.html", width, FITS)
    assert (told["wide"], told["outside"]) == (0, [])
    assert told["scrolled"] == 0
    (plot,) = told["plots"]
    assert plot.startswith("Held-out reward")
    assert told["marks"] >= 4  # a line for each variant but the constant reward
    variants, runs, measures = told["tables"]
    for row, name in zip(
        variants, ("nested", "shared", "only_t2i", "only_i2v", "constant"), strict=True
    ):
        assert row.strip().startswith(name)
    assert len(runs) == 10
    assert len(measures) == 4
