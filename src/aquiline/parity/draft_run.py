"""The reference draft at the rows that a run has seen: known rows from the target's layers, drafted ones from its own
states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from aquiline.parity.record import DRAFT_STAGES, Row, StageRecord
from aquiline.parity.reference_draft import Array, ReferenceDraft, Stages
from aquiline.parity.stage_figures import TOP


class DraftRun:
    """A reference draft over a text of n tokens. layers [n - 1, L, Ht]: what every target layer gave at all but the
    last."""

    def __init__(self, draft: ReferenceDraft, tokens: tuple[int, ...], layers: Array) -> None:
        self.draft, self.tokens = draft, tokens
        self.features: Array = layers[:, list(draft.capture)]
        self.known = draft.rows(draft.fuse(self.features), np.array(tokens[1:]), 0)
        self.nodes: dict[Row, Stages] = {}

    def at(self, row: Row) -> Mapping[str, Array]:
        """The stages [1, W] of a draft row."""
        if row.depth:
            return self._node(row)
        j = row.position - 1
        return {name: values[j : j + 1] for name, values in self.known.items()}

    def _node(self, row: Row) -> Stages:
        if row not in self.nodes:
            above = Row(row.tokens[:-1], row.depth - 1)
            parent, j = self.at(above), row.position - 1
            stages = self.known if above.depth == 0 else parent
            before = stages["all_keys"], stages["all_values"]
            if above.depth == 0:  # a root's node sees the known rows up to the root's own
                before = before[0][:j], before[1][:j]
            g = self.draft.feedback(parent["pre_head_hidden"])
            self.nodes[row] = self.draft.rows(g, np.array(row.tokens[-1:]), j, before)
        return self.nodes[row]

    def record(self, seen: StageRecord, rows: Iterable[Row]) -> StageRecord:
        """All stages at draft rows, and the features at the tokens of the text, for a comparison with what was seen."""
        found = StageRecord(seen.prompt, seen.text)
        for row in seen.stages.get("draft.features", ()):
            if row.tokens == self.tokens[: len(row.tokens)] and row.position < len(self.features):
                found.add("draft.features", [row], self.features[row.position].reshape(1, -1))
        for row in rows:
            if row.position == 0 or (row.depth == 0 and row.tokens != self.tokens[: len(row.tokens)]):
                continue
            stages = self.at(row)
            for name in DRAFT_STAGES:
                if name in stages:
                    found.add(f"draft.{name}", [row], stages[name])
            found.add("draft.tokens", [row], self.draft.best_ids(stages["logits"], TOP).astype(np.float32))
        return found
