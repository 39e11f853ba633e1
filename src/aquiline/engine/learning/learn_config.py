"""Settings of a draft that learns from what it serves."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from aquiline.checks import check_fields
from aquiline.config import check
from aquiline.settings import setting

LEARNING = "Learning"


@dataclass(frozen=True)
class LearnConfig:
    """Whether the draft learns, and what that may take. learn None: it does not."""

    learn: Path | None = setting(
        None, "Folder by which the draft learns from the requests that are answered: their token ids are stored there, "
        "of the requests that allow it. Needs the train extra.", LEARNING,
    )  # fmt: skip
    learn_share: float = setting(
        0.1, "Share of the time in which the trainer may run beside requests, at the lowest priority; 0: only while "
        "there are none.", LEARNING,
    )  # fmt: skip
    learn_bytes: int = setting(64 * 2**20, "Bytes of answered requests that are kept; the oldest go.", LEARNING)

    def __post_init__(self) -> None:
        check_fields(self)
        check(0 <= self.learn_share <= 1, "learn_share", self.learn_share, "must be in [0, 1]")
        check(self.learn_bytes >= 2**20, "learn_bytes", self.learn_bytes, "must be at least 1048576 bytes")
        if self.learn is not None and find_spec("torch") is None:
            raise ValueError(f"learn={str(self.learn)!r}: torch is not installed; pip install 'aquiline[train]'")
