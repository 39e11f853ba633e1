"""Error replay: serving says which tokens the draft missed, training makes them weigh more."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from tests.conftest import needs_native
from tests.train.regenerating import ROWS, llm, read, regenerate, target, write
from torch import Tensor

from aquiline.engine.llm import LLM
from aquiline.engine.sequence import TokenDelta
from aquiline.regenerate.answering import rejected_tokens
from aquiline.spec.drafting import Chain
from aquiline.train.batches import RowPiece, gather
from aquiline.train.checkpoint import compare_settings
from aquiline.train.distributed import World
from aquiline.train.documents import Document, build_corpus
from aquiline.train.losses import LOSSES
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Clock
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import Trainer, train
from aquiline.train.ttt import Objective, passes, plan, ttt_loss


def test_a_target_token_behind_less_than_a_chain_was_rejected() -> None:
    D, T = True, False
    #  prompt's  none   one       two: the whole chain  cut by the end
    by_draft = [T, T, D, T, D, D, T, D]
    assert rejected_tokens(by_draft, 2) == [0, 1, 0, 1, 0, 0, 0, 0]
    assert rejected_tokens(by_draft, 3) == [0, 1, 0, 1, 0, 0, 1, 0]
    assert rejected_tokens([], 2) == [] and rejected_tokens([T, T, T], 1) == [0, 1, 1]


def missed_by_verification(runs: LLM, seen: dict[int | str, set[int]]) -> None:
    """Note in `seen`, by request, the positions of tokens that verification put in the place of drafted ones."""
    step = runs.engine.step

    def noted() -> list[TokenDelta]:
        deltas, last = step(), runs.engine.pipeline.last
        assert last is not None
        for sequence, decoded in zip(last.plan.decoding, last.output.decodes, strict=True):
            drawn = decoded.root + len(decoded.kept)  # the index of the last token that is kept
            if len(decoded.kept) - 1 < decoded.num_drafted and drawn < len(sequence.tokens):  # no stop cut it off
                seen.setdefault(sequence.request.id, set()).add(drawn)
        return deltas

    runs.engine.step = noted  # type: ignore[method-assign]


@needs_native
@pytest.mark.parametrize("length", [1, 3])
def test_rows_say_what_verification_rejected(length: int, tmp_path: Path) -> None:
    checkpoint, data = target(tmp_path / "target"), write(tmp_path / "prompts.jsonl", ROWS)
    drafting, seen = Chain(length), dict[int | str, set[int]]()
    engine = llm(3, drafting)
    missed_by_verification(engine, seen)
    done = regenerate(checkpoint, data, tmp_path / "out.jsonl", engine, max_tokens=40)
    assert done.summary.counters.num_accepted_tokens > 0
    rows = read(tmp_path / "out.jsonl")
    for number, row in rows.items():
        ids, mask, rejected = (np.array(row[name]) for name in ("token_ids", "loss_mask", "rejected"))
        assert rejected.shape == ids.shape and not rejected[mask == 0].any()
        # The stop token of an inner turn may have given way to the template's own.
        assert np.flatnonzero(rejected).tolist() == sorted(at for at in seen.get(number, ()) if mask[at])
    assert sum(map(sum, (row["rejected"] for row in rows.values()))) > 100
    regenerate(checkpoint, data, tmp_path / "alone.jsonl", llm(1, drafting), max_tokens=40)
    assert read(tmp_path / "alone.jsonl") == rows, "whatever the batch"
    regenerate(checkpoint, data, tmp_path / "plain.jsonl", llm(), max_tokens=40)
    assert all("rejected" not in row for row in read(tmp_path / "plain.jsonl").values())


def documents(lengths: tuple[int, ...] = (17, 15)) -> list[Document]:
    rng = np.random.default_rng(0)
    return [
        Document(str(n), rng.integers(0, 48, n).astype(np.int32), np.arange(n) > 3, rng.random(n) < 0.3)
        for n in lengths
    ]


@pytest.mark.parametrize("replay", [1.0, 3.0])
def test_the_loss_of_missed_tokens_weighs_more_in_values_and_gradients(replay: float) -> None:
    """By hand: each pass is the mean of its rows' losses weighed by the token they predict, whole logits, autograd."""
    corpus, model = build_corpus(documents()), tiny.target()
    batch = gather(corpus, [[RowPiece(0, 17), RowPiece(17, 15)]], 36, "cpu")
    head = tiny.head(model)
    told = tiny.target_of(model, batch, head.target_ids(torch.arange(32)))
    late, objective = torch.tensor([0, 3, 4, 11, 12, 20, 21]), Objective(LOSSES["ce"], 4, 0.8, replay=replay)
    trained = [p for p in head.parameters() if p.requires_grad]
    got = ttt_loss(head, batch, told, objective, plan(batch, told, objective, late))

    by_hand, flat, num_missed = torch.zeros(()), torch.zeros(()), 0
    target_logits = (told.hidden @ told.head.T)[None]
    tokens = [(number, at) for number, length in enumerate((17, 15)) for at in range(length)]
    for step, (rows, a) in enumerate(passes(head, batch, told.features, 4, late)):
        weights, losses = list[float](), list[Tensor]()
        for place, row in enumerate(rows.tolist()):
            predicted = row + 2 + step
            if predicted >= 32 or tokens[row][0] != tokens[predicted][0] or tokens[predicted][1] <= 3:
                continue
            if not told.in_vocab[0, predicted - 1]:
                continue
            p, q = torch.softmax(target_logits[0, predicted - 1], -1), torch.log_softmax(head.logits(a[0, place]), -1)
            losses.append(-(p * q).sum())
            weights.append(replay if corpus.rejected[predicted] else 1.0)
            num_missed += bool(corpus.rejected[predicted])
        weighed = torch.tensor(weights) * torch.stack(losses)
        by_hand = by_hand + 0.8**step * weighed.sum() / sum(weights)
        flat = flat + 0.8**step * torch.stack(losses).mean()
    assert num_missed > 5
    assert torch.allclose(got.total, by_hand, atol=1e-5) and (abs(float((got.total - flat).detach())) > 1e-3) == (
        replay > 1
    )
    for a, b in zip(torch.autograd.grad(got.total, trained), torch.autograd.grad(by_hand, trained), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run over rows as regenerate writes them, every third token of which was missed."""
    base = tiny.run_config(tmp_path_factory.mktemp("replay"))
    rng, rows = np.random.default_rng(4), []
    for _ in range(40):
        ids = [0, *(1 + np.cumsum(rng.integers(1, 4, 36)) % 47).tolist()]
        rows.append(
            {
                "token_ids": ids,
                "loss_mask": [int(i > 5) for i in range(37)],
                "rejected": [int(i % 3 == 0) for i in range(37)],
            }
        )
    data = write(base.out.parent / "served.jsonl", rows)
    return replace(base, data=(data,), steps=4, eval_every=2, eval_rows=2, replay=3.0, late_share=0.5)


def state_of(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(folder / "training.pt", weights_only=True)["head"]
    return state


@pytest.mark.rare
def test_a_resumed_run_replays_as_before(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    train(config)
    assert "tokens (35% of those counted) weigh 3" in capsys.readouterr().err
    last = config.out / "step-0000004"
    unbroken = state_of(last)
    shutil.rmtree(last)
    with pytest.raises(ValueError, match=r"replay: 3\.0 before, 1\.0 now"):
        train(replace(config, resume=True, replay=1.0), quiet=True)
    train(replace(config, resume=True), quiet=True)
    assert all(torch.equal(w, unbroken[name]) for name, w in state_of(last).items())


def test_a_checkpoint_from_before_replay_goes_on_without_it(config: TrainConfig) -> None:
    run = Trainer(replace(config, out=config.out / "old", replay=1.0), World(), None, Silent(), Clock())
    settings = {name: value for name, value in run.run.settings.items() if name != "replay"}
    compare_settings(settings, run.run.settings, ())
    with pytest.raises(ValueError, match="seed: not known before"):
        compare_settings({name: value for name, value in settings.items() if name != "seed"}, run.run.settings, ())
    with pytest.raises(ValueError, match=r"replay: 1\.0 before, 2\.0 now"):
        compare_settings(settings, run.run.settings | {"replay": 2.0}, ())


def test_accumulated_batches_share_the_weight_of_all(config: TrainConfig) -> None:
    whole, parts = (
        Trainer(
            replace(config, out=config.out / str(n), batch_size=n, accumulate=8 // n), World(), None, Silent(), Clock()
        )
        for n in (8, 2)
    )
    with tiny.in_float32():
        figures = [trainer._gradients()[0] for trainer in (whole, parts)]
    assert figures[0].total == pytest.approx(figures[1].total, rel=1e-6)
    for name, parameter in whole.weights.named.items():
        other = parts.weights.named[name]
        assert (parameter.grad - other.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_data_that_names_no_missed_token_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    plain = [
        {name: row[name] for name in ("token_ids", "loss_mask")}
        for row in map(json.loads, config.data[0].read_text().splitlines())
    ]
    run = replace(config, data=(write(tmp_path / "plain.jsonl", plain),), out=tmp_path / "out")
    with pytest.raises(ValueError, match=r"replay=3: no row of the data says .* aquiline regenerate --draft"):
        train(run, quiet=True)
    for value in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"replay=.*: must be"):
            replace(config, replay=value)
