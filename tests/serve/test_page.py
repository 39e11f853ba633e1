"""The page on a real server: answers, their marks and figures, the comparison, the keyboard, narrow pages."""

from __future__ import annotations

import pytest
from tests.chromium import needs_chromium
from tests.serve.browsing import Browser, Tab, browser, expect, opened, tab
from tests.serve.serving import KEY, PROMPT, Server, until

__all__ = ["browser", "tab"]
pytestmark = needs_chromium

REPEATS = "a = b + c\nd = e + f\n" * 6
UNDERLINE = ("textDecorationLine", "textDecorationStyle")


def expected(server: Server, prompt: str = PROMPT, max_tokens: int = 48) -> dict[str, object]:
    """The answer of the server without a page."""
    sampling = {"temperature": 0, "seed": 3, "max_tokens": max_tokens}
    reply = server.chat(prompt, return_token_sources=True, **sampling)
    return dict(reply["choices"][0]["message"])


def test_tokens_are_marked_by_who_wrote_them(tab: Tab, server: Server) -> None:
    told = expected(server)
    assert tab.answer() == told["content"]
    for by in ("draft", "target"):
        written = "".join(part["text"] for part in told["sources"] if part["by"] == by)  # type: ignore[attr-defined]
        marked = tab.page.locator(f".answer [data-by={by}].by").all_text_contents()
        assert "".join("".join(marked).split()) == "".join(written.split()) != ""
    assert tab.style(".answer .by[data-by=draft]", *UNDERLINE) == ["underline", "solid"]
    assert tab.style(".answer .by[data-by=target]", *UNDERLINE) == ["none", "solid"]
    for by in ("draft", "target"):
        names = (*UNDERLINE, "color")
        assert tab.style(f".legend [data-by={by}]", *names) == tab.style(f".answer [data-by={by}].by", *names)
    assert float(tab.figure("tau")) > 1.5 and tab.figure("tokens") == "48" and float(tab.figure("rate")) > 0
    assert tab.figure("draft").endswith("%") and tab.figure("seed") == "3"
    tab.page.uncheck("[name=marks]")
    assert tab.style(".answer .by[data-by=draft]", *UNDERLINE) == ["none", "solid"]


def test_copied_tokens_have_a_mark_of_their_own(tab: Tab) -> None:
    tab.set(drafter="lookup", num_spec_tokens="4")
    tab.answer(REPEATS)
    assert tab.style(".answer .by[data-by=lookup]", *UNDERLINE) == ["underline", "dotted"]
    assert tab.page.locator(".answer .by[data-by=draft]").count() == 0
    assert tab.figure("lookup").endswith("%")
    assert (tab.sent[-1]["drafter"], tab.sent[-1]["num_spec_tokens"]) == ("lookup", 4)


def test_the_comparison_says_that_both_texts_are_one(tab: Tab) -> None:
    tab.set(temperature="0.8", seed="")
    tab.page.check("#compare")
    tab.answer()
    drafted, plain = tab.sent[-2:]
    assert "drafter" not in drafted and plain["drafter"] == "none"
    assert drafted["seed"] == plain["seed"] and drafted["messages"] == plain["messages"]
    assert tab.text(0) == tab.text(1) != ""
    assert tab.page.locator(".verdict").inner_text().startswith("Identical: yes.")
    assert float(tab.figure("tau", 0)) > 1 and tab.figure("tau", 1) == "1.00"
    assert tab.page.locator(".answer:nth-child(2) .by:not([data-by=target])").count() == 0


def test_stop_ends_the_request_and_keeps_the_text(tab: Tab, server: Server) -> None:
    tab.set(max_tokens="900")
    tab.ask()
    tab.page.wait_for_selector(".answer .by")
    tab.page.click("#stop")
    tab.settle()
    assert tab.figure("end") == "stopped" and 0 < int(tab.figure("tokens")) < 900
    server.settle()
    stopped = tab.text()
    tab.set(max_tokens="8")
    tab.answer("more")
    assert [message["content"] for message in tab.sent[-1]["messages"]] == [PROMPT, stopped, "more"]


def test_which_generation_of_a_draft_that_learns_serves(browser: Browser, server: Server) -> None:
    with opened(browser, server) as tab:
        assert "generation" not in tab.page.inner_text("#model")
        tab.page.route("**/health", lambda route: route.fulfill(json={"draft_generation": 2}))
        tab.page.reload()
        tab.page.wait_for_selector("#model:has-text('draft of generation 2')")
        tab.page.route("**/health", lambda route: route.fulfill(json={"draft_generation": 3}))
        tab.answer()
        tab.page.wait_for_selector("#model:has-text('draft of generation 3')")


