"""What a backend tells beside tokens: log-probabilities, scores, sizes; and what pairs refuse to load."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest
import torch
from tests.backends.playing import WAYS, Player, new_pair, words
from tests.conftest import TINY, needs_native, tiny_pair, weights_of

from aquiline.backends.cpu import native_weights
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.backends.torch.decoder import Decoder
from aquiline.config import SamplingParams
from aquiline.spec.drafting import Chain, NoDraft
from aquiline.types import Float32, TokenLogprobs

pytestmark = needs_native

PROMPT = words(150)


@lru_cache
def pair() -> CpuPair:
    return new_pair()


def logprobs_of(tokens: list[int]) -> Float32:
    hidden = Player(pair()).backend.score([np.array(tokens, np.int32)]).hidden
    logits = pair().target_model.logits(hidden, np.arange(len(tokens), dtype=np.int32))
    return torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()


def check(told: list[TokenLogprobs], rows: Float32, tokens: list[int], k: int) -> None:
    assert len(told) == len(tokens) == len(rows)
    for each, row, token in zip(told, rows, tokens, strict=True):
        order = np.argsort(-row, kind="stable")
        assert each.token_id == token and abs(each.logprob - row[token]) < 1e-4
        assert each.rank == 1 + list(order).index(token) and list(each.top) == order[:k].tolist()


@pytest.mark.parametrize("name", WAYS)
def test_log_probabilities_of_kept_tokens_and_of_the_prompt(name: str) -> None:
    """Before temperature, penalties and filters; in blocks of rows, over chunks, beside a text that asks for none."""
    sampling = SamplingParams(
        max_tokens=64, temperature=2.0, seed=3, logprobs=2, prompt_logprobs=1, presence_penalty=0.5
    )
    player = Player(pair())
    text = player.add(PROMPT, WAYS[name], sampling, chunk=91)
    silent = player.add(words(9, 2), Chain(3))
    player.run(12)
    rows = logprobs_of(text.tokens)
    check(text.logprobs, rows[len(PROMPT) - 1 : -1], text.output, 2)
    check(text.prompt_logprobs, rows[: len(PROMPT) - 1], PROMPT[1:], 1)
    assert not silent.logprobs and not silent.prompt_logprobs


def test_what_an_earlier_stay_has_told() -> None:
    sampling = SamplingParams(max_tokens=64, seed=3, prompt_logprobs=0)
    player = Player(pair())
    text = player.add(PROMPT, NoDraft(), sampling, num_prompt_logprobs=100, chunk=70)
    player.run(2)
    check(text.prompt_logprobs, logprobs_of(PROMPT)[100:-1], PROMPT[101:], 0)
    again = player.add(PROMPT, NoDraft(), sampling, output=text.output, num_prompt_logprobs=149, chunk=70)
    player.run(3)
    assert again.prompt_logprobs == []


def test_scores_are_what_steps_compute() -> None:
    """Hidden states and features of several documents at once, to the bit those of a text's own chunks."""
    player = Player(pair())
    documents = [np.array(words(n, n), np.int32) for n in (33, 1, 16, 80)]
    scored = player.backend.score(documents)
    hidden, features = scored.hidden.copy(), scored.features.copy()
    assert hidden.shape == (130, 64) and features.shape == (130, 192)
    at = 0
    for document in documents:
        single = Player(pair()).backend.score([document])
        assert np.array_equal(single.hidden, hidden[at : at + len(document)])
        assert np.array_equal(single.features, features[at : at + len(document)])
        at += len(document)
    fused = Player(pair())
    text = fused.add(documents[3].tolist(), Chain(1))
    fused.run(1)
    draft = pair().draft_model
    assert draft is not None and text.decodes
    _, head = tiny_pair()
    wanted = head.fuse(torch.from_numpy(features[50:])).detach().numpy()
    mine = np.stack([fused.backend.fused[fused.pages[0][i // 16], i % 16] for i in range(80)])
    np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-5)


def test_a_steps_tokens_do_not_depend_on_storage_of_other_pages() -> None:
    """Scoring uses the pages of all slots; a text admitted afterwards is none the wiser."""
    player = Player(pair())
    player.backend.score([np.array(words(200), np.int32)])
    text = player.add(words(40), Chain(3))
    player.run(12)
    same = Player(pair())
    other = same.add(words(40), Chain(3))
    same.run(12)
    assert text.tokens == other.tokens


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "stored", "sizes"),
    [
        ("float32", "auto", "float32", (1024, 512)), ("bfloat16", "auto", "bfloat16", (512, 384)),
        ("float32", "bfloat16", "bfloat16", (512, 384)), ("bfloat16", "float32", "float32", (1024, 512)),
        ("int8", "auto", "bfloat16", (512, 384)), ("float32", "int8", "int8", (320, 336)),
    ],
)  # fmt: skip
def test_storage_of_keys_and_values(dtype: str, kv_dtype: str, stored: str, sizes: tuple[int, int]) -> None:
    """Apart from the weights'; what they compute with differs, so a text may, but not with the way to draft."""
    decoder, head = tiny_pair()
    own = CpuPair(*weights_of(decoder, head), dtype, "float32", kv_dtype)
    assert own.kv_dtype == stored and own.kv_bytes_per_token() == sizes
    player = Player(own)
    names = {player.backend.kv.k.dtype.name, player.backend.kv.v.dtype.name}
    assert names == ({"int8", "uint8"} if stored == "int8" else {stored})
    texts = [player.add(words(40), WAYS[name]) for name in ("none", "chain3", "deep")]
    player.run(20)
    assert len({tuple(text.output[:20]) for text in texts}) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_dtype": "float16"}, "kv_dtype='float16': must be one of auto, float32, bfloat16, int8"),
        ({"arithmetic": "float16"}, "arithmetic='float16': must be one of auto, float32, bfloat16"),
        ({"arithmetic": "bfloat16"}, "arithmetic='bfloat16': needs dtype='bfloat16', and dtype is 'float32'"),
    ],
)
def test_pairs_that_cannot_run(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CpuPair(*weights_of(*tiny_pair()), "float32", **settings)


@pytest.mark.skipif(not needs_native.args[0] and native_weights.has_bf16_dot(), reason="this CPU has the dot product")
def test_arithmetic_that_this_cpu_lacks() -> None:
    with pytest.raises(ValueError, match="lacks AVX512_BF16; use arithmetic='float32'"):
        CpuPair(*weights_of(*tiny_pair()), "bfloat16", "bfloat16")


def test_widths_that_the_library_does_not_have() -> None:
    decoder, _ = tiny_pair(config=dataclasses.replace(TINY, intermediate_size=90))
    with pytest.raises(
        ValueError, match=r"intermediate_size=90: the native path needs a multiple of 16; .*ISA=off has"
    ):
        CpuPair(*weights_of(decoder, None), "float32")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"head_dim": 528}, "head_dim=528: must be a positive multiple of 16 up to 512"),
        ({"num_heads": 129, "num_kv_heads": 1}, "num_heads=129: must be a multiple, up to 128, of num_kv_heads=1"),
    ],
)
def test_shapes_that_the_library_does_not_have_are_refused_when_they_are_packed(
    shape: dict[str, int], message: str
) -> None:
    """By the library's own checks, before an engine is opened."""
    decoder = Decoder(dataclasses.replace(TINY, num_layers=1, **shape))
    with pytest.raises(ValueError, match=f"^{message}; the environment variable AQUILINE_ISA=off has torch run it"):
        CpuPair(*weights_of(decoder, None), "float32")


def test_what_runs() -> None:
    system = pair().system()
    assert system["arithmetic"] == "float32" and system["kv_dtype"] == "float32" and system["threads"]
    assert (pair().name, pair().is_exact) == ("native", True)
