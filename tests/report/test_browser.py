"""The report in a real browser, at the widths of a desktop and of a phone."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic import Size, make_run
from workflow_rl.report.build import build_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

PROBE = """<!doctype html>
<iframe id="page" style="border:0;height:800px"></iframe>
<pre id="told"></pre>
<script>
const page = document.getElementById("page");
page.style.width = "WIDTHpx";
page.onload = () => {
  const { document: inner } = page.contentWindow;
  const { elements } = inner.forms.filters;
  const told = {};
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
  document.getElementById("told").textContent = JSON.stringify(told);
};
page.src = "run/report.html";
</script>"""


def probe(folder: Path, width: int) -> dict[str, Any]:
    """Open the report in a frame of a width; return what the probe saw."""
    (folder / "probe.html").write_text(PROBE.replace("WIDTH", str(width)), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += [
        "--hide-scrollbars",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
    ]
    flags += ["--allow-file-access-from-files", "--disable-web-security"]
    done = subprocess.run(
        [
            str(BROWSER),
            *flags,
            "--virtual-time-budget=5000",
            "--dump-dom",
            f"file://{folder}/probe.html",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    told = re.search(r'<pre id="told">(.+?)</pre>', done.stdout)
    assert told is not None, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(unescape(told[1]))
    return found


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


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_and_its_filters_change_what_is_shown(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path / "run", Size(branches=3))
    build_report(run)
    told = probe(tmp_path, width)
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
