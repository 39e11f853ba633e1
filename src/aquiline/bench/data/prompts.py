"""Prompts from real text: held-out excerpts for the demo, and prompts of any exact number of tokens.

Files are taken in the order of the sha256 of their path, never by a result. One file in twenty (hash 0 mod 20) was held
out from the training of the bundled pair (examples/demo_pair/prepare.py).

The demo's rule: the first NUM_PROMPTS files of at least MIN_FILE_TOKENS tokens, of the held-out standard library or of
a package that was not trained on; the prompt is the run of whole lines that ends at the file's middle line and fills at
most PROMPT_TOKENS tokens.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from aquiline.checks import parse_json
from aquiline.engine.model import LoadedModels
from aquiline.models.known_pairs import BUNDLED_TARGET

PROMPT_TOKENS, NUM_PROMPTS = 300, 8
MIN_FILE_TOKENS = 1000
HELD_OUT = 20  # one file in this many
TEXT_SUFFIXES = (".py", ".txt", ".md")


@dataclass(frozen=True)
class Prompt:
    """A prompt's text and the file it comes from."""

    source: str
    text: str


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt of an exact number of tokens: a window of real text. is_held_out: no token of it comes from a file that
    the bundled pair may have been trained on."""

    token_ids: list[int]
    is_held_out: bool


@dataclass(frozen=True)
class RealPrompts:
    """Prompts of one length, and their source as results state it."""

    token_ids: list[list[int]]
    source: str


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file of {"source", "text"}. Raises ValueError naming the bad line."""
    prompts = []
    # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for line ends.
    for number, line in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), 1):
        try:
            row = parse_json(line)
            prompts.append(Prompt(row["source"], row["text"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {number}: needs an object with source and text ({error!r})") from None
    return prompts


def excerpts(tokenizer: Tokenizer, package: str | None = None) -> list[Prompt]:
    """The demo's prompts: NUM_PROMPTS of an installed package, or of the held-out files of this interpreter's standard
    library. Raises ValueError if the package is not installed or too small."""
    files = _package(package) if package is not None else [file for file in _stdlib() if file.is_held_out]
    if not files:
        raise ValueError(f"package={package!r}: not installed as a package here; pip install it or name another")
    prompts: list[Prompt] = []
    for file in sorted(files, key=lambda file: file.digest):
        text = file.read()
        if text is not None and len(tokenizer.encode(text).ids) >= MIN_FILE_TOKENS:
            prompts.append(Prompt(file.name, _middle(tokenizer, text)))
        if len(prompts) == NUM_PROMPTS:
            return prompts
    raise ValueError(
        f"package={package!r}: only {len(prompts)} files of {MIN_FILE_TOKENS} tokens, {NUM_PROMPTS} needed"
    )


def text_prompts(
    token_count: int, count: int, tokenizer: Tokenizer, text_source: str | Path | None = None
) -> list[TokenPrompt]:
    """`count` different prompts of exactly `token_count` tokens, the tokenizer's own tokens before a text included.

    The source is a text file, a folder of .py, .txt and .md files, an installed package, or by default the standard
    library; its files are tokenized one by one, held-out ones first, and cut into windows that do not overlap. The same
    arguments give the same prompts, and a larger count only adds to them. Raises ValueError if the source is not there
    or holds too few tokens."""
    for name, value in (("token_count", token_count), ("count", count)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    before = _tokens_before(tokenizer)
    length = token_count - len(before)
    if length < 1:
        raise ValueError(
            f"token_count={token_count}: the tokenizer starts every text with {len(before)} tokens of its own"
        )
    prompts: list[TokenPrompt] = []
    seen: set[tuple[int, ...]] = set()
    for window in _windows(_files(text_source), tokenizer, length):
        if tuple(window.token_ids) not in seen:
            seen.add(tuple(window.token_ids))
            prompts.append(TokenPrompt(before + window.token_ids, window.is_held_out))
        if len(prompts) == count:
            return prompts
    raise ValueError(
        f"text_source={str(text_source or 'standard library')!r}: holds {len(prompts)} different windows of "
        f"{token_count} tokens, {count} needed; give a larger file, folder or installed package, or ask for less"
    )


def real_prompts(token_count: int, count: int, models: LoadedModels, text_source: str | None) -> RealPrompts:
    """`text_prompts` of a target's vocabulary; by the bundled tokenizer for a target without one."""
    tokenizer = models.tokenizer or Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))
    found = text_prompts(token_count, count, tokenizer, text_source)
    held_out = "held out" if all(prompt.is_held_out for prompt in found) else "partly trained on"
    token_ids = [[token % models.vocab_size for token in prompt.token_ids] for prompt in found]
    return RealPrompts(token_ids, f"{text_source or 'standard library'}, {held_out}")


def _windows(files: Iterable[_File], tokenizer: Tokenizer, length: int) -> Iterator[TokenPrompt]:
    """Cut the files' tokens, end to end, into windows of `length`. Tokens after the last window are not used."""
    stream: list[int] = []
    for file in sorted(files, key=lambda file: (not file.is_held_out, file.digest)):
        text = file.read()
        if text is None:
            continue
        stream += tokenizer.encode(text, add_special_tokens=False).ids
        end = len(stream) - len(stream) % length
        for start in range(0, end, length):
            # Held-out files come first: if the window's last file is held out, so are all files of the window.
            yield TokenPrompt(stream[start : start + length], file.is_held_out)
        del stream[:end]


def _tokens_before(tokenizer: Tokenizer) -> list[int]:
    """The special tokens the tokenizer puts before a text (BOS), without those after a text."""
    encoding = tokenizer.encode("a")
    first = encoding.special_tokens_mask.index(0)
    ids: list[int] = encoding.ids[:first]
    return ids


@dataclass(frozen=True)
class _File:
    """A text file and its name in its source; the hash of the name decides the file's place in the order."""

    path: Path
    name: str
    is_own: bool = False

    @property
    def digest(self) -> int:
        """The sha256 of the name."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16)

    @property
    def is_held_out(self) -> bool:
        """Whether the bundled pair was not trained on it: it is the user's own file, or its name was held out."""
        return self.is_own or self.digest % HELD_OUT == 0

    def read(self) -> str | None:
        """The file's text, None if it is not UTF-8. Tabs of installed files are expanded, as in the bundled pair's
        training."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return None
        return text if self.is_own else text.expandtabs(4)


def _files(text_source: str | Path | None) -> list[_File]:
    if text_source is None:
        return _stdlib()
    path = Path(text_source).expanduser()
    if path.is_file():
        return [_File(path, path.name, is_own=True)]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        return [_File(p, p.relative_to(path).as_posix(), is_own=True) for p in found]
    if files := _package(str(text_source)):
        return files
    raise ValueError(f"text_source={str(text_source)!r}: neither a file or folder nor an installed package")


def _stdlib() -> list[_File]:
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    apart = {"site-packages", "test", "tests"}
    files = [_File(path, path.relative_to(root).as_posix()) for path in root.rglob("*.py")]
    return [file for file in files if not apart & set(file.name.split("/"))]


def _package(name: str) -> list[_File]:
    """The Python files of an installed package; none if no package has that name."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent that is missing, a name that cannot be one
        return []
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations))).resolve()
    return [_File(path, path.relative_to(root.parent).as_posix()) for path in root.rglob("*.py")]


def _middle(tokenizer: Tokenizer, text: str) -> str:
    lines = text.splitlines(keepends=True)
    end = start = len(lines) // 2
    while start > 0 and len(tokenizer.encode("".join(lines[start - 1 : end])).ids) <= PROMPT_TOKENS:
        start -= 1
    return "".join(lines[start:end])
