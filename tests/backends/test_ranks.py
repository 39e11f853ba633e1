"""Ranks that meet compute what one computes, bit for bit: linears, embeddings, draws, whole forwards."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.linked import on_ranks
from tests.checkpoints import write_draft, write_mxfp4, write_target
from tests.conftest import GEMMA, TINY, TINY_DRAFT, tiny_pair, weights_of
from torch import Tensor

from aquiline.backends.base import Admit, Chunk, Decode, Pages, Sizes, StepInput
from aquiline.backends.torch import reference as ops
from aquiline.backends.torch.draw import draw, guess
from aquiline.backends.torch.ranks import LinkedRanks, Parted
from aquiline.backends.torch.slot_state import RowSampling
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.models.formats import read_draft_weights
from aquiline.models.load import read_model_config, read_target
from aquiline.models.model_config import ModelConfig
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.spec.drafting import Chain, Dynamic

SIX = dataclasses.replace(TINY, num_heads=12, num_kv_heads=6)
SHAPES = [
    (64, 96), (384, 64), (64, 192), (96, 64), (48, 64), (576, 576), (960, 576), (1536, 576), (576, 1536), (101, 40),
]  # fmt: skip
ROWS = (1, 2, 3, 5, 7, 8, 13, 17, 48, 64)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_linear_split_by_outputs_has_the_bits_of_the_whole(shape: tuple[int, int], num_ranks: int) -> None:
    """For widths of the tiny pair, of SmolLM2, and one that is no multiple of 16; with and without a bias."""
    weight, bias = gaussian(*shape), gaussian(shape[0], seed=1)

    def work(ranks: LinkedRanks) -> list[Tensor]:
        own = ranks.share.part(shape[0])
        found = []
        for num in ROWS:
            x = gaussian(num, shape[1], seed=num)
            found += [ranks.gather(ops.linear(x, weight[own].clone(), b), shape[0]) for b in (None, bias[own].clone())]
        return found

    torch.set_num_threads(1)
    whole = [ops.linear(gaussian(num, shape[1], seed=num), weight, b) for num in ROWS for b in (None, bias)]
    for found in on_ranks(num_ranks, work):
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


def test_a_linear_split_by_inputs_has_other_bits() -> None:
    """Why nothing is reduced."""
    x, weight = gaussian(5, 576), gaussian(576, 576, seed=1)
    parts = ops.linear(x[:, :288], weight[:, :288]) + ops.linear(x[:, 288:], weight[:, 288:])
    assert torch.allclose(parts, ops.linear(x, weight), atol=1e-3) and not torch.equal(parts, ops.linear(x, weight))


def test_a_boundary_within_16_outputs_may_change_bits() -> None:
    """Why shares are in whole blocks of outputs. If this ever fails, they need not be."""
    found = []
    torch.set_num_threads(1)
    for n, k in ((64, 64), (128, 64), (64, 128), (4096, 512)):
        weight, x = gaussian(n, k), gaussian(1, k, seed=1)
        at = [n * r // 3 for r in range(4)]
        parts = [ops.linear(x, weight[a:b].clone()) for a, b in pairwise(at)]
        found.append(torch.equal(torch.cat(parts, -1), ops.linear(x, weight)))
    assert not all(found)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_embedding_is_gathered(num_ranks: int) -> None:
    table, tokens = gaussian(101, 24), torch.arange(-1, 101).view(6, 17)

    def work(ranks: LinkedRanks) -> Tensor:
        return ranks.embed(table[ranks.share.part(101)].clone(), tokens.clamp(min=0), 101)

    for found in on_ranks(num_ranks, work):
        assert torch.equal(found, table[tokens.clamp(min=0)])


def rows_with_ties(num: int, V: int) -> Tensor:
    """Logits of few values, so that many rows tie across ranks; of every 50 rows one has a NaN, one no finite logit,
    one an infinite one."""
    logits = torch.randint(-3, 4, (num, V), generator=torch.Generator().manual_seed(3)).float()
    logits[::2] = gaussian(len(logits[::2]), V) * 3
    logits[::10] = logits[::10].round()
    logits[7::50, V // 3] = math.nan
    logits[8::50] = -math.inf
    logits[9::50, V - 2] = math.inf
    logits[11::50, : V // 2] = -math.inf
    return logits


def sampling_of(num: int, **filters: float) -> RowSampling:
    """Every third row is greedy; the others have a temperature and a seed each."""
    index = torch.arange(num)
    temperature = torch.where(index % 3 == 0, 0.0, 0.5 + (index % 7) / 5)
    top_k = torch.full((num,), int(filters.get("top_k", 0)))
    top_p, min_p = torch.full((num,), filters.get("top_p", 1.0)), torch.zeros(num)
    seed = torch.stack((index * 7919 % 2**32, index * 104729 % 2**32), 1)
    return RowSampling(temperature, top_p, min_p, top_k, seed, index % 300, bool(filters))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "filters",
    [pytest.param({}, id="plain"), pytest.param({"top_k": 5, "top_p": 0.8}, id="filtered", marks=pytest.mark.rare)],
)
def test_a_draw_over_a_split_vocabulary_is_the_whole_draw(num_ranks: int, filters: dict[str, float]) -> None:
    num, V = 10_000, 101
    logits, sampling = rows_with_ties(num, V), sampling_of(num, **filters)
    for ids in (torch.arange(V), torch.arange(V) * 3 + 1):
        torch.set_num_threads(1)
        whole = draw(logits, sampling, ids)
        two = guess(logits, sampling, ids)

        def work(ranks: LinkedRanks, ids: Tensor = ids) -> tuple[Tensor, tuple[Tensor, ...], int]:
            own = logits[:, ranks.share.part(V)]
            return draw(own, sampling, ids, ranks), guess(own, sampling, ids, ranks), ranks.num_bytes

        for drawn, guessed, num_bytes in on_ranks(num_ranks, work):
            assert torch.equal(drawn, whole)
            assert all(torch.equal(a, b) for a, b in zip(guessed, two, strict=True))
            assert num_bytes < num * 200 or filters, "the best scores are gathered, not logits"
    ties = (logits == logits.nan_to_num(-math.inf).amax(1, keepdim=True)).sum(1)
    assert int((ties[::3] > 1).sum()) > 1000 and int((whole == -1).sum()) == 400


class Family:
    """A pair on disk or in memory, and how many ranks can share it."""

    def __init__(self, target: ModelWeights, draft: DraftWeights | None) -> None:
        self.target, self.draft = target, draft


def in_memory(config: ModelConfig) -> Family:
    layer = dataclasses.replace(config.draft_layer, num_heads=6, num_kv_heads=6)
    draft = dataclasses.replace(TINY_DRAFT, model=layer)
    return Family(*weights_of(*tiny_pair(config=config, draft=draft)))


def on_disk(place: Path, family: str, **fields: Any) -> Family:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 96}
    if family == "mxfp4":
        write_mxfp4(place / "target", **heads | fields)
    else:
        write_target(place / "target", family, **heads | fields)
    config = read_model_config(place / "target")
    write_draft(place / "draft", config, num_attention_heads=6, num_key_value_heads=6)
    target = read_target(place / "target", dtype="float32", capture=(0, 1, 2))
    return Family(target, read_draft_weights(place / "draft", target, capture=(0, 1, 2)))


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        "gemma",
        *(pytest.param(n, marks=pytest.mark.rare) for n in ("qwen2", "qwen3_moe", "gpt_oss", "mxfp4")),
    ],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name = request.param
    if name == "llama":
        return in_memory(SIX)
    if name == "gemma":
        return in_memory(dataclasses.replace(SIX, **GEMMA))
    fields = {"hidden_size": 192} if name == "qwen2" else {"head_dim": 16}
    return on_disk(tmp_path_factory.mktemp(name), name, **fields)


def steps(pair: TorchPair) -> list[Any]:
    """The outcomes of a prompt in two chunks and of decode steps, with every log-probability of the vocabulary, and
    what the target scores, as bits."""
    V = pair.target.vocab_size
    sizes = Sizes(2, 16, 16, 6, 64)
    backend = pair.open(sizes)
    prompt = [(7 * i + 3) % V for i in range(21)]
    greedy = SamplingParams(max_tokens=64, seed=0, logprobs=V)
    sampled = SamplingParams(max_tokens=64, temperature=0.9, seed=5)
    admits = (
        Admit(0, prompt, 21, greedy, drafts=True, num_hit=0),
        Admit(1, prompt[3:], 18, sampled, drafts=True),
    )
    pages = tuple(Pages(slot, 0, tuple(range(6 * slot, 6 * slot + 6))) for slot in (0, 1))
    found: list[Any] = [
        backend.step(StepInput(chunks=(Chunk(0, 0, 9, False, False),), admits=admits, pages=pages)).read(),
        backend.step(StepInput(chunks=(Chunk(0, 9, 21, True, True), Chunk(1, 0, 18, True, True)))).read(),
    ]
    for drafting in (Chain(3), Dynamic(depth=2, top_k=3, num_nodes=8), Chain(2)):
        found.append(backend.step(StepInput((Decode(0, drafting), Decode(1, Chain(2))), with_trees=True)).read()[:2])
    found.append(backend.step(StepInput((Decode(1, Chain(3)),))).read()[0])
    backend.close()
    backend = pair.open(sizes)
    found.append([a.tobytes() for a in backend.score([np.array(prompt, np.int32), np.array(prompt[5:], np.int32)])])
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_family_gives_the_bits_of_one_rank(family: Family, num_ranks: int) -> None:
    """Logits by their log-probabilities, hidden states and features as bytes."""
    torch.set_num_threads(1)
    whole = steps(TorchPair(family.target, family.draft, "float32"))
    for found in on_ranks(
        num_ranks, lambda ranks: steps(TorchPair(family.target, family.draft, "float32", ranks=ranks))
    ):
        assert found == whole


def test_products_of_fewer_rows_may_have_other_bits() -> None:
    """Why ranks with copies of a key head compute all its queries. If this ever fails, they need not."""
    torch.set_num_threads(1)
    queries = [gaussian(1, 1, 3 * n, 16, seed=n) for n in ROWS]
    keys = [gaussian(1, 1, num, 16, seed=num) for num in (5, 17, 100)]
    assert not all(
        torch.equal((q @ k.mT)[..., ::3, :], q[..., ::3, :].contiguous() @ k.mT) for q in queries for k in keys
    )


@pytest.mark.rare
@pytest.mark.parametrize(
    ("name", "kv_heads", "num_ranks"), [("llama", 1, 2), ("llama", 1, 3), ("gpt_oss", 1, 2), ("qwen3", 2, 4)]
)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_ranks_that_copy_key_heads_give_the_bits_of_one(
    tmp_path: Path, name: str, kv_heads: int, num_ranks: int, kv_dtype: str
) -> None:
    """A query on each rank, which would be a product of one row. gpt-oss has sinks, one a head of queries."""
    heads = {"num_attention_heads": num_ranks, "num_key_value_heads": kv_heads, "intermediate_size": 128}
    write_target(tmp_path / "target", name, hidden_size=96, **heads)
    config = read_model_config(tmp_path / "target")
    write_draft(tmp_path / "draft", config, draft_vocab_size=64, **heads)
    target = read_target(tmp_path / "target", dtype="float32", capture=(0, 1, 2))
    draft = read_draft_weights(tmp_path / "draft", target, capture=(0, 1, 2))
    torch.set_num_threads(1)
    whole = steps(TorchPair(target, draft, "float32", kv_dtype))
    for found in on_ranks(num_ranks, lambda ranks: steps(TorchPair(target, draft, "float32", kv_dtype, ranks=ranks))):
        assert found == whole


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sums_over_ranks_are_the_same_on_all_and_near_those_of_one(family: Family, num_ranks: int) -> None:
    """Every draw of every rank is the same: rank 0 alone is read. The bits of one rank would be chance."""
    torch.set_num_threads(1)

    def work(ranks: LinkedRanks) -> list[Any]:
        return steps(TorchPair(family.target, family.draft, "float32", ranks=ranks))

    whole = steps(TorchPair(family.target, family.draft, "float32"))
    first, *others = on_ranks(num_ranks, work, mode="reduce")
    assert all(found == first for found in others)
    near, exact = ([np.frombuffer(part, np.float32) for part in found[-1][:2]] for found in (first, whole))
    for a, b in zip(near, exact, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())
        assert not np.array_equal(a, b)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rounded_linears_are_those_of_one_rank(dtype: str) -> None:
    target, draft = weights_of(*tiny_pair(config=SIX, draft=dataclasses.replace(TINY_DRAFT, model=SIX.draft_layer)))
    torch.set_num_threads(1)
    whole = steps(TorchPair(target, draft, dtype))
    for found in on_ranks(2, lambda ranks: steps(TorchPair(target, draft, dtype, ranks=ranks))):
        assert found == whole


def test_orders_of_any_length_arrive() -> None:
    orders = [None, ("step", 1), b"x" * 4092, b"x" * 4093, b"x" * 5000, list(range(9000))]

    def work(ranks: LinkedRanks) -> list[Any]:
        if ranks.share.rank:
            return [ranks.receive() for _ in orders]
        for order in orders:
            ranks.tell(order)
        return orders

    assert on_ranks(3, work) == [orders] * 3


def test_a_rank_that_does_not_come_is_missed_in_time() -> None:
    given_up = threading.Event()

    def work(ranks: LinkedRanks) -> bool:
        if ranks.share.rank == 1:
            return given_up.wait(30)
        began = time.monotonic()
        with pytest.raises(Parted, match="imed out"):
            ranks.stacked(torch.zeros(3))
        given_up.set()
        return 0.9 < time.monotonic() - began < 9

    assert on_ranks(2, work, limit_s=1.0) == [True, True]
