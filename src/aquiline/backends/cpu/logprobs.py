"""Log-probabilities of kept tokens and of prompts, for sequences that ask, computed from the last forward's rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aquiline.backends.base import Admit, Decoded, Prefilled, StepInput
from aquiline.backends.cpu.calls import NativeModel
from aquiline.types import Float32, Int32, TokenLogprobs

ROWS = 64
"""Rows whose logits are computed at once."""


@dataclass(eq=False)
class _Wish:
    """The log-probabilities that a slot's sequence asks for. kept and prompt: how many best ids beside each output
    token and each prompt token, None for no log-probabilities at all; tokens: the prompt; num_read: prompt
    log-probabilities already returned."""

    kept: int | None
    prompt: int | None
    tokens: Int32
    num_read: int


class LogprobReader:
    """Computes log-probabilities from hidden [max_rows, H] of the last forward. A row gives the log-probability of the
    token behind the row's own."""

    def __init__(self, model: NativeModel, hidden: Float32) -> None:
        self._model, self._hidden = model, hidden
        self.wishes: dict[int, _Wish] = {}  # by slot; empty if no sequence asks for log-probabilities

    def admit(self, admits: tuple[Admit, ...]) -> None:
        """Note what the sequences that take slots ask for."""
        for admit in admits:
            self.wishes.pop(admit.slot, None)
            sampling = admit.sampling
            if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
                prompt = np.array(admit.tokens[: admit.num_prompt], np.int32)
                self.wishes[admit.slot] = _Wish(
                    sampling.logprobs, sampling.prompt_logprobs, prompt, admit.num_prompt_logprobs
                )

    def read(
        self,
        step: StepInput,
        decodes: list[Decoded],
        chunks: list[Prefilled],
        paths: Int32,
    ) -> tuple[list[Decoded], list[Prefilled]]:
        """The step's results with the log-probabilities that their sequences ask for. paths: AcceptResult.path."""
        first = 0
        decodes, chunks = list(decodes), list(chunks)
        for b, (decode, decoded) in enumerate(zip(step.decodes, decodes, strict=True)):
            wish = self.wishes.get(decode.slot)
            if wish is not None and wish.kept is not None:
                rows, kept = paths[b, : len(decoded.kept)] + np.int32(first), np.array(decoded.kept, np.int32)
                decodes[b] = decoded._replace(logprobs=self._read(rows, kept, wish.kept))
            first += 1 + decoded.num_drafted
        for i, (chunk, prefilled) in enumerate(zip(step.chunks, chunks, strict=True)):
            wish = self.wishes.get(chunk.slot)
            if wish is not None and wish.prompt is not None:
                told = self._read_prompt(wish, wish.prompt, chunk.start, chunk.end, first)
                chunks[i] = chunks[i]._replace(prompt_logprobs=told)
            if wish is not None and wish.kept is not None and prefilled.first_token is not None:
                row = np.array([first + chunk.end - chunk.start - 1], np.int32)
                told = self._read(row, np.array([prefilled.first_token], np.int32), wish.kept)
                chunks[i] = chunks[i]._replace(logprobs=told)
            first += chunk.end - chunk.start
        return decodes, chunks

    def _read_prompt(self, wish: _Wish, k: int, start: int, end: int, first: int) -> list[TokenLogprobs]:
        """Prompt log-probabilities from a chunk's rows: row i gives that of token i + 1. What was returned before a
        preemption is not returned again."""
        begin, end = max(wish.num_read, start), min(end, len(wish.tokens) - 1)
        told: list[TokenLogprobs] = []
        for at in range(begin, end, ROWS):
            until = min(end, at + ROWS)
            rows = np.arange(first + at - start, first + until - start, dtype=np.int32)
            told += self._read(rows, wish.tokens[at + 1 : until + 1], k)
        wish.num_read += len(told)
        return told

    def _read(self, rows: Int32, chosen: Int32, k: int) -> list[TokenLogprobs]:
        k = min(k, self._model.head_size)
        found = self._model.logprobs(self._hidden, rows, np.maximum(chosen, 0), k)
        return [
            TokenLogprobs(token, logprob, rank, dict(zip(ids, logprobs, strict=True)))
            for token, logprob, rank, ids, logprobs in zip(
                chosen.tolist(), found.chosen.tolist(), found.rank.tolist(), found.top.ids.tolist(),
                found.top.logprobs.tolist(), strict=True,
            )
        ]  # fmt: skip
