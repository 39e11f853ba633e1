"""The EAGLE-3 draft head: fuse the target's features, one decoder layer, its own vocabulary. Trains and serves.

A draft row j consumes the target's feature of token j and the embedding of token j + 1, at rotary position j, and
predicts token j + 2. Drafting further ahead, the output of the row before takes the place of the target's feature.
Source: Li et al., EAGLE-3, arXiv 2503.01840; SafeAILab/EAGLE@cb7e084.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aquiline.blocks import Parts
from aquiline.models.decoder import DecoderLayer, Rope, model_weights, parameter
from aquiline.models.model_config import DraftConfig
from aquiline.ops import reference as ops
from aquiline.types import Attention, ModelWeights


class DraftHead(nn.Module):
    """fc over captured features, a decoder layer on [embed; hidden], norm and head over the draft vocabulary.

    `embed` is [V, H]: the target's unless the checkpoint ships one. d2t holds int64 offsets: target id = draft id +
    d2t[draft id]."""

    d2t: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.packed_embed: Parts | None = None  # where the embedding is the target's and in packed blocks
        H, Ht = config.model.hidden_size, config.target_hidden_size
        width = len(config.capture) * Ht
        self.embed = parameter(config.model.vocab_size, H)
        self.fc = parameter(H, width)
        self.input_norm = parameter(width) if config.norm_before_fc else None
        self.fc_norm = parameter(len(config.capture), Ht) if config.fc_norm else None
        self.hidden_norm = parameter(H)
        self.layer = DecoderLayer(config.model, 0, in_features=2 * H)
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
        return ops.linear(features, self.fc)

    def forward(self, g: Tensor, tokens: Tensor, positions: Tensor, attn: Attention) -> Tensor:
        """One draft pass: g [..., H] of tokens j, the tokens j + 1 [...], positions j [...] -> a [..., H]."""
        embedded = self.layer.norm(self.embed[tokens].to(g.dtype), self.layer.input_norm)
        normed = self.layer.norm(g, self.hidden_norm)
        residual = normed if self.config.norm_before_residual else g
        return self.layer.mix(torch.cat((embedded, normed), -1), residual, self.rope(positions), attn)

    def feedback(self, a: Tensor) -> Tensor:
        """What the next pass takes as its g."""
        return self.layer.norm(a, self.norm) if self.config.norm_feedback else a

    def logits(self, a: Tensor) -> Tensor:
        """a [..., H] -> float32 [..., Vd] over draft ids."""
        return ops.linear(self.layer.norm(a, self.norm), self.head).float()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids [...] -> target ids [...]."""
        return draft_ids + self.d2t[draft_ids]

    def weights(self) -> ModelWeights:
        """The head as plain tensors (fc apart), for a backend that runs a pass in one call."""
        embed = self.packed_embed or self.embed.data
        return model_weights(
            self.config.model, self.rope, embed, (self.layer.weights(self.hidden_norm.data),),
            self.norm.data, self.head.data, is_draft=True, norm_before_residual=self.config.norm_before_residual,
        )  # fmt: skip
