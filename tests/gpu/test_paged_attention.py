"""Paged attention against float64, and its bits against everything that must not change them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.paged import DEAD, Cache, Case, Row
from tests.gpu.running import IS_INTERPRETED, error, poison, randn

from aquiline.ops.triton.attention import AttentionTiles, SpanBuffers, attention

PLAIN = Cache((2, 1, 16), num_slots=3)
TREE = [Row(61), *(Row(61, path=path) for path in [(1,), (2,), (1, 3), (1, 4), (1, 3, 5), (1, 3, 5, 6)])]
"""A tree of seven nodes around the edge of a page, of a block and of a span."""
SINKS = randn(2, seed=5)


def check(case: Case, tolerance: float = 1e-6) -> None:
    found, wanted = case.computed(), case.wanted()
    alive = [number for number, row in enumerate(case.rows) if row.slot >= 0]
    dead = [number for number in range(len(case.rows)) if number not in alive]
    assert error(found[alive], wanted[alive]) < tolerance
    assert found[dead].isnan().all()


def test_contexts_at_the_edges_of_pages_blocks_and_spans() -> None:
    check(Case(PLAIN, [Row(n, slot=n % 3) for n in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 128, 129, 320)]))


@pytest.mark.parametrize(
    "heads",
    [(4, 4, 16), (7, 1, 64), (14, 2, 32), (8, 2, 80), (16, 1, 16), (20, 1, 16), (4, 2, 128)],
    ids=["no groups", "7 heads of 64", "2 x 7", "head 80", "a full tile", "more than a tile", "head 128"],
)
def test_groups_of_heads_and_sizes_of_heads(heads: tuple[int, int, int]) -> None:
    check(Case(Cache(heads), [TREE[0], TREE[3], TREE[6]], group=3, sinks=randn(heads[0], seed=5)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_widened_when_they_are_read(dtype: torch.dtype) -> None:
    check(Case(Cache(PLAIN.heads, dtype=dtype), TREE, group=7), 1e-6 if IS_INTERPRETED else 1e-2)


@pytest.mark.parametrize("window", [1, 5, 16, 70], ids=str)
def test_windows_and_sinks(window: int) -> None:
    check(Case(PLAIN, [*TREE, *(Row(n, slot=1) for n in range(60, 67))], group=7, window=window, sinks=SINKS))
    check(Case(PLAIN, [Row(1), Row(17, slot=1), Row(140, slot=2)], window=window, sinks=SINKS))


def test_keys_before_the_first_are_not_read() -> None:
    check(Case(PLAIN, [Row(100, start=n) for n in (0, 1, 16, 63, 64, 65, 99)]))
    check(Case(PLAIN, [replace(row, start=40) for row in TREE], group=7, window=30))


def test_spans_that_hold_nothing_change_no_bit() -> None:
    few = Case(PLAIN, [*TREE, *(Row(n, slot=1) for n in range(94, 101))], group=7, num_spans=2)
    found = few.computed()
    for num_spans in (8, 33):
        assert torch.equal(replace(few, num_spans=num_spans).computed(), found), num_spans
    one = AttentionTiles(span=320, block=16)
    assert error(replace(few, num_spans=1, tiles=one).computed(), found) < 1e-6


@pytest.mark.parametrize(
    ("num", "heads"),
    [(2, (2, 1, 16)), (17, (2, 1, 16)), (65, (2, 1, 16)), (5, (7, 1, 16))],
    ids=["2 rows", "17 rows", "65 rows", "5 rows of 7 heads"],
)
def test_a_row_alone_has_the_bits_that_it_has_among_others(num: int, heads: tuple[int, int, int]) -> None:
    case = Case(Cache(heads), [Row(60 + n) for n in range(num)], group=num, window=100)
    found = case.computed()
    assert error(found, case.wanted()) < 1e-6
    for row in {0, num // 2, num - 1}:
        assert torch.equal(case.alone(row), found[row]), row


@pytest.mark.parametrize("window", [0, 20], ids=["full", "window"])
def test_a_path_of_a_tree_has_the_bits_of_plain_rows(window: int) -> None:
    """Its keys in order, as if the tokens of the path had been decoded one by one."""
    tree = Case(PLAIN, TREE, group=7, window=window, sinks=SINKS)
    assert tree.queries is not None
    found = tree.computed()
    assert error(found, tree.wanted()) < 1e-6
    assert torch.equal(tree.alone(5), found[5])
    for number, row in enumerate(TREE):
        in_order = Cache(PLAIN.heads, num_slots=3)
        for own, kept in ((in_order.keys, PLAIN.keys), (in_order.values, PLAIN.values)):
            own[0, : len(row.indices)] = kept[0, row.indices]
        plain = replace(
            tree, cache=in_order, rows=[Row(len(row.indices))], group=1, queries=tree.queries[number : number + 1]
        )
        assert torch.equal(plain.computed()[0], found[number]), f"node {number} in order"


def test_a_chain_has_the_same_bits_with_and_without_a_tail() -> None:
    tails = Case(PLAIN, [Row(62, path=tuple(range(1, n + 1))) for n in range(5)], group=5)
    assert torch.equal(tails.computed(), replace(tails, rows=[Row(62 + n) for n in range(5)]).computed())


def test_dead_rows_and_dead_groups_are_neither_read_nor_written() -> None:
    trees = [*TREE[:3], DEAD, *TREE[4:], *[DEAD] * 7, *(replace(row, slot=2) for row in TREE)]
    case = Case(PLAIN, trees, group=7)
    assert case.queries is not None
    case.queries[[3, *range(7, 14)]] = float("nan")
    check(case)
    whole = replace(case, rows=[*TREE, *trees[7:]], queries=case.queries.nan_to_num()).computed()
    assert torch.equal(case.computed()[[0, 1, 2, 4, 5, 6]], whole[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize(
    ("heads", "spans", "message"),
    [
        ((4, 3, 16), 2, "4 heads do not share 3 KV heads evenly"),
        ((4, 2, 24), 2, "head_dim=24 has no kernel; heads are multiples of 16 up to 256"),
        ((4, 2, 272), 2, "head_dim=272 has no kernel"),
        ((4, 2, 16), 3, r"stats has the shape \(1, 4, 3, 2\); make it \(1, 4, 2, 2\)"),
    ],
    ids=["heads", "head size", "large head", "scratch"],
)
def test_what_has_no_kernel_is_named(heads: tuple[int, int, int], spans: int, message: str) -> None:
    Hq, Hkv, D = heads
    rows = Case(PLAIN, [Row(1)])
    with pytest.raises(ValueError, match=message):
        attention(
            "a", poison(1, Hq, D), poison(64, Hkv, D), poison(64, Hkv, D), rows.device_rows(), poison(1, Hq * D),
            SpanBuffers(poison(1, Hq, 2, D), poison(1, Hq, spans, 2)), scale=1.0,
        )  # fmt: skip


def test_tiles_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="block=48; make it a power of two"):
        AttentionTiles(span=480, block=48)
