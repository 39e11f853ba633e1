"""A draft with a window needs the end of a prompt alone: it guesses the same, bit for bit, and less is computed."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import pytest
from tests.conftest import TINY, TINY_DRAFT, engine_config, from_modules, needs_native, tiny_pair
from tests.engine.driving import words
from tests.engine.storage import fill, first_draft_key
from tests.engine.test_adaptive import DEAR_ROWS, controlled
from tests.engine.test_exact import BASELINE, SPECS, tokens

from aquiline.config import Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Drafting

WINDOW, PAGE = 24, 16
PARAMS = SamplingParams(max_tokens=30, temperature=0.8, seed=9, ignore_eos=True)


@lru_cache
def windowed_models(backend: str) -> LoadedModels:
    draft = dataclasses.replace(TINY_DRAFT, model=dataclasses.replace(TINY_DRAFT.model, windows=(WINDOW,)))
    environment = Environment.read() if backend == "native" else Environment("off", 1)
    return from_modules(*tiny_pair(0, TINY, draft), None, Loading("float32"), environment)


def windowed_llm(backend: str = "native", **settings: int | bool) -> LLM:
    llm = LLM.from_models(windowed_models(backend), engine_config(max_batch=2, num_pages=60, **settings))
    if backend == "native":
        fill(llm, float("nan"))  # what nobody has written must not be read
    return llm


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "torch"])
@pytest.mark.parametrize("name", ["chain4", "static", "dynamic"])
@pytest.mark.parametrize("length", [3, 24, 25, 47, 90])
def test_the_end_of_a_prompt_is_enough(backend: str, name: str, length: int) -> None:
    """Twice the same prompts; one engine computes the draft keys of all tokens, as for a draft without a window."""
    prompts = [words(length), words(length + 7, 3)]
    counters = []
    for is_cut in (True, False):
        llm = windowed_llm(backend)
        assert llm.engine.scheduler.draft_window == WINDOW
        if not is_cut:
            llm.engine.scheduler.draft_window = 0
        result = llm.run(prompts, PARAMS, drafting=SPECS[name])
        counters.append((tokens(result), result.summary.counters, [o.sources for o in result.outputs]))
    assert counters[0] == counters[1]


@needs_native
@pytest.mark.parametrize(("length", "first"), [(24, 1), (40, 16), (47, 16), (90, 64)])
def test_draft_keys_begin_at_the_windows_page(length: int, first: int) -> None:
    llm = windowed_llm()
    sequence = llm.engine.add(llm.request(0, words(length), PARAMS, SPECS["chain4"]))
    llm.engine.step()
    assert first_draft_key(llm, sequence.slot) == first
    while not sequence.output_ids:
        llm.engine.step()
    assert sequence.draft_end == first, "nothing is written before the sequence drafts"
    llm.engine.step()
    assert (sequence.first_draft_key, sequence.draft_end) == (first, length + 1)


@needs_native
def test_prompts_share_what_their_windows_do_not_reach() -> None:
    """Two at a time begin with the same text. Pages that no draft row reads have no draft keys, and are shared and
    published all the same; a question behind them finds the draft keys of its window, or begins behind those pages."""
    llm, plain = windowed_llm(prefix_cache=True), windowed_llm(prefix_cache=True)
    shared = words(80)
    texts = [[*shared, *words(11, 1)], [*shared, *words(40, 2)], [*shared, *words(11, 3)], [*shared, *words(3, 4)]]
    for _ in range(2):
        ours = llm.run(texts, PARAMS, drafting=SPECS["chain4"])
        theirs = plain.run(texts, PARAMS, drafting=BASELINE)
        assert tokens(ours) == tokens(theirs)
        assert ours.summary.counters.num_prefix_hits == theirs.summary.counters.num_prefix_hits
        texts = [[*o.prompt_ids, *o.token_ids, *words(5, 6)] for o in ours.outputs]


@needs_native
def test_a_window_drafts_as_well_behind_a_hit() -> None:
    """The pages of a first turn hold the draft keys that the second one's window reaches."""
    llm, fresh = windowed_llm(prefix_cache=True), windowed_llm()
    first = llm.run([words(90)], PARAMS, drafting=SPECS["chain4"]).outputs[0]
    again = [*first.prompt_ids, *first.token_ids, *words(2, 6)]
    ours, theirs = (one.run([again], PARAMS, drafting=SPECS["chain4"]) for one in (llm, fresh))
    assert ours.summary.counters.num_prefix_hits >= 112 and tokens(ours) == tokens(theirs)
    assert ours.outputs[0].sources == theirs.outputs[0].sources


@needs_native
def test_a_system_prompt_first_met_by_sequences_that_do_not_draft_blinds_nobody_for_long() -> None:
    """Its pages have no draft keys. Once sequences draft, the first that misses them says so, and the next computes
    that part of the prompt again; later ones guess as after a prompt without a hit."""
    llm, fresh = windowed_llm(prefix_cache=True), windowed_llm()
    controlled(llm, DEAR_ROWS, draft_ms=50.0)._probe_ms = -math.inf  # a probe would write the keys of its window
    shared = words(80)
    ways: list[Drafting] = [Adaptive(lookup=False)] * 3 + [SPECS["chain4"]] * 3
    starts, outputs = [], []
    for i, drafting in enumerate(ways):
        sequence = llm.engine.add(llm.request(i, [*shared, *words(5, i + 1)], PARAMS, drafting))
        llm.engine.step()
        step = llm.engine.pipeline.last
        assert step is not None
        starts.append((step.plan.chunks[0].start, sequence.first_draft_key))
        while llm.engine.is_busy:
            llm.engine.step()
        assert sequence.num_hit == (80 if i else 0)
        outputs.append(sequence)
    # The window of a prompt of 85 tokens begins at 62, on the page from 48 on.
    assert starts == [(0, 48), (80, 81), (80, 81), (80, 81), (47, 48), (80, 48)]
    for sequence in outputs[-2:]:
        request = dataclasses.replace(sequence.request)
        alone = fresh.engine.add(request)
        while fresh.engine.is_busy:
            fresh.engine.step()
        assert (alone.tokens, alone.sources) == (sequence.tokens, sequence.sources)
        assert alone.counters.num_accepted_tokens == sequence.counters.num_accepted_tokens
