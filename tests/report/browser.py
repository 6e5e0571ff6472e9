"""Opens a page in a real browser, in a frame of a chosen width, and returns what a script saw."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium is installed (apt-get install chromium)"
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--allow-file-access-from-files",
    "--disable-web-security",
    "--virtual-time-budget=5000",
    "--dump-dom",
]
FRAME = """<!doctype html>
<iframe id="page" style="border:0;height:800px;width:WIDTHpx"></iframe>
<pre id="told"></pre>
<script>
const page = document.getElementById("page");
page.onload = () => {
  const { document: inner } = page.contentWindow;
  const told = {};
  SCRIPT
  document.getElementById("told").textContent = JSON.stringify(told);
};
page.src = "PAGE";
</script>"""


def look_at(page: Path, width: int, script: str) -> dict[str, Any]:
    """Open a page in a frame of ``width`` pixels; return ``told``, which ``script`` filled.

    The script finds the page's document as ``inner``. Whatever the browser writes to its console
    is a fault.
    """
    frame = page.parent / "frame.html"
    text = FRAME.replace("WIDTH", str(width)).replace("SCRIPT", script)
    frame.write_text(text.replace("PAGE", page.name), encoding="utf-8")
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={page.parent / 'profile'}"]
    done = subprocess.run(
        [*command, f"file://{frame}"], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    told = re.search(r'<pre id="told">(.+?)</pre>', done.stdout)
    assert told is not None, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(unescape(told[1]))
    return found
