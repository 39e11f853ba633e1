"""The training-time test's attention: four implementations of one mask, and windows that slide as decoding's do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from aquiline.backends.torch.eagle import DraftHead
from aquiline.train.distributed import World
from aquiline.train.losses import LOSSES
from aquiline.train.pass_attention import CHUNK, KINDS, StepKeys, TTTAttention
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Clock
from aquiline.train.train_config import ATTENTION_NAMES
from aquiline.train.trainer import Trainer
from aquiline.train.ttt import Objective, TokenBatch, num_rows, passes, plan, ttt_loss

B, HQ, HKV, DH = 2, 6, 2, 8


def documents(length: int) -> Tensor:
    """Two rows of documents; the first is padded behind its end."""
    document = torch.zeros(B, length, dtype=torch.int64)
    document[0, length - 3 :] = -1
    document[1, length // 3 :] = 1
    return document


def seen_by_hand(document: Tensor, rows: Tensor, step: int, window: int) -> Tensor:
    """The mask of training-time test, entry by entry."""
    T, N = document.shape[1], len(rows)
    mask = torch.zeros(B, N, T + step * N, dtype=torch.bool)
    for b in range(B):
        for n, place in enumerate(rows.tolist()):
            for key in range(T):
                near = not window or key > place + step - window
                mask[b, n, key] = key <= place and near and bool(document[b, key] == document[b, place])
            for s in range(1, step + 1):
                mask[b, n, T + (s - 1) * N + n] = True
    return mask


@pytest.mark.parametrize("window", [0, 5])
def test_the_mask_is_what_it_says(window: int) -> None:
    document, rows = documents(14), torch.tensor([0, 3, 4, 9])
    for step, places in ((0, torch.arange(14)), (1, rows), (3, rows)):
        assert StepKeys(document, places, step, window).mask().equal(seen_by_hand(document, places, step, window))


def run_steps(kind: str, inputs: list[tuple[Tensor, Tensor, Tensor]], rows: Tensor, window: int) -> Tensor:
    attn = TTTAttention(documents(inputs[0][0].shape[1]), rows, window, kind)
    outputs = []
    for step, (q, k, v) in enumerate(inputs):
        attn.begin(step)
        outputs.append(attn.attend(0, q, k, v))
    return torch.cat(outputs, 1)


def inputs_of(length: int, rows: Tensor, steps: int, grad: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(length)

    def drawn(n: int, heads: int) -> Tensor:
        return torch.randn(B, n, heads, DH, dtype=torch.float64, requires_grad=grad)

    sizes = [length] + [len(rows)] * (steps - 1)
    return [(drawn(n, HQ), drawn(n, HKV), drawn(n, HKV)) for n in sizes]


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("length", [12, CHUNK + 9])
@pytest.mark.parametrize("is_late", [False, True])
def test_all_implementations_agree_in_values_and_gradients(length: int, window: int, is_late: bool) -> None:
    rows = torch.arange(1, length, 2) if is_late else torch.arange(length)
    inputs = inputs_of(length, rows, 4, grad=True)
    leaves = [t for step in inputs for t in step]
    weight = torch.randn(B, length + 3 * len(rows), HQ * DH, dtype=torch.float64)
    results = {}
    for kind in ("eager", "sdpa", "fused"):
        out = run_steps(kind, inputs, rows, window)
        results[kind] = [out, *torch.autograd.grad((out * weight).sum(), leaves)]
    for kind in ("sdpa", "fused"):
        for got, want in zip(results[kind], results["eager"], strict=True):
            # the causal log-sum-exp of the fused one is float32
            assert torch.allclose(got, want, atol=1e-5), kind


@pytest.mark.parametrize("window", [0, 6])
def test_flex_computes_the_same_values_and_has_no_backward_on_a_cpu(window: int, tmp_path: Path) -> None:
    length = 20
    rows = torch.arange(1, length, 2)
    inputs = inputs_of(length, rows, 3, grad=False)
    assert torch.allclose(run_steps("flex", inputs, rows, window), run_steps("eager", inputs, rows, window), atol=1e-9)
    with pytest.raises(ValueError, match=r"attention='flex': .*take fused, sdpa or eager"):
        Trainer(replace(tiny.run_config(tmp_path), attention="flex"), World(), None, Silent(), Clock())
    assert {*KINDS, "fused"} == set(ATTENTION_NAMES)


def batch_of(length: int) -> TokenBatch:
    tokens = torch.randint(0, 48, (1, length), generator=torch.Generator().manual_seed(1))
    document = torch.zeros(1, length, dtype=torch.int64)
    return TokenBatch(tokens, document, torch.arange(length)[None], torch.ones(1, length, dtype=torch.bool))


def test_a_step_of_training_does_not_depend_on_the_implementation() -> None:
    model, batch = tiny.target(), batch_of(40)
    vocab = torch.arange(32) * 48 // 32
    target = tiny.target_of(model, batch, vocab)
    results = {}
    for kind in ("fused", "sdpa", "eager"):
        head = tiny.head(model)
        objective = Objective(LOSSES["ce"], 4, 0.8, attention=kind)
        result = ttt_loss(head, batch, target, objective, plan(batch, target, objective, torch.arange(1, 35, 3)))
        result.total.backward()
        results[kind] = [result.total.detach(), *(p.grad for p in head.parameters() if p.grad is not None)]
    for kind in ("sdpa", "eager"):
        for got, want in zip(results[kind], results["fused"], strict=True):
            assert (got - want).norm() <= 1e-5 * want.norm()


class WindowedCache:
    """Plain decoding: every pass appends its keys and sees the last `window` of them."""

    def __init__(self, window: int) -> None:
        self.window, self.k, self.v = window, torch.zeros(0, 2, 16), torch.zeros(0, 2, 16)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        self.k, self.v = torch.cat((self.k, k)), torch.cat((self.v, v))
        at = torch.arange(len(self.k) - len(q), len(self.k))[:, None]
        keys = torch.arange(len(self.k))
        bias = torch.zeros(len(q), len(keys)).masked_fill_((keys > at) | (keys <= at - self.window), -torch.inf)
        groups = q.shape[1] // k.shape[1]
        whole_k, whole_v = (t.repeat_interleave(groups, 1).transpose(0, 1) for t in (self.k, self.v))
        scores = q.transpose(0, 1) @ whole_k.mT * q.shape[-1] ** -0.5 + bias
        return (scores.softmax(-1) @ whole_v).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("kind", ["fused", "sdpa"])
def test_a_window_slides_as_in_real_decoding(kind: str) -> None:
    model, width, steps, window = tiny.target(), 24, 5, 6
    head = tiny.head(model)
    narrow = DraftHead(replace(head.config, model=replace(head.config.model, windows=(window,))))
    narrow.load_state_dict(head.state_dict())
    batch = batch_of(width)
    features = tiny.features_of(model, batch)
    with torch.no_grad():
        trained = list(passes(narrow, batch, features, steps, attention=kind))
        for i in (3, 9, num_rows(width, steps) - 1):
            attn = WindowedCache(window)
            g = narrow.fuse(features[0, : i + 1])
            a = narrow(g, batch.tokens[0, 1 : i + 2], torch.arange(i + 1), attn)[-1:]
            for k, (_, at_once) in enumerate(trained):
                if k:
                    a = narrow(narrow.feedback(a), batch.tokens[0, i + 1 + k][None], torch.tensor([i + k]), attn)
                assert (at_once[0, i] - a[0]).abs().max() < 1e-4, f"row {i}, step {k}"
