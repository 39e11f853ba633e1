"""What the ranks of one target send each other in a step, and how long links take for it at best.

Counts are those of backends/torch/ranks.py, which computes in float32 and gathers every output.
"""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.models.shape import BodyShape, LayerShape, MoE
from aquiline.models.shares import ACTIVATIONS, OUTPUTS, Share

VALUE_BYTES, BEST_BYTES = 4, 32
"""Bytes of a gathered output, and of the best score of a row, its token and what is known of its numbers."""


@dataclass(frozen=True)
class Link:
    """A link between ranks: bytes per second that each receives, and seconds that a gather takes without any."""

    name: str
    per_s: float
    gather_s: float
    source: str


LINKS = (
    Link("NVLink", 450e9, 8e-6, "NVIDIA H100 datasheet, one way; 8 us a gather is assumed"),
    Link("PCIe 5.0 x16", 63e9, 15e-6, "PCI-SIG, one way; 15 us a gather is assumed"),
    Link("100 Gbit/s", 12.5e9, 30e-6, "line rate; 30 us a gather is assumed"),
)


@dataclass(frozen=True)
class Meeting:
    """What a forward of `rows` rows takes on each of `ranks` ranks: gathers, and bytes that a rank sends to each other
    rank."""

    ranks: int
    rows: float
    gathers: float = 0
    num_bytes: float = 0

    def gathered(self, width: float, unit: int = OUTPUTS) -> Meeting:
        """The same with a gather of so many outputs a row; parts are as long as the longest."""
        longest = max(part.stop - part.start for part in Share(0, self.ranks).parts(int(width), unit))
        return self._with(1, self.rows * longest * VALUE_BYTES)

    def layer(self, layer: LayerShape) -> Meeting:
        """The same with a layer: its heads, what its two blocks add, and its activations."""
        attention, mlp = layer.attention, layer.mlp
        met = self.gathered(attention.num_heads * attention.head_dim, attention.head_dim)
        met = met.gathered(attention.hidden_size).gathered(attention.hidden_size)
        if not isinstance(mlp, MoE):
            return met.gathered(mlp.inner, ACTIVATIONS)
        own = self.gathered(mlp.expert.inner, ACTIVATIONS).num_bytes - self.num_bytes
        return met._with(layer.touched_experts(self.rows), own * mlp.experts_per_token)

    def seconds(self, link: Link) -> float:
        """The time of all gathers over a link, one after the other."""
        return self.gathers * link.gather_s + (self.ranks - 1) * self.num_bytes / link.per_s

    def _with(self, gathers: float, num_bytes: float) -> Meeting:
        return Meeting(self.ranks, self.rows, self.gathers + gathers, self.num_bytes + num_bytes)


def meeting(body: BodyShape, ranks: int, rows: float) -> Meeting:
    """A forward of a target and the draw of a token at every row: embedded rows, layers, the best scores."""
    met = Meeting(ranks, rows)._with(1, rows * body.hidden_size * VALUE_BYTES)
    for layer in body.layers:
        met = met.layer(layer)
    return met._with(1, rows * BEST_BYTES)


def links_of(body: BodyShape, ranks: int, rows: list[int]) -> list[dict[str, object]]:
    """The JSON of `aquiline limits --ranks`: for each number of rows the gathers, the bytes and the time on each
    link."""
    found: list[dict[str, object]] = []
    for num in rows:
        met = meeting(body, ranks, num)
        times = {link.name: met.seconds(link) * 1e3 for link in LINKS}
        found.append({"rows": num, "gathers": met.gathers, "sent_bytes": met.num_bytes, "ms": times})
    return found
