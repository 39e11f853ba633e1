"""The shares of all ranks are the whole: every output once, read from the file without the others."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.checkpoints import write_draft, write_target
from tests.conftest import TINY, tiny_pair, weights_of

from aquiline.blocks import MXFP4, floats_of, in_memory
from aquiline.config import ParallelMode
from aquiline.errors import CheckpointError
from aquiline.models.files import COLUMNS
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


@pytest.mark.parametrize("mode", get_args(ParallelMode))
def test_ranks_beyond_the_key_heads_copy_them(mode: ParallelMode) -> None:
    """Two key heads, each of six queries: on four ranks two have each, and outputs of attention are still split."""
    config = dataclasses.replace(TINY, num_heads=12, num_kv_heads=2)
    whole = weights_of(*tiny_pair(config=config))[0]
    qkv, Dh = floats_of(whole.layers[0].attention.qkv), config.head_dim
    for rank in range(4):
        own = Share(rank, 4, mode).target(whole)
        first, queries = (6 * (rank // 2), 6) if mode == "gather" else (3 * rank, 3)
        rows = [*range(first * Dh, (first + queries) * Dh)]
        for start in (12, 14):
            rows += range((start + rank // 2) * Dh, (start + rank // 2 + 1) * Dh)
        assert np.array_equal(floats_of(own.layers[0].attention.qkv), qkv[rows])
        assert (own.config.num_heads, own.config.num_kv_heads) == (queries, 1)
    refuse_ranks(4, dataclasses.replace(whole, config=dataclasses.replace(config, intermediate_size=128)), None)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_have_every_input_and_every_bias_once(tmp_path: Path, num_ranks: int) -> None:
    whole = target_of(tmp_path)
    owned = [Share(rank, num_ranks, "reduce").target(whole).layers[1] for rank in range(num_ranks)]
    layer = whole.layers[1]
    for own, of_all in (
        ([each.attention.o for each in owned], layer.attention.o), ([each.mlp.down for each in owned], layer.mlp.down),
    ):  # fmt: skip
        assert np.array_equal(np.concatenate([floats_of(each) for each in own], 1), floats_of(of_all))
    biases = [each.attention.o_bias for each in owned]
    assert np.array_equal(np.sum(biases, 0), layer.attention.o_bias) and not np.any(biases[1:])
    columns = [entry for entry in target_entries(whole.config) if entry.shard == COLUMNS]
    assert {entry.target.rpartition(".")[2] for entry in columns} == {"o", "down"}


def test_blocks_are_split_by_whole_blocks() -> None:
    blocks = np.random.default_rng(0).integers(100, 140, (3, 4 * 17)).astype(np.uint8)
    weight = in_memory(blocks, MXFP4)
    values = weight.dequantised()
    parts = [weight.of_inputs(slice(first, end)).dequantised() for first, end in ((0, 32), (32, 128))]
    assert np.array_equal(np.concatenate(parts, 1), values) and np.ptp(values) > 0


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
        ValueError, match=r"tensor_parallel_size=3: the target has num_key_value_heads=2.*the draft has"
    ):
        refuse_ranks(3, target, draft)
    with pytest.raises(ValueError, match=r"=8: the target has num_key_value_heads=2 and num_attention_heads=4"):
        refuse_ranks(8, target, None)
    small = dataclasses.replace(TINY, intermediate_size=48)
    with pytest.raises(ValueError, match="intermediate_size=48, and each rank takes at least 32; use fewer ranks"):
        refuse_ranks(2, dataclasses.replace(target, config=small), None)
