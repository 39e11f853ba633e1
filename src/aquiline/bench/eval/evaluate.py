"""The runs of `aquiline eval`: every setting on every question, turn by turn, at several lengths, on the same prompts.

Owns the order of the runs; figures.py computes figures, eval_report.py writes files and tables. As many questions run
together as the plan says. Nothing is cached between runs, so each run computes its prompts anew. Settings take turns at
going first. Speculation is exact, so all settings must write the same tokens. That is checked, and the common answer
enters the next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product, zip_longest
from pathlib import Path

from aquiline.bench.eval.answers import AnsweredText, EagleAnswers, TurnRun, Unfit
from aquiline.bench.eval.eval_plan import EvalPlan
from aquiline.bench.eval.figures import Evaluated
from aquiline.bench.eval.guesses import ChainTeacher, Guesses, TeacherForced, accuracy
from aquiline.bench.results.intervals import decode_s, rotated, spans_of
from aquiline.bench.results.result import tokens_sha256
from aquiline.bench.suite.suite_plan import BASELINE
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.errors import OutOfPages, ResultError
from aquiline.metrics import mean
from aquiline.text.chat_template import ChatTemplate, conversation
from aquiline.text.questions import Question

WARMUP_TOKENS = 16
TEACHER_PLACES = 5
"""How many places of a chain are judged at least; a shorter chain is the beginning of a longer one."""


@dataclass(eq=False)
class Evaluation:
    """A plan of runs on questions. on_progress: called for every run, also for one that is left out because it does not
    fit, with the part of `num_tokens` that the run stands for.

    answers: a folder for answer files in EAGLE's format, one per setting, length and temperature. A question with a
    turn that does not fit is not in them."""

    llm: LLM
    template: ChatTemplate
    questions: list[Question]
    plan: EvalPlan
    model_id: str = "model"
    answers: Path | None = None
    on_progress: Callable[[int], None] = lambda num_tokens: None
    runs: list[TurnRun] = field(default_factory=list, init=False)
    unfit: list[Unfit] = field(default_factory=list, init=False)
    num_rounds: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        batch = self.plan.batch
        if self.llm.engine.prefix is not None or self.llm.engine.config.max_batch != batch:
            raise ValueError(
                f"engine: needs EngineConfig(max_batch={batch}, prefix_cache=False), so that no run helps another and "
                "all of a batch run together; pass that"
            )
        for drafting in self.plan.settings.values():
            if drafting.is_speculative:
                self.llm.models.check_drafting(drafting)

    @property
    def num_tokens(self) -> int:
        """The sum of the numbers that on_progress is called with, for a progress bar."""
        plan, turns = self.plan, sum(len(q.turns) for q in self.questions)
        taught = max(plan.lengths) * plan.teacher_forced
        return turns * len(plan.temperatures) * (sum(plan.lengths) * len(plan.settings) * plan.repeats + taught)

    def run(self) -> Evaluated:
        """Run everything. Raises ResultError where two settings write different tokens, ValueError if nothing fits."""
        plan = self.plan
        firsts = [self.template.encode(conversation(q.turns[:1], system=q.system)) for q in self.questions]
        self._warm_up(firsts)
        began = self.llm.engine.meter.mark()
        for temperature, length in product(plan.temperatures, plan.lengths):
            files = self._answer_files(temperature, length)
            numbers = range(len(self.questions))
            for first in numbers[:: plan.batch]:
                self._converse(numbers[first : first + plan.batch], temperature, length, files)
        if not self.runs:
            raise ValueError(f"lengths={list(plan.lengths)}: no question fits; {self.unfit[0].reason}")
        taught = list(self._teach()) if plan.teacher_forced else []
        choices = self.llm.engine.meter.since(began).choices
        return Evaluated(plan, self.questions, self.runs, self.unfit, taught, choices, tokens_sha256(firsts))

    def _warm_up(self, prompts: list[list[int]]) -> None:
        room = self.llm.engine.max_context
        sampling = SamplingParams(max_tokens=min(WARMUP_TOKENS, room - 1), ignore_eos=True)
        prompt = min(prompts, key=len)[: room - sampling.max_tokens]
        for drafting in self.plan.settings.values():
            self.llm.run([prompt], sampling, drafting=drafting)

    def _answer_files(self, temperature: float, length: int) -> dict[str, EagleAnswers]:
        names = {setting: f"{setting}-{length}-t{temperature:g}" for setting in self.plan.settings if self.answers}
        return {s: EagleAnswers(Path(f"{self.answers}/{n}.jsonl"), f"{self.model_id}-{n}") for s, n in names.items()}

    def _converse(self, group: Sequence[int], temperature: float, length: int, files: dict[str, EagleAnswers]) -> None:
        """Run the turns of questions together, those of each up to the first one that does not fit."""
        told: dict[int, list[list[TurnRun]]] = {question: [] for question in group}  # the runs of each turn
        for turn in range(max(len(self.questions[question].turns) for question in group)):
            asked = [
                text
                for question in group
                if len(told[question]) == turn < len(self.questions[question].turns)
                if (text := self._asked(question, told[question], temperature, length)) is not None
            ]
            for text, runs in zip(asked, self._answer(asked), strict=True):
                told[text.question].append(runs)
        for question, turns in told.items():
            runs = list(chain.from_iterable(turns))
            self.runs += runs
            for setting, file in files.items() if len(turns) == len(self.questions[question].turns) else ():
                own = [run for run in runs if run.setting == setting]
                repeats = range(self.plan.repeats)
                file.add(self.questions[question], *([r for r in own if r.repeat == repeat] for repeat in repeats))

    def _asked(self, question: int, told: list[list[TurnRun]], temperature: float, length: int) -> AnsweredText | None:
        """The next turn of a question, not answered yet; None if it does not fit. told: the runs of earlier turns."""
        asked, turn = self.questions[question], len(told)
        messages = conversation(asked.turns[: turn + 1], [runs[0].text.text for runs in told], asked.system)
        prompt = self.template.encode(messages)
        reason = self._misfit(prompt, length)
        if reason is None:
            return AnsweredText(temperature, length, question, turn, prompt, [], "", "")
        self.unfit.append(Unfit(question, turn, length, temperature, reason))
        rounds = (len(asked.turns) - turn) * self.plan.repeats
        self.on_progress(rounds * len(self.plan.settings) * length)
        return None

    def _misfit(self, prompt: list[int], length: int) -> str | None:
        limit = self.llm.engine.max_context
        if len(prompt) + length > limit:
            return f"prompt of {len(prompt)} tokens + length {length} exceeds the {limit} positions there are"
        sampling = SamplingParams(max_tokens=length, seed=0)
        try:
            for drafting in self.plan.settings.values():
                self.llm.engine.check(self.llm.request(0, prompt, sampling, drafting))
        except OutOfPages as error:
            return str(error)
        return None

    def _sampling(self, text: AnsweredText) -> SamplingParams:
        plan = self.plan
        seed = (plan.seed + text.question) % 2**64
        return SamplingParams(
            max_tokens=text.length, temperature=text.temperature, seed=seed, ignore_eos=plan.ignore_eos
        )

    def _answer(self, asked: list[AnsweredText]) -> list[list[TurnRun]]:
        """Run every setting and repeat on prompts together; the order of settings rotates from round to round."""
        names = list(self.plan.settings)
        runs: list[list[TurnRun]] = [[] for _ in asked]
        for repeat in range(self.plan.repeats if asked else 0):
            order = rotated(names, self.num_rounds)
            self.num_rounds += 1
            for setting in order:
                self._write(asked, setting, repeat, runs)
        return runs

    def _write(self, asked: list[AnsweredText], setting: str, repeat: int, runs: list[list[TurnRun]]) -> None:
        """One run of one setting on all prompts, added to the runs of each."""
        prompts = [text.prompt_ids for text in asked]
        outputs = self.llm.run(
            prompts, [self._sampling(text) for text in asked], drafting=self.plan.settings[setting]
        ).outputs
        has_decoded = any(len(output.token_ids) > 1 for output in outputs)
        decode_ms = decode_s(spans_of(outputs)) * 1e3 if has_decoded else 0.0
        prefill_ms = max(output.total_ms for output in outputs) - decode_ms
        shares = prefill_ms / len(asked), decode_ms / len(asked)
        for text, own, output in zip(asked, runs, outputs, strict=True):
            if own:
                text = own[0].text
                self._check_same(text, output.token_ids, f"{setting} and {own[0].setting}")
            else:
                text = replace(text, token_ids=output.token_ids, text=output.text, finish_reason=output.finish_reason)
            own.append(TurnRun(text, setting, repeat, *shares, output.total_ms, output.metrics))
            self.on_progress(text.length)

    def _check_same(self, text: AnsweredText, token_ids: list[int], who: str) -> None:
        if token_ids == text.token_ids:
            return
        place = next(i for i, (a, b) in enumerate(zip_longest(token_ids, text.token_ids)) if a != b)
        hint = "" if self.llm.models.pair.is_exact else "; the torch path rounds by shape: build the native library"
        raise ResultError(
            f"question {self.questions[text.question].id!r}, turn {text.turn + 1}, length {text.length}, temperature "
            f"{text.temperature:g}: {who} differ at output token {place + 1}{hint}"
        )

    def _teach(self) -> Iterator[TeacherForced]:
        """Teacher-forced accuracy of the draft along the longest texts of every temperature."""
        places = max([TEACHER_PLACES, *self.plan.chains])
        for temperature in self.plan.temperatures:
            runs = [run for run in self.runs if run.text.temperature == temperature]
            if not runs:
                continue
            length = max(run.text.length for run in runs)
            texts = [r.text for r in runs if (r.setting, r.repeat, r.text.length) == (BASELINE, 0, length)]
            teacher = ChainTeacher(self.llm, max(len(text.prompt_ids) for text in texts) + length)
            found: list[Guesses] = []
            for text in texts:
                found.append(teacher.guess(text.prompt_ids, self._sampling(text), places))
                self._check_same(text, found[-1].token_ids, "the teacher-forced run and the others")
                self.on_progress(length)
            repeated = mean([text.repeated_share for text in texts])
            yield TeacherForced(temperature, length, repeated, accuracy(found, places))
