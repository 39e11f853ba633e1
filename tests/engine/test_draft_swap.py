"""The draft is replaced while requests run: no text changes, and what is drafted from then on is what an engine that
never had another draft drafts."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest
from tests.conftest import TINY, TINY_DRAFT, engine_config, from_modules, init_random, needs_native, tiny_pair
from tests.engine.driving import words
from tests.engine.invariants import check_cached_pages
from tests.engine.storage import fill
from tests.engine.test_exact import BASELINE, SPECS

from aquiline.config import Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading
from aquiline.engine.sequence import Sequence
from aquiline.models.model_weights import DraftWeights
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Drafting

GREEDY = SamplingParams(max_tokens=30, seed=0, ignore_eos=True)
PARAMS = SamplingParams(max_tokens=30, temperature=0.8, seed=9, ignore_eos=True)
WAYS: dict[str, Drafting] = {name: SPECS[name] for name in ("chain4", "static", "dynamic")} | {"adaptive": Adaptive()}
BACKENDS = [pytest.param("native", marks=needs_native), "torch"]
WINDOW = 24


@lru_cache
def draft_of(seed: int, window: int = 0) -> DraftWeights:
    """A draft of another layer, norm and head over the tiny pair's own fc, embedding and vocabulary."""
    draft = dataclasses.replace(TINY_DRAFT, model=dataclasses.replace(TINY_DRAFT.model, windows=(window,)))
    decoder, head = tiny_pair(0, TINY, draft)
    if seed:
        for number, module in enumerate((head.layer, head)):
            kept = {name: weight.data.clone() for name, weight in head.named_parameters() if name in ("fc", "embed")}
            init_random(module, seed + number)
            for name, weight in kept.items():
                getattr(head, name).data.copy_(weight)
    return head.weights(decoder.weights().embed)


def models(seed: int = 0, backend: str = "native", window: int = 0) -> LoadedModels:
    """The tiny pair with one of these drafts from the start."""
    from aquiline.backends.torch.eagle import DraftHead

    environment = Environment.read() if backend == "native" else Environment("off", 1)
    decoder, _ = tiny_pair(0, TINY, TINY_DRAFT)
    head = DraftHead.of(draft_of(seed, window))
    return from_modules(decoder, head, None, Loading("float32"), environment)


def llm_of(seed: int = 0, backend: str = "native", window: int = 0, **settings: int | bool) -> LLM:
    config = engine_config(**{"max_batch": 3, "num_pages": 60, "prefix_cache": True} | settings)  # type: ignore[arg-type]
    llm = LLM.from_models(models(seed, backend, window), config)
    if backend == "native":
        fill(llm, float("nan"))  # what nobody has written must not be read
    return llm


def swap(llm: LLM, seed: int, window: int = 0) -> None:
    llm.models.pair.replace_draft(draft_of(seed, window))


def started(llm: LLM, prompt: list[int], drafting: Drafting, sampling: SamplingParams, num_tokens: int) -> Sequence:
    """A request that has so many tokens of output or more."""
    sequence = llm.engine.add(llm.request("text", prompt, sampling, drafting))
    while len(sequence.output_ids) < num_tokens:
        llm.engine.step()
    return sequence


def drafted(llm: LLM) -> dict[int, list[int]]:
    """The trees of the rest of what runs, by the index of their root."""
    trees = dict[int, list[int]]()
    while llm.engine.is_busy:
        llm.engine.step()
        if (step := llm.engine.pipeline.last) is not None and step.plan.decoding:
            assert step.output.trees is not None
            trees[step.output.decodes[0].root] = step.output.trees.drafted.tokens.tolist()
    return trees


