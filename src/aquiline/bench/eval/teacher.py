"""Teacher-forced accuracy of a draft, measured by the engine that serves it.

The models run with an acceptance that keeps no draft (SimulatedAcceptance(1)): every step commits only the target's own
next token, so that a chain is proposed at every position of the target's own text. The draft then reads at every
position what it would read if a real chain began there: the target's features of all committed tokens, and nothing
else. So walking the matrix of right guesses gives the tau of a real chain, and on the native path exactly that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import TokenDelta
from aquiline.spec.drafting import Chain, NoDraft
from aquiline.types import Bool


def teacher(llm: LLM, max_context: int) -> LLM:
    """An LLM over the same models that accepts no draft, for one sequence of at most max_context tokens."""
    models = llm.models.with_simulated(1.0)
    config = replace(
        llm.engine.config, max_batch=1, num_pages=None, max_context=max_context, prefix_cache=False, late_reads=False
    )
    return LLM.from_models(models, config, NoDraft())


@dataclass(frozen=True, eq=False)
class Guesses:
    """Which guesses of chains were right on one text of n output tokens. right bool [n - 1, K]: row i, column k is
    the guess of output token i + 1 + k by the chain below token i; False past the end of the text."""

    token_ids: list[int]
    right: Bool

    def cycles(self, num_spec_tokens: int) -> list[int]:
        """Tokens that each step with a real chain of that length would commit; the text's end cuts the last step."""
        accepted = np.cumprod(self.right[:, :num_spec_tokens], axis=1).sum(axis=1)
        committed, i, end = [], 0, len(self.right)
        while i < end:
            committed.append(min(int(accepted[i]) + 1, end - i))
            i += committed[-1]
        return committed


def guess(llm: LLM, prompt_ids: list[int], sampling: SamplingParams, num_spec_tokens: int) -> Guesses:
    """Continue a prompt with a `teacher` LLM and compare every chain with the tokens that the target wrote."""
    proposed: list[list[int]] = []

    def read(delta: TokenDelta) -> None:
        step = llm.engine.pipeline.last
        assert step is not None
        if step.plan.decoding:  # not the step whose chunk ends the prompt
            tree, _ = step.read().trees()
            proposed.append(tree.tokens[1:].tolist())

    spec = Chain(num_spec_tokens)
    output = llm.run([prompt_ids], sampling, spec=spec, on_delta=read).outputs[0]
    written = np.array(output.token_ids)
    n, K = len(written), num_spec_tokens
    assert len(proposed) == n - 1, f"{len(proposed)} chains along {n} tokens"
    chains = np.array(proposed, np.int64).reshape(n - 1, K)
    places = np.arange(1, n)[:, None] + np.arange(K)
    return Guesses(output.token_ids, (places < n) & (chains == written[np.minimum(places, n - 1)]))


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a draft along several texts, for each place k = 1, 2, ... in the chain; None without guesses.

    num_guesses: guesses that lie inside their text. marginal: share of them that are right. conditional: that share
    where all earlier guesses of the chain are right. simulated_tau: tokens per step that chains of k drafts would
    commit."""

    num_guesses: list[int]
    marginal: list[float | None]
    conditional: list[float | None]
    simulated_tau: list[float | None]


def accuracy(texts: Sequence[Guesses], num_spec_tokens: int) -> Accuracy:
    """The accuracy of chains over all texts."""
    guesses, right, leading, before = ([0] * num_spec_tokens for _ in range(4))
    for text in texts:
        for k in range(num_spec_tokens):
            inside = text.right[: max(0, len(text.right) - k)]
            guesses[k] += len(inside)
            right[k] += int(inside[:, k].sum())
            before[k] += int(inside[:, :k].all(axis=1).sum())
            leading[k] += int(inside[:, : k + 1].all(axis=1).sum())
    cycles = [[c for text in texts for c in text.cycles(k + 1)] for k in range(num_spec_tokens)]
    return Accuracy(
        num_guesses=guesses,
        marginal=[_share(a, b) for a, b in zip(right, guesses, strict=True)],
        conditional=[_share(a, b) for a, b in zip(leading, before, strict=True)],
        simulated_tau=[_share(sum(c), len(c)) for c in cycles],
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
