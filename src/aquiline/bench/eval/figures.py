"""Figures of an evaluation: speedups with their intervals, acceptance, accuracy, the best setting. Derived here, once.

Times are paired: all settings write the same tokens, so a setting's speedup over a group of runs is the baseline's
decode time on these runs divided by the setting's own. The interval says how much the speedup depends on the choice of
questions (percentile bootstrap, fixed seed): questions are drawn anew RESAMPLES times, with all their turns and
repeats, and the middle 95 % of the ratios form the interval. It is too narrow for few questions. It covers neither
other machines nor the choice of the best of many settings.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aquiline.bench.eval.eval_plan import Evaluated, TeacherForced, TurnRun
from aquiline.bench.eval.gsm8k import final_number, is_correct
from aquiline.bench.suite.suite_plan import BASELINE
from aquiline.metrics import Counters, mean, repeated_share

RESAMPLES = 2000
BLOCK = 100
"""Resamples made at once, which bounds memory for large data sets."""
GSM8K_MARK = "####"
"""What precedes the number in a reference of GSM8K."""

Times = NDArray[np.float64]


@dataclass(frozen=True)
class SpeedupRatio:
    """A ratio and its 95 % interval over questions; no interval for one question."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_above_one(self) -> bool:
        """Whether the whole interval is above 1; without an interval, whether the value is."""
        return (self.value if self.low is None else self.low) > 1

    def __str__(self) -> str:
        is_known = self.low is not None and self.high is not None and self.low < self.high
        interval = f" [{self.low:.2f}, {self.high:.2f}]" if is_known else ""
        return f"{self.value:.2f}x{interval}"


