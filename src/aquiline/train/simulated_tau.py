"""How a draft would serve: the acceptance length simulated on the target's own text.

Per-step accuracies do not multiply into acceptance, and human text is not what a target writes. So the engine continues
held-out prompts, greedily and at a temperature; the draft runs its passes over that text; and the matrix of match
probabilities is walked as chain decoding would walk it. At temperature 0 a match is certain or impossible. At a
temperature it is the probability, given the token that the target drew, that the draft draws it too with the same
noise: what the engine accepts, averaged over all noise that leads to this text (losses.py, matched_given).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.backends.torch.eagle import DraftHead
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels
from aquiline.spec.drafting import NoDraft
from aquiline.train.batches import Assembler, Batch
from aquiline.train.losses import matched_given, rows_of, soft_cross_entropy
from aquiline.train.run_figures import mean_of_known
from aquiline.train.ttt import passes
from aquiline.types import Float64, Int32

GROUP = 8
"""Texts judged together."""
TEMPERATURE = 0.8


@dataclass(frozen=True)
class JudgedText:
    """A prompt of num_prompt tokens and its continuation by the target, drawn at `temperature`: int32 [n]."""

    tokens: Int32
    num_prompt: int
    temperature: float


def write_texts(
    models: LoadedModels, prompts: Sequence[Int32], num_new: int, temperature: float, seed: int
) -> list[JudgedText]:
    """The target's continuation of each prompt, at most num_new tokens, by the engine and without a draft."""
    config = EngineConfig(max_batch=16, row_budget=1024, prefix_cache=False)
    llm = LLM.from_models(models, config, NoDraft())
    sampling = [SamplingParams(max_tokens=num_new, temperature=temperature, seed=seed + i) for i in range(len(prompts))]
    outputs = llm.generate([tokens.tolist() for tokens in prompts], sampling)
    return [
        JudgedText(np.array(o.prompt_ids + o.token_ids, np.int32), len(o.prompt_ids), temperature)
        for o in outputs
        if len(o.token_ids) > 1
    ]


def expected_cycles(match: Float64) -> float:
    """The expected number of cycles that chains of S drafts take along a text of n tokens.

    match [n, S]: the probability that draft k of a cycle at row i is accepted, given that its earlier drafts were. A
    cycle at row i that accepts a drafts commits a + 1 tokens, so the next cycle is at row i + a + 1. Each of the n rows
    is one token to commit; a cycle that reaches past the last row is cut there."""
    n, num_steps = match.shape
    left = np.zeros(n + num_steps + 2)
    for i in range(n - 1, -1, -1):
        reached, total = 1.0, 1.0
        for k in range(num_steps):
            total += reached * (1 - match[i, k]) * left[i + k + 1]
            reached *= match[i, k]
        left[i] = total + reached * left[i + num_steps + 1]
    return float(left[0])


@dataclass(frozen=True)
class DraftJudgement:
    """How good the draft is on the target's own text.

    loss: mean soft cross-entropy of all passes. accuracy: per pass, how often the draft's best guess is the target's.
    tau: simulated tokens committed per cycle of a greedy chain. tau_sampled: the same at `temperature`. cycles: the
    expected number of each text's cycles, in the order in which they were given."""

    loss: float
    accuracy: tuple[float, ...]
    tau: float
    tau_sampled: float
    temperature: float = TEMPERATURE
    cycles: tuple[float, ...] = ()

    @property
    def score(self) -> float:
        """The checkpoint with the highest score is the best: the mean of both taus, or the one that there are texts
        for."""
        mean = mean_of_known((self.tau, self.tau_sampled))
        return 0.0 if math.isnan(mean) else mean

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {
            "held_out_loss": self.loss, "accuracy": list(self.accuracy), "simulated_tau": self.tau,
            "simulated_tau_sampled": self.tau_sampled, "temperature": self.temperature,
        }  # fmt: skip


