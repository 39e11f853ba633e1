"""The page where something is wrong: keys, full servers, refused requests, connections, texts that are no text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.chromium import needs_chromium
from tests.serve.browsing import Browser, Route, Tab, browser, opened, stream, tab
from tests.serve.serving import KEY, PROMPT, Server

__all__ = ["browser", "tab"]
pytestmark = needs_chromium

ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;"
FENCED = f"Look:\n```python\nif x:\n    {ATTACK}\n```\nand `this`, ``\n  ```\nopen"


def busy(status: int, after_s: int, number: int = 1) -> Callable[[Route, int], None]:
    """Replies: so many of a busy server, then the real one."""

    def reply(route: Route, place: int) -> None:
        if place >= number:
            route.continue_()
            return
        body = '{"error": {"message": "four wait, and four may", "type": "t", "param": null, "code": null}}'
        headers = {"retry-after": str(after_s), "content-type": "application/json"}
        route.fulfill(status=status, headers=headers, body=body)

    return reply


def test_a_server_with_a_key_asks_for_it(browser: Browser, server: Server) -> None:
    with opened(browser, server, key="") as tab:
        page = tab.page
        assert page.inner_text("#model") == "asks for an API key"
        assert page.evaluate("document.activeElement.id") == "key"
        tab.ask()
        page.wait_for_selector(".problem:visible")
        assert "401" in tab.problem() and "API key" in tab.problem()
        page.fill("#key", KEY + "\u2019")
        page.click(".retry")
        page.wait_for_selector(".problem:has-text('character')")
        page.fill("#key", KEY)
        page.fill("#max_tokens", "4")
        page.press("#key", "Enter")
        page.wait_for_selector("#model:has-text('code, 1,024 tokens')")
        page.click(".retry")
        page.wait_for_selector(".answer .by")
        tab.settle()
        assert page.locator(".problem:visible").count() == 0


def test_a_full_server_is_asked_again_by_itself(tab: Tab) -> None:
    tab.replies(busy(429, 1, 2))
    tab.answer()
    assert tab.figure("tokens") == "48" and len(tab.sent) == 3


@pytest.mark.parametrize(("status", "words"), [(429, "is full"), (503, "is not ready")])
def test_waiting_ends_at_once_by_hand(tab: Tab, status: int, words: str) -> None:
    tab.replies(busy(status, 3600))
    tab.ask()
    tab.page.wait_for_selector(".soon:not(:empty)")
    assert f"The server {words} ({status}: four wait, and four may)." in tab.problem()
    tab.page.click(".retry")
    tab.settle()
    assert tab.figure("tokens") == "48" and len(tab.sent) == 2


def test_waiting_is_stopped(tab: Tab) -> None:
    tab.replies(busy(503, 3600, 100))
    tab.ask()
    tab.page.wait_for_selector(".soon:not(:empty)")
    tab.page.keyboard.press("Escape")
    tab.settle()
    assert "503" in tab.problem() and "again in" not in tab.problem() and len(tab.sent) == 1


def test_a_refusal_is_told_in_the_servers_words(tab: Tab) -> None:
    tab.set(max_tokens="5000")
    tab.ask()
    tab.page.wait_for_selector(".problem:visible")
    assert "refuses the request (400" in tab.problem() and "5000" in tab.problem()


def test_lost_connections(tab: Tab) -> None:
    tab.replies(lambda route, place: route.abort("connectionrefused"))
    tab.ask()
    tab.page.wait_for_selector(".problem:visible")
    assert "connection to the server is lost" in tab.problem()
    tab.page.unroute_all()
    cut = stream("half", done=False)
    tab.replies(lambda route, place: route.fulfill(body=cut, content_type="text/event-stream"))
    tab.ask()
    tab.page.wait_for_selector(".turn:last-child .problem:visible")
    assert tab.text() == "half" and "ended before the answer did" in tab.page.inner_text(".turn:last-child .problem")
    error = 'data: {"error": {"message": "the engine died", "type": "service_unavailable_error"}}\n\n'
    tab.page.unroute_all()
    tab.replies(lambda route, place: route.fulfill(body=cut + error, content_type="text/event-stream"))
    tab.ask()
    tab.page.wait_for_selector(".turn:last-child .problem:visible")
    assert tab.text() == "half" and "the engine died" in tab.page.inner_text(".turn:last-child .problem")
    tab.page.unroute_all()
    tab.page.click(".turn:last-child .retry")
    tab.page.wait_for_selector(".turn:last-child [data-figure=tokens]:text-is('48')")
    sent = [message["content"] for message in tab.sent[-1]["messages"]]
    assert sent == [PROMPT, "half", PROMPT], "the turn without an answer is as if never sent"


def test_a_comparison_that_fails_says_where(tab: Tab) -> None:
    def reply(route: Route, place: int) -> None:
        route.fulfill(body=stream("one", " two" if place else " too"), content_type="text/event-stream")

    tab.replies(reply)
    tab.page.check("#compare")
    tab.answer()
    assert tab.page.locator(".verdict").inner_text().startswith("Identical: no, from character 5 on.")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_text_is_text_however_it_comes(tab: Tab, size: int) -> None:
    pieces = [FENCED[place : place + size] for place in range(0, len(FENCED), size)]
    tab.replies(lambda route, _: route.fulfill(body=stream(*pieces), content_type="text/event-stream"))
    assert tab.answer(ATTACK) == FENCED
    page = tab.page
    assert page.locator(".prompt").inner_text() == ATTACK
    assert page.locator("#turns img, #turns script").count() == 0
    blocks = page.locator(".content > *").evaluate_all("blocks => blocks.map((b) => [b.localName, b.textContent])")
    code = f"```python\nif x:\n    {ATTACK}\n```\n"
    assert blocks == [["div", "Look:\n"], ["pre", code], ["div", "and `this`, ``\n"], ["pre", "  ```\nopen"]]
