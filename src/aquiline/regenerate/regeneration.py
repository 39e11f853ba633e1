"""Answers of a target to many prompts, by the serving engine at full batch: on-policy data to train a draft on.

Owns which rows are answered, how each is drawn, and its outcome. A row's temperature and seed follow only from the
run's seed and the row's place in the data, and an exact engine's text depends on neither batch nor schedule. So a row's
answer is the same in every order and batch, and in a continued run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aquiline.checks import is_unicode
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.progress import RequestProgress
from aquiline.engine.sequence import Request
from aquiline.errors import OutOfPages
from aquiline.metrics import RunSummary
from aquiline.models.fingerprint import fingerprint
from aquiline.regenerate.answer_file import AnswerFile, Tally
from aquiline.regenerate.answering import Conversation
from aquiline.regenerate.regenerate_config import RegenerateConfig
from aquiline.text.chat_template import ChatTemplate
from aquiline.text.questions import read_rows

LABELS = ("source", "category", "license")
"""Fields of an input row that its output row repeats."""

NUM_REPORTED = 50
"""At most this many rows without an answer are named; further ones are only counted."""


@dataclass(frozen=True)
class Regenerated:
    """The outcome of every row of the data: num_done + num_failed + num_skipped = num_rows.

    num_done: rows in the output; num_resumed of them are from earlier runs. num_failed: broken rows, and rows whose
    logits are not numbers. skipped, by reason: rows that were not asked for or do not fit. num_shortened: rows that are
    done but lack their last turns. reasons: "FILE line N: why" for rows of this run that lack an answer, up to
    NUM_REPORTED. total and by_temperature: sums over the whole output. answer_tokens, seconds and summary: of this run
    only."""

    num_rows: int
    num_done: int
    num_resumed: int
    num_failed: int
    skipped: dict[str, int]
    num_shortened: int
    reasons: list[str]
    total: Tally
    by_temperature: dict[float, Tally]
    answer_tokens: int
    seconds: float
    summary: RunSummary

    @property
    def num_skipped(self) -> int:
        """Rows that were not asked for or do not fit."""
        return sum(self.skipped.values())

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second of the run. Prompt tokens are not counted, the time for them is."""
        return self.answer_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """The figures as JSON."""
        own = (
            "num_rows",
            "num_done",
            "num_failed",
            "num_skipped",
            "num_resumed",
            "num_shortened",
            "skipped",
            "reasons",
        )
        return {name: getattr(self, name) for name in own} | {
            "output": self.total.as_dict(),
            "by_temperature": {f"{t:g}": tally.as_dict() for t, tally in sorted(self.by_temperature.items())},
            "answer_tokens": self.answer_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "metrics": self.summary.as_dict(),
        }

    def __str__(self) -> str:
        why = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
        lines = [
            f"{self.num_rows} rows = {self.num_done} done ({self.num_resumed} by earlier runs) + {self.num_failed} "
            f"failed + {self.num_skipped} skipped{why and f' ({why})'}",
            f"{self.answer_tokens} answer tokens in {self.seconds:.1f} s: {self.tokens_per_s:.0f} tok/s; "
            f"{self.summary.slots_line}",
        ]
        for temperature, tally in sorted(self.by_temperature.items()):
            ends = ", ".join(f"{count} {reason}" for reason, count in tally.finish_reasons.most_common())
            lines.append(
                f"temperature {temperature:g}: {tally.num_conversations} conversations, {tally.num_answers} answers of "
                f"{tally.mean_answer_tokens:.0f} tokens on average ({ends})"
            )
        return "\n".join(lines)


def asked_settings(config: RegenerateConfig, target: Path, template_options: dict[str, Any] | None) -> dict[str, Any]:
    """The settings that decide a row of the output beside its number, as far as they are known before the target is
    loaded. The draft is not among them, so a run may be continued with a newer draft: only the field `rejected`
    depends on the draft."""
    return {
        "target_fingerprint": fingerprint(target),
        "template_options": template_options or {},
        "data_sha256": [hashlib.sha256(path.read_bytes()).hexdigest() for path in config.data],
        "temperatures": config.temperatures,
        "temperature_weights": config.temperature_weights,
        "seed": config.seed,
        "max_tokens": config.max_tokens,
    }


