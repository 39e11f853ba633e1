"""What the bundled pair says, by whole forwards without caches, pages, batches or passes; and the draft trees it should
grow, node by node."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from tests.dense import DenseAttention
from tests.engine.sampling_apart import gumbel
from torch import Tensor

from aquiline.backends.torch.decoder import Decoder, load_target
from aquiline.backends.torch.eagle import DraftHead, load_draft
from aquiline.config import SamplingParams
from aquiline.models.formats import read_draft_config
from aquiline.models.known_pairs import BUNDLED_DRAFT, BUNDLED_TARGET
from aquiline.spec.drafting import Chain, Drafting, Dynamic, Static

Path = tuple[int, ...]
"""Tokens of a node's path, the root's excluded."""


@cache
def pair() -> tuple[Decoder, DraftHead]:
    """The bundled target and draft in float32."""
    capture = read_draft_config(BUNDLED_DRAFT, BUNDLED_TARGET).capture
    target = load_target(BUNDLED_TARGET, dtype="float32", capture=capture)
    return target, load_draft(BUNDLED_DRAFT, target, dtype="float32")


class AlongAPath:
    """Attention of one more row behind the first `length` rows of a text and those of its own path."""

    def __init__(self, text: Recorded, length: int, path: tuple[tuple[Tensor, Tensor], ...]) -> None:
        self.text, self.length, self.path = text, length, path
        self.own: tuple[Tensor, Tensor]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        self.own = k, v
        keys = torch.cat([self.text.k[:, : self.length], *(k for k, _ in self.path), k], 1)
        values = torch.cat([self.text.v[:, : self.length], *(v for _, v in self.path), v], 1)
        groups = q.shape[2] // k.shape[2]
        keys, values = (t.repeat_interleave(groups, 2) for t in (keys, values))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, keys).div(math.sqrt(q.shape[-1])).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, values).flatten(2)


class Recorded(DenseAttention):
    """Whole texts at once, and the keys and values they left."""

    k: Tensor
    v: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        self.k, self.v = k, v
        return super().attend(layer, q, k, v, sinks)


@dataclass(frozen=True)
class Row:
    """A draft row that was run: its output [H], and the keys and values of its path, itself last."""

    out: Tensor
    path: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass
class Text:
    """A finished text, and how its drafts were drawn."""

    tokens: list[int]
    params: SamplingParams
    rows: dict[tuple[int, Path], Row] = field(default_factory=dict)

    @cached_property
    @torch.inference_mode()
    def target(self) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and features [T, F] of every token."""
        decoder, _ = pair()
        tokens = torch.tensor(self.tokens)[None]
        out = decoder(tokens, torch.arange(len(self.tokens))[None], DenseAttention(decoder.config))
        return decoder.logits(out.hidden)[0], out.features[0]

    @cached_property
    @torch.inference_mode()
    def draft(self) -> tuple[Tensor, Recorded]:
        """Outputs [T - 1, H] of the draft's rows over the text, and what they left behind."""
        _, head = pair()
        attention, features = Recorded(head.config.model), self.target[1][:-1]
        tokens = torch.tensor(self.tokens[1:])[None]
        out = head(head.fuse(features)[None], tokens, torch.arange(len(self.tokens) - 1)[None], attention)
        return out[0], attention

    @torch.inference_mode()
    def row(self, root: int, path: Path) -> Row:
        """The draft's row of a node: `root` is the root token's position, and the row before it has seen the root."""
        if not path:
            return Row(self.draft[0][root - 1])
        if (root, path) not in self.rows:
            _, head = pair()
            before = self.row(root, path[:-1])
            attention = AlongAPath(self.draft[1], root, before.path)
            position = torch.tensor([[root - 1 + len(path)]])
            out = head(head.feedback(before.out)[None, None], torch.tensor([path[-1:]]), position, attention)
            self.rows[root, path] = Row(out[0, 0], (*before.path, attention.own))
        return self.rows[root, path]

    @torch.inference_mode()
    def children(self, root: int, path: Path) -> tuple[list[int], list[float]]:
        """All children of a node in the order the draft prefers them, and the log-probabilities of its preference."""
        _, head = pair()
        scores = head.logits(self.row(root, path).out).double()
        ids = head.target_ids(torch.arange(len(scores)))
        if self.params.temperature:
            assert self.params.seed is not None
            noise = gumbel(self.params.seed, root + 1 + len(path), ids.tolist())
            scores = scores / self.params.temperature + torch.from_numpy(noise)
        order = scores.argsort(descending=True, stable=True)
        return ids[order].tolist(), scores.log_softmax(-1)[order].tolist()

    def tree(self, root: int, drafting: Drafting) -> set[Path]:
        """Paths of all nodes that a drafter should propose below the token at `root`."""
        if isinstance(drafting, Chain):
            return self._static(root, [(0,) * depth for depth in range(1, drafting.num_spec_tokens + 1)])
        if isinstance(drafting, Static):
            return self._static(root, sorted(drafting.static_paths, key=len))
        return self._dynamic(root, drafting) if isinstance(drafting, Dynamic) else set()

    def _static(self, root: int, ranks: list[tuple[int, ...]]) -> set[Path]:
        paths: dict[tuple[int, ...], Path] = {(): ()}
        for rank in ranks:
            above = paths[rank[:-1]]
            paths[rank] = (*above, self.children(root, above)[0][rank[-1]])
        return set(paths.values()) - {()}

    def _dynamic(self, root: int, drafting: Dynamic) -> set[Path]:
        """EAGLE-2: a path scores the product of its probabilities; each level expands its best `top_k` paths, and the
        best `num_nodes - 1` of all that were met are verified."""
        chances: dict[Path, float] = {(): 0.0}
        beam: list[Path] = [()]
        for _ in range(drafting.depth + 1):
            level: dict[Path, float] = {}
            for path in beam:
                for token, logprob in zip(*(c[: drafting.top_k] for c in self.children(root, path)), strict=True):
                    level[*path, token] = chances[path] + logprob
            chances |= level
            beam = sorted(level, key=lambda path: -level[path])[: drafting.top_k]
        del chances[()]
        return set(sorted(chances, key=lambda path: -chances[path])[: drafting.num_nodes - 1])
