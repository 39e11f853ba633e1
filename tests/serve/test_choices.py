"""Recorded outputs, cut at every chunking of 1 to K + 1 tokens, give the answer that comes whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from aquiline.config import SamplingParams
from aquiline.engine.sequence import Request
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.serve.choices import Choice, Gain, Job
from aquiline.serve.reply import drafting_so_far
from aquiline.serve.sampling import Wanted
from aquiline.serve.wire import Begin, Delta
from aquiline.spec.drafting import Chain
from aquiline.text.parsers import Part, Text
from aquiline.text.parsing import Parsing
from aquiline.text.tokenizer import load_tokenizer
from aquiline.types import TokenLogprobs

K = 3
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
RECORDED = {
    "plain": "def f(n):\n    return n + 1\n",
    "characters": "naïve → 🦅🦅 日本語 ends é",
    "reasoning": "<think>\nFirst é, then 🦅.\n</think>\n\nThe answer → 42",
    "a call": f"I will add.\n{CALL}",
    "both": f"<think>To add</think>\n{CALL}\n",
    "a stop": "one two STOP three",
    "half a stop": "one two STO, ST and S",
    "no end of reasoning": "<think>\nI wonder </thin",
}
STOP = ("STOP", "\n\n\n")


@cache
def tokenizer() -> Tokenizer:
    found = load_tokenizer(BUNDLED_TARGET)
    assert found is not None
    return found


def ids_of(name: str) -> list[int]:
    return list(tokenizer().encode(RECORDED[name], add_special_tokens=False).ids)


def choice_of(by_token: bool = False) -> Choice:
    prompt = tuple(tokenizer().encode("a prompt", add_special_tokens=False).ids)
    request = Request(0, prompt, SamplingParams(seed=0), Chain(K), with_text=False)
    reader = Parsing(True, "hermes").reader(tokenizer(), prompt, "a prompt", STOP, True)
    return Choice(request, reader, by_token, True)


def deltas_of(name: str, sizes: list[int]) -> list[Delta]:
    """The recorded output in chunks of these sizes, the last token being the end of the text."""
    ids, found = [*ids_of(name), 0], list[Delta]()
    while ids:
        size = sizes[len(found)] if len(found) < len(sizes) else 1
        part, ids = ids[:size], ids[size:]
        logprobs, num = [TokenLogprobs(token, -1.0, 1, {}) for token in part], len(part) - 1
        found.append(Delta(0, part, num, "draft", K, num, None if ids else "stop", logprobs, None, None))
    return found


def read(deltas: list[Delta], by_token: bool, num_held: int = 1) -> tuple[Choice, list[Gain]]:
    """The answer of deltas, so many of which are read together."""
    choice, found = choice_of(by_token), list[Gain]()
    while deltas and choice.finish_reason is None:
        found.append(choice.take(*deltas[:num_held]))
        deltas = deltas[num_held:]
    return choice, found


def gains(name: str, sizes: list[int], by_token: bool) -> tuple[Choice, list[Gain]]:
    """The recorded output in chunks of these sizes, each of which is read when it comes."""
    return read(deltas_of(name, sizes), by_token)


def recorded_job(name: str, size: int) -> tuple[Job, list[Gain]]:
    """A job whose only choice is the recorded output, in chunks of one size, and its gains."""
    choice, found = gains(name, [size] * 99, by_token=True)
    sampling = SamplingParams(seed=0)
    return Job("id", "m", Wanted(sampling, Chain(K), 1, 0, None, 16, 0, None), [[5]], [choice]), found


def told(gains: list[Gain]) -> list[Part]:
    parts: list[Part] = []
    for part in [part for gain in gains for piece in gain.pieces for part in piece.parts]:
        if parts and isinstance(part, Text) and isinstance(parts[-1], Text) and parts[-1].channel == part.channel:
            parts[-1] = Text(part.channel, parts[-1].text + part.text)
        else:
            parts.append(part)
    return parts


def check(name: str, sizes: list[int], by_token: bool) -> None:
    whole, (gain,) = gains(name, [len(ids_of(name)) + 1], by_token)
    cut, several = gains(name, sizes, by_token)
    assert told(several) == told([gain])
    assert [token for each in several for token in each.token_ids] == gain.token_ids
    assert [entry.token_id for each in several for entry in each.logprobs or ()] == gain.token_ids
    assert cut.finish_reason == whole.finish_reason == "stop"
    assert (cut.num_tokens, cut.num_reasoning) == (whole.num_tokens, whole.num_reasoning)
    for piece in [piece for each in several for piece in each.pieces]:
        for part in piece.parts:
            assert not isinstance(part, Text) or "\ufffd" not in part.text, "a part of a character"


def chunkings(num: int) -> Iterator[list[int]]:
    """All chunkings of the first six tokens into 1 .. K + 1, then equal chunks of every size."""
    heads: list[list[int]] = [[]]
    while heads:
        head = heads.pop()
        if sum(head) >= 6:
            for size in range(1, K + 2):
                yield head + [size] * num
        else:
            heads += [[*head, size] for size in range(1, K + 2)]


@pytest.mark.parametrize("name", RECORDED)
def test_every_beginning_and_every_size(name: str) -> None:
    for sizes in chunkings(len(ids_of(name))):
        check(name, sizes, by_token=False)


@given(st.sampled_from(list(RECORDED)), st.lists(st.integers(1, K + 1), min_size=40, max_size=40), st.booleans())
def test_any_chunking(name: str, sizes: list[int], by_token: bool) -> None:
    check(name, sizes, by_token)


@given(
    st.sampled_from(list(RECORDED)), st.lists(st.integers(1, K + 1), min_size=40, max_size=40), st.booleans(),
    st.integers(2, 9),
)  # fmt: skip
def test_deltas_that_are_read_together_are_those_read_one_by_one(
    name: str, sizes: list[int], by_token: bool, num_held: int
) -> None:
    """Their text, what belongs to it, and what drafting did for it; the first tokens are a prefill's."""
    first, *others = deltas_of(name, sizes)
    deltas = [first._replace(begin=Begin(5, None)), *others]
    (alone, several), (together, fewer) = read(deltas, by_token), read(deltas, by_token, num_held)
    assert told(fewer) == told(several) and len(fewer) == -(-len(several) // num_held)
    for of in (lambda gain: gain.token_ids, lambda gain: gain.logprobs, lambda gain: gain.pieces if by_token else []):
        assert [x for gain in fewer for x in of(gain)] == [x for gain in several for x in of(gain)]
    for field in ("num_tokens", "num_reasoning", "finish_reason", "begin", "speculation"):
        assert getattr(together, field) == getattr(alone, field), field


def test_the_recorded_answers_are_what_they_seem() -> None:
    said = {name: told(gains(name, [1] * 99, False)[1]) for name in RECORDED}
    assert said["plain"] == [Text("content", RECORDED["plain"])]
    assert said["characters"] == [Text("content", RECORDED["characters"])]
    assert said["reasoning"] == [Text("reasoning", "First é, then 🦅."), Text("content", "The answer → 42")]
    assert said["a call"][0] == Text("content", "I will add.") and len(said["a call"]) == 2
    assert [type(part) for part in said["both"]] == [Text, type(said["a call"][1])]
    assert said["a stop"] == [Text("content", "one two ")]
    assert said["half a stop"] == [Text("content", RECORDED["half a stop"])]
    assert said["no end of reasoning"] == [Text("reasoning", "I wonder </thin")]


def test_tokens_behind_a_stop_string_do_not_count() -> None:
    choice, found = gains("a stop", [4] * 99, by_token=False)
    kept = sum(len(gain.token_ids) for gain in found)
    assert choice.num_tokens == kept < len(ids_of("a stop"))
    assert tokenizer().decode(ids_of("a stop")[:kept]).endswith("STOP")


def test_a_prompt_counts_once_whatever_number_of_answers_it_has() -> None:
    """Three answers to each of two prompts, of which 7 and 2 tokens were cached."""
    choices = [choice_of() for _ in range(6)]
    for number, choice in enumerate(choices):
        begin = Begin(7 if number < 3 else 2, None)
        choice.take(Delta(number, [5], 0, "target", 0, 0, None, None, None, begin))
        choice.take(Delta(number, [6, 7], 1, "draft", K, 1, "length", None, None, None))
    wanted = Wanted(SamplingParams(seed=0), Chain(K), 3, 0, None, None, 0, None)
    usage = Job("id", "m", wanted, [[5] * 9, [5] * 4], choices).usage
    assert usage["prompt_tokens_details"]["cached_tokens"] == 7 + 2
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (13, 18, 31)
    details = usage["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (6, 6 * (K - 1))


def test_who_wrote_what() -> None:
    _, found = gains("plain", [4] * 99, by_token=True)
    pieces = [piece for gain in found for piece in gain.pieces]
    assert [piece.by for piece in found[0].pieces] == ["draft", "draft", "draft", "target"]
    assert "".join(part.text for piece in pieces for part in piece.parts if isinstance(part, Text)) == RECORDED["plain"]
    choice, _ = gains("plain", [4] * 99, by_token=True)
    assert choice.speculation.num_drafted == K * choice.speculation.num_steps
    assert choice.speculation.num_committed == choice.num_tokens
    assert choice.speculation.num_accepted == sum(confirmed for _, confirmed in choice.speculation.steps or ())


def test_tau_is_of_all_steps() -> None:
    """A prompt's first token is no step's; a step that drafts nothing is one as any other. What stands behind a stop
    string does not count."""
    choice, ids = choice_of(), ids_of("a stop")
    first, drafted, plain = ids[:1], ids[1:3], ids[3:4]
    choice.take(Delta(0, first, 0, "target", 0, 0, None, None, None, Begin(0, None)))
    choice.take(Delta(0, drafted, 1, "draft", K, 1, None, None, None, None))
    choice.take(Delta(0, plain, 0, "target", 0, 0, None, None, None, None))
    told = choice.speculation
    assert (told.num_steps, told.num_committed, told.num_drafts) == (2, 3, 1)
    choice.take(Delta(0, ids[4:], len(ids) - 5, "draft", 64, len(ids) - 5, None, None, None, None))
    assert choice.finish_reason == "stop" and (told.num_steps, told.num_committed) == (3, choice.num_tokens - 1)
    assert drafting_so_far(choice) == {
        "num_steps": 3, "num_committed": choice.num_tokens - 1, "num_drafted": K + 64, "num_accepted": len(ids) - 4,
    }  # fmt: skip
