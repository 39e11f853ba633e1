"""Run the prompts of a JSONL file and write results to another, in order and resumable. A bad row is reported and does
not stop the rest.

A row is {"prompt": text} or {"token_ids": [...]}. It may have an "id" (a text or a whole number), a "prediction" (the
output that is expected, text or token ids) and any field of SamplingParams, which then holds for that row; other fields
are ignored. A line of the output is written once all lines before it are written, so a later run keeps what a stopped
run has written. The output is only ever appended to; if its last line was cut off, that line is dropped first.
"""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from aquiline.checks import is_unicode, parse_json
from aquiline.config import SamplingParams
from aquiline.engine.chat_session import AnswerPieces, user_prompt
from aquiline.engine.encode import encode_prediction, ending_with
from aquiline.engine.llm import LLM, Output
from aquiline.engine.progress import RequestProgress
from aquiline.engine.sequence import Request
from aquiline.errors import AquilineError
from aquiline.metrics import RunSummary
from aquiline.text.chat_template import ChatTemplate
from aquiline.writing import resume_lines, writing

SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)}


@dataclass
class BulkResult:
    """The result of a run over a file. failed: line number (from 1) and reason of each row without text; unread: the
    same of each row of this run whose answer could not be read to its end and has the rest as text."""

    num_rows: int
    num_resumed: int
    summary: RunSummary
    failed: dict[int, str] = field(default_factory=dict)
    unread: dict[int, str] = field(default_factory=dict)


