"""The tables, the plot and the files of an ablation, from figures that are known."""

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from tests.ablation.made_up import TENSORS, finish, make_config
from workflow_rl.ablation import tables
from workflow_rl.ablation.check_file import WeightsCheck
from workflow_rl.ablation.jobs import Job, make_jobs
from workflow_rl.ablation.results import AblationResult, collect
from workflow_rl.ablation.variants import build_variants
from workflow_rl.ablation.write import write_all
from workflow_rl.cli.ablate_result import show_result

SVG = "{http://www.w3.org/2000/svg}"


def make_result(
    folder: Path, seeds: tuple[int, ...] = (0, 1), *, moved: int = 0, done: int | None = None
) -> AblationResult:
    variants = build_variants(make_config(folder))
    jobs: list[Job] = make_jobs(variants, seeds, folder / "runs")
    for job in jobs[:done]:
        finish(job, check=WeightsCheck(TENSORS, moved, "i2v/weights/a" if moved else None))
    what = {variant.name: variant.what for variant in variants.variants}
    return collect(jobs, list(what), what, {}, left_out={}, reference=variants.reference)


def test_the_table_has_a_row_per_variant_and_says_against_what(tmp_path: Path) -> None:
    table = tables.main_table(make_result(tmp_path))
    assert table.heads[6] == "against nested [95 %]"
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == ["nested", "shared", "only_t2i", "only_i2v", "constant"]
    assert rows["nested"][:2] == ("0, 1", "48")
    assert rows["nested"][4].startswith("+0.210 [+0.1")
    assert rows["shared"][5].startswith("−0.110 [−0.1")
    assert [row[6] for row in rows.values()] == ["–", "0 of 2", "0 of 2", "0 of 2", "–"]
    assert [row[7] for row in rows.values()] == ["24", "48", "never", "never", "–"]
    assert rows["constant"][5] == f"0 of {2 * TENSORS} tensors moved"
    assert all(len(row) == len(table.heads) for row in table.rows)


def test_without_a_shared_run_nothing_is_compared_with_it(tmp_path: Path) -> None:
    """The column, its explanation and the terminal's: all there or none."""
    for done in (1, None):  # jobs go seed by seed: of one, only nested is finished
        result = make_result(tmp_path / str(done), done=done)
        shown = io.StringIO()
        show_result(result, [], Console(file=shown, width=200))
        words = " ".join(tables.explanations(result)) + shown.getvalue()
        assert ("shared's best" in words) == (done is None)
        for table in (tables.main_table(result), tables.run_table(result)):
            assert any("shared's best" in head for head in table.heads) == (done is None)
            assert all(len(row) == len(table.heads) for row in table.rows)


def test_what_was_checked_is_said(tmp_path: Path) -> None:
    equality, control = tables.facts(make_result(tmp_path))
    assert equality.startswith("Checked: each of the 10 finished runs made 48 videos")
    assert f"none of the {2 * TENSORS} trained tensors of 2 runs moved" in control


def test_weights_that_moved_are_not_overlooked(tmp_path: Path) -> None:
    result = make_result(tmp_path, moved=3)
    facts = "\n".join(tables.facts(result))
    assert "WRONG: weights moved under a constant reward in constant/seed0 (such as i2v" in facts
    assert tables.main_table(result).rows[-1][6] == f"6 of {2 * TENSORS} tensors moved"


def test_all_files_tell_the_same(tmp_path: Path) -> None:
    paths = write_all(make_result(tmp_path), tmp_path)
    assert [path.name for path in paths] == [
        *("ablation.json", "ablation.md", "ablation.html", "ablation.svg")
    ]
    assert not list(tmp_path.glob(".*.part"))
    data = json.loads(paths[0].read_text(), parse_constant=pytest.fail)
    nested = data["variants"]["nested"]["change"]["difference"]["mean"]
    assert nested == pytest.approx(0.21)
    assert data["equal"]
    shown = f"{nested:+.3f} ["
    assert shown in paths[1].read_text()
    assert shown in paths[2].read_text()
    for run in data["runs"]:
        assert [at for at, _ in run["levels"]] == [0, 12, 24, 36, 48]


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = write_all(make_result(tmp_path), tmp_path)[2].read_text()
    assert [
        word for word in ("<script", "http://", "https://", "src=", "url(") if word in page
    ] == []


def test_the_plot_is_a_picture_of_its_own_with_a_line_per_variant(tmp_path: Path) -> None:
    *_, path = write_all(make_result(tmp_path), tmp_path)
    root = ET.fromstring(path.read_text())
    assert root.tag == f"{SVG}svg"
    lines = [e for e in root.iter(f"{SVG}path") if e.get("class", "").startswith("line")]
    names = [e.text for e in root.iter(f"{SVG}text") if e.get("class", "").startswith("name")]
    assert len(lines) == len(names) == 4
    assert names == ["nested", "shared", "only_t2i", "only_i2v"]
    said = [e.text or "" for e in root.iter(f"{SVG}text")]
    assert any(text.startswith("Held-out reward. Mean over the seeds") for text in said)


def test_the_same_runs_give_the_same_files(tmp_path: Path) -> None:
    result = make_result(tmp_path)
    first = [path.read_bytes() for path in write_all(result, tmp_path)]
    assert [path.read_bytes() for path in write_all(make_result(tmp_path), tmp_path)] == first


@pytest.mark.parametrize("done", [0, 1, 2])
def test_what_there_is_of_a_stopped_ablation_is_written(tmp_path: Path, done: int) -> None:
    result = make_result(tmp_path, done=done)
    text = write_all(result, tmp_path)[1].read_text()
    assert "Not finished, with the iterations done: " in text
    assert "constant/seed1 (0 of 4)" in text


@pytest.mark.parametrize(("seeds", "done"), [((0,), 5), ((0, 1, 2), 15), ((0,), 0)])
def test_a_terminal_of_80_columns_is_wide_enough(
    tmp_path: Path, seeds: tuple[int, ...], done: int
) -> None:
    """No figure is cut or folded: all of them stand whole in one line."""
    result = make_result(tmp_path, seeds, done=done)
    file = io.StringIO()
    show_result(result, [tmp_path / "ablation.md"], Console(file=file, width=80))
    shown = file.getvalue()
    listed = shown.split("Checked: ")[0].split("Not finished")[0]
    assert max((len(line) for line in listed.splitlines()), default=0) <= 80
    assert "…" not in shown
    for variant in result.variants:
        for between in (
            tables.interval(variant.change, "\n"),
            tables.interval(variant.against, "\n"),
        ):
            assert all(line in listed for line in between.split("\n"))
    for run in result.runs:
        assert run.variant == "constant" or tables.interval(run.change) in listed
