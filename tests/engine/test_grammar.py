"""Text that follows a grammar: it does, and it is the same however it is drafted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import needs_native
from tests.engine.grammars import EXPRESSIONS, PERSON, STRUCTURED, follows
from tests.text.families import byte_tokenizer
from tokenizers import Tokenizer

from aquiline.config import Boundary, EngineConfig, SamplingParams, Structured
from aquiline.engine import grammar
from aquiline.engine.grammar import Grammars
from aquiline.engine.llm import LLM, Output
from aquiline.engine.model import LoadedModels
from aquiline.errors import NumericalError
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static
from aquiline.spec.lookup import Lookup
from aquiline.text.parsing import Parsing
from aquiline.text.tokenizer import load_tokenizer

pytest.importorskip("xgrammar", reason="not installed: xgrammar")
pytestmark = needs_native

PLAIN = NoDraft()
DRAFTINGS: list[Drafting] = [
    Chain(1), Chain(4), Static(), Dynamic(depth=5, top_k=10, num_nodes=60), Lookup(), Adaptive(),
]  # fmt: skip
PROMPT = '{"name": "Ada", "age": 36, "tags": []}\n'
FREE = "def fibonacci(n):\n"
ENGINE = EngineConfig(max_batch=8, max_context=512, page_size=16, calibration=False, check=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("bundled", "bundled", engine=ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def models(llm: LLM) -> LoadedModels:
    return llm.models


def sampling(
    structured: Structured | None, temperature: float = 0.8, seed: int = 0, **settings: object
) -> SamplingParams:
    given = {"max_tokens": 40, "temperature": temperature, "seed": seed, "structured": structured} | settings
    return SamplingParams(**given)  # type: ignore[arg-type]


def said(outputs: list[Output]) -> list[tuple[list[int], str]]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


def mixed(cases: list[Structured], temperature: float) -> tuple[list[str], list[SamplingParams]]:
    """A batch in which every third request is free."""
    wanted = list(itertools.chain.from_iterable((*cases[i : i + 2], None) for i in range(0, len(cases), 2)))
    prompts = [FREE if structured is None else PROMPT for structured in wanted]
    return prompts, [sampling(structured, temperature, seed) for seed, structured in enumerate(wanted)]


def check_same(llm: LLM, cases: list[Structured], temperature: float, draftings: list[Drafting]) -> None:
    prompts, params = mixed(cases, temperature)
    with LLM.from_models(llm.models, dataclasses.replace(ENGINE, max_batch=1), PLAIN) as alone:
        expected = alone.generate(prompts, params)
    ended = [
        (output.text, own.structured)
        for output, own in zip(expected, params, strict=True)
        if own.structured is not None and output.finish_reason == "stop"
    ]
    assert len(ended) >= len(cases) / 2 and all(follows(*pair) for pair in ended), ended
    for drafting in draftings:
        found = llm.generate(prompts, params, drafting=drafting)
        assert said(found) == said(expected), drafting
        assert llm.engine.pool.num_available == llm.engine.pool.num_pages


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constrained_text_is_the_same_with_every_drafter(llm: LLM, temperature: float) -> None:
    check_same(llm, STRUCTURED[::11], temperature, [Chain(4), Dynamic(), Lookup(), Adaptive()])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_constrained_texts_are_the_same_with_every_drafter(llm: LLM, temperature: float) -> None:
    assert len(STRUCTURED) >= 60
    check_same(llm, STRUCTURED, temperature, DRAFTINGS)


@pytest.mark.parametrize(
    "changed",
    [{"num_pages": 7}, {"late_reads": True}, pytest.param({"prefix_cache": False}, marks=pytest.mark.rare)],
    ids=str,
)
def test_preemption_late_reads_and_prefix_hits_change_nothing(llm: LLM, changed: dict[str, object]) -> None:
    prompts, params = mixed(STRUCTURED[:6], 0.8)
    expected = llm.generate(prompts, params, drafting=PLAIN)
    config = dataclasses.replace(ENGINE, **changed)  # type: ignore[arg-type]
    with LLM.from_models(llm.models, config, Adaptive()) as other:
        for drafting in (Dynamic(), Adaptive()):
            result = other.run(prompts, params, drafting=drafting)
            assert said(result.outputs) == said(expected), drafting
            assert result.summary.num_preemptions > 0 or "num_pages" not in changed


@pytest.mark.rare
def test_the_torch_path_follows_grammars_too(llm: LLM) -> None:
    prompts, params = mixed([Structured(json=PERSON), Structured(regex=EXPRESSIONS[1])], 0.8)
    with LLM("bundled", "bundled", engine=ENGINE, device="cpu:0") as torch_llm:
        assert torch_llm.models.pair.name == "torch"
        expected = torch_llm.generate(prompts, params, drafting=PLAIN)
        for drafting in (Chain(4), Dynamic(), Lookup()):
            assert said(torch_llm.generate(prompts, params, drafting=drafting)) == said(expected), drafting
    assert all(follows(o.text, p.structured) for o, p in zip(expected, params, strict=True) if p.structured)


def test_forced_text_is_drafted_and_needs_no_draft_model(llm: LLM) -> None:
    names = ["description", "return_value"]
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}, "required": names}
    params = sampling(Structured(json=schema))
    plain, drafted = (llm.generate([PROMPT], params, drafting=way)[0] for way in (PLAIN, Lookup()))
    assert drafted.token_ids == plain.token_ids and plain.metrics.num_steps == len(plain.token_ids) - 1
    assert drafted.sources.count("lookup") == drafted.metrics.num_accepted_tokens > len(drafted.token_ids) / 3


@pytest.mark.parametrize("choice", [("x",), ("true",), ("a", "ab"), ("import os, sys, json, time",)])
def test_an_end_within_forced_text_and_answers_of_one_token(llm: LLM, choice: tuple[str, ...]) -> None:
    params = sampling(Structured(choice=choice))
    outputs = [llm.generate([PROMPT], params, drafting=way)[0] for way in (PLAIN, *DRAFTINGS)]
    assert {output.text for output in outputs} <= set(choice) and {o.finish_reason for o in outputs} == {"stop"}
    assert len({tuple(output.token_ids) for output in outputs}) == 1


@pytest.mark.parametrize("way", [Chain(4), Dynamic(depth=5, top_k=10, num_nodes=60), Lookup(), Adaptive()], ids=str)
def test_a_grammar_may_begin_after_a_marker_of_the_models_own(llm: LLM, way: Drafting) -> None:
    newline = llm.encode("a\n")[-1]
    params = sampling(Structured(json=PERSON, boundary=Boundary((newline,))), max_tokens=120)

    def output(drafting: Drafting, seed: int) -> list[int]:
        own = dataclasses.replace(params, seed=seed)
        [found] = llm.generate([FREE], own, drafting=drafting)
        _, _, answer = found.text.partition("\n")
        assert newline not in found.token_ids or answer.startswith('{"name": "')
        return found.token_ids

    plain = [output(PLAIN, seed) for seed in range(3)]
    assert [output(way, seed) for seed in range(3)] == plain
    assert any(newline in tokens for tokens in plain), "no marker has come"


def rows_apart(models: LoadedModels, compiled: str, boundary: Boundary | None, path: list[int]) -> np.ndarray | None:
    """The mask after a path of kept tokens; None if the grammar refuses it or it has ended."""
    ends = models.end_ids(SamplingParams())
    constraint = models.grammars.constraint(compiled, ends, boundary)
    row = np.full((1, constraint.num_words), -1, np.int32)
    for token in path:
        constraint.fill_tree([0], [0], row)
        if token in ends or not row[0, token // 32] >> token % 32 & 1:
            return None
        constraint.accept([token])
        row[:] = -1
    constraint.fill_tree([0], [0], row)
    return row[0]


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_node_is_masked_as_if_its_path_had_been_kept(models: LoadedModels, data: st.DataObject) -> None:
    """Trees of tokens that are mostly legal, with a boundary at any depth of any branch, or none."""
    draw = data.draw
    ends, marker = models.end_ids(SamplingParams()), 77
    boundary = draw(st.sampled_from([None, Boundary((marker,)), Boundary((marker, 78), end=79)]))
    compiled = models.grammars.compile(Structured(json=PERSON), ends)
    constraint = models.grammars.constraint(compiled, ends, boundary)
    tokenizer = models.tokenizer
    assert tokenizer is not None
    legal = tokenizer.encode('{"name": "x", "age": 3, "tags": ["a"]}', add_special_tokens=False).ids
    words = [*legal, marker, 78, 79, *ends]
    num_kept = draw(st.integers(0, 8)) if boundary is None else 0
    constraint.accept(legal[:num_kept])
    tokens, parents, paths = [0], [0], [legal[:num_kept]]
    for _ in range(draw(st.integers(0, 14))):
        parent = draw(st.integers(max(0, len(tokens) - 3), len(tokens) - 1))
        place = sum(token not in (marker, 78, 79) for token in paths[parent])
        token = draw(st.sampled_from([legal[place % len(legal)]] * 6 + words))
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    rows = np.full((len(tokens), constraint.num_words), -1, np.int32)
    standing = constraint.fill_tree(tokens, parents, rows)
    for node, path in enumerate(paths):
        own = rows_apart(models, compiled, boundary, path)
        above = rows_apart(models, compiled, boundary, path[:-1])
        is_end = node > 0 and path[-1] in ends
        may_end = is_end and above is not None and bool(above[path[-1] // 32] >> path[-1] % 32 & 1)
        if boundary is not None and not ends.isdisjoint(path):
            continue  # an end above the boundary ends the answer; what follows it is never kept
        if node == 0 or own is not None or may_end:
            assert node in standing, (node, path)
            assert own is None or (rows[node] == own).all()
        else:
            assert node not in standing, (node, path)


def thinking() -> Tokenizer:
    """The bundled tokenizer with tokens of reasoning behind its own."""
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("ask<think>\n", "why</think>"), ("ask<think>\n\n</think>\n\n", ""), ("ask", ""),
        ("ask", "<think>why\n</think>"), ("ask", "<think></think>"),
    ],
)  # fmt: skip
def test_a_grammar_begins_after_the_reasoning_that_prompt_or_answer_began(prompt: str, answer: str) -> None:
    tokenizer = thinking()
    grammars, ends = Grammars(tokenizer, tokenizer.get_vocab_size() + 30), frozenset({0})
    think, end_think = (tokenizer.token_to_id(word) for word in ("<think>", "</think>"))
    boundary = Parsing(thinks=True).boundary(tokenizer)
    assert boundary == Boundary((end_think,), opener=think)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    constraint = grammars.constraint(grammars.compile(Structured(regex="[0-9]+"), ends), ends, boundary, ids(prompt))
    row = np.full(constraint.num_words, -1, np.int32)

    def allowed(*tokens: int) -> list[bool]:
        return [bool(row[token // 32] >> token % 32 & 1) for token in tokens]

    digit, letter = ids("7")[0], ids("a")[0]
    constraint.fill_first(row)
    has_begun = "<think>" in prompt and "</think>" not in prompt
    may_begin = "<think>" not in prompt
    assert allowed(digit, letter, think) == [True, has_begun, has_begun or may_begin]
    constraint.accept(ids(answer))
    row[:] = -1
    constraint.fill_tree([0], [0], row[None])
    assert allowed(digit, letter, think) == [True, False, False] or (may_begin and not answer)
    constraint.accept([digit])
    constraint.fill_tree([0], [0], row[None])
    assert allowed(digit, letter, 0) == [True, False, True] and constraint.failure is None


def test_reasoning_whose_marks_are_no_tokens_is_refused(models: LoadedModels) -> None:
    assert models.tokenizer is not None
    with pytest.raises(ValueError, match="begins after </think>, which is no token"):
        Parsing(thinks=True).boundary(models.tokenizer)


def test_harmonys_grammar_begins_in_the_final_channel() -> None:
    tokenizer = byte_tokenizer()
    boundary = Parsing.of("<|channel|>", tokenizer).boundary(tokenizer)
    grammars, ends = Grammars(tokenizer, tokenizer.get_vocab_size()), frozenset({tokenizer.token_to_id("<|return|>")})
    constraint = grammars.constraint(grammars.compile(Structured(regex="[0-9]+"), ends), ends, boundary)
    before = "<|channel|>analysis<|message|>final 7<|end|><|start|>assistant<|channel|>final <|constrain|>json"
    tokens = [0, *tokenizer.encode(before + "<|message|>7a", add_special_tokens=False).ids]
    rows = np.full((len(tokens), constraint.num_words), -1, np.int32)
    standing = constraint.fill_tree(tokens, [0, *range(len(tokens) - 1)], rows)
    assert standing == [*range(len(tokens) - 1)], "all but the letter in the answer"
    assert (rows[: len(tokens) - 3] == -1).all() and (rows[len(tokens) - 3] != -1).any()


def test_special_tokens_and_padding_are_never_drawn_and_ends_only_at_the_end() -> None:
    tokenizer, ends = thinking(), frozenset({0})
    tokenizer.add_special_tokens(["<|mark|>"])
    special = tokenizer.token_to_id("<|mark|>")
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size() + 30)
    constraint = grammars.constraint(grammars.compile(Structured(regex='"[^"]*"'), ends), ends)
    row = np.zeros((1, constraint.num_words), np.int32)

    def allowed() -> set[int]:
        constraint.fill_tree([0], [0], row)
        return set(np.flatnonzero(np.unpackbits(row[0].view(np.uint8), bitorder="little")).tolist())

    quote = tokenizer.encode('"', add_special_tokens=False).ids
    constraint.accept(quote)
    inside = allowed()
    assert len(inside) > 2000 and not inside & {special, *ends}
    assert not inside & set(range(tokenizer.get_vocab_size(), grammars.vocab_size))
    constraint.accept(quote)
    assert allowed() & set(range(grammars.vocab_size)) == ends


def test_a_stop_token_that_is_text_ends_the_answer_only_where_the_grammar_may_stop(llm: LLM) -> None:
    digit = llm.encode("7")[-1]
    params = sampling(Structured(regex="[0-9]{6}"), stop_token_ids=(digit,))
    texts = {llm.generate([PROMPT], dataclasses.replace(params, seed=seed))[0].text for seed in range(8)}
    assert all(len(text) >= 6 and "7" not in text for text in texts)


def test_a_grammar_that_fails_ends_its_own_request_alone(llm: LLM) -> None:
    engine = llm.engine
    params = sampling(Structured(regex="[a-z]{30,40}"), max_tokens=60)
    good, bad = (engine.add(llm.request(name, PROMPT, params, Chain(4))) for name in ("good", "bad"))
    assert bad.constraint is not None
    while len(bad.output_ids) < 3:
        engine.step()
    bad.constraint.accept(llm.encode("7")[-1:])  # which the grammar refuses
    while engine.is_busy:
        engine.step()
    assert bad.finish_reason == "error" and "structured: the grammar refuses token" in (bad.error or "")
    assert good.finish_reason == "stop" and follows(good.text, Structured(regex="[a-z]{30,40}"))


def test_a_grammar_that_takes_ever_longer_to_follow_ends_its_own_request_alone(llm: LLM) -> None:
    engine, letter = llm.engine, llm.encode("a")[-1]
    params = sampling(Structured(regex="(a*)*b"), max_tokens=480, logit_bias={letter: 100})
    bad = engine.add(llm.request("bad", PROMPT, params, PLAIN))
    good = engine.add(llm.request("good", PROMPT, sampling(Structured(regex="[a-z]{300}"), max_tokens=400), PLAIN))
    while engine.is_busy:
        engine.step()
    assert bad.finish_reason == "error" and "structured: the grammar took too long to follow" in (bad.error or "")
    assert 10 < len(bad.output_ids) < 480 and good.finish_reason == "stop"


def test_compiled_grammars_are_kept_by_what_they_say_and_few_of_them(models: LoadedModels) -> None:
    tokenizer, ends = models.tokenizer, frozenset({0})
    assert tokenizer is not None
    grammars = Grammars(tokenizer, models.vocab_size)
    texts = [grammars.compile(Structured(regex=f"a{{{number}}}"), ends) for number in range(1, grammar.MAX_KEPT + 3)]
    first = grammars._read(texts[0], ends)
    assert grammars._read("".join([texts[0][:1], texts[0][1:]]), ends) is first, "an equal text"
    for text in (*texts[1:], texts[0]):
        grammars.constraint(text, ends)
    assert len(grammars._kept) == grammar.MAX_KEPT and grammars._read(texts[0], ends) is not first
    assert sum(len(digest) for digest, _ in grammars._kept) == 32 * grammar.MAX_KEPT, "not by their texts"


def test_what_costs_little_is_checked_before_a_grammar_is_compiled(llm: LLM) -> None:
    bad = Structured(regex="(")
    with pytest.raises(ValueError, match="exceeds the 512 positions"):
        llm.request(0, PROMPT, sampling(bad, max_tokens=600))
    with pytest.raises(ValueError, match="prompt token 9999: must be in"):
        llm.request(0, [9999], sampling(bad))
    request = dataclasses.replace(llm.request(0, PROMPT, sampling(Structured(regex="a"))), grammar=None)
    with pytest.raises(ValueError, match="structured needs its compiled grammar"):
        llm.engine.add(request)


def test_rules_come_before_the_grammar_and_a_row_without_tokens_is_the_requests_error(llm: LLM) -> None:
    only = sampling(Structured(choice=("x",)), min_tokens=5)
    with pytest.raises(NumericalError, match="min_tokens and structured leave any token"):
        llm.generate([PROMPT], only, drafting=Chain(4))
    no = llm.encode("no")[-1]
    params = sampling(Structured(regex="yes|no"), logit_bias={no: -np.inf})
    assert {llm.generate([PROMPT], dataclasses.replace(params, seed=s))[0].text for s in range(4)} <= {"yes", "no"}


@pytest.mark.parametrize(
    ("structured", "why"),
    [
        (Structured(json={"type": "objekt"}), 'structured.json=.*Unsupported type "objekt"'),
        (Structured(json="{"), "json='{': is not JSON"),
        (Structured(regex="(a"), r"structured.regex='\(a': Regex parsing error.*not closed"),
        (Structured(grammar="root ::= "), "structured.grammar=.*EBNF parser error at line 1"),
        (Structured(structural_tag={"type": "x"}), "structured.structural_tag="),
        (Structured(json={"not": {"type": "null"}}), "json: not at #: is not supported"),
        (Structured(json={"type": "object", "required": ["a"]}), "json: required at #: 'a' is not among"),
        (Structured(json={"type": "array", "items": {"allOf": [{}, {}]}}), "json: allOf at #/items: "),
        (Structured(json={"anyOf": [{"type": "null"}], "minimum": 3}), "json: minimum at #: is not .* beside anyOf"),
        (Structured(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "json: oneOf at #: two of its"),
        (Structured(json={"$ref": "http://other"}), r"json: \$ref at #: "),
        (Structured(json={"type": "string", "pattern": "a", "maxLength": 3}), "json: pattern at #: .*maxLength"),
        (Structured(regex="a" * 2**17), "structured.regex: has 131072 characters"),
        (Structured(regex="(?=a)b"), r"structured.regex='\(\?=a\)b': \(\?=\.\.\.\) is not supported"),
        (Structured(structural_tag={"format": {"type": "regex", "pattern": "a^b"}}), r"structured.regex='a\^b': \^ is"),
        (Structured(json='{"$ref": "#"}'), "no text follows it|Circular"),  # by the version of the library
        (Structured(grammar="root ::= root"), "no text follows it"),
    ],
)  # fmt: skip
def test_what_no_grammar_expresses_is_refused_by_name(llm: LLM, structured: Structured, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        llm.generate([PROMPT], sampling(structured))


def test_a_grammar_that_is_too_large_once_compiled_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_COMPILED", 1000)
    with pytest.raises(ValueError, match=r"structured\.json=.*its grammar takes [0-9]+ bytes; at most 1000"):
        llm.generate([PROMPT], sampling(Structured(json=PERSON)))


def test_fields_of_structured_output_are_checked() -> None:
    for fields, why in (
        ({}, "structured=.*give one of json, regex"), ({"regex": "a", "choice": ["b"]}, "structured="),
        ({"regex": ""}, "regex=''"), ({"json": False}, "json=False"), ({"jsn": 1}, "structured=.*its fields are"),
        ({"choice": ["a", ""]}, "choice="),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            SamplingParams(structured=fields)  # type: ignore[arg-type]
    assert SamplingParams(structured={"json": True}).structured == Structured(json={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="drop ignore_eos"), LLM("bundled", drafting=PLAIN, engine=ENGINE) as llm:
        llm.request(0, PROMPT, sampling(Structured(regex="a"), ignore_eos=True))
