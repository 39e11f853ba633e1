"""Many engines over one pair of models: each takes its caches and buffers along when it goes."""

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
from aquiline.spec.drafting import Dynamic
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


@pytest.mark.rare
@pytest.mark.usefixtures("no_collector")
def test_an_engine_that_is_dropped_frees_its_caches() -> None:
    """Whole cycles (chains) and single calls (trees) by turns; 5 MB for both models' caches."""
    models, config = tiny_models(), engine_config(num_pages=500, prefix_cache=True, check=False)
    process, resident, expected = psutil.Process(), [], None
    before = len(live_caches())
    for number in range(22):
        llm = LLM.from_models(models, config, SPECS[("chain4", "dynamic")[number % 2]])
        for kv in live_caches():  # every page is touched, as in an engine that has run for long
            kv.k.fill(0)
            kv.v.fill(0)
        said = tokens(llm.run([words(20, 1), words(7, 2)], PARAMS))
        expected = expected or said
        assert said == expected
        del llm, kv
        if number in (1, 21):
            resident.append(process.memory_info().rss)
    assert len(live_caches()) == before
    assert resident[1] - resident[0] < 40e6, f"{(resident[1] - resident[0]) / 1e6:.0f} MB more after 20 engines"


LARGE = Dynamic(depth=5, top_k=10, num_nodes=60)


def test_models_run_in_engines_of_any_size() -> None:
    """Buffers are the engine's: one long chunk after the other; a full batch that drafts wide trees."""
    prompts = [words(300, i) for i in range(9)]
    expected = tokens(tiny_llm().run(prompts, PARAMS, drafting=BASELINE))
    long_chunks = LLM.from_models(tiny_models(), engine_config(8, 2088, prefix_cache=True), LARGE)
    assert tokens(long_chunks.run(prompts, PARAMS)) == expected
    many_slots = LLM.from_models(tiny_models(), engine_config(34, 48, num_pages=34 * 8), LARGE)
    short = [prompt[:8] for prompt in prompts] * 4
    found = tokens(many_slots.run(short, PARAMS))
    assert found == 4 * found[:9] == tokens(tiny_llm().run(short, PARAMS, drafting=BASELINE))
