"""What a draft is trained to say is what it says when it serves: every token's place, at every depth of a chain."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tests.conftest import from_modules, needs_native
from tests.engine.sampling_apart import gumbel
from torch import Tensor

from aquiline.backends.base import Admit, Chunk, Decode, Pages, Sizes, StepInput
from aquiline.backends.torch.decoder import load_target
from aquiline.backends.torch.eagle import DraftHead, load_draft
from aquiline.config import Environment, SamplingParams
from aquiline.engine.model import LoadedModels, Loading, load_models
from aquiline.engine.score import Scorer
from aquiline.models.model_config import RopeConfig
from aquiline.spec.drafting import Chain, Drafting, Static
from aquiline.train.start import for_long_contexts
from aquiline.train.train_config import TrainConfig, Yarn, yarn_of
from aquiline.train.trainer import train
from aquiline.train.ttt import TokenBatch, passes
from aquiline.types import Int32

DEPTH, PROMPT, WINDOW = 6, 40, 8
REACHES: dict[str, dict[str, Any]] = {
    "all": {}, "window": {"draft_window": WINDOW}, "yarn": {"rope_scaling": "yarn:4:16"},
    "both": {"draft_window": WINDOW, "rope_scaling": "yarn:4:16"},
}  # fmt: skip
GREEDY = SamplingParams(seed=0)
SAMPLED = SamplingParams(temperature=0.7, seed=2**40 + 5)


def prompt() -> Int32:
    return np.random.default_rng(5).integers(1, 48, PROMPT).astype(np.int32)


class Served:
    """A chain drafted behind a prompt by the backend that serves it, and at every depth of it all tokens of the draft's
    vocabulary in the order that it prefers them [DEPTH, Vd]."""

    def __init__(self, models: LoadedModels, tokens: Int32, sampling: SamplingParams) -> None:
        assert models.draft_config is not None
        width = models.draft_config.draft_vocab_size
        paths = tuple((*(0,) * depth, rank) for depth in range(DEPTH) for rank in range(width))
        self.sampling = sampling
        self.features = torch.from_numpy(Scorer(models, 128)([tokens]).features.copy())
        self.order = drafted(models, tokens, Static(paths), sampling).reshape(DEPTH, width)
        self.tokens = drafted(models, tokens, Chain(DEPTH), sampling)
        assert np.array_equal(self.tokens, self.order[:, 0]), "a chain follows the first choices"


def drafted(models: LoadedModels, tokens: Int32, drafting: Drafting, sampling: SamplingParams) -> Int32:
    """The tokens of the tree that grows below the last of `tokens`, root apart, level after level."""
    backend, root = models.pair.open(Sizes(1, 32, 16, 32, 128)), len(tokens) - 1
    admit = Admit(0, tokens.tolist(), root, sampling, drafts=True)
    prompt = StepInput(
        admits=(admit,), pages=(Pages(0, 0, tuple(range(32))),), chunks=(Chunk(0, 0, root, True, False),)
    )
    backend.step(prompt).read()
    return backend.draft(StepInput(decodes=(Decode(0, drafting),))).read().tokens[1:]


@torch.no_grad()
def trained_passes(head: DraftHead, features: Tensor, tokens: Int32) -> list[Tensor]:
    """a [H] of the prompt's last row in every pass of training, over the prompt and what was drafted."""
    width = len(tokens) + 1
    whole = torch.cat((torch.from_numpy(tokens).long(), torch.zeros(1, dtype=torch.int64)))
    padded = torch.zeros(width, features.shape[1])
    padded[: len(features)] = features
    every = torch.ones(1, width, dtype=torch.bool)
    batch = TokenBatch(whole[None], torch.zeros(1, width, dtype=torch.int64), torch.arange(width)[None], every)
    last = PROMPT - 2
    return [a[0, last] for _, a in passes(head, batch, padded[None], DEPTH)]


@torch.no_grad()
def agree(head: DraftHead, served: Served, tokens: Int32) -> None:
    """Training scores every child as high as the one that serving puts behind it, at every depth and of all tokens."""
    ids, sampling = head.target_ids(torch.arange(head.config.draft_vocab_size)), served.sampling
    states = trained_passes(head, served.features, np.concatenate((tokens, served.tokens)))
    for depth, (state, order) in enumerate(zip(states, served.order, strict=True)):
        scores = torch.zeros(int(ids.max()) + 1)
        scores[ids] = head.logits(state)
        if sampling.temperature:
            assert sampling.seed is not None
            noise = gumbel(sampling.seed, PROMPT + depth, ids.tolist())
            scores[ids] = scores[ids] / sampling.temperature + torch.from_numpy(noise).float()
        assert sorted(order.tolist()) == ids.tolist(), f"depth {depth}"
        assert scores[order.tolist()].diff().max() < 1e-3, f"depth {depth}"


