"""GSM8K: the number that an answer states as its result.

Exact values (Fraction), so that 18, 18.00 and $18 are one number and 0.1 is not 0.1000001.
"""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS = r"(?>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\.)\.\d+)"
# A minus counts as a sign only where no operand precedes it: 10-5 holds 10 and 5.
_NUMBER = rf"(?P<sign>(?<![\w)\].])[-−])?(?:[$€£](?P<minus>[-−])?)?(?P<value>{_DIGITS})(?P<over>/[1-9]\d*)?"
_OPENING = r"[\s*_`$€£(\[{\"']*"
_MARKERS = (
    # The data set's own. "#### 1. First step" is a heading, not an answer.
    re.compile(rf"####{_OPENING}{_NUMBER}(?![.):][*_]*[ \t]+\S)"),
    re.compile(rf"\\boxed\{{{_OPENING}(?:\\text\{{)?{_NUMBER}"),
    re.compile(rf"\banswer\b(?:\s+is\b[*_]*\s*[:=]?|[*_]*\s*[:=]){_OPENING}{_NUMBER}", re.IGNORECASE),
)
_ANY = re.compile(_NUMBER)
_LATEX = ((r"\$", "$"), ("{,}", ","), (r"\,", ""), (r"\!", ""))


def final_number(answer: str) -> Fraction | None:
    """The number an answer states as its result, None if it holds no number.

    In this order: after the first ####, in the last \\boxed{}, right after the last "answer is" or "answer:", the last
    number of the text. Thousands separators, currency signs and LaTeX around digits do not count.
    *Source*: openai/grade-school-math@3101c7d, dataset.py (the first #### counts); the other three are for models that
    were not shown that format."""
    for written, plain in _LATEX:
        answer = answer.replace(written, plain)
    marked, boxed, said = (list(marker.finditer(answer)) for marker in _MARKERS)
    matches = marked[:1] or boxed[-1:] or said[-1:] or list(_ANY.finditer(answer))[-1:]
    return _value(matches[0]) if matches else None


def _value(match: re.Match[str]) -> Fraction:
    value = Fraction(match["value"].replace(",", ""))
    if match["over"]:
        value /= int(match["over"][1:])
    return -value if match["sign"] or match["minus"] else value
