"""The number an answer ends in, on strings that trip a plain regular expression."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquiline.bench.eval.answers import final_number


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        # the data set's own marker
        ("5 + 5 = <<5+5=10>>10\n#### 10", "10"),
        ("#### 1,234", "1234"),
        ("#### $18.00", "18"),
        ("####-5", "-5"),
        ("#### **42** apples", "42"),
        ("#### 42\nQuestion: How many?\nAnswer: 7\n#### 7", "42"),
        ("#### 1. Count\nThere are 3.\n#### 2. Add\nSo there are 7.", "7"),
        ("#### 12. Count\nThere are 3.", "3"),
        ("#### Step 1\nThe answer is 9.", "9"),
        # boxes and LaTeX
        (r"So $\boxed{42}$ in 7 days.", "42"),
        (r"\(\boxed{1{,}200}\)", "1200"),
        (r"$\boxed{\$1,080}$", "1080"),
        (r"\boxed{3}, no: \boxed{4}", "4"),
        (r"The final answer is: $\boxed{\text{36 apples}}$ for 2.", "36"),
        # words
        ("The answer is 42.", "42"),
        ("The answer is 42. I used 3 ways to check it.", "42"),
        ("**Answer:** $1,000,000 in 5 years", "1000000"),
        ("Answer: **$-3.50**", "-7/2"),
        ("the answer is .5 of the 8", "1/2"),
        ("The answer is 3/4 of the 16", "3/4"),
        ("The answer is 10. Wait, the answer is 12, not 3... no, 4.", "12"),
        ("She has to answer 20 questions in 5 hours", "5"),
        ("The answer is that 3 boxes of 4 make 12", "12"),
        # the last number
        ("She has 16 - 3 - 4 = 9 eggs, so 9 * 2 = $18", "18"),
        ("10-5=5", "5"),
        ("somewhere between 5-10", "10"),
        ("x = -7", "-7"),
        ("It is −7 degrees.", "-7"),
        ("a loss of -$5.25.", "-21/4"),
        ("It costs $5.", "5"),
        ("12,34", "34"),
        ("1,234,56", "56"),
        ("1,2345", "2345"),
        ("well...42", "42"),
        ("It takes 1.5 hours", "3/2"),
        ("that is 50%", "50"),
        ("There is none.", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_final_number(answer: str, number: str | None) -> None:
    assert final_number(answer) == (None if number is None else Fraction(number))


def test_numbers_are_equal_by_value_and_not_by_spelling() -> None:
    assert final_number("The answer is $18.00.") == final_number("... #### 18")
    assert final_number("#### 1,000") == final_number("#### 1000")
    assert final_number("#### 18") not in (final_number("#### 180"), final_number("#### -18"))
    assert final_number("I do not know.") != final_number("#### 18")
    assert final_number("It is 0.1000001") != final_number("#### 0.1")


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "{}.0", "{:,}.00"]),
    st.sampled_from(["#### {}", "The answer is {}.", "Answer: **{}** eggs, from 7 hens", r"so \boxed{{{}}} in 7 days",
                     "7 + 7 makes {}", "= {}", "#### {}\nQ: 7?\n#### 7"]),
)  # fmt: skip
def test_every_integer_in_every_spelling_is_read_back(value: int, spelling: str, sentence: str) -> None:
    assert final_number(sentence.format(spelling.format(value))) == value
