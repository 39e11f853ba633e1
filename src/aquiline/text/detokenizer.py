"""Text from token ids as they come, and the stop strings in it. One instance follows one sequence."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CUT = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows bytes that are no character, or not yet


class Detokenizer:
    """Streams text out of tokens, holding back what might yet become a stop string or half a character.

    num_until_stop is set by `add` when a stop string was completed: how many of that call's tokens it took. Without a
    tokenizer (token ids in, token ids out) the text is empty and stop strings are refused by the engine."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: tuple[int, ...], stop: tuple[str, ...]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.stream = DecodeStream(ids=_context(tokenizer, prompt_ids), skip_special_tokens=True) if tokenizer else None
        self.held = ""
        self.undecided: list[int] = []  # last tokens, of which the stream has shown nothing: a character's first bytes
        self.num_until_stop: int | None = None
        self.longest = max((len(s) for s in stop), default=0)

    def add(self, token_ids: list[int], hide_last: bool = False) -> str:
        """Text made final by these tokens; hide_last leaves the last one (a stop token) out of the text."""
        self.num_until_stop = None
        if self.tokenizer is None or self.stream is None:
            return ""
        for i, token in enumerate(token_ids[:-1] if hide_last else token_ids):
            piece = self.stream.step(self.tokenizer, token)
            if piece is None:
                self.undecided.append(token)
                continue
            self.held += piece
            self.undecided.clear()
            if not self.stop:
                continue
            ends = [(at, s) for s in self.stop if (at := self.held.find(s)) >= 0]
            if ends:
                text, self.held = self.held[: min(ends)[0]], ""
                self.num_until_stop = i + 1
                return text
        keep = self._partial_stop() if self.stop else 0
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text

    def finish(self) -> str:
        """What was held back, when nothing more comes; a character that was cut shows as the decoder shows it."""
        text, self.held = self.held, ""
        if self.tokenizer is not None and self.undecided:
            text += self.tokenizer.decode(self.undecided, skip_special_tokens=True)
            self.undecided.clear()
        return text

    def _partial_stop(self) -> int:
        """Length of the longest end of `held` that a stop string begins with."""
        for length in range(min(self.longest - 1, len(self.held)), 0, -1):
            if any(s.startswith(self.held[-length:]) for s in self.stop):
                return length
        return 0


def _context(tokenizer: Tokenizer, prompt_ids: tuple[int, ...]) -> list[int]:
    """The last prompt tokens, which the decoder needs to the left of the output (leading spaces), up to the end of a
    character: DecodeStream shows its whole context again once a character that was cut there is complete."""
    context = list(prompt_ids[-8:])
    while context and tokenizer.decode(context, skip_special_tokens=True).endswith(CUT):
        context.pop()
    return context
