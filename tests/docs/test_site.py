"""The site builds without a warning and without a network, every page of it is linked, and it has what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import aquiline
from aquiline.cli.main import COMMANDS, command_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.rare


class Seen(HTMLParser):
    """What a page links to, what it loads, and the places that a link can name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.loads, self.ids = set[str](), set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag in ("script", "img", "iframe"):
            self.loads.add(given.get("src", ""))
        elif tag == "link" and given.get("rel") != "canonical":
            self.loads.add(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason="not installed: mkdocstrings")
    out = tmp_path_factory.mktemp("site")
    blocked = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all")}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-d", str(out)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | blocked | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Seen]:
    return {page: Seen(page.read_text("utf-8")) for page in site.rglob("*.html") if page.name != "404.html"}


def targets(page: Path, links: set[str]) -> Iterator[tuple[Path, str]]:
    """The files of the site that links of a page name, each with its place."""
    for link in links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            yield (page.parent / unquote(parts.path)).resolve() if parts.path else page, unquote(parts.fragment)


def test_every_link_has_its_target_and_every_page_a_link(site: Path, pages: dict[Path, Seen]) -> None:
    reached, waiting = set[Path](), [site / "index.html"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            for there, place in targets(page, pages[page].links):
                there = there / "index.html" if there.is_dir() else there
                assert there.is_file(), f"{page.relative_to(site)} -> {there}"
                assert there not in pages or not place or place in pages[there].ids, f"{page} -> {there}#{place}"
                waiting += [there] if there in pages else []
    assert reached == set(pages)


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Seen]) -> None:
    for page, seen in pages.items():
        assert not [load for load in seen.loads if urlsplit(load).netloc], page
        for there, _ in targets(page, {load for load in seen.loads if not load.startswith("data:")}):
            assert there.exists(), f"{page.relative_to(site)} loads {there}"


def test_every_command_has_a_page_with_every_option(site: Path) -> None:
    for name in COMMANDS:
        text = (site / "commands" / f"{name}.html").read_text("utf-8")
        for command in [command_of(name), *getattr(command_of(name), "commands", {}).values()]:
            for param in command.params:
                assert param.param_type_name != "option" or f"<code>{param.opts[0]}</code>" in text, (name, param.opts)


def test_every_public_name_is_on_the_page_of_python(pages: dict[Path, Seen], site: Path) -> None:
    ids = {place.rpartition(".")[2] for place in pages[site / "python.html"].ids}
    assert set(aquiline.__all__) - {"__version__"} <= ids
    text = re.sub(r"<[^>]+>", "", (site / "python.html").read_text("utf-8"))
    assert "New tokens at most." in text and "setting(" not in text, "the help of a field"


def test_pages_of_the_repository_keep_their_links(pages: dict[Path, Seen], site: Path) -> None:
    assert "decisions/01-sample-and-match.html" in pages[site / "concepts.html"].links
    assert "src/aquiline/types.py.html" in pages[site / "ARCHITECTURE.html"].links
    assert (site / "demo.png").is_file() and (site / "pictures" / "step.svg").is_file()
