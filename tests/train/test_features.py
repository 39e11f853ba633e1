from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import save_file
from tests.checkpoints import write_mxfp4

from aquiline.train import teacher as features
from aquiline.train.distributed import World
from aquiline.train.pass_attention import PackedAttention
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Clock
from aquiline.train.teacher import FeatureCache, Teacher, View, Views, bytes_per_token, document_key, feature_scale
from aquiline.train.trainer import Trainer, train

IDENTITY = {"target": "tiny"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    path = tiny.write_target(tmp_path_factory.mktemp("features") / "target")
    return Teacher(path, tiny.CAPTURE, "cpu", 100)


def documents(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 48, n).astype(np.int32) for n in lengths]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def test_views_are_what_the_decoder_says(teacher: Teacher) -> None:
    for tokens, view in zip(documents(40, 80, 3), teacher.views(documents(40, 80, 3)), strict=True):
        model, rows = teacher.decoder.float(), torch.from_numpy(tokens).long()[None]
        positions = torch.arange(len(tokens))[None]
        out = model(rows, positions, PackedAttention(model.config, torch.zeros_like(rows)))
        logits = model.logits(out.hidden)[0]
        assert distance(view.features, out.features[0]) < 0.02, "keys and values are stored in bfloat16"
        assert distance(view.lse, torch.logsumexp(logits, -1)) < 0.02
        again = view.hidden.float() @ teacher.head.T
        # In bfloat16 arithmetic the head reads the rounded hidden state too; in float32 it does not.
        assert teacher.models is not None
        error = 1e-5 if teacher.models.system()["arithmetic"] == "bfloat16" else 0.01
        assert torch.allclose(view.lse, torch.logsumexp(again, -1), atol=error), "of the rounded hidden state"
        assert torch.allclose(again.gather(-1, view.best.long()[:, None])[:, 0], again.amax(-1), atol=error)


