"""Lookup in a running engine: the text of plain decoding whatever is copied, and nothing kept of ended requests."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from tests.conftest import TINY, engine_config, needs_native, tiny_llm, tiny_models, tiny_pair, weights_of
from tests.engine.driving import add, finish, words
from tests.engine.streams import lettered_llm, read, run, said
from tests.engine.test_exact import BASELINE, check_accounting, prompts, tokens
from tests.engine.test_stops import letters

from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.engine.async_llm import AsyncLLM
from aquiline.engine.control.rivals import Rivals
from aquiline.engine.llm import LLM, Result
from aquiline.engine.model import LoadedModels
from aquiline.engine.sequence import Request
from aquiline.spec.drafting import Chain, NoDraft
from aquiline.spec.lookup import Lookup, LookupProposer

SPECS = (Lookup(), Lookup(min_match=1, min_confidence=0), Lookup(1, 32, 0.01), Lookup(3, 1))
SAMPLINGS = (
    SamplingParams(max_tokens=40, ignore_eos=True), SamplingParams(max_tokens=40, temperature=0.8, seed=7),
    SamplingParams(max_tokens=40, temperature=0.8, seed=3, repetition_penalty=1.2, logit_bias={5: 4.0}, min_tokens=30),
)  # fmt: skip


def torch_llm(max_batch: int = 3) -> LLM:
    """A target alone."""
    pair = TorchPair(*weights_of(tiny_pair()[0], None), "float32")
    return LLM.from_models(LoadedModels(pair, letters(), "float32", 0), engine_config(max_batch))


def native_llm(max_batch: int = 3, **settings: object) -> LLM:
    loaded = dataclasses.replace(tiny_models(), tokenizer=letters())
    return LLM.from_models(loaded, engine_config(max_batch, **settings))


@pytest.fixture(scope="module", params=[pytest.param("native", marks=needs_native), "torch"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return native_llm() if request.param == "native" else torch_llm()


def repeating() -> list[list[int]]:
    """Prompts of ragged lengths, some of which repeat themselves."""
    return [p if i % 2 else (p * 3)[:60] for i, p in enumerate(prompts(8))]


def outcome(result: Result) -> list[object]:
    return [(o.token_ids, o.text, o.finish_reason) for o in result.outputs]


def logprobs(result: Result) -> list[object]:
    return [(o.logprobs, o.prompt_logprobs) for o in result.outputs]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SAMPLINGS[0], id="greedy", marks=pytest.mark.rare),
        pytest.param(SAMPLINGS[1], id="sampled", marks=pytest.mark.rare),
        pytest.param(SAMPLINGS[2], id="ruled"),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    llm: LLM, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More prompts than slots, with predictions that are right, changed in places, and wrong. With predictions the
    rivals hold still: how much is copied between their turns depends on the time that it takes."""
    plain = llm.run(repeating(), sampling, drafting=BASELINE)
    right = tokens(plain)
    changed = [[t if i % 9 else (t + 1) % TINY.vocab_size for i, t in enumerate(text)] for text in right]
    wrong = [words(50, n) for n in range(8)]
    num_accepted = {}
    for drafting in SPECS:
        for name, predictions in (("none", None), ("right", right), ("changed", changed), ("wrong", wrong)):
            with monkeypatch.context() as still:
                if predictions is not None:
                    still.setattr(Rivals, "begin_call", lambda *args: None)
                result = llm.run(repeating(), sampling, drafting=drafting, predictions=predictions)
            assert outcome(result) == outcome(plain), f"{drafting}, prediction {name}"
            check_accounting(result)
            num_accepted[drafting, name] = result.summary.counters.num_accepted_tokens
    for drafting in SPECS:
        assert num_accepted[drafting, "right"] > num_accepted[drafting, "changed"] > num_accepted[drafting, "wrong"], (
            drafting
        )


