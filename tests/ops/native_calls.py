"""The library's single parts on numpy arrays and torch tensors, and small KV caches to run them on."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from aquiline.backends.cpu import buffers, calls, native
from aquiline.backends.torch import reference as ref
from aquiline.blocks import Weight, floats_of, in_memory
from aquiline.config import MAX_DEPTH
from aquiline.ops.torch_arrays import array_of, tensor_of
from aquiline.types import KEY_GROUP, AcceptResult, KVGroup, Rows

LOADED = native.load()
ISAS = sorted(LOADED.available_isas(), key="portable".__eq__) if LOADED is not None else []  # the plainest last


def at(array):
    assert array.flags.c_contiguous, "the library takes C-contiguous arrays"
    return array.ctypes.data


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


def parts(tensor):
    """A tensor [N, K] as a weight of the native library."""
    return (in_memory(array_of(tensor)),)


def tensor(weight):
    """A weight, a norm or a bias as a tensor; None as it is."""
    if weight is None:
        return None
    return tensor_of(floats_of(weight) if isinstance(weight, tuple) else weight)


def native_linear(weight, bias=None, arithmetic="float32", dtype=None):
    """A NativeLinear of a tensor or a weight, and a bias as a tensor."""
    weight = weight if isinstance(weight, Weight) else array_of(weight)
    return calls.NativeLinear(weight, None if bias is None else array_of(bias), arithmetic, dtype)


def swiglu(gate, up):
    """gate, up [R, I] through the native op, which wants them interleaved in runs of 16."""
    rows, width = gate.shape
    both = np.stack([gate.reshape(rows, -1, 16), up.reshape(rows, -1, 16)], axis=2).reshape(rows, 2 * width)
    out = np.empty((rows, width), np.float32)
    LOADED.swiglu(at(np.ascontiguousarray(both)), rows, width, at(out))
    return out


def rope(x, positions, inv_freq, scale):
    out = x.copy()
    LOADED.rope(at(out), at(positions), at(inv_freq), scale, *x.shape)
    return out


def rms_norm(x, weight, eps):
    y = np.empty_like(x)
    LOADED.rms_norm(at(x), at(weight), *x.shape, eps, at(y))
    return y


def draw(logits, sampling):
    """A token from each row of logits [n, V]."""
    tokens = np.empty(len(logits), np.int32)
    assert len(sampling) == len(logits)
    LOADED.draw(at(logits), *logits.shape, at(sampling), at(tokens))
    return tokens


def guess(model, hidden, index, sampling, d2t=None):
    """What a NativeModel draws for rows of hidden, the runners-up and the margins."""
    tokens, runners_up, margins = np.empty_like(index), np.empty_like(index), np.empty(len(index), np.float32)
    out = at(tokens), at(runners_up), at(margins)
    LOADED.head_guess(
        ctypes.byref(model.struct),
        at(hidden),
        at(index),
        len(index),
        at(sampling),
        d2t if d2t is None else at(d2t),
        *out,
    )
    return tokens, runners_up, margins


def forward_some(model, kv, rows, num_states, hidden, g):
    """A forward whose rows from num_states on only write their keys."""
    structs = model.struct, buffers.describe_kv(kv), buffers.describe_rows(rows)
    LOADED.forward(*map(ctypes.byref, structs), at(g), num_states, at(hidden), None, None)


def move_kv(kv, page_table, slots, src, dst):
    struct = buffers.describe_kv(kv)
    LOADED.move_kv(ctypes.byref(struct), at(page_table), page_table.shape[1], at(slots), at(src), at(dst), len(slots))


def accept(tree, drawn):
    """AcceptResult of whole forests by the library's law for one tree."""
    shape, width = tree.topology, tree.topology.max_depth + 1
    B = len(shape.offsets) - 1
    path, kept = np.zeros((B, width), np.int32), np.full((B, width), -1, np.int32)
    accepted = np.zeros(B, np.int32)
    for b in range(B):
        rows = slice(int(shape.offsets[b]), int(shape.offsets[b + 1]))
        tokens, parents, own = (np.ascontiguousarray(a[rows], np.int32) for a in (tree.tokens, shape.parents, drawn))
        found, length = np.zeros(MAX_DEPTH + 1, np.int32), ctypes.c_int32()
        LOADED.accept(at(tokens), at(parents), at(own), len(tokens), at(found), ctypes.addressof(length))
        n = length.value
        path[b, :n], accepted[b] = found[:n], n - 1
        kept[b, :n] = [*tokens[found[1:n]], own[found[n - 1]]]
    return AcceptResult(path=path, tokens=kept, num_accepted=accepted)


