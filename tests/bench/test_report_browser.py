"""The report in a browser without a network: laid out, drawn, readable on a desk and on a phone. Needs Chromium."""

from __future__ import annotations

import base64
import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.bench.reports import ATTACK, Results, measured, peer_of
from tests.chromium import CHROMIUM, needs_chromium

from aquiline.bench.report.page import render

__all__ = ["measured"]
pytestmark = needs_chromium

LOOK = """
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const inner = frame.contentDocument, all = (css) => [...inner.querySelectorAll(css)];
  const style = (element) => frame.contentWindow.getComputedStyle(element);
  const outside = (text) => {
    const a = text.getBoundingClientRect(), b = text.closest("figure").getBoundingClientRect();
    return a.left < b.left || a.right > b.right;
  };
  const crossing = (plot) => {
    const boxes = [...plot.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
    return boxes.some((a, i) => boxes.slice(i + 1).some((b) =>
      a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3));
  };
  const seen = {
    height: inner.documentElement.scrollHeight,
    wide: inner.documentElement.scrollWidth - inner.documentElement.clientWidth,
    plots: all(".plot").map((plot) => plot.getBoundingClientRect().height).filter((height) => height > 100).length,
    outside: all(".plot text").filter(outside).map((text) => text.textContent),
    crossing: all(".plot").filter(crossing).map((plot) => plot.getAttribute("aria-label")),
    letters: Math.min(...all(".plot text").map((text) => text.getBoundingClientRect().height)),
    unpainted: all(".plot path, .plot use").filter(
      (e) => style(e).stroke === "none" && style(e).fill === "rgb(0, 0, 0)").length,
    colors: new Set(all(".plot > g > g > g > path").map((bar) => style(bar).fill)).size,
    columns: style(inner.querySelector(".panels")).gridTemplateColumns.split(" ").length,
    fetched: frame.contentWindow.performance.getEntriesByType("resource").map((entry) => entry.name),
    scripts: inner.scripts.length, hit: Boolean(window.hit || frame.contentWindow.hit),
  };
  document.body.textContent = "SEEN" + btoa(unescape(encodeURIComponent(JSON.stringify(seen)))) + "NEES";
});
"""


def look(results: Results, width: int, tmp_path: Path) -> dict[str, Any]:
    """What a browser of that width makes of the report, without a network."""
    source = html.escape(render(results))
    frame = f'<iframe width="{width}" height="900" srcdoc="{source}"></iframe>'
    (tmp_path / "look.html").write_text(
        f"<meta charset=utf-8>{frame}<script>{LOOK}</script>", encoding="utf-8", errors="replace"
    )
    assert CHROMIUM is not None
    options = (
        "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom",
        "--virtual-time-budget=10000", f"--user-data-dir={tmp_path / 'profile'}",
    )  # fmt: skip
    command = [CHROMIUM, *options, (tmp_path / "look.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search("SEEN(.*)NEES</body>", done.stdout)
    assert found is not None, (done.stdout[:2000], done.stderr[-2000:])
    seen: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    return seen


@pytest.fixture
def all_kinds(measured: Results) -> Results:
    """Ours with ideals, a peer's and another machine's."""
    ideals = {
        file: r
        | {"roofline": {"ideal_tokens_per_s": 1.5 * r["throughput_tokens_per_sec"]["max"], "ideal_speedup": 2.0}}
        for file, r in measured.items()
    }
    peers = {f"p-{file}": peer_of(r) for file, r in measured.items()}
    other = {f"o-{file}": r | {"system": r["system"] | {"cpu": "another CPU"}} for file, r in measured.items()}
    return ideals | peers | other


@pytest.mark.parametrize(("width", "columns"), [(1280, 3), (390, 1)])
def test_it_looks_right(width: int, columns: int, all_kinds: Results, tmp_path: Path) -> None:
    seen = look(all_kinds, width, tmp_path)
    assert seen["wide"] == 0 and seen["columns"] == columns
    assert seen["plots"] == render(all_kinds).count("<figure>") == 36
    assert not seen["outside"] and not seen["crossing"] and seen["letters"] >= 9
    assert not seen["unpainted"] and seen["colors"] >= 7
    assert not seen["fetched"]


def test_one_scenario_is_no_long_page(measured: Results, tmp_path: Path) -> None:
    """Its groups have a plot each, so the figures stand beside it; on a phone they stand below."""
    one = {file: r for file, r in measured.items() if file.startswith("48x2")}
    assert len(one) == 4
    wide, narrow = look(one, 1280, tmp_path), look(one, 390, tmp_path)
    assert wide["height"] < 3000 and wide["wide"] == narrow["wide"] == 0


def test_a_hostile_result_runs_nothing(measured: Results, tmp_path: Path) -> None:
    hostile = {}
    for file, r in measured.items():
        scenario = r["scenario"] | {"name": ATTACK, "prompts_source": ATTACK}
        setting, model = r["setting"] | {"name": f"{ATTACK} {r['setting']['name']}"}, r["model"] | {"target": ATTACK}
        hostile[file] = r | {"scenario": scenario, "setting": setting, "model": model, "commit": ATTACK}
    seen = look(hostile, 1280, tmp_path)
    assert seen["scripts"] == 0 and not seen["hit"] and not seen["fetched"]
    assert seen["wide"] == 0 and not seen["outside"] and not seen["crossing"], "long names are cut"
