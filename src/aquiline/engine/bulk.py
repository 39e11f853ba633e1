"""Many prompts from a JSONL file to another: in order, resumable, a bad row is reported and does not stop the rest.

A row is {"prompt": text} or {"token_ids": [...]}, with an "id" and any field of SamplingParams where it wants its own;
other fields are ignored. A line of the output is written when all before it are: what a stopped run has written, a
later one keeps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.engine.progress import RequestProgress
from aquiline.engine.sequence import Request
from aquiline.errors import AquilineError
from aquiline.metrics import RunSummary

SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)}


@dataclass
class BulkResult:
    """What a run over a file did; failed: line number (from 1) and reason of each row that gave no text."""

    num_rows: int
    num_resumed: int
    summary: RunSummary
    failed: dict[int, str] = field(default_factory=dict)


class BulkRun:
    """One run over a file. `encode` makes token ids of a prompt's text; without it the LLM does.

    Raises ValueError if `out` holds results of other rows or settings; `settings` name all that is not in `sampling`
    and decides the text."""

    def __init__(
        self,
        llm: LLM,
        rows: Path,
        out: Path,
        sampling: SamplingParams,
        settings: dict[str, object],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.llm, self.rows, self.out, self.sampling, self.encode = llm, rows, out, sampling, encode or llm.encode
        self.lines = rows.read_text(encoding="utf-8").splitlines()
        self.settings = json.dumps(settings | asdict(sampling), sort_keys=True, default=str)
        self.done: dict[int, dict[str, Any]] = {}  # results by line that wait for those before them
        self.failed: dict[int, str] = {}
        self.num_written = self._resume()

    def run(self, progress: bool = False) -> BulkResult:
        """Run what is left."""
        num_resumed = self.num_written
        engine = self.llm.engine
        began = engine.meter.mark()
        with (
            self.out.open("a", encoding="utf-8") as out,
            RequestProgress(len(self.lines), engine, is_shown=progress, num_done=num_resumed) as bar,
        ):
            for output in self.llm.outputs(self._requests()):
                self.done[int(output.request_id)] = self._describe(output)
                if output.error is not None:
                    self.failed[int(output.request_id) + 1] = output.error
                self._write(out)
                bar.advance()
            self._write(out)
        return BulkResult(len(self.lines), num_resumed, engine.meter.since(began), dict(sorted(self.failed.items())))

    def _requests(self) -> Iterator[Request]:
        for index in range(self.num_written, len(self.lines)):
            try:
                request = self._request(index)
                self.llm.engine.check(request)
            except (ValueError, AquilineError) as error:
                self.failed[index + 1] = str(error)
                self.done[index] = {"error": str(error)}
            else:
                yield request

    def _request(self, index: int) -> Request:
        try:
            row = json.loads(self.lines[index])
        except ValueError as error:
            raise ValueError(f"is not JSON ({error})") from None
        if not isinstance(row, dict) or ("prompt" in row) == ("token_ids" in row):
            raise ValueError('a row is an object with "prompt" or "token_ids", one of them')
        prompt: Any = row.get("prompt", row.get("token_ids"))
        is_ids = isinstance(prompt, list) and all(isinstance(t, int) for t in prompt)
        if not is_ids and not isinstance(prompt, str):
            raise ValueError(f"prompt={prompt!r}: must be a text, or token_ids a list of integers")
        own = {name: row[name] for name in SAMPLING_FIELDS & row.keys()}
        try:
            if "logit_bias" in own:
                own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
            sampling = replace(self.sampling, **own)
        except (TypeError, AttributeError) as error:  # a value of another kind than the field's
            raise ValueError(f"sampling {own}: {error}") from None
        return self.llm.request(index, prompt if is_ids else self.encode(prompt), sampling)

    def _describe(self, output: Output) -> dict[str, Any]:
        if output.error is not None:
            return {"error": output.error}
        described: dict[str, Any] = {
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "num_prompt_tokens": len(output.prompt_ids),
            "tau": output.metrics.tau,
        }
        if output.logprobs is not None:
            described["logprobs"] = [asdict(entry) for entry in output.logprobs]
        if output.prompt_logprobs is not None:
            described["prompt_logprobs"] = [asdict(entry) for entry in output.prompt_logprobs]
        return described

    def _write(self, out: Any) -> None:
        while self.num_written in self.done:
            index = self.num_written
            head = {"index": index, "key": self._key(index)} | self._id(index)
            out.write(json.dumps(head | self.done.pop(index), ensure_ascii=False) + "\n")
            self.num_written += 1
        out.flush()

    def _id(self, index: int) -> dict[str, Any]:
        try:
            row = json.loads(self.lines[index])
        except ValueError:
            return {}
        return {"id": row["id"]} if isinstance(row, dict) and "id" in row else {}

    def _key(self, index: int) -> str:
        """Tells results of this row under these settings from others."""
        return hashlib.sha256((self.settings + self.lines[index]).encode("utf-8", "replace")).hexdigest()[:16]

    def _resume(self) -> int:
        """Count the results that are there, dropping a last line that was cut."""
        if not self.out.exists():
            return 0
        text = self.out.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        for index, line in enumerate(whole.splitlines()):
            try:
                found = json.loads(line)
                is_ours = index < len(self.lines) and found["key"] == self._key(index)
            except (ValueError, KeyError, TypeError):
                is_ours = False
            if not is_ours:
                raise ValueError(
                    f"out={str(self.out)!r}: line {index + 1} is not a result of the same line of the prompts under "
                    "these settings; choose another --out, or delete it"
                )
            if "error" in found:
                self.failed[index + 1] = found["error"]
        if len(whole) < len(text):
            self.out.write_bytes(whole)
        return len(whole.splitlines())
