"""Figures of an evaluation: speedups with their intervals, acceptance, accuracy, the best setting. Derived here, once.

Times are paired: all settings write the same tokens, so a setting's speedup over a group of runs is the baseline's
decode time on these runs divided by the setting's own. The interval says how much the speedup depends on the choice of
questions (percentile bootstrap, fixed seed): questions are drawn anew RESAMPLES times, with all their turns and
repeats, and the middle 95 % of the ratios form the interval. It is too narrow for few questions. It covers neither
other machines nor the choice of the best of many settings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import product, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aquiline.bench.eval.answers import AnsweredText, TurnRun, Unfit, final_number
from aquiline.bench.eval.eval_plan import EvalPlan
from aquiline.bench.eval.guesses import TeacherForced
from aquiline.bench.results.intervals import Estimate
from aquiline.bench.suite.suite_plan import BASELINE
from aquiline.bench.tables import NO_FIGURE
from aquiline.ledger import Ledger
from aquiline.metrics import Counters, mean
from aquiline.text.questions import Question

RESAMPLES = 2000
BLOCK = 100
"""Resamples made at once, which bounds memory for large data sets."""
GSM8K_MARK = "####"
"""The mark before the number in a reference of GSM8K."""

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """One setting over a group of runs; temperature, length and category are None where the group has all of them.

    seconds_per_text: mean time of a text, prompt and output. decode_tokens_per_s: tokens that decode steps committed,
    per second of decode steps. speedup compares the time of decode steps; speedup_with_prefill includes the prompts.
    Their intervals are over questions, so one question has none. Both are None if no decode step was run, because every
    text ended at its first token."""

    temperature: float | None
    length: int | None
    category: str | None
    setting: str
    num_questions: int
    num_texts: int
    num_tokens: int
    seconds_per_text: float
    decode_tokens_per_s: float
    counters: Counters
    repeated_share: float
    speedup: Estimate | None
    speedup_with_prefill: Estimate | None

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval of the speedup is above 1; without an interval, whether the speedup is."""
        if self.speedup is None:
            return False
        return (self.speedup.value if self.speedup.low is None else self.speedup.low) > 1


@dataclass(frozen=True)
class Evaluated:
    """All that was run, with the figures of its groups of runs. In every group the baseline stands first; groups
    without a run are left out.

    choices: of adaptive drafting; prompts_sha256 identifies the token ids of all first turns."""

    plan: EvalPlan
    questions: list[Question]
    runs: list[TurnRun]
    unfit: list[Unfit]
    teacher_forced: list[TeacherForced]
    choices: Ledger
    prompts_sha256: str

    @cached_property
    def by_length(self) -> list[list[Figures]]:
        """A group for each temperature and length."""
        return list(filter(None, starmap(self.group, product(self.plan.temperatures, self.plan.lengths))))

    @cached_property
    def by_category(self) -> list[list[Figures]]:
        """A group for each temperature and category, if there are several categories."""
        categories = list(dict.fromkeys(question.category for question in self.questions))
        asked = product(self.plan.temperatures, [None], categories) if len(categories) > 1 else ()
        return list(filter(None, starmap(self.group, asked)))

    @cached_property
    def overall(self) -> list[Figures]:
        """The group of all runs."""
        return self.group()

    @property
    def groups(self) -> list[list[Figures]]:
        """The groups by length, and the group of all runs if there are several lengths or temperatures."""
        return [*self.by_length, self.overall] if len(self.by_length) > 1 else self.by_length

    def group(
        self, temperature: float | None = None, length: int | None = None, category: str | None = None
    ) -> list[Figures]:
        """The figures of every setting over the runs of one temperature, length and category, or of all."""
        wanted = (temperature, length, category)
        runs: dict[str, list[TurnRun]] = {}
        for run in self.runs:
            own = (run.text.temperature, run.text.length, self.questions[run.text.question].category)
            if all(w is None or w == o for w, o in zip(wanted, own, strict=True)):
                runs.setdefault(run.setting, []).append(run)
        names = self.plan.settings if runs else ()
        return [_figures(wanted, name, runs[name], runs[BASELINE]) for name in names]

    def real_tau(self, taught: TeacherForced) -> list[float | None]:
        """For each place k from 1, the served tau of a chain of k on the texts that were judged; None if no chain of
        that length ran."""
        judged = (taught.temperature, taught.length)
        served = {
            f.setting: f.counters.tau for group in self.by_length for f in group if (f.temperature, f.length) == judged
        }
        return [served.get(self.plan.chains.get(k, "")) for k in range(1, len(taught.accuracy.marginal) + 1)]

    @property
    def task_accuracy(self) -> list[dict[str, Any]]:
        """The accuracy of the baseline's answers to first turns. num_cut: answers that ended because they reached their
        length. Empty unless every question has a reference in GSM8K's format."""
        references = [question.reference or "" for question in self.questions]
        expected = [final_number(reference) if GSM8K_MARK in reference else None for reference in references]
        if None in expected:
            return []
        firsts: dict[tuple[float, int], list[AnsweredText]] = {}
        for run in self.runs:
            if (run.setting, run.repeat, run.text.turn) == (BASELINE, 0, 0):
                firsts.setdefault((run.text.temperature, run.text.length), []).append(run.text)
        return [
            {
                "temperature": temperature, "length": length,
                "num_correct": sum(final_number(text.text) == expected[text.question] for text in texts),
                "num_questions": len(texts), "num_cut": sum(text.finish_reason == "length" for text in texts),
            }
            for (temperature, length), texts in firsts.items()
        ]  # fmt: skip


