"""How often a match of earlier text foretold the next token, learnt from every token that the target writes.

These events need no drafts: a token that the target wrote says whether the match before it was right, whether it was
drafted or not.
"""

from __future__ import annotations

from array import array

MAX_LENGTH, MAX_COUNT = 64, 8
"""Lengths and counts from which on all are one bucket; below, a bucket holds those of as many bits."""

MAX_TRIALS = 1024
"""Events of a cell after which it forgets half of them: what was written long ago says less."""

_COUNT_CELLS = tuple(count.bit_length() for count in range(MAX_COUNT + 1))
_LENGTH_CELLS = tuple(length.bit_length() * (_COUNT_CELLS[-1] + 1) for length in range(MAX_LENGTH + 1))


def cell_of(length: int, count: int) -> int:
    """Where events of matches of so many tokens, which stood in the text so often, are counted together."""
    return (
        _LENGTH_CELLS[length if length < MAX_LENGTH else MAX_LENGTH]
        + _COUNT_CELLS[count if count < MAX_COUNT else MAX_COUNT]
    )


class MatchEvents:
    """How often matches foretold the next token, by the buckets of their length and count.

    estimates: the chance of a match in a cell to be right, (hits + 1) / (trials + 2): 1/2 before the first event.
    The arrays stay where they are: the native library reads and writes them too."""

    def __init__(self) -> None:
        num_cells = cell_of(MAX_LENGTH, MAX_COUNT) + 1
        self.trials, self.hits = array("i", [0]) * num_cells, array("i", [0]) * num_cells
        self.estimates = array("d", [0.5]) * num_cells

    def add(self, length: int, count: int, is_hit: bool) -> None:
        """Count a token that the target wrote behind a match; is_hit: it was the foretold one."""
        cell = cell_of(length, count)
        self.trials[cell] += 1
        self.hits[cell] += is_hit
        if self.trials[cell] == MAX_TRIALS:
            self.trials[cell] //= 2
            self.hits[cell] //= 2
        self.estimates[cell] = (self.hits[cell] + 1) / (self.trials[cell] + 2)