def select(scores, parents, num_nodes):
    """The chosen candidates [num_nodes - 1] and the nodes' parents [num_nodes]."""
    chosen, node_parents = np.zeros(num_nodes - 1, np.int32), np.zeros(num_nodes, np.int32)
    LOADED.select(at(scores), at(parents), len(scores), num_nodes, at(chosen), at(node_parents))
    return chosen, node_parents


def exp_log(x):
    exps, logs = np.empty_like(x), np.empty_like(x)
    LOADED.exp_log(at(x), len(x), at(exps), at(logs))
    return exps, logs


def gumbel(seed, position, count):
    noise = np.empty(count, np.float32)
    LOADED.gumbel(seed, position, count, at(noise))
    return noise


@dataclass
class Cache:
    """One layer of KV for several slots, all NaN until written, with scattered pages; k, v keep what was written."""

    group: KVGroup
    table: np.ndarray

    @staticmethod
    def new(capacity, kv_heads, dim, page_size=16, dtype=torch.bfloat16, slots=1, seed=0):
        per_slot = -(-capacity // page_size)
        pages = per_slot * slots + 3
        k = torch.full((pages, 1, kv_heads, page_size // 16, dim, 16), float("nan"), dtype=dtype)
        v = torch.full((pages, 1, kv_heads, page_size, dim), float("nan"), dtype=dtype)
        order = np.random.default_rng(seed).permutation(pages)[: per_slot * slots].astype(np.int32)
        return Cache(KVGroup(array_of(k), array_of(v)), order.reshape(slots, per_slot).copy())

    def place(self, slot, indices):
        """Pages, and offsets within the pages, of KV indices."""
        indices, size = np.asarray(indices, np.int64), self.group.page_size
        return self.table[slot].astype(np.int64)[indices // size], indices % size

    def write(self, slot, indices, k, v):
        """Store k, v [R, Hkv, Dh], rounded to the group's dtype."""
        (pages, offsets), group = self.place(slot, indices), self.group
        group.k[pages, 0, :, offsets // KEY_GROUP, :, offsets % KEY_GROUP] = np.asarray(k).astype(group.k.dtype)
        group.v[pages, 0, :, offsets] = np.asarray(v).astype(group.v.dtype)

    def read(self, slot, indices):
        """k, v float32 [T, Hkv, Dh]."""
        (pages, offsets), group = self.place(slot, indices), self.group
        k = group.k[pages, 0, :, offsets // KEY_GROUP, :, offsets % KEY_GROUP]
        return tensor_of(k.astype(np.float32)), tensor_of(group.v[pages, 0, :, offsets].astype(np.float32))


@dataclass(frozen=True)
class Row:
    """What one row sees."""

    context_len: int
    tail: tuple[int, ...] = ()
    key_start: int = 0
    slot: int = 0

    def path(self, window):
        indices = [*range(self.context_len), *self.tail]
        low = max(self.key_start, len(indices) - window) if window else self.key_start
        return indices[low:]


def rows_of(table, specs, write=None):
    rows = Rows(len(specs), max([len(s.tail) for s in specs] + [1]), table, num=len(specs))
    for i, drafting in enumerate(specs):
        rows.slots[i], rows.context_len[i], rows.key_start[i] = drafting.slot, drafting.context_len, drafting.key_start
        rows.tail_len[i] = len(drafting.tail)
        rows.tail[i, : len(drafting.tail)] = drafting.tail
    rows.write[:] = -1 if write is None else write
    return rows


def attention(cache, specs, q, scale, window=0, sinks=None, arithmetic=native.FLOAT32):
    """q [R, Hq, Dh] -> [R, Hq * Dh]."""
    out = np.full((q.shape[0], q.shape[1] * q.shape[2]), np.nan, np.float32)
    kv, rows = buffers.describe_kv(cache.group), rows_of(cache.table, specs)
    struct = buffers.describe_rows(rows)
    LOADED.attention(
        ctypes.byref(kv),
        0,
        ctypes.byref(struct),
        at(q),
        q.shape[1],
        scale,
        window,
        None if sinks is None else at(sinks),
        arithmetic,
        at(out),
    )
    return out


def reference_attention(cache, specs, q, scale, window=0, sinks=None):
    out = []
    for drafting, row in zip(specs, q, strict=True):
        k, v = cache.read(drafting.slot, drafting.path(window))
        sink = None if sinks is None else torch.as_tensor(sinks)
        out.append(ref.attention(torch.as_tensor(row), k, v, scale, sink).numpy())
    return np.stack(out)
