"""Recipes: the settings of a run for one target as a YAML file, in the package by name or anywhere by path.

target:    a folder or a hub id
config:    the numbers of the target's config.json, so that a run can be estimated before anything is fetched
train:     fields of TrainConfig
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from aquiline.errors import CheckpointError
from aquiline.models.counting import shape_of_fields
from aquiline.models.shape import ModelShape
from aquiline.train.train_config import TrainConfig

NOT_IN_RECIPES = ("target", "data", "out", "held_out", "init", "norm_feedback", "resume", "may_differ")
"""Fields of TrainConfig that belong to a run, not to a recipe."""
_PATHS = ("features",)
_FOLDER = files("aquiline") / "data" / "recipes"


@dataclass(frozen=True)
class Recipe:
    """One recipe; `settings` are fields of TrainConfig by name."""

    name: str
    target: str
    shape: ModelShape | None
    settings: dict[str, Any]


def recipe_names() -> list[str]:
    """Names of the recipes in the package, sorted."""
    return sorted(p.name.removesuffix(".yaml") for p in _FOLDER.iterdir() if p.name.endswith(".yaml"))


def read_recipe(name: str) -> Recipe:
    """A recipe by its name in the package, or by the path of a file. Raises ValueError naming what is wrong in it."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ValueError(f"recipe={name}: there is no such file")
        text = path.read_text(encoding="utf-8")
    elif name in recipe_names():
        text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        raise ValueError(f"recipe={name!r}: must be one of {', '.join(recipe_names())}, or a .yaml file")
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"recipe={name}: is not YAML ({error})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("target"), str):
        raise ValueError(f"recipe={name}: must name a target")
    settings, config = raw.get("train") or {}, raw.get("config", {})
    known = [f.name for f in fields(TrainConfig) if f.name not in NOT_IN_RECIPES]
    _refuse_unknown(name, "", raw, ["target", "config", "train"])
    _refuse_unknown(name, "train.", settings, known)
    _refuse_unknown(name, "config.", config)
    settings = {key: _field_value(key, value) for key, value in settings.items()}
    try:
        shape = shape_of_fields(config, Path("config")) if config else None
    except (CheckpointError, ValueError) as error:
        raise ValueError(f"recipe={name}: {error}") from None
    return Recipe(path.stem if path.suffix else name, raw["target"], shape, settings)


def configure(given: Mapping[str, Any], recipe: Recipe | None, *, is_dry: bool = False) -> TrainConfig:
    """The settings of a run: those given, then the recipe's, then the defaults. A dry run needs no data and no out.

    Raises ValueError for settings that are missing or wrong."""
    settings: dict[str, Any] = {} if recipe is None else {"target": Path(recipe.target), **recipe.settings}
    if is_dry:
        settings |= {"data": (Path(),), "out": Path()}
    settings |= given
    missing = [f"--{name}" for name in ("target", "data", "out") if name not in settings]
    if missing:
        hint = "" if recipe else "; or name a --recipe"
        raise ValueError(f"{' and '.join(missing)}: must be given{hint}")
    return TrainConfig(**settings)


def _field_value(name: str, value: Any) -> Any:
    """The value of a field: YAML has neither paths nor tuples."""
    if name in _PATHS and isinstance(value, str):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value


def _refuse_unknown(name: str, prefix: str, section: Any, known: list[str] | None = None) -> None:
    if not isinstance(section, dict):
        raise ValueError(f"recipe={name}: {prefix.rstrip('.')} must be fields with values")
    unknown = [prefix + str(key) for key in section if key not in known] if known else []
    if known and unknown:
        raise ValueError(f"recipe={name}: {', '.join(unknown)}: known are {', '.join(prefix + key for key in known)}")
