"""Past outputs in a running engine: later requests copy from them, within their space, and no text changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from tests.conftest import engine_config, needs_native, tiny_llm, tiny_models, tiny_pair, weights_of
from tests.engine.driving import add, finish, words
from tests.engine.test_exact import BASELINE, check_accounting, prompts, tokens

from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, NoDraft
from aquiline.spec.lookup import Lookup
from aquiline.spec.past_outputs import PROMPT_TAIL, PastOutputs

SOME = 2**17
EAGER = Lookup(min_match=1, min_confidence=0)
SAMPLED = SamplingParams(max_tokens=60, temperature=3.0, seed=4, ignore_eos=True)


def sharing_llm(max_batch: int = 2, num_bytes: int = SOME, **settings: object) -> LLM:
    return tiny_llm(max_batch=max_batch, shared_lookup_bytes=num_bytes, **settings)


def past_of(llm: LLM) -> PastOutputs:
    assert llm.engine.past is not None
    return llm.engine.past


def stood(llm: LLM, text: Sequence[int], salt: str | None = None) -> int:
    """How many of the last tokens stand in the past outputs of a salt."""
    past = past_of(llm)
    return past.find(past.space(salt).number, text, len(text), 4).length


def drafted(llm: LLM, prompt: list[int], drafting: Drafting, salt: str | None = None) -> tuple[list[int], int, int]:
    """The output of one request, how many tokens were drafted for it, and how many of these were right."""
    request = dataclasses.replace(llm.request("r", prompt, SAMPLED, drafting), cache_salt=salt)
    (output,) = llm.outputs([request])
    return output.token_ids, output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens


@needs_native
def test_a_repeated_request_copies_the_earlier_answer() -> None:
    """From its first tokens on, since they stand behind the same prompt; a request of another salt does not."""
    llm, prompt = sharing_llm(), words(40)
    plain, *_ = drafted(tiny_llm(max_batch=1), prompt, BASELINE)
    first, second, other, same = (drafted(llm, prompt, EAGER, salt) for salt in (None, None, "a", "a"))
    assert first[0] == second[0] == other[0] == same[0] == plain
    assert first[2] == other[2] < 15, "what the text itself repeats"
    assert second[2] >= 50 and same[2] >= 50
    off = tiny_llm(max_batch=2)
    assert off.engine.past is None and [drafted(off, prompt, EAGER)[1:] for _ in range(2)] == [first[1:]] * 2


@needs_native
def test_outputs_of_every_way_to_draft_are_copied_from() -> None:
    for drafting in (NoDraft(), Chain(3), Adaptive()):
        llm, prompt = sharing_llm(), words(40)
        expected, *_ = drafted(llm, prompt, drafting)
        found, _, num_right = drafted(llm, prompt, EAGER)
        assert found == expected and num_right >= 50


@needs_native
def test_adaptive_drafting_copies_too() -> None:
    """Its chances of such matches are learnt: the fourth time nearly all is copied in long pieces."""
    llm, prompt = sharing_llm(), words(40)
    runs = [drafted(llm, prompt, Adaptive()) for _ in range(6)]
    assert len({tuple(found) for found, _, _ in runs}) == 1
    assert llm.engine.meter.choices.accepted["lookup"] > 150
    assert runs[-1][2] >= 50


@pytest.mark.parametrize("name", [pytest.param("native", marks=needs_native), "torch"])
@pytest.mark.parametrize("late_reads", [False, True])
def test_the_text_is_that_of_plain_decoding(name: str, late_reads: bool) -> None:
    """Whatever was written before, right or misleading, beside other ways to draft."""
    models = tiny_models("float32")
    if name == "torch":
        models = dataclasses.replace(models, pair=TorchPair(*weights_of(*tiny_pair()), "float32"))
    config = engine_config(3, shared_lookup_bytes=SOME, late_reads=late_reads)
    llm = LLM.from_models(models, config)
    sampling = dataclasses.replace(SAMPLED, max_tokens=24)
    plain = tokens(llm.run(prompts(6), sampling, drafting=BASELINE))
    for round_, drafting in enumerate((EAGER, Adaptive(4), Lookup(2, 20, 0.01))):
        result = llm.run(prompts(6), sampling, drafting=drafting)
        assert tokens(result) == plain, drafting
        check_accounting(result)
        seed = dataclasses.replace(sampling, seed=100 + round_)
        llm.run(prompts(6), seed, drafting=EAGER)
    assert llm.run(prompts(6), sampling, drafting=EAGER).summary.counters.num_accepted_tokens > 40


@needs_native
def test_a_preempted_request_is_added_once_and_as_it_was_written() -> None:
    llm = sharing_llm(5, num_pages=10)
    batch = [words(n, n) for n in (20, 33, 9, 48, 15)]
    result = llm.run(batch, SAMPLED, drafting=EAGER)
    assert result.summary.num_preemptions > 0
    assert tokens(result) == tokens(tiny_llm(max_batch=5).run(batch, SAMPLED, drafting=BASELINE))
    expected = sum(min(len(p), PROMPT_TAIL) + 60 + 1 for p in batch)
    assert past_of(llm).num_written == expected
    for output in result.outputs:
        assert stood(llm, output.token_ids[:-1]) == 59


@needs_native
@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_what_an_aborted_request_wrote_is_copied_from(num_steps: int) -> None:
    """Nothing but that. The server ends a request so where its stop string comes."""
    llm = sharing_llm(1)
    sequence = add(llm, "a", words(30), SAMPLED, EAGER)
    waiting = add(llm, "b", words(30, 1), SAMPLED, EAGER)
    for _ in range(num_steps):
        llm.engine.step()
    assert past_of(llm).num_written == 0, "a request that runs has added nothing"
    llm.engine.abort("a"), llm.engine.abort("b")
    written = sequence.output_ids
    assert waiting.output_ids == [] and bool(written) == (num_steps > 0)
    assert past_of(llm).num_written == (30 + len(written) + 1 if written else 0)
    finish(llm)


@needs_native
def test_a_reset_keeps_past_outputs_and_the_end_drops_them() -> None:
    """As cached pages are kept: a run that ends resets its engine."""
    llm = sharing_llm(1)
    sequence = add(llm, "a", words(40), SAMPLED, EAGER)
    for _ in range(20):
        llm.engine.step()
    llm.engine.reset()
    assert stood(llm, sequence.output_ids[:-1]) > 15
    llm.engine.close()
    assert llm.engine.past is None


@needs_native
def test_the_smallest_store_forgets_and_texts_stay() -> None:
    """Thousands of tokens go through a ring of 3276."""
    llm = sharing_llm(4, 2**16)
    batch = [words(50, n) for n in range(20)]
    plain = tokens(tiny_llm(max_batch=4).run(batch, SAMPLED, drafting=BASELINE))
    for _ in range(3):
        assert tokens(llm.run(batch, SAMPLED, drafting=EAGER)) == plain
    assert past_of(llm).num_written > 3276 == past_of(llm).size


@pytest.mark.parametrize("bad", [-1, 1, 2**16 - 1, 2**34 + 1, 1e6, True])
def test_a_bad_size_is_refused_by_name(bad: object) -> None:
    with pytest.raises(ValueError, match=f"shared_lookup_bytes={bad}: must be"):
        EngineConfig(shared_lookup_bytes=bad)  # type: ignore[arg-type]
