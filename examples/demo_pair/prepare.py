"""Turn installed Python sources into the corpus of the demo pair.

The standard library of the running interpreter, plus any installed packages named on the command line, become
`train.bin` and `held_out.bin`: uint16 token ids, one document per file, each preceded by `<|endoftext|>` (id 0).
A file is held out when the sha256 of its path (relative to the standard library or to site-packages) is 0 mod 20,
so the split is the same on every machine and no result can influence it.

    python prepare.py --tokenizer tokenizer.json --out corpus --packages sympy numpy --package-share 0.4

Name only packages whose licence lets a model be trained on them and shipped (the bundled pair: see README.md here).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

MIN_CHARS, MAX_CHARS = 200, 400_000
END_OF_TEXT = "<|endoftext|>"


def is_held_out(relative: str) -> bool:
    return int(hashlib.sha256(relative.encode()).hexdigest(), 16) % 20 == 0


def sources(root: Path, base: Path) -> Iterator[tuple[str, str]]:
    """Yield (path relative to base, text) of every readable Python file under root, sorted by path."""
    for path in sorted(root.rglob("*.py")):
        if "lib2to3" in path.parts or ("site-packages" in path.parts) != ("site-packages" in root.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if MIN_CHARS <= len(text) <= MAX_CHARS:
            yield path.relative_to(base).as_posix(), text.expandtabs(4)


def package_root(name: str) -> Path:
    drafting = importlib.util.find_spec(name)
    if drafting is None or not drafting.submodule_search_locations:
        raise SystemExit(f"--packages {name}: not installed as a package; install it or leave it out")
    return Path(next(iter(drafting.submodule_search_locations))).resolve()


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; `<|endoftext|>` is id 0 and stands before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, 0)]
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json; trained and written if absent")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of a tokenizer that is trained")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", nargs="*", default=[], help="installed packages to add")
    parser.add_argument("--package-share", type=float, default=0.4, help="largest share of the corpus from packages")
    args = parser.parse_args()

    stdlib = Path(sysconfig.get_paths()["stdlib"]).resolve()
    documents = {"stdlib": list(sources(stdlib, stdlib))}
    for name in args.packages:
        root = package_root(name)
        documents[name] = list(sources(root, root.parent))
    if args.tokenizer.exists():
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        own = documents["stdlib"]
        tokenizer = train_tokenizer((text for path, text in own if not is_held_out(path)), args.vocab_size)
        args.tokenizer.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(args.tokenizer))

    args.out.mkdir(parents=True, exist_ok=True)
    encoded: dict[str, dict[str, list[list[int]]]] = {}
    for origin, files in documents.items():
        encodings = tokenizer.encode_batch([text for _, text in files], add_special_tokens=False)
        ids = [[0, *e.ids] for e in encodings]
        split: dict[str, list[list[int]]] = {"train": [], "held_out": []}
        for (relative, _), tokens in zip(files, ids, strict=True):
            split["held_out" if is_held_out(relative) else "train"].append(tokens)
        encoded[origin] = split
        print(origin, {name: (len(docs), sum(map(len, docs))) for name, docs in split.items()}, "(files, tokens)")

    stdlib_tokens = sum(map(len, encoded["stdlib"]["train"]))
    budget = int(stdlib_tokens * args.package_share / (1 - args.package_share))
    extra = [doc for name in args.packages for doc in encoded[name]["train"]]
    random.Random(0).shuffle(extra)
    train = list(encoded["stdlib"]["train"])
    for doc in extra:
        if budget < len(doc):
            continue
        budget -= len(doc)
        train.append(doc)
    random.Random(1).shuffle(train)
    held_out = encoded["stdlib"]["held_out"]
    for name, docs in (("train", train), ("held_out", held_out)):
        np.concatenate([np.array(doc, dtype=np.uint16) for doc in docs]).tofile(args.out / f"{name}.bin")
        print(f"{name}.bin: {len(docs)} documents, {sum(map(len, docs))} tokens")


if __name__ == "__main__":
    main()