class BulkRun:
    """One run over a file, which is checked before a model is loaded.

    `settings`: everything but `sampling` that decides a result. It names checkpoints by fingerprint, not by path.
    Raises ValueError if `out` holds results of other rows or settings, OSError if it cannot be written."""

    llm: LLM

    def __init__(self, rows: Path, out: Path, sampling: SamplingParams, settings: dict[str, object]) -> None:
        self.rows, self.out, self.sampling = rows, out, sampling
        self.template: ChatTemplate | None = None
        self.system: str | None = None
        # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for line ends.
        text = rows.read_bytes().removeprefix(BOM_UTF8)
        self.lines = text.removesuffix(b"\n").split(b"\n") if text else []
        self.settings = json.dumps(settings | asdict(sampling), sort_keys=True, default=str)
        self.done: dict[int, dict[str, Any]] = {}  # results by line, until the lines before them are written
        self.failed: dict[int, str] = {}
        self.unread: dict[int, str] = {}
        self.answers: dict[int, AnswerPieces] = {}  # by line, of the answers to users' messages that run
        self.num_written = self._resume()

    def run(
        self,
        llm: LLM,
        template: ChatTemplate | None = None,
        system: str | None = None,
        progress: bool = False,
    ) -> BulkResult:
        """Run the rows that are left. With a template each prompt is a user's message, after the system message if
        there is one."""
        self.llm, self.template, self.system = llm, template, system
        num_resumed = self.num_written
        engine = llm.engine
        began = engine.meter.mark()
        with (
            writing(self.out, "Its whole lines stay; with room on the disk the same command goes on after them"),
            # An error may quote half a surrogate pair, which UTF-8 cannot write; escaped, the line is still JSON.
            self.out.open("a", encoding="utf-8", errors="backslashreplace") as out,
            RequestProgress(len(self.lines), engine, is_shown=progress, num_done=num_resumed) as bar,
        ):
            for output in self.llm.outputs(self._requests()):
                self.done[int(output.request_id)] = self._describe(output)
                if output.error is not None:
                    self.failed[int(output.request_id) + 1] = output.error
                self._write(out)
                bar.advance()
            self._write(out)
        failed, unread = (dict(sorted(lines.items())) for lines in (self.failed, self.unread))
        return BulkResult(len(self.lines), num_resumed, engine.meter.since(began), failed, unread)

    def _requests(self) -> Iterator[Request]:
        for index in range(self.num_written, len(self.lines)):
            try:
                request = self._request(index)
                self.llm.engine.check(request)
            except (ValueError, AquilineError) as error:
                self.failed[index + 1] = str(error)
                self.done[index] = {"error": str(error)}
            else:
                if self.template is not None:
                    self.answers[index] = AnswerPieces.of(
                        self.llm.models, self.template, request.prompt_ids, request.sampling
                    )
                yield request

    def _row(self, index: int) -> dict[str, Any]:
        """The object on a line. Raises ValueError for anything else, and for an id that cannot be written to the
        output."""
        try:
            row = parse_json(self.lines[index])
        except ValueError as error:
            raise ValueError(f"is not JSON ({error}); write one object per line") from None
        if not isinstance(row, dict):
            raise ValueError(f'is a JSON {type(row).__name__}; write an object with "prompt" or "token_ids"')
        name = row.get("id")
        if not (name is None or type(name) is int or (isinstance(name, str) and is_unicode(name))):
            raise ValueError(f"id={name!r}: must be a whole number or a text without half a surrogate pair")
        return row

    def _request(self, index: int) -> Request:
        row = self._row(index)
        if ("prompt" in row) == ("token_ids" in row):
            raise ValueError('a row has "prompt" or "token_ids", one of them')
        own = {name: row[name] for name in SAMPLING_FIELDS & row.keys()}
        if "logit_bias" in own:
            own["logit_bias"] = _biases(own["logit_bias"])
        sampling = replace(self.sampling, **own)
        if self.template is not None:
            sampling = ending_with(self.template, sampling)
        return self.llm.request(index, self._prompt(row), sampling, prediction=self._prediction(row))

    def _prompt(self, row: dict[str, Any]) -> list[int]:
        if "prompt" in row:
            if not isinstance(row["prompt"], str):
                raise ValueError(f"prompt={row['prompt']!r}: must be a text; give ids as token_ids")
            if self.template is not None:
                return user_prompt(self.template, row["prompt"], self.system)
            return self.llm.encode(row["prompt"])
        ids = row["token_ids"]
        if not isinstance(ids, list):
            raise ValueError(f"token_ids={ids!r}: must be a list of whole numbers")
        return self.llm.encode(ids)

    def _prediction(self, row: dict[str, Any]) -> list[int]:
        given = row.get("prediction")
        if not (given is None or isinstance(given, str | list)):
            raise ValueError(f"prediction={given!r}: must be a text or a list of token ids")
        return encode_prediction(self.llm.models, given)

    def _describe(self, output: Output) -> dict[str, Any]:
        index = int(output.request_id)
        answer, text = self.answers.pop(index, None), output.text
        if output.error is not None:
            return {"error": output.error}
        if answer is not None:
            answer.take(output.token_ids, output.sources, output.finish_reason)
            text = answer.text
            if answer.reader.problem is not None:
                self.unread[index + 1] = answer.reader.problem
        described: dict[str, Any] = {
            "text": text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "num_prompt_tokens": len(output.prompt_ids),
            "tau": output.metrics.tau,
        }
        if answer is not None and answer.reasoning is not None:
            described["reasoning"] = answer.reasoning
        if output.logprobs is not None:
            described["logprobs"] = [asdict(entry) for entry in output.logprobs]
        if output.prompt_logprobs is not None:
            described["prompt_logprobs"] = [asdict(entry) for entry in output.prompt_logprobs]
        return described

    def _write(self, out: Any) -> None:
        while self.num_written in self.done:
            index = self.num_written
            head = {"line": index + 1, "key": self._key(index)} | self._id(index)
            out.write(json.dumps(head | self.done.pop(index), ensure_ascii=False) + "\n")
            self.num_written += 1
        out.flush()

    def _id(self, index: int) -> dict[str, Any]:
        try:
            row = self._row(index)
        except ValueError:
            return {}
        return {"id": row["id"]} if "id" in row else {}

    def _key(self, index: int) -> str:
        """Identifies the results of this row under these settings."""
        return hashlib.sha256(self.settings.encode() + self.lines[index]).hexdigest()[:16]

    def _resume(self) -> int:
        """Count the results in the output file and drop a last line that was cut. Raises OSError if the file cannot be
        appended to."""
        with self.out.open("a"):
            pass
        return resume_lines(self.out, self._take)

    def _take(self, index: int, line: bytes) -> None:
        """Take a line of the output as the result of row `index`. Raises ValueError if it is not that row's result."""
        try:
            found = parse_json(line)
            is_ours = index < len(self.lines) and found["key"] == self._key(index)
        except (ValueError, KeyError, TypeError):
            is_ours = False
        if not is_ours:
            raise ValueError(
                f"out={str(self.out)!r}: line {index + 1} is not a result of the same line of the prompts under these "
                "settings and checkpoints; choose another --out, or delete it"
            )
        if "error" in found:
            self.failed[index + 1] = found["error"]


def _biases(value: object) -> dict[int, Any]:
    """logit_bias of JSON, whose keys are texts."""
    if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
        raise ValueError(f"logit_bias={value!r}: must be an object from token ids to numbers")
    return {int(token): bias for token, bias in value.items()}
