"""What random traffic asks for, and the truth about each request: the same request alone, without speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from tests.conftest import TINY, engine_config, tiny_models
from tests.engine.test_stops import letters

from aquiline.config import LARGEST, SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.engine.model import LoadedModels
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static
from aquiline.spec.lookup import Lookup

Choose = Callable[[Sequence[Any]], Any]
"""Picks one of several: hypothesis, or a random generator."""

PAGE = 16
MAX_BATCH, ROW_BUDGET = 4, 64  # of the loaded models: the most that an engine may use of them
BASELINE = NoDraft()
CHAINS = tuple(Chain(k) for k in range(1, 6))
COMB = Static(tuple((*(1,) * d, r) for d in range(4) for r in (0, 1)))
TREES = (
    Static(),
    COMB,
    Dynamic(depth=0, top_k=2, num_nodes=3),
    Dynamic(depth=3, top_k=2, num_nodes=8),
    Dynamic(depth=4, top_k=4, num_nodes=24),
)
LOOKUP = Lookup(min_match=1, max_draft=6, min_confidence=0)
ADAPTIVE = (Adaptive(), Adaptive(max_spec_tokens=2, lookup=False), Lookup(min_match=1))
SPECS = (BASELINE, *CHAINS, *TREES)
SAMPLINGS = {
    "greedy": SamplingParams(ignore_eos=True, seed=0),
    "sampled": SamplingParams(temperature=0.9, seed=11, ignore_eos=True),
    "filtered": SamplingParams(temperature=1.3, top_k=30, top_p=0.9, min_p=0.02, seed=5),
    "penalised": SamplingParams(
        temperature=0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
        logit_bias={0: 2.0, 5: 2.0, 7: -3.0}, ignore_eos=True,
    ),
    "once": SamplingParams(temperature=0.9, seed=6, frequency_penalty=LARGEST, ignore_eos=True),
    "ends": SamplingParams(temperature=1.0, seed=4, logit_bias={0: 3.5}),
    "stops": SamplingParams(temperature=0.8, seed=8, stop_token_ids=(11, 24, 60, 81), ignore_eos=True),
    "words": SamplingParams(temperature=0.8, seed=9, stop=(",9", "<6", "r"), ignore_eos=True),
}  # fmt: skip
MAX_TOKENS = (1, 2, 7, 16, 23, 40)
LENGTHS = (0, 1, 15, 16, 17, 32, 48, 63, 64)
LONGEST_TEXT = 96  # of an earlier text that goes on


def stems() -> tuple[tuple[int, ...], ...]:
    """Texts of 64 tokens; all begin with the first page of the first, and they part after one, two, three pages."""
    rng = np.random.default_rng(0)
    first, *others = (tuple(rng.integers(1, TINY.vocab_size, 64).tolist()) for _ in range(4))
    return (first, *(first[: PAGE * n] + other[PAGE * n :] for n, other in enumerate(others, 1)))


def tails() -> tuple[tuple[int, ...], ...]:
    """What follows a stem: nothing, or one of many texts of up to 37 tokens."""
    rng = np.random.default_rng(1)
    lengths = (0, 0, 1, 2, 16, 21, 37) * 6
    return tuple(tuple(rng.integers(1, TINY.vocab_size, n).tolist()) for n in lengths)


STEMS, TAILS = stems(), tails()


@dataclasses.dataclass(frozen=True)
class Wish:
    """A request without its number."""

    prompt: tuple[int, ...]
    sampling: str
    max_tokens: int
    drafting: Drafting
    priority: int

    @property
    def params(self) -> SamplingParams:
        return params(self.sampling, self.max_tokens)


def params(sampling: str, max_tokens: int) -> SamplingParams:
    return dataclasses.replace(SAMPLINGS[sampling], max_tokens=max_tokens)


def draw_wishes(choose: Choose, texts: list[tuple[int, ...]]) -> list[Wish]:
    """A request made of choices; one prompt in three repeats an earlier text or goes on from it. One request in three
    has a short one before it that has the same prompt and no draft: what that leaves in the cache is to be improved."""
    if texts and choose((False, False, True)):
        text = choose(texts[-8:])[:LONGEST_TEXT]
        stem = text[: len(text) - choose((0, len(text) % PAGE))]
    else:
        stem = choose(STEMS)[: choose(LENGTHS)]
    wish = Wish(
        prompt=stem + choose(TAILS) or (1,), sampling=choose(tuple(SAMPLINGS)), max_tokens=choose(MAX_TOKENS),
        priority=choose((0, 1, 1, 2)),
        drafting=choose((BASELINE, choose(CHAINS), choose(TREES), LOOKUP, choose(ADAPTIVE), choose(ADAPTIVE))),
    )  # fmt: skip
    short = dataclasses.replace(wish, max_tokens=choose(MAX_TOKENS[:3]), drafting=BASELINE)
    return choose(([wish], [wish], [short, wish]))


@cache
def models(draft_window: int = 0) -> LoadedModels:
    """The tiny pair with a tokenizer, so that texts and stop strings are at stake too."""
    return dataclasses.replace(tiny_models(draft_window=draft_window), tokenizer=letters())


@cache
def lone_llm() -> LLM:
    """Runs one request at a time and keeps nothing."""
    return LLM.from_models(models(), engine_config(1, ROW_BUDGET, PAGE))


@lru_cache(maxsize=4096)
def alone(prompt: tuple[int, ...], sampling: str, max_tokens: int) -> Output:
    """What a request gives by itself, one token at a time."""
    return lone_llm().run([list(prompt)], params(sampling, max_tokens), drafting=BASELINE).outputs[0]
