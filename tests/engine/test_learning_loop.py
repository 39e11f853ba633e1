"""The engine's side of a draft that learns: what is stored, which generation serves, when it is taken back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.conftest import engine_config
from tests.disk import full_after
from tests.engine.test_learning_store import waited

from aquiline.config import PairConfig, SamplingParams
from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.engine.learning.learning_loop import LEAST_REQUESTS, FirstGuesses, LearningLoop
from aquiline.engine.learning.store import Generation, LearningStore, Served, ServingState, write_learning
from aquiline.engine.llm import LLM
from aquiline.models.formats import save_draft
from aquiline.spec.drafting import Chain, Drafting, NoDraft
from aquiline.spec.lookup import Lookup

PAIR = PairConfig("bundled")
PROMPT = "def fibonacci(n):\n"
GREEDY = SamplingParams(max_tokens=24, seed=0, ignore_eos=True)


@contextmanager
def learning(folder: Path, drafting: Drafting = Chain(3)) -> Iterator[tuple[LLM, LearningLoop]]:
    """An LLM of the bundled pair whose draft learns, while no trainer runs."""
    config = engine_config(max_batch=4, max_context=256, check=False)
    with LLM.open(PAIR, config, drafting) as llm, LearningLoop(llm, PAIR, LearnConfig(folder, 0.0)) as loop:
        yield llm, loop


def make_generation(loop: LearningLoop, number: int, parent: int, *, sign: float = 1.0, accepted: bool = True) -> None:
    """A generation whose draft is the shipped one, its final norm times `sign`: -1 makes all its guesses bad."""
    assert loop.resolved.draft is not None
    draft = loop.resolved.draft_weights(loop.resolved.draft)
    model = dataclasses.replace(draft.model, final_norm=draft.model.final_norm * sign)
    part = loop.store.folder / "part"
    save_draft(dataclasses.replace(draft, model=model), part)
    write_learning(part, Generation(number, parent, 1000, 1.5, 1.6, (1.01, 1.1), 2.0, 2.0, accepted))
    part.rename(loop.store.checkpoint(number))


def test_what_is_answered_is_stored_but_for_what_refuses_or_has_a_salt(tmp_path: Path) -> None:
    with learning(tmp_path) as (llm, loop):
        ask = [llm.request(number, PROMPT, GREEDY) for number in range(3)]
        ask[1] = dataclasses.replace(ask[1], learn=False)
        ask[2] = dataclasses.replace(ask[2], cache_salt="a tenant")
        first, _, _ = llm.outputs(ask)
        [found] = loop.store.served()
    assert found.tokens == [*first.prompt_ids, *first.token_ids] and found.num_prompt == len(first.prompt_ids)
    steps = first.metrics.num_steps
    assert found.rejected == sorted(set(found.rejected)) and 0 < len(found.rejected) <= steps
    assert set(found.rejected) <= set(range(found.num_prompt + 1, len(found.tokens)))
    rejected = [first.sources[index - found.num_prompt] for index in found.rejected]
    assert set(rejected) == {"target"}, "the target wrote the token that the draft had guessed wrong"
    full = sum(1 for source in first.sources[1:] if source == "target")
    assert full - len(found.rejected) <= steps - len(found.rejected)


def test_places_are_those_at_which_the_target_drew_another_token(tmp_path: Path) -> None:
    """A chain of one: a step's first token is drafted, or it is a place."""
    with learning(tmp_path, Chain(1)) as (llm, loop):
        [output] = llm.generate([PROMPT], GREEDY)
        [found] = loop.store.served()
    expected, index = [], 1
    while index < len(output.token_ids):
        if output.sources[index] == "draft":
            index += 2
        else:
            expected.append(found.num_prompt + index)
            index += 1
    assert found.rejected == expected


def test_no_place_lies_beyond_the_end_of_a_text(tmp_path: Path) -> None:
    """A step's tokens are cut where a text ends: at its bound, at an end token, at a stop string."""
    bounds = [dataclasses.replace(GREEDY, max_tokens=4 + number) for number in range(12)]
    with learning(tmp_path) as (llm, loop):
        llm.generate([PROMPT] * 13, [*bounds, dataclasses.replace(GREEDY, stop=("return",))])
        for found in loop.store.served():
            assert found.rejected and max(found.rejected) < len(found.tokens)


