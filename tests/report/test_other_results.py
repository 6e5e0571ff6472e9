"""What ``evaluate`` and ``ablate`` wrote of a run is shown in its report, with a link."""

import json
import shutil
from pathlib import Path

import pytest

from tests.ablation.made_up import finish, make_config
from tests.report.synthetic import make_run
from workflow_rl.ablation.jobs import make_jobs
from workflow_rl.ablation.results import collect
from workflow_rl.ablation.tables import interval
from workflow_rl.ablation.variants import build_variants
from workflow_rl.ablation.write import write_all
from workflow_rl.evaluation.output_folder import MARK, whole_folder
from workflow_rl.report.build import build_report
from workflow_rl.report.other_results import other_results


@pytest.fixture
def ablation(tmp_path: Path) -> Path:
    """Return the directory of an ablation of one seed, beside a run of that configuration."""
    out = tmp_path / "run-ablation"
    variants = build_variants(make_config(tmp_path))
    jobs = make_jobs(variants, [0], out)
    for job in jobs:
        finish(job)
    what = {v.name: v.what for v in variants.variants}
    result = collect(jobs, list(what), what, {}, left_out={}, reference=variants.reference)
    write_all(result, out)
    (tmp_path / "expected.json").write_text(
        json.dumps({v.name: [interval(v.change), interval(v.against)] for v in result.variants})
    )
    return out


def test_an_ablation_is_found_from_its_runs_and_from_the_run_beside_it(
    ablation: Path, tmp_path: Path
) -> None:
    beside = make_run(tmp_path / "run")
    within = ablation / "shared" / "seed0"
    expected = json.loads((tmp_path / "expected.json").read_text())
    for run, link in (
        (beside, "../run-ablation/ablation.html"),
        (within, "../../ablation.html"),
    ):
        (other,) = other_results(run)
        assert (other.title, other.link) == ("Ablation run-ablation", link)
        assert {row[0]: row[-2:] for row in other.rows} == expected
        assert (run / link).is_file()
        page = build_report(run).read_text()
        assert f'<a href="{link}">Ablation run-ablation</a>' in page
        assert expected["shared"][1] in page


def test_a_run_without_other_results_says_nothing_of_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert other_results(run) == []
    assert 'id="others"' not in build_report(run).read_text()


def test_a_half_of_an_evaluation_is_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with whole_folder(run / "evaluations" / "a_vs_b") as half:
        (half / MARK).write_text("{}")
        assert other_results(run) == []
    assert [other.title for other in other_results(run)] == ["Evaluation a_vs_b"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"baseline": "a", "prompts": 3}'])
def test_a_result_that_cannot_be_read_is_told_and_the_report_is_written(
    tmp_path: Path, content: str
) -> None:
    run = make_run(tmp_path / "run")
    folder = run / "evaluations" / "<b>"
    folder.mkdir(parents=True)
    (folder / "comparison.json").write_text(content)
    (other,) = other_results(run)
    assert other.link is None
    page = build_report(run).read_text()
    assert "comparison.json cannot be read" in page
    assert "Evaluation &lt;b&gt;" in page
    shutil.rmtree(folder)
