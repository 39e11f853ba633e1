from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import ISAS, Cache, Row, attention, bits, reference_attention

from aquiline.backends.cpu import calls, native, native_weights

DTYPES = [torch.float32, torch.bfloat16]
FAST_ISAS = [isa for isa in ISAS if isa != "portable"] or ISAS
STORED = {
    "float32": (torch.float32, native.FLOAT32), "bfloat16": (torch.bfloat16, native.FLOAT32),
    "dot": (torch.bfloat16, native.BFLOAT16_DOT), "tiles": (torch.bfloat16, native.BFLOAT16_TILES),
}  # fmt: skip
"""How keys are stored, and the arithmetic over them."""
STORED_ON = [(storage, isa) for storage in STORED for isa in ISAS if storage != "tiles" or isa.startswith("amx")]
"""With each instruction set, of which those without tile registers all leave tiles to amx_twin."""


def stored(name):
    if name == "dot" and not native_weights.has_bf16_dot():
        pytest.skip("this CPU has no AVX512_BF16")
    return STORED[name]


def fill(cache, length, slot=0, seed=0):
    rng = np.random.default_rng([seed, slot])
    _, _, heads, _, dim = cache.group.v.shape
    k, v = (rng.normal(0, 1, (length, heads, dim)).astype(np.float32) for _ in range(2))
    cache.write(slot, np.arange(length), k, v)
    return k, v


def queries(rows, heads, dim, seed=1):
    return np.random.default_rng(seed).normal(0, 1, (rows, heads, dim)).astype(np.float32)


def check(cache, specs, q, **kwargs):
    got = attention(cache, specs, q, q.shape[2] ** -0.5, **kwargs)
    expected = reference_attention(cache, specs, q, q.shape[2] ** -0.5, **kwargs)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * max(1.0, np.abs(expected).max()))
    return got


