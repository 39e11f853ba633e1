"""Stream text from token ids, and find stop strings in it. One instance follows one sequence."""

from __future__ import annotations

import codecs
from functools import lru_cache
from typing import NamedTuple

from tokenizers import Tokenizer, decoders

from aquiline.types import FinishReason

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # a decoder writes it for bytes that are no character, or not a whole one yet

CONTEXT_TOKENS = 8
"""Number of prompt tokens before the output that the decoder is given."""

MAX_PENDING_TOKENS = 64
"""The greatest number of tokens in a row after each of which the text may end in a cut character. With more at the end
of a prompt the context stays empty. With more in an output their text is final without the last character, because no
character has so many bytes."""


class Taken(NamedTuple):
    """The text of the latest tokens. num_tokens: how many of them belong to it, the others come after a stop string;
    text: the part that became final; finish_reason: why the text has ended, None if it continues."""

    num_tokens: int
    text: str
    finish_reason: FinishReason | None


class Detokenizer:
    """Streams text from tokens. It holds back text that may become a stop string, half a character, and a run of bytes.

    Every `add` and the `finish` together give decode(left + output) without decode(left) at its beginning. Here left is
    the prompt without the tokens at its end that are bytes or a cut character, and decode is the tokenizer's, special
    tokens skipped. That holds for every decoder that does not change a text once a whole character or a run of byte
    tokens follows it: byte-level decoders, and SentencePiece's with or without byte fallback. If a decoder changes text
    later (WordPiece's clean-up), text that was already returned stays as it was. If a decoder only joins the bytes of
    tokens, texts of whole characters are joined from the texts of single tokens, which are decoded once.

    Time: a token takes constant time, whatever came before it. A stretch without a whole character, which a decoder
    would read from its beginning each time, is cut after MAX_PENDING_TOKENS tokens, and a run of bytes is read byte by
    byte.

    num_until_stop is set by `add` when a stop string was completed: how many of that call's tokens it took. Without a
    tokenizer (token ids in, token ids out) the text is empty and stop strings are refused by the engine."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: tuple[int, ...], stop: tuple[str, ...]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.bytes = byte_tokens(tokenizer) if tokenizer else {}
        self.skipped = skipped_tokens(tokenizer) if tokenizer else frozenset()
        self.held = ""
        self.alone = texts_alone(tokenizer) if tokenizer else None
        # The tokens whose text was returned last. A decoder that only joins bytes needs none.
        self.context = _context(tokenizer, prompt_ids) if tokenizer and self.alone is None else []
        self.shown = len(self._decode(self.context))
        self.undecided: list[int] = []  # tokens behind `context`, whose text may still change
        self.run: _ByteRun | None = None  # the run of byte tokens that `undecided` ends in
        self.num_until_stop: int | None = None
        self.longest = max((len(s) for s in stop), default=0)

    def take(self, token_ids: list[int], finish_reason: FinishReason | None) -> Taken:
        """Add the next tokens of a sequence, and cut them at a stop string. finish_reason: why the sequence ends with
        these tokens, apart from stop strings. With "stop" the last token is a stop token, which has no text."""
        text, num_tokens = self.add(token_ids, hide_last=finish_reason == "stop"), len(token_ids)
        if self.num_until_stop is not None:
            num_tokens, finish_reason = self.num_until_stop, "stop"
        if finish_reason is not None:
            text += self.finish()
        return Taken(num_tokens, text, finish_reason)

    def add(self, token_ids: list[int], hide_last: bool = False) -> str:
        """Text made final by these tokens; hide_last leaves the last one (a stop token) out of the text."""
        self.num_until_stop = None
        if self.tokenizer is None:
            return ""
        num = len(token_ids) - hide_last
        begin = 0 if self.stop or self.bytes else max(0, num - 1)  # what no token but the last one can decide
        self.undecided += [token for token in token_ids[:begin] if token not in self.skipped]
        for i, token in enumerate(token_ids[begin:num], begin + 1):
            if token not in self.skipped:
                self.undecided.append(token)
            is_final = self._is_final(token)
            if not self.stop and not (is_final and i == num):
                continue  # only a stop string asks where in the block a text ends
            if self.run is not None and not self.run.may_end(self.stop, self.longest):
                continue
            piece, is_cut = self._undecided_text(), False
            if piece.endswith(REPLACEMENT):
                is_cut = is_final and len(self.undecided) > MAX_PENDING_TOKENS
                if not is_cut:
                    continue
                piece = piece[:-1]  # the last character may yet be completed
            text = self.held + piece
            if is_final and piece:
                self._decide(text, is_cut)
            # A stop string ends the text, so that a run of bytes that completes one is final as well.
            ends = [at for s in self.stop if (at := text.find(s)) >= 0]
            if ends:
                self.num_until_stop = i
                self._clear()
                return text[: min(ends)]
            if self.run is not None:
                self.run.tail = text
        keep = self._partial_stop() if self.stop else 0
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text

    def finish(self) -> str:
        """The text that was held back, when no more tokens come. A cut character is written as the decoder writes
        it."""
        text = self.held + self._undecided_text()
        self._clear()
        return text

    def _clear(self) -> None:
        self.held, self.undecided, self.context, self.shown = "", [], [], 0

    def _is_final(self, token: int) -> bool:
        """Whether no run of byte tokens is open after this token. Text inside such a run is never final: a decoder with
        byte fallback writes a whole run as replacement characters if any byte in it is wrong."""
        if token in self.bytes:
            self.run = self.run or _ByteRun()
            self.run.add(self.bytes[token])
        elif token not in self.skipped:
            self.run = None
        elif self.run is not None:
            self.run.new = ""
        return self.run is None

    def _decide(self, text: str, is_cut: bool) -> None:
        """`text`, which includes the text of `undecided`, has become final; is_cut: except for a last, cut
        character."""
        decided, self.held, self.undecided = self.undecided, text, []
        if is_cut:  # the decoder is shown more bytes than a character has, and begins with those that it would skip
            decided = decided[-CONTEXT_TOKENS:]
        if is_cut or self.alone is None:
            self.context, self.shown = decided, len(self._decode(decided)) - is_cut
        else:
            self.context, self.shown = [], 0

    def _undecided_text(self) -> str:
        if self.alone is not None and not self.context:
            texts = [self.alone[token] for token in self.undecided]
            if REPLACEMENT not in texts:
                return "".join(texts)
        return self._decode(self.context + self.undecided)[self.shown :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True) if self.tokenizer and ids else ""
        return text

    def _partial_stop(self) -> int:
        """Length of the longest suffix of `held` that is a prefix of a stop string."""
        for length in range(min(self.longest - 1, len(self.held)), 0, -1):
            if any(s.startswith(self.held[-length:]) for s in self.stop):
                return length
        return 0


class _ByteRun:
    """A run of byte tokens, read as UTF-8 byte by byte. new: the character that the latest byte completed, if any.
    tail: the latest text, None until it is first needed in this run."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.is_spoiled, self.new = False, ""
        self.tail: str | None = None

    def add(self, byte: int) -> None:
        """The next byte."""
        self.new = ""
        if not self.is_spoiled:
            try:
                self.new = self.decoder.decode(bytes([byte]))
            except UnicodeDecodeError:
                self.is_spoiled = True

    def may_end(self, stop: tuple[str, ...], longest: int) -> bool:
        """Whether the latest byte may have completed a stop string. longest: length of the longest one. A run with a
        cut or a wrong character has no text."""
        if not self.new or self.tail is None:
            return bool(self.new)
        self.tail = (self.tail + self.new)[-longest:]
        return any(s in self.tail for s in stop)


