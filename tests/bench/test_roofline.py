"""Bytes and FLOPs against a brute-force count of what real modules touch, ideals against independent figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.bench.published import (
    GPT_OSS_120B,
    GPT_OSS_HEAD,
    LLAMA_8B,
    LLAMA_8B_HEAD,
    QWEN_7B,
    write_config,
)
from tests.conftest import TINY, TINY_DRAFT, engine_config, tiny_pair, weights_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from aquiline.backends.torch.decoder import Decoder
from aquiline.backends.torch.eagle import DraftHead
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.bench.theory.ceilings import Ceilings, Figure
from aquiline.bench.theory.roofline import Cost, Roofline, Routing, forward_cost, keys_read, keys_seen
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels
from aquiline.models.counting import draft_shape_of, read_draft_shape, read_shape, shape_of
from aquiline.models.model_config import ModelConfig
from aquiline.models.shape import expected_experts
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static

WINDOWED = dataclasses.replace(TINY, windows=(8, 0, 30, 0), qkv_bias=True, qk_norm=True)
H100 = Ceilings("H100 as measured", None, *(Figure(rate, "given") for rate in (3.0e12, 800e12, 800e12)))


class CountedAttention:
    """Rows of B sequences behind C cached keys each: every row attends to exactly the keys that it sees, one product
    per head, and the keys that anyone saw or wrote are counted."""

    def __init__(self, config: ModelConfig, batch: int, context: int) -> None:
        self.config, self.batch, self.context = config, batch, context
        self.touched: set[tuple[int, int, int]] = set()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        rows_each, window = len(q) // self.batch, self.config.window(layer)
        out = torch.zeros(len(q), q.shape[1] * q.shape[2])
        keys = torch.zeros(self.context + rows_each, q.shape[2])
        for row, vectors in enumerate(q):
            sequence, place = divmod(row, rows_each)
            end = self.context + place + 1
            start = max(0, end - window) if window else 0
            self.touched |= {(layer, sequence, key) for key in range(start, end)}
            for vector in vectors:
                torch.mm(torch.mm(vector[None], keys[start:end].T), keys[start:end])
        return out

    @property
    def kv_elements(self) -> int:
        return len(self.touched) * 2 * self.config.num_kv_heads * self.config.head_dim


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        yield counter


def target_forward(decoder: Decoder, batch: int, context: int, rows_each: int) -> Cost:
    """Run it and count: parameters that a forward reads, rows of the embedding, keys, FLOPs."""
    rows = batch * rows_each
    attn = CountedAttention(decoder.config, batch, context)
    with counted() as counter:
        out = decoder(torch.arange(rows) % 7, torch.full((rows,), context), attn)
        decoder.logits(out.hidden)
    read = {p.data_ptr(): p.numel() for p in decoder.parameters() if p is not decoder.embed}
    read[decoder.head.data_ptr()] = decoder.head.numel()
    elements = sum(read.values()) + rows * decoder.config.hidden_size
    return Cost(4 * elements, 4 * attn.kv_elements, counter.get_total_flops())


def draft_forward(head: DraftHead, batch: int, context: int, rows_each: int, num_head: int, fuse: bool) -> Cost:
    rows, hidden = batch * rows_each, head.config.model.hidden_size
    attn = CountedAttention(head.config.model, batch, context)
    with counted() as counter:
        g = head.fuse(torch.zeros(rows, head.fc.shape[1])) if fuse else torch.zeros(rows, hidden)
        a = head(g, torch.zeros(rows, dtype=torch.int64), torch.full((rows,), context), attn)
        head.logits(a[: batch * num_head])
    fused = head.fc.numel() if fuse else 0
    layer = sum(p.numel() for p in head.layer.parameters()) + head.hidden_norm.numel()
    elements = fused + layer + head.norm.numel() + head.head.numel() + rows * hidden
    return Cost(4 * elements, 4 * attn.kv_elements, counter.get_total_flops())


def assert_same(counted: Cost, formula: Cost) -> None:
    assert counted.weight_bytes == pytest.approx(formula.weight_bytes, rel=1e-12)
    assert counted.kv_bytes == pytest.approx(formula.kv_bytes, rel=1e-12)
    assert counted.flops == pytest.approx(formula.flops, rel=1e-12)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", [TINY, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize(("batch", "context", "rows_each"), [(1, 20, 1), (1, 5, 4), (3, 28, 4), (2, 0, 3), (2, 60, 2)])
def test_a_forward_costs_what_it_touches(
    config: ModelConfig, tied: bool, batch: int, context: int, rows_each: int
) -> None:
    config = dataclasses.replace(config, tied_head=tied)
    decoder, _ = tiny_pair(config=config)
    formula = forward_cost(shape_of(config, "float32").body, batch, context, rows_each)
    assert_same(target_forward(decoder, batch, context, rows_each), formula)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cycle_costs_what_its_forwards_touch(batch: int) -> None:
    decoder, head = tiny_pair()
    target = shape_of(TINY, "float32")
    roofline = Roofline(target, draft_shape_of(TINY_DRAFT, target), H100)
    context, tau = 40, 3
    cycle = roofline.cycle(Chain(4), tau, batch, context)
    passes = draft_forward(head, batch, context, tau, 1, fuse=True)
    for level in range(3):
        passes += draft_forward(head, batch, context + tau + level, 1, 1, fuse=False)
    assert_same(passes, cycle.draft.cost)
    assert_same(target_forward(decoder, batch, context, 5), cycle.verify.cost)


def test_a_norm_before_fc_is_read_with_it() -> None:
    target = shape_of(TINY)
    plain, normed = (
        draft_shape_of(dataclasses.replace(TINY_DRAFT, norm_before_fc=flag), target) for flag in (False, True)
    )
    assert normed.num_parameters - plain.num_parameters == 3 * TINY.hidden_size


def test_expected_experts_are_those_of_a_simulation() -> None:
    rng, trials = np.random.default_rng(0), 400
    for num_experts, per_token, rows in ((128, 4, 1), (128, 4, 6), (128, 4, 60), (8, 2, 3), (60, 4, 16)):
        unions = []
        for _ in range(trials):
            picked = np.argsort(rng.random((rows, num_experts)), axis=1)[:, :per_token]
            unions.append(len(set(picked.ravel().tolist())))
        expected = expected_experts(num_experts, per_token, rows)
        error = np.std(unions) / np.sqrt(trials)
        assert abs(np.mean(unions) - expected) <= 4 * error + 1e-9, (num_experts, per_token, rows)
    assert expected_experts(128, 4, 1) == pytest.approx(4) and expected_experts(8, 8, 2) == 8


def test_an_moe_step_reads_its_experts_and_multiplies_by_its_own(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, GPT_OSS_120B))
    expert = 3 * 2880 * 2880
    one, six = (forward_cost(shape.body, 1, 0, rows) for rows in (1, 6))
    more = expected_experts(128, 4, 6) - 4
    scales = expert / 32
    grown = 36 * more * (expert / 2 + scales + 2 * (2 * 2880 + 2880)) + 5 * 2 * 2880  # and five rows of the embedding
    assert six.weight_bytes - one.weight_bytes == pytest.approx(grown)
    assert six.linear_flops == pytest.approx(6 * one.linear_flops)
    biases_and_norms = 36 * (2 * 2880 + 64 + 5120 + 2880 + 128 + 4 * 3 * 2880) + 2880
    assert one.linear_flops == 2 * (shape.num_active - biases_and_norms)


def test_rows_that_share_experts_read_fewer(tmp_path: Path) -> None:
    """Between independent rows and rows that all choose alike; sequences stay independent of one another."""
    shape = read_shape(write_config(tmp_path, GPT_OSS_120B))

    def read(batch: int, rows: int, overlap: float) -> float:
        embedding = 2 * 2880 * batch * rows
        return forward_cost(shape.body, batch, 0, rows, routing=Routing(overlap)).weight_bytes - embedding

    assert read(1, 4, 0) == forward_cost(shape.body, 1, 0, 4).weight_bytes - 2 * 2880 * 4
    assert read(1, 4, 1) == pytest.approx(read(1, 1, 0)) and read(3, 4, 1) == pytest.approx(read(3, 1, 0))
    assert read(1, 4, 1 / 3) == pytest.approx(read(1, 3, 0)), "4 rows as 1 + 3 * 2 / 3 = 3 independent ones"
    assert read(5, 1, 0.7) == read(5, 1, 0), "single rows have no neighbours"


@pytest.mark.parametrize("rows", [2, 4, 3.5])
def test_routing_is_read_off_experts(rows: float, tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path / "moe", GPT_OSS_120B))
    layer = shape.body.layers[0]
    for overlap in (0.0, 0.35, 1.0, -0.2):
        seen = Routing.seen(layer, Routing(overlap).experts(layer, 1, rows), rows)
        assert seen is not None and seen.overlap == pytest.approx(overlap, abs=1e-9)
    assert Routing.seen(layer, 4, 1) is None and Routing.seen(layer, 128, 400) is None
    assert Routing.seen(shape_of(TINY).body.layers[0], 4, rows) is None


def test_windows_cap_what_is_read() -> None:
    for window in (0, 1, 5, 64):
        for context in (0, 3, 5, 100):
            for rows in (1, 4, 7):
                seen = [set(range(max(0, end - window) if window else 0, end)) for end in
                        range(context + 1, context + rows + 1)]  # fmt: skip
                assert keys_read(context, rows, window) == len(set().union(*seen))
                assert keys_seen(context, rows, window) == sum(map(len, seen))


@pytest.mark.parametrize(
    ("name", "batch", "context", "tokens_per_s", "verify"),
    [
        ("llama", 1, 8192, 187, (1.00, 1.00, 1.00, 1.00)),
        ("llama", 1, 32768, 155, (1.00, 1.00, 1.00, 1.00)),
        ("llama", 4, 16384, 508, (1.00, 1.00, 1.00, 1.00)),
        ("qwen", 1, 8192, 205, (1.00, 1.00, 1.00, 1.02)),
        ("gpt-oss", 1, 8192, 565, (2.01, 2.63, 5.22, 10.5)),
        ("gpt-oss", 1, 32768, 483, (1.86, 2.40, 4.60, 9.20)),
        ("gpt-oss", 4, 16384, 937, (2.33, 2.97, 4.57, 5.35)),
    ],
)
def test_ideals_equal_those_of_an_independent_model(
    name: str, batch: int, context: int, tokens_per_s: float, verify: tuple[float, ...], tmp_path: Path
) -> None:
    """At the 3.0 TB/s and 800 TFLOP/s that copies and GEMMs reach on an H100; the figures are a separate program's."""
    fields = {"llama": LLAMA_8B, "qwen": QWEN_7B, "gpt-oss": GPT_OSS_120B}[name]
    roofline = Roofline(read_shape(write_config(tmp_path, fields)), None, H100)
    base = roofline.step(batch, context)
    assert batch / base.seconds == pytest.approx(tokens_per_s, abs=0.6) and base.bound == "memory"
    ratios = [roofline.step(batch, context, rows).seconds / base.seconds for rows in (4, 6, 16, 60)]
    assert ratios == pytest.approx(verify, rel=0.005)


