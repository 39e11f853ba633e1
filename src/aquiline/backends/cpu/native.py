"""The ctypes mirror of csrc/api/aquiline.h, csrc/stages/stages.h and csrc/lookup/lookup.h: structs, signatures,
loading. A library that was built from other structs or signatures is refused with the fix when it is loaded. Knows
nothing of models or the engine.

Every array crosses as a bare address, so a call costs about a microsecond. The code that fills a struct must keep the
arrays alive that it points to.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aquiline.config import MAX_DEPTH
from aquiline.errors import NativeError
from aquiline.spec.confidence import NUM_MARGINS

BLOCKS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "iq4_nl")
"""GGUF's types of packed blocks that linears are stored as, in lower case."""
FORMATS = (
    "float32", "bfloat16", "bfloat16_dot", "int8", "int4", "float16",
    *BLOCKS, *(f"{name}_dot" for name in BLOCKS), "int8_dot", "int4_dot", "mxfp4", "mxfp4_dot",
    "bfloat16_tiles",
)  # fmt: skip
"""Storage formats; a format's code is its place in this list."""

FLOAT32, BFLOAT16, BFLOAT16_DOT, INT8, INT4, FLOAT16 = range(6)
BFLOAT16_TILES = FORMATS.index("bfloat16_tiles")
ACTIVATIONS = ("swiglu", "clamped", "geglu")
"""Activations of an MLP; an activation's code is its place in this list."""

LIBRARY_PATH = Path(__file__).resolve().parents[2] / "_native.so"


class AqLinear(Structure):
    """A packed weight and its bias, and where the outputs behind them are described."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int32) for name in ("n", "k", "dtype")),
        ("rest", c_void_p),
    ]


class AqAttention(Structure):
    """The attention of one layer."""

    _fields_ = [
        ("qkv", AqLinear),
        ("o", AqLinear),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "sinks", "key_shift")),
        ("window", c_int32),
    ]


class AqExperts(Structure):
    """The router of a layer with experts, and how far apart their weights lie."""

    _fields_ = [
        ("router", AqLinear),
        *((name, c_int64) for name in ("gate_up_bytes", "down_bytes")),
        *((name, c_int32) for name in ("count", "per_token", "over_all")),
    ]


class AqMlp(Structure):
    """The MLP of one layer, or its first expert; activation is a code of ACTIVATIONS."""

    _fields_ = [
        ("gate_up", AqLinear),
        ("down", AqLinear),
        ("experts", POINTER(AqExperts)),
        ("activation", c_int32),
        ("limit", c_float),
    ]


class AqLayer(Structure):
    """One decoder layer."""

    _fields_ = [
        ("attention", AqAttention),
        ("mlp", AqMlp),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "hidden_norm")),
        *((name, c_void_p) for name in ("attention_out_norm", "mlp_out_norm")),
    ]


class AqModel(Structure):
    """A decoder: target or one-layer draft."""

    _fields_ = [
        *((n, c_int32) for n in ("hidden", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate")),
        *((n, c_int32) for n in ("vocab", "embed_dtype", "is_draft", "norm_before_residual", "num_capture")),
        *((n, c_float) for n in ("eps", "attn_scale", "embed_scale", "rope_scale", "local_rope_scale")),
        *((n, c_void_p) for n in ("inv_freq", "local_inv_freq", "embed")),
        ("layers", POINTER(AqLayer)),
        ("final_norm", c_void_p),
        ("head", AqLinear),
        ("capture", c_void_p),
    ]


class AqKV(Structure):
    """The pages of one KVGroup."""

    _fields_ = [
        *((n, c_void_p) for n in ("k", "v", "k_scales", "v_scales")),
        *((n, c_int32) for n in ("num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim", "dtype")),
    ]


class AqRows(Structure):
    """The rows of one forward."""

    _fields_ = [
        *((n, c_void_p) for n in ("tokens", "positions", "slots", "write", "key_start", "context_len")),
        *((n, c_void_p) for n in ("tail", "tail_len", "page_table")),
        *((n, c_int32) for n in ("num_rows", "tail_stride", "table_stride", "num_slots")),
    ]


class AqSampling(Structure):
    """How a row is drawn: types.SAMPLING."""

    _fields_ = [
        *((n, c_float) for n in ("temperature", "top_p", "min_p")),
        *((n, c_int32) for n in ("top_k", "position")),
        ("seed", c_uint64),
    ]


class AqFusion(Structure):
    """How target features become a draft's input."""

    _fields_ = [
        ("fc", AqLinear),
        ("norm", c_void_p),
        ("part_norms", c_void_p),
        ("num_parts", c_int32),
        ("eps", c_float),
    ]