class TextsAlone(dict[int, str]):
    """The text of each token by itself, or REPLACEMENT if that text has a cut character. Filled on demand."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        text: str = self.tokenizer.decode([token], skip_special_tokens=True)
        self[token] = found = REPLACEMENT if REPLACEMENT in text else text
        return found


@lru_cache(maxsize=4)
def texts_alone(tokenizer: Tokenizer) -> TextsAlone | None:
    """The texts of single tokens, if the decoder only joins the bytes of tokens; else None."""
    return TextsAlone(tokenizer) if isinstance(tokenizer.decoder, decoders.ByteLevel) else None


def _context(tokenizer: Tokenizer, prompt_ids: tuple[int, ...]) -> list[int]:
    """The last prompt tokens, which the decoder needs to the left of the output to get leading spaces right.

    They end at the end of a whole character: output tokens must not complete a character or a run of bytes of the
    prompt, because that would change the prompt's text."""
    num_cut, changeable = 0, byte_tokens(tokenizer).keys() | skipped_tokens(tokenizer)
    for end in range(len(prompt_ids), 0, -1):
        if prompt_ids[end - 1] in changeable:
            continue
        context = list(prompt_ids[max(0, end - CONTEXT_TOKENS) : end])
        if not tokenizer.decode(context, skip_special_tokens=True).endswith(REPLACEMENT):
            return context
        num_cut += 1
        if num_cut == MAX_PENDING_TOKENS:
            break
    return []


@lru_cache(maxsize=4)
def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """The tokens of a vocabulary with byte fallback that stand for one byte, which it spells <0x00> to <0xFF>, and the
    byte of each."""
    found = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    return {token: byte for token, byte in found if token is not None}


@lru_cache(maxsize=4)
def skipped_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that a decoder skips which skips special tokens."""
    return frozenset(token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