@pytest.mark.parametrize("path", [pytest.param("native", marks=needs_native), "torch"])
@pytest.mark.parametrize("reach", REACHES)
def test_a_draft_prefers_what_training_computes(reach: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "torch":
        monkeypatch.setenv("AQUILINE_ISA", "off")
    model = tiny.target()
    base = TrainConfig(Path("t"), (Path("d"),), Path("o"), ttt_steps=DEPTH, context=48, **REACHES[reach])
    head = for_long_contexts(tiny.head(model), base)
    assert head.config.model.window(0) == REACHES[reach].get("draft_window", 0)
    models = from_modules(model, head, None, Loading("float32"), Environment.read())
    assert models.pair.name == path
    for sampling in (GREEDY, SAMPLED):
        agree(head, Served(models, prompt(), sampling), prompt())


def test_a_window_and_yarn_change_what_is_said() -> None:
    model = tiny.target()
    base = TrainConfig(Path("t"), (Path("d"),), Path("o"), ttt_steps=DEPTH, context=48)
    models = from_modules(model, tiny.head(model), None, Loading("float32"), Environment.read())
    served = Served(models, prompt(), GREEDY)
    for reach in ("window", "yarn"):
        changed = for_long_contexts(tiny.head(model), replace(base, **REACHES[reach]))
        with pytest.raises(AssertionError, match="depth 0"):
            agree(changed, served, prompt())


def test_a_finetuned_draft_serves_as_it_was_trained(tmp_path: Path) -> None:
    """From files: a plain draft, trained on with a window and YaRN, loaded by the engine and by training alike."""
    plain = replace(tiny.run_config(tmp_path), steps=2, ttt_steps=DEPTH, eval_rows=2)
    train(plain, quiet=True)
    long = replace(
        plain, out=tmp_path / "long", init=plain.out, draft_vocab_size=None, context=64, draft_window=WINDOW,
        rope_scaling="yarn:4:64",
    )  # fmt: skip
    train(long, quiet=True)
    target = load_target(long.target, dtype="float32", capture=tiny.CAPTURE)
    head = load_draft(long.out, target, dtype="float32")
    assert head.config.model.windows == (WINDOW,) and head.config.model.max_positions == 256
    assert asdict(head.config.model.rope) == asdict(
        RopeConfig(10000.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64.0})
    )
    models = load_models(long.target, long.out, Loading("float32", "float32"), Environment.read())
    agree(head, Served(models, prompt(), GREEDY), prompt())

    result = train(replace(long, resume=True, init=None, steps=3), quiet=True)
    assert result is not None and result["steps"] == 3
    with pytest.raises(ValueError, match="draft_window: 8 before, 12 now"):
        train(replace(long, resume=True, init=None, draft_window=12), quiet=True)
    with pytest.raises(ValueError, match="ttt_steps=9: exceeds the window of 8"):
        train(replace(long, out=tmp_path / "other", init=long.out, draft_window=None, ttt_steps=9), quiet=True)


def test_reach_is_checked_where_it_is_set() -> None:
    assert yarn_of("yarn:4") == Yarn(4.0) and yarn_of("yarn:2.5:2048") == Yarn(2.5, 2048)
    for text in ("yarn", "yarn:1", "linear:4", "yarn:4:0", "yarn:4:8:9", "yarn:x"):
        assert yarn_of(text) is None
    with pytest.raises(ValueError, match=r"draft_window=3: must be at least ttt_steps = 7.*rope_scaling='ntk'"):
        TrainConfig(Path("t"), (Path("d"),), Path("o"), draft_window=3, rope_scaling="ntk")


def test_stretching_twice_changes_nothing_more() -> None:
    head = tiny.head(tiny.target())
    base = TrainConfig(Path("t"), (Path("d"),), Path("o"), rope_scaling="yarn:4")
    once = for_long_contexts(head, base)
    assert once.config.model.max_positions == 1024 and for_long_contexts(once, base) is once
    for name, parameter in once.named_parameters():
        assert parameter.equal(dict(head.named_parameters())[name]) and parameter.requires_grad == (name != "embed")