def test_stop_strings_limits_and_logprobs(llm: LLM) -> None:
    """They cut drafts that were accepted."""
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=9, logprobs=2, ignore_eos=True)
    full = llm.run(repeating(), params, drafting=BASELINE)
    texts = [o.text for o in full.outputs]
    each = [
        dataclasses.replace(params, stop=(text[21:24],), max_tokens=(40, 13)[i % 2], prompt_logprobs=(None, 1)[i % 2])
        for i, text in enumerate(texts)
    ]
    plain = llm.run(repeating(), each, drafting=BASELINE)
    assert {o.finish_reason for o in plain.outputs} == {"stop", "length"}
    num_cut = 0
    for drafting in SPECS:
        result = llm.run(repeating(), each, drafting=drafting, predictions=texts)
        assert outcome(result) == outcome(plain), drafting
        assert logprobs(result) == logprobs(plain) or not llm.models.pair.is_exact, drafting
        num_cut += result.summary.counters.tokens_cut
    assert num_cut > 0


@needs_native
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_sequences_look_up_on(prefix_cache: bool) -> None:
    batch = [(words(5, n) * 10)[:n] for n in (20, 33, 1, 48, 15)]
    for sampling in (dataclasses.replace(each, ignore_eos=True) for each in SAMPLINGS):
        plain = native_llm(5).run(batch, sampling, drafting=BASELINE)
        llm = native_llm(5, num_pages=10, prefix_cache=prefix_cache)
        for predictions in (None, tokens(plain)):
            for drafting in SPECS[:2]:
                result = llm.run(batch, sampling, drafting=drafting, predictions=predictions)
                assert result.summary.num_preemptions > 0 or predictions is not None
                assert outcome(result) == outcome(plain)
                check_accounting(result)


@needs_native
@pytest.mark.parametrize("late_reads", [False, True])
def test_beside_other_ways_to_draft(late_reads: bool) -> None:
    llm = tiny_llm(max_batch=3, late_reads=late_reads)
    batch = repeating()
    plain = tokens(llm.run(batch, SAMPLINGS[1], drafting=BASELINE))
    specs = [(Lookup(1), Chain(3), NoDraft())[i % 3] for i in range(8)]
    requests = [
        llm.request(i, prompt, SAMPLINGS[1], drafting, prediction=plain[i])
        for i, (prompt, drafting) in enumerate(zip(batch, specs, strict=True))
    ]
    found = {output.request_id: output for output in llm.outputs(requests)}
    assert [found[i].token_ids for i in range(8)] == plain
    assert found[0].metrics.num_accepted_tokens > 10


@needs_native
def test_a_right_prediction_saves_most_steps() -> None:
    """From the first token on, once the engine has learnt that long matches are right."""
    llm = tiny_llm(max_batch=1)
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=2, ignore_eos=True)
    prompt = words(30)
    expected = llm.run([prompt], params, drafting=BASELINE).outputs[0].token_ids
    drafting = Lookup()
    cold = llm.run([prompt], params, drafting=Lookup(min_match=3), predictions=[expected]).summary.counters
    warm = llm.run([prompt], params, drafting=drafting, predictions=[expected]).summary.counters
    assert cold.tau > 5 and warm.num_steps <= cold.num_steps and warm.num_steps <= 17
    assert warm.num_accepted_tokens >= 0.9 * warm.num_draft_tokens
    other = llm.run([prompt], dataclasses.replace(params, seed=3), drafting=drafting, predictions=[expected]).outputs[0]
    assert other.token_ids != expected
    assert other.metrics.num_draft_tokens < 60, "what is not likely is hardly drafted"


@needs_native
def test_where_nothing_is_found_steps_are_plain() -> None:
    llm = tiny_llm(max_batch=2)
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    batch = [words(20), words(9, 1)]
    plain = llm.run(batch, params, drafting=BASELINE).summary
    found = llm.run(batch, params, drafting=Lookup(min_match=32)).summary
    assert found.counters.num_draft_tokens == 0 and found.slots.num_verify_rows == plain.slots.num_verify_rows
    assert found.counters.as_dict() == plain.counters.as_dict()


@needs_native
@pytest.mark.parametrize("num_steps", [0, 1, 2, 9])
def test_an_abort_frees_the_index(num_steps: int) -> None:
    llm = tiny_llm(max_batch=2, row_budget=24)
    sequences = [add(llm, name, words(40, name), SAMPLINGS[0], Lookup(1)) for name in range(3)]
    for _ in range(num_steps):
        llm.engine.step()
    assert isinstance(sequences[0].proposer, LookupProposer)
    indexes = [weakref.ref(s.proposer) for s in sequences if s.proposer is not None]
    for name in (0, 2):
        llm.engine.abort(name)
    assert [s.proposer is None for s in sequences] == [True, False, True]
    assert [index() is None for index in indexes] == [True, False, True]
    finish(llm)
    assert all(index() is None for index in indexes)
    plain = tiny_llm(max_batch=1).run([words(40, 1)], SAMPLINGS[0], drafting=BASELINE)
    assert sequences[1].output_ids == plain.outputs[0].token_ids


