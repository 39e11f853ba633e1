"""Logits processors that the engine cannot stand in for, run on the host at every node of a tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from tests.conftest import engine_config, needs_native
from torch import Tensor
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from aquiline import Chain, Lookup
from aquiline.errors import NumericalError
from custom_generate.models import batch, draft_of, model_of, new_model, speculating

pytestmark = needs_native

DRAFTERS = {
    "none": None,
    "chain": Chain(3),
    "dynamic": "dynamic",
    "adaptive": "adaptive",
    "lookup": Lookup(min_match=1),
}


def hosted(drafter: str = "chain", **settings: Any) -> Any:
    draft = None if drafter in ("none", "lookup") else draft_of()
    return speculating(draft, DRAFTERS[drafter], host_processors=True, **settings)


class NeverSameParity(LogitsProcessor):
    """A user's own: an even token follows an odd one more often, by how many of the text's tokens are even."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        share = (input_ids % 2 == 0).float().mean(-1, keepdim=True)
        wanted = torch.arange(scores.shape[1]) % 2 != input_ids[:, -1:] % 2
        return scores + 3.0 * wanted * share - 4.0  # whose sign a repetition penalty heeds


ENDS = [2, 5, 9, 40, 77, 100, 130]
ARGUMENTS: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 1.4, "min_new_tokens": 12, "eos_token_id": ENDS},
    {"sequence_bias": [[[20], 2.5], [[17, 33], 4.0]], "bad_words_ids": [[118], [5, 6, 7]]},
    {"forced_eos_token_id": 5},
    {"begin_suppress_tokens": list(range(80)), "suppress_tokens": list(range(100, 140))},
    {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": ENDS},
    {"prefix_allowed_tokens_fn": lambda row, ids: [(7 * int(ids[-1]) + n) % 150 + 3 for n in range(9)]},
    {"prefix_allowed_tokens_fn": lambda row, ids: [(7 * int(ids[-1]) + n + 5 * row) % 150 + 3 for n in range(9)]},
    {"encoder_repetition_penalty": 1.8, "encoder_no_repeat_ngram_size": 1},
    {"remove_invalid_values": True},
    {"logits_processor": [NeverSameParity(), RepetitionPenaltyLogitsProcessor(0.3)]},
    {"logits_processor": [NeverSameParity(), RepetitionPenaltyLogitsProcessor(1.3), NeverSameParity()]},
]
"""Among them processors that the engine stands in for, before and after those of the host."""


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=",".join)
def test_greedy_tokens_are_those_of_transformers(arguments: dict[str, Any]) -> None:
    inputs, told = batch(4), {"max_new_tokens": 20} | arguments
    alone = model_of().generate(**inputs, **told)
    for drafter in DRAFTERS:
        assert torch.equal(alone, model_of().generate(**inputs, **told, custom_generate=hosted(drafter))), drafter
    if "remove_invalid_values" not in arguments:
        free = model_of().generate(**inputs, max_new_tokens=20)
        assert alone.shape != free.shape or not torch.equal(alone, free), "the processor must matter"


def test_so_are_those_of_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUILINE_ISA", "off")
    told = {"max_new_tokens": 10, "no_repeat_ngram_size": 1, "sequence_bias": [[[20], 2.5]]}
    model, how = new_model(), speculating(draft_of(), "dynamic", host_processors=True)
    assert torch.equal(model.generate(**batch(3), **told), model.generate(**batch(3), **told, custom_generate=how))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_do_not_change_the_text(temperature: float) -> None:
    """In steps that the engine would repeat, and with sequences that leave their slots and come back."""
    told: dict[str, Any] = {
        "max_new_tokens": 24, "no_repeat_ngram_size": 2, "repetition_penalty": 1.1,
        "logits_processor": [NeverSameParity()],
    }  # fmt: skip
    if temperature:
        told |= {"do_sample": True, "temperature": temperature, "typical_p": 0.9, "top_k": 40, "top_p": 0.95}

    def text(drafter: str, **settings: Any) -> Tensor:
        torch.manual_seed(3)
        config = engine_config(num_continuous_decode_steps=8, **settings)
        return model_of().generate(**batch(6), **told, custom_generate=hosted(drafter, engine=config))

    plain = text("none")
    for drafter in DRAFTERS:
        assert torch.equal(plain, text(drafter)), drafter
    assert torch.equal(plain, text("chain", max_batch=1)), "a row does not depend on those beside it"