class AqBatchConfig(Structure):
    """All that a batch works on."""

    _fields_ = [
        *((n, POINTER(AqModel)) for n in ("target", "draft")),
        *((n, POINTER(AqKV)) for n in ("target_kv", "draft_kv")),
        *((n, c_void_p) for n in ("hidden", "features", "draft_hidden", "fused", "d2t")),
        ("fusion", AqFusion),
        *((n, c_int32) for n in ("num_slots", "pages_per_slot", "max_rows", "norm_feedback")),
    ]


class AqAdmit(Structure):
    """A sequence takes a slot."""

    _fields_ = [
        *((n, c_int32) for n in ("slot", "num_tokens", "num_prompt", "num_hit", "drafts")),
        *((n, c_int32) for n in ("first_draft_key", "draft_end")),
        *((n, c_int32) for n in ("min_tokens", "max_tokens", "num_biases", "num_end_tokens", "bad_words_size")),
        *((n, c_float) for n in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
        ("sampling", AqSampling),
        *((n, c_void_p) for n in ("tokens", "bias_tokens", "biases", "end_tokens", "bad_words")),
    ]


class AqShape(Structure):
    """How a tree grows."""

    _fields_ = [
        *((n, c_int32) for n in ("kind", "depth", "width", "num_nodes")),
        ("parents", c_void_p),
        ("ranks", c_void_p),
    ]


class AqCut(Structure):
    """How confidence ends a chain."""

    _fields_ = [
        *((n, c_float * NUM_MARGINS) for n in ("chances", "seconds")),
        *((n, c_float) for n in ("least_node", "least_pass")),
    ]


class AqConfidence(Structure):
    """What the confidence of a step's drafts decides."""

    _fields_ = [*((n, c_void_p) for n in ("cuts", "row_costs")), *((n, c_int32) for n in ("num_cuts", "num_row_costs"))]


class AqMatchEvents(Structure):
    """How often matches foretold the next token."""

    _fields_ = [(n, c_void_p) for n in ("trials", "hits", "estimates")]


class AqCopy(Structure):
    """Tokens that followed a match."""

    _fields_ = [
        *((n, c_int32) for n in ("length", "occurrences", "num_tokens")),
        ("tokens", c_int32 * MAX_DEPTH),
        ("chances", c_double * MAX_DEPTH),
    ]


STRUCTS: tuple[type[Structure], ...] = (
    AqLinear, AqAttention, AqExperts, AqMlp, AqLayer, AqModel, AqKV, AqRows, AqSampling, AqFusion, AqBatchConfig,
    AqAdmit, AqShape, AqCut, AqConfidence, AqMatchEvents, AqCopy,
)  # fmt: skip

_MODEL, _KV, _ROWS, _LINEAR = (POINTER(t) for t in (AqModel, AqKV, AqRows, AqLinear))
_P, _I, _F = c_void_p, c_int32, c_float

AqEdit = ctypes.CFUNCTYPE(None, c_int32, POINTER(c_float))
"""What aq_verify calls, where asked, with a row's number and its logits."""

_CHECKED: dict[str, list[Any]] = {
    "aq_select_isa": [c_char_p],
    "aq_set_threads": [_I],
    "aq_pack": [_P, _P, _I, _I, _I, _P],
    "aq_time_parts": [_P],
    "aq_forward": [_MODEL, _KV, _ROWS, _P, _I, _P, POINTER(c_void_p), _P],
    "aq_head_logits": [_MODEL, _P, _P, _I, _P],
    "aq_head_draw": [_MODEL, _P, _P, _I, _P, _P, _P],
    "aq_head_guess": [_MODEL, _P, _P, _I, _P, _P, _P, _P, _P],
    "aq_head_topk": [_MODEL, _P, _P, _I, _I, _P, _P, _P, _P],
    "aq_head_logprobs": [_MODEL, _P, _P, _I, _I, _P, _P, _P, _P, _P],
    "aq_draw": [_P, _I, _I, _P, _P],
    "aq_linear": [_LINEAR, _P, _I, _P],
    "aq_rms_norm": [_P, _P, _I, _I, _F, _P],
    "aq_swiglu": [_P, _I, _I, _P],
    "aq_rope": [_P, _P, _P, _F, _I, _I, _I],
    "aq_write_kv": [_KV, _I, _ROWS, _P, _P],
    "aq_attention": [_KV, _I, _ROWS, _P, _I, _F, _I, _P, _I, _P],
    "aq_exp_log": [_P, _I, _P, _P],
    "aq_gumbel": [c_uint64, _I, _I, _P],
    "aq_accept": [_P, _P, _P, _I, _P, _P],
    "aq_select": [_P, _P, _I, _I, _P, _P],
    "aq_fuse": [POINTER(AqFusion), _P, _I, _P],
    "aq_move_kv": [_KV, _P, _I, _P, _P, _P, _I],
    "aq_close_batch": [_P],
    "aq_close_index": [_P],
    "aq_extend_index": [_P, _P, _I],
}
"""Functions that return 0 or -1; each becomes a method of Library without its prefix that raises NativeError."""


_STAGES: dict[str, list[Any]] = {
    "aq_add_shape": [_P, _P, _P],
    "aq_renew_draft": [_P, _MODEL, _P],
    "aq_draft": [_P, _P, _P, _P, _I],
    "aq_read_trees": [_P, _P],
    "aq_read_features": [_P, _I, _P],
    "aq_replace_trees": [_P, _P],
    "aq_verify": [_P, _P, _I, _I, _P, _P],
    "aq_keep": [_P, _P, _P],
    "aq_step": [_P, _P, _P, _P, _I, _I, _P, _P, _P],
}
"""Functions whose result the caller looks at: 0, -1 for refused input, -2 for a failure inside."""

_BRIEF: dict[str, list[Any]] = {"aq_propose": [_P, _P, _I, _I, c_double, _P]}
"""Functions of a microsecond, whose result the caller looks at. They keep the interpreter's lock: giving it up would
cost as much, and another thread might keep it for milliseconds."""


def abi() -> int:
    """A hash of this mirror, structs and signatures: AQ_ABI of the aquiline.h that it mirrors."""
    fields = [(struct.__name__, [(name, kind.__name__) for name, kind, *_ in struct._fields_]) for struct in STRUCTS]
    signatures = [(name, [kind.__name__ for kind in kinds]) for name, kinds in (_CHECKED | _STAGES | _BRIEF).items()]
    return zlib.crc32(repr((fields, signatures)).encode())


def mismatch(dll: ctypes.CDLL) -> str | None:
    """The first difference between a library and this mirror; None if there is none."""
    dll.aq_abi.restype, dll.aq_abi.argtypes = c_int64, [c_char_p]
    dll.aq_format_name.restype, dll.aq_format_name.argtypes = c_char_p, [c_int32]
    for struct in STRUCTS:
        found, expected = dll.aq_abi(struct.__name__.encode()), ctypes.sizeof(struct)
        if found != expected:
            return f"{struct.__name__} takes {found} bytes there and {expected} here"
    for code, expected_name in enumerate((*FORMATS, None)):
        name = dll.aq_format_name(code)
        if (name.decode() if name else None) != expected_name:
            return f"storage format {code} is {name!r} there and {expected_name!r} here"
    return None if dll.aq_abi(None) == abi() else f"its interface is {dll.aq_abi(None):#010x}, and {abi():#010x} here"


class Library:
    """The loaded library: `library.forward(...)` is aq_forward, raising NativeError where that returns -1."""

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._dll = dll
        for name, restype in (("aq_last_error", c_char_p), ("aq_isa", c_char_p), ("aq_available_isas", c_char_p)):
            getattr(dll, name).restype = restype
        dll.aq_packed_bytes.restype, dll.aq_packed_bytes.argtypes = c_int64, [_I, _I, _I]
        dll.aq_num_threads.restype = dll.aq_has_bf16_dot.restype = c_int32
        dll.aq_open_batch.restype, dll.aq_open_batch.argtypes = c_void_p, [_P]
        dll.aq_open_index.restype, dll.aq_open_index.argtypes = c_void_p, [_I, _P]
        dll.aq_index_bytes.restype, dll.aq_index_bytes.argtypes = c_int64, [_P]
        brief = ctypes.PyDLL(dll._name, handle=dll._handle)
        for name, argtypes in _BRIEF.items():
            function = getattr(brief, name)
            function.argtypes, function.restype = argtypes, c_int32
            setattr(self, name.removeprefix("aq_"), function)
        for name, argtypes in _STAGES.items():
            function = getattr(dll, name)
            function.argtypes, function.restype = argtypes, c_int32
        for name, argtypes in _CHECKED.items():
            function = getattr(dll, name)
            function.argtypes, function.restype, function.errcheck = argtypes, c_int32, self._check

    def _check(self, result: int, function: Any, arguments: tuple[Any, ...]) -> None:
        if result != 0:
            raise NativeError(f"{function.__name__}: {self.last_error()}")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._dll, f"aq_{name}")
        setattr(self, name, function)  # so that later look-ups do not call __getattr__
        return function

    def last_error(self) -> str:
        """Why the last call of this thread failed."""
        return str(self._dll.aq_last_error().decode())

    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._dll.aq_isa().decode())

    def available_isas(self) -> list[str]:
        """What this CPU can run, best first."""
        return str(self._dll.aq_available_isas().decode()).split(",")

    def num_threads(self) -> int:
        """Threads in use, the calling one included."""
        return int(self._dll.aq_num_threads())

    def has_bf16_dot(self) -> bool:
        """Whether this CPU and this build have the bfloat16 dot product."""
        return bool(self._dll.aq_has_bf16_dot())

    def fastest_bf16(self) -> int:
        """The format in which bfloat16 weights are multiplied fastest."""
        return int(self._dll.aq_fastest_bf16())

    def packed_bytes(self, n: int, k: int, dtype: int) -> int:
        """Size of a packed weight. Raises NativeError for a dtype that no format has."""
        num_bytes = int(self._dll.aq_packed_bytes(n, k, dtype))
        if num_bytes < 0:
            raise NativeError(f"aq_packed_bytes: {self._dll.aq_last_error().decode()}")
        return num_bytes


@dataclass(frozen=True)
class Loaded:
    """The library, or why there is none."""

    library: Library | None
    reason: str | None


@functools.cache
def load_from(path: Path) -> Loaded:
    """Load the library at `path`, once per process."""
    if not path.exists():
        return Loaded(None, f"{path} does not exist: it is built by `pip install .` where a C++17 compiler is present")
    try:
        dll = ctypes.CDLL(str(path))
        found = mismatch(dll)
        if found is not None:
            return Loaded(None, f"{path} was built from another version: {found}; reinstall aquiline to rebuild it")
        return Loaded(Library(dll), None)
    except (OSError, AttributeError) as error:
        return Loaded(None, f"{path} cannot be loaded: {error}; reinstall aquiline to rebuild it")


def load() -> Library | None:
    """The native library, or None: then `missing_reason()` says why."""
    return load_from(LIBRARY_PATH).library


def missing_reason() -> str | None:
    """Why there is no native library; None if there is one."""
    return load_from(LIBRARY_PATH).reason
