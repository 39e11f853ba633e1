"""How a draft would serve: the acceptance length simulated on the target's own continuations. Source: EAGLE3.md §7.

Per-step accuracies do not multiply into acceptance, and human text is not what a target writes; so the target
continues held-out prompts, greedily and sampled, the draft runs its steps over that text, and the matrix of right
guesses is walked exactly as chain decoding would walk it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aquiline.models.config import ModelConfig
from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead
from aquiline.train.losses import LOSSES
from aquiline.train.target import TargetTeacher
from aquiline.train.ttt import TargetView, TokenBatch, num_rows, passes, ttt_loss
from aquiline.types import Bool


class GrowingAttention:
    """Plain attention over keys that all rows of a batch share in position: prompts of one length, then one by one."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, Hq, Dh], k and v [B, T, Hkv, Dh] of the next T positions -> [B, T, Hq * Dh]."""
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), 1)
            v = torch.cat((self.values[layer], v), 1)
        self.keys[layer], self.values[layer] = k, v
        T, total, window = q.shape[1], k.shape[1], self.config.window(layer)
        queries = torch.arange(total - T, total, device=q.device)[:, None]
        keys = torch.arange(total, device=q.device)[None, :]
        seen = (keys <= queries) & ((keys > queries - window) if window else True)
        groups = q.shape[2] // k.shape[2]
        k, v = (t.transpose(1, 2).repeat_interleave(groups, 1) for t in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen)
        return out.transpose(1, 2).flatten(2)


@torch.no_grad()
def continue_prompts(target: Decoder, prompts: Tensor, num_new: int, temperature: float, seed: int) -> Tensor:
    """The target's own text: prompts int64 [B, P] -> [B, P + num_new]. temperature 0 is greedy.

    Autocast is off: for a few rows, casting the weights anew for every token costs more than it saves."""
    with torch.autocast(prompts.device.type, enabled=False):
        return _continue(target, prompts, num_new, temperature, seed)


def _continue(target: Decoder, prompts: Tensor, num_new: int, temperature: float, seed: int) -> Tensor:
    generator = torch.Generator(prompts.device).manual_seed(seed)
    attn, tokens = GrowingAttention(target.config), prompts
    step = prompts
    for _ in range(num_new):
        first = tokens.shape[1] - step.shape[1]
        positions = torch.arange(first, tokens.shape[1], device=tokens.device).expand(step.shape)
        logits = target.logits(target(step, positions, attn).hidden[:, -1])
        if temperature == 0:
            step = logits.argmax(-1, keepdim=True)
        else:
            step = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        tokens = torch.cat((tokens, step), 1)
    return tokens


def walk(correct: Bool, first: int = 0) -> list[int]:
    """Tokens committed per cycle, decoding one row of text whose correct[i, k] says: row i's guess at step k is right.

    From row `first` on, row i's cycle accepts its leading right guesses, commits one more (the target's own), and the
    next cycle starts that many rows on."""
    accepted = np.cumprod(correct, axis=1).sum(axis=1)
    committed, i = [], first
    while i < len(correct):
        committed.append(int(accepted[i]) + 1)
        i += committed[-1]
    return committed


@dataclass(frozen=True)
class Continuations:
    """Target-written text behind prompts of `prompt` tokens, with the target's view of it."""

    prompt: int
    batch: TokenBatch
    view: TargetView


def own_text(teacher: TargetTeacher, prompts: Tensor, num_new: int, temperature: float, seed: int) -> Continuations:
    """Continue the prompts and look at the result once: features stay for every later judgement."""
    tokens = continue_prompts(teacher.target, prompts, num_new, temperature, seed)
    batch = TokenBatch(
        tokens,
        torch.zeros_like(tokens),
        torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens),
        torch.ones_like(tokens, dtype=torch.bool),
    )
    view = teacher.view(batch)
    return Continuations(prompts.shape[1], batch, TargetView(view.features, view.probs[:0], view.in_vocab))


@torch.no_grad()
def simulated_tau(head: DraftHead, text: Continuations, num_steps: int) -> float:
    """Mean tokens committed per cycle of a chain of num_steps drafts. A token the draft cannot name is a miss.

    Drafts are best guesses. The engine, which has the noise that sampled text was drawn with, accepts more of those."""
    right = []
    for step, (rows, a) in enumerate(passes(head, text.batch, text.view.features, num_steps)):
        guesses = head.target_ids(head.logits(a).argmax(-1))
        right.append(guesses == text.batch.tokens[:, rows + 2 + step])
    correct = torch.stack(right, -1).cpu().numpy()
    cycles = [c for row in correct for c in walk(row, text.prompt - 1)]
    return sum(cycles) / len(cycles)


@dataclass(frozen=True)
class Judgement:
    """One look at the draft: held-out text (loss, accuracy per step) and target-written text (tau)."""

    loss: float
    accuracy: tuple[float, ...]
    tau: float  # greedy continuations
    tau_sampled: float  # continuations at temperature 1


class HeldOut:
    """Held-out material, seen by the target once at the start."""

    def __init__(self, teacher: TargetTeacher, batch: TokenBatch, num_steps: int, seed: int) -> None:
        """batch: packed held-out rows; prompts are the beginnings of rows, half a row long."""
        self.num_steps, self.teacher, self.batch = num_steps, teacher, batch
        context = batch.tokens.shape[1]
        prompt, new = max(1, context // 2), max(num_steps + 4, context // 4)
        whole = (batch.document[:, :prompt] == 0).all(1)
        prompts = batch.tokens[whole][:, :prompt]
        if not len(prompts):
            raise ValueError(f"no held-out document has {prompt} tokens (half of context): shorten context")
        self.greedy = own_text(teacher, prompts, new, 0.0, seed)
        self.sampled = own_text(teacher, prompts, new, 1.0, seed)
        self.view = teacher.view(batch)
        assert num_rows(prompt + new, num_steps) >= prompt

    @torch.no_grad()
    def judge(self, head: DraftHead) -> Judgement:
        """Loss is soft cross-entropy, whatever the run trains on; accuracy is marginal."""
        steps = ttt_loss(head, self.batch, self.view, self.num_steps, LOSSES["ce"], measure=True)
        counts = max(1, sum(s.count for s in steps))
        return Judgement(
            sum(float(s.loss) * s.count for s in steps) / counts,
            tuple(s.accuracy for s in steps),
            simulated_tau(head, self.greedy, self.num_steps),
            simulated_tau(head, self.sampled, self.num_steps),
        )
