"""Keys with a bias of many times their size, in eight bits: they are stored less what the bias gives all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.conftest import TINY, TINY_DRAFT, needs_native, tiny_pair, weights_of
from tests.engine.driving import words

from aquiline.backends.base import Sizes
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.models.model_config import RopeConfig

BIASED = replace(TINY, rope=RopeConfig(1e7), qkv_bias=True, sinks=True, windows=(24, 0) * 2)
KEYS = slice(BIASED.num_heads * BIASED.head_dim, (BIASED.num_heads + BIASED.num_kv_heads) * BIASED.head_dim)
SLOW = [BIASED.head_dim // 2 - 1, BIASED.head_dim - 1]  # the pair of channels that turns least


def error_of_codes(kind: type[CpuPair] | type[TorchPair], bias: float) -> float:
    """How far codes of keys move the hidden states of a random target, of which the slow channels have such a bias."""
    decoder, _ = tiny_pair(7, BIASED)
    for layer in decoder.layers:
        own = layer.qkv_bias.data[KEYS].view(-1, BIASED.head_dim)  # type: ignore[union-attr, index]
        own[:, SLOW] = torch.tensor([bias, -bias])
    hidden = []
    for stored in ("float32", "int8"):
        backend = kind(*weights_of(decoder, None), "float32", kv_dtype=stored).open(Sizes(1, 20, 16, 20, 300))
        hidden.append(backend.score([np.array(words(300), np.int32)]).hidden.copy())
    return float(np.abs(hidden[1] - hidden[0]).mean() / np.abs(hidden[0]).mean())


@needs_native
@pytest.mark.parametrize("kind", [CpuPair, TorchPair])
def test_a_bias_costs_codes_nothing(kind: type[CpuPair] | type[TorchPair]) -> None:
    """Sinks are lowered as scores are; windows see a part of the keys, which have the shift all the same."""
    assert error_of_codes(kind, 60.0) < 1.5 * error_of_codes(kind, 0.0)


def test_who_has_a_shift() -> None:
    """The bias of each kv head; not a draft, keys that are normed, or keys without a bias."""
    target, draft = weights_of(
        *tiny_pair(3, BIASED, replace(TINY_DRAFT, model=replace(TINY_DRAFT.model, qkv_bias=True)))
    )
    attention, heads = target.layers[0].attention, (BIASED.num_kv_heads, BIASED.head_dim)
    assert attention.qkv_bias is not None and draft is not None
    shift = target.key_shift(attention)
    assert shift is not None
    np.testing.assert_allclose(shift[:, SLOW], attention.qkv_bias[KEYS].reshape(heads)[:, SLOW], atol=1e-4)
    assert target.key_shift(replace(attention, k_norm=np.ones(BIASED.head_dim, np.float32))) is None
    assert target.key_shift(replace(attention, qkv_bias=None)) is None
    assert draft.model.key_shift(draft.model.layers[0].attention) is None