@pytest.mark.parametrize(
    ("target", "head", "batch", "context", "speedups"),
    [
        (LLAMA_8B, LLAMA_8B_HEAD, 1, 8192, (1.91, 2.60, 3.47)),
        (LLAMA_8B, LLAMA_8B_HEAD, 4, 16384, (1.94, 2.65, 3.53)),
        (GPT_OSS_120B, GPT_OSS_HEAD, 1, 32768, (1.01, 1.38, 1.84)),
        (GPT_OSS_120B, GPT_OSS_HEAD, 4, 16384, (0.88, 1.20, 1.60)),
    ],
    ids=["llama b1", "llama b4", "gpt-oss b1", "gpt-oss b4"],
)
def test_ideal_speedups_equal_those_of_an_independent_model(
    target: dict[str, object], head: dict[str, object], batch: int, context: int, speedups: tuple[float, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    shape = read_shape(write_config(tmp_path / "target", target))
    draft = read_draft_shape(write_config(tmp_path / "head", head), shape)
    roofline = Roofline(shape, draft, H100)
    chain = Chain(3)
    cycles = [roofline.cycle(chain, tau, batch, context) for tau in (2.2, 3.0, 4.0)]
    assert [cycle.speedup for cycle in cycles] == pytest.approx(speedups, abs=0.0051)
    report = roofline.report(cycles[1], tokens_per_s=1.0, speedup=cycles[1].speedup / 2)
    assert report["spec_efficiency"] == pytest.approx(0.5)


def test_speedup_is_the_ratio_of_the_ideals(tmp_path: Path) -> None:
    target = shape_of(TINY)
    roofline = Roofline(target, draft_shape_of(TINY_DRAFT, target), H100)
    for drafting in (Chain(2), Dynamic(), Static()):
        cycle = roofline.cycle(drafting, 2.0, 3, 100)
        fast, slow = cycle.tokens_per_s, 3 / roofline.step(3, 100).seconds
        assert cycle.speedup == pytest.approx(fast / slow)
        report = roofline.report(cycle, fast / 4, 1.0)
        assert report["percent_of_ideal"] == pytest.approx(25) and report["ideal_tokens_per_s"] == pytest.approx(fast)
    none = roofline.cycle(NoDraft(), 1.0, 3, 100)
    assert none.speedup == 1.0 and none.draft.cost == Cost()


def test_from_its_break_even_on_a_chain_pays(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path / "target", GPT_OSS_120B))
    draft = read_draft_shape(write_config(tmp_path / "head", GPT_OSS_HEAD), shape)
    found = []
    for overlap in (0.0, 0.35):
        roofline = Roofline(shape, draft, H100, Routing(overlap))
        for length in (1, 2, 3):
            tau = roofline.break_even(Chain(length), 1, 32768)
            assert tau is not None and roofline.cycle(Chain(length), tau, 1, 32768).speedup == pytest.approx(1)
            found.append(tau)
    assert found == pytest.approx([1.41, 1.80, 2.18, 1.30, 1.60, 1.88], abs=0.0051)
    slow = dataclasses.replace(H100, linear_flops=Figure(1e9, "given"))
    assert Roofline(shape, draft, slow).break_even(Chain(3), 1, 32768) is None, "rows cost arithmetic"


def test_each_phase_takes_the_longer_of_its_two_times() -> None:
    device = Ceilings("toy", None, Figure(10.0, "given"), Figure(100.0, "given"), Figure(50.0, "given"))
    roofline = Roofline(shape_of(TINY), None, device)
    memory = roofline.ideal(Cost(weight_bytes=20, kv_bytes=10, linear_flops=100, attention_flops=10))
    assert (memory.memory_s, memory.compute_s, memory.bound) == (3.0, 0.0, "memory")
    mixed = roofline.ideal(Cost(weight_bytes=20, kv_bytes=10, linear_flops=100, attention_flops=200))
    assert (mixed.memory_s, mixed.compute_s, mixed.bound) == (2.0, 4.0, "compute") and mixed.seconds == 6.0


@pytest.mark.parametrize(
    "drafting", [Chain(1), Chain(4), Dynamic(3, 2, 7), Static()], ids=lambda drafting: drafting.label
)
def test_a_cycle_has_the_forwards_that_a_backend_makes(drafting: Drafting) -> None:
    """Counted where a backend runs modules, which is torch; the native one counts its rows, the same ones."""
    pair = TorchPair(*weights_of(*tiny_pair()), "float32")
    llm = LLM.from_models(LoadedModels(pair, None, "float32", 0), engine_config(1))
    calls: list[tuple[str, int]] = []
    assert pair.head is not None
    pair.decoder.register_forward_hook(lambda module, args, out: calls.append(("target", len(args[0]))))
    pair.head.register_forward_hook(lambda module, args, out: calls.append(("draft", len(args[0]))))
    summary = llm.run([[5, 6, 7]], SamplingParams(max_tokens=12, ignore_eos=True), drafting=drafting).summary
    verified = [place for place, (name, _) in enumerate(calls) if name == "target"]
    cycles = [calls[a + 1 : b + 1] for a, b in pairwise(verified)]
    assert len(cycles) >= 3
    for *passes, last in cycles[1:]:
        assert last == ("target", drafting.max_nodes)
        assert [rows for _, rows in passes[1:]] == list(drafting.draft_passes)
        assert 1 <= passes[0][1] <= drafting.max_depth + 1
    assert sum(drafting.draft_passes) == drafting.draft_rows
    drafted = [rows for cycle in cycles for name, rows in cycle if name == "draft"]
    assert drafted[0] == 2, "the prompt's own"
    assert summary.slots.num_draft_rows == sum(drafted[1:])


def test_one_pass_saves_what_further_passes_take_but_their_rows(tmp_path: Path) -> None:
    """Where memory is the limit the rows are free but for the keys and embeddings that they read, so the saving is the
    further passes' share; where arithmetic is, nothing is saved. A chain of one has no further pass."""
    target = read_shape(write_config(tmp_path / "target", LLAMA_8B))
    draft = read_draft_shape(write_config(tmp_path / "draft", LLAMA_8B_HEAD), target)
    slow_memory = Roofline(target, draft, H100)
    three, one = (slow_memory.cycle(Chain(k), 2.0, 1, 512) for k in (3, 1))
    share = (three.draft.seconds - one.draft.seconds) / three.seconds
    assert slow_memory.one_pass_saving(Chain(3), 2.0, 1, 512) == pytest.approx(share, rel=0.01)
    slow_arithmetic = Roofline(target, draft, Ceilings("slow", None, *(Figure(r, "given") for r in (3e12, 1e9, 1e9))))
    assert abs(slow_arithmetic.one_pass_saving(Chain(3), 2.0, 1, 512)) < 1e-6
    assert slow_memory.one_pass_saving(Chain(1), 2.0, 1, 512) == 0


def test_a_tau_that_cannot_be_is_refused() -> None:
    target = shape_of(TINY)
    roofline = Roofline(target, draft_shape_of(TINY_DRAFT, target), H100)
    for tau in (0.9, 4.1, float("nan")):
        with pytest.raises(ValueError, match=r"tau=.*must be between 1 and 4"):
            roofline.cycle(Chain(3), tau, 1, 10)
    alone = dataclasses.replace(roofline, draft=None)
    with pytest.raises(ValueError, match=r"drafter='chain': no draft is named"):
        alone.cycle(Chain(), 2.0, 1, 10)


def test_a_model_that_a_cache_holds_is_noted(tmp_path: Path) -> None:
    target = shape_of(TINY)
    draft = draft_shape_of(TINY_DRAFT, target)
    step = Roofline(target, None, H100).step(1, 0).cost.num_bytes

    def notes(cache: float | None, head: object = None) -> str:
        device = dataclasses.replace(H100, cache_bytes=None if cache is None else int(cache))
        return " ".join(Roofline(target, head, device).notes())  # type: ignore[arg-type]

    assert notes(None) == notes(0.05 * step) == ""
    assert "50% of it" in notes(0.5 * step) and "100% of it" in notes(2 * step)
    assert "draft's" in notes(0.09 * step, draft)
    moe = read_shape(write_config(tmp_path, GPT_OSS_120B))
    assert "uniform and independent" in " ".join(Roofline(moe, None, H100).notes())
    assert "uniform; 35% of a row's experts" in " ".join(Roofline(moe, None, H100, Routing(0.35)).notes())
    assert "overlap=0.35 has no effect" in " ".join(Roofline(target, None, H100, Routing(0.35)).notes())
