"""Any JSON value, as hypothesis draws it: what nobody means to write into a file, and files have all the same."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

TRAPS: list[Any] = [
    None, True, False, 0, 1, -1, 2, 2.5, 16.0, 1e308, -0.0, 5e-324, float("nan"), float("inf"), float("-inf"), 2**31,
    2**64, 10**400, "", "0", "true", "yes", "\x00", "\ud800", "../up", "/etc/passwd", "\u2028", [], [[]], {},
    [None], [True], [1.5], ["a"], {"a": {}}, {"": None},
]  # fmt: skip
"""What a number, a flag, a text, a list and an object are most often mistaken for."""

ANY_JSON = st.sampled_from(TRAPS) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def nested(levels: int) -> str:
    """JSON text of lists within lists."""
    return "[" * levels + "]" * levels
