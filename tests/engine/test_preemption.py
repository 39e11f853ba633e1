"""Page pressure: whoever gives way resumes where it stood, and nobody's text changes."""

from __future__ import annotations

import dataclasses
import itertools
from functools import lru_cache

import numpy as np
import pytest
from tests.conftest import TINY, engine_config, needs_native, tiny_llm, tiny_models
from tests.engine.driving import finish
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, check_accounting, tokens
from tests.engine.test_stops import letters

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM

pytestmark = needs_native

LENGTHS = (20, 33, 1, 48, 15)
BATCH = [np.random.default_rng(n).integers(1, TINY.vocab_size, n).tolist() for n in LENGTHS]
PAGES = 10
"""The largest request needs 8; five of them grow to 31 together."""


@lru_cache
def lettered(num_pages: int | None, prefix_cache: bool) -> LLM:
    loaded = dataclasses.replace(tiny_models(), tokenizer=letters())
    return LLM.from_models(loaded, engine_config(5, num_pages=num_pages, prefix_cache=prefix_cache))


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("name", ["none", "chain4", "static", "dynamic"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_who_gives_way_resumes_exactly(sampling: str, name: str, prefix_cache: bool) -> None:
    params = dataclasses.replace(SAMPLINGS[sampling], ignore_eos=True)
    drafting = BASELINE if name == "none" else SPECS[name]
    expected = tiny_llm(max_batch=5).run(BATCH, params, drafting=BASELINE)
    llm = tiny_llm(max_batch=5, num_pages=PAGES, prefix_cache=prefix_cache)
    said: dict[int | str, list[int]] = {}
    result = llm.run(
        BATCH, params, drafting=drafting, on_delta=lambda d: said.setdefault(d.request_id, []).extend(d.token_ids)
    )
    assert result.summary.num_preemptions > 0
    assert tokens(result) == tokens(expected)
    assert [said[i] for i in range(len(BATCH))] == tokens(expected), "nothing is said twice"
    check_accounting(result)
    assert llm.engine.pool.num_available == PAGES and (prefix_cache or llm.engine.pool.num_free == PAGES)


def test_the_most_urgent_never_gives_way_and_the_latest_does() -> None:
    llm = tiny_llm(max_batch=5, num_pages=PAGES)
    sequences = [llm.engine.add(llm.request(i, p, SAMPLINGS["sampled"], BASELINE)) for i, p in enumerate(BATCH)]
    gave_way = []
    while llm.engine.is_busy:
        before = [s.num_preempted for s in sequences]
        running = [i for i, s in enumerate(sequences) if s.slot >= 0]
        llm.engine.step()
        victims = {i for i, s in enumerate(sequences) if s.num_preempted > before[i]}
        if victims:
            assert victims == set(running[-len(victims) :]), "the latest that run"
            gave_way.append(victims)
    assert gave_way and all(0 not in victims for victims in gave_way)
    assert llm.engine.scheduler.num_preemptions == sum(s.num_preempted for s in sequences)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("name", ["none", "chain4", "dynamic"])
def test_stop_strings_and_streamed_text_survive(name: str, prefix_cache: bool) -> None:
    """Stop strings of three letters, whose first two may be held back when their sequence gives way."""
    drafting = BASELINE if name == "none" else SPECS[name]
    params = SamplingParams(max_tokens=50, temperature=0.9, seed=4, ignore_eos=True)
    roomy = lettered(None, False)
    full = roomy.run(BATCH, params, drafting=BASELINE)
    ends = (44, 39, 46, 33, 41)
    each = [
        dataclasses.replace(params, stop=(o.text[e : e + 3], o.text[:2] + "!"))
        for o, e in zip(full.outputs, ends, strict=True)
    ]
    expected = roomy.run(BATCH, each, drafting=BASELINE)
    assert [len(o.text) for o in expected.outputs] == list(ends)
    texts: dict[int | str, str] = {}
    llm = lettered(PAGES, prefix_cache)
    result = llm.run(
        BATCH,
        each,
        drafting=drafting,
        on_delta=lambda d: texts.update({d.request_id: texts.get(d.request_id, "") + d.text}),
    )
    assert result.summary.num_preemptions > 0
    assert [(o.text, o.token_ids, o.finish_reason) for o in result.outputs] == [
        (o.text, o.token_ids, o.finish_reason) for o in expected.outputs
    ]
    assert [texts[i] for i in range(len(BATCH))] == [o.text for o in expected.outputs]


def test_what_was_computed_and_published_is_found_again() -> None:
    """With the cache a resume reads the pages it left, as far as nobody needed their room."""
    computed = {}
    for prefix_cache in (False, True):
        llm = tiny_llm(max_batch=2, num_pages=14, prefix_cache=prefix_cache)
        patient = llm.engine.add(llm.request("patient", BATCH[3], SAMPLINGS["greedy"], SPECS["chain4"], priority=5))
        for _ in range(6):
            llm.engine.step()
        llm.engine.add(llm.request("slot", BATCH[2], SAMPLINGS["greedy"], BASELINE, priority=1))
        llm.engine.add(llm.request("urgent", BATCH[1], SAMPLINGS["greedy"], BASELINE, priority=1))
        llm.engine.step()
        assert patient.slot == -1
        finish(llm)
        computed[prefix_cache] = llm.engine.meter.num_prefill_tokens
        assert patient.num_preempted == 1 and patient.counters.num_prefix_hits == 0, (
            "hits count the prompt's first stay"
        )
    assert computed[False] - computed[True] == 48


def test_a_prompt_that_gives_way_between_its_chunks_begins_again() -> None:
    """Two rows a step: while the second prompt is cut in 60 chunks the first sequence grows by three pages, and one was
    spare."""
    llm = tiny_llm(max_batch=2, row_budget=2, num_pages=13)
    params = dataclasses.replace(SAMPLINGS["sampled"], max_tokens=80, ignore_eos=True)
    long_prompt = np.random.default_rng(9).integers(1, TINY.vocab_size, 120).tolist()
    few = dataclasses.replace(params, max_tokens=20, prompt_logprobs=1)
    truth = tiny_llm().run([BATCH[3], long_prompt], [params, few], drafting=BASELINE)
    first = llm.engine.add(llm.request("first", BATCH[3], params, BASELINE))
    while not first.output_ids:
        llm.engine.step()
    second = llm.engine.add(llm.request("second", long_prompt, few, SPECS["chain4"]))
    num_cached = []
    while not second.output_ids:
        llm.engine.step()
        num_cached.append(second.num_cached)
    assert second.num_preempted == 1
    lost = [a for a, b in itertools.pairwise(num_cached) if b < a]
    assert len(lost) == 1 and 60 < lost[0] < 120
    finish(llm)
    assert [first.output_ids, second.output_ids] == tokens(truth)
    assert second.prompt_logprobs == truth.outputs[1].prompt_logprobs, "no row is told of twice"


@pytest.mark.parametrize("name", ["none", "chain4"])
def test_prompt_logprobs_are_read_once(name: str) -> None:
    """Whoever gives way computes its prompt again; what was said of it stands."""
    drafting = BASELINE if name == "none" else SPECS[name]
    params = dataclasses.replace(SAMPLINGS["sampled"], prompt_logprobs=2, logprobs=1, ignore_eos=True)
    expected = tiny_llm(max_batch=5).run(BATCH, params, drafting=BASELINE).outputs
    result = tiny_llm(max_batch=5, num_pages=PAGES).run(BATCH, params, drafting=drafting)
    assert result.summary.num_preemptions > 0
    for ours, theirs in zip(result.outputs, expected, strict=True):
        assert ours.prompt_logprobs == theirs.prompt_logprobs and ours.logprobs == theirs.logprobs
