from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from aquiline.backends.torch.eagle import DraftHead
from aquiline.backends.torch.reference import rope
from aquiline.train.master_weights import WIDE_LOGITS, default_lr
from aquiline.train.start import fit, new_head
from aquiline.train.teacher import View
from aquiline.train.ttt import TokenBatch, passes

H, NUM = tiny.CONFIG.hidden_size, 120


class Text(NamedTuple):
    """Tokens of a document, and the target's features and hidden state there."""

    tokens: Tensor
    features: Tensor
    hidden: Tensor


def fit_to(head: DraftHead, texts: list[Text]) -> None:
    none = torch.zeros(0)
    views = [View(text.features, text.hidden, none, none) for text in texts]
    documents = [text.tokens.numpy().astype(np.int32) for text in texts]
    fit(head, documents, views, torch.ones(texts[0].features.shape[1]))


def linear_world(num_documents: int = 8, seed: int = 0, constant: float = 12.0) -> list[Text]:
    """Documents in which the target's state follows from the state before it and the token: what `fit` is meant for.

    constant: the size of the component that all states share."""
    generator = torch.Generator().manual_seed(seed)
    embed = tiny.target().embed
    step = torch.linalg.qr(torch.randn(H, H, generator=generator))[0] * 0.7
    says = torch.randn(H, H, generator=generator) / H**0.5
    mix = torch.randn(3 * H, H, generator=generator) / H**0.5
    samples = []
    for _ in range(num_documents):
        tokens = torch.randint(0, 48, (NUM,), generator=generator)
        states, state = [], torch.randn(H, generator=generator)
        for token in tokens:
            e = embed[token]
            state = step @ state + says @ (e / e.pow(2).mean().sqrt())
            state[0] = constant
            state = state / state.pow(2).mean().sqrt()
            states.append(state)
        hidden = torch.stack(states)
        samples.append(Text(tokens, hidden @ mix.T, hidden * tiny.target().final_norm))
    return samples


def first_pass(head: DraftHead, sample: Text) -> Tensor:
    batch = TokenBatch(
        sample.tokens[None], torch.zeros(1, NUM, dtype=torch.int64), torch.arange(NUM)[None],
        torch.ones(1, NUM, dtype=torch.bool),
    )  # fmt: skip
    with torch.no_grad():
        _, a = next(passes(head, batch, sample.features[None], 1))
    return a[0]


@torch.no_grad()
def unexplained(a: Tensor, sample: Text, norm: Tensor) -> float:
    """Share of the next state's variance that the draft's output does not explain."""
    state = (sample.hidden / norm)[1 : 1 + len(a)]
    return float((a - state).pow(2).sum() / (state - state.mean(0)).pow(2).sum())


@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_a_fitted_draft_knows_the_next_state(num_kv_heads: int) -> None:
    head = new_head(tiny.target(), torch.arange(40), num_kv_heads=num_kv_heads)
    before = unexplained(first_pass(head, linear_world()[0]), linear_world()[0], head.norm)
    fit_to(head, linear_world())
    after = unexplained(first_pass(head, linear_world()[0]), linear_world()[0], head.norm)
    assert before > 0.9
    assert after < (0.6 if num_kv_heads == 2 else 0.35), f"{after}: rank 16 or 32 of 32"


@torch.no_grad()
def test_chosen_heads_attend_to_their_own_position() -> None:
    head = new_head(tiny.target(), torch.arange(40))
    samples = linear_world()
    fit_to(head, samples)
    sample, dim = samples[0], tiny.CONFIG.head_dim
    embedded = head.layer.norm(head.embed[sample.tokens[1:]], head.layer.input_norm)
    normed = head.layer.norm(sample.features[:-1] @ head.fc.T, head.hidden_norm)
    x = torch.cat((embedded, normed), -1)
    q, k, _ = torch.split(x @ head.layer.qkv.T, head.layer.split, -1)
    rotation = head.rope(torch.arange(len(x)))
    q0, k0 = (rope(t[:, None, :dim], rotation.cos, rotation.sin)[:, 0] for t in (q, k))
    scores = (q0 @ k0.T * dim**-0.5).masked_fill(~torch.ones(len(x), len(x)).tril().bool(), -torch.inf)
    assert scores.softmax(-1).diagonal().mean() > 0.8


def test_without_a_constant_direction_the_attention_starts_silent() -> None:
    head = new_head(tiny.target(), torch.arange(40))
    fit_to(head, linear_world(constant=0.0))
    assert not head.layer.o.any() and head.fc.any()


def test_the_start_is_the_same_every_time() -> None:
    heads = [new_head(tiny.target(), torch.arange(40), seed=1) for _ in range(2)]
    for head in heads:
        fit_to(head, linear_world())
    for (name, a), b in zip(heads[0].named_parameters(), heads[1].parameters(), strict=True):
        assert a.equal(b), name


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="num_heads=4: must be a multiple of num_kv_heads=3"):
        new_head(tiny.target(), torch.arange(40), num_kv_heads=3)


def test_a_large_final_norm_goes_into_the_head() -> None:
    """As Gemma 3's does. The function stays, to the bit: the share that moves is a power of two. The fit is the same,
    and the default rate is as much lower as logits are larger."""
    small, large = tiny.target(), tiny.target()
    with torch.no_grad():
        large.final_norm.mul_(64.0)
    ids = torch.arange(48)
    heads = [new_head(target, ids) for target in (small, large)]
    texts = linear_world()
    for head, factor in zip(heads, (1.0, 64.0), strict=True):
        fit_to(head, [text._replace(hidden=text.hidden * factor) for text in texts])
    assert torch.equal(heads[1].head * heads[1].norm, 64.0 * heads[0].head * heads[0].norm)
    assert 1.0 <= heads[1].norm.square().mean().sqrt() < 2.0
    torch.testing.assert_close(heads[1].fc, heads[0].fc)
    size = float((large.head.float() * large.final_norm).square().sum(-1).mean().sqrt())
    assert size > WIDE_LOGITS and default_lr(large) == pytest.approx(1e-3 * WIDE_LOGITS / size)
    assert default_lr(small) == 1e-3
