"""Requests go where their prompts are cached, and where there is least to do; what routers know may be late or gone."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kv.kept import SIZE, Kept

from aquiline.config import SamplingParams
from aquiline.engine.sequence import Request
from aquiline.kv.prefix import page_digests
from aquiline.serve.routing import Affinity, EngineRecord, EngineReport, Routed
from aquiline.spec.drafting import NoDraft

NOTHING = EngineReport(0, 0, 0.0, frozenset())


def routed(text: str, max_tokens: int = 10, salt: str | None = None) -> Routed:
    """A request whose prompt has a page for each letter of a text."""
    ids = tuple(ord(letter) for letter in text for _ in range(SIZE))
    return Routed.of(Request(0, ids, SamplingParams(max_tokens=max_tokens, seed=0), NoDraft(), cache_salt=salt), SIZE)


def told(number: int, text: str = "", load: int = 0, mean_output: float = 0.0) -> EngineReport:
    return EngineReport(number, load, mean_output, frozenset(routed(text).digests))


def affinity(reports: dict[str, EngineReport], num_slots: int = 1) -> Affinity[str]:
    made = Affinity[str](num_slots, random.Random(0))
    made.update(reports)
    return made


def test_a_digest_names_a_page_and_all_before_it_within_its_space() -> None:
    digests = page_digests(None, [1, 2, 3, 4, 5], 2)
    assert len(digests) == 2 and page_digests(None, [1, 2, 3, 4], 2) == digests
    others = [page_digests(None, [0, 2, 3, 4], 2), page_digests("salt", [1, 2, 3, 4], 2)]
    assert not set(digests) & {digest for other in others for digest in other}
    assert page_digests(None, [3, 4], 2)[0] not in digests, "the same tokens elsewhere"
    assert page_digests("None", [1, 2], 2) != page_digests(None, [1, 2], 2), "a salt that is called so"


def test_digests_are_the_same_in_every_process() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", "from aquiline.kv.prefix import page_digests as p; print(p('salt', range(64), 16))"],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert told[0] == told[1] == f"{page_digests('salt', range(64), 16)}\n"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=12), st.integers(0, 12))
def test_an_engine_tells_what_its_cache_has_and_no_page_without_those_before_it(texts: list[str], most: int) -> None:
    kept = Kept()
    for slot, text in enumerate(texts):
        kept.keep(text, slot=slot % 2)
    pages = kept.cache.digests(most)
    assert len(pages) == len(set(pages)) == min(most, len(kept.cache.by_page))
    for node in kept.cache.by_page.values():
        if node.digest in pages and node.parent is not None and node.parent.page >= 0:
            assert node.parent.digest in pages
    for text in texts:
        found = kept.match(text)
        if most >= len(kept.cache.by_page):
            record = EngineRecord()
            record.take(EngineReport(1, 0, 0.0, frozenset(pages)))
            assert record.num_cached(page_digests(None, kept.tokens(text), SIZE)) == len(found)


def test_a_request_goes_where_most_of_its_prompt_is_cached() -> None:
    engines = affinity({"a": told(1, "x"), "b": told(1, "xyz"), "c": told(1, "xy"), "d": NOTHING})
    assert {engines.rank(routed("xyzw"))[0][0] for _ in range(20)} == {"b"}
    ranks = engines.rank(routed("xyzw"))
    assert sorted(name for names in ranks for name in names) == ["a", "b", "c", "d"], "the others, if it is full"
    assert {engines.rank(routed("xyzw", salt="s"))[0][0] for _ in range(50)} == set("abcd"), "another's cache"


@pytest.mark.parametrize("num_slots", [1, 4])
def test_it_leaves_its_cache_for_an_engine_that_has_less_to_do_by_more_than_the_cache_saves(num_slots: int) -> None:
    saved = 2 * SIZE
    for load, chosen in ((saved * num_slots - 1, "a"), (saved * num_slots + 1, "b")):
        engines = affinity({"a": told(1, "xy", load), "b": NOTHING}, num_slots)
        assert engines.rank(routed("xyz"))[0][0] == chosen, load


def test_prompts_that_nobody_has_are_spread_by_load() -> None:
    engines, chosen = affinity(dict.fromkeys("abcd", NOTHING)), Counter[str]()
    for number in range(400):
        name = engines.rank(routed(chr(1000 + number)))[0][0]
        engines.records[name].begin(str(number), routed(chr(1000 + number)))
        chosen[name] += 1
    assert max(chosen.values()) <= 102 and min(chosen.values()) >= 98
    busy = affinity(dict.fromkeys("abcd", NOTHING) | {"a": told(1, load=1000)})
    first = Counter(busy.rank(routed("x"))[0][0] for _ in range(200))
    assert "a" not in first and len(first) == 3, "the two choices are random"


def test_pages_count_from_the_moment_a_request_is_sent_until_reports_know_better() -> None:
    record, digests = EngineRecord(), routed("xyz").digests
    record.begin("one", routed("xyz"))
    assert record.num_cached(digests) == 3
    for number in (1, 2, 3):
        record.take(told(number))  # it still runs, its pages are not there yet
        assert record.num_cached(digests) == 3
    record.end("one")
    record.take(told(4))
    record.take(told(4))  # the same report again says nothing new
    assert record.num_cached(digests) == 3, "the report may be older than the end"
    record.take(told(5, "xy"))
    assert record.num_cached(digests) == 2, "what is evicted is forgotten"


def test_two_requests_of_one_page_are_forgotten_one_by_one() -> None:
    record = EngineRecord()
    for name in ("one", "two"):
        record.begin(name, routed("x"))
    record.end("one")
    for number in (1, 2, 3):
        record.take(told(number))
    assert record.num_cached(routed("x").digests) == 1
    record.end("two")
    record.end("two")
    for number in (4, 5):
        record.take(told(number))
    assert record.num_cached(routed("x").digests) == 0 == record.load


def test_a_request_counts_where_it_goes_and_nowhere_else() -> None:
    engines, request = affinity({"a": NOTHING, "b": NOTHING}), routed("xy")
    engines.place("one", request, "a")
    engines.place("one", request, "b")
    assert engines.records["a"].load == 0 == engines.records["a"].num_cached(request.digests)
    assert engines.records["b"].load == 2 * SIZE + 10 and engines.records["b"].num_cached(request.digests) == 2
    engines.place("two", routed("xz"), "b")
    engines.withdraw("one")
    assert engines.records["b"].num_cached(request.digests) == 1, "the other request's page"
    engines.place("two", routed("xz"), "gone")
    assert not any(record.running or record.load for record in engines.records.values())


def test_load_is_counted_in_tokens_and_outputs_by_what_is_usual() -> None:
    record = EngineRecord()
    record.begin("one", routed("xy", max_tokens=100))
    assert record.load == 2 * SIZE + 100, "nothing is known of outputs yet"
    record.take(told(1, "xy", mean_output=7.0, load=2 * SIZE + 100 + 50))
    assert record.others == 50, "another router's"
    record.begin("two", routed("xyz", max_tokens=100))
    record.begin("three", routed("xyz", max_tokens=3))
    assert record.load == 2 * SIZE + 100 + SIZE + 7 + 3
    for name in ("one", "two", "three"):
        record.end(name)
    assert record.load == 0


def test_engines_come_and_go_and_a_new_router_knows_from_reports() -> None:
    engines = affinity({"a": told(1, "x"), "b": NOTHING})
    engines.records["b"].begin("one", routed("y"))
    engines.update({"b": told(1), "c": told(9, "xy", load=5)})
    assert set(engines.records) == {"b", "c"} and engines.records["b"].load > 0
    assert engines.rank(routed("xy"))[0][0] == "c"
    assert affinity({"c": told(10, "xy", load=5)}).records["c"].others == 5
    engines.update({})
    assert engines.rank(routed("xy")) == [[]]


def test_without_ray_it_is_said_what_brings_it() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['ray'] = None; import aquiline.serve.ray"],
        env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert told.stderr.endswith("ModuleNotFoundError: ray is not installed; pip install 'aquiline[ray]'\n")