def test_a_full_disk_is_told_once_and_requests_are_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with learning(tmp_path) as (llm, loop):
        expected = llm.generate([PROMPT], GREEDY)[0].token_ids
        [segment] = loop.store.segments()
        with full_after(segment.stat().st_size + 20):
            said = [llm.generate([PROMPT], GREEDY)[0].token_ids for _ in range(2)]
        assert said == [expected] * 2
        assert caplog.text.count("requests are not stored until there is room again") == 1


def test_the_next_generation_serves_and_texts_stay(tmp_path: Path) -> None:
    with learning(tmp_path) as (llm, loop):
        expected = llm.generate([PROMPT], GREEDY)[0]
        make_generation(loop, 1, 0, accepted=False)
        make_generation(loop, 2, 1)
        make_generation(loop, 3, 0, sign=-1.0)
        assert waited(lambda: loop.generation == 3), "neither what was refused nor what was made of it"
        worse = llm.generate([PROMPT], GREEDY)[0]
        assert worse.token_ids == expected.token_ids
        assert worse.metrics.num_accepted_tokens < expected.metrics.num_accepted_tokens / 4
        loop.store.write_state(ServingState(0, (3,)))
        assert waited(lambda: loop.generation == 0), "a state that another process writes is followed"
        assert llm.generate([PROMPT], GREEDY)[0].metrics.tau == expected.metrics.tau
        make_generation(loop, 4, 0)
        assert waited(lambda: loop.generation == 4)
    with learning(tmp_path) as (llm, loop):
        assert loop.generation == 4, "it serves again after a new start"
        assert "generation 4 serves, simulated tau 1.600" in loop.summary


@pytest.mark.rare
def test_a_generation_that_guesses_worse_in_service_is_taken_back(tmp_path: Path) -> None:
    sampling = dataclasses.replace(GREEDY, max_tokens=12)
    prompts = [f"def f{number}(x):\n    return" for number in range(LEAST_REQUESTS + 5)]
    with learning(tmp_path) as (llm, loop):
        llm.generate(prompts, sampling)
        make_generation(loop, 1, 0, sign=-1.0)
        assert waited(lambda: loop.generation == 1)
        llm.generate(prompts, sampling)
        assert waited(lambda: loop.generation == 0)
        assert loop.store.state() == ServingState(0, (1,))
        llm.generate(prompts, sampling)
        assert loop.generation == 0


def test_a_generation_that_cannot_be_read_never_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with learning(tmp_path) as (llm, loop):
        make_generation(loop, 1, 0)
        (loop.store.checkpoint(1) / "model.safetensors").write_bytes(b"cut")
        assert waited(lambda: loop.store.state().rolled_back == (1,))
        assert loop.generation == 0 and "generation 1 cannot serve" in caplog.text
        assert llm.generate([PROMPT], GREEDY)[0].metrics.tau > 1


def guesses(*rates: float) -> FirstGuesses:
    found = FirstGuesses()
    for rate in rates:
        found.add(20, round(20 * rate))
    return found


def test_behind_is_what_lies_below_the_interval_of_enough_requests() -> None:
    good, even = guesses(*[0.6, 0.7] * LEAST_REQUESTS), guesses(*[0.3, 0.95] * LEAST_REQUESTS)
    assert guesses(*[0.4, 0.5] * LEAST_REQUESTS).is_behind(good)
    assert not guesses(*[0.4, 0.5] * (LEAST_REQUESTS // 2 - 1)).is_behind(good), "too few"
    assert not even.is_behind(good), "0.625 against 0.65, and requests differ more than that"
    assert not good.is_behind(guesses(*[0.4, 0.5] * LEAST_REQUESTS))


@pytest.mark.parametrize(("drafting", "name"), [(NoDraft(), "none"), (Lookup(), "lookup")], ids=["none", "lookup"])
def test_nothing_learns_where_no_draft_model_runs(tmp_path: Path, drafting: Drafting, name: str) -> None:
    with (
        pytest.raises(ValueError, match=f"drafter='{name}' uses no draft model to train"),
        learning(tmp_path, drafting),
    ):
        pass


def test_what_is_stored_and_how_to_refuse_is_told_first(tmp_path: Path) -> None:
    with learning(tmp_path / "kept here") as (_, loop):
        for part in ("token ids", "kept here", "67 MB", '"learn": false', "cache_salt", "GB of memory"):
            assert part in loop.notice


def test_served_requests_have_their_temperature(tmp_path: Path) -> None:
    with learning(tmp_path) as (llm, _):
        llm.generate([PROMPT], dataclasses.replace(GREEDY, temperature=0.5))
    assert [type(found) is Served and found.temperature for found in LearningStore(tmp_path).served()] == [0.5]
