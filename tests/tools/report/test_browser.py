"""The report in a real browser: no script fails, nothing is cut off, and a pointer over a chart shows its values."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ssdtrain.tools.report.page import page
from ssdtrain.tools.report.run import JournaledRun
from tests.support.journals import write

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome: apt-get install chromium"),
]

CATCH = "<script>window.failures = []; window.onerror = message => window.failures.push(message);</script>"
LOOK = """<script>window.onload = () => {
  const inside = element => {
    const box = element.getBoundingClientRect(), outer = element.closest('.card').getBoundingClientRect();
    return box.width > 0 && box.height > 0 && box.left >= outer.left - 1 && box.right <= outer.right + 1;
  };
  const charts = [...document.querySelectorAll('figure.chart')], svg = charts[0].querySelector('svg');
  const box = svg.getBoundingClientRect();
  const at = {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true};
  svg.dispatchEvent(new PointerEvent('pointermove', at));
  const tip = charts[0].querySelector('.tip'), shown = tip.getBoundingClientRect();
  const seen = {
    failures: window.failures,
    width: document.documentElement.clientWidth,
    needed: document.documentElement.scrollWidth,
    charts: charts.length,
    outside: charts.filter(chart => !inside(chart.querySelector('svg'))).length,
    tiles: [...document.querySelectorAll('.tile .value')].filter(tile => tile.scrollWidth > tile.clientWidth + 1).length,
    tip: tip.innerText, tip_outside: shown.left < box.left - 1 || shown.right > box.right + 1,
    background: getComputedStyle(document.body).backgroundColor,
  };
  const out = document.createElement('pre'); out.id = 'seen'; out.textContent = JSON.stringify(seen);
  document.body.append(out);
};</script>"""


def look(text: str, directory: Path, width: int) -> dict[str, Any]:
    """What a script sees in the page."""
    file = directory / "page.html"
    file.write_text(text.replace("<head>", f"<head>{CATCH}").replace("</body>", f"{LOOK}</body>"))
    assert BROWSER is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={width},900",
    ]
    done = subprocess.run(
        [BROWSER, *options, f"--user-data-dir={directory / 'profile'}", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


@pytest.mark.parametrize("width", [1280, 600])
def test_it_is_laid_out_and_answers_the_pointer(tmp_path: Path, width: int) -> None:
    run = JournaledRun.read(write(tmp_path / "run", ranks=4, loss=2.5))
    seen = look(page(run), tmp_path, width)
    assert seen["failures"] == []
    assert seen["needed"] <= seen["width"] == width  # no line to scroll sideways
    assert seen["charts"] >= 4 and seen["outside"] == 0 and seen["tiles"] == 0
    assert re.match(r"step [2-4]\s", seen["tip"]) and "rank 3: 33 MiB" in seen["tip"]
    assert not seen["tip_outside"]
