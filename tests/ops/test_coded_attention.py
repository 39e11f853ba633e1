"""Attention over keys and values in eight bits."""

from __future__ import annotations

import ctypes
import hashlib

import numpy as np
import pytest
from codes import BLOCK, CodedCache, coded_attention, head_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import ISAS, LOADED, Row, at, attention, bits, move_kv, rows_of
from test_attention import queries, some_rows

from aquiline.backends.cpu import buffers, calls


def fill(cache, length, slot=0, seed=0):
    rng = np.random.default_rng([seed, slot])
    heads, dim = cache.group.v.shape[2], cache.group.v.shape[4]
    k, v = (rng.normal(0, 1, (length, heads, dim)).astype(np.float32) for _ in range(2))
    v *= rng.uniform(0.1, 3, (length, heads, 1)).astype(np.float32)
    cache.write(slot, np.arange(length), k, v)
    return k, v


def check(cache, specs, q, scale=0.2, **how):
    """The rules, bit for bit; where they say NaN, NaN."""
    got, expected = attention(cache, specs, q, scale, **how), coded_attention(cache, specs, q, scale, **how)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert np.array_equal(bits(np.nan_to_num(got)), bits(np.nan_to_num(expected)))
    return got


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_follows_its_rules_to_the_bit(data):
    """Rows of two slots (chunks, nodes of trees, starts) over sizes of pages, groups, heads, windows, sinks."""
    cache, specs, q, how = some_rows(data.draw, CodedCache.new, fill, dims=(16, 48, 64, 80, 256))
    check(cache, specs, q, **how)


def test_keys_are_rounded_by_their_own_largest_channel(isa):
    """Ties to even, dust to zeros, NaN and infinity to a scale of NaN; whatever lies beside them in memory."""
    dim, num = 48, 23
    k, v = (np.random.default_rng(s).normal(0, 2, (num, 2, dim)).astype(np.float32) for s in (1, 2))
    k[0, 0, :] = np.arange(dim) - 63.5  # half a code off: 127 / 63.5 is 2
    k[0, 0, :4] = 63.5, 0.25, 0.75, -1.25
    v[1], k[2, 1], v[3, 0] = 2.0**-121, 0, -(2.0**-120)
    k[4, 0, 5], v[5, 1, 40], k[6, 1, 47] = np.nan, np.inf, -np.inf
    v[7, 0] = 3e38
    ours, theirs = (CodedCache.new(64, 2, dim, 32, seed=5) for _ in range(2))
    indices = np.random.default_rng(3).permutation(64)[:num]
    theirs.write(0, indices, k, v)
    specs = [Row(1)] * num
    rows = rows_of(ours.table, specs, indices)
    described = buffers.describe_kv(ours.group), buffers.describe_rows(rows)
    LOADED.write_kv(ctypes.byref(described[0]), 0, ctypes.byref(described[1]), at(k), at(v))
    assert np.array_equal(ours.group.k, theirs.group.k) and np.array_equal(ours.group.v, theirs.group.v)
    for name in ("k_scales", "v_scales"):
        assert np.array_equal(bits(getattr(ours.group, name)), bits(getattr(theirs.group, name)))
    codes, scales = head_codes(k)
    assert codes[0, 0, :4].tolist() == [127, 0, 2, -2] and scales[2, 1] == 0 and np.isnan(scales[4, 0])


