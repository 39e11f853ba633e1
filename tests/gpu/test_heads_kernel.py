"""Norm and rotation of heads and the write to the pages, against the plain torch twin."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.gpu.paged import PAGE, Cache, Case, Row
from tests.gpu.running import error, int32, poison, randn, run
from torch import Tensor

from aquiline.backends.torch import reference
from aquiline.ops.triton.heads import heads

EPS = 1e-6
ROWS = [Row(1), Row(1, slot=1), Row(1, slot=-1), Row(1, slot=1), Row(1)]
POSITIONS, WRITE = [0, 15, 2**30, 16, 31], [0, 15, 2**30, 16, -1]
ALIVE, WRITTEN = [0, 1, 3, 4], [0, 1, 3]


def twin(qkv: Tensor, shape: tuple[int, int, int], rotation: tuple[Tensor, Tensor], norms: tuple[Tensor, ...]) -> list:
    """Queries, keys and values of live rows in float64."""
    Hq, Hkv, D = shape
    cos, sin = (table[[POSITIONS[row] for row in ALIVE]].double() for table in rotation)
    q, k, v = (t.unflatten(1, (-1, D)) for t in qkv[ALIVE].double().split([Hq * D, Hkv * D, Hkv * D], 1))
    if norms:
        q, k = (reference.rms_norm(x, weight, EPS) for x, weight in zip((q, k), norms, strict=True))
    halves = [x.chunk(2, -1) for x in (q, k)]
    cos, sin = cos[:, None], sin[:, None]
    return [torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in halves] + [v]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    "shape", [(4, 2, 16), (7, 1, 64), (6, 3, 80), (4, 4, 128)], ids=["4 over 2", "7 heads", "head 80", "head 128"]
)
def test_heads(shape: tuple[int, int, int], has_norms: bool, dtype: torch.dtype) -> None:
    Hq, Hkv, D = shape
    cache = Cache(shape, num_slots=2, length=64)
    device_rows = replace(Case(cache, ROWS).device_rows(), positions=int32(POSITIONS), write=int32(WRITE))
    qkv = randn(len(ROWS), (Hq + 2 * Hkv) * D, dtype=dtype)
    cos, sin = randn(32, D // 2, seed=1), randn(32, D // 2, seed=2)
    norms = (randn(D, seed=3), randn(D, seed=4)) if has_norms else ()
    q, k_cache, v_cache = (poison(n, H, D) for n, H in ((len(ROWS), Hq), (128, Hkv), (128, Hkv)))
    q_weight, k_weight = norms or (None, None)
    run(heads("heads", qkv, q, k_cache, v_cache, cos, sin, device_rows, q_weight=q_weight, k_weight=k_weight, eps=EPS))
    wanted = twin(qkv, shape, (cos, sin), norms)
    assert error(q[ALIVE], wanted[0]) < 1e-6
    assert q[2].isnan().all()
    places = torch.cat([cache.places(ROWS[row].slot, [WRITE[row]]) for row in WRITTEN])
    others = [place for place in range(128) if place not in places.tolist()]
    for stored, values in ((k_cache, wanted[1]), (v_cache, wanted[2])):
        assert error(stored[places], values[: len(WRITTEN)]) < 1e-6
        assert stored[others].isnan().all()


def test_what_does_not_fit_is_named() -> None:
    rows = Case(Cache((4, 2, 16)), ROWS).device_rows()
    given = {
        "qkv": randn(5, 128), "q": poison(5, 4, 16), "k_cache": poison(64, 2, 16), "v_cache": poison(64, 2, 16),
        "cos": randn(8, 8), "sin": randn(8, 8), "rows": rows,
    }  # fmt: skip
    for change, message in (
        ({"qkv": randn(5, 64)}, r"qkv has the shape \(5, 64\); make it \(5, 128\)"),
        ({"v_cache": poison(64, 2, 16, dtype=torch.float16)}, "v_cache is torch.float16, k_cache torch.float32"),
        ({"sin": randn(8, 16)[:, ::2]}, "make its last dimension contiguous"),
        ({"k_weight": randn(16)}, "only one of q_weight and k_weight"),
    ):
        with pytest.raises(ValueError, match=message):
            heads("heads", **(given | change))
    with pytest.raises(ValueError, match="group=2 does not divide 5 rows"):
        replace(rows, group=2)
    with pytest.raises(ValueError, match=f"page_size={PAGE - 1}; make it a power of two"):
        replace(rows, page_size=PAGE - 1)
