"""Every call the library must refuse, with a message that names the field; nothing may be touched."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from native_calls import LOADED, at, draw, move_kv, native_linear, rms_norm
from test_forward import CONFIG, HIDDEN, TOKENS, VOCAB, chunk_rows, new_kv, random_weights, run
from test_sampling import sampling

from aquiline.backends.cpu import calls, native
from aquiline.errors import NativeError

BAD_ROWS = {
    "tokens": VOCAB,
    "positions": -1,
    "slots": 1,
    "write": 12 * 16,
    "context_len": 12 * 16 + 1,
    "key_start": -1,
    "tail_len": 5,
}


@pytest.mark.parametrize("field", BAD_ROWS)
def test_rows(field):
    w = random_weights()
    kv, table = new_kv(w)
    rows = chunk_rows(table, TOKENS, 0, 8)
    getattr(rows, field)[3] = BAD_ROWS[field]
    with pytest.raises(NativeError, match=rf"{field}(\[3\])?="):
        run(calls.NativeModel(w), kv, rows)
    assert np.isnan(kv.k.astype(np.float32)).all()


@pytest.mark.parametrize("page", [-1, 12])
def test_page_outside_the_pool(page):
    w = random_weights()
    kv, table = new_kv(w)
    rows = chunk_rows(table, TOKENS, 40, 8)
    table[0, 1] = page
    with pytest.raises(NativeError, match=rf"page_table\[0\]\[1\]={page}"):
        run(calls.NativeModel(w), kv, rows)


def test_tail_outside_the_table_and_no_key():
    w = random_weights()
    kv, table = new_kv(w)
    rows = chunk_rows(table, TOKENS, 0, 2)
    rows.tail_len[1], rows.tail[1, 0] = 1, 12 * 16
    with pytest.raises(NativeError, match=r"tail\[1\]=192"):
        run(calls.NativeModel(w), kv, rows)
    rows.tail_len[1], rows.key_start[1] = 0, 2
    with pytest.raises(NativeError, match="row 1 sees no key"):
        run(calls.NativeModel(w), kv, rows)


@pytest.mark.parametrize(
    "field, value, message",
    [("eps", 1.0, None), ("hidden", 24, "hidden=24"), ("num_heads", 3, "num_heads=3"),
     ("embed_dtype", 31, "embed_dtype=31"),
     ("embed", None, "embed is NULL"),
     ("embed", 3, "embed is not aligned"), ("num_layers", 0, "num_layers=0"),
     ("head_dim", 40, "head_dim=40"), ("intermediate", 112, "gate_up.n=192")],
)  # fmt: skip
def test_model(field, value, message):
    w = random_weights()
    model = calls.NativeModel(w)
    kv, table = new_kv(w)
    setattr(model.struct, field, value)
    rows = chunk_rows(table, TOKENS, 0, 2)
    if message is None:
        run(model, kv, rows)
        return
    with pytest.raises(NativeError, match=message):
        run(model, kv, rows)


def test_kv_of_another_shape_or_dtype():
    w = random_weights()
    kv, table = new_kv(w)
    rows = chunk_rows(table, TOKENS, 0, 2)
    with pytest.raises(ValueError, match="stores keys and values in float32, bfloat16 or int8"):
        run(calls.NativeModel(w), replace(kv, k=kv.k.astype(np.float16), v=kv.v.astype(np.float16)), rows)
    with pytest.raises(NativeError, match=r"kv\.num_layers=2: the model has 3"):
        run(calls.NativeModel(w), replace(kv, k=kv.k[:, :2].copy(), v=kv.v[:, :2].copy()), rows)
    with pytest.raises(ValueError, match=r"KVGroup\.k is"):
        run(calls.NativeModel(w), replace(kv, k=kv.v), rows)


def test_weights_the_layout_cannot_hold():
    with pytest.raises(ValueError, match="multiple of 16"):
        native_linear(torch.ones(16, 24))
    with pytest.raises(ValueError, match=r"weight is float64: the native path stores float32, bfloat16 or"):
        native_linear(torch.ones(16, 16).double())
    with pytest.raises(ValueError, match="intermediate_size=88"):
        calls.NativeModel(replace(random_weights(), config=replace(CONFIG, intermediate_size=88)))


@pytest.mark.parametrize(
    "field, value", [("temperature", -1.0), ("temperature", np.nan), ("top_p", 1.5), ("min_p", -0.1), ("top_k", -1)]
)
def test_sampling(field, value):
    s = sampling(2)
    s[field][1] = value
    with pytest.raises(NativeError, match=rf"{field}\[1\]="):
        draw(np.zeros((2, 50), np.float32), s)


def test_head():
    model = calls.NativeModel(random_weights())
    hidden, index = np.zeros((2, HIDDEN), np.float32), np.array([0, -1], np.int32)
    with pytest.raises(NativeError, match=r"row_index\[1\]=-1"):
        model.logits(hidden, index)
    with pytest.raises(NativeError, match=f"k={VOCAB + 1}"):
        model.top_k(hidden, np.abs(index), VOCAB + 1)
    with pytest.raises(ValueError, match="float64"):
        model.logits(hidden.astype(np.float64), np.abs(index))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_chosen_tokens(token):
    model = calls.NativeModel(random_weights())
    hidden, index, chosen = (
        np.zeros((2, HIDDEN), np.float32),
        np.arange(2, dtype=np.int32),
        np.array([0, token], np.int32),
    )
    with pytest.raises(NativeError, match=rf"chosen\[1\]={token}: must be in \[0, {VOCAB}\)"):
        model.logprobs(hidden, index, chosen, 1)
    with pytest.raises(NativeError, match=f"k={VOCAB + 1}"):
        model.logprobs(hidden, index, index, VOCAB + 1)
    with pytest.raises(ValueError, match="chosen is int64"):
        model.logprobs(hidden, index, index.astype(np.int64), 1)
    with pytest.raises(NativeError, match="chosen is NULL"):
        ids, logprobs = np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32)
        LOADED.head_logprobs(model._model_ref, at(hidden), at(index), 2, 1, at(ids), at(logprobs), None, None, None)


def test_arguments():
    with pytest.raises(NativeError, match="isa=mmx: must be one of"):
        calls.select_isa("mmx")
    with pytest.raises(NativeError, match="threads=0"):
        calls.set_threads(0)
    x = np.zeros((2, 24), np.float32)
    with pytest.raises(NativeError, match="width=24"):
        rms_norm(x, x[0], 1e-6)
    with pytest.raises(NativeError, match="x is NULL"):
        LOADED.linear(ctypes.byref(native_linear(torch.ones(16, 16))._packed.struct), None, 1, at(x))
    kv, table = new_kv(random_weights())
    slots, good, bad = np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, 192, np.int32)
    with pytest.raises(NativeError, match=r"dst\[0\]=192"):
        move_kv(kv, table, slots, good, bad)


def test_missing_library_says_why(tmp_path):
    loaded = native.load_from(tmp_path / "_native.so")
    assert loaded.library is None and "does not exist" in loaded.reason
    (tmp_path / "broken.so").write_bytes(b"not a library")
    loaded = native.load_from(tmp_path / "broken.so")
    assert loaded.library is None and "cannot be loaded" in loaded.reason