def test_a_teacher_may_have_packed_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library runs the blocks that transformers dequantises; rows whose experts nearly tie may differ."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    write_mxfp4(tmp_path, num_hidden_layers=8)
    teacher = Teacher(tmp_path, (1, 3, 4), "cpu", 100)
    assert teacher.path == "native" and teacher.models is not None and teacher.models.storage == "mxfp4+bfloat16"
    (view,) = teacher.views(documents(40))
    packed = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, trust_remote_code=False, dtype=torch.float32, quantization_config=packed
    ).eval()
    with torch.no_grad():
        layers = model(torch.from_numpy(documents(40)[0]).long()[None], output_hidden_states=True).hidden_states
    expected = torch.cat([layers[layer + 1][0] for layer in (1, 3, 4)], -1)
    apart = (view.features.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert apart.median() < 0.02
    monkeypatch.setenv("AQUILINE_ISA", "off")
    with pytest.raises(ValueError, match=r"device='cpu': training reads a target with attention sinks \(gpt_oss\)"):
        Teacher(tmp_path, (1, 3, 4), "cpu", 100)


def test_the_torch_path_says_the_same(teacher: Teacher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AQUILINE_ISA", "off")
    other = Teacher(tiny.write_target(tmp_path / "target"), tiny.CAPTURE, "cpu", 100)
    assert other.path == "torch"
    pairs = zip(teacher.views(documents(30, 20)), other.views(documents(30, 20)), strict=True)
    for a, b in pairs:
        assert distance(a.features, b.features) < 0.02 and distance(a.lse, b.lse) < 0.02


def same(a: View, b: View) -> bool:
    return all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_a_cache_gives_back_what_was_computed_and_computes_nothing_twice(teacher: Teacher, tmp_path: Path) -> None:
    texts = documents(40, 25, 60)
    views = Views(teacher.views, FeatureCache(tmp_path, IDENTITY))
    first = views.of(texts)
    assert views.cache is not None
    views.cache.flush()
    later = Views(teacher.views, FeatureCache(tmp_path, IDENTITY))
    assert all(same(a, b) for a, b in zip(first, later.of(texts[::-1])[::-1], strict=True))
    assert later.num_computed == 0
    later.of([*texts, *documents(40, 25, 60, 7)])
    assert later.num_computed == 7


def test_documents_reach_the_disk_by_shards(teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "SHARD_TOKENS", 50)
    views = Views(teacher.views, FeatureCache(tmp_path, IDENTITY))
    views.of(documents(30))
    assert not list(tmp_path.iterdir())
    views.of(documents(30, 31))
    (shard,) = tmp_path.iterdir()
    size = 61 * bytes_per_token(len(tiny.CAPTURE) * tiny.CONFIG.hidden_size, tiny.CONFIG.hidden_size)
    assert size < shard.stat().st_size < size + 2000


def test_a_cut_shard_is_computed_again(teacher: Teacher, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = FeatureCache(tmp_path, IDENTITY)
    Views(teacher.views, cache).of(documents(40))
    cache.flush()
    (shard,) = tmp_path.iterdir()
    shard.write_bytes(shard.read_bytes()[:-100])
    again = FeatureCache(tmp_path, IDENTITY)
    assert not again and "computed again" in caplog.text
    assert again.get(document_key(documents(40)[0])) is None


def test_a_file_of_others_in_the_folder_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "theirs.safetensors")
    assert len(FeatureCache(tmp_path, IDENTITY)) == 0
    assert "holds no features" in caplog.text and (tmp_path / "theirs.safetensors").exists()


def test_another_target_is_refused(teacher: Teacher, tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, IDENTITY)
    Views(teacher.views, cache).of(documents(10))
    cache.flush()
    with pytest.raises(ValueError, match=r"another target \(target: tiny there, large here\)"):
        FeatureCache(tmp_path, {"target": "large"})


def test_a_full_disk_is_told_and_loses_nothing(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = FeatureCache(tmp_path, IDENTITY)
    Views(teacher.views, cache).of(documents(10))
    cache.flush()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features, "save_file", full)
    Views(teacher.views, cache).of(documents(10, 12))
    with pytest.raises(OSError, match="free disk space or drop --features"):
        cache.flush()
    assert len(FeatureCache(tmp_path, IDENTITY)) == 1


def test_scaled_features_have_unit_size(teacher: Teacher) -> None:
    views = teacher.views(documents(60, 30))
    scaled = torch.cat([v.features for v in views]).float() * feature_scale(views, len(tiny.CAPTURE))
    parts = scaled.unflatten(-1, (len(tiny.CAPTURE), -1))
    assert torch.allclose(parts.pow(2).mean((0, 2)), torch.ones(len(tiny.CAPTURE)), atol=1e-4)


def test_ranks_that_begin_with_the_same_documents_keep_each_others_shards(teacher: Teacher, tmp_path: Path) -> None:
    ranks = [Views(teacher.views, FeatureCache(tmp_path, IDENTITY)) for _ in range(2)]
    both, *own = documents(10, 12, 14)
    for views, other in zip(ranks, own, strict=True):
        views.of([both, other])
        views.close()
    assert len(FeatureCache(tmp_path, IDENTITY)) == 3


@pytest.mark.parametrize("ending", ["budget", "error"])
def test_a_run_that_ends_has_written_every_view(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(tiny.run_config(tmp_path), features=tmp_path / "features", steps=2)
    if ending == "error":
        with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
            patched.setattr(Trainer, "_is_sound", lambda self, *_: 1 / 0)
            train(config, quiet=True)
    else:
        train(config, quiet=True)
    again = Trainer(replace(config, out=tmp_path / "again", steps=1), World(), None, Silent(), Clock())
    again._step()
    assert again.run.assembler.views.num_computed == 0


def test_a_full_disk_at_the_end_of_a_run_costs_its_last_views_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features, "save_file", full)
    result = train(replace(tiny.run_config(tmp_path), features=tmp_path / "features", steps=1), quiet=True)
    assert result is not None and result["steps"] == 1
    assert "features cannot be written" in caplog.text
