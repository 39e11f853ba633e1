"""The draft that a run begins with: a new one, or one with earlier weights, of a resumed run or of any draft (--init).

A new draft begins as a linear model of the target's state, fitted to a few thousand positions. From random weights a
draft needs hundreds of thousands of tokens to get as far as a least-squares fit gets in seconds:

    g_j            = fc f_j                          the target's final state at token j, from its features
    a_j            = g_j + o v([norm e_j+1; norm g_j])    the final state at token j + 1, from g_j and that token
    logits         = head norm(a_j)                  the target's own final norm and head

Both fits are closed forms. The second one is written into the attention of the draft's layer. Some of its heads are set
to attend to their own position: their queries and keys are the same vector at every position, so that the rotary
embedding alone decides, and it favours distance 0. That needs a direction in which all inputs are nearly alike.
Residual streams of language models have one; without it these heads start with output 0, as the other heads and the MLP
do. Later passes read a in the place of g; both stand for the target's final state, so the fit is right for them too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from aquiline.backends.torch.decoder import Decoder, DecoderLayer
from aquiline.backends.torch.eagle import DraftHead, load_draft
from aquiline.models.model_config import DraftConfig, RopeConfig
from aquiline.train.teacher import View
from aquiline.train.train_config import TrainConfig, yarn_of
from aquiline.types import Int32

NOISE = 0.02
RIDGE = 1e-2
"""Ridge penalty as a share of the inputs' mean square: keeps a fit to few positions from following their noise."""
SELF_SHARE = 2 / 3
"""Share of the key/value heads that begin by attending to their own position."""
SELF_PAIRS = 5
"""How many rotary frequencies, the fastest first, tell distance 0 from others. With fewer, scores repeat within a
context; with more, the heads attend less sharply."""
MOST_BLUR = 0.2
"""Root-mean-square error of the constant direction at most. Scores are about 30, so an error of 0.1 moves them by 3."""
SELF_GAP = 5.0
"""A position's own score minus its neighbour's; at 5 its share of the attention is above 0.99."""


def new_head(
    target: Decoder, vocab: Tensor, *, intermediate_size: int | None = None, num_heads: int | None = None,
    num_kv_heads: int | None = None, seed: int = 0,
) -> DraftHead:  # fmt: skip
    """A fresh float32 draft for a target loaded with its capture layers; None takes the target's geometry, and for a
    mixture the width of the experts that one row uses, in a dense layer.

    vocab int64 [Vd]: target ids, ascending. The embedding is a frozen copy of the target's. `fit` makes it useful."""
    t = target.config
    model = replace(
        t.draft_layer, num_heads=num_heads or t.num_heads, num_kv_heads=num_kv_heads or t.num_kv_heads,
        intermediate_size=intermediate_size or t.draft_layer.intermediate_size,
    )  # fmt: skip
    if model.num_heads % model.num_kv_heads:
        raise ValueError(f"num_heads={model.num_heads}: must be a multiple of num_kv_heads={model.num_kv_heads}")
    head = DraftHead(DraftConfig(model, len(vocab), t.hidden_size, target.capture))
    initialise(head, target, vocab, seed)
    head.embed.requires_grad_(False)
    return head


@torch.no_grad()
def initialise(head: DraftHead, target: Decoder, vocab: Tensor, seed: int) -> None:
    """Fill every parameter. Embedding, final norm and head rows are the target's; so are the MLP's gate and up weights
    where the widths allow. Other norms are 1, the MLP's output weights 0, all other weights noise.

    A norm's weights go into the matrix behind it as far as they are a power of two. Gemma 3's final norm, for one,
    makes the head's inputs 54 times as large as others do, so that each step of the optimizer would move logits as
    much further."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if parameter.ndim == 1 or name == "fc_norm":
            parameter.fill_(1.0)
        elif name != "embed":
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * NOISE)
    head.embed.copy_(target.embed)
    size = power_of_two(target.final_norm)
    head.head.copy_(target.head[vocab] * size)
    head.norm.copy_(target.final_norm / size)
    head.d2t.copy_(vocab - torch.arange(len(vocab)))
    last = target.layers[-1]
    assert isinstance(last, DecoderLayer)
    width, inner = head.config.model.intermediate_size, last.down.shape[1]
    if width <= inner and head.layer.down.shape[0] == last.down.shape[0]:
        gate, up = last.gate_up.float().chunk(2)
        weight = last.down.float().norm(dim=0) * up.norm(dim=1)  # keeps the neurons with the largest weights
        kept = weight.topk(width).indices.sort().values
        size = power_of_two(last.post_norm)
        head.layer.gate_up.copy_(torch.cat((gate[kept], up[kept])) * size)
        head.layer.post_norm.copy_(last.post_norm / size)
    head.layer.down.zero_()


def power_of_two(norm: Tensor) -> float:
    """The largest power of two that a norm's weights reach on average (root mean square), and at least 1."""
    return max(1.0, 2.0 ** math.floor(math.log2(float(norm.float().square().mean().sqrt()))))


