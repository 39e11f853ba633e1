"""Every kernel compiles for the cards that are supported, without stack, within their shared memory. No card is needed.

Not in the process of tests/gpu: kernels of Triton's interpreter cannot be compiled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="not installed: triton")

from tests.ops.compiling import SHARED_BYTES, compiled

from aquiline.ops.triton.activation import activation
from aquiline.ops.triton.attention import AttentionTiles, SpanBuffers, attention
from aquiline.ops.triton.embedding import embedding
from aquiline.ops.triton.heads import heads
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.linear import linear, partials_shape
from aquiline.ops.triton.norm import norm
from aquiline.ops.triton.rows import DeviceRows
from aquiline.ops.triton.tile_table import CONFIGS, TileTable

pytestmark = pytest.mark.rare
EACH_CARD = pytest.mark.parametrize("capability", list(SHARED_BYTES), ids=str)


def halves(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def int32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def rows(M: int, levels: int = 0) -> DeviceRows:
    own = (int32(M) for _ in range(6))
    return DeviceRows(*own, int32(M, levels) if levels else None, int32(8, 512), page_size=64, group=M)


def attending(
    Hq: int, Hkv: int, D: int, levels: int = 0, window: int = 0, tiles: AttentionTiles | None = None
) -> Sequence[Launch]:
    """The attention of eight rows at a context of 8K."""
    M, spans = 8, 16
    return attention(
        "attention", halves(M, Hq, D), halves(8192, Hkv, D), halves(8192, Hkv, D), rows(M, levels), halves(M, Hq * D),
        SpanBuffers(floats(M, Hq, spans, D), floats(M, Hq, spans, 2)), scale=D**-0.5, window=window,
        sinks=halves(Hq) if window else None, tiles=tiles,
    )  # fmt: skip


def multiplying(N: int, K: int) -> Sequence[Launch]:
    splits, M, _ = partials_shape(8, N, K)
    partials = floats(splits, M, N) if splits else None
    return linear("linear", halves(M, K), halves(N, K), halves(M, N), int32(M), bias=halves(N), partials=partials)


def tuned(file: Path) -> Sequence[Launch]:
    """Linears and attention, of trees too, with the tiles of a table; the latter were timed over chains alone."""
    launches = list[Launch]()
    for key, entry in TileTable.of("", file).entries.items():
        if isinstance(entry.tiles, AttentionTiles):
            for levels in (0, 60):
                launches += attending(*key.shape, levels, tiles=entry.tiles)
        elif key.kind == "linear":
            N, K = key.shape
            launches += linear(str(key), halves(8, K), halves(N, K), halves(8, N), int32(8), tiles=entry.tiles)
    return launches


@EACH_CARD
@pytest.mark.parametrize(
    "shape",
    [(32, 8, 128), (32, 8, 128, 8), (28, 4, 128, 60), (64, 8, 64, 8, 128), (32, 32, 80, 8), (8, 4, 256, 8, 512)],
    ids=["Llama", "Llama's trees", "7 heads", "gpt-oss", "head 80", "head 256"],
)
def test_attention_fits_and_loads_while_it_computes(shape: tuple[int, ...], capability: int) -> None:
    spans, fold = (compiled(launch, capability) for launch in attending(*shape))
    for taken in (spans, fold):
        assert taken.stack == 0
        assert taken.shared <= SHARED_BYTES[capability]
    assert "cp.async" in spans.ptx
    assert products(spans.ptx) == {"m16n8k16"}
    assert "fma.rn" not in spans.ptx + fold.ptx


@EACH_CARD
@pytest.mark.parametrize(
    ("N", "K"), [(6144, 4096), (4096, 14336), (896, 4864), (2880, 2880)], ids=["wide", "long", "split", "45 x 64"]
)
def test_linears_fit_and_load_while_they_compute(N: int, K: int, capability: int) -> None:
    first, *rest = (compiled(launch, capability) for launch in multiplying(N, K))
    for taken in (first, *rest):
        assert taken.stack == 0
        assert taken.shared <= SHARED_BYTES[capability]
        assert "fma.rn" not in taken.ptx
    assert "cp.async" in first.ptx
    assert products(first.ptx) == {"m16n8k16"}


@pytest.mark.parametrize(("file", "capability"), [(CONFIGS / "nvidia-h100-80gb-hbm3.json", 90)], ids=["H100"])
def test_tiles_of_a_table_fit_their_card(file: Path, capability: int) -> None:
    launches = tuned(file)
    assert len(launches) == 8, "attention and its fold twice, and four linears"
    for launch in launches:
        taken = compiled(launch, capability)
        assert taken.stack == 0 and taken.shared <= SHARED_BYTES[capability], launch.name


@EACH_CARD
@pytest.mark.parametrize("H", [2880, 12288], ids=str)
def test_kernels_of_a_row_fit(H: int, capability: int) -> None:
    x, weight, slots, cache = halves(8, H), halves(H), int32(8), halves(8192, 8, 128)
    for launch in (
        embedding("embedding", int32(8), halves(32000, H), x, slots),
        norm("norm", x, weight, halves(8, H), slots, eps=1e-5, residual=halves(8, H), own_weight=weight, feature=x),
        heads("heads", halves(8, 6144), halves(8, 32, 128), cache, cache, floats(8192, 64), floats(8192, 64), rows(8),
              q_weight=halves(128), k_weight=halves(128), eps=1e-5),
        *(activation("activation", halves(8, 4 * H), halves(8, 2 * H), slots, kind=kind, limit=7.0)
          for kind in ("swiglu", "geglu", "clamped")),
    ):  # fmt: skip
        taken = compiled(launch, capability)
        assert taken.stack == 0, launch.name
        assert "fma.rn" not in taken.ptx, launch.name


def products(ptx: str) -> set[str]:
    """The shapes of the matrix products in a kernel's PTX."""
    return set(re.findall(r"mma\S*?(m\d+n\d+k\d+)", ptx))


@EACH_CARD
def test_tails_are_added_up_in_the_layout_of_pages(capability: int) -> None:
    """Sums over a tile's keys are taken in one layout in both loops, and in plain kernels: one order, one result."""
    plain, tails = (compiled(attending(32, 8, 128, levels)[0], capability) for levels in (0, 8))
    assert len(set(plain.layouts)) == 1
    assert set(tails.layouts) == set(plain.layouts)
    assert len(tails.layouts) == 2 * len(plain.layouts)
