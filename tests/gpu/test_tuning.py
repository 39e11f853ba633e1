"""Tiles: the table that runs look them up in, the inventory of launches, and the search for the fastest."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import engine_config
from tests.gpu.paged import Cache, Case, Row
from tests.gpu.pairs import new_table, weights
from tests.gpu.running import DEVICE, int32, poison, randn

from aquiline.backends.gpu.gpu_pair import GpuPair
from aquiline.bench.suite.tile_tuning import by_key, record, tune
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels
from aquiline.ops.triton.attention import AttentionTiles, SpanBuffers, attention
from aquiline.ops.triton.head_draw import DrawRows, TileBest, VocabularyHead, best_by_tile, best_of_logits
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.launches import TorchCall
from aquiline.ops.triton.linear import LinearTiles, linear
from aquiline.ops.triton.tile_table import TileEntry, TileKey, TileTable, file_of
from aquiline.ops.triton.tuning import CHOICES, TileUse, inventory, search
from aquiline.spec.drafting import Chain

MLP = TileKey("linear", (34560, 2880), "bfloat16")
"""Gate and up of gpt-oss-120b's draft."""


def test_a_table_is_read_as_it_was_written_and_counts_hits_and_misses(tmp_path: Path) -> None:
    tuned, attended = LinearTiles(block_n=64, num_splits=2), AttentionTiles(span=1024)
    entries = {
        MLP: TileEntry(tuned, 30.5, 41.0), TileKey("attention", (64, 8, 64), "bfloat16"): TileEntry(attended, 9.0, 9.5),
    }  # fmt: skip
    TileTable("NVIDIA Some Card", entries, "3.6.0").write(tmp_path / "deeper" / "card.json")
    table = TileTable.of("NVIDIA Some Card", tmp_path / "deeper" / "card.json")
    assert (table.device, table.triton, table.entries) == ("NVIDIA Some Card", "3.6.0", entries)
    assert table.describe() == "tiles: 0 of 0 launches are tuned for NVIDIA Some Card"
    for _ in range(3):
        assert table.linear(34560, 2880, torch.bfloat16) == tuned
    assert table.attention(64, 8, 64, torch.bfloat16) == attended
    assert table.linear(34560, 2880, torch.float16) == LinearTiles.of(34560, 2880), "another dtype is another shape"
    assert table.head(34560, 2880, torch.bfloat16).num_splits == 1, "a head is no linear"
    assert (table.hits.total(), table.misses.total()) == (4, 2)
    assert table.describe() == (
        "tiles: 4 of 6 launches are tuned for NVIDIA Some Card; not measured: linear 34560x2880 float16, "
        "head 34560x2880 bfloat16"
    )