@torch.no_grad()
def fit(head: DraftHead, documents: Sequence[Int32], views: Sequence[View], scale: Tensor) -> None:
    """Set fc and the attention of a new head by least squares over the target's views of documents, in place. scale
    [C * H]: brings features to unit size."""
    samples = [view.features.float() * scale for view in views]
    states = [head.layer.norm(view.hidden.float() / head.norm, torch.ones_like(head.norm)) for view in views]
    head.fc.copy_(_solve(torch.cat(samples), torch.cat(states)))
    inputs, wanted = [], []
    for tokens, features, state in zip(documents, samples, states, strict=True):
        g = features[:-1] @ head.fc.T
        embedded = head.layer.norm(head.embed[torch.from_numpy(tokens[1:]).long()], head.layer.input_norm)
        inputs.append(torch.cat((embedded, head.layer.norm(g, head.hidden_norm)), -1))
        wanted.append(state[1:] - g)
    _attend_to_self(head, torch.cat(inputs), torch.cat(wanted))


def _solve(x: Tensor, y: Tensor) -> Tensor:
    """The matrix [Y, X] that maps rows x [n, X] to rows y [n, Y] with the least squared error, ridge included."""
    gram = x.double().T @ x.double()
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    solved: Tensor = torch.linalg.solve(gram, x.double().T @ y.double())
    return solved.T.float()


def _attend_to_self(head: DraftHead, x: Tensor, y: Tensor) -> None:
    """Make the layer's attention add nearly the least-squares fit of y [n, H] by the layer's input x [n, 2H] at the
    same position. The width of the value heads used bounds the rank of that fit."""
    config = head.config.model
    Dh, num_kv = config.head_dim, config.num_kv_heads
    group = config.num_heads // num_kv
    chosen = max(1, round(SELF_SHARE * num_kv))
    q, k, v = torch.split(head.layer.qkv, head.layer.split)
    constant = _solve(x, torch.ones(len(x), 1))[0]  # x @ constant is nearly 1
    head.layer.o.zero_()
    if float((x @ constant - 1).pow(2).mean().sqrt()) > MOST_BLUR:
        return
    frequencies = head.rope.inv_freq[:SELF_PAIRS]
    gap = float((1 - frequencies.cos()).sum()) * Dh**-0.5
    direction = torch.zeros(Dh)
    direction[: len(frequencies)] = (SELF_GAP / gap) ** 0.5
    to_self = direction[:, None] * constant
    weight = _solve(x, y)
    rank = min(chosen * Dh, len(weight))
    basis = torch.linalg.eigh(weight.double() @ (x.double().T @ x.double()) @ weight.double().T)[1][:, -rank:].float()
    values = torch.zeros(chosen * Dh, x.shape[1])
    values[:rank] = basis.T @ weight
    out = torch.zeros(head.layer.o.shape[0], chosen * Dh)
    out[:, :rank] = basis
    for h in range(chosen):
        rows = slice(h * Dh, (h + 1) * Dh)
        k[rows], v[rows] = to_self, values[rows]
        for member in range(h * group, (h + 1) * group):
            own = slice(member * Dh, (member + 1) * Dh)
            q[own], head.layer.o[:, own] = to_self, out[:, rows] / group


def loaded_head(source: Path, target: Decoder, config: TrainConfig) -> DraftHead:
    """The draft in folder `source` in float32, with its own vocabulary and shape: its weights fit no other.

    Raises ValueError if the config asks for another shape."""
    head = load_draft(source, target, dtype="float32", capture=target.capture, norm_feedback=config.norm_feedback)
    for name, has in shape_settings(head).items():
        asked = getattr(config, name)
        if asked is not None and asked != has:
            raise ValueError(f"{name}={asked}: the draft at {source} has {has}; drop the option")
    if head.embed is target.embed:  # a parameter of two modules would be saved and counted twice
        head.embed = nn.Parameter(target.embed.detach().clone(), requires_grad=False)
    if 0 < head.config.model.window(0) < config.ttt_steps and config.draft_window is None:
        raise ValueError(
            f"ttt_steps={config.ttt_steps}: exceeds the window of {head.config.model.window(0)} of {source}"
        )
    return head.train()


def shape_settings(head: DraftHead) -> dict[str, int]:
    """The settings of a draft's shape, which its weights fix, as this head has them."""
    names = ("intermediate_size", "num_heads", "num_kv_heads")
    own = {name: int(getattr(head.config.model, name)) for name in names}
    return {"draft_vocab_size": head.config.draft_vocab_size} | own


def for_long_contexts(head: DraftHead, config: TrainConfig) -> DraftHead:
    """The head with the window and rotary embedding that the config asks for, its weights the same.

    YaRN (arXiv 2309.00071) stretches the rotary embedding, whatever scaling it had, from the positions that the draft
    was trained for; training on long rows then makes the head fit it. A window keeps a draft at the distances it was
    trained on, however long the context."""
    model = head.config.model
    if config.draft_window is not None:
        model = replace(model, windows=(config.draft_window,) if config.draft_window else ())
    if config.rope_scaling is not None:
        yarn = yarn_of(config.rope_scaling)
        assert yarn is not None, config.rope_scaling
        built_for = model.rope.parameters.get("original_max_position_embeddings", model.max_positions)
        original = yarn.original or int(built_for if model.rope.kind == "yarn" else model.max_positions)
        parameters = {"factor": yarn.factor, "original_max_position_embeddings": float(original)}
        reached = max(model.max_positions, round(yarn.factor * original))
        model = replace(model, rope=RopeConfig(model.rope.theta, "yarn", parameters), max_positions=reached)
    if model == head.config.model:
        return head
    changed = DraftHead(replace(head.config, model=model))
    changed.load_state_dict(head.state_dict(), assign=True)
    changed.embed.requires_grad_(False)
    return changed.train()
