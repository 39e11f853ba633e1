"""How often a match of earlier text predicted the next token, learnt from every token that the target writes.

These events need no drafts: each token of the target tells whether the match before it was right, whether or not the
token was drafted.
"""

from __future__ import annotations

from array import array

MAX_LENGTH, MAX_COUNT = 64, 8
"""All lengths and counts from these on share a bucket. Below, a bucket holds those with the same number of bits."""

MAX_TRIALS = 1024
"""Number of events at which a cell forgets half of them, because recent text tells more."""

_COUNT_CELLS = tuple(count.bit_length() for count in range(MAX_COUNT + 1))
_LENGTH_CELLS = tuple(length.bit_length() * (_COUNT_CELLS[-1] + 1) for length in range(MAX_LENGTH + 1))


def cell_of(length: int, count: int) -> int:
    """The cell that counts the events of matches of `length` tokens that stood in the text `count` times."""
    return (
        _LENGTH_CELLS[length if length < MAX_LENGTH else MAX_LENGTH]
        + _COUNT_CELLS[count if count < MAX_COUNT else MAX_COUNT]
    )


class MatchEvents:
    """How often matches predicted the next token, by the buckets of their length and count.

    estimates: the chance of a match in a cell to be right, (hits + 1) / (trials + 2): 1/2 before the first event.
    The arrays are never replaced, because the native library reads and writes them too."""

    def __init__(self) -> None:
        num_cells = cell_of(MAX_LENGTH, MAX_COUNT) + 1
        self.trials, self.hits = array("i", [0]) * num_cells, array("i", [0]) * num_cells
        self.estimates = array("d", [0.5]) * num_cells

    def add(self, length: int, count: int, is_hit: bool) -> None:
        """Count a token that the target wrote after a match; is_hit: the match predicted it."""
        cell = cell_of(length, count)
        self.trials[cell] += 1
        self.hits[cell] += is_hit
        if self.trials[cell] == MAX_TRIALS:
            self.trials[cell] //= 2
            self.hits[cell] //= 2
        self.estimates[cell] = (self.hits[cell] + 1) / (self.trials[cell] + 2)
