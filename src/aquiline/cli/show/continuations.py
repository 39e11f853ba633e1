"""Continuations of prompts as text and as JSON: text to standard output, figures to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from aquiline.config import SamplingParams
from aquiline.engine.bulk import BulkResult, BulkRun
from aquiline.engine.chat_session import Answer, AnswerPieces
from aquiline.engine.llm import LLM, Output, Result
from aquiline.engine.sequence import TokenDelta
from aquiline.metrics import peak_memory_bytes
from aquiline.text.chat_template import ChatTemplate

MAX_NAMED_ROWS = 10
"""The last line names at most this many failed rows. Each of them also has a line before it."""


def show_continuation(
    llm: LLM, prompt: str, ids: Sequence[int], sampling: SamplingParams, prediction: str | None, as_json: bool,
    template: ChatTemplate | None,
) -> None:  # fmt: skip
    """Continue a prompt and print the text, token by token in a terminal. template: what wrote the prompt, if it is a
    user's message; of the answer, its reasoning is then left out where it is told apart."""
    streams = not as_json and sys.stdout.isatty()
    answer = None if template is None else AnswerPieces.of(llm.models, template, tuple(ids), sampling)

    def show(delta: TokenDelta) -> None:
        texts = [delta.text]
        if answer is not None:
            pieces = answer.take(delta.token_ids, delta.sources, delta.finish_reason)
            texts = [piece.text for piece in pieces if piece.channel == "content"]
        if streams:
            print(*texts, sep="", end="", flush=True)

    result = llm.run([list(ids)], sampling, predictions=[prediction], on_delta=show)
    if answer is not None:
        tell_unread(answer.reader.problem)
    if as_json:
        result = replace(result, outputs=[replace(output, prompt=prompt) for output in result.outputs])
        print(json.dumps(as_dict(result, llm, answer)))
        return
    print("" if streams else result.outputs[0].text if answer is None else answer.text, flush=True)
    s = result.summary
    print(
        f"{len(result.outputs[0].token_ids)} tokens, {s.decode_tokens_per_s:.0f} tok/s, tau {s.counters.tau:.2f}, "
        f"acceptance {s.counters.acceptance_rate:.0%}, finish: {result.outputs[0].finish_reason}, "
        f"peak memory {peak_memory_bytes() / 1e6:.0f} MB",
        file=sys.stderr,
    )


def show_file(run: BulkRun, llm: LLM, template: ChatTemplate | None, system: str | None, as_json: bool) -> BulkResult:
    """Run a file of prompts and print how many rows ran, and which failed."""
    if not as_json:
        print(llm.engine.memory, file=sys.stderr)
    result = run.run(llm, template, system, progress=not as_json)
    for line, reason in result.failed.items():
        print(f"aquiline: {run.rows}, line {line}: {reason}", file=sys.stderr)
    for line, problem in result.unread.items():
        tell_unread(f"line {line}: {problem}")
    s = result.summary
    if as_json:
        print(json.dumps({
            "num_rows": result.num_rows, "num_resumed": result.num_resumed, "failed": result.failed,
            "metrics": s.as_dict(), "memory": llm.engine.memory.as_dict(), "system": llm.models.system(),
        }))  # fmt: skip
    else:
        print(
            f"{result.num_rows} rows ({result.num_resumed} were there, {len(result.failed)} failed), "
            f"{s.tokens_per_s:.0f} tok/s, tau {s.counters.tau:.2f}; {s.slots_line}",
            file=sys.stderr,
        )
    if result.failed:
        named = ", ".join(map(str, list(result.failed)[:MAX_NAMED_ROWS])) + (
            ", ..." if len(result.failed) > MAX_NAMED_ROWS else ""
        )
        print(
            f"aquiline: {len(result.failed)} of {result.num_rows} rows failed (line {named}); their lines of {run.out} "
            'say why in "error"',
            file=sys.stderr,
        )
    return result


def as_dict(result: Result, llm: LLM, answer: AnswerPieces | None = None) -> dict[str, object]:
    """The JSON of `aquiline generate --json`. answer: the output, if it is one, as an answer to a user."""
    return {
        "outputs": [described(output, answer) for output in result.outputs],
        "metrics": result.summary.as_dict(),
        "memory": llm.engine.memory.as_dict(),
        "system": llm.models.system(),
    }


def tell_unread(problem: str | None) -> None:
    """Say on stderr what of an answer could not be read, if anything."""
    if problem is not None:
        print(f"aquiline: part of the answer was not understood and is shown as text: {problem}", file=sys.stderr)


def described(output: Output, answer: Answer | AnswerPieces | None = None) -> dict[str, object]:
    """One output of `--json`. answer: the same as an answer to a user, with its reasoning apart where that is told."""
    told: dict[str, object] = {} if answer is None else {"text": answer.text}
    if answer is not None and answer.reasoning is not None:
        told["reasoning"] = answer.reasoning
    both = (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs))
    return (
        {
            "prompt": output.prompt,
            "token_ids": output.token_ids,
            "text": output.text,
            "finish_reason": output.finish_reason,
            "accepted_by": output.sources,
        }
        | told
        | {name: [asdict(entry) for entry in entries] for name, entries in both if entries is not None}
    )
