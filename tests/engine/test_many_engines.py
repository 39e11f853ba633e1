"""Many engines over one pair of models: each takes its caches and buffers along when it goes, and the models take none
they have no room for."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import psutil
import pytest
from tests.conftest import engine_config, needs_native, tiny_llm, tiny_models
from tests.engine.driving import words
from tests.engine.test_exact import BASELINE, SPECS, tokens

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import Drafting, Dynamic
from aquiline.types import KVGroup

pytestmark = needs_native

PARAMS = SamplingParams(max_tokens=8, temperature=0.9, seed=11, ignore_eos=True)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """An engine that only the garbage collector finds keeps its caches for a time nobody can tell."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live_caches() -> list[KVGroup]:
    return [each for each in gc.get_objects() if type(each) is KVGroup]


@pytest.mark.usefixtures("no_collector")
def test_an_engine_that_is_dropped_frees_its_caches() -> None:
    """Whole cycles (chains) and single calls (trees) by turns; 5 MB for both models' caches."""
    models, config = tiny_models(), engine_config(num_pages=500, prefix_cache=True, check=False)
    process, resident, expected = psutil.Process(), [], None
    before = len(live_caches())
    for number in range(22):
        llm = LLM.from_models(models, config, SPECS[("chain4", "dynamic")[number % 2]])
        for kv in live_caches():  # every page is touched, as in an engine that has run for long
            kv.k.zero_()
            kv.v.zero_()
        said = tokens(llm.run([words(20, 1), words(7, 2)], PARAMS))
        expected = expected or said
        assert said == expected
        del llm, kv
        if number in (1, 21):
            resident.append(process.memory_info().rss)
    assert len(live_caches()) == before
    assert resident[1] - resident[0] < 40e6, f"{(resident[1] - resident[0]) / 1e6:.0f} MB more after 20 engines"


SMALL = Dynamic(depth=3, top_k=3, num_nodes=12)
LARGE = Dynamic(depth=5, top_k=10, num_nodes=60)


@pytest.mark.parametrize(
    ("row_budget", "max_batch", "spec", "rows"),
    [(4000, 8, BASELINE, 4008), (2090, 8, SMALL, 2098), (48, 600, SMALL, 7216), (48, 2100, BASELINE, 2148)],
)
def test_what_the_models_have_no_rows_for_is_refused_at_once(
    row_budget: int, max_batch: int, spec: Drafting, rows: int
) -> None:
    """The models were loaded for a row budget of 48 beside 8 trees of 256 nodes; found out in the middle of a run it
    would end what runs."""
    named = f"row_budget={row_budget}, max_batch={max_batch}: with .* a step may have {rows}, .* were loaded for 2096"
    with pytest.raises(ValueError, match=named):
        LLM.from_models(tiny_models(), engine_config(max_batch, row_budget, num_pages=40), spec)


def test_an_engine_at_the_most_the_models_have_rows_for_runs() -> None:
    """One long chunk after the other; a full batch that drafts wide trees."""
    prompts = [words(300, i) for i in range(9)]
    expected = tokens(tiny_llm().run(prompts, PARAMS, spec=BASELINE))
    long_chunks = LLM.from_models(tiny_models(), engine_config(8, 2088, prefix_cache=True), LARGE)
    assert tokens(long_chunks.run(prompts, PARAMS)) == expected
    many_slots = LLM.from_models(tiny_models(), engine_config(34, 48, num_pages=34 * 8), LARGE)
    short = [prompt[:8] for prompt in prompts] * 4
    found = tokens(many_slots.run(short, PARAMS))
    assert found == 4 * found[:9] == tokens(tiny_llm().run(short, PARAMS, spec=BASELINE))


def test_a_request_whose_tree_is_too_wide_for_the_batch_is_refused_alone() -> None:
    llm = LLM.from_models(tiny_models(), engine_config(40, 48, num_pages=100), BASELINE)
    llm.run([words(9)], PARAMS, spec=SMALL)
    with pytest.raises(ValueError, match="row_budget=48, max_batch=40: with 60 rows a slot a step may have 2416"):
        llm.run([words(9)], PARAMS, spec=LARGE)
