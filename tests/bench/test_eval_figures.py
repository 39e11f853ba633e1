"""Figures of an evaluation: the rows of eval.json give them again; intervals, the best, GSM8K accuracy."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from aquiline.bench.eval.answers import AnsweredText, TurnRun
from aquiline.bench.eval.eval_plan import EvalPlan
from aquiline.bench.eval.eval_plot import _draw_positions
from aquiline.bench.eval.eval_report import EvalFacts, EvalReport
from aquiline.bench.eval.figures import Evaluated, best, ratio, suspicion, verdict
from aquiline.bench.plots import look
from aquiline.bench.results.intervals import Estimate
from aquiline.bench.results.result import ModelFacts
from aquiline.ledger import Ledger
from aquiline.metrics import Counters
from aquiline.text.questions import Question

FACTS = EvalFacts(ModelFacts("a", "b", "float32", "float32", False, None, 0), "toy", None, False, {})
TIMES = st.floats(0.5, 500)


@st.composite
def evaluations(draw: st.DrawFn) -> Evaluated:
    """Any runs of three settings, each with consistent counters."""
    plan = EvalPlan((2,), ("1x2x4",), lengths=(6, 12), temperatures=(0.0, 0.5), repeats=draw(st.integers(1, 2)))
    questions = [Question(i, draw(st.sampled_from("ab")), ("x",)) for i in range(draw(st.integers(1, 4)))]
    runs = []
    for temperature in plan.temperatures:
        for length in plan.lengths:
            for question in range(len(questions)):
                tokens = [draw(st.integers(0, 2))] + [1] * draw(st.integers(1, length - 1))  # repeats its 8-grams
                text = AnsweredText(temperature, length, question, 0, [1, 2, 3], tokens, "t", "length")
                for repeat in range(plan.repeats):
                    for setting, drafting in plan.settings.items():
                        counters, left = Counters(num_prefilled=1), len(tokens) - 1
                        while left:
                            accepted = draw(st.integers(0, min(drafting.max_depth, left)))
                            counters.add(drafting.max_nodes - 1, accepted, min(accepted + 1, left), accepted + 1 > left)
                            left -= min(accepted + 1, left)
                        runs.append(TurnRun(text, setting, repeat, draw(TIMES), draw(TIMES), 1.0, counters))
    return Evaluated(plan, questions, runs, [], [], Ledger(), "")


def document(found: Evaluated) -> Any:
    return json.loads(json.dumps(EvalReport(found, FACTS).document(), allow_nan=False))


@settings(max_examples=25)
@given(evaluations())
def test_every_figure_of_a_table_can_be_computed_from_the_rows(found: Evaluated) -> None:
    data = document(found)
    shown = [row for part in data["tables"].values() for row in part]
    several = len({q.category for q in found.questions}) > 1
    assert len(shown) == 3 * (4 + 1 + 2 * len({q.category for q in found.questions}) * several)
    for figure in shown:
        keys = ("temperature", "length", "category")
        group = [r for r in data["rows"] if all(figure[k] in (None, r[k]) for k in keys)]
        own = [r for r in group if r["setting"] == figure["setting"]]
        base = [r for r in group if r["setting"] == "baseline"]

        def total(rows: list[dict[str, Any]], *names: str) -> float:
            return sum(row[name] for row in rows for name in names)

        steps, committed = total(own, "num_steps"), total(own, "num_committed")
        assert committed == total(own, "num_tokens") - len(own), "the prompt's forward gave one token of each"
        assert figure["num_texts"] == len(own) and figure["num_tokens"] == total(own, "num_tokens")
        assert figure["num_questions"] == len({r["question"] for r in own})
        assert figure["tau"] == pytest.approx(committed / steps)
        assert figure["target_calls_per_token"] == pytest.approx(steps / committed)
        drafted = total(own, "num_draft_tokens")
        assert figure["acceptance_rate"] == pytest.approx(total(own, "num_accepted_tokens") / max(1, drafted))
        assert figure["fraction_ge2"] == pytest.approx(total(own, "num_ge2") / steps)
        depth = max(len(r["accepted_at"]) for r in own)
        at = [sum(r["accepted_at"][p] for r in own if p < len(r["accepted_at"])) / steps for p in range(depth)]
        assert figure["per_position"] == pytest.approx(at)
        assert figure["repeated_share"] == pytest.approx(total(own, "repeated_share") / len(own))
        assert figure["decode_tokens_per_s"] == pytest.approx(committed / total(own, "decode_ms") * 1e3)
        assert figure["seconds_per_text"] == pytest.approx(total(own, "decode_ms", "prefill_ms") / 1e3 / len(own))
        for name, parts in (("speedup", ("decode_ms",)), ("speedup_with_prefill", ("decode_ms", "prefill_ms"))):
            stated = figure[name]
            assert stated["value"] == pytest.approx(total(base, *parts) / total(own, *parts))
            numbers = {r["question"] for r in own}
            of = {q: [[r for r in rows if r["question"] == q] for rows in (base, own)] for q in numbers}
            each = [total(b, *parts) / total(o, *parts) for b, o in of.values()]
            assert (stated["low"] is None) == (len(numbers) == 1)
            if len(numbers) > 1:
                near = 1e-9
                assert min(each) - near <= stated["low"] <= stated["high"] <= max(each) + near
    for group in data["best"]:
        rows = [
            r for r in data["tables"]["by_length"] + data["tables"]["overall"]
            if (r["temperature"], r["length"]) == (group["temperature"], group["length"]) and r["setting"] != "baseline"
        ]  # fmt: skip
        assert max(r["speedup"]["value"] for r in rows) == group["speedup"]["value"]


def test_intervals_are_those_of_a_bootstrap() -> None:
    generator = np.random.default_rng(1)
    base = generator.uniform(5, 15, 40)
    own = base / generator.normal(2, 0.3, 40).clip(1)
    found = ratio(base, own)
    assert found is not None and found == ratio(base, own), "the seed is fixed"
    drawn = generator.integers(40, size=(4000, 40))
    low, high = np.quantile(base[drawn].sum(1) / own[drawn].sum(1), (0.025, 0.975))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)
    same = ratio(base, base / 2)
    assert same is not None and (same.value, same.low, same.high) == pytest.approx((2, 2, 2))
    assert ratio(base[:1], own[:1]) == Estimate(base[0] / own[0])
    assert ratio(np.zeros(3), np.zeros(3)) is None


def timed(*times: tuple[str, float, float]) -> Evaluated:
    """A plan's two settings on two questions, by decode times."""
    plan = EvalPlan((2, 3), lengths=(6,))
    runs = []
    for number, question in enumerate(zip(*(t[1:] for t in times), strict=True)):
        text = AnsweredText(
            0.0, 6, number, 0, [1], [1, 2, 3], f"The answer is {number + 1}.", "stop" if number else "length"
        )
        runs += [
            TurnRun(text, setting, 0, 0.0, time, time, Counters(num_steps=2, num_committed=2))
            for (setting, *_), time in zip(times, question, strict=True)
        ]
    questions = [Question(i, "math", ("?",), reference) for i, reference in enumerate(("so #### 1", "#### 7"))]
    return Evaluated(plan, questions, runs, [], [], Ledger(), "")


