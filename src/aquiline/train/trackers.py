"""Where a run's figures go beside OUT/train.jsonl: TensorBoard and Weights & Biases, both optional packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Takes figures by name, a step at a time."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of one step; steps ascend."""

    def close(self) -> None:
        """Write the figures that were not written yet."""


class TensorBoard:
    """Event files under OUT/tensorboard; a resumed run drops what was logged beyond `after_step`."""

    def __init__(self, out: Path, after_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if after_step is None else after_step + 1
        self.writer: Any = SummaryWriter(str(out / "tensorboard"), purge_step=purge)

    def log(self, step: int, figures: Mapping[str, float]) -> None:  # noqa: D102
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:  # noqa: D102
        self.writer.close()


class WandB:
    """A run in the project "aquiline", with files under OUT/wandb. All commands that train into one OUT form a group.

    WANDB_MODE=offline keeps the run on this machine."""

    def __init__(self, out: Path, after_step: int | None) -> None:
        import wandb

        name = out.resolve().name
        self.run: Any = wandb.init(
            project="aquiline",
            dir=str(out),
            group=name,
            name=name if after_step is None else f"{name} after {after_step}",
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:  # noqa: D102
        self.run.log(dict(figures), step=step)

    def close(self) -> None:  # noqa: D102
        self.run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


def open_trackers(names: tuple[str, ...], out: Path, after_step: int | None) -> list[Tracker]:
    """The trackers of a run. Raises ValueError naming the package that is not installed."""
    trackers: list[Tracker] = []
    for name in names:
        try:
            trackers.append(TRACKERS[name](out, after_step))
        except ImportError as error:
            raise ValueError(f"log={name!r}: {error}; install it with `pip install 'aquiline[log]'`") from None
    return trackers


def flat_figures(prefix: str, record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a log record with names under `prefix/`. Entry k of a list, from 1, is named NAME/k."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        figures = {f"{name}/{k}": v for k, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        flat |= {f"{prefix}/{n}": float(v) for n, v in figures.items() if v is not None and n != "step"}
    return flat
