"""The needs of a run: memory, arithmetic by stage and disk from shapes alone; time from steps that were measured.

Memory counts what is held all the time and what one step keeps for its backward pass, but not the short-lived buffers
of single operations. Without measured steps there is only a bound on speed: matrix products alone, at the rate of one
large product.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aquiline.engine.score import MAX_DOCUMENTS, PAGE_SIZE
from aquiline.models.counting import draft_shape, read_shape
from aquiline.models.draft_vocabulary import DEFAULT_SIZE
from aquiline.models.shape import STORAGES, AttentionShape, Dense, DraftShape, LayerShape, ModelShape, precision_of
from aquiline.ops import control_groups
from aquiline.train.distributed import World, alone
from aquiline.train.losses import CHUNK_BYTES
from aquiline.train.pass_attention import CHUNK
from aquiline.train.recipes import Recipe
from aquiline.train.schedule import Pace
from aquiline.train.teacher import bytes_per_token, has_bfloat16
from aquiline.train.train_config import TrainConfig
from aquiline.train.ttt import num_rows

RATE_SECONDS = 1.0
RATE_ROWS = 2048
CPU_WIDTH = 1024
"""Width of the product at most: wider ones are no faster on a CPU, and one may take longer than the measurement."""
FEW_TOKENS = 500_000
"""A new draft that trains on fewer tokens hardly gets beyond its fitted start (measured for SmolLM2-135M)."""


@dataclass(frozen=True)
class ProductRate:
    """The measured rate of matrix products: floating-point operations a second, their dtype, and the device."""

    flops: float
    dtype: str
    device: str


@dataclass(frozen=True)
class RunEstimate:
    """The needs of a run. memory_bytes: on one rank, by purpose. flops_per_token: floating-point operations by stage.
    tokens: of the budget, None if the budget is in minutes or epochs. checkpoint_bytes: of one checkpoint.
    features_bytes_per_token: in the feature cache."""

    memory_bytes: dict[str, int]
    flops_per_token: dict[str, float]
    tokens: int | None
    checkpoint_bytes: int
    features_bytes_per_token: int
    num_ranks: int

    def lines(self, keep: int, free: int) -> list[str]:
        """The estimate in words. free: bytes of free memory; keep: how many checkpoints are kept."""
        parts = ", ".join(f"{name} {_bytes(size)}" for name, size in self.memory_bytes.items())
        total = sum(self.memory_bytes.values())
        fits = "" if total <= free else ": IT WILL NOT FIT; lower batch_size, context or draft_vocab_size"
        whole = sum(self.flops_per_token.values())
        stages = ", ".join(f"{name} {100 * f / whole:.0f} %" for name, f in self.flops_per_token.items())
        ranks = f" on each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        cache_bytes = 1e6 * self.features_bytes_per_token
        return [
            f"memory{ranks}: {_bytes(total)} of {_bytes(free)} free ({parts}){fits}",
            f"arithmetic: {whole / 1e9:.3g} GFLOP a token ({stages})",
            f"disk: {_bytes(self.checkpoint_bytes)} a checkpoint, {keep + 1} at a time; with --features "
            f"{_bytes(cache_bytes)} a million tokens, which spares a document's next epochs the target",
        ]

    def bound(self, rate: ProductRate) -> float:
        """Tokens per second of all ranks together that no run exceeds: all products at that rate, and nothing else."""
        return self.num_ranks * rate.flops / sum(self.flops_per_token.values())

    def bound_line(self, rate: ProductRate) -> str:
        """The bound in words."""
        speed = self.bound(rate)
        least = f", so at least {_duration(self.tokens / speed)} for {self.tokens:,} tokens" if self.tokens else ""
        return (
            f"time: no step was measured. At most {speed:,.0f} tokens/s{least}: products alone, at the "
            f"{rate.flops / 1e9:.0f} GFLOP/s of one large product measured on {rate.device} in {rate.dtype}. Steps "
            "take several times as long: a run measures its first two, and so does --dry-run with --data"
        )


def pace_lines(pace: Pace, num_steps: int, before: int | None) -> list[str]:
    """The pace of the first steps, and the steps to come, in words. before: tokens that a new draft has been trained
    on, None for an earlier draft that goes on."""
    took = f"{pace.tokens_per_s:,.0f} tokens/s, {pace.of_a_step[0]:.1f} s a step"
    seconds, tokens = (num_steps * each for each in pace.of_a_step)
    plan = f"plan: {num_steps:,} steps to go, {round(tokens):,} tokens, {_duration(seconds)}, looks not counted"
    if before is not None and before + round(tokens) < FEW_TOKENS:
        plan += (
            f". So few tokens teach a new draft little, it needs {FEW_TOKENS:,} and more: give it longer, or go on "
            "from a trained draft with --init DRAFT (with --target smollm2: --init smollm2)"
        )
    return [f"time: {took}, measured over the first {pace.num_steps} steps here", plan]


def estimate_run(config: TrainConfig, target: ModelShape, world: World) -> RunEstimate:
    """The estimate for a run of these settings on a target of this shape."""
    draft, rows = trained_shape(config, target), config.batch_size * config.accumulate * config.context
    return RunEstimate(
        memory_bytes=_memory(config, target, draft, world),
        flops_per_token=_flops(config, target, draft),
        tokens=min(filter(None, (config.tokens, (config.steps or 0) * rows)), default=None),  # rows count as full
        checkpoint_bytes=draft.num_parameters * (4 * _copies(config) - 4 + 2),
        features_bytes_per_token=bytes_per_token(draft.fc.k, target.body.hidden_size),
        num_ranks=world.size,
    )


def _copies(config: TrainConfig) -> int:
    """Float32 copies of what is trained: weights, gradients, two moments (Muon: mostly one), and the average."""
    return 4 + (config.ema > 0)


def _memory(config: TrainConfig, target: ModelShape, draft: DraftShape, world: World) -> dict[str, int]:
    H, V, on_cpu = target.body.hidden_size, target.vocab_size, world.device == "cpu"
    packed = target.stored_bytes if on_cpu else 0.0  # on a CPU the native library runs the target, beside the decoder
    weights = round(_decoded(target).stored_bytes + packed)
    kv = round(target.body.kv_bytes_per_token)
    slots = (-(-max(2048, config.context) // PAGE_SIZE) + MAX_DOCUMENTS) * PAGE_SIZE if on_cpu else 0
    copies = 4 * draft.num_parameters * _copies(config) // world.num_parts
    return {
        "target": weights + 4 * V * H + kv * slots,
        "draft and optimizer": copies + 4 * V * H + 4 * draft.body.head.n * H,
        "one step": step_bytes(config, target, draft, world),
    }


def _decoded(target: ModelShape) -> ModelShape:
    """A target as the torch decoder holds it: experts in MXFP4 become float32."""
    precision = target.body.precision
    if precision.experts == STORAGES["mxfp4"]:
        precision = replace(precision, experts=STORAGES["float32"])
    return replace(target, body=replace(target.body, precision=precision))


def step_bytes(config: TrainConfig, target: ModelShape, draft: DraftShape, world: World) -> int:
    """Bytes that a step keeps: its batches, tensors that the passes save for their backward, the head's gradients and
    chunks.

    A row of a pass saves 13 vectors of H around norms and residual, queries, keys, values and outputs of attention,
    four of the MLP's width, and, in `fused` attention, the probabilities of the keys it sees."""
    H, size = draft.body.hidden_size, 2 if has_bfloat16(world.device) else 4
    (layer,) = draft.body.layers
    heads, head = layer.attention, draft.body.head
    q, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    batch_rows = -(-config.batch_size // world.size)
    batch = config.accumulate * batch_rows * config.context * (4 * draft.fc.k + 2 * target.body.hidden_size)
    per_token, seen = _rows_and_keys(config)
    rows = batch_rows * num_rows(config.context, config.ttt_steps) * per_token
    row = 13 * H + 3 * q + 2 * kv + 4 * layer.mlp.width + heads.num_heads * seen
    head_bytes = 4 * head.num_weights + 5 * max(CHUNK_BYTES, 16 * 4 * head.n)
    return round(batch + rows * row * size + head_bytes)


def _rows_and_keys(config: TrainConfig) -> tuple[float, float]:
    """Rows of all passes for one position, and the keys that a row is multiplied with on average: all keys up to the
    end of the row's chunk."""
    return 1 + (config.ttt_steps - 1) * config.late_share, min(config.context, (config.context + CHUNK) / 2)


def _flops(config: TrainConfig, target: ModelShape, draft: DraftShape) -> dict[str, float]:
    """Floating-point operations of one token by stage. A multiplication counts two in the forward pass; the backward
    pass takes twice as many where both factors get gradients."""
    rows, seen = _rows_and_keys(config)
    (layer,) = draft.body.layers
    return {
        "target": 2.0 * sum(each.multiply_adds + _attention(each, seen) for each in target.body.layers),
        "target's head": 2.0 * target.body.head.num_weights,
        "draft layer": 4.0 * draft.fc.num_weights + 6.0 * rows * (layer.multiply_adds + _attention(layer, seen)),
        "draft head and loss": (6.0 * rows + 2.0) * draft.body.head.num_weights,
    }


def _attention(layer: LayerShape, seen: float) -> float:
    """Multiplications of one row with the keys and values that it sees."""
    return 2 * layer.attention.num_heads * layer.attention.head_dim * seen


def trained_shape(config: TrainConfig, target: ModelShape) -> DraftShape:
    """The draft of a run of these settings; sizes that the settings leave open are the target's."""
    H, own = target.body.hidden_size, target.body.layers[0]
    attention = AttentionShape(
        H, 2 * H, config.num_heads or own.attention.num_heads, config.num_kv_heads or own.attention.num_kv_heads,
        own.attention.head_dim,
    )  # fmt: skip
    layer = LayerShape(attention, Dense(H, config.intermediate_size or own.mlp.width))
    vocab = config.draft_vocab_size or min(DEFAULT_SIZE, target.vocab_size)
    return draft_shape(layer, vocab, len(config.capture or (0, 0, 0)) * H, target)


def target_shape(config: TrainConfig, recipe: Recipe | None = None) -> ModelShape:
    """The target's shape as the teacher loads it, in bfloat16 but for experts in MXFP4: from the recipe if the run
    trains for the recipe's target, else from the checkpoint."""
    known = None if recipe is None or config.target != Path(recipe.target) else recipe.shape
    shape = read_shape(config.target) if known is None else known
    precision = precision_of("bfloat16")
    if shape.body.precision.experts == STORAGES["mxfp4"]:
        precision = replace(precision, experts=STORAGES["mxfp4"])
    return replace(shape, body=replace(shape.body, precision=precision))


def announce(config: TrainConfig, shape: ModelShape, say: Callable[[str], None], world: World) -> RunEstimate:
    """Say line by line how much memory, arithmetic and disk a run needs."""
    told = estimate_run(config, shape, world)
    for line in told.lines(config.keep, free_bytes(world.device)):
        say(line)
    return told


def dry_run(
    config: TrainConfig, shape: ModelShape, say: Callable[[str], None], measure: Callable[[], tuple[Pace, int]] | None
) -> dict[str, Any]:
    """Say line by line what a run would need, and return it as JSON. measure: takes some steps of the run and returns
    their pace and the steps of the whole run; None where there is nothing to train on, which leaves a bound."""
    world = alone()
    told = announce(config, shape, say, world)
    record = {"target": str(config.target)} | {name: of for name, of in vars(told).items() if name != "num_ranks"}
    if measure is not None:
        pace, num_steps = measure()
        for line in pace_lines(pace, num_steps, None if config.init else 0):
            say(line)
        return record | {"tokens_per_s": pace.tokens_per_s, "steps": num_steps}
    rate = measure_rate(world.device, shape.body.hidden_size, RATE_SECONDS)
    say(told.bound_line(rate))
    return record | {
        "tokens_per_s": None, "most_tokens_per_s": told.bound(rate), "measured_flops": rate.flops, "dtype": rate.dtype,
        "device": rate.device,
    }  # fmt: skip


def measure_rate(device: str, width: int, seconds: float) -> ProductRate:
    """The best rate of [2048, width] x [width, 4 width] products within `seconds`, in the dtype of training."""
    kind = torch.device(device).type
    width = min(width, CPU_WIDTH if kind == "cpu" else width)
    dtype = torch.bfloat16 if has_bfloat16(device) else torch.float32
    a = torch.randn(RATE_ROWS, width, device=device).to(dtype)
    b = torch.randn(width, 4 * width, device=device).to(dtype)
    best, deadline = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < deadline:
        start = time.perf_counter()
        a @ b
        if kind == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * RATE_ROWS * 4 * width**2 / (time.perf_counter() - start))
    name = torch.cuda.get_device_name(device) if kind == "cuda" else f"this CPU ({torch.get_num_threads()} threads)"
    return ProductRate(best, str(dtype).removeprefix("torch."), name)


def free_bytes(device: str) -> int:
    """Free bytes of memory on a device."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return control_groups.free_memory()


def _bytes(size: float) -> str:
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((f"{size / scale:.3g} {unit}" for scale, unit in units if size >= scale), f"{size:.0f} B")


def _duration(seconds: float) -> str:
    units = ((86400, "days"), (3600, "h"), (60, "min"))
    return next((f"{seconds / scale:.1f} {unit}" for scale, unit in units if seconds >= 2 * scale), f"{seconds:.0f} s")