def test_the_best_is_named_and_no_gain_where_there_is_none() -> None:
    found = timed(("baseline", 10, 10), ("chain-2", 5, 5), ("chain-3", 6, 8))
    assert verdict(found.overall) == "best is chain-2, 2.00x"
    winner = best(found.overall)
    assert winner is not None and winner.setting == "chain-2"
    found = timed(("baseline", 10, 10), ("chain-2", 20, 20), ("chain-3", 12, 9))
    assert verdict(found.overall).startswith(
        "none is faster than the baseline; chain-3 comes nearest, 0.95x [0.83, 1.11]"
    )
    found = timed(("baseline", 10, 10), ("chain-2", 20, 20), ("chain-3", 12, 5))
    assert verdict(found.overall) == (
        "best is chain-3, 1.18x [0.83, 2.00], but its interval reaches down to the baseline"
    )
    assert not document(found)["best"][0]["is_faster"]


@pytest.mark.parametrize(
    ("tokens", "accepted", "is_doubted"),
    [
        ([1, 2, 1, 3, 4], 0, True),
        ([1, 2, 1, 3, 4], 2, True),  # 2 of 5 steps; always saying 1 is right in 2 of 5 tokens
        ([1, 2, 1, 3, 4], 3, False),
        ([1, 1, 1, 3, 4], 3, False),  # one token is most of the text, which says nothing of the draft
        ([], 0, False),
    ],
)
def test_a_draft_at_chance_is_doubted(tokens: list[int], accepted: int, is_doubted: bool) -> None:
    plan = EvalPlan((2,), ("1x2x4",), lengths=(6,))
    text = AnsweredText(0.0, 6, 0, 0, [1], tokens, "", "length")
    chain = Counters(num_steps=len(tokens), accepted_at=[accepted, accepted] if accepted else [])
    tree = Counters(num_steps=5, accepted_at=[5])  # a tree names several tokens at a place
    runs = [
        TurnRun(text, name, 0, 1.0, 1.0, 1.0, c) for name, c in zip(plan.settings, (chain, chain, tree), strict=True)
    ]
    said = suspicion(Evaluated(plan, [], runs, [], [], Ledger(), ""))
    assert (said is not None) == is_doubted
    if said:
        assert f"next token in {accepted / 5:.1%} of 5 steps" in said and "in 40.0%" in said
        causes = [said.index(cause) for cause in ("trained too little", "--capture", "for another target")]
        assert causes == sorted(causes), "likeliest first"


def test_gsm8k_accuracy_needs_references_of_that_form() -> None:
    found = timed(("baseline", 1, 1), ("chain-2", 1, 1), ("chain-3", 1, 1))
    (score,) = found.task_accuracy
    assert (score["num_correct"], score["num_questions"], score["num_cut"]) == (1, 2, 1)
    assert "GSM8K accuracy, 6 new tokens, temperature 0: 1/2 = 50.0% (1 answers were cut" in "\n".join(
        EvalReport(found, FACTS).notes()
    )
    for reference in (None, "7", "#### seven"):
        found.questions[1] = dataclasses.replace(found.questions[1], reference=reference)
        assert found.task_accuracy == []


def test_no_point_of_the_plot_is_cut() -> None:
    """A share may be 0 or 1: the marks at both ends lie within the axes."""
    figure = Figure(figsize=(12, 4.1), dpi=140)
    axes = figure.subplots(1, 3)[2]
    shares: Any = SimpleNamespace(setting="chain-2", length=64, counters=SimpleNamespace(per_position=[1.0, 0.0]))
    _draw_positions(axes, [shares, shares], {"chain-2": look(0)})
    (line,) = axes.lines
    box, radius = axes.get_window_extent(), line.get_markersize() / 2 * figure.dpi / 72
    for _, y in axes.transData.transform(line.get_xydata()):
        assert box.y0 <= y - radius and y + radius <= box.y1