@needs_native
def test_thousands_of_steps_leave_nothing() -> None:
    """Requests come and go, some aborted, some preempted; what is left is the engine's table of events."""
    llm = tiny_llm(max_batch=4, num_pages=16, prefix_cache=True)
    draw = np.random.default_rng(0)
    alive: list[weakref.ref[LookupProposer]] = []
    kept = []  # a caller may keep its sequences

    def requests() -> Iterator[Request]:
        for name in range(400):
            prompt = words(int(draw.integers(1, 8)), name) * int(draw.integers(1, 6))
            params = SamplingParams(max_tokens=int(draw.integers(1, 60)), temperature=0.8, seed=name)
            prediction = words(int(draw.integers(0, 30)), name + 1)
            yield llm.request(name, prompt, params, Lookup(1, window=256), prediction=prediction)

    num_steps = 0
    waiting = requests()
    while True:
        while len(llm.engine.sequences) < 6 and (request := next(waiting, None)) is not None:
            sequence = llm.engine.add(request)
            assert isinstance(sequence.proposer, LookupProposer)
            alive.append(weakref.ref(sequence.proposer))
            kept.append(sequence)
        if not llm.engine.is_busy:
            break
        llm.engine.step()
        num_steps += 1
        if num_steps % 50 == 0:
            llm.engine.abort(next(iter(llm.engine.sequences)))
        assert sum(index() is not None for index in alive) == len(llm.engine.sequences) <= 6
    assert num_steps > 1500 and len(kept) == 400 and llm.engine.scheduler.num_preemptions > 0
    assert sum(index() is not None for index in alive) == 0
    assert list(llm.engine._shared) == [Lookup]


@needs_native
def test_streams_and_texts_have_predictions() -> None:
    llm = lettered_llm()
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=5, ignore_eos=True)
    expected = llm.generate("abcdef", params)[0]

    async def main() -> None:
        async with AsyncLLM(llm) as engine:
            for prediction, most in ((None, 41), (expected.text, 15), (expected.token_ids, 15)):
                deltas = await read(engine.generate("abcdef", params, drafting=Lookup(1), prediction=prediction))
                assert said(deltas) == expected.token_ids and "".join(d.text for d in deltas) == expected.text
                assert len(deltas) <= most

    run(main())


def test_predictions_are_checked_by_name(llm: LLM) -> None:
    for given, message in (
        (["a", "b"], "predictions: 2 for 1 prompts; give one per prompt, or None for it"),
        ([5], "prediction=5: must be a text, a list of token ids, or None"),
        ([[1, 2.5]], "prediction: 2.5 is among them; each must be a whole number"),
        ([[1, 96]], r"request 0: prediction token 96: must be in \[0, 96\)"),
        (["a\ud800"], "prediction='a.*': holds bytes that are not UTF-8"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            llm.generate([[1, 2]], predictions=given)  # type: ignore[arg-type]
    sampling = SamplingParams(seed=1, max_tokens=3)
    for prediction, message in ((5, "prediction=5: must be a tuple of ids"), ((1.5,), "prediction token 1.5: must be")):
        with pytest.raises(ValueError, match=message):
            Request(0, (1,), sampling, Lookup(), prediction=prediction)  # type: ignore[arg-type]
    plain = llm.generate("abc", sampling)[0]
    for given in ("", "xyz", [None], [[]]):
        assert llm.generate("abc", sampling, predictions=given)[0].token_ids == plain.token_ids  # type: ignore[arg-type]
    without = LLM.from_models(dataclasses.replace(llm.models, tokenizer=None), engine_config(1))
    with pytest.raises(ValueError, match=r"prediction='a': the target has no tokenizer\.json; pass token ids"):
        without.generate([[1]], predictions=["a"])
