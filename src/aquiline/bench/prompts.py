"""Held-out code prompts, picked by a rule and never by a result.

The rule: candidate files in the order of the sha256 of their path, the first `count` of at least MIN_FILE_TOKENS
tokens; the prompt is the run of whole lines that ends at the file's middle line and fills at most PROMPT_TOKENS tokens.
A standard-library file is a candidate when that hash is 0 mod 20 (examples/demo_pair/prepare.py holds those out);
every file of a package that was not trained on is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

PROMPT_TOKENS = 300
MIN_FILE_TOKENS = 1000
HELD_OUT = 20  # one file in this many


@dataclass(frozen=True)
class Prompt:
    """Where a prompt comes from and its text."""

    source: str
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file of {"source", "text"}. Raises ValueError naming the bad line."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            prompts.append(Prompt(row["source"], row["text"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {number}: needs an object with source and text ({error!r})") from None
    return prompts


def stdlib_prompts(tokenizer: Tokenizer, count: int = 8) -> list[Prompt]:
    """Prompts from the held-out files of this interpreter's standard library, its tests apart."""
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    files = [p for p in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(p.relative_to(root).parts)]
    return _pick(tokenizer, root, [p for p in files if _digest(p, root) % HELD_OUT == 0], count)


def package_prompts(name: str, tokenizer: Tokenizer, count: int = 8) -> list[Prompt]:
    """Prompts from an installed package. Raises ValueError if it is not installed or too small."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package={name!r}: not installed as a package here; pip install it or name another")
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    prompts = _pick(tokenizer, root.parent, list(root.rglob("*.py")), count)
    if len(prompts) < count:
        raise ValueError(f"package={name!r}: only {len(prompts)} files of {MIN_FILE_TOKENS} tokens, {count} needed")
    return prompts


def _pick(tokenizer: Tokenizer, base: Path, files: list[Path], count: int) -> list[Prompt]:
    prompts: list[Prompt] = []
    for path, text in _readable(sorted(files, key=lambda p: _digest(p, base))):
        if len(prompts) == count:
            break
        if len(tokenizer.encode(text).ids) >= MIN_FILE_TOKENS:
            prompts.append(Prompt(path.relative_to(base).as_posix(), _middle(tokenizer, text)))
    return prompts


def _readable(files: list[Path]) -> Iterator[tuple[Path, str]]:
    for path in files:
        try:
            yield path, path.read_text(encoding="utf-8").expandtabs(4)
        except UnicodeDecodeError:
            continue


def _middle(tokenizer: Tokenizer, text: str) -> str:
    lines = text.splitlines(keepends=True)
    end = start = len(lines) // 2
    while start > 0 and len(tokenizer.encode("".join(lines[start - 1 : end])).ids) <= PROMPT_TOKENS:
        start -= 1
    return "".join(lines[start:end])


def _digest(path: Path, base: Path) -> int:
    return int(hashlib.sha256(path.relative_to(base).as_posix().encode()).hexdigest(), 16)
