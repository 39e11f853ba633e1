"""`aquiline eval` below its command: what runs in which order, what is refused, figures that the rows give again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import TINY, engine_config, needs_native, tiny_models
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aquiline.backends.base import Backend, Drafts, Pending, RowEdits, StepInput, TokenMasks
from aquiline.bench.eval.answers import AnsweredText
from aquiline.bench.eval.eval_plan import EvalPlan
from aquiline.bench.eval.eval_report import EvalFacts, EvalReport, model_facts
from aquiline.bench.eval.evaluate import Evaluation
from aquiline.bench.eval.figures import Evaluated
from aquiline.bench.suite.simulated import ReadOutcome, SimulatedBackend
from aquiline.config import EngineConfig
from aquiline.engine.llm import LLM
from aquiline.errors import ResultError
from aquiline.spec.drafting import Dynamic
from aquiline.spec.registry import drafting_named
from aquiline.spec.tree import DraftTree
from aquiline.text.chat_template import ChatTemplate
from aquiline.text.questions import Question

LETTERS = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(90)}, unk_token="!"))
LETTERS.pre_tokenizer = pre_tokenizers.Split("", "isolated")
LETTERS.decoder = decoders.Fuse()
QUESTIONS = [
    Question("first", "two turns", ("abc", "defg")), Question(2, "one turn", ("hello",)),
    Question("third", "one turn", ("xyzzy",), system="sys"),
]  # fmt: skip
PLAN = EvalPlan((1, 3), ("1x2x5", "static"), lengths=(6, 12), temperatures=(0.0, 0.9), repeats=2)
SETTINGS = PLAN.settings


def tiny(
    config: EngineConfig | None = None, eos_token_ids: tuple[int, ...] = TINY.eos_token_ids, **replaced: Any
) -> LLM:
    loaded = dataclasses.replace(tiny_models(eos_token_ids=eos_token_ids), tokenizer=LETTERS, **replaced)
    return LLM.from_models(loaded, config or engine_config(1))


class Lossy(SimulatedBackend):
    """A backend whose verification is broken: it reports another token than the target's wherever it drafted."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, 1.0, TINY.vocab_size)

    def verify(
        self, step: StepInput, drafts: Drafts | DraftTree, masks: TokenMasks | None = None, edits: RowEdits = ()
    ) -> Pending:
        output = self.inner.verify(step, drafts, masks, edits).read()
        for decode, decoded in zip(step.decodes, output.decodes, strict=True):
            decoded.kept[-1] ^= decode.drafting.is_speculative
        return ReadOutcome(output)


def evaluation(llm: LLM, plan: EvalPlan = PLAN, questions: list[Question] = QUESTIONS, **given: Any) -> Evaluation:
    return Evaluation(llm, ChatTemplate(None, {}, LETTERS), questions, plan, **given)


def document(found: Evaluated) -> Any:
    text = json.dumps(EvalReport(found, facts()).document(), allow_nan=False)
    return json.loads(text)


def facts() -> EvalFacts:
    llm = tiny()
    return EvalFacts(model_facts(llm, None, None), "tiny", None, False, llm.models.system())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return evaluation(tiny(), answers=tmp_path_factory.mktemp("answers")).run()


def test_every_setting_runs_everything_and_takes_its_turn_at_going_first(found: Evaluated) -> None:
    turns, rounds = 4, 4 * 2 * 2 * 2
    names = list(SETTINGS)
    assert len(found.runs) == rounds * len(names)
    firsts = [found.runs[i].setting for i in range(0, len(found.runs), len(names))]
    assert firsts == [names[i % len(names)] for i in range(rounds)]
    for i in range(0, len(found.runs), len(names)):
        group = found.runs[i : i + len(names)]
        assert {run.setting for run in group} == set(names) and len({id(run.text) for run in group}) == 1
        assert all(run.counters.num_committed + 1 == len(run.text.token_ids) for run in group)
        assert {run.counters.num_steps for run in group if run.setting == "baseline"} == {
            len(group[0].text.token_ids) - 1
        }
    texts = {(r.text.temperature, r.text.length, r.text.question, r.text.turn) for r in found.runs}
    assert len(texts) == turns * 4


def test_an_answer_enters_the_next_turn(found: Evaluated) -> None:
    for temperature in PLAN.temperatures:
        for length in PLAN.lengths:
            own = [r.text for r in found.runs if (r.text.temperature, r.text.length) == (temperature, length)]
            first, second = (next(t for t in own if (t.question, t.turn) == (0, turn)) for turn in (0, 1))
            assert second.prompt_ids == LETTERS.encode(f"abc\n\n{first.text}\n\ndefg").ids
            system = next(t for t in own if t.question == 2)
            assert system.prompt_ids == LETTERS.encode("sys\n\nxyzzy").ids