def test_keyboard_alone(tab: Tab) -> None:
    page = tab.page
    page.focus(".skip")
    order = []
    for _ in range(10):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
    wanted = ["skip", "new", "open", "conversation", "example", "example", "example", "message", "compare", "send"]
    assert order == wanted
    page.focus("#message")
    for key in ("a", "Shift+Enter", "b"):
        page.keyboard.press(key)
    assert page.input_value("#message") == "a\nb"
    tab.set(max_tokens="900")
    tab.ask()
    page.wait_for_selector(".answer .by")
    page.keyboard.press("Escape")
    tab.settle()
    assert tab.figure("end") == "stopped"
    assert page.evaluate("document.activeElement.id") == "message"
    tab.set(max_tokens="8")
    page.locator(".again").press("Enter")
    page.wait_for_selector("[data-figure=tokens]:text-is('8')")
    tab.settle()
    assert page.evaluate("document.activeElement.id") == "message", "the button that had the focus is gone"
    page.locator("#new").press("Enter")
    assert page.locator(".turn").count() == 0 and page.locator("#start").is_visible()


def test_a_screen_reader_hears_the_answer_once(tab: Tab) -> None:
    page = tab.page
    page.evaluate(
        "window.said = []; new MutationObserver(() => said.push(document.querySelector('#said').textContent))"
        ".observe(document.querySelector('#said'), {childList: true, characterData: true, subtree: true})"
    )
    text = tab.answer()
    assert page.evaluate("said.map((text) => text.trim())") == ["The model writes.", f"The answer: {text}".strip()]
    assert page.locator(".answer").get_attribute("aria-busy") == "false"
    for role in ("banner", "main", "complementary", "status"):
        assert page.get_by_role(role).count() == 1, role  # type: ignore[arg-type]
    unnamed = "[...document.querySelectorAll('input, select, textarea')].filter((e) => !e.labels.length).length"
    assert page.evaluate(unnamed) == 0


def test_settings_are_sent_and_kept(tab: Tab) -> None:
    page = tab.page
    tab.set(system="Be brief.", temperature="0.25", top_p="0.9", seed="11", max_tokens="4")
    page.uncheck("[name=enabled]")
    page.reload()
    tab.answer()
    body = tab.sent[-1]
    assert {name: body[name] for name in ("temperature", "top_p", "seed", "max_tokens", "drafter")} == {
        "temperature": 0.25, "top_p": 0.9, "seed": 11, "max_tokens": 4, "drafter": "none",
    }  # fmt: skip
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    page.click("text=Defaults")
    expect(page.locator("#system")).to_have_value("")
    expect(page.locator("#key")).to_have_value(KEY)  # which the page restores after the reset
    assert page.input_value("#temperature") == "0.7"
    tab.set(temperature="-1")
    tab.ask("never sent")
    assert page.evaluate("document.activeElement.id") == "temperature" and page.locator(".turn").count() == 1


def test_copying(browser: Browser, server: Server) -> None:
    with opened(browser, server, permissions=["clipboard-read", "clipboard-write"]) as tab:
        tab.set(max_tokens="16")
        text = tab.answer()
        tab.page.click(".copy")
        until(lambda: tab.page.evaluate("navigator.clipboard.readText()") == text, "the answer is not on the clipboard")


@pytest.mark.parametrize("width", [320, 800, 1280])
def test_nothing_is_wider_than_the_page(browser: Browser, server: Server, width: int) -> None:
    def overflow() -> int:
        wide = "document.documentElement.scrollWidth - innerWidth"
        inside = (
            "document.querySelector('#conversation').scrollWidth - document.querySelector('#conversation').clientWidth"
        )
        return max(int(tab.page.evaluate(wide)), int(tab.page.evaluate(inside)))

    with opened(browser, server, width=width, color_scheme="dark", reduced_motion="reduce") as tab:
        assert overflow() == 0
        if width < 900:
            tab.page.click("#open")
            assert overflow() == 0 and tab.page.locator("main").evaluate("main => main.inert")
            tab.page.fill("#max_tokens", "40")
            tab.page.keyboard.press("Escape")
            assert tab.page.locator("#settings").is_hidden()
        tab.page.check("#compare")
        tab.answer("x" * 300)
        tab.answer()
        assert overflow() == 0
        assert tab.style("html", "backgroundColor") == ["rgb(21, 21, 20)"], "dark"
        columns = tab.page.locator(".answer").evaluate_all("all => all.slice(-2).map((a) => a.offsetLeft)")
        assert (columns[0] == columns[1]) == (width < 700)
