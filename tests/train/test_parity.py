"""What a draft is trained to say is what it says when it serves: logits and proposals at every depth of a chain."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from aquiline.spec.drafters import DraftSession, Pending, Roots
from tests.conftest import needs_native
from torch import Tensor

from aquiline.config import EngineConfig, Environment
from aquiline.engine.model import LoadedModels, Loading, from_modules, load_models
from aquiline.engine.score import Scorer
from aquiline.models.config import RopeConfig
from aquiline.models.eagle import DraftHead
from aquiline.models.formats import load_draft
from aquiline.models.load import load_target
from aquiline.train.config import TrainConfig, Yarn, yarn_of
from aquiline.train.continued import for_long_contexts
from aquiline.train.trainer import train
from aquiline.train.ttt import TokenBatch, passes
from aquiline.types import SAMPLING, Float32, Int32, Rows

DEPTH, PROMPT, WINDOW = 6, 40, 8
REACHES: dict[str, dict[str, Any]] = {
    "all": {}, "window": {"draft_window": WINDOW}, "yarn": {"rope_scaling": "yarn:4:16"},
    "both": {"draft_window": WINDOW, "rope_scaling": "yarn:4:16"},
}  # fmt: skip


def engine() -> EngineConfig:
    return EngineConfig(max_batch=2, row_budget=128, page_size=16)


def prompt() -> Int32:
    return np.random.default_rng(5).integers(1, 48, PROMPT).astype(np.int32)


class Served:
    """A chain drafted by the engine's own session behind a prompt: the tokens, and what every pass put out [H]."""

    def __init__(self, models: LoadedModels, tokens: Int32) -> None:
        assert models.draft is not None
        n = len(tokens) - 1
        features = Scorer(models, 128)([tokens]).features.copy()
        rows = Rows(128, 1, np.arange(8, dtype=np.int32)[None])
        session = DraftSession(models.draft, models.new_draft_kv(8, 16), rows, np.ones(1, np.int32), greedy)
        places = np.arange(n, dtype=np.int32)
        zeros = np.zeros(n, np.int32)
        self.outputs: list[Float32] = []
        forward = models.draft.forward

        def kept(rows: Rows, kv: Any, g: Float32) -> None:
            forward(rows, kv, g)
            self.outputs.append(models.draft.raw[rows.num - 1].copy())  # type: ignore[union-attr]

        models.draft.forward = kept  # type: ignore[method-assign]
        root = Roots(np.zeros(1, np.int32), tokens[-1:], np.array([n], np.int32))
        session.extend(Pending(zeros, places, tokens[1:], features[:n]), root)
        self.tokens = session.chain(DEPTH)[0]
        self.features = torch.from_numpy(features)


def greedy(slots: Int32, positions: Int32) -> Any:
    sampling = np.zeros(len(slots), SAMPLING)
    sampling["top_p"], sampling["position"] = 1, positions
    return sampling


def trained_passes(head: DraftHead, features: Tensor, tokens: Int32) -> list[Tensor]:
    """a [H] of the prompt's last row in every pass of training, over the prompt and what was drafted."""
    width = len(tokens) + 1
    whole = torch.cat((torch.from_numpy(tokens).long(), torch.zeros(1, dtype=torch.int64)))
    padded = torch.zeros(width, features.shape[1])
    padded[: len(features)] = features
    every = torch.ones(1, width, dtype=torch.bool)
    batch = TokenBatch(whole[None], torch.zeros(1, width, dtype=torch.int64), torch.arange(width)[None], every)
    last = PROMPT - 2
    with torch.no_grad():
        return [a[0, last] for _, a in passes(head, batch, padded[None], DEPTH)]


def agree(head: DraftHead, served: Served, tokens: Int32) -> None:
    states = trained_passes(head, served.features, np.concatenate((tokens, served.tokens)))
    for depth, (state, output) in enumerate(zip(states, served.outputs, strict=True)):
        logits, theirs = head.logits(state), head.logits(torch.from_numpy(output))
        assert (logits - theirs).abs().max() < 1e-3, f"depth {depth}"
        assert int(head.target_ids(logits.argmax())) == served.tokens[depth], f"depth {depth}"


@pytest.mark.parametrize("path", [pytest.param("native", marks=needs_native), "torch"])
@pytest.mark.parametrize("reach", REACHES)
def test_a_chain_proposes_what_training_computes(reach: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "torch":
        monkeypatch.setenv("AQUILINE_ISA", "off")
    model = tiny.target()
    base = TrainConfig(Path("t"), (Path("d"),), Path("o"), ttt_steps=DEPTH, context=48, **REACHES[reach])
    head = for_long_contexts(tiny.head(model), base)
    assert head.config.model.window(0) == REACHES[reach].get("draft_window", 0)
    models = from_modules(model, head, None, Loading("float32"), Environment.read())
    assert models.is_native == (path == "native")
    with torch.no_grad():
        agree(head, Served(models, prompt()), prompt())


def test_a_window_and_yarn_change_what_is_said() -> None:
    model = tiny.target()
    base = TrainConfig(Path("t"), (Path("d"),), Path("o"), ttt_steps=DEPTH, context=48)
    with torch.no_grad():
        served = Served(from_modules(model, tiny.head(model), None, Loading("float32"), Environment.read()), prompt())
        for reach in ("window", "yarn"):
            changed = for_long_contexts(tiny.head(model), replace(base, **REACHES[reach]))
            with pytest.raises(AssertionError):
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
    with torch.no_grad():
        agree(head, Served(models, prompt()), prompt())

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