def test_texts_end_at_eos_unless_told_otherwise() -> None:
    llm = tiny(eos_token_ids=tuple(range(0, 96, 4)))
    plan = dataclasses.replace(PLAN, temperatures=(0.9,), lengths=(20,), repeats=1, teacher_forced=False)
    stopped = [run.text for run in evaluation(llm, plan).run().runs]
    assert any(len(t.token_ids) < 20 for t in stopped), "one token in four ends a text"
    for text in stopped:
        assert all(t % 4 for t in text.token_ids[:-1]) and (text.token_ids[-1] % 4 == 0) == (
            text.finish_reason == "stop"
        )
    whole = evaluation(llm, dataclasses.replace(plan, ignore_eos=True)).run().runs
    assert {len(run.text.token_ids) for run in whole} == {20}


def test_settings_that_write_different_tokens_are_an_error_that_names_the_place() -> None:
    llm = tiny()
    llm.engine.backend = Lossy(llm.engine.backend)
    plan = EvalPlan((2,), lengths=(12,))
    with pytest.raises(
        ResultError, match=r"question 'first', turn 1, length 12, temperature 0: chain-2 and baseline"
    ) as e:
        evaluation(llm, plan).run()
    base = tiny().run([LETTERS.encode("abc").ids], drafting=SETTINGS["baseline"]).outputs[0].token_ids
    lossy = llm.run([LETTERS.encode("abc").ids], drafting=plan.settings["chain-2"]).outputs[0].token_ids
    place = next(i for i, (a, b) in enumerate(zip(base, lossy, strict=True), 1) if a != b)
    assert f"differ at output token {place}" in str(e.value)


def test_a_teacher_that_writes_something_else_is_an_error() -> None:
    work = evaluation(tiny(), EvalPlan((2,), lengths=(6,)))
    found = work.run()
    found.runs[0].text.token_ids[3] ^= 1
    with pytest.raises(ResultError, match="the teacher-forced run and the others differ at output token 4"):
        list(work._teach())


def test_what_does_not_fit_is_named_and_left_out_of_the_answers(tmp_path: Path) -> None:
    plan = EvalPlan((1,), lengths=(6, 12), ignore_eos=True)
    llm = tiny(dataclasses.replace(engine_config(1), max_context=24))
    counted: list[int] = []
    work = evaluation(llm, plan, answers=tmp_path, on_progress=counted.append)
    found = work.run()
    missed = [(found.questions[m.question].id, m.turn, m.length) for m in found.unfit]
    # turn 2 asks abc, the answer, defg, with a letter for each end of line: 3 + 2 + up to `length` + 2 + 4 tokens
    assert missed == [("first", 1, 12)]
    reason = found.unfit[0].reason
    assert reason.startswith("prompt of ") and reason.endswith(" tokens + length 12 exceeds the 24 positions there are")
    assert "1 conversations were cut short" in "\n".join(EvalReport(found, facts()).notes())
    assert document(found)["unfit"][0]["question_id"] == "first"
    assert sum(counted) == work.num_tokens - 12, "the bar counts what was left out, but for its judgement"
    ids = {file.name: [json.loads(line)["question_id"] for line in file.open()] for file in tmp_path.iterdir()}
    assert ids == {
        f"{setting}-{length}-t0.jsonl": ["first", 2, "third"] if length == 6 else [2, "third"]
        for setting in plan.settings for length in (6, 12)
    }  # fmt: skip


def test_nothing_that_fits_is_an_error() -> None:
    llm = tiny(dataclasses.replace(engine_config(1), max_context=14))
    with pytest.raises(ValueError, match=r"lengths=\[12\]: no question fits; prompt of 3 tokens \+ length 12 exceeds"):
        evaluation(llm, EvalPlan((1,), lengths=(12,))).run()


def test_a_pool_too_small_for_a_text_is_a_misfit() -> None:
    llm = tiny(dataclasses.replace(engine_config(1), num_pages=2))
    found = evaluation(llm, EvalPlan((1,), lengths=(6, 30))).run()
    assert {m.length for m in found.unfit} == {30} and "pages" in found.unfit[0].reason


def test_answers_are_eagles_rows_with_a_choice_per_repeat(tmp_path: Path) -> None:
    found = evaluation(tiny(), answers=tmp_path, model_id="toy").run()
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == sorted(f"{s}-{n}-t{t}.jsonl" for s in SETTINGS for n in (6, 12) for t in ("0", "0.9"))
    rows = [json.loads(line) for line in (tmp_path / "chain-3-12-t0.9.jsonl").open()]
    assert [row["question_id"] for row in rows] == ["first", 2, "third"] and rows[0][
        "model_id"
    ] == "toy-chain-3-12-t0.9"
    for number, row in enumerate(rows):
        own = [
            run for run in found.runs
            if (run.setting, run.text.question, run.text.length) == ("chain-3", number, 12) and run.text.temperature
        ]  # fmt: skip
        for choice in row["choices"]:
            runs = [run for run in own if run.repeat == choice["index"]]
            assert choice["turns"] == [run.text.text for run in runs]
            assert choice["new_tokens"] == [len(run.text.token_ids) for run in runs]
            assert choice["idxs"] == [run.counters.num_steps for run in runs]
            assert choice["wall_time"] == [run.total_ms / 1e3 for run in runs]
        assert len(row["choices"]) == 2


