from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aquiline.train.losses import (
    LOSSES,
    TAKES_ALL_ROWS,
    LossRows,
    agreement,
    matched_given,
    overlap,
    soft_cross_entropy,
)
from aquiline.train.train_config import LOSS_NAMES

VOCAB, INSIDE = 12, 9


def some_rows(seed: int, num: int = 5, spread: float = 1.5) -> LossRows:
    """Rows whose target has mass outside the draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.softmax(spread * torch.randn(num, VOCAB, generator=generator, dtype=torch.float64), -1)
    inside = whole[:, :INSIDE].sum(-1)
    logits = spread * torch.randn(num, INSIDE, generator=generator, dtype=torch.float64)
    return LossRows(logits, whole[:, :INSIDE] / inside[:, None], inside)


def brute_agreement(rows: LossRows) -> Tensor:
    """sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), term by term."""
    q = torch.softmax(rows.logits, -1)
    out = []
    for p_in, inside, q_row in zip(rows.p, rows.inside, q, strict=True):
        p, total = p_in * inside, 0.0
        for i in range(INSIDE):
            ratios = torch.maximum(p / p[i], q_row / q_row[i]).sum() + (1 - inside) / p[i]
            total = total + 1 / ratios
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_values(name: str) -> None:
    rows = some_rows(0)
    got = LOSSES[name](LossRows(rows.logits.clone(), rows.p, rows.inside)).grad
    step, want = 1e-5, torch.empty_like(got)
    held = None
    if name.endswith("-mix"):  # the weight is held constant: rebuild the value with it fixed
        accepted = (overlap if name == "lk-mix" else agreement)(rows).value
        held = (-3 * accepted).exp()
    for k in range(INSIDE):
        sides = []
        for sign in (1, -1):
            moved = rows.logits.clone()
            moved[:, k] += sign * step
            at = LossRows(moved, rows.p, rows.inside)
            if held is None:
                sides.append(LOSSES[name](at).value)
            else:
                accepted = (overlap if name == "lk-mix" else agreement)(at).value
                sides.append(held * LOSSES["kl"](at).value + (1 - held) * (1 - accepted))
        want[:, k] = (sides[0] - sides[1]) / (2 * step)
    assert torch.allclose(got, want, atol=1e-6), name


def test_agreement_is_the_formula() -> None:
    rows = some_rows(1, num=20)
    assert torch.allclose(agreement(rows).value, brute_agreement(rows), atol=1e-10)


def test_agreement_is_how_often_shared_noise_agrees() -> None:
    rows = some_rows(2, num=3)
    generator = torch.Generator().manual_seed(0)
    noise = -(-torch.rand(200_000, VOCAB, generator=generator, dtype=torch.float64).log()).log()
    for b in range(3):
        whole = torch.cat((rows.p[b] * rows.inside[b], (1 - rows.inside[b]).reshape(1).expand(1)))
        target = (whole.log() + noise[:, : INSIDE + 1]).argmax(-1)
        draft = (rows.logits[b] + noise[:, :INSIDE]).argmax(-1)
        measured = (target == draft).double().mean()
        assert abs(measured - agreement(rows).value[b]) < 4 * 0.5 / 200_000**0.5


def test_agreement_is_the_mean_match_of_drawn_tokens() -> None:
    rows = some_rows(3, num=4)
    matches = torch.stack([matched_given(rows, torch.full((4,), i)) for i in range(INSIDE)], -1)
    p = rows.p * rows.inside[:, None]
    assert torch.allclose((p * matches).sum(-1), agreement(rows).value, atol=1e-10)
    assert matched_given(rows, torch.tensor([-1, 0, 1, 2]))[0] == 0, "a token without a name is never drafted"


def test_agreement_lies_between_its_bounds() -> None:
    rows = some_rows(4, num=50)
    accepted, bound = agreement(rows).value, overlap(rows).value  # overlap is 1 - TV
    assert (accepted <= bound + 1e-12).all() and (accepted >= bound / (2 - bound) - 1e-12).all()


def test_losses_are_least_where_draft_and_target_agree() -> None:
    torch.manual_seed(0)
    p = torch.softmax(torch.randn(5, 9), -1)
    one = torch.ones(5)
    for name, loss in LOSSES.items():
        at = loss(LossRows(p.log(), p, one)).value
        off = loss(LossRows(p.log() + torch.randn(5, 9), p, one)).value
        assert (at < off).all(), name
        if name != "ce":
            assert at.abs().max() < 1e-5, name


def test_soft_cross_entropy_is_the_textbook_one() -> None:
    rows = some_rows(5)
    want = -(rows.p * torch.log_softmax(rows.logits, -1)).sum(-1)
    assert torch.allclose(soft_cross_entropy(rows).value, want)


def test_the_names_on_the_command_line_are_the_losses_there_are() -> None:
    assert tuple(LOSSES) == LOSS_NAMES and set(LOSSES) >= TAKES_ALL_ROWS
