"""The small linear against float64, and its bits against the number of rows."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.running import DEVICE, error, int32, poison, randn, run
from torch import Tensor

from aquiline.ops.triton.linear import LinearTiles, linear, partials_shape

SPLIT = LinearTiles(block_k=64, num_splits=3)


def computed(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tiles: LinearTiles | None = None, slots: Tensor | None = None
) -> Tensor:
    M, N, K = len(x), *weight.shape
    out, shape = poison(M, N), partials_shape(M, N, K, tiles)
    partials = poison(*shape) if shape[0] else None
    slots = torch.zeros(M, dtype=torch.int32, device=DEVICE) if slots is None else slots
    run(linear("linear", x, weight, out, slots, bias=bias, partials=partials, tiles=tiles))
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("M", "N", "K", "tiles"),
    [(1, 96, 64, None), (15, 48, 208, None), (16, 80, 192, SPLIT), (17, 48, 400, SPLIT), (65, 32, 64, None)],
    ids=["one row", "K between blocks", "split evenly", "a short last span", "65 rows"],
)
def test_equals_float64(M: int, N: int, K: int, tiles: LinearTiles | None, dtype: torch.dtype) -> None:
    x, weight, bias = randn(M, K, dtype=dtype), randn(N, K, dtype=dtype, seed=1), randn(N, dtype=dtype, seed=2)
    wanted = x.double() @ weight.double().T + bias.double()
    assert error(computed(x, weight, bias, tiles), wanted) < 1e-6


@pytest.mark.parametrize("tiles", [LinearTiles(), SPLIT], ids=["whole", "split"])
def test_a_row_alone_has_the_bits_that_it_has_among_others(tiles: LinearTiles) -> None:
    x, weight = randn(33, 320), randn(48, 320, seed=1)
    together = computed(x, weight, tiles=tiles)
    for row in (0, 1, 6, 15, 16, 32):
        assert torch.equal(computed(x[row : row + 1].clone(), weight, tiles=tiles)[0], together[row]), row


def test_without_a_bias() -> None:
    x, weight = randn(2, 192), randn(32, 192, seed=1)
    for tiles in (None, SPLIT):
        assert error(computed(x, weight, None, tiles), x.double() @ weight.double().T) < 1e-6


def test_dead_rows_are_neither_read_nor_written() -> None:
    x, weight = randn(40, 64), randn(32, 64, seed=1)
    wanted = computed(x, weight)
    dead = [1, 5, *range(16, 32), 39]
    slots = int32([-1 if row in dead else row for row in range(40)])
    x[dead] = float("nan")
    for tiles in (LinearTiles(), SPLIT):
        found = computed(x, weight, tiles=tiles, slots=slots)
        assert found[dead].isnan().all()
        alive = slots >= 0
        assert error(found[alive], wanted[alive]) < 1e-6


def test_slices_of_wider_buffers_are_read_and_written() -> None:
    wide_x, wide_out, weight = randn(3, 192), poison(3, 96), randn(32, 64, seed=1)
    run(linear("linear", wide_x[:, 64:128], weight, wide_out[:, 32:64], int32([0, 0, 0])))
    assert error(wide_out[:, 32:64], wide_x[:, 64:128].double() @ weight.double().T) < 1e-6
    assert wide_out[:, :32].isnan().all()
    assert wide_out[:, 64:].isnan().all()


def test_the_default_split_follows_the_weight_alone() -> None:
    assert LinearTiles.of(4096, 4096).num_splits == 1
    assert LinearTiles.of(896, 4864).num_splits == 8
    assert LinearTiles.of(2880, 2880).block_k == 64
    for N, K in ((4096, 14336), (896, 4864), (2880, 2880), (64, 64)):
        tiles = LinearTiles.of(N, K)
        assert tiles.span(K) * (tiles.num_splits - 1) < K <= tiles.span(K) * tiles.num_splits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda x: x[:, :63]}, r"x has the strides \(64, 1\)|weight has the shape"),
        ({"x": lambda x: x.double()}, "x is torch.float64; convert it to bfloat16, float16, float32"),
        ({"x": lambda x: x.T.contiguous().T}, "make its last dimension contiguous"),
        ({"weight": lambda w: torch.cat((w, w), 1)[:, 2:66]}, "begins at byte"),
        ({"out": lambda o: o[:, :16]}, r"out has the shape \(4, 16\); make it \(4, 32\)"),
        ({"slots": lambda s: s.long()}, "slots is torch.int64; convert it to int32"),
        ({"weight": lambda w: w.to("meta")}, "weight is on meta; move it to"),
    ],
    ids=["columns", "dtype", "layout", "alignment", "shape", "integers", "device"],
)  # fmt: skip
def test_buffers_that_do_not_fit_are_named(change: dict[str, object], message: str) -> None:
    given = {"x": randn(4, 64), "weight": randn(32, 64), "out": poison(4, 32), "slots": int32([0] * 4)}
    [(name, edit)] = change.items()
    given[name] = edit(given[name])  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        linear("o", **given)


def test_a_split_sum_asks_for_its_scratch() -> None:
    with pytest.raises(ValueError, match=r"3 spans and has no partials; give scratch of the shape \(3, 4, 32\)"):
        linear("o", randn(4, 192), randn(32, 192), poison(4, 32), int32([0] * 4), tiles=SPLIT)