def test_samples_follow_the_law_that_the_processors_leave() -> None:
    """1,000 first tokens beside the probabilities of transformers' own processors: chi-square at p = 1e-4. The
    temperature stands before a processor of the host, top-k after it."""
    inputs, model, draws = {"input_ids": batch(1)["input_ids"]}, model_of(), 1000
    told: dict[str, Any] = {"do_sample": True, "temperature": None, "top_k": None, "top_p": None, "max_new_tokens": 1}
    told["logits_processor"] = [TemperatureLogitsWarper(1.6), NeverSameParity(), TopKLogitsWarper(25)]
    torch.manual_seed(5)
    how = hosted("none", engine=engine_config(max_batch=64, prefix_cache=True, check=False))
    ours = model.generate(**inputs, **told, num_return_sequences=draws, custom_generate=how)
    law = model.generate(**inputs, **told, output_scores=True, return_dict_in_generate=True).scores[0][0]
    law = law.double().softmax(-1).numpy()
    counts = np.bincount(ours[:, -1].numpy(), minlength=len(law))
    assert counts[law == 0].sum() == 0 and (law > 0).sum() == 25
    assert scipy.stats.chisquare(counts[law > 0], law[law > 0] * draws).pvalue > 1e-4


class Counting(LogitsProcessor):
    """Has a state: every call changes what the next one does."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + self.calls


class BesideOthers(LogitsProcessor):
    """Looks at the other rows."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + input_ids.float().mean()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"logits_processor": [Counting()]}, "Counting: is no function of a row's"),
        ({"logits_processor": [BesideOthers()]}, "BesideOthers: is no function"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor: is no function"),
    ],
)
def test_a_processor_that_needs_more_than_its_row_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        model_of().generate(**batch(3), max_new_tokens=3, custom_generate=hosted(), **arguments)


def test_the_refusal_without_it_says_how_to_ask() -> None:
    with pytest.raises(ValueError, match=r"NeverSameParity: .*speculative\(host_processors=True\)"):
        model_of().generate(**batch(1), logits_processor=[NeverSameParity()], custom_generate=speculating())


class Failing(LogitsProcessor):
    """Fails at a length."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 16:
            raise KeyError("at seventeen")
        return scores


class Forbidding(LogitsProcessor):
    """Leaves no token at a length."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.fill_(-torch.inf) if input_ids.shape[1] > 16 else scores


@pytest.mark.parametrize("is_native", [True, False])
def test_what_a_processor_raises_arrives_and_the_next_call_works(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setenv("AQUILINE_ISA", "off")
    model, how = new_model(), hosted()
    with pytest.raises(KeyError, match="at seventeen"):
        model.generate(**batch(2), max_new_tokens=8, logits_processor=[Failing()], custom_generate=how)
    with pytest.raises(NumericalError, match="and whether the edit leaves any token"):
        model.generate(**batch(2), max_new_tokens=8, logits_processor=[Forbidding()], custom_generate=how)
    told = {"max_new_tokens": 8, "no_repeat_ngram_size": 2}
    assert torch.equal(model.generate(**batch(2), **told), model.generate(**batch(2), **told, custom_generate=how))


class EndsBeside(StoppingCriteria):
    """Asks for another text from the same model at every token."""

    def __init__(self, ask: Any) -> None:
        self.ask, self.texts = ask, list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: object, **rest: object) -> Tensor:
        self.texts.append(self.ask())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_call_inside_a_call_keeps_its_own_processors() -> None:
    """Both run in one engine: a step has rows with and without edits."""
    model, how = model_of(), hosted()
    inner = {**batch(2, seed=4), "max_new_tokens": 5}
    beside = EndsBeside(lambda: model.generate(**inner, custom_generate=how))
    told = {"max_new_tokens": 10, "no_repeat_ngram_size": 1}
    ours = model.generate(**batch(3), **told, stopping_criteria=[beside], custom_generate=how)
    assert torch.equal(ours, model.generate(**batch(3), **told))
    expected = model.generate(**inner)
    assert len(beside.texts) == 30 and all(torch.equal(text, expected) for text in beside.texts)
