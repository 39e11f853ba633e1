"""What a call of the native library reaches: how many bytes lie behind each pointer of a struct or an argument.

csrc/api/aquiline.h, csrc/stages/stages.h and csrc/lookup/lookup.h give the shapes in words; here they are sizes, so
that a call can be recorded with all that it reads and writes (recorder.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aquiline.backends.cpu import native
from aquiline.backends.cpu.buffers import ROWS_ARRAYS
from aquiline.backends.cpu.native import (
    AqAdmit,
    AqAttention,
    AqBatchConfig,
    AqConfidence,
    AqCopy,
    AqCut,
    AqExperts,
    AqFusion,
    AqKV,
    AqLayer,
    AqLinear,
    AqMatchEvents,
    AqMlp,
    AqModel,
    AqRows,
    AqSampling,
    AqShape,
)
from aquiline.blocks import BLOCK_TYPES, block_size
from aquiline.spec.match_events import MatchEvents

WORD = 4
NUM_CELLS = len(MatchEvents().trials)
ELEMENT_BYTES = {native.FLOAT32: 4, native.BFLOAT16: 2, native.FLOAT16: 2}


@dataclass(frozen=True)
class Range:
    """Bytes in memory. pointers: where a pointer stands in them, and what it points to. `is_input` bytes are not
    compared after a call: structs, whose pointers differ from machine to machine."""

    address: int
    num_bytes: int
    pointers: tuple[tuple[int, int], ...] = ()
    is_input: bool = False


def packed_bytes(n: int, k: int, dtype: int) -> int:
    library = native.load()
    assert library is not None
    return library.packed_bytes(n, k, dtype)


def source_bytes(n: int, k: int, dtype: int) -> int:
    """Of a weight before aq_pack."""
    kind = native.FORMATS[dtype].removesuffix("_dot").removesuffix("_tiles")
    if kind.upper() in BLOCK_TYPES:
        inputs, size = block_size(kind.upper())
        return n * k // inputs * size
    return n * k * {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 1}[kind]


def scale_bytes(n: int, k: int, dtype: int) -> int:
    """Of the scales that aq_pack takes."""
    return {"int8": n * WORD, "int4": n * k // 32 * 2}[native.FORMATS[dtype].removesuffix("_dot")]


def num_keys(kv: AqKV) -> int:
    return int(kv.num_layers * kv.num_pages * kv.page_size * kv.num_kv_heads)


def key_bytes(kv: AqKV) -> int:
    """Of all keys of a cache, and of all values."""
    return num_keys(kv) * kv.head_dim * (ELEMENT_BYTES | {native.INT8: 1})[kv.dtype]


def embed_bytes(model: AqModel) -> int:
    if model.embed_dtype in ELEMENT_BYTES:
        return int(model.vocab * model.hidden * ELEMENT_BYTES[model.embed_dtype])
    return packed_bytes(model.vocab, model.hidden, model.embed_dtype)


Size = Callable[[Any, Any], int]
FIELDS: dict[type[ctypes.Structure], dict[str, Size]] = {
    AqLinear: {"weight": lambda s, _: packed_bytes(s.n, s.k, s.dtype), "bias": lambda s, _: s.n * WORD},
    AqAttention: {
        "q_norm": lambda _, model: model.head_dim * WORD,
        "k_norm": lambda _, model: model.head_dim * WORD,
        "sinks": lambda _, model: model.num_heads * WORD,
        "key_shift": lambda _, model: model.num_kv_heads * model.head_dim * WORD,
    },
    AqLayer: {
        name: lambda _, model: model.hidden * WORD
        for name in ("input_norm", "post_norm", "hidden_norm", "attention_out_norm", "mlp_out_norm")
    },
    AqModel: {
        "inv_freq": lambda s, _: s.head_dim // 2 * WORD,
        "local_inv_freq": lambda s, _: s.head_dim // 2 * WORD,
        "embed": lambda s, _: embed_bytes(s),
        "layers": lambda s, _: s.num_layers,
        "final_norm": lambda s, _: s.hidden * WORD,
        "capture": lambda s, _: s.num_capture * WORD,
    },
    AqMlp: {"experts": lambda *_: 1},
    AqKV: {
        **{name: lambda s, _: key_bytes(s) for name in ("k", "v")},
        **{name: lambda s, _: num_keys(s) * WORD for name in ("k_scales", "v_scales")},
    },
    AqRows: {
        **{name: lambda s, _: s.num_rows * WORD for name in ROWS_ARRAYS},
        "tail": lambda s, _: s.num_rows * s.tail_stride * WORD,
        "page_table": lambda s, _: s.num_slots * s.table_stride * WORD,
    },
    AqFusion: {"norm": lambda s, _: s.fc.k * WORD, "part_norms": lambda s, _: s.fc.k * WORD},
    AqBatchConfig: {
        **{name: lambda *_: 1 for name in ("target", "draft", "target_kv", "draft_kv")},
        "hidden": lambda s, _: s.max_rows * s.target.contents.hidden * WORD,
        "features": lambda s, _: s.max_rows * s.target.contents.num_capture * s.target.contents.hidden * WORD,
        "draft_hidden": lambda s, _: s.max_rows * s.draft.contents.hidden * WORD,
        "fused": lambda s, _: (
            s.target_kv.contents.num_pages * s.target_kv.contents.page_size * s.draft.contents.hidden * WORD
        ),
        "d2t": lambda s, _: s.draft.contents.head.n * WORD,
    },
    AqAdmit: {
        "tokens": lambda s, _: s.num_tokens * WORD,
        "bias_tokens": lambda s, _: s.num_biases * WORD,
        "biases": lambda s, _: s.num_biases * WORD,
        "end_tokens": lambda s, _: s.num_end_tokens * WORD,
        "bad_words": lambda s, _: s.bad_words_size * WORD,
    },
    AqConfidence: {
        "cuts": lambda s, _: s.num_cuts * ctypes.sizeof(AqCut),
        "row_costs": lambda s, _: s.num_row_costs * WORD,
    },
    AqShape: {"parents": lambda s, _: s.num_nodes * WORD, "ranks": lambda s, _: s.num_nodes * WORD},
    AqMatchEvents: {
        **{name: lambda *_: NUM_CELLS * WORD for name in ("trials", "hits")},
        "estimates": lambda *_: NUM_CELLS * 2 * WORD,
    },
}
"""Bytes behind each pointer, by the struct and the model that it belongs to; behind a pointer to structs, how many."""

STRUCTS = {(AqLinear, "rest"): AqLinear}
"""Untyped pointers to a struct."""

SAMPLING = ctypes.sizeof(AqSampling)


def last_row(address: int, count: int) -> int:
    """One more than the largest of `count` int32 at an address."""
    return max((ctypes.c_int32 * count).from_address(address), default=-1) + 1


def heads(a: list[Any]) -> int:
    return int(a[2].num_rows * a[0].num_kv_heads * a[0].head_dim * WORD)


ARGUMENTS: dict[str, dict[int, Callable[[list[Any]], int]]] = {
    "aq_pack": {
        0: lambda a: source_bytes(*a[2:5]), 1: lambda a: scale_bytes(*a[2:5]), 5: lambda a: packed_bytes(*a[2:5]),
    },
    "aq_forward": {
        3: lambda a: a[2].num_rows * a[0].hidden * WORD,
        5: lambda a: a[4] * a[0].hidden * WORD,
        6: lambda a: a[2].num_rows * a[0].num_capture * a[0].hidden * WORD,
    },
    "aq_head_logits": {
        1: lambda a: last_row(a[2], a[3]) * a[0].hidden * WORD, 2: lambda a: a[3] * WORD,
        4: lambda a: a[3] * a[0].head.n * WORD,
    },
    "aq_head_draw": {
        1: lambda a: last_row(a[2], a[3]) * a[0].hidden * WORD, 2: lambda a: a[3] * WORD,
        4: lambda a: a[3] * SAMPLING, 5: lambda a: a[0].head.n * WORD, 6: lambda a: a[3] * WORD,
    },
    "aq_head_guess": {
        1: lambda a: last_row(a[2], a[3]) * a[0].hidden * WORD, 2: lambda a: a[3] * WORD,
        4: lambda a: a[3] * SAMPLING, 5: lambda a: a[0].head.n * WORD, **{i: lambda a: a[3] * WORD for i in (6, 7, 8)},
    },
    "aq_head_topk": {
        1: lambda a: last_row(a[2], a[3]) * a[0].hidden * WORD, 2: lambda a: a[3] * WORD,
        5: lambda a: a[3] * SAMPLING, 6: lambda a: a[0].head.n * WORD,
        7: lambda a: a[3] * a[4] * WORD, 8: lambda a: a[3] * a[4] * WORD,
    },
    "aq_head_logprobs": {
        1: lambda a: last_row(a[2], a[3]) * a[0].hidden * WORD, 2: lambda a: a[3] * WORD,
        5: lambda a: a[3] * a[4] * WORD, 6: lambda a: a[3] * a[4] * WORD,
        **{i: lambda a: a[3] * WORD for i in (7, 8, 9)},
    },
    "aq_draw": {0: lambda a: a[1] * a[2] * WORD, 3: lambda a: a[1] * SAMPLING, 4: lambda a: a[1] * WORD},
    "aq_linear": {1: lambda a: a[2] * a[0].k * WORD, 3: lambda a: a[2] * a[0].n * WORD},
    "aq_rms_norm": {
        0: lambda a: a[2] * a[3] * WORD, 1: lambda a: a[3] * WORD, 5: lambda a: a[2] * a[3] * WORD,
    },
    "aq_swiglu": {0: lambda a: a[1] * a[2] * 2 * WORD, 3: lambda a: a[1] * a[2] * WORD},
    "aq_rope": {
        0: lambda a: a[4] * a[5] * a[6] * WORD, 1: lambda a: a[4] * WORD, 2: lambda a: a[6] // 2 * WORD,
    },
    "aq_write_kv": {3: heads, 4: heads},
    "aq_attention": {
        3: lambda a: a[2].num_rows * a[4] * a[0].head_dim * WORD, 7: lambda a: a[4] * WORD,
        9: lambda a: a[2].num_rows * a[4] * a[0].head_dim * WORD,
    },
    "aq_exp_log": {i: lambda a: a[1] * WORD for i in (0, 2, 3)},
    "aq_gumbel": {3: lambda a: a[2] * WORD},
    "aq_fuse": {1: lambda a: a[2] * a[0].fc.k * WORD, 3: lambda a: a[2] * a[0].fc.n * WORD},
    "aq_move_kv": {
        1: lambda a: last_row(a[3], a[6]) * a[2] * WORD, **{i: lambda a: a[6] * WORD for i in (3, 4, 5)},
    },
    "aq_open_batch": {}, "aq_close_batch": {}, "aq_add_shape": {}, "aq_draft": {}, "aq_step": {}, "aq_keep": {},
    "aq_verify": {1: lambda a: a[2] * a[3] * WORD, 4: lambda a: a[2]},
    "aq_open_index": {}, "aq_close_index": {}, "aq_extend_index": {1: lambda a: a[2] * WORD},
    "aq_propose": {1: lambda a: a[2] * WORD, 5: lambda _: ctypes.sizeof(AqCopy)},
}  # fmt: skip
"""Bytes behind the arguments that are bare addresses, and of all rows behind an array of their addresses. Structs and
other ctypes arrays know their own size."""


def reach_rows(addresses: Any, num_bytes: int) -> Iterator[Range]:
    """An array of the addresses of rows, one behind the other, and the rows."""
    yield Range(addresses[0], num_bytes)
    pointers = tuple((i * ctypes.sizeof(ctypes.c_void_p), address) for i, address in enumerate(addresses))
    yield Range(ctypes.addressof(addresses), ctypes.sizeof(addresses), pointers, is_input=True)


def reach(value: Any, model: Any = None) -> Iterator[Range]:
    """A struct or an array of structs or numbers, and all that its pointers reach."""
    address, num_bytes = ctypes.addressof(value), ctypes.sizeof(value)
    pointers: list[tuple[int, int]] = []
    structs = value if isinstance(value, ctypes.Array) and issubclass(value._type_, ctypes.Structure) else [value]
    for struct in structs:
        if isinstance(struct, ctypes.Structure):
            yield from _fields(struct, struct if isinstance(struct, AqModel) else model, address, pointers)
    yield Range(address, num_bytes, tuple(pointers), is_input=isinstance(structs[0], ctypes.Structure))


def _fields(struct: Any, model: Any, base: int, pointers: list[tuple[int, int]]) -> Iterator[Range]:
    """What the pointers of one struct reach; each pointer's place behind `base` and its target are added."""
    for name, kind in struct._fields_:
        value, at = getattr(struct, name), ctypes.addressof(struct) + getattr(type(struct), name).offset - base
        if isinstance(struct, AqMlp) and struct.experts and name in ("gate_up", "down"):
            yield from _stack(value, struct.experts.contents, name, at, pointers)
        elif isinstance(value, ctypes.Structure):
            yield from _fields(value, model, base, pointers)
        elif (type(struct), name) in STRUCTS and value is not None:
            pointers.append((at, value))
            yield from reach(STRUCTS[type(struct), name].from_address(value), model)
        elif kind is ctypes.c_void_p and value is not None:
            pointers.append((at, value))
            yield Range(value, FIELDS[type(struct)][name](struct, model))
        elif hasattr(kind, "contents") and value:
            target = ctypes.addressof(value.contents)
            pointers.append((at, target))
            array = (kind._type_ * FIELDS[type(struct)][name](struct, model)).from_address(target)
            yield from reach(array, model)


def _stack(first: AqLinear, experts: AqExperts, name: str, at: int, pointers: list[tuple[int, int]]) -> Iterator[Range]:
    """The weights and biases of all experts, whose struct describes the first; it stands `at` bytes behind a base."""
    sizes = {"weight": experts.count * getattr(experts, f"{name}_bytes"), "bias": experts.count * first.n * WORD}
    for field, num_bytes in sizes.items():
        address = getattr(first, field)
        if address is not None:
            pointers.append((at + getattr(AqLinear, field).offset, address))
            yield Range(address, num_bytes)
