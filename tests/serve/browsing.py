"""The page in headless Chromium, by Playwright: a browser for a module, a page for a test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.chromium import CHROMIUM
from tests.serve.serving import KEY, PROMPT, Server

pytest.importorskip("playwright", reason="not installed: playwright")
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

PATIENCE_MS = 120_000
"""A process that is stopped meanwhile must not fail a test."""

ANSWERS = "**/v1/chat/completions"


class Tab:
    """A page and what it did: the bodies that it sent, the errors on its console, the hosts it asked."""

    def __init__(self, page: Page, server: Server) -> None:
        self.page, self.server = page, server
        self.sent: list[Any] = []
        self.errors: list[str] = []
        self.hosts: set[str | None] = set()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._note)
        page.goto(server.url)

    def _note(self, request: Any) -> None:
        self.hosts.add(urlsplit(request.url).netloc)
        if request.method == "POST":
            self.sent.append(request.post_data_json)

    def set(self, **fields: str) -> None:
        """Fill fields of the settings, which are in view on a wide page."""
        for name, value in fields.items():
            field = self.page.locator(f"#fields [name={name}]")
            if field.evaluate("field => field.localName") == "select":
                field.select_option(value)
            else:
                field.fill(value)

    def ask(self, prompt: str = PROMPT) -> None:
        """Send a message by the keyboard."""
        self.page.fill("#message", prompt)
        self.page.press("#message", "Enter")

    def answer(self, prompt: str = PROMPT) -> str:
        """Send a message and wait for the end: the text of the last answer."""
        self.ask(prompt)
        self.settle()
        return self.text()

    def settle(self) -> None:
        """Wait until nothing is being written."""
        self.page.wait_for_selector("#stop", state="hidden")

    def text(self, place: int = -1) -> str:
        return str(self.page.locator(".answer .content").nth(place).evaluate("element => element.textContent"))

    def figure(self, name: str, place: int = -1) -> str:
        return self.page.locator(f"[data-figure={name}]").nth(place).inner_text()

    def problem(self) -> str:
        return self.page.locator(".problem:visible").inner_text()

    def style(self, css: str, *names: str) -> list[str]:
        """Computed styles of the first element."""
        look = "(element, names) => names.map((name) => getComputedStyle(element)[name])"
        return list(self.page.locator(css).first.evaluate(look, list(names)))

    def replies(self, reply: Callable[[Route, int], None]) -> None:
        """Answer requests for answers by `reply`, which is given the number of those before."""
        numbers = iter(range(1000))
        self.page.route(ANSWERS, lambda route: reply(route, next(numbers)))


def stream(*texts: str, by: str = "target", done: bool = True) -> str:
    """The events of an answer in which every text is a chunk of one token."""
    chunks = [
        {"choices": [{"delta": {"content": text, "sources": [{"text": text, "by": by, "in": "content"}]}}]}
        for text in texts
    ]
    if done:
        chunks[-1]["choices"][0]["finish_reason"] = "stop"  # type: ignore[assignment]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n" * done


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium that reaches nothing but this machine."""
    args = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=args, timeout=PATIENCE_MS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, server: Server, key: str = KEY, width: int = 1280, **options: Any) -> Iterator[Tab]:
    """A page with an API key. It asks no other host and has no errors but failed requests, which browsers log."""
    size = {"width": width, "height": 800}
    context = browser.new_context(viewport=size, **options)  # type: ignore[arg-type]
    context.add_init_script(f"sessionStorage.setItem('aquiline.key', {key!r})" if key else "")
    tab = Tab(context.new_page(), server)
    tab.page.wait_for_selector("#model:not(:text-is('connecting'))")
    yield tab
    context.close()
    assert tab.hosts == {urlsplit(server.url).netloc}
    assert not [error for error in tab.errors if not error.startswith("Failed to load resource")]


@pytest.fixture
def tab(browser: Browser, server: Server) -> Iterator[Tab]:
    """A page as on a desk, drawing the same tokens every time."""
    with opened(browser, server) as tab:
        tab.set(temperature="0", seed="3", max_tokens="48")
        yield tab
