"""What a run computed, stage by stage and row by row, and the same as a dump on disk that other engines can write.

A row is named by all tokens up to its own, so that two runs that draw other tokens still have their first rows in
common. docs/parity.md describes the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from aquiline.types import Float32

Value = TypeVar("Value")
FORMAT = "aquiline-parity-1"
MANIFEST, TENSORS = "manifest.json", "stages.safetensors"
TARGET_STAGES = ("layers", "final_hidden", "logits")
DRAFT_STAGES = (
    "features", "fc_out", "qkv", "keys", "values", "attn_out", "ffn_out", "pre_head_hidden", "logits", "tokens",
)  # fmt: skip
"""In the order in which they are computed. A stage's name is `target.` or `draft.` before one of these; layers have a
number, as target.layers.3."""


class Row(NamedTuple):
    """tokens: of its text, up to the row's own. depth: 0 for a token of the text, else its level in a drafted tree. A
    draft's row has the token whose embedding it reads last."""

    tokens: tuple[int, ...]
    depth: int = 0

    @property
    def position(self) -> int:
        """Of the row's own token in its text."""
        return len(self.tokens) - 1


@dataclass(eq=False)
class StageRecord:
    """The values of stages at rows, by stage and row. text: the prompt and what was written. unseen: stages that were
    not seen, or not at all rows, and why."""

    prompt: tuple[int, ...]
    text: tuple[int, ...] = ()
    stages: dict[str, dict[Row, Float32]] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)

    def add(self, stage: str, rows: Sequence[Row], values: Float32) -> None:
        """Take values [n, W] of a stage at n rows, as a copy."""
        own = self.stages.setdefault(stage, {})
        own.update(zip(rows, np.array(values, np.float32).reshape(len(rows), -1), strict=True))

    def phase(self, row: Row) -> str:
        """prompt, decode or tree."""
        return "tree" if row.depth else "prompt" if len(row.tokens) <= len(self.prompt) else "decode"

    def rows(self, prefix: str) -> list[Row]:
        """The rows of all stages whose names begin so, shorter ones first."""
        found = {row for name, values in self.stages.items() if name.startswith(prefix) for row in values}
        return sorted(found, key=lambda row: (len(row.tokens), row))

    def only(self, wanted: Collection[str]) -> StageRecord:
        """The stages that names choose, as `check_names` allows them; all if there are none."""

        def chosen(stages: dict[str, Value]) -> dict[str, Value]:
            return {s: v for s, v in stages.items() if not wanted or any(_is_chosen(s, name) for name in wanted)}

        return StageRecord(self.prompt, self.text, chosen(self.stages), chosen(self.unseen))


KNOWN = tuple(f"target.{name}" for name in TARGET_STAGES) + tuple(f"draft.{name}" for name in DRAFT_STAGES)


def check_names(wanted: Iterable[str]) -> None:
    """Raises ValueError for a name that chooses no stage: target, logits, target.layers, draft.keys, layers.3."""
    for name in wanted:
        if not models_of([name]):
            raise ValueError(f"stages={name!r}: must be target, draft, or one of {', '.join(KNOWN)}")


def models_of(wanted: Collection[str]) -> set[str]:
    """The models, target and draft, of which names choose stages; both for no names."""
    plain = [_numberless(name) for name in wanted]
    return {s.partition(".")[0] for s in KNOWN if not wanted or any(_is_chosen(s, name) for name in plain)}


def _numberless(name: str) -> str:
    """A stage's name without a layer's number."""
    return re.sub(r"(layers)\.\d+$", r"\1", name)


def _is_chosen(stage: str, name: str) -> bool:
    return f".{name}." in f".{stage}."


def order_of(stage: str) -> tuple[Any, ...]:
    """Sorts stages as they are computed."""
    model, name, *number = stage.split(".")
    stages = TARGET_STAGES if model == "target" else DRAFT_STAGES
    return model != "target", stages.index(name), *map(int, number)


def save(record: StageRecord, directory: Path) -> None:
    """Write manifest.json and stages.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = record.rows("")
    longest = [row.tokens for row in rows if not any(_extends(other.tokens, row.tokens) for other in rows)]
    texts = list(dict.fromkeys(longest))
    numbers = {row: number for number, row in enumerate(rows)}
    stages, tensors = {}, {}
    for name in sorted(record.stages, key=order_of):
        values = record.stages[name]
        tensors[name] = np.stack(list(values.values()))
        stages[name] = {
            "shape": list(tensors[name].shape), "dtype": "float32", "rows": [numbers[row] for row in values],
        }  # fmt: skip
    manifest = {
        "format": FORMAT, "prompt": record.prompt, "text": record.text, "texts": texts, "stages": stages,
        "unseen": record.unseen,
        "rows": [
            [next(i for i, text in enumerate(texts) if text[: len(row.tokens)] == row.tokens), row.position, row.depth]
            for row in rows
        ],
    }  # fmt: skip
    save_file(tensors, directory / TENSORS)
    (directory / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")


def _extends(other: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    return len(other) > len(tokens) and other[: len(tokens)] == tokens


def load(directory: Path) -> StageRecord:
    """Read a dump. Raises ValueError naming what is missing or does not fit."""
    file = directory / MANIFEST
    try:
        return _read(json.loads(file.read_text(encoding="utf-8")), directory)
    except (OSError, KeyError, IndexError, TypeError, json.JSONDecodeError, SafetensorError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file}: is no dump of stages ({why}); see docs/parity.md") from None


def _read(manifest: dict[str, Any], directory: Path) -> StageRecord:
    if manifest["format"] != FORMAT:
        raise ValueError(f"{directory / MANIFEST}: format={manifest['format']!r}; supported is {FORMAT!r}")
    assert np.dtype("bfloat16") == ml_dtypes.bfloat16, "numpy knows bfloat16 by ml_dtypes"
    texts = [tuple(map(int, text)) for text in manifest["texts"]]
    rows = [Row(texts[text][: position + 1], depth) for text, position, depth in manifest["rows"]]
    record = StageRecord(
        tuple(manifest["prompt"]), tuple(manifest.get("text", ())), unseen=dict(manifest.get("unseen", {}))
    )
    with safe_open(directory / TENSORS, "np") as tensors:
        for name, about in manifest["stages"].items():
            if _numberless(name) not in KNOWN:
                raise ValueError(f"{directory / MANIFEST}: stages={name!r}: must be one of {', '.join(KNOWN)}")
            values, own = tensors.get_tensor(name).astype(np.float32), [rows[i] for i in about["rows"]]
            if values.ndim != 2 or len(values) != len(own):
                raise ValueError(f"{directory / TENSORS}: {name} is {list(values.shape)}; must be [{len(own)}, width]")
            record.add(name, own, values)
    return record
