"""Deadlines, aborts, ids that are wrong and refused requests: each says why, and leaves nothing."""

from __future__ import annotations

import dataclasses
import math
import time
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import TINY, engine_config, from_modules, needs_native, round_to, tiny_llm, tiny_models, tiny_pair
from tests.engine.driving import PARAMS, add, alone, ended, finish, started, words
from tests.engine.test_exact import BASELINE, SPECS, tokens
from tests.engine.test_stops import letters

from aquiline.config import Environment
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading
from aquiline.engine.sequence import Request
from aquiline.errors import OutOfPages
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Drafting, Dynamic
from aquiline.spec.lookup import Lookup

pytestmark = needs_native

LONG = dataclasses.replace(PARAMS, max_tokens=60)


@lru_cache
def torch_models() -> LoadedModels:
    return from_modules(*tiny_pair(), None, Loading("bfloat16"), Environment("off", 1))


def test_a_deadline_ends_a_waiting_request_with_nothing() -> None:
    llm = tiny_llm(max_batch=1)
    started(llm, "running", words(20))
    late = Request("late", tuple(words(9)), PARAMS, BASELINE, deadline_s=5, arrival=time.monotonic() - 6)
    sequence = llm.engine.add(late)
    deltas = llm.engine.step()
    assert [(d.request_id, d.finish_reason, d.token_ids, d.text) for d in deltas if d.finish_reason] == [
        ("late", "deadline", [], "")
    ]
    assert sequence.output_ids == [] and "late" not in llm.engine.sequences and llm.engine.scheduler.num_waiting == 0
    assert ended(finish(llm)) == ["running"]


@pytest.mark.parametrize("name", ["none", "chain4"])
def test_a_deadline_ends_a_running_request_with_what_it_has(name: str) -> None:
    llm = tiny_llm(max_batch=2)
    drafting = BASELINE if name == "none" else SPECS[name]
    params = dataclasses.replace(PARAMS, max_tokens=300)
    other = add(llm, "other", words(30, 1), drafting=drafting)
    for deadline_s in (0.2, 2, 20):  # a busy machine may not come to the first token in time
        request = llm.request("late", words(20), params, drafting, deadline_s=deadline_s)
        sequence = llm.engine.add(request)
        for _ in range(5):
            llm.engine.step()
        if sequence.finish_reason is None:
            break
    said = list(sequence.output_ids)
    assert said and sequence.finish_reason is None and llm.engine.pool.owned[sequence.slot]
    time.sleep(max(0.0, request.arrival + deadline_s - time.monotonic()))
    deltas = {delta.request_id: delta for delta in llm.engine.step()}
    assert deltas["late"].finish_reason == "deadline" and deltas["late"].token_ids == []
    assert sequence.output_ids == said == alone(words(20), params)[: len(said)]
    finish(llm)
    assert other.output_ids == alone(words(30, 1))
    assert llm.engine.pool.num_free == llm.engine.pool.num_pages and not llm.engine.due


def test_a_deadline_that_is_met_changes_nothing() -> None:
    llm = tiny_llm()
    sequence = llm.engine.add(llm.request("early", words(20), PARAMS, BASELINE, deadline_s=3600))
    finish(llm)
    assert (sequence.finish_reason, sequence.output_ids) == ("length", alone(words(20)))
    assert not llm.engine.due
    for wrong in (0, -1.0):
        with pytest.raises(ValueError, match=f"request x: deadline_s={wrong}: must be above 0 and at most"):
            llm.request("x", words(2), PARAMS, BASELINE, deadline_s=wrong)


