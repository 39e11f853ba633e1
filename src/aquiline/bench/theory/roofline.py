"""The least time that a step can take: the bytes it must move and the FLOPs it must do, at the device's rates.

Counted once per forward: the weights it reads (of experts, the expected union over its rows), every cached key and
value it attends to, the new ones it writes, one row of the embedding per token. Not counted: activations, norms'
arithmetic, sampling, anything on the host. Linears and attention are two phases, each bound by memory or by arithmetic;
their times add up. A model that a cache holds can be faster than this: `notes` says when.

A cycle of speculation consists of the draft's passes and one verifying forward; each counts as a forward. The draft
first processes the committed tokens (tau rows, after fc), then makes one pass per further level; see spec/drafting.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from aquiline.bench.theory.device import Ceilings
from aquiline.models.shape import BodyShape, DraftShape, ModelShape, Precision
from aquiline.spec.drafting import Drafting

CACHE_SHARE = 0.1
"""If the cache may hold more than this share of a step's bytes, a note says so."""


@dataclass(frozen=True)
class Cost:
    """Bytes moved and FLOPs done, by phase; expectations, hence floats."""

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    linear_flops: float = 0.0
    attention_flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weight_bytes + other.weight_bytes, self.kv_bytes + other.kv_bytes,
            self.linear_flops + other.linear_flops, self.attention_flops + other.attention_flops,
        )  # fmt: skip

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
class StepRows:
    """The rows of one forward: `per_sequence` new tokens behind each of `batch` contexts of `context` tokens. num_head:
    how many rows of each sequence go through the head; None for all."""

    batch: int
    context: float
    per_sequence: float = 1
    num_head: float | None = None


def keys_read(rows: StepRows, window: int) -> float:
    """How many keys of one sequence its rows see together in one layer. With a window of w, a row sees itself and the
    w - 1 tokens before it."""
    every = rows.context + rows.per_sequence
    return min(every, window + rows.per_sequence - 1) if window else every


def keys_seen(rows: StepRows, window: int) -> float:
    """The keys that each row of one sequence sees in one layer, summed over its rows; the rows form a chain."""
    m, growing = rows.per_sequence, rows.per_sequence
    if window:
        growing = min(m, max(0.0, window - rows.context))
    return growing * rows.context + growing * (growing + 1) / 2 + (m - growing) * window


def forward_cost(body: BodyShape, precision: Precision, rows: StepRows) -> Cost:
    """One forward of a target, or one pass of a draft without its fc."""
    num_rows = rows.batch * rows.per_sequence
    head_rows = num_rows if rows.num_head is None else rows.batch * rows.num_head
    cost = Cost(
        weight_bytes=precision.vector_bytes(body.num_vector + num_rows * body.hidden_size)
        + precision.head.num_bytes(body.head),
        linear_flops=2 * body.head.num_weights * head_rows,
    )
    for layer, times in Counter(body.layers).items():
        heads = layer.attention
        each = Cost(
            weight_bytes=layer.num_bytes(precision, layer.touched_experts(num_rows)),
            kv_bytes=precision.kv_bytes(layer.kv_per_token) * rows.batch * keys_read(rows, heads.window),
            linear_flops=2 * layer.multiply_adds * num_rows,
            attention_flops=4 * heads.num_heads * heads.head_dim * rows.batch * keys_seen(rows, heads.window),
        )
        cost += Cost(
            times * each.weight_bytes, times * each.kv_bytes, times * each.linear_flops, times * each.attention_flops
        )
    return cost


@dataclass(frozen=True)
class Cycle:
    """One step of speculation at its ideal."""

    draft: Ideal
    verify: Ideal

    @property
    def seconds(self) -> float:
        """Seconds of the whole cycle."""
        return self.draft.seconds + self.verify.seconds