@dataclass(frozen=True)
class Figures:
    """One setting over a group of runs; temperature, length and category are None where the group has all of them.

    speedup compares the time of decode steps; speedup_with_prefill includes the prompts. None if no decode step was
    run, because every text ended at its first token."""

    temperature: float | None
    length: int | None
    category: str | None
    setting: str
    num_questions: int
    num_texts: int
    num_tokens: int
    prefill_ms: float
    decode_ms: float
    counters: Counters
    repeated_share: float
    speedup: SpeedupRatio | None
    speedup_with_prefill: SpeedupRatio | None

    @property
    def seconds_per_text(self) -> float:
        """Mean time of one text, prompt and output."""
        return (self.prefill_ms + self.decode_ms) / 1e3 / self.num_texts

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens committed by decode steps per second of decode steps."""
        return self.counters.num_committed / self.decode_ms * 1e3 if self.decode_ms else 0.0


@dataclass(frozen=True)
class TaskAccuracy:
    """GSM8K, first turns. num_correct: answers whose number is the reference's; num_questions: all answers; num_cut:
    answers that ended because they reached their length."""

    temperature: float
    length: int
    num_correct: int
    num_questions: int
    num_cut: int


@dataclass(frozen=True)
class Tables:
    """by_length: one group per temperature and length; by_category: per temperature and category, if there are
    several; overall: all runs. In every group the baseline stands first."""

    by_length: list[list[Figures]]
    by_category: list[list[Figures]]
    overall: list[Figures]
    task_accuracy: list[TaskAccuracy]


def tables(found: Evaluated) -> Tables:
    """Every figure of an evaluation. Groups without a run are left out."""
    plan = found.plan
    categories = list(dict.fromkeys(question.category for question in found.questions))
    lengths = [figures(found, t, length) for t in plan.temperatures for length in plan.lengths]
    split = [figures(found, t, None, c) for t in plan.temperatures for c in categories if len(categories) > 1]
    scores = [_task_accuracy(found, t, length) for t in plan.temperatures for length in plan.lengths]
    return Tables(
        [group for group in lengths if group], [group for group in split if group], figures(found),
        [score for score in scores if score is not None],
    )  # fmt: skip


def figures(
    found: Evaluated, temperature: float | None = None, length: int | None = None, category: str | None = None
) -> list[Figures]:
    """The figures of every setting over the runs of one temperature, length and category, or of all."""
    runs: dict[str, list[TurnRun]] = {}
    for run in found.runs:
        own = (run.text.temperature, run.text.length, found.questions[run.text.question].category)
        wanted = (temperature, length, category)
        if all(w is None or w == o for w, o in zip(wanted, own, strict=True)):
            runs.setdefault(run.setting, []).append(run)
    if not runs:
        return []
    base = runs[BASELINE]
    repeated = mean([repeated_share(run.text.token_ids) for run in base])
    group = []
    for setting in found.plan.settings:
        own_runs, counters = runs[setting], Counters()
        for run in own_runs:
            counters.merge(run.counters)
        group.append(Figures(
            temperature, length, category, setting,
            num_questions=len({run.text.question for run in own_runs}),
            num_texts=len(own_runs),
            num_tokens=sum(len(run.text.token_ids) for run in own_runs),
            prefill_ms=sum(run.prefill_ms for run in own_runs),
            decode_ms=sum(run.decode_ms for run in own_runs),
            counters=counters,
            repeated_share=repeated,
            speedup=ratio(_by_question(base), _by_question(own_runs)),
            speedup_with_prefill=ratio(_by_question(base, True), _by_question(own_runs, True)),
        ))  # fmt: skip
    return group


def _by_question(runs: list[TurnRun], with_prefill: bool = False) -> Times:
    sums: dict[int, float] = {}
    for run in runs:
        time = run.decode_ms + (run.prefill_ms if with_prefill else 0.0)
        sums[run.text.question] = sums.get(run.text.question, 0.0) + time
    return np.array([sums[question] for question in sorted(sums)])


def ratio(base: Times, own: Times) -> SpeedupRatio | None:
    """sum(base) / sum(own) of paired times [Q], one per question, with its bootstrap interval. None if either sum is
    0."""
    if not base.sum() or not own.sum():
        return None
    value = float(base.sum() / own.sum())
    if len(base) < 2:
        return SpeedupRatio(value)
    generator, shares = np.random.default_rng(0), np.full(len(base), 1 / len(base))
    ratios = []
    for _ in range(RESAMPLES // BLOCK):
        counts = generator.multinomial(len(base), shares, size=BLOCK)  # how often each question is drawn
        times = counts @ own
        ratios += ((counts @ base)[times > 0] / times[times > 0]).tolist()
    low, high = np.quantile(ratios, (0.025, 0.975))
    return SpeedupRatio(value, float(low), float(high))


def real_tau(found: Evaluated, taught: TeacherForced) -> list[float | None]:
    """For each place k from 1, the served tau of a chain of k on the texts that were judged; None if no chain of that
    length ran."""
    chains, places = found.plan.chains, range(1, len(taught.accuracy.marginal) + 1)
    group = {f.setting: f.counters.tau for f in figures(found, taught.temperature, taught.length)}
    return [group[chains[k]] if k in chains else None for k in places]


def best(group: list[Figures]) -> Figures | None:
    """The setting of a group with the highest speedup, other than the baseline. None if no time was measured."""
    drafted = [(f.speedup.value, f) for f in group if f.setting != BASELINE and f.speedup is not None]
    return max(drafted, key=lambda pair: pair[0])[1] if drafted else None


def verdict(group: list[Figures]) -> str:
    """The best setting of a group in words; says so if none is faster than the baseline."""
    winner = best(group)
    if winner is None or winner.speedup is None:
        return "no decode step was run: every text ended at its first token"
    if winner.speedup.value <= 1:
        return f"none is faster than the baseline; {winner.setting} comes nearest, {winner.speedup}"
    doubt = "" if winner.speedup.is_above_one else ", but its interval reaches down to the baseline"
    return f"best is {winner.setting}, {winner.speedup}{doubt}"


def suspicion(found: Evaluated) -> str | None:
    """A warning if the draft is at chance: its chains name the next token no more often than one would by always naming
    the commonest token. None for a better draft, if no chain ran, or if one token makes up most of the text."""
    chains = [run for run in found.runs if run.setting in found.plan.chains.values()]
    counters, tokens = Counters(), Counter(token for run in chains for token in run.text.token_ids)
    for run in chains:
        counters.merge(run.counters)
    if not counters.num_steps:
        return None
    commonest = max(tokens.values()) / tokens.total()
    right = counters.per_position[0] if counters.accepted_at else 0.0
    if right > commonest or commonest > 0.5:
        return None
    return (
        f"the draft is at chance: its chains name the next token in {right:.1%} of {counters.num_steps} steps, and "
        f"always naming the commonest token would in {commonest:.1%}. Likeliest first: (1) it was trained too "
        "little, or on text unlike these questions; `aquiline train --init` goes on from it; (2) it is read otherwise "
        "than it was trained: try --capture and --norm-feedback, and compare rope_theta in its config.json (SpecForge "
        "before 2025-11 and SafeAILab train with 10000 whatever the field says); (3) it was trained for another target"
    )


def _task_accuracy(found: Evaluated, temperature: float, length: int) -> TaskAccuracy | None:
    """The accuracy of the baseline's answers. None unless every question has a reference in GSM8K's format."""
    references = [question.reference or "" for question in found.questions]
    if not all(GSM8K_MARK in reference and final_number(reference) is not None for reference in references):
        return None
    texts = [
        run.text
        for run in found.runs
        if (run.setting, run.repeat, run.text.turn) == (BASELINE, 0, 0)
        and (run.text.temperature, run.text.length) == (temperature, length)
    ]
    if not texts:
        return None
    return TaskAccuracy(
        temperature, length,
        num_correct=sum(is_correct(text.text, references[text.question]) for text in texts),
        num_questions=len(texts), num_cut=sum(text.finish_reason == "length" for text in texts),
    )  # fmt: skip
