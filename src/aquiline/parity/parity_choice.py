"""What a comparison of stages is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aquiline.config import check
from aquiline.settings import setting
from aquiline.writing import check_place

DUMP, MIN_LENGTH = "dump:", 4
REFERENCES = ("both", "transformers", "eager")


@dataclass(frozen=True)
class ParityChoice:
    """What is compared with what, over which prompt."""

    reference: str = setting(
        "both", "transformers: the target's stages beside transformers in float32; eager: the draft's beside a float32 "
        "draft of its own; both; or dump:DIR, what another engine or run computed (docs/parity.md).",
    )  # fmt: skip
    stages: tuple[str, ...] = setting(
        (), "Only these: target, draft, layers, logits, target.layers.3, draft.keys ... Default: all that can be seen."
    )
    prompt: str | None = setting(None, "Text of the prompt. Default: a short one of prose and code.")
    length: int = setting(160, "Tokens of the prompt: the text is repeated and cut to it.")
    dump: Path | None = setting(None, "Also write what this run computed to a new directory, as a dump.")

    def __post_init__(self) -> None:
        from aquiline.parity.record import MANIFEST, check_names  # reads arrays, which --help must not wait for

        ok = self.reference in REFERENCES or self.reference.startswith(DUMP)
        check(ok, "reference", self.reference, f"must be one of {', '.join(REFERENCES)}, or dump:DIR")
        check(self.reference != DUMP, "reference", DUMP, "names no directory; must be dump:DIR")
        ok = MIN_LENGTH <= self.length <= 4096
        check(ok, "length", self.length, f"must be from {MIN_LENGTH} to 4096 tokens")
        check(self.prompt != "", "prompt", self.prompt, "is empty; give at least one character")
        check_names(self.stages)
        taken = self.dump is not None and (self.dump / MANIFEST).exists()
        check_place(self.dump, is_folder=True)
        check(not taken, "dump", str(self.dump), "is a dump already; name another directory, or remove this one")

    def compares(self, model: str, reference: str) -> bool:
        """Whether stages of a model, target or draft, are to be compared with that reference."""
        from aquiline.parity.record import models_of

        return self.reference in ("both", reference) and model in models_of(self.stages)
