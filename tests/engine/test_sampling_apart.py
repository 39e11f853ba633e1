"""Every token that is served is the one that plain numpy draws from the logits of a forward without a cache: penalties,
bias, temperature, filters and noise, with every drafter and without one."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest
from tests.conftest import needs_native
from tests.engine.pair_apart import Text
from tests.engine.sampling_apart import scores_of

from aquiline.bench.data.prompts import read_prompts
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.models.known_pairs import BUNDLED_PROMPTS
from aquiline.spec.drafting import Chain, Dynamic, NoDraft, Static

pytestmark = needs_native

PLAIN = SamplingParams(max_tokens=24, ignore_eos=True)
NOISY = dataclasses.replace(PLAIN, temperature=0.9, seed=7 + 5 * 2**40)
FEW = dict.fromkeys(range(99, 112), 40.0)
"""Rare tokens to choose from. Their logits are negative, and a repetition penalty multiplies those of the prompt."""
SAMPLINGS = {
    "greedy": PLAIN,
    "repetition": dataclasses.replace(PLAIN, repetition_penalty=1.3),
    "encouraged": dataclasses.replace(PLAIN, repetition_penalty=0.9),
    "presence": dataclasses.replace(PLAIN, presence_penalty=1.5),
    "frequency": dataclasses.replace(PLAIN, frequency_penalty=0.2),
    "bias": dataclasses.replace(PLAIN, logit_bias={199: -math.inf, 12: 3.0, 14: -2.5}),
    "sampled": NOISY,
    "top-k": dataclasses.replace(NOISY, top_k=4),
    "top-p": dataclasses.replace(NOISY, temperature=1.4, top_p=0.7),
    "min-p": dataclasses.replace(NOISY, temperature=1.6, min_p=0.15),
    "all": dataclasses.replace(
        NOISY, repetition_penalty=1.15, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={199: 1.0, 12: -1.0},
        top_k=40, top_p=0.95, min_p=0.01,
    ),
    "few": dataclasses.replace(NOISY, repetition_penalty=2.0, logit_bias=FEW),
}  # fmt: skip
REPEATING = ("x = [[[[[[[[[[[[[[[[[", "0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,")
"""Texts that go on as they are, so that the draft is right with the same token several times in a step."""
SPECS = {
    "none": NoDraft(), "chain": Chain(4), "static": Static(),
    "dynamic": Dynamic(depth=3, top_k=3, num_nodes=12),
}  # fmt: skip


@cache
def bundled() -> LLM:
    """The bundled pair in float32, whose draft is right often enough."""
    return LLM(
        "bundled", dtype="float32", engine=EngineConfig(max_batch=8, page_size=16, prefix_cache=False, check=True)
    )


@cache
def batch() -> list[tuple[list[int], str]]:
    """A prompt for each way to sample, and both repeating ones under penalties."""
    texts = [p.text for p in read_prompts(BUNDLED_PROMPTS)] * 2
    each = [
        (bundled().encode(text)[: 24 + 3 * i], name)
        for i, (text, name) in enumerate(zip(texts, SAMPLINGS, strict=False))
    ]
    each[-1] = [*FEW][::2] + each[-1][0], "few"
    return each + [(bundled().encode(text), name) for text in REPEATING for name in ("frequency", "repetition", "all")]


@cache
def served(drafter: str) -> list[Output]:
    sampling = [SAMPLINGS[name] for _, name in batch()]
    return bundled().run([prompt for prompt, _ in batch()], sampling, drafting=SPECS[drafter]).outputs


@cache
def worst(prompt: tuple[int, ...], output: tuple[int, ...], name: str) -> tuple[float, int]:
    """By how much the worst token of a text is not the best one, and where it stands."""
    logits = Text([*prompt, *output], SAMPLINGS[name]).target[0].numpy()
    lacks = []
    for at, token in enumerate(output):
        scores = scores_of(logits[len(prompt) + at - 1], list(prompt), list(output[:at]), SAMPLINGS[name])
        lacks.append((float(scores.max() - scores[token]), at))
    return max(lacks)


@pytest.mark.parametrize("drafter", SPECS)
def test_every_token_is_the_one_that_numpy_draws(drafter: str) -> None:
    """Logits of two float32 forwards differ by 1e-5; what is drawn must be the best to within a little more."""
    for (prompt, name), output in zip(batch(), served(drafter), strict=True):
        assert len(output.token_ids) == PLAIN.max_tokens
        lack, at = worst(tuple(prompt), tuple(output.token_ids), name)
        assert lack < 1e-3, f"{drafter}, {name}: token {at} of {output.token_ids} scores {lack} less than the best"


def most_in_a_step(output: Output) -> int:
    """How often one token stands among the drafts that a step accepted, at most."""
    most, run = 0, list[int]()
    for token, by_draft in zip(output.token_ids, output.by_draft, strict=True):
        run = [*run, token] if by_draft else []
        most = max(most, run.count(token) if run else 0)
    return most


@pytest.mark.parametrize("drafter", [name for name in SPECS if name != "none"])
def test_the_comparison_meets_what_it_is_there_for(drafter: str) -> None:
    """Drafts are accepted under every way to sample, the same token several times in a step among them."""
    for (_, name), output in zip(batch(), served(drafter), strict=True):
        assert sum(output.by_draft) >= 3 or name == "few", f"{drafter}, {name}"  # which no draft can foresee
    outputs = zip(batch(), served(drafter), strict=True)
    assert max(most_in_a_step(output) for (_, name), output in outputs if name == "frequency") >= 2


def test_every_setting_changes_a_text() -> None:
    prompts, names = zip(*batch(), strict=True)
    each = [SAMPLINGS[name] for name in names]
    plain = [dataclasses.replace(PLAIN, temperature=params.temperature, seed=params.seed) for params in each]
    without = bundled().run(list(prompts), plain, drafting=SPECS["none"]).outputs
    unlike = {n for n, o, w in zip(names, served("none"), without, strict=True) if o.token_ids != w.token_ids}
    assert unlike == set(SAMPLINGS) - {"greedy", "sampled"}
