"""The least time that a step can take: the bytes it must move and the FLOPs it must do, at the device's rates.

Counted once per forward: the weights it reads (of experts, the expected union over its rows: `Routing`), every cached
key and value it attends to, the new ones it writes, one row of the embedding per token. Not counted: activations,
arithmetic of norms, sampling, anything on the host. Linears and attention are two phases, each bound by memory or by
arithmetic; their times add up. A model that a cache holds can be faster than this: `notes` says when.

A cycle of speculation consists of the draft's passes and one verifying forward; each counts as a forward. The draft
first processes the committed tokens (tau rows, after fc), then makes one pass per further level; see spec/drafting.py.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from dataclasses import astuple, dataclass, replace

from aquiline.bench.theory.ceilings import Ceilings, ceilings_of
from aquiline.bench.theory.choice import LimitsChoice, StorageChoice
from aquiline.bench.theory.measure import OnStage
from aquiline.blocks import is_packed
from aquiline.engine.model import LoadedModels
from aquiline.models.counting import assumed_draft, draft_shape_of, read_draft_shape, read_shape, shape_of
from aquiline.models.known_pairs import checkpoints
from aquiline.models.shape import BodyShape, DraftShape, LayerShape, ModelShape, MoE, precision_of
from aquiline.spec.drafting import Drafting

CACHE_SHARE = 0.1
"""If the cache may hold more than this share of a step's bytes, a note says so."""
UNIFORM = "experts: routing is taken as uniform"
BREAK_EVEN_ERROR = 1e-6
"""How far from 1 the speedup at a break-even tau may be."""


@dataclass(frozen=True)
class Cost:
    """Bytes moved and FLOPs done, by phase; expectations, hence floats."""

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    linear_flops: float = 0.0
    attention_flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    @property
    def num_bytes(self) -> float:
        """Bytes of both phases."""
        return self.weight_bytes + self.kv_bytes

    @property
    def flops(self) -> float:
        """FLOPs of both phases."""
        return self.linear_flops + self.attention_flops


@dataclass(frozen=True)
class Ideal:
    """A cost and its least time. memory_s: seconds of phases bound by memory; compute_s: of those bound by
    arithmetic."""

    cost: Cost = Cost()
    memory_s: float = 0.0
    compute_s: float = 0.0

    def __add__(self, other: Ideal) -> Ideal:
        return Ideal(self.cost + other.cost, self.memory_s + other.memory_s, self.compute_s + other.compute_s)

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return self.memory_s + self.compute_s

    @property
    def bound(self) -> str:
        """Whether memory or arithmetic takes more of the time: "memory" or "compute"."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


@dataclass(frozen=True)
class Routing:
    """How far the rows of a sequence choose experts alike. overlap: the share of experts that a row has in common with
    its neighbours in the sequence, 0 for rows that choose independently, 1 for rows that choose the same. Sequences
    always choose independently of one another.

    m rows of one sequence count as 1 + (m - 1)(1 - overlap) independent ones."""

    overlap: float = 0.0

    def experts(self, layer: LayerShape, batch: int, rows: float) -> float:
        """The expected number of experts that a layer reads for `rows` rows of each of `batch` sequences."""
        return layer.touched_experts(batch * (1 + (rows - 1) * (1 - self.overlap)))

    @classmethod
    def seen(cls, layer: LayerShape, num_experts: float, rows: float) -> Routing | None:
        """The routing at which `rows` rows of one sequence are expected to read num_experts experts of a layer. None
        where no overlap shows: with one row, in a layer without experts or with all of them chosen by every row.

        The overlap is negative where rows choose more differently than independent ones would."""
        if rows <= 1 or not isinstance(layer.mlp, MoE) or layer.mlp.experts_per_token == layer.num_experts:
            return None
        if num_experts >= layer.num_experts:
            return None
        unread, left_by_one = 1 - num_experts / layer.num_experts, 1 - layer.mlp.experts_per_token / layer.num_experts
        return cls(1 - (math.log(unread) / math.log(left_by_one) - 1) / (rows - 1))


INDEPENDENT = Routing()


def keys_read(context: float, rows: float, window: int) -> float:
    """How many keys of one sequence its new rows see together in one layer. With a window of w, a row sees itself and
    the w - 1 tokens before it."""
    return min(context + rows, window + rows - 1) if window else context + rows


def keys_seen(context: float, rows: float, window: int) -> float:
    """The keys that each new row of one sequence sees in one layer, summed over its rows; the rows form a chain."""
    growing = min(rows, max(0.0, window - context)) if window else rows
    return growing * context + growing * (growing + 1) / 2 + (rows - growing) * window


def forward_cost(
    body: BodyShape, batch: int, context: float, rows: float = 1, num_head: float | None = None,
    routing: Routing = INDEPENDENT,
) -> Cost:  # fmt: skip
    """One forward of a target, or one pass of a draft without its fc: `rows` new tokens after each of `batch` contexts
    of `context` tokens. num_head: how many rows of each sequence go through the head; None for all."""
    precision, num_rows = body.precision, batch * rows
    head_rows = num_rows if num_head is None else batch * num_head
    cost = Cost(
        weight_bytes=precision.vector_bytes(body.num_vector + num_rows * body.hidden_size)
        + precision.head.num_bytes(body.head),
        linear_flops=2 * body.head.num_weights * head_rows,
    )
    for layer, times in Counter(body.layers).items():
        heads = layer.attention
        key_flops = 4 * heads.num_heads * heads.head_dim * batch
        cost += Cost(
            weight_bytes=times * layer.num_bytes(precision, routing.experts(layer, batch, rows)),
            kv_bytes=times * precision.kv_bytes(layer.kv_per_token) * batch * keys_read(context, rows, heads.window),
            linear_flops=times * 2 * layer.multiply_adds * num_rows,
            attention_flops=times * key_flops * keys_seen(context, rows, heads.window),
        )
    return cost


@dataclass(frozen=True)
class Cycle:
    """One step of speculation at its ideal. plain: a step without speculation; tau: tokens committed per sequence."""

    draft: Ideal
    verify: Ideal
    plain: Ideal
    tau: float
    batch: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole cycle."""
        return self.draft.seconds + self.verify.seconds

    @property
    def tokens_per_s(self) -> float:
        """Ideal tokens per second of all sequences together."""
        return self.batch * self.tau / self.seconds

    @property
    def speedup(self) -> float:
        """The ideal speedup at this tau: tau * (time of a step without speculation) / (time of a cycle)."""
        return self.tau * self.plain.seconds / self.seconds


