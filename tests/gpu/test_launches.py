"""A step's launches are built once: what they do follows from what the buffers hold when they run."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.gpu.paged import TILES, Cache, Case, Row
from tests.gpu.running import int32, poison, randn

from aquiline.ops.triton.attention import SpanBuffers, attention
from aquiline.ops.triton.heads import heads
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.linear import linear


def test_launches_that_ran_with_one_message_run_with_another() -> None:
    """Projection, heads and attention of three rows, then of others in other slots with another context: equal to what
    launches say that were built for these. No decision of the first run and no address of its own is inside."""
    cache = Cache((4, 2, 16), num_slots=2, length=128)
    weight, cos, sin = randn(128, 64, seed=1), randn(128, 8, seed=2), randn(128, 8, seed=3)
    messages = (
        (randn(3, 64, seed=4), [Row(5), Row(6), Row(7)], [4, 5, 6]),
        (randn(3, 64, seed=5), [Row(90, slot=1), Row(90, slot=1, path=(1,)), Row(1, slot=-1)], [89, 90, 0]),
    )

    def built() -> tuple[list[Launch], dict[str, torch.Tensor], torch.Tensor]:
        rows = Case(cache, [Row(1, path=(1,))] * 3, group=3).device_rows()
        rows = replace(rows, positions=int32([0] * 3), write=int32([0] * 3))
        x, qkv, q, out = poison(3, 64), poison(3, 128), poison(3, 4, 16), poison(3, 64)
        scratch = SpanBuffers(poison(3, 4, 2, 16), poison(3, 4, 2, 2))
        k, v = (each.flatten(0, 1).clone() for each in (cache.keys, cache.values))
        launches = [
            *linear("qkv", x, weight, qkv, rows.slots), heads("heads", qkv, q, k, v, cos, sin, rows),
            *attention("attention", q, k, v, rows, out, scratch, scale=0.25, tiles=TILES),
        ]  # fmt: skip
        fields = ("slots", "positions", "write", "context_len", "tail_len", "path")
        return launches, {"x": x} | {name: getattr(rows, name) for name in fields}, out

    def ran(program: tuple[list[Launch], dict[str, torch.Tensor], torch.Tensor], number: int) -> torch.Tensor:
        (launches, message, out), (x, rows, indices) = program, messages[number]
        own = Case(cache, rows, group=3).device_rows()
        for name, values in message.items():
            if name in ("positions", "write"):
                values.copy_(int32(indices))
            elif name == "path":
                values.copy_(int32([[1]] * 3))
            else:
                values.copy_(x if name == "x" else getattr(own, name))
        out.fill_(float("nan"))
        for launch in launches:
            launch.run()
        return out.clone()

    fresh, again = built(), built()
    wanted = ran(fresh, 1)
    ran(again, 0)
    found = ran(again, 1)
    assert torch.equal(found[:2], wanted[:2])
    assert torch.isfinite(found[:2]).all()
    assert found[2].isnan().all()


def test_every_launch_says_what_it_moves_and_computes() -> None:
    x, weight, out = randn(4, 64), randn(32, 64), poison(4, 32)
    [launch] = linear("o", x, weight, out, int32([0] * 4))
    assert (launch.bytes, launch.flops) == (4 * (4 * 64 + 32 * 64 + 4 * 32), 2 * 4 * 32 * 64)
    assert launch.options["enable_fp_fusion"] is False
    cache = Cache((4, 2, 16), length=64)
    k, v = cache.stored([Row(1)], 0)
    scratch = SpanBuffers(poison(1, 4, 2, 16), poison(1, 4, 2, 2))
    q, out = randn(1, 4, 16), poison(1, 64)
    for window, seen in ((0, 128), (48, 48)):
        spans, fold = attention(
            "a", q, k, v, Case(cache, [Row(1)]).device_rows(), out, scratch, scale=1.0, window=window, tiles=TILES
        )  # fmt: skip
        assert spans.flops == 4 * 4 * 16 * seen
        assert spans.bytes == 4 * (2 * seen * 2 * 16 + 4 * 16)
        assert fold.bytes == 4 * (4 * 2 * 18 + 64)