@pytest.mark.parametrize("drafting", [BASELINE, SPECS["chain4"]], ids=["none", "chain4"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 7])
def test_an_abort_frees_slot_and_pages_wherever_the_request_stands(drafting: Drafting, num_steps: int) -> None:
    """It waits; its prompt is cut in chunks (24 rows a step); it decodes."""
    llm = tiny_llm(max_batch=2, row_budget=24)
    doomed = add(llm, "doomed", words(40), LONG, drafting)
    stays = add(llm, "stays", words(20, 1), PARAMS, drafting)
    waits = add(llm, "waits", words(7, 2), PARAMS, drafting)
    for _ in range(num_steps):
        llm.engine.step()
    said = list(doomed.output_ids)
    delta = llm.engine.abort("doomed")
    assert (delta.finish_reason, delta.token_ids, doomed.finish_reason) == ("abort", [], "abort")
    llm.engine.step()
    assert waits.slot >= 0, "its slot is taken at once"
    finish(llm)
    assert said == alone(words(40), LONG)[: len(said)]
    assert (stays.output_ids, waits.output_ids) == (alone(words(20, 1)), alone(words(7, 2)))
    assert llm.engine.pool.num_free == llm.engine.pool.num_pages
    assert llm.engine.scheduler.running == [None, None] and not llm.engine.sequences


def test_unknown_and_duplicate_ids_are_value_errors() -> None:
    llm = tiny_llm(max_batch=1)
    add(llm, "a", words(20))
    for _ in range(2):  # waiting, then running
        with pytest.raises(ValueError, match="request id 'a': is in use by a request that has not finished; choose"):
            add(llm, "a", words(3))
        llm.engine.step()
    with pytest.raises(ValueError, match="request id 'b': is unknown; it has finished, or was never added"):
        llm.engine.abort("b")
    assert ended(finish(llm)) == ["a"]
    with pytest.raises(ValueError, match="request id 'a': is unknown"):
        llm.engine.abort("a")
    assert add(llm, "a", words(20)).request.id == "a", "an id is free again when its request has finished"
    llm.engine.abort("a")
    assert not llm.engine.is_busy


def test_reset_drops_all_and_the_engine_goes_on() -> None:
    llm = tiny_llm(max_batch=2, prefix_cache=True)
    for i in range(5):
        add(llm, i, words(20 + i), drafting=SPECS["chain4"])
    for _ in range(4):
        llm.engine.step()
    llm.engine.reset()
    assert not llm.engine.is_busy and llm.engine.pool.num_available == llm.engine.pool.num_pages
    assert llm.engine.step() == []
    assert tokens(llm.run([words(20)], PARAMS)) == [alone(words(20))]


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    """30 + 32 tokens, and 2 KV indices that a plain step behind the last token may reach, fill four pages."""
    llm, longest = tiny_llm(max_batch=2, num_pages=4), dataclasses.replace(PARAMS, max_tokens=32)
    assert llm.engine.max_length == 62
    fits = add(llm, "fits", words(30), longest, SPECS["chain4"])
    numbers = r"request big: prompt 30 \+ max_tokens 33 \+ 2 spare need 5 pages of 16 tokens, 4 are there; shorten it"
    with pytest.raises(OutOfPages, match=numbers):
        add(llm, "big", words(30), dataclasses.replace(PARAMS, max_tokens=33), SPECS["chain4"])
    assert llm.engine.scheduler.num_waiting == 1
    finish(llm)
    assert fits.output_ids == alone(words(30), longest)


