"""The pair that comes with the package: a small model of Python source, its draft, and held-out prompts."""

from __future__ import annotations

from pathlib import Path

BUNDLED = Path(__file__).resolve().parent.parent / "data" / "demo"
BUNDLED_TARGET = BUNDLED / "target"
BUNDLED_DRAFT = BUNDLED / "draft"
BUNDLED_PROMPTS = BUNDLED / "prompts.jsonl"
