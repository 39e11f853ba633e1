"""What the ranks of one target send each other in a step, and how long links take for it at best.

Counts are those of backends/torch/ranks.py, which computes in float32 and gathers outputs or adds parts of them up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from aquiline.config import ParallelMode
from aquiline.models.shape import BodyShape, LayerShape, MoE
from aquiline.models.shares import ACTIVATIONS, OUTPUTS, Share

VALUE_BYTES, BEST_BYTES = 4, 32
"""Bytes of an output, and of the best score of a row, its token and what is known of its numbers."""


@dataclass(frozen=True)
class Link:
    """A link between ranks: bytes per second that each receives, and seconds that a collective takes without any."""

    name: str
    per_s: float
    each_s: float
    source: str


LINKS = (
    Link("NVLink", 450e9, 8e-6, "NVIDIA H100 datasheet, one way; 8 us a collective is assumed"),
    Link("PCIe 5.0 x16", 63e9, 15e-6, "PCI-SIG, one way; 15 us a collective is assumed"),
    Link("100 Gbit/s", 12.5e9, 30e-6, "line rate; 30 us a collective is assumed"),
)


@dataclass(frozen=True)
class Meeting:
    """What a forward of `rows` rows takes on each rank: collectives, and bytes that a rank sends to each other rank.
    share: that of any rank."""

    share: Share
    rows: float
    collectives: float = 0
    num_bytes: float = 0

    def gathered(self, width: float, unit: int = OUTPUTS) -> Meeting:
        """The same with a gather of so many outputs a row; parts are as long as the longest."""
        longest = max(part.stop - part.start for part in self.share.parts(int(width), unit))
        return self._with(1, self.rows * longest * VALUE_BYTES)

    def summed(self, width: float) -> Meeting:
        """The same with a sum of so many outputs a row: each rank adds up a part of them, and sends it to all."""
        return self._with(1, 2 * self.rows * width * VALUE_BYTES / self.share.ranks)

    def layer(self, layer: LayerShape) -> Meeting:
        """The same with a layer: sums of what its two blocks add; or its heads, its activations and what they add."""
        attention, mlp = layer.attention, layer.mlp
        if self.share.mode == "reduce":
            return self.summed(attention.hidden_size).summed(attention.hidden_size)
        met = self.gathered(attention.num_heads * attention.head_dim, attention.head_dim)
        met = met.gathered(attention.hidden_size).gathered(attention.hidden_size)
        if not isinstance(mlp, MoE):
            return met.gathered(mlp.inner, ACTIVATIONS)
        own = self.gathered(mlp.expert.inner, ACTIVATIONS).num_bytes - self.num_bytes
        return met._with(layer.touched_experts(self.rows), own * mlp.experts_per_token)

    def seconds(self, link: Link) -> float:
        """The time of all collectives over a link, one after the other."""
        return self.collectives * link.each_s + (self.share.ranks - 1) * self.num_bytes / link.per_s

    def _with(self, collectives: float, num_bytes: float) -> Meeting:
        return replace(self, collectives=self.collectives + collectives, num_bytes=self.num_bytes + num_bytes)


def meeting(body: BodyShape, share: Share, rows: float) -> Meeting:
    """A forward of a target and the draw of a token at every row: embedded rows, layers, the best scores."""
    met = Meeting(share, rows)._with(1, rows * body.hidden_size * VALUE_BYTES)
    for layer in body.layers:
        met = met.layer(layer)
    return met._with(1, rows * BEST_BYTES)


def links_of(body: BodyShape, ranks: int, rows: list[int]) -> list[dict[str, object]]:
    """The JSON of `aquiline limits --ranks`: for each mode and number of rows the collectives, the bytes and the time
    on each link."""
    found: list[dict[str, object]] = []
    for mode in get_args(ParallelMode):
        for num in rows:
            met = meeting(body, Share(0, ranks, mode), num)
            times = {link.name: met.seconds(link) * 1e3 for link in LINKS}
            sent = {"collectives": met.collectives, "sent_bytes": met.num_bytes, "ms": times}
            found.append({"parallel_mode": mode, "rows": num, **sent})
    return found