@pytest.mark.parametrize("backend", [BACKENDS[0], pytest.param("torch", marks=pytest.mark.rare)])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("num_pages", [60, 10])
def test_texts_are_the_same_whenever_the_draft_is_replaced(name: str, backend: str, num_pages: int) -> None:
    """Two rounds, the second with prefix hits; with few pages requests are preempted, and come back after a swap."""
    sampling = GREEDY if backend == "torch" else PARAMS
    llm = llm_of(backend=backend, num_pages=num_pages, max_batch=5)
    batch = [words(length, length) for length in (20, 33, 1, 48, 15)]
    plain = llm_of(backend=backend, prefix_cache=False)
    for turn in range(2):
        expected = [output.token_ids for output in plain.run(batch, sampling, drafting=BASELINE).outputs]
        for number, prompt in enumerate(batch):
            llm.engine.add(llm.request(number, prompt, sampling, WAYS[name]))
        sequences, num_steps = list(llm.engine.sequences.values()), 0
        while llm.engine.is_busy:
            llm.engine.step()
            num_steps += 1
            if num_steps % 4 == 0:
                swap(llm, (num_steps // 4) % 3)
        assert [sequence.output_ids for sequence in sequences] == expected, f"turn {turn}"
        batch = [[*s.tokens, *words(5, turn)] for s in sequences]
    assert num_pages == 60 or name == "adaptive" or llm.engine.meter.num_preemptions > 0
    assert llm.models.pair.draft_version > 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["chain4", "static", "dynamic"])
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 20])
def test_a_running_request_goes_on_as_if_it_had_always_had_the_new_draft(
    num_tokens: int, window: int, name: str, backend: str
) -> None:
    sampling = GREEDY if backend == "torch" else PARAMS
    llm, other = (llm_of(seed, backend, window) for seed in (0, 7))
    ours = started(llm, words(53), WAYS[name], sampling, num_tokens)
    swap(llm, 7, window)
    ahead, tail = llm.engine.pipeline.lag, drafted(llm)
    theirs = started(other, words(53), WAYS[name], sampling, 1)
    trees = drafted(other)
    assert ours.tokens == theirs.tokens
    roots = sorted(tail.keys() & trees.keys())[ahead:]  # a step that was issued already has the old draft's tree
    assert len(roots) >= 3 and [tail[root] for root in roots] == [trees[root] for root in roots]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, WINDOW])
def test_pages_of_an_earlier_draft_are_hit_and_their_draft_keys_written_anew(window: int, backend: str) -> None:
    llm, other = (llm_of(seed, backend, window) for seed in (0, 7))
    for number, length in enumerate((40, 64)):  # the page behind the first prompt comes from decoding
        llm.run([words(length)], GREEDY, drafting=WAYS["chain4"] if number == 0 else WAYS["dynamic"])
    swap(llm, 7, window)
    prompt = words(70)
    ours, theirs = (started(one, prompt, WAYS["chain4"], GREEDY, 1) for one in (llm, other))
    assert (ours.num_hit, theirs.num_hit) == (64, 0)
    assert drafted(llm) == drafted(other)
    assert ours.tokens == theirs.tokens
    if backend == "native" and not window:
        assert check_cached_pages(llm.engine, other.engine) >= 5


@needs_native
def test_going_back_to_an_earlier_draft_leaves_no_key_of_the_later_one() -> None:
    """Half of the pages are written anew by the second draft when the first one comes back."""
    llm, other = llm_of(0), llm_of(0)
    llm.run([words(64)], GREEDY, drafting=WAYS["chain4"])
    swap(llm, 7)
    started(llm, words(20), WAYS["chain4"], GREEDY, 2)
    llm.engine.abort("text")
    swap(llm, 0)
    llm.run([words(90)], GREEDY, drafting=WAYS["chain4"])
    assert check_cached_pages(llm.engine, other.engine) >= 6


@needs_native
def test_engines_over_one_pair_change_over_each_between_its_own_steps() -> None:
    shared = models()
    engines = [LLM.from_models(shared, engine_config(max_batch=2, num_pages=30)) for _ in range(2)]
    sequences = [started(llm, words(30), WAYS["chain4"], PARAMS, 3) for llm in engines]
    shared.pair.replace_draft(draft_of(7))
    first = drafted(engines[0])
    shared.pair.replace_draft(draft_of(5))
    shared.pair.replace_draft(draft_of(7))
    assert drafted(engines[1]) == first
    assert sequences[0].tokens == sequences[1].tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_geometry_or_vocabulary_is_refused_by_name(backend: str) -> None:
    pair, new = models(backend=backend).pair, draft_of(7)
    for bad in (
        dataclasses.replace(new, d2t=np.zeros_like(new.d2t)),
        dataclasses.replace(new, config=dataclasses.replace(new.config, norm_feedback=True)),
    ):
        with pytest.raises(ValueError, match=r"replace_draft: .* is not the draft that runs"):
            pair.replace_draft(bad)
    assert pair.draft_version == 0