def test_a_device_without_a_table_has_none_and_a_broken_table_is_named(tmp_path: Path) -> None:
    assert file_of("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"
    assert TileTable.of("a card that nobody has").entries == {}
    broken = tmp_path / "card.json"
    for text in ("[]", '{"device": "x", "triton": "", "entries": [{"kind": "linear"}]}', "{", '{"device": "x"}'):
        broken.write_text(text)
        with pytest.raises(ValueError, match=r"card\.json: .*; write the table anew with aquiline tune"):
            TileTable.of("x", broken)


def launches() -> list[Launch]:
    """Linears, heads and attention as programs have them."""
    x, weight, slots = randn(4, 64), randn(96, 64), int32([0] * 4)
    split = LinearTiles(num_splits=2)
    rows = DrawRows(slots, slots, torch.ones(1, device=DEVICE), int32([[1, 2]]))
    best, logits = TileBest.new(4, 96, 1, DEVICE), poison(4, 96)
    cache = Cache((4, 2, 16), length=64)
    k, v = cache.stored([Row(1)], 0)
    attended = attention(
        "BASE_ATTENTION", randn(2, 4, 16), k, v, Case(cache, [Row(1), Row(2)], group=2).device_rows(), poison(2, 64),
        SpanBuffers(poison(2, 4, 3, 16), poison(2, 4, 3, 2)), scale=1.0, window=40,
        tiles=AttentionTiles(span=64, block=32),
    )  # fmt: skip
    return [
        *linear("o", x, weight, poison(4, 96), slots), *linear("o", x, weight, poison(4, 96), slots),
        *linear("down", x, weight, poison(4, 96), slots, partials=poison(2, 4, 96), tiles=split),
        best_by_tile(x, VocabularyHead(weight), rows, best), best_of_logits(logits, rows, best), *attended,
    ]  # fmt: skip


def test_the_inventory_of_launches_names_every_product_once_with_its_count() -> None:
    uses = inventory([TorchCall("a copy", poison), *launches()])
    assert [(use.tag, use.M, use.count) for use in uses] == [
        ("o", 4, 2), ("down", 4, 1), ("LM_HEAD_DRAW", 4, 1), ("BASE_ATTENTION", 2, 1)
    ]  # fmt: skip
    assert uses[0].as_dict() == {
        "M": 4, "K": 64, "N": 96, "dtype": "float32", "tag": "o", "group": 1, "context": 0, "window": 0, "count": 2,
        "key": "linear 96x64 float32",
    }  # fmt: skip
    assert [str(use.key) for use in uses[2:]] == ["head 96x64 float32", "attention 4x2x16 float32"]
    assert (uses[3].group, uses[3].context, uses[3].window) == (2, 192, 40)
    assert json.loads(json.dumps([use.as_dict() for use in uses])) == [use.as_dict() for use in uses]
    assert uses[3].least_bytes == 40 * 2 * 2 * 16 * 4 and uses[0].least_bytes == 96 * 64 * 4


def test_launches_that_are_timed_are_those_of_the_inventory() -> None:
    """Made again from the inventory, with given tiles, they are read as the same uses, and they run."""
    uses = [*inventory(launches()), TileUse(TileKey("linear", (64, 96), "float32"), 3, "float32", "x")]
    for use in uses:
        made = use.launches(use.key.default, DEVICE)
        [again] = inventory(made)
        assert again == replace(use, count=1, context=again.context) and again.context >= use.context
        for launch in made:
            launch.run()


@pytest.mark.rare
def test_the_inventory_of_a_run_is_that_of_its_programs() -> None:
    """A tiny pair with a chain of two: each product of its program, once for each time it is launched."""
    table = new_table()
    pair = GpuPair(*weights(), "float32", device=str(DEVICE), table=table)
    llm = LLM.from_models(LoadedModels(pair, None, "float32", 0), engine_config(1, late_reads=False))
    uses = record(llm, Chain(2), [[5, 6, 7]])
    over_three = Counter[str]()
    for use in uses:
        over_three[str(use.key)] += use.count * (use.M == 3)
    assert over_three["linear 64x32 float32"] == 4 + 1, "qkv, gate and up of two layers, and of the draft's first pass"
    assert over_three["head 96x32 float32"] == 1
    assert {str(use.key) for use in uses} >= {"head 96x32 float32", "head 48x32 float32", "attention 2x1x16 float32"}
    assert {use.key for use in uses} <= {*table.misses, *table.hits}, "their tiles were looked up"


def fake_us(wanted: dict[str, int], limit: int) -> tuple[list[Launch], object]:
    """A timer by which each knob is the faster the nearer it is to a wanted value, and wide tiles cannot run."""
    seen = list[Launch]()

    def timer(own: Sequence[Launch]) -> float:
        launch = own[0]
        seen.append(launch)
        values = {"block_n": launch.constants["BLOCK_N"], "block_k": launch.constants["BLOCK_K"]}
        values |= {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        if values["block_n"] * values["block_k"] > limit:
            return math.inf
        rows = launch.arguments[5]
        assert isinstance(rows, int)
        return rows * (1 + sum(abs(math.log2(values[name] / value)) for name, value in wanted.items()))

    return seen, timer


@pytest.mark.parametrize("M", [3, 5])
def test_the_search_finds_the_fastest_tiles_and_none_that_cannot_run(M: int) -> None:
    uses = [TileUse(MLP, M, "bfloat16", "gate_up", count=4)]
    wanted = {"block_n": 128, "block_k": 32, "num_warps": 8, "num_stages": 2}
    seen, timer = fake_us(wanted, limit=128 * 64)
    found = search(MLP, uses, timer, torch.device("meta"))  # type: ignore[arg-type]
    assert found.tiles == replace(found.tiles, **wanted) and found.us == 4 * M < found.default_us
    assert len(seen) < 60, "not every combination is tried"
    assert all(launch.arguments[0].shape == (M, 2880) for launch in seen)  # type: ignore[union-attr]


def test_one_choice_serves_every_number_of_rows_by_how_often_it_occurs() -> None:
    def timer(own: Sequence[Launch]) -> float:
        rows, warps = own[0].arguments[5], own[0].num_warps
        return abs(warps - (8 if rows == 1 else 2))

    few, many = TileUse(MLP, 1, "bfloat16", "a"), TileUse(MLP, 16, "bfloat16", "a")
    for counts, warps in (((3, 1), 8), ((1, 3), 2)):
        uses = [replace(use, count=count) for use, count in zip((few, many), counts, strict=True)]
        tiles = search(MLP, uses, timer, torch.device("meta")).tiles
        assert tiles.num_warps == warps


def test_the_shapes_that_read_the_most_are_tuned_and_other_entries_stay() -> None:
    old = TileKey("linear", (8, 16), "bfloat16")
    small, head = TileKey("linear", (64, 64), "bfloat16"), TileKey("head", (9000, 2880), "bfloat16")
    uses = [TileUse(key, 1, "bfloat16", "x", count=count) for key, count in ((small, 9), (MLP, 1), (head, 2))]
    assert list(by_key(uses, ("linear", "head"), 2)) == [MLP, head]
    assert list(by_key(uses, ("attention",), 9)) == []
    keys, told = by_key(uses, ("linear",), 1), list[str]()
    before = TileTable("card", {old: TileEntry(LinearTiles(), 1.0, 1.0)})
    table = tune(before, keys, lambda own: 2.0, torch.device("meta"), told.append)
    assert list(table.entries) == [old, MLP]
    assert told == [f"{MLP}: 2.0 us, 2.0 with the default tiles: {MLP.default}"]
    assert table.entries[MLP] == TileEntry(LinearTiles.of(34560, 2880), 2.0, 2.0), "what is no faster changes nothing"


def test_every_choice_is_a_field_in_ascending_order() -> None:
    for kind, knobs in CHOICES.items():
        default = TileKey(kind, (64, 64, 64), "bfloat16").default
        for name, values in knobs.items():
            assert hasattr(default, name) and list(values) == sorted(set(values))