@pytest.mark.parametrize("late_reads", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_text_may_fill_all_pages_however_it_is_drafted(late_reads: bool, prefix_cache: bool) -> None:
    """Drafts reach behind the text. Where no page is left for them the last tokens are written without; two such texts
    at once have to give way to each other in between."""
    llm = tiny_llm(max_batch=2, num_pages=6, late_reads=late_reads, prefix_cache=prefix_cache)
    prompt, sampling = words(20), dataclasses.replace(PARAMS, max_tokens=74)
    expected = alone(prompt, sampling)
    for drafting in (BASELINE, *SPECS.values(), Adaptive(), Lookup(min_match=1, max_draft=16, min_confidence=0)):
        result = llm.run([prompt, prompt], sampling, drafting=drafting)
        assert tokens(result) == [expected, expected], drafting
        few = dataclasses.replace(PARAMS, max_tokens=4)  # behind a prompt that leaves no page for drafts
        assert tokens(llm.run([words(90)], few, drafting=drafting)) == [alone(words(90), few)], drafting
    assert llm.engine.meter.num_preemptions > 3, "some of them at the same time"
    assert llm.engine.max_length == 20 + 74 and llm.engine.pool.num_available == 6


def test_a_run_refuses_before_it_computes() -> None:
    llm = tiny_llm(max_batch=2, num_pages=4)
    with pytest.raises(OutOfPages, match="request 1"):
        llm.run([words(5), words(60)], PARAMS)
    with pytest.raises(ValueError, match="request 1: prompt token 96: must be in"):
        llm.run([words(5), [96]], PARAMS)
    with pytest.raises(ValueError, match=r"request 0: prompt=\[\]: must hold at least one token"):
        llm.run([[]], PARAMS)
    assert llm.engine.meter.num_target_forwards == 0 and not llm.engine.is_busy


NOT_WHOLE = ["1", None, math.nan, math.inf, True, 1.5, [1]]
WRONG = [
    *(("priority", value, "priority") for value in NOT_WHOLE),
    *(("deadline_s", value, "deadline_s") for value in ("1", math.nan, math.inf, True, 0, -1.0, 10**400, [1])),
    *(("request_id", value, "request id") for value in (1.5, math.nan, True, ("a",), ["a"], b"a")),
    *(("prompt", [5, value], "whole number") for value in (*NOT_WHOLE, 5.0)),
    *(("sampling", value, "sampling") for value in ({"max_tokens": 3}, "greedy", 3)),
    *(("drafting", value, "drafting") for value in ("chain", {"drafter": "none"}, 3)),
]
"""A field, a value it must not have, and what the error names."""


@pytest.mark.parametrize(("name", "value", "named"), WRONG, ids=[f"{name}={value!r:.9}" for name, value, _ in WRONG])
def test_a_field_of_another_type_is_refused_where_it_enters(name: str, value: object, named: str) -> None:
    """By LLM.request, which AsyncLLM and bulk use, and for requests made by hand; what runs goes on."""
    llm = tiny_llm(max_batch=1)
    running, _ = started(llm, "running", words(20)), add(llm, "waiting", words(9))
    fields: dict[str, Any] = {
        "request_id": "new", "prompt": words(5), "sampling": PARAMS, "drafting": BASELINE, "priority": 0, name: value
    }  # fmt: skip
    with pytest.raises(ValueError, match=named):
        llm.engine.add(llm.request(**fields))
    fields["id"], fields["prompt_ids"] = fields.pop("request_id"), tuple(fields.pop("prompt"))
    with pytest.raises(ValueError, match=named):
        llm.engine.add(Request(**fields))
    assert ended(finish(llm)) == ["running", "waiting"] and running.output_ids == alone(words(20))


def biased(**settings: Any) -> dict[str, Any]:
    return {"sampling": dataclasses.replace(PARAMS, **settings)}


BEYOND = [
    ({"prompt": [5, 96]}, "prompt token 96"),
    ({"prompt": [5, -1]}, "prompt token -1"),
    ({"prompt": [2**40]}, "prompt token 1099511627776"),
    ({"prediction": [5, 96], "drafting": Lookup()}, "prediction token 96"),
    (biased(logit_bias={5: 1.0, 96: 1.0}), "logit_bias: token id 96"),
    (biased(logit_bias={2**40: 1.0}), "logit_bias: token id 1099511627776"),
    (biased(stop_token_ids=(96,)), "stop_token_ids: token id 96"),
    (biased(stop_token_ids=(2**31,)), "stop_token_ids: token id 2147483648"),
    (biased(bad_words=("ab", "aé")), r"bad_words='aé': is written with token 96, and the model has tokens 0 to 95"),
    (biased(max_tokens=2**31 - 1), "exceeds the 400 positions"),
    (biased(max_tokens=10**30, min_tokens=10**30), "exceeds the 400 positions"),
    ({"drafting": Dynamic(1, 60, 2)}, "draft_top_k=60: the draft's vocabulary has 48 tokens"),
]
"""What a request may hold and the tiny models have not."""


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(("fields", "message"), BEYOND, ids=[message[:24] for _, message in BEYOND])
def test_what_the_models_do_not_have_is_refused_before_a_step(
    fields: dict[str, Any], message: str, backend: str
) -> None:
    """Inside a step it would end every other request too. The tokenizer has a token more than the models."""
    models = tiny_models() if backend == "native" else torch_models()
    llm = LLM.from_models(dataclasses.replace(models, tokenizer=letters(97)), engine_config(2))
    running, before = started(llm, "running", words(20)), alone(words(20)) if backend == "native" else None
    given = {"prompt": words(5), "sampling": PARAMS, "drafting": BASELINE} | fields
    with pytest.raises(ValueError, match=message):
        llm.engine.add(llm.request("new", **given))
    assert ended(finish(llm)) == ["running"] and before in (None, running.output_ids)


EXTREME = [
    biased(logprobs=10**30, prompt_logprobs=10**30),
    biased(temperature=1e-6, top_p=1e-300, min_p=1e-300, top_k=2**31 - 1),
    biased(temperature=1e6, repetition_penalty=1e6, presence_penalty=-1e6, frequency_penalty=1e6),
    biased(repetition_penalty=1e-6, logit_bias=dict.fromkeys(range(1, 96), -math.inf)),
    biased(seed=2**64 - 1, stop_token_ids=tuple(range(96)), min_tokens=20),
    {"priority": 10**400, "cache_salt": "\ud800", "deadline_s": 1e9},
    {"priority": -(10**400), "prediction": [5] * 5000, "drafting": Lookup(min_confidence=0.0)},
]
"""As large, small and many as a request may have them."""


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("fields", EXTREME, ids=range(len(EXTREME)))
def test_the_largest_and_smallest_values_pass_every_step(fields: dict[str, Any], backend: str) -> None:
    models = tiny_models() if backend == "native" else torch_models()
    llm = LLM.from_models(models, engine_config(2, shared_lookup_bytes=2**16))
    llm.engine.add(
        llm.request("it", **({"prompt": words(9), "sampling": PARAMS, "drafting": SPECS["chain4"]} | fields))
    )
    running = add(llm, "running", words(20))
    assert sorted(map(str, ended(finish(llm)))) == ["it", "running"] and len(running.output_ids) == 20


def test_a_model_of_more_positions_than_are_counted_runs() -> None:
    """A slot addresses no more pages than there are."""
    modules = tiny_pair(config=dataclasses.replace(TINY, max_positions=2**31 - 1))
    for module in modules:
        round_to(module, torch.bfloat16)
    models = from_modules(*modules, None, Loading("bfloat16"), Environment.read())
    llm = LLM.from_models(models, engine_config(1, num_pages=8))
    sequence = add(llm, "a", words(20), drafting=SPECS["chain4"])
    finish(llm)
    assert sequence.output_ids == alone(words(20))
    with pytest.raises(OutOfPages, match="8 are there"):
        add(llm, "b", words(20), dataclasses.replace(PARAMS, max_tokens=2**30))


@pytest.mark.parametrize("arrival", [math.nan, math.inf, 10**400, -1e300, "now", None, True])
def test_an_arrival_that_is_no_time_is_refused(arrival: Any) -> None:
    with pytest.raises(ValueError, match=r"request a: arrival=.* must be a time of time\.monotonic"):
        Request("a", (1,), PARAMS, BASELINE, arrival=arrival)


def test_a_request_without_a_seed_is_refused() -> None:
    unseeded = dataclasses.replace(PARAMS, seed=None)
    with pytest.raises(ValueError, match=r"request a: sampling\.seed=None: must be a number"):
        Request("a", (1,), unseeded, BASELINE)
    assert tiny_llm().request("a", [1], unseeded, BASELINE).sampling.seed is not None


def test_numbers_of_numpy_are_numbers() -> None:
    llm = tiny_llm(max_batch=1)
    prompt = np.array(words(20))
    llm.engine.add(llm.request(np.int64(3), prompt, PARAMS, BASELINE, np.int32(1), np.float32(1e6)))  # type: ignore[arg-type]
    (sequence,) = llm.engine.sequences.values()
    assert ended(finish(llm)) == [3] and sequence.output_ids == alone(words(20))
    assert {type(token) for token in sequence.tokens} == {int}