def test_a_largest_weight_belongs_to_one_query(isa):
    """Queries whose best keys differ by far in the size of their values: with an L in common the small ones get weights
    of zero. Alone and beside the others, a row has the same bits."""
    cache = CodedCache.new(BLOCK, 1, 32)
    k, v = fill(cache, BLOCK)
    v[BLOCK // 2 :] *= 1000
    cache.write(0, np.arange(BLOCK), k, v)
    q = 12 * k[[3, 40, 9, 50, 20, 33, 1], :]
    specs = [Row(BLOCK)] * len(q)
    together = check(cache, specs, q)
    alone = [attention(cache, specs[:1], q[i : i + 1], 0.2) for i in range(len(q))]
    assert np.array_equal(bits(together), bits(np.concatenate(alone)))


def test_a_block_has_a_maximum_of_its_own(isa):
    """Blocks whose best scores lie far apart, the higher one first: against a running maximum the later block's e would
    be rounded otherwise, and all of it lost where it is below exp's least."""
    cache = CodedCache.new(3 * BLOCK, 1, 32)
    k, v = fill(cache, 3 * BLOCK)
    k[:BLOCK] *= 3
    cache.write(0, np.arange(3 * BLOCK), k, v)
    check(cache, [Row(3 * BLOCK), Row(3 * BLOCK - 1)], 2 * queries(2, 4, 32))


def test_l_is_the_largest_of_what_a_row_sees(isa):
    """A later value, a thousand times as large, does not cost an earlier row its weights; nor does one outside its
    window or before its start."""
    cache = CodedCache.new(BLOCK, 2, 48)
    k, v = fill(cache, BLOCK)
    v[[2, 45]] *= 1000
    cache.write(0, np.arange(BLOCK), k, v)
    specs = [Row(n) for n in (40, 45, 46, 64)] + [Row(44, key_start=3), Row(44, (46, 50), 7)]
    q = queries(len(specs), 6, 48)
    check(cache, specs, q)
    check(cache, specs, q, window=30)


@pytest.mark.parametrize("spoiled", ["k_scales", "v_scales"])
def test_what_a_row_does_not_see_may_be_anything(isa, spoiled):
    """Scales of NaN and infinity, and any codes, behind a row, before its window and in pages of others."""
    cache = CodedCache.new(200, 1, 64, 32)
    fill(cache, 200)
    specs = [Row(70, key_start=3), Row(71, key_start=5), Row(70, (70, 75), 3), Row(70, (71, 72, 73), 3)]
    q, how = queries(4, 3, 64), {"window": 60}
    clean = attention(cache, specs, q, 0.2, **how)
    assert np.isfinite(clean).all()
    seen = set().union(*(spec.path(60) for spec in specs))
    pages, places = cache.place(0, [i for i in range(200) if i not in seen])
    for value in (np.nan, np.inf, -np.inf, 3e38):
        getattr(cache.group, spoiled)[pages, 0, :, places] = value
        cache.group.k[pages, 0, :, places // 16, :, places % 16] = 0
        cache.group.v[pages, 0, :, places // 4, :, places % 4] = -128
        assert np.array_equal(bits(attention(cache, specs, q, 0.2, **how)), bits(clean)), value


@pytest.mark.parametrize("what", ["key", "value", "query"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_reach_every_row_that_sees_them(isa, what, value):
    cache = CodedCache.new(300, 1, 32)
    k, v = fill(cache, 300)
    q = queries(3, 2, 32)
    {"key": k[100:101], "value": v[100:101], "query": q[1:]}[what][:, 0, 3] = value
    cache.write(0, np.arange(300), k, v)
    got = check(cache, [Row(100), Row(101), Row(300)], q)
    assert np.isfinite(got[0]).all()
    heads = np.isnan(got[1:].reshape(2, 2, 32)).all(-1)
    assert heads[:, 0].all() and heads[:, 1].all() == (what != "query")


def test_values_of_almost_nothing_add_nothing(isa):
    cache = CodedCache.new(200, 1, 32)
    k, v = fill(cache, 200)
    v[64:] *= np.float32(2.0**-110)
    cache.write(0, np.arange(200), k, v)
    got = check(cache, [Row(200), Row(200, key_start=64), Row(64)], queries(3, 1, 32))
    assert (got[1] == 0).all() and (got[0] != got[2]).any()


@pytest.mark.parametrize("group", [1, 3, 8])
def test_bits_do_not_depend_on_chunks_threads_pages_or_isa(group):
    """150 rows of a prompt over 700 keys, cut into chunks in several ways."""
    dim, length = 32, 700
    q, sinks = queries(150, group, dim), np.zeros(group, np.float32)
    specs = [Row(length - 150 + i + 1, key_start=1) for i in range(150)]
    for window in (0, 100):
        expected = None
        for page_size, isa, threads, chunk in (
            (16, ISAS[0], 1, 150), (32, ISAS[0], 2, 150), (64, ISAS[0], 3, 40), (16, ISAS[0], 2, 1),
            *((16, isa, 2, 64) for isa in ISAS[1:]),
        ):  # fmt: skip
            cache = CodedCache.new(length, 1, dim, page_size)
            fill(cache, length)
            calls.select_isa(isa)
            calls.set_threads(threads)
            parts = [slice(i, i + chunk) for i in range(0, 150, chunk)]
            got = bits(np.concatenate([attention(cache, specs[i], q[i], 0.2, window, sinks) for i in parts]))
            expected = got if expected is None else expected
            assert np.array_equal(got, expected), (window, page_size, isa, threads, chunk)


@pytest.mark.parametrize("dim", [16, 48, 96, 128, 256])
def test_wide_heads_in_many_rows(dim, isa):
    """Two to nine rows of six queries, enough for tile registers, whose pieces of a head are 16, 32 or 64 channels."""
    cache = CodedCache.new(160, 1, dim)
    fill(cache, 160)
    for rows in (2, 3, 6, 9):
        specs = [Row(150 - rows + i, key_start=i) for i in range(rows)]
        check(cache, specs, queries(rows, 6, dim))


def test_node_equals_token_decoded_alone_at_every_offset_of_a_block(isa):
    """A node two levels below the root, stored behind a sibling, against the same keys in one row; a chain, which is
    read where it lies, against its tokens."""
    for root in range(60, 60 + 66, 5 if isa == "portable" else 1):
        cache, plain = (CodedCache.new(160, 2, 32, 16, seed=s) for s in (3, 4))
        k, v = fill(cache, root + 4)
        path = [root, root + 2, root + 3]
        plain.write(0, np.arange(root + 3), *(np.concatenate([a[:root], a[path]]) for a in (k, v)))
        q = queries(3, 6, 32)
        rows = [Row(root, (root,)), Row(root, (root, root + 1)), *(Row(root, tuple(path[: d + 1])) for d in (1, 2))]
        got = attention(cache, rows, q[[0, 0, 1, 2]], 0.125)[[0, 2, 3]]
        chain = attention(plain, [Row(root, tuple(range(root, root + d + 1))) for d in range(3)], q, 0.125)
        alone = [attention(plain, [Row(root + d + 1)], q[d : d + 1], 0.125) for d in range(3)]
        assert np.array_equal(bits(got), bits(np.concatenate(alone))), root
        assert np.array_equal(bits(chain), bits(np.concatenate(alone))), root


def test_spans_computed_by_several_threads_fold_to_the_same_bits():
    cache = CodedCache.new(1700, 1, 64)
    fill(cache, 1700)
    specs, q = [Row(1600, (1601,)), Row(1600, (1601, 1603)), Row(1500)], queries(3, 4, 64)
    results = []
    for threads in (1, 2, 3):
        calls.set_threads(threads)
        results.append(bits(check(cache, specs, q)))
    assert all(np.array_equal(result, results[0]) for result in results)


def test_keys_move_with_their_codes_and_scales():
    """In order, within a page and between pages, whatever stood there before."""
    cache = CodedCache.new(96, 2, 48, 16)
    fill(cache, 96)
    before = [a.copy() for a in cache.read(0, range(96))]
    src, dst = np.array([5, 40, 41, 70], np.int32), np.array([4, 5, 17, 69], np.int32)
    move_kv(cache.group, cache.table, np.zeros(4, np.int32), src, dst)
    order = np.arange(96)
    for a, b in zip(src, dst, strict=True):
        order[b] = order[a]
    for now, then in zip(cache.read(0, range(96)), before, strict=True):
        assert np.array_equal(now, then[order])


GOLDEN = "7c103c37141f0493f0a3f89ff6ea94a1b8ed963c9c76c11141b9ea8027b1acb6"


def test_golden_hash(isa):
    """Keys of whole numbers, so that no library's random numbers or vector maths enter."""
    cache = CodedCache.new(700, 2, 64, 32)
    numbers = np.random.default_rng(11).integers(-90, 91, (3, 700, 6, 64)).astype(np.float32) / 32
    cache.write(0, np.arange(700), numbers[0, :, :2], numbers[1, :, :2])
    specs = [Row(n) for n in (1, 64, 65, 513, 690)] + [Row(600, (600, 603, 690), 5), Row(640, (640, 641))]
    got = attention(cache, specs, np.ascontiguousarray(numbers[2, : len(specs)]), 0.125, 600)
    assert hashlib.sha256(got.tobytes()).hexdigest() == GOLDEN


def test_scales_are_asked_for():
    group = CodedCache.new(64, 1, 32).group
    with pytest.raises(ValueError, match=r"KVGroup\.v_scales is None: must be \(7, 1, 1, 16\) beside keys in int8"):
        buffers.describe_kv(type(group)(group.k, group.v, group.k_scales))
    described = buffers.describe_kv(group)
    described.k_scales = None
    rows = buffers.describe_rows(rows_of(np.zeros((1, 4), np.int32), [Row(1)]))
    q = np.zeros((1, 1, 32), np.float32)
    with pytest.raises(Exception, match=r"kv\.k_scales is NULL"):
        LOADED.attention(ctypes.byref(described), 0, ctypes.byref(rows), at(q), 1, 1.0, 0, None, 0, at(q))
