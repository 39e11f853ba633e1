"""Ways to draft by their names on command lines and in JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from aquiline.config import check
from aquiline.settings import name_of
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static
from aquiline.spec.lookup import Lookup

DRAFTINGS: dict[str, type[Drafting]] = {kind.name: kind for kind in (NoDraft, Adaptive, Chain, Static, Dynamic, Lookup)}
"""The ways to draft that a command line and a JSON file can name."""


def drafting_named(name: str, **fields: Any) -> Drafting:
    """The way to draft called `name`, with those of `fields` that it has. The other fields belong to other ways.

    Raises ValueError for a name that is not in DRAFTINGS, for a field that none of them has, and for a bad value."""
    check(isinstance(name, str) and name in DRAFTINGS, "drafter", name, f"must be one of {', '.join(DRAFTINGS)}")
    known = {f.name for kind in DRAFTINGS.values() for f in dataclass_fields(kind)}
    for unknown in fields.keys() - known:
        check(False, unknown, fields[unknown], f"no way to draft has this; there are {', '.join(sorted(known))}")
    kind = DRAFTINGS[name]
    own = {f.name for f in dataclass_fields(kind)}
    return kind(**{k: v for k, v in fields.items() if k in own and v is not None})


@dataclass(frozen=True)
class DraftingChoice:
    """A way to draft as a user asks for it: its name, None for the default, and `given`, the values of fields of any
    way by their option names."""

    name: str | None
    given: Mapping[str, Any]

    def value(self, default: str) -> Drafting:
        """The chosen way, with those of the given fields that it has. Raises ValueError as `drafting_named` does.

        If no way is named and the default has none of the given fields, it is the first way that has all of them."""
        name = self.name or self._meant(default)
        kind = DRAFTINGS.get(name, NoDraft)
        return drafting_named(
            name, **{f.name: self.given[name_of(f)] for f in dataclass_fields(kind) if name_of(f) in self.given}
        )

    def _meant(self, default: str) -> str:
        given = set(self.given)
        names = {name: {name_of(f) for f in dataclass_fields(kind)} for name, kind in DRAFTINGS.items()}
        if default == NoDraft.name or not given or given & names[default]:
            return default
        return next((name for name, own in names.items() if given <= own), default)

    def without_effect(self, chosen: Drafting) -> list[str]:
        """Given fields that the chosen way does not have."""
        return [name for name in self.given if name not in map(name_of, dataclass_fields(chosen))]