@dataclass(eq=False)
class Regeneration:
    """One run. asked: the settings of the output that `asked_settings` gave for this config.

    Raises ValueError, and changes nothing, if the data holds no row or the output belongs to other settings."""

    llm: LLM
    template: ChatTemplate
    config: RegenerateConfig
    asked: dict[str, Any]
    is_shown: bool = False  # progress on stderr
    failed: set[int] = field(default_factory=set, init=False)
    skipped: Counter[str] = field(default_factory=Counter, init=False)
    reasons: list[str] = field(default_factory=list, init=False)
    ready: deque[Conversation] = field(default_factory=deque, init=False)  # whose next turn can be asked
    running: dict[int, Conversation] = field(default_factory=dict, init=False)
    num_shortened: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        models = self.llm.models
        if models.tokenizer is None:
            raise ValueError(f"target={str(models.checkpoint)!r}: has no tokenizer.json, and prompts are text; add one")
        self.tokenizer = models.tokenizer
        self.rows = [row for path in self.config.data for row in read_rows(path)]
        known = {row for path in self.config.skip_ids for row in _ids(path)}
        ran = {"dtype": models.storage, "arithmetic": models.arithmetic, "path": models.pair.name}
        self.out = AnswerFile(self.config.out, self.asked | ran | {"max_context": self.llm.engine.max_context})
        self.todo = self._select(known)
        num_done = len(self.out.ids)
        self.bar = RequestProgress(num_done + len(self.todo), self.llm.engine, self.is_shown, num_done)

    def run(self) -> Regenerated:
        """Answer every row that is asked for and has no answer yet."""
        engine, out = self.llm.engine, self.out
        num_resumed, num_tokens_before = len(out.ids), out.total.num_answer_tokens
        began = engine.meter.mark()
        began_s = time.perf_counter()
        with out, self.bar:
            for output in self.llm.outputs(self._requests(), self.bar.tick):
                conversation = self.running.pop(int(output.request_id))
                if output.error is not None:
                    self._fail(conversation.id, output.error)
                    continue
                conversation.answer(output)
                if conversation.num_left:
                    self.ready.append(conversation)
                else:
                    self._finish(conversation)
        done = Regenerated(
            num_rows=len(self.rows), num_done=len(out.ids), num_resumed=num_resumed, num_failed=len(self.failed),
            skipped=dict(self.skipped), num_shortened=self.num_shortened, reasons=self.reasons,
            total=out.total, by_temperature=out.by_temperature,
            answer_tokens=out.total.num_answer_tokens - num_tokens_before, seconds=time.perf_counter() - began_s,
            summary=engine.meter.since(began),
        )  # fmt: skip
        assert done.num_done + done.num_failed + done.num_skipped == done.num_rows, done
        return done

    def _select(self, known: set[int]) -> list[int]:
        """The rows to answer, in order. Counts the rows that are skipped; `known` holds the ids of skip_ids."""
        config = self.config
        order = [row for row in range(len(self.rows)) if row not in known]
        if config.shuffle_seed is not None:
            order.sort(key=lambda row: hashlib.sha256(f"order {config.shuffle_seed} {row}".encode()).digest())
        end = len(order) if config.limit is None else config.start + config.limit
        left_out = {
            "in skip_ids": known & set(range(len(self.rows))),
            "before start": set(order[: config.start]),
            "behind limit": set(order[end:]),
        }
        for reason, rows in left_out.items():
            self.skipped[reason] += len(rows - self.out.ids)
        self.skipped += Counter()  # drops reasons that no row has
        return [row for row in order[config.start : end] if row not in self.out.ids]

    def _requests(self) -> Iterator[Request | None]:
        """Requests in the order in which the engine takes them. A conversation's next turn comes first, while the
        prefix cache still holds its earlier turns; otherwise a new conversation; None while the batch is full."""
        todo = iter(self.todo)
        while True:
            conversation: Conversation | None = None
            if self.ready:
                conversation = self.ready.popleft()
            elif len(self.running) < self.llm.engine.config.max_batch and (row := next(todo, None)) is not None:
                conversation = self._begin(row)
            elif self.running:
                yield None
            else:
                return
            if conversation is not None and (request := self._request(conversation)) is not None:
                self.running[conversation.id] = conversation
                yield request

    def _begin(self, row: int) -> Conversation | None:
        try:
            question, value = self.rows[row].question(row), self.rows[row].value
        except ValueError as error:
            self._fail(row, str(error))
            return None
        assert isinstance(value, dict), "a question is an object"
        labels = {name: value[name] for name in LABELS if name in value}
        if not is_unicode(json.dumps(labels, ensure_ascii=False)):
            self._fail(row, f"{', '.join(labels)}: hold half a surrogate pair, which is no text")
            return None
        temperature, seed = self.config.draw(row)
        chain = self.llm.drafting.as_dict().get("num_spec_tokens", 0)
        return Conversation(row, question, labels, temperature, seed, chain)

    def _request(self, conversation: Conversation) -> Request | None:
        """The request of a conversation's next turn. None if the template refuses the turn or the prompt is too
        long."""
        sampling = SamplingParams(
            max_tokens=self.config.max_tokens, temperature=conversation.temperature, seed=conversation.seed
        )
        engine = self.llm.engine
        try:
            request = self.llm.request(conversation.id, conversation.ask(self.template, self.tokenizer), sampling)
            if request.max_tokens_total > engine.max_context:
                raise OutOfPages(
                    f"prompt of {len(request.prompt_ids)} tokens + max_tokens={sampling.max_tokens} exceeds "
                    f"max_context={engine.max_context}"
                )
            engine.check(request)
        except (ValueError, OutOfPages) as error:
            if conversation.finish_reasons:
                turn = len(conversation.finish_reasons) + 1
                self._report(conversation.id, f"turn {turn} is not asked, its row ends before it: {error}")
                self._finish(conversation)
            elif isinstance(error, OutOfPages):
                self.skipped["too long"] += 1
                self._report(conversation.id, str(error))
                self.bar.advance()
            else:
                self._fail(conversation.id, str(error))
            return None
        return request

    def _finish(self, conversation: Conversation) -> None:
        self.out.add(conversation.row())
        self.num_shortened += conversation.num_left > 0
        self.bar.advance()

    def _fail(self, row: int, why: str) -> None:
        self.failed.add(row)
        self._report(row, why)
        self.bar.advance()

    def _report(self, row: int, why: str) -> None:
        """Say why a row lacks an answer or some of its answers: on stderr at once, and in the result."""
        if len(self.reasons) == NUM_REPORTED:
            return
        where = self.rows[row].where
        self.reasons.append(f"{where}: {why.removeprefix(f'{where}: ')}")
        last = "; from here on they are only counted" if len(self.reasons) == NUM_REPORTED else ""
        self.bar.note(f"aquiline: {self.reasons[-1]}{last}")


def _ids(path: Path) -> Iterator[int]:
    """The row numbers in an earlier output."""
    for row in read_rows(path):
        value = row.value
        if not isinstance(value, dict) or type(value.get("id")) is not int:
            raise ValueError(f"{row.where}: skip_ids reads rows with an id, the number of a row; this has none")
        yield value["id"]
