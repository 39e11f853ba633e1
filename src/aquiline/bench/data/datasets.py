"""The questions of a benchmark: a named data set, a local file or a file of the hub, all of it or a sample.

The five names stand for the files that the papers evaluate on. They come from their authors' repositories and are
checked by a hash, because the hub's copies are parquet, subsets or cleaned versions. They are downloaded once, into the
Hugging Face cache of assets.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from aquiline.settings import setting
from aquiline.text.questions import Question, read_questions

DATA = "Questions"
"""The heading under which settings are listed."""

_GITHUB = "https://raw.githubusercontent.com"
_HUB = "hf://datasets/"
_TIMEOUT_S = 30
_PASS_A_PATH = "download it where the network allows and pass its path"


@dataclass(frozen=True)
class Sample:
    """Questions as a user names them: those of a data set, or `count` of them."""

    dataset: str | None = setting(
        None, "mt_bench, gsm8k, humaneval, alpaca, spec_bench, a JSONL, JSON or .txt file, or "
        "hf://datasets/OWNER/NAME/FILE. Default: held-out prompts: a known pair's own, else the bundled ones.", DATA,
    )  # fmt: skip
    count: int | None = setting(None, "Number of questions, taken from the start. Default: all.", DATA)
    sample_seed: int | None = setting(None, "With --count: a sample by this seed.", DATA)

    def __post_init__(self) -> None:
        if self.sample_seed is not None and self.count is None:
            raise ValueError(f"sample_seed={self.sample_seed}: samples --count questions; give --count")


class Source(NamedTuple):
    """A file on the web. digest: the hash that its bytes must have, as algorithm:hex."""

    url: str
    digest: str

    def holds(self, data: bytes) -> bool:
        """Whether these are the expected bytes."""
        algorithm, expected = self.digest.split(":")
        return hashlib.new(algorithm, data, usedforsecurity=False).hexdigest() == expected


SOURCES: Mapping[str, Source] = {
    "mt_bench": Source(
        f"{_GITHUB}/lm-sys/FastChat/587d5cfa1609a43d192cedb8441cac3c17db105d/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "sha256:119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    "gsm8k": Source(
        f"{_GITHUB}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/test.jsonl",
        "sha256:3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    ),
    "humaneval": Source(
        f"{_GITHUB}/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d/data/HumanEval.jsonl.gz",
        "sha256:b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
    "alpaca": Source(
        f"{_GITHUB}/tatsu-lab/stanford_alpaca/761dc5bfbdeeffa89b8bff5d038781a4055f796a/alpaca_data.json",
        "sha256:2eddafc6b977608d778aaab8dfc7e50e547b3af9826dfb9e909d9fc362e4a419",
    ),
    "spec_bench": Source(
        f"{_GITHUB}/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "md5:0c39ae23e6f213549c66d6d691c99034",
    ),
}
"""80, 1319, 164, 52002 and 480 questions. A string that is a name wins over a local file; write ./gsm8k for that."""


def load_questions(source: str | Path, count: int | None = None, seed: int | None = None) -> list[Question]:
    """The questions of mt_bench, gsm8k, humaneval, alpaca, spec_bench, a file, or hf://datasets/OWNER/NAME/FILE.

    count: how many questions; None takes all. They are the first ones, or with a seed a random sample, in the file's
    order. Raises ValueError for a count below 1 or above the number of questions, for a broken row (naming its line)
    and for a file that cannot be fetched."""
    if count is not None and count < 1:
        raise ValueError(f"count={count}: must be at least 1; leave it out for every question")
    questions = list(read_questions(locate(source)))
    if count is None:
        return questions
    if count > len(questions):
        raise ValueError(f"count={count}: {source} holds {len(questions)} questions; ask for at most that many")
    if seed is None:
        return questions[:count]
    return [questions[i] for i in sorted(random.Random(seed).sample(range(len(questions)), count))]


def locate(source: str | Path) -> Path:
    """The local file of a name in SOURCES, of hf://datasets/OWNER/NAME/FILE or of a path, downloaded if necessary.

    Raises ValueError, in one line with the fix, for any other source and for a file that cannot be fetched."""
    if isinstance(source, str) and source in SOURCES:
        return fetch(source, SOURCES[source])
    if isinstance(source, str) and source.startswith(_HUB):
        return _from_hub(source)
    path = Path(source).expanduser()
    if path.is_file():
        return path
    what = "is a folder; name a file" if path.is_dir() else "is no file here"
    raise ValueError(f"dataset={str(source)!r}: {what}, one of {', '.join(SOURCES)}, or {_HUB}OWNER/NAME/FILE")


def fetch(name: str, source: Source, folder: Path | None = None) -> Path:
    """A pinned file, from `folder` (default: the Hugging Face cache of assets) or downloaded into it.

    Raises ValueError if it cannot be downloaded or its bytes are not the expected ones."""
    if folder is None:
        from huggingface_hub import cached_assets_path

        folder = cached_assets_path("aquiline", namespace="datasets", subfolder=name)
    path = folder / source.url.rsplit("/", 1)[1]
    if path.is_file() and source.holds(path.read_bytes()):
        return path
    try:
        with urllib.request.urlopen(source.url, timeout=_TIMEOUT_S) as response:
            data = response.read()
    except (OSError, HTTPException) as error:
        raise ValueError(f"dataset={name!r}: {source.url} cannot be read ({error}); {_PASS_A_PATH}") from None
    if not source.holds(data):
        raise ValueError(f"dataset={name!r}: {source.url} does not hold the pinned file any more; {_PASS_A_PATH}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as partial:  # other processes see all of it or nothing
        partial.write(data)
    return Path(partial.name).replace(path)


def _from_hub(reference: str) -> Path:
    owner, _, rest = reference.removeprefix(_HUB).partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file):
        raise ValueError(f"dataset={reference!r}: must be {_HUB}OWNER/NAME/FILE, down to one file of the repository")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, repo_type="dataset"))
    except Exception as error:  # a transfer that is cut short raises the exceptions of the HTTP library
        reason = " ".join(str(error).split())
        raise ValueError(f"dataset={reference!r}: the hub did not give it ({reason}); {_PASS_A_PATH}") from None