def some_rows(draw, new_cache, filled=fill, dims=(16, 48, 64, 128), isas=ISAS):
    """Mixed rows of two slots (chunk rows, tree nodes, key_start) over page sizes, groups, windows, sinks."""
    page_size, group = draw(st.sampled_from([16, 32, 64])), draw(st.sampled_from([1, 3, 4, 8]))
    kv_heads, dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from(dims))
    calls.select_isa(draw(st.sampled_from(isas)))
    calls.set_threads(draw(st.sampled_from([1, 2])))
    cache = new_cache(800, kv_heads, dim, page_size, slots=2)
    lengths = [draw(st.integers(1, 780)) for _ in range(2)]
    specs = []
    for slot, length in enumerate(lengths):
        filled(cache, length, slot)
        for _ in range(draw(st.integers(0 if slot else 1, 5))):
            context = draw(st.integers(0, length))
            tail = draw(st.lists(st.integers(0, length - 1), max_size=5, min_size=0 if context else 1))
            start = draw(st.integers(0, context + len(tail) - 1))
            specs.append(Row(context, tuple(tail), start, slot))
    sinks = draw(st.sampled_from([None, np.linspace(-2, 2, group * kv_heads).astype(np.float32)]))
    window = draw(st.sampled_from([0, 1, 50, 128]))
    return cache, specs, queries(len(specs), group * kv_heads, dim), {"window": window, "sinks": sinks}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_matches_reference(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    cache, specs, q, how = some_rows(data.draw, partial(Cache.new, dtype=dtype), isas=FAST_ISAS)
    check(cache, specs, q, **how)


@pytest.mark.parametrize("storage", ["dot", "tiles"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pairs_round_queries_and_weights_alone(data, storage):
    """Values weigh up to half a unit of bfloat16's last place more or less, 2^-9 of each."""
    _, arithmetic = stored(storage)
    cache, specs, q, how = some_rows(data.draw, partial(Cache.new, dtype=torch.bfloat16), isas=FAST_ISAS)
    got = attention(cache, specs, q, q.shape[2] ** -0.5, **how, arithmetic=arithmetic)
    rounded = torch.as_tensor(q).bfloat16().float().numpy()
    expected = reference_attention(cache, specs, rounded, q.shape[2] ** -0.5, **how)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2.0**-9 * 5)  # no value is larger


@pytest.mark.parametrize(("storage", "isa"), STORED_ON)
def test_node_equals_token_decoded_alone_at_every_offset_of_a_block(storage, isa):
    """A node two levels below the root, stored out of order behind a sibling, against the same keys in one row."""
    calls.select_isa(isa)
    dtype, arithmetic = stored(storage)
    heads, kv_heads, dim = (6, 2, 64) if isa != "portable" else (2, 1, 32)
    for root in range(60, 60 + 66, 1 if isa != "portable" else 5):
        cache, plain = (Cache.new(160, kv_heads, dim, 16, dtype, seed=s) for s in (3, 4))
        k, v = fill(cache, root + 4)
        path = [root, root + 2, root + 3]  # root, second child (its sibling sits at root + 1), grandchild
        plain.write(0, np.arange(root + 3), *(np.concatenate([a[:root], a[path]]) for a in (k, v)))
        q = queries(3, heads, dim)
        tree = [Row(root, tuple(path[: d + 1])) for d in range(3)]
        rows = [*tree[:1], Row(root, (root, root + 1)), *tree[1:]]
        got = attention(cache, rows, q[[0, 0, 1, 2]], 0.125, arithmetic=arithmetic)[[0, 2, 3]]
        levels = [Row(root + d + 1) for d in range(3)]
        alone = [attention(plain, levels[d : d + 1], q[d : d + 1], 0.125, arithmetic=arithmetic) for d in range(3)]
        chunk = attention(plain, levels, q, 0.125, arithmetic=arithmetic)
        assert np.array_equal(bits(got), bits(np.concatenate(alone))), (root, storage, isa)
        assert np.array_equal(bits(chunk), bits(np.concatenate(alone))), (root, storage, isa)


@pytest.mark.parametrize("storage", ["bfloat16", "dot", "tiles"])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_bits_do_not_depend_on_chunks_threads_pages_or_isa(group, storage):
    """150 rows of a prompt over 700 keys, with a window and sinks, cut into chunks in several ways."""
    arithmetic = stored(storage)[1]
    kv_heads, dim, length = 1, 32, 700
    q, sinks = queries(150, group * kv_heads, dim), np.zeros(group * kv_heads, np.float32)
    specs = [Row(length - 150 + i + 1, key_start=1) for i in range(150)]
    for window in (0, 100):
        expected = None
        for page_size, isa, threads, chunk in (
            (16, ISAS[0], 1, 150),
            (32, ISAS[0], 2, 150),
            (64, ISAS[0], 3, 40),
            (16, ISAS[0], 2, 1),
            (16, ISAS[-1], 2, 64),
            (64, ISAS[len(ISAS) // 2], 2, 7),
        ):
            cache = Cache.new(length, kv_heads, dim, page_size)
            fill(cache, length)
            calls.select_isa(isa)
            calls.set_threads(threads)
            parts = range(0, 150, chunk)
            got = [
                attention(cache, specs[i : i + chunk], q[i : i + chunk], 0.2, window, sinks, arithmetic) for i in parts
            ]
            expected = bits(np.concatenate(got)) if expected is None else expected
            assert np.array_equal(bits(np.concatenate(got)), expected), (window, page_size, isa, threads, chunk)


@pytest.mark.parametrize("storage", STORED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_in_a_chunk_equals_the_row_alone(data, storage):
    """A chunk of a prompt that begins anywhere in a block, with nodes of a tree behind some of its rows. Later keys are
    NaN, and rows that do not see them keep their bits."""
    draw, (dtype, arithmetic) = data.draw, stored(storage)
    calls.select_isa(draw(st.sampled_from([isa for isa in ISAS if isa != "portable"] or ISAS)))
    calls.set_threads(draw(st.sampled_from([1, 2])))
    group, dim, length = draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([16, 64, 80])), 200
    cache = Cache.new(length, 2, dim, draw(st.sampled_from([16, 32, 64])), dtype)
    k, v = fill(cache, length)
    begin, num = draw(st.integers(0, length - 1)), draw(st.integers(1, 70))
    start = draw(st.integers(0, begin))
    tails = draw(st.dictionaries(st.integers(0, num - 1), st.lists(st.integers(0, length - 1), max_size=3), max_size=4))
    specs = [Row(i + 1, tuple(tails.get(i - begin, ())), start) for i in range(begin, min(begin + num, length))]
    q = queries(len(specs), 2 * group, dim)
    how = {
        "window": draw(st.sampled_from([0, 1, 20, 100])),
        "sinks": draw(st.sampled_from([None, np.linspace(-2, 2, 2 * group).astype(np.float32)])),
        "arithmetic": arithmetic,
    }
    chunk = bits(attention(cache, specs, q, 0.2, **how))
    for i, drafting in enumerate(specs):
        assert np.array_equal(chunk[i : i + 1], bits(attention(cache, [drafting], q[i : i + 1], 0.2, **how))), i
    later = np.arange(begin + len(specs) // 2 + 1, length)
    cache.write(0, later, np.full_like(k[later], np.nan), np.full_like(v[later], np.nan))
    spoiled = bits(attention(cache, specs, q, 0.2, **how))
    kept = [i for i, drafting in enumerate(specs) if not set(drafting.path(how["window"])) & set(later)]
    assert np.array_equal(spoiled[kept], chunk[kept])


@pytest.mark.parametrize("storage", ["bfloat16", "dot", "tiles"])
def test_spans_computed_by_several_threads_fold_to_the_same_bits(storage):
    """One kv head on 2 and 3 threads makes each span of 512 keys an item of its own."""
    arithmetic = stored(storage)[1]
    cache = Cache.new(2500, 1, 64)
    fill(cache, 2500)
    specs, q = [Row(2400, (2401,)), Row(2400, (2401, 2403)), Row(2300)], queries(3, 4, 64)
    check(cache, specs, q)
    results = []
    for threads in (1, 2, 3):
        calls.set_threads(threads)
        results.append(bits(attention(cache, specs, q, 0.125, arithmetic=arithmetic)))
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("storage", ["bfloat16", "dot", "tiles"])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("window", [0, 700])
def test_workers_that_share_tiles_by_blocks_give_the_same_bits(window, kv_heads, storage):
    """Tiles and heads that no number of threads divides, of rows that begin and end anywhere in spans."""
    arithmetic = stored(storage)[1]
    cache, rng = Cache.new(2500, kv_heads, 64, slots=2), np.random.default_rng(kv_heads)
    fill(cache, 2500), fill(cache, 1300, 1)
    for num_first, num_second in ((1, 0), (4, 0), (5, 1), (50, 0)):
        specs = [Row(int(rng.integers(500, 2500)), key_start=int(rng.integers(400))) for _ in range(num_first)]
        specs += [Row(1290, (1291, 1295), 70, slot=1)] * num_second
        q = queries(len(specs), 3 * kv_heads, 64)
        results = []
        for threads in (1, 2, 3, 4, 7):
            calls.set_threads(threads)
            results.append(bits(attention(cache, specs, q, 0.125, window, arithmetic=arithmetic)))
        assert all(np.array_equal(result, results[0]) for result in results), len(specs)


@pytest.mark.parametrize("storage", STORED)
def test_a_row_does_not_see_its_neighbours_nan(storage):
    """A later key that is NaN belongs to the later row of the chunk only."""
    dtype, arithmetic = stored(storage)
    cache = Cache.new(64, 1, 32, dtype=dtype)
    k, v = fill(cache, 40)
    q = queries(2, 1, 32)
    clean = attention(cache, [Row(39), Row(40)], q, 0.2, arithmetic=arithmetic)
    cache.write(0, [39], np.full_like(k[:1], np.nan), np.full_like(v[:1], np.nan))
    broken = attention(cache, [Row(39), Row(40)], q, 0.2, arithmetic=arithmetic)
    assert np.array_equal(bits(broken[0]), bits(clean[0]))
    assert np.isnan(broken[1]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_of_any_payload_makes_its_row_nan(isa):
    """A NaN with low bits set, which the exponent of a weight must not be added to."""
    calls.select_isa(isa)
    cache = Cache.new(64, 1, 32, dtype=torch.float32)
    k, v = fill(cache, 40)
    odd = np.full_like(k[:1], np.array(0x7FC00001, np.uint32).view(np.float32))
    cache.write(0, [7], odd, v[7:8])
    assert np.isnan(attention(cache, [Row(7), Row(40)], queries(2, 3, 32), 0.2)[1]).all()


@pytest.mark.parametrize(("storage", "isa"), STORED_ON)
def test_many_queries_get_the_bits_of_each_alone(storage, isa):
    """More queries than are weighed together, of rows that see every part of a block; scores far below the largest."""
    dtype, arithmetic = stored(storage)
    calls.select_isa(isa)
    cache = Cache.new(320, 1, 64, dtype=dtype)
    fill(cache, 320)
    specs, q = [Row(i + 1) for i in range(190, 310)], queries(120, 8, 64) * 20
    together = bits(attention(cache, specs, q, 0.5, arithmetic=arithmetic))
    for i in range(0, 120, 7):
        assert np.array_equal(
            together[i : i + 1], bits(attention(cache, specs[i : i + 1], q[i : i + 1], 0.5, arithmetic=arithmetic))
        ), i