@dataclass(frozen=True)
class Roofline:
    """The ideal of a target, with a draft or without, on a device."""

    target: ModelShape
    draft: DraftShape | None
    ceilings: Ceilings
    routing: Routing = INDEPENDENT

    def ideal(self, cost: Cost) -> Ideal:
        """The least time of one forward."""
        memory_s = compute_s = 0.0
        for num_bytes, flops, rate in (
            (cost.weight_bytes, cost.linear_flops, self.ceilings.linear_flops.per_s),
            (cost.kv_bytes, cost.attention_flops, self.ceilings.attention_flops.per_s),
        ):
            moving_s, computing_s = num_bytes / self.ceilings.bandwidth.per_s, flops / rate
            if moving_s >= computing_s:
                memory_s += moving_s
            else:
                compute_s += computing_s
        return Ideal(cost, memory_s, compute_s)

    def step(self, batch: int, context: int, num_rows: int = 1) -> Ideal:
        """The ideal of a target forward with num_rows rows per sequence; one row is a step without speculation."""
        return self.ideal(forward_cost(self.target.body, batch, context, num_rows, routing=self.routing))

    def cycle(self, drafting: Drafting, tau: float, batch: int, context: int) -> Cycle:
        """The ideal of drafting and verifying a tree of which tau tokens per sequence are committed.

        Raises ValueError for a tau that the tree cannot reach, or for a drafter without a draft."""
        most = drafting.max_depth + 1
        if not 1 <= tau <= most:
            raise ValueError(f"tau={tau:g}: must be between 1 and {most}, the most this draft can commit")
        draft = self._drafted(drafting, tau, batch, context) if drafting.is_speculative else Ideal()
        return Cycle(draft, self.step(batch, context, drafting.max_nodes), self.step(batch, context), tau, batch)

    def break_even(self, drafting: Drafting, batch: int, context: int) -> float | None:
        """The tau from which on drafting is as fast as a step without; None if the most that it can commit is less."""
        tau = float(drafting.max_depth + 1)
        cycle = self.cycle(drafting, tau, batch, context)
        if cycle.speedup < 1:
            return None
        while cycle.speedup - 1 > BREAK_EVEN_ERROR:  # a smaller tau makes a cycle cheaper, if only a little
            tau = cycle.seconds / cycle.plain.seconds
            cycle = self.cycle(drafting, tau, batch, context)
        return tau

    def one_pass_saving(self, drafting: Drafting, tau: float, batch: int, context: int) -> float:
        """The share of a cycle's time that a parallel head would save at the same tau. Such a head drafts all levels of
        a chain in one pass, in which the layer and the head have one more row for each level after the first."""
        passes = self._passes(drafting, tau, batch, context)
        wide = self._first_pass(tau, batch, context, num_more=len(passes) - 1)
        saved = sum(one.seconds for one in passes) - wide.seconds
        return saved / self.cycle(drafting, tau, batch, context).seconds

    def _drafted(self, drafting: Drafting, tau: float, batch: int, context: int) -> Ideal:
        return functools.reduce(operator.add, self._passes(drafting, tau, batch, context))

    def _passes(self, drafting: Drafting, tau: float, batch: int, context: int) -> list[Ideal]:
        """The passes of the draft: over the committed tokens with fc before it, then one for each further level."""
        if self.draft is None:
            raise ValueError(f"drafter={drafting.name!r}: no draft is named; name one, or use drafter='none'")
        further = [
            self.ideal(forward_cost(self.draft.body, batch, context + tau + level, num))
            for level, num in enumerate(drafting.draft_passes)
        ]
        return [self._first_pass(tau, batch, context), *further]

    def _first_pass(self, tau: float, batch: int, context: int, num_more: int = 0) -> Ideal:
        """The pass over the committed tokens; num_more: further rows of each sequence, which go through the head."""
        assert self.draft is not None, "only a draft has passes"
        body, fc = self.draft.body, self.draft.fc
        fusing = Cost(body.precision.layers.num_bytes(fc), linear_flops=2 * fc.num_weights * batch * tau)
        return self.ideal(fusing + forward_cost(body, batch, context, tau + num_more, num_head=1 + num_more))

    def report(self, cycle: Cycle, tokens_per_s: float, speedup: float) -> dict[str, object]:
        """The `roofline` object of a result with a measured tokens_per_s and speedup. spec_efficiency: the speedup over
        the ideal one at the same tau; 1 means that the device allows no more."""
        total = cycle.draft + cycle.verify
        return {
            "bytes_per_step": total.cost.num_bytes,
            "flops_per_step": total.cost.flops,
            "bound": total.bound,
            "ideal_ms_per_step": total.seconds * 1e3,
            "ideal_tokens_per_s": cycle.tokens_per_s,
            "percent_of_ideal": 100 * tokens_per_s / cycle.tokens_per_s,
            "ideal_speedup": cycle.speedup,
            "ceilings": self.ceilings.as_dict(),
            "spec_efficiency": speedup / cycle.speedup,
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """The doubts about the figures: assumptions, and caches that lift the memory bound."""
        found = [*self.target.assumptions, *(self.draft.assumptions if self.draft else ())]
        found += [self.ceilings.remark] if self.ceilings.remark else []
        overlap = self.routing.overlap
        if self.target.is_moe and overlap:
            found.append(f"{UNIFORM}; {overlap:.0%} of a row's experts are those of its neighbours")
        elif self.target.is_moe:
            found.append(f"{UNIFORM} and independent; rows that share experts read fewer bytes")
        elif overlap:
            found.append(f"overlap={overlap:g} has no effect: the target has no experts")
        cache, step = self.ceilings.cache_bytes, self.step(1, 0).cost.num_bytes
        if cache and cache > CACHE_SHARE * step:
            found.append(
                f"a step reads {step / 1e6:.0f} MB of weights and the last-level cache holds {cache / 1e6:.0f} MB, "
                f"{min(1.0, cache / step):.0%} of it: memory bandwidth does not bound what stays there, and a "
                "measurement may pass 100 % of ideal"
            )
        elif cache and self.draft and cache > CACHE_SHARE * self.draft.stored_bytes:
            held = self.draft.stored_bytes
            found.append(
                f"the last-level cache holds {min(1.0, cache / held):.0%} of the draft's {held / 1e6:.0f} MB: its "
                "passes after the first may beat the memory bound"
            )
        return found


def named_roofline(
    model: str | None, draft: str | None, storage: StorageChoice, device: LimitsChoice, on_stage: OnStage
) -> Roofline:
    """The roofline of `model`, by default the default pair, on a device. draft "none": without; None: a known pair's
    own, else a typical head. on_stage is told each stage of measuring. Raises ValueError as ceilings_of does."""
    named = checkpoints(model, draft)
    target = read_shape(named.target, storage.dtype, storage.kv_dtype)
    layers, plain = target.body.precision.layers.name, target.body.precision.plain.name
    precision = precision_of(storage.draft_dtype or ("int4" if is_packed(layers) else plain), storage.kv_dtype)
    head = None
    if named.draft != "none":
        head = assumed_draft(target) if named.draft is None else read_draft_shape(named.draft, target)
        head = replace(head, body=replace(head.body, precision=precision))
    return Roofline(target, head, ceilings_of(device, layers, on_stage))


def roofline_of(models: LoadedModels) -> Roofline:
    """The roofline of loaded models on this machine. Its ceilings are measured once and kept."""
    target = shape_of(models.target_config, models.storage)
    draft = None if models.draft_config is None else draft_shape_of(models.draft_config, target)
    if draft is not None and models.draft_storage is not None:
        draft = replace(draft, body=replace(draft.body, precision=precision_of(models.draft_storage)))
    ceilings = ceilings_of(LimitsChoice(arithmetic=models.arithmetic), models.storage, lambda stage: None)
    return Roofline(target, draft, ceilings)