class HeldOut:
    """Held-out texts, greedy and sampled. The target computes its views of them at the first judgement only."""

    def __init__(self, assembler: Assembler, texts: Sequence[JudgedText], num_steps: int) -> None:
        self.assembler, self.num_steps = assembler, num_steps
        self.order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
        by_length = [texts[i] for i in self.order]
        self.groups = [by_length[i : i + GROUP] for i in range(0, len(by_length), GROUP)]
        self.seen: list[tuple[Batch, Tensor]] = []  # what _look gives, one per group; filled by the first judgement

    @torch.no_grad()
    def judge(self, head: DraftHead) -> DraftJudgement:
        """Judge the draft with its present weights."""
        if not self.seen:
            self.seen = [self._look(group) for group in self.groups]
        sums = torch.zeros(3, self.num_steps)
        cycles, tokens, by_text = {False: 0.0, True: 0.0}, {False: 0, True: 0}, list[float]()
        for group, (batch, tempered) in zip(self.groups, self.seen, strict=True):
            match, told = self._matches(head, group, batch, tempered)
            sums += told
            for text, of_text in zip(group, match, strict=True):
                by_text.append(expected_cycles(of_text))
                cycles[text.temperature > 0] += by_text[-1]
                tokens[text.temperature > 0] += len(of_text)
        tau = {is_sampled: tokens[is_sampled] / num if num else math.nan for is_sampled, num in cycles.items()}
        loss, right, counts = sums
        accuracy = tuple((right / counts.clamp_min(1)).tolist())
        mean = float(loss.sum() / counts.sum().clamp_min(1))
        given = tuple(cycles_of for _, cycles_of in sorted(zip(self.order, by_text, strict=True)))
        return DraftJudgement(mean, accuracy, tau[False], tau[True], cycles=given)

    def _matches(
        self, head: DraftHead, group: Sequence[JudgedText], batch: Batch, tempered: Tensor
    ) -> tuple[list[Float64], Tensor]:
        """Per text, match [n, S] of the rows after its prompt, as expected_cycles takes it. And three sums per pass
        [3, S]: losses, right best guesses, counted rows."""
        T, S = batch.tokens.tokens.shape[1], self.num_steps
        ids = head.target_ids(torch.arange(head.config.draft_vocab_size, device=head.d2t.device))
        draft_id = torch.full((head.config.model.vocab_size,), -1, device=ids.device)
        draft_id[ids] = torch.arange(len(ids), device=ids.device)
        match = torch.zeros(len(group), T + S, S)
        told = torch.zeros(3, S)
        for step, (rows, a) in enumerate(passes(head, batch.tokens, batch.target.features, S)):
            for b, text in enumerate(group):
                own = rows[text.num_prompt - 1 : len(text.tokens) - 2 - step]
                if not len(own):
                    continue
                at = b * T + own + 1 + step
                drawn = draft_id[batch.tokens.tokens[b, own + 2 + step]]
                target, lse = batch.target.logits(at, torch.float32), batch.target.lse[at]
                mine = head.logits(a[b, own])
                best = batch.target.in_vocab.flatten()[at]
                told[0, step] += float(soft_cross_entropy(rows_of(mine, target, lse)).value[best].sum())
                told[1, step] += float(((mine.argmax(-1) == target.argmax(-1)) & best).sum())
                told[2, step] += float(best.sum())
                right = (mine.argmax(-1) == drawn).float()
                if (t := text.temperature) > 0:
                    right = matched_given(rows_of(mine / t, target / t, tempered[at]), drawn)
                match[b, own, step] = right.cpu()
        lengths = [(t.num_prompt - 1, len(t.tokens) - 2) for t in group]
        return [match[b, first:end].double().numpy() for b, (first, end) in enumerate(lengths)], told

    def _look(self, group: Sequence[JudgedText]) -> tuple[Batch, Tensor]:
        """The texts with the target's views of them, and the log-sum-exp [B * T] of the target's logits / temperature,
        with the temperature of each text, 1 for greedy texts."""
        width = max(len(t.tokens) for t in group) + self.num_steps + 1
        batch = self.assembler.single([t.tokens for t in group], [t.num_prompt for t in group], width)
        whole, hidden = self.assembler.whole_head, batch.target.hidden
        temperatures = torch.tensor([text.temperature or 1.0 for text in group], device=hidden.device)
        parts = zip(torch.split(hidden, 256), torch.split(temperatures.repeat_interleave(width), 256), strict=True)
        return batch, torch.cat([torch.logsumexp(h.float() @ whole.T / t[:, None], -1) for h, t in parts])