def _figures(
    wanted: tuple[float | None, int | None, str | None], setting: str, runs: list[TurnRun], base: list[TurnRun]
) -> Figures:
    """The figures of one setting's runs. wanted: temperature, length and category of the group; base: the baseline's
    runs of the same texts."""
    counters = Counters.sum_of(run.counters for run in runs)
    decode_ms = sum(run.decode_ms for run in runs)
    return Figures(
        *wanted, setting,
        num_questions=len({run.text.question for run in runs}),
        num_texts=len(runs),
        num_tokens=sum(len(run.text.token_ids) for run in runs),
        seconds_per_text=(sum(run.prefill_ms for run in runs) + decode_ms) / 1e3 / len(runs),
        decode_tokens_per_s=counters.num_committed / decode_ms * 1e3 if decode_ms else 0.0,
        counters=counters,
        repeated_share=mean([run.text.repeated_share for run in runs]),
        speedup=ratio(_by_question(base), _by_question(runs)),
        speedup_with_prefill=ratio(_by_question(base, True), _by_question(runs, True)),
    )  # fmt: skip


def _by_question(runs: list[TurnRun], with_prefill: bool = False) -> Times:
    sums: defaultdict[int, float] = defaultdict(float)
    for run in runs:
        sums[run.text.question] += run.decode_ms + with_prefill * run.prefill_ms
    return np.array([sums[question] for question in sorted(sums)])


def ratio(base: Times, own: Times) -> Estimate | None:
    """sum(base) / sum(own) of paired times [Q], one per question, with its bootstrap interval. None if either sum is
    0."""
    if not base.sum() or not own.sum():
        return None
    value = float(base.sum() / own.sum())
    if len(base) < 2:
        return Estimate(value)
    generator, shares = np.random.default_rng(0), np.full(len(base), 1 / len(base))
    ratios = []
    for _ in range(RESAMPLES // BLOCK):
        counts = generator.multinomial(len(base), shares, size=BLOCK)  # how often each question is drawn
        times = counts @ own
        ratios += ((counts @ base)[times > 0] / times[times > 0]).tolist()
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def best(group: list[Figures]) -> Figures | None:
    """The setting of a group with the highest speedup, other than the baseline. None if no time was measured."""
    drafted = [(f.speedup.value, f) for f in group if f.setting != BASELINE and f.speedup is not None]
    return max(drafted, key=lambda pair: pair[0])[1] if drafted else None


def times(speedup: Estimate | None) -> str:
    """A speedup with its interval, unless the interval has no width; a dash for none."""
    if speedup is None:
        return NO_FIGURE
    return f"{speedup.value:.2f}x" if speedup.low == speedup.high else speedup.times()


def verdict(group: list[Figures]) -> str:
    """The best setting of a group in words; says so if none is faster than the baseline."""
    winner = best(group)
    if winner is None or winner.speedup is None:
        return "no decode step was run: every text ended at its first token"
    if winner.speedup.value <= 1:
        return f"none is faster than the baseline; {winner.setting} comes nearest, {times(winner.speedup)}"
    doubt = "" if winner.is_faster else ", but its interval reaches down to the baseline"
    return f"best is {winner.setting}, {times(winner.speedup)}{doubt}"


def suspicion(found: Evaluated) -> str | None:
    """A warning if the draft is at chance: its chains name the next token no more often than one would by always naming
    the commonest token. None for a better draft, if no chain ran, or if one token makes up most of the text."""
    chains = [run for run in found.runs if run.setting in found.plan.chains.values()]
    counters = Counters.sum_of(run.counters for run in chains)
    tokens = Counter(token for run in chains for token in run.text.token_ids)
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
