"""The EAGLE-3 draft head: fuse the target's features, one decoder layer, its own vocabulary. Trains and serves.

A draft row j consumes the target's feature of token j and the embedding of token j + 1, at rotary position j, and
predicts token j + 2. Drafting further ahead, the output of the row before takes the place of the target's feature.
Source: Li et al., EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE@cb7e084.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aquiline.backends.torch import reference as ops
from aquiline.backends.torch.decoder import Attention, Decoder, DecoderLayer, Rope, held, parameter, stored, vector
from aquiline.backends.torch.ranks import ALONE, Ranks
from aquiline.blocks import Parts
from aquiline.models.formats import read_draft_weights, save_draft
from aquiline.models.model_config import DraftConfig
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.ops.torch_arrays import array_of, tensor_of


class DraftModel(Protocol):
    """What a step calls a draft head for, wherever and however it is computed. See DraftHead."""

    config: DraftConfig
    ranks: Ranks

    def __call__(self, g: Tensor, tokens: Tensor, positions: Tensor, attn: Any, /) -> Tensor:  # noqa: D102
        ...

    def fuse(self, features: Tensor) -> Tensor:  # noqa: D102
        ...

    def feedback(self, a: Tensor, /) -> Tensor:  # noqa: D102
        ...

    def logits(self, a: Tensor, /, is_whole: bool = True) -> Tensor:  # noqa: D102
        ...

    def target_ids(self, draft_ids: Tensor) -> Tensor:  # noqa: D102
        ...


class DraftHead(nn.Module):
    """fc over captured features, a decoder layer on [embed; hidden], norm and head over the draft vocabulary.

    `embed` is [V, H]: the target's unless the checkpoint ships one. Its rows are taken as they are stored, also where
    the target scales its embeddings (gemma3): SpecForge and EAGLE look them up in a plain copy. d2t holds int64
    offsets: target id = draft id + d2t[draft id]."""

    d2t: Tensor

    def __init__(self, config: DraftConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        H, Ht = config.model.hidden_size, config.target_hidden_size
        width = len(config.capture) * Ht
        self.embed = parameter(config.model.vocab_size, H)
        self.fc = parameter(H, width)
        self.input_norm = parameter(width) if config.norm_before_fc else None
        self.fc_norm = parameter(len(config.capture), Ht) if config.fc_norm else None
        self.hidden_norm = parameter(H)
        self.layer = DecoderLayer(config.model, 0, in_features=2 * H, ranks=ranks)
        self.norm = parameter(H)
        self.head = parameter(config.draft_vocab_size, H)
        self.rope = Rope(config.model)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., 3 Ht] -> g [..., H]."""
        eps = self.config.model.rms_norm_eps
        if self.input_norm is not None:
            features = ops.rms_norm(features, self.input_norm, eps)
        if self.fc_norm is not None:
            parts = torch.unflatten(features, -1, self.fc_norm.shape)
            features = ops.rms_norm(parts, self.fc_norm, eps).flatten(-2)
        return self.ranks.gather(ops.linear(features, self.fc), self.config.model.hidden_size)

    def forward(self, g: Tensor, tokens: Tensor, positions: Tensor, attn: Attention) -> Tensor:
        """One draft pass: g [..., H] of tokens j, the tokens j + 1 [...], positions j [...] -> a [..., H]."""
        embedded = self.ranks.embed(self.embed, tokens, self.config.model.vocab_size)
        embedded = self.layer.norm(embedded.to(g.dtype), self.layer.input_norm)
        normed = self.layer.norm(g, self.hidden_norm)
        residual = normed if self.config.norm_before_residual else g
        return self.layer.mix(torch.cat((embedded, normed), -1), residual, self.rope(positions), attn)

    def feedback(self, a: Tensor) -> Tensor:
        """What the next pass takes as its g."""
        return self.layer.norm(a, self.norm) if self.config.norm_feedback else a

    def logits(self, a: Tensor, is_whole: bool = True) -> Tensor:
        """a [..., H] -> float32 [..., Vd] over draft ids; over this rank's alone unless is_whole."""
        own = ops.linear(self.layer.norm(a, self.norm), self.head).float()
        return self.ranks.gather(own, self.config.draft_vocab_size) if is_whole else own

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids [...] -> target ids [...]."""
        return draft_ids + self.d2t[draft_ids]

    def weights(self, embed: Parts | None = None) -> DraftWeights:
        """The head as plain values, for a backend that runs a pass in one call. embed: that of the target's weights, if
        the head shares it."""
        model = ModelWeights(
            self.config.model, embed or stored(self.embed),
            (self.layer.weights(self.hidden_norm),), array_of(self.norm), stored(self.head), is_draft=True,
            norm_before_residual=self.config.norm_before_residual,
        )  # fmt: skip
        norms = vector(self.input_norm), vector(self.fc_norm)
        return DraftWeights(self.config, model, stored(self.fc), array_of(self.d2t), *norms)

    @classmethod
    def of(cls, weights: DraftWeights, embed: nn.Parameter | None = None, ranks: Ranks = ALONE) -> DraftHead:
        """The module of a draft's weights, which it reads one by one. embed: the embedding that it shares with its
        target. The embedding is frozen, the rest can be trained."""
        head, model = cls(weights.config, ranks), weights.model
        [layer] = model.layers
        head.embed = held(model.embed) if embed is None else embed
        head.layer.hold(layer)
        own = {"fc": weights.fc, "input_norm": weights.input_norm, "fc_norm": weights.fc_norm, "head": model.head}
        own |= {"norm": model.final_norm, "hidden_norm": layer.hidden_norm}
        for name, weight in own.items():
            if weight is not None:
                setattr(head, name, held(weight))
        head.d2t.copy_(tensor_of(weights.d2t))
        head.requires_grad_(True).embed.requires_grad_(False)
        return head.eval()


def save_head(head: DraftHead, directory: str | Path, *, target: Decoder | None = None) -> None:
    """Write a head as `save_draft` does, without the embedding if it is the target's."""
    save_draft(head.weights(), directory, target=None if target is None else target.weights())


def load_draft(
    path: str | Path,
    target: Decoder,
    *,
    dtype: str | None = None,
    capture: tuple[int, ...] | None = None,
    norm_feedback: bool | None = None,
) -> DraftHead:
    """A draft head for `target` as a module, in `dtype` (default: the target's). Raises as `read_draft_weights`.

    An absent embedding is the target's own parameter where the dtypes agree. The embedding is frozen, the rest can be
    trained."""
    whole = target.weights()
    draft = read_draft_weights(path, whole, dtype=dtype, capture=capture, norm_feedback=norm_feedback)
    return DraftHead.of(draft, target.embed if draft.model.embed is whole.embed else None)