@dataclass(frozen=True)
class Roofline:
    """The ideal of a target, with a draft or without, on a device."""

    target: ModelShape
    draft: DraftShape | None
    draft_precision: Precision
    ceilings: Ceilings

    def ideal(self, cost: Cost) -> Ideal:
        """The least time of one forward."""
        memory_s = compute_s = 0.0
        for num_bytes, flops, rate in (
            (cost.weight_bytes, cost.linear_flops, self.ceilings.linear_flops.value),
            (cost.kv_bytes, cost.attention_flops, self.ceilings.attention_flops.value),
        ):
            moving_s, computing_s = num_bytes / self.ceilings.bandwidth.value, flops / rate
            if moving_s >= computing_s:
                memory_s += moving_s
            else:
                compute_s += computing_s
        return Ideal(cost, memory_s, compute_s)

    def step(self, batch: int, context: int, num_rows: int = 1) -> Ideal:
        """The ideal of a target forward with num_rows rows per sequence; one row is a step without speculation."""
        return self.ideal(forward_cost(self.target.body, self.target.precision, StepRows(batch, context, num_rows)))

    def cycle(self, drafting: Drafting, tau: float, batch: int, context: int) -> Cycle:
        """The ideal of drafting and verifying a tree of which tau tokens per sequence are committed.

        Raises ValueError for a tau that the tree cannot reach, or for a drafter without a draft."""
        check_tau(tau, drafting)
        verify = self.step(batch, context, drafting.max_nodes)
        if not drafting.is_speculative:
            return Cycle(Ideal(), verify)
        if self.draft is None:
            raise ValueError(f"drafter={drafting.name!r}: no draft is named; name one, or use drafter='none'")
        body, precision = self.draft.body, self.draft_precision
        fusing = Cost(
            precision.layers.num_bytes(self.draft.fc), linear_flops=2 * self.draft.fc.num_weights * batch * tau
        )
        draft = self.ideal(fusing + forward_cost(body, precision, StepRows(batch, context, tau, num_head=1)))
        seen = context + tau
        for num in drafting.draft_passes:
            draft += self.ideal(forward_cost(body, precision, StepRows(batch, seen, num)))
            seen += 1
        return Cycle(draft, verify)

    def tokens_per_s(self, drafting: Drafting, tau: float, batch: int, context: int) -> float:
        """Ideal tokens per second of all sequences together."""
        return batch * tau / self.cycle(drafting, tau, batch, context).seconds

    def speedup(self, drafting: Drafting, tau: float, batch: int, context: int) -> float:
        """The ideal speedup at this tau: tau * (time of a step without speculation) / (time of a cycle)."""
        return tau * self.step(batch, context).seconds / self.cycle(drafting, tau, batch, context).seconds

    def spec_efficiency(
        self, measured_speedup: float, drafting: Drafting, tau: float, batch: int, context: int
    ) -> float:
        """A measured speedup / the ideal speedup at the same tau; 1 means that the device allows no more."""
        return measured_speedup / self.speedup(drafting, tau, batch, context)

    def report(
        self, drafting: Drafting, tau: float, batch: int, context: int, tokens_per_s: float
    ) -> dict[str, object]:
        """The `roofline` object of a result with a measured tokens_per_s."""
        cycle = self.cycle(drafting, tau, batch, context)
        total, best = cycle.draft + cycle.verify, self.tokens_per_s(drafting, tau, batch, context)
        return {
            "bytes_per_step": total.cost.num_bytes,
            "flops_per_step": total.cost.flops,
            "bound": total.bound,
            "ideal_ms_per_step": total.seconds * 1e3,
            "ideal_tokens_per_s": best,
            "percent_of_ideal": 100 * tokens_per_s / best,
            "ideal_speedup": self.speedup(drafting, tau, batch, context),
            "ceilings": self.ceilings.as_dict(),
        }

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token, target and draft together."""
        draft = self.draft.body.kv_bytes_per_token(self.draft_precision) if self.draft else 0.0
        return self.target.body.kv_bytes_per_token(self.target.precision) + draft

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights of target and draft as they are stored."""
        draft = self.draft.stored_bytes(self.draft_precision) if self.draft else 0.0
        return self.target.stored_bytes(self.target.precision) + draft

    def memory_bytes(self, batch: int, context: int) -> float:
        """Bytes of all weights, and of the keys and values of `batch` whole contexts."""
        return self.weight_bytes + batch * context * self.kv_bytes_per_token

    def notes(self) -> list[str]:
        """What limits the meaning of the figures: assumptions, and caches that lift the memory bound."""
        found = [*self.target.assumptions, *(self.draft.assumptions if self.draft else ())]
        found += [self.ceilings.remark] if self.ceilings.remark else []
        if self.target.is_moe:
            found.append(
                "experts: routing is taken as uniform and independent; rows that share experts read fewer bytes"
            )
        cache, step = self.ceilings.cache_bytes, self.step(1, 0).cost.num_bytes
        if cache and cache > CACHE_SHARE * step:
            found.append(
                f"a step reads {step / 1e6:.0f} MB of weights and the last-level cache holds {cache / 1e6:.0f} MB, "
                f"{min(1.0, cache / step):.0%} of it: memory bandwidth does not bound what stays there, and a "
                "measurement may pass 100 % of ideal"
            )
        elif cache and self.draft and cache > CACHE_SHARE * self.draft.stored_bytes(self.draft_precision):
            held = self.draft.stored_bytes(self.draft_precision)
            found.append(
                f"the last-level cache holds {min(1.0, cache / held):.0%} of the draft's {held / 1e6:.0f} MB: its "
                "passes after the first may beat the memory bound"
            )
        return found


def check_tau(tau: float, drafting: Drafting) -> None:
    """Raises ValueError for a tau that no run with this way to draft can have."""
    if not 1 <= tau <= drafting.max_depth + 1:
        raise ValueError(f"tau={tau:g}: must be between 1 and {drafting.max_depth + 1}, the most this draft can commit")