@needs_native
def test_simulated_tau_stands_beside_the_same_real_tau(found: Evaluated) -> None:
    taught = document(found)["teacher_forced"]
    assert [(t["temperature"], t["length"]) for t in taught] == [(0.0, 12), (0.9, 12)]
    for t in taught:
        real = t["real_tau"]
        assert real[1] is real[3] is real[4] is None and None not in (real[0], real[2])
        assert [real[0], real[2]] == [t["simulated_tau"][0], t["simulated_tau"][2]]


def test_texts_of_one_token_have_no_speed() -> None:
    llm = tiny(eos_token_ids=tuple(range(96)))
    found = evaluation(llm, EvalPlan((1,), lengths=(6,))).run()
    data = document(found)
    assert data["tables"]["by_length"][1]["speedup"] is None and data["best"][0]["setting"] is None
    assert data["tables"]["by_length"][1]["speedup_with_prefill"]["value"] > 0
    assert data["teacher_forced"][0]["simulated_tau"] == [None] * 5
    assert "every text ended at its first token" in EvalReport(found, facts()).markdown()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"lengths": ()}, "lengths="), ({"lengths": (6, 6)}, r"lengths=\[6, 6\]: give each value once"),
        ({"lengths": (50, 1)}, "lengths=1: must be at least 2"), ({"temperatures": (-1.0,)}, "temperature=-1.0"),
        ({"temperatures": (0.0, 0.0)}, "temperatures="), ({"repeats": 0}, "repeats=0"), ({"seed": -1}, "seed=-1"),
    ],
    ids=str,
)  # fmt: skip
def test_plans_that_cannot_be(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EvalPlan(**changed)


def test_settings_by_name() -> None:
    assert list(EvalPlan().settings) == ["baseline", "chain-3", "tree-2x2x6"]
    assert EvalPlan().settings["tree-2x2x6"] == drafting_named("dynamic")
    assert list(EvalPlan((5, 1)).settings) == ["baseline", "chain-5", "chain-1"]
    assert EvalPlan((), ("4x8x32", "static")).settings == {
        "baseline": drafting_named("none"), "tree-4x8x32": Dynamic(4, 8, 32),
        "tree-static": drafting_named("static"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("chains", "trees", "named"),
    [
        ((), ("4x8",), r"trees='4x8': must be DEPTHxTOP_KxNODES"), ((), ("-1x2x3",), "trees='-1x2x3': must be"),
        ((), ("1x1x9",), r"trees='1x1x9': num_nodes=9: must be between 2 and 3"),
        ((17,), (), "num_spec_tokens=17"), ((0,), (), "num_spec_tokens=0"),
        ((3, 3), (), r"num_spec_tokens=\[3, 3\]: give each value once"), ((), ("static", "static"), "trees="),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(chains: tuple[int, ...], trees: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EvalPlan(chains, trees)


def test_engines_that_would_help_one_run_over_another_are_refused() -> None:
    for config in (engine_config(1, prefix_cache=True), engine_config(2)):
        with pytest.raises(ValueError, match=r"max_batch=1, prefix_cache=False"):
            evaluation(tiny(config))
    with pytest.raises(ValueError, match=r"max_batch=2, prefix_cache=False"):
        evaluation(tiny(engine_config(1)), dataclasses.replace(PLAN, batch=2))


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_questions_that_run_together_get_the_same_answers(found: Evaluated, batch: int, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, batch=batch, teacher_forced=False)
    together = evaluation(tiny(engine_config(batch)), plan, answers=tmp_path).run()
    assert {(r.setting, r.repeat, *_named(r.text)) for r in together.runs} == {
        (r.setting, r.repeat, *_named(r.text)) for r in found.runs
    }
    first = [r for r in together.runs if (r.setting, r.repeat, r.text.turn) == ("baseline", 0, 0)]
    shares = {(r.text.temperature, r.text.length, r.text.question // batch): (r.prefill_ms, r.decode_ms) for r in first}
    assert all(
        (r.prefill_ms, r.decode_ms) == shares[r.text.temperature, r.text.length, r.text.question // batch]
        for r in first
    )
    assert min(min(pair) for pair in shares.values()) > 0
    assert document(together)["plan"]["batch"] == batch
    assert all(len(file.read_text().splitlines()) == len(QUESTIONS) for file in tmp_path.iterdir())


def _named(text: AnsweredText) -> tuple[Any, ...]:
    return text.temperature, text.length, text.question, text.turn, tuple(text.token_ids), text.finish_reason


def test_a_draft_narrower_than_a_tree_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="draft_top_k=64: the draft's vocabulary has 48"):
        evaluation(tiny(), EvalPlan((), ("0x64x5",)))
