from __future__ import annotations

import pytest
import tiny
import torch
import torch.nn.functional as F
from tests.dense import DenseAttention
from torch import Tensor

from aquiline.backends.torch.eagle import DraftHead
from aquiline.train import losses
from aquiline.train.losses import LOSSES, TargetBatch
from aquiline.train.pass_attention import CHUNK, PackedAttention, step_attention, visibility
from aquiline.train.ttt import Objective, TokenBatch, counted, num_rows, passes, plan, ttt_loss

STEPS = 7


class CachedAttention:
    """Plain decoding: every pass appends its keys behind the cache and sees all of it."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        k = k if self.k is None else torch.cat((self.k, k))
        v = v if self.v is None else torch.cat((self.v, v))
        self.k, self.v = k, v
        n, total = q.shape[0], k.shape[0]
        seen = torch.arange(total)[None] <= torch.arange(total - n, total)[:, None]
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1).transpose(0, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen).transpose(0, 1).flatten(1)


def batch_of(lengths: list[int], width: int, seed: int = 0) -> TokenBatch:
    """One row of documents of the given lengths, padded to width."""
    tokens = torch.randint(0, 48, (1, width), generator=torch.Generator().manual_seed(seed))
    document, positions = torch.full((1, width), -1), torch.zeros(1, width, dtype=torch.int64)
    mask, at = torch.zeros(1, width, dtype=torch.bool), 0
    for d, length in enumerate(lengths):
        document[0, at : at + length], mask[0, at : at + length] = d, True
        positions[0, at : at + length] = torch.arange(length)
        at += length
    return TokenBatch(tokens, document, positions, mask)


def test_step_k_is_the_kth_pass_of_real_decoding() -> None:
    model, width = tiny.target(), 24
    head, batch = tiny.head(model), batch_of([width], width)
    features = tiny.features_of(model, batch)
    steps = list(passes(head, batch, features, STEPS))
    with torch.no_grad():
        for i in (0, 3, num_rows(width, STEPS) - 1):
            attn = CachedAttention()  # prefill rows 0..i, then one row per step
            g = head.fuse(features[0, : i + 1])
            a = head(g, batch.tokens[0, 1 : i + 2], torch.arange(i + 1), attn)[-1:]
            for k, (_, trained) in enumerate(steps):
                if k:
                    token = batch.tokens[0, i + 1 + k : i + 2 + k]
                    a = head(head.feedback(a), token, torch.tensor([i + k]), attn)
                assert (trained[0, i] - a[0]).abs().max() < 1e-4, f"row {i}, step {k}"


def test_a_packed_document_trains_as_if_alone() -> None:
    model = tiny.target()
    head = tiny.head(model)
    packed = batch_of([20, 17], 40)
    alone = TokenBatch(*(t[:, 20:37] for t in (packed.tokens, packed.document * 0, packed.positions, packed.mask)))
    features_packed, features_alone = tiny.features_of(model, packed), tiny.features_of(model, alone)
    assert torch.allclose(features_packed[:, 20:37], features_alone, atol=1e-5)
    rows = num_rows(17, 5)
    pairs = zip(passes(head, packed, features_packed, 5), passes(head, alone, features_alone, 5), strict=True)
    for (_, a), (_, b) in pairs:
        assert torch.allclose(a[:, 20 : 20 + rows], b, atol=1e-4)


def test_late_rows_change_nothing_for_the_rows_they_keep() -> None:
    model, batch = tiny.target(), batch_of([40], 40)
    head = tiny.head(model)
    features = tiny.features_of(model, batch)
    late = torch.tensor([1, 2, 9, 30])
    for k, ((_, a), (rows, b)) in enumerate(
        zip(passes(head, batch, features, 4), passes(head, batch, features, 4, late), strict=True)
    ):
        assert torch.allclose(a[:, rows], b, atol=1e-5), k


def test_the_mask_of_the_predicted_token_counts() -> None:
    batch = batch_of([10, 8], 20)
    batch.mask[0, 5] = False
    rows = torch.arange(12)
    got = counted(batch, rows, 1)[0].tolist()  # row i predicts token i + 3
    assert got == [(i + 3 < 10 and i + 3 != 5) or (i >= 10 and i + 3 < 18) for i in range(12)]


def textbook_loss(
    head: DraftHead, batch: TokenBatch, target: TargetBatch, objective: Objective, late: Tensor | None
) -> Tensor:
    """The objective with autograd alone: whole logits, no chunks, one pass at a time."""
    total = torch.zeros(())
    B, T = batch.tokens.shape
    told = (target.hidden @ target.head.T).view(B, T, -1)
    for step, (rows, a) in enumerate(passes(head, batch, target.features, objective.num_steps, late)):
        p = torch.softmax(told[:, rows + 1 + step], -1)
        each = -(p * torch.log_softmax(head.logits(a), -1)).sum(-1)
        counts = counted(batch, rows, step) & target.in_vocab[:, rows + 1 + step]
        total = total + objective.decay**step * each[counts].mean()
    return total


@pytest.mark.parametrize("late", [None, torch.tensor([0, 3, 4, 11, 20])])
def test_the_loss_in_chunks_is_the_textbook_one_in_values_and_gradients(
    late: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 32 * 16)  # 16 rows a chunk, 5 a block
    monkeypatch.setattr(losses, "BLOCK_BYTES", 4 * 32 * 5)
    model, batch = tiny.target(), batch_of([17, 15], 36)
    head = tiny.head(model)
    target = tiny.target_of(model, batch, head.target_ids(torch.arange(32)))
    objective = Objective(LOSSES["ce"], 4, 0.8)
    trained = [p for p in head.parameters() if p.requires_grad]
    got = ttt_loss(head, batch, target, objective, plan(batch, target, objective, late))
    want = textbook_loss(head, batch, target, objective, late)
    assert torch.allclose(got.total, want, atol=1e-5)
    pairs = zip(torch.autograd.grad(got.total, trained), torch.autograd.grad(want, trained), strict=True)
    for a, b in pairs:
        assert torch.allclose(a, b, atol=1e-5)


def test_accuracies_are_counted_along_the_chain() -> None:
    model, batch = tiny.target(), batch_of([40], 40)
    head = tiny.head(model)
    target = tiny.target_of(model, batch, head.target_ids(torch.arange(32)))
    objective = Objective(LOSSES["ce"], 3, 0.8)
    got = ttt_loss(head, batch, target, objective, plan(batch, target, objective))
    told = (target.hidden @ target.head.T)[None]
    right, counts = [], []
    for step, (rows, a) in enumerate(passes(head, batch, target.features, 3)):
        right.append(head.logits(a).argmax(-1)[0] == told[0, rows + 1 + step].argmax(-1))
        counts.append((counted(batch, rows, step) & target.in_vocab[:, rows + 1 + step])[0])
    leading = torch.ones_like(right[0])
    for k in range(3):
        assert got.accuracy[k] == pytest.approx(float(right[k][counts[k]].float().mean()))
        among = right[k][counts[k] & leading]
        assert got.conditional[k] == pytest.approx(float(among.float().mean()), nan_ok=True)
        leading = leading & counts[k] & right[k]


class PerfectDraft:
    """Stands where a draft head stands: whatever the pass, it says the token that is `shift` after its input token."""

    class config:  # noqa: N801
        class model:  # noqa: N801
            @staticmethod
            def window(layer: int) -> int:
                return 0

    class layer:  # noqa: N801
        @staticmethod
        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return x

    norm = torch.ones(1)

    def __init__(self, shift: int, vocab: int) -> None:
        self.shift, self.head = shift, 50 * torch.eye(vocab)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def __call__(self, g: Tensor, tokens: Tensor, positions: Tensor, attn: object) -> Tensor:
        attn.keys.append(None)  # type: ignore[attr-defined]
        return F.one_hot(tokens + self.shift, len(self.head)).float()

    def feedback(self, a: Tensor) -> Tensor:
        return a


def loss_of_perfect_draft(shift: int) -> float:
    """A target that always says token i + 1 after token i: zero loss for a draft that says the token after its input,
    when the row is compared with the right distribution, and only then."""
    width, vocab = 20, 32
    batch = batch_of([width], width)
    batch.tokens[0] = torch.arange(width)
    hidden, lse = F.one_hot(torch.arange(1, width + 1), vocab).float(), torch.full((width,), 50.0)
    every = torch.ones(1, width, dtype=torch.bool)
    target = TargetBatch(torch.zeros(1, width, 8), hidden, lse, 50 * torch.eye(vocab), every)
    objective = Objective(LOSSES["ce"], 4, 0.8)
    draft = PerfectDraft(shift, vocab)
    return float(ttt_loss(draft, batch, target, objective, plan(batch, target, objective)).total)  # type: ignore[arg-type]


def test_the_shift_is_right_and_its_mutants_fail() -> None:
    assert loss_of_perfect_draft(1) < 1e-3
    assert loss_of_perfect_draft(0) > 10
    assert loss_of_perfect_draft(2) > 10


def naive(q: Tensor, keys: list[Tensor], values: list[Tensor], document: Tensor, rows: Tensor, window: int) -> Tensor:
    """The full mask of training-time test over all keys of all steps, per query head."""
    T, groups = keys[0].shape[1], q.shape[2] // keys[0].shape[2]
    k, v = (torch.cat(x, 1).repeat_interleave(groups, 2).transpose(1, 2) for x in (keys, values))
    step0 = (torch.arange(T)[None] <= rows[:, None]) & (document[:, rows, None] == document[:, None, :])
    if window:
        step0 &= torch.arange(T)[None] > rows[:, None] - window
    own = torch.eye(len(rows), dtype=torch.bool).repeat(1, len(keys) - 1).expand(q.shape[0], -1, -1)
    mask = torch.cat((step0, own), -1)[:, None]
    scores = q.transpose(1, 2) @ k.mT * q.shape[-1] ** -0.5
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("length", [12, CHUNK + 9])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_fused_attention_equals_the_full_mask_in_values_and_gradients(step: int, length: int, window: int) -> None:
    torch.manual_seed(step)
    rows = torch.arange(length) if step == 0 else torch.arange(1, length, 2)
    document = torch.zeros(2, length, dtype=torch.int64)
    document[1, length // 3 :] = 1
    shapes = [(2, length, 2, 8)] + [(2, len(rows), 2, 8)] * step
    sets = [[torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes] for _ in range(2)]
    q = torch.randn(2, len(rows), 6, 8, dtype=torch.float64, requires_grad=True)
    inputs, weight = [q, *sets[0], *sets[1]], torch.randn(2, len(rows), 48, dtype=torch.float64)
    got = step_attention(q, *sets, visibility(document, rows, window))
    want = naive(q, *sets, document, rows, window)
    assert torch.allclose(got, want, atol=1e-5)
    got_grads = torch.autograd.grad((got * weight).sum(), inputs)
    for a, b in zip(got_grads, torch.autograd.grad((want * weight).sum(), inputs), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_packed_attention_is_dense_attention() -> None:
    model, batch = tiny.target(), batch_of([11, 9], 20)
    ours = model(batch.tokens, batch.positions, PackedAttention(model.config, batch.document))
    theirs = model(batch.tokens, batch.positions, DenseAttention(model.config, batch.document))
    assert torch.allclose(ours.hidden, theirs.hidden, atol=1e-4)
