"""The files of the page: complete, from nowhere else, readable in both colour schemes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import aquiline.serve
from aquiline.spec.registry import DRAFTINGS

PAGE = Path(aquiline.serve.__file__).parent / "page"
CSS = (PAGE / "page.css").read_text()
TEXTS, GROUNDS = ("ink", "soft", "draft", "lookup", "error"), ("page", "panel", "field")


def palette(is_dark: bool) -> dict[str, str]:
    """Colours by name; the dark ones stand over the light ones."""
    blocks: list[str] = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    assert len(blocks) == 2
    found: dict[str, str] = {}
    for block in blocks[: 1 + is_dark]:
        found |= re.findall(r"--(\w+): (#[0-9a-f]{6});", block)
    return found


def luminance(color: str) -> float:
    """Relative luminance. Source: WCAG 2.2."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("is_dark", [False, True])
def test_contrast(is_dark: bool) -> None:
    colors = palette(is_dark)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    ratios = {(text, ground): contrast(colors[text], colors[ground]) for text in TEXTS for ground in GROUNDS}
    assert min(ratios.values()) >= 4.5, ratios
    edges = {ground: contrast(colors["edge"], colors[ground]) for ground in GROUNDS}
    assert min(edges.values()) >= 3, edges
    assert len(colors) == len({*TEXTS, *GROUNDS, "edge", "rule"}), "a colour that is not judged here"


def test_colours_are_named_once() -> None:
    rules = re.sub(r":root \{.*?\}", "", CSS, flags=re.DOTALL)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?!\s*[{,:>.])|rgb|hsl|gradient", rules)


def test_every_way_to_draft_can_be_chosen() -> None:
    (drafters,) = re.findall(r'<select id="drafter".*?</select>', (PAGE / "index.html").read_text(), re.DOTALL)
    assert re.findall(r'value="(\w*)"', drafters) == ["", *(name for name in DRAFTINGS if name != "none")]


def test_everything_comes_from_the_page_itself() -> None:
    texts = {file.name: file.read_text() for file in PAGE.iterdir()}
    for name, text in texts.items():
        outside = re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"']*", text)
        assert outside in ([], ["http://www.w3.org/2000/svg"]), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|style=|onclick=", text
        ), name
    asked = re.findall(r"(?:href|src)=\"([\w.]+)\"", texts["index.html"])
    asked += [name for text in texts.values() for name in re.findall(r"from \"\./([\w.]+)\"", text)]
    assert set(asked) == set(texts) - {"index.html"}
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in texts["index.html"]
