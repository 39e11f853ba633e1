"""The shares of all ranks are the whole: every output once, read from the file without the others."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.checkpoints import write_draft, write_target
from tests.conftest import TINY, tiny_pair, weights_of

from aquiline.blocks import floats_of
from aquiline.errors import CheckpointError
from aquiline.models.formats import read_draft_weights
from aquiline.models.load import read_model_config, read_target, target_entries
from aquiline.models.model_weights import ModelWeights
from aquiline.models.shares import OUTPUTS, Share, refuse_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [80, 96, 101, 160, 576])
def test_every_output_has_one_rank_and_units_are_whole(count: int, num_ranks: int) -> None:
    parts = Share(0, num_ranks).parts(count)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    assert all(part.start % OUTPUTS == 0 and part.stop - part.start >= OUTPUTS for part in parts)


def target_of(place: Path, tied: bool = False) -> ModelWeights:
    write_target(
        place, "qwen3", num_attention_heads=12, num_key_value_heads=6, intermediate_size=112, hidden_size=96,
        tie_word_embeddings=tied, attention_bias=True,
    )  # fmt: skip
    return read_target(place, dtype="float32", capture=(0, 1, 2))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_rows_of_all_ranks_are_those_of_the_file(tmp_path: Path, num_ranks: int) -> None:
    """Fused parameters are split part by part; biases with their rows; norms are everybody's."""
    whole = target_of(tmp_path)
    q, kv, inner = 12 * 16, 6 * 16, 112
    starts = {"qkv": (0, q, q + kv, q + 2 * kv), "gate_up": (0, inner, 2 * inner)}
    starts |= {"qkv_bias": starts["qkv"], "gate_up_bias": starts["gate_up"]}
    owned = [Share(rank, num_ranks).target(whole) for rank in range(num_ranks)]
    split = set()
    for name, weight, *others in (
        (name, weight, *(parts[i][1] for parts in ([*own.named()] for own in owned)))
        for i, (name, weight) in enumerate(whole.named())
    ):
        values, *theirs = (floats_of(each) if isinstance(each, tuple) else each for each in (weight, *others))
        if theirs[0].shape == values.shape:
            assert all(np.array_equal(values, each) for each in theirs)
            continue
        split.add(name)
        bounds = starts.get(name, (0, len(values)))
        taken = [0] * num_ranks
        for first, end in pairwise(bounds):
            unit = 16 if name not in ("gate_up", "gate_up_bias") else 32
            sizes = [part.stop - part.start for part in Share(0, num_ranks).parts(end - first, unit)]
            joined = []
            for rank, size in enumerate(sizes):
                joined.append(theirs[rank][taken[rank] : taken[rank] + size])
                taken[rank] += size
            assert np.array_equal(np.concatenate(joined), values[first:end]), name
        assert taken == [len(each) for each in theirs]
    named = {entry.target.rpartition(".")[2] for entry in target_entries(whole.config) if entry.shard is not None}
    assert split == named | {"o_bias"} and owned[1].config.num_kv_heads == 6 // num_ranks


def test_a_shared_embedding_stays_shared(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", tied=True)
    write_draft(
        tmp_path / "draft", read_model_config(tmp_path / "target"), num_attention_heads=6, num_key_value_heads=6
    )
    draft = read_draft_weights(tmp_path / "draft", target, capture=(0, 1, 2))
    share = Share(1, 2)
    own = share.target(target)
    assert own.head is own.embed and share.draft(draft, target, own).model.embed is own.embed
    assert np.array_equal(share.draft(draft, target, own).d2t, draft.d2t), "the whole map is everybody's"
    assert Share().target(target) is target and Share().draft(draft, target, target) is draft


def test_a_rank_reads_its_own_rows_alone(tmp_path: Path) -> None:
    """A number in another rank's rows that would be refused is not even seen."""
    target_of(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][-1, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    target = read_target(tmp_path, dtype="float32")
    first, last = (Share(rank, 2).target(target).layers[0].mlp.gate_up for rank in (0, 1))
    assert np.isfinite(floats_of(first)).all()
    with pytest.raises(CheckpointError, match=r"up_proj.weight holds 1 of"):
        floats_of(last)


def test_ranks_that_cannot_share_are_refused_by_name() -> None:
    target, draft = weights_of(*tiny_pair())
    refuse_ranks(2, target, draft)
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=4: the target has num_key_value_heads=2.*the draft has"
    ):
        refuse_ranks(4, target, draft)
    small = dataclasses.replace(TINY, intermediate_size=48)
    with pytest.raises(ValueError, match="intermediate_size=48, and each rank takes at least 32; use fewer ranks"):
        refuse_ranks(2, dataclasses.replace(target, config=small), None)
