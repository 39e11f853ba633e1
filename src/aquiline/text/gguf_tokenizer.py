"""Tokenizer, chat template and special tokens of a GGUF file, from its metadata.

A file names the rule that cuts text into words before merges apply (tokenizer.ggml.pre). The rule decides token ids,
those of digits above all, so a name that is not known here is refused; no other rule is used instead.

Source: ggml-org/llama.cpp@00ad355, src/llama-vocab.cpp, for what the names mean and for what holds where a field is
missing; the patterns are those of the models' own tokenizer.json, where llama.cpp quotes them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from aquiline.errors import CheckpointError
from aquiline.models.gguf.metadata import CONTROL, UNKNOWN, USER_DEFINED, special_ids
from aquiline.models.gguf.reader import GGUFFile, read_gguf

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Words:
    """How text is cut into words. Each pattern in turn cuts the pieces of the one before: a match is a piece, and so is
    the text between two matches.

    is_known_whole: a word that is in the vocabulary becomes that token, whatever the merges say. adds_bos: bos stands
    before a text unless the file says otherwise."""

    patterns: tuple[str, ...]
    is_known_whole: bool = False
    adds_bos: bool = False


_GROUPS = {
    Words((_LLAMA3,), is_known_whole=True, adds_bos=True): (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    ),
    Words((_LLAMA3,)): ("smaug-bpe", "dbrx"),
    Words((_QWEN2,)): ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    Words((_TEKKEN,), is_known_whole=True, adds_bos=True): ("tekken",),
    Words((_GPT4O,)): ("gpt-4o",),
    Words((r"\p{N}", _GPT2)): (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ),
    Words((_GPT2,)): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum"),
    Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
}  # fmt: skip
WORDS = {name: words for words, names in _GROUPS.items() for name in names}
"""The supported values of tokenizer.ggml.pre."""


def gguf_tokenizer(file: Path) -> Tokenizer | None:
    """The tokenizer that a GGUF file describes; None where it has none (token ids in, token ids out).

    Control tokens in a text are encoded whole and count as special; tokens that their maker defined are encoded whole.
    Raises CheckpointError for a kind of tokenizer that is not supported, or metadata that are broken."""
    gguf = read_gguf(file)
    model = gguf.text("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise CheckpointError(f"{file}: tokenizer.ggml.model={model!r}; supported are {', '.join(builders)}, none")
    tokens = gguf.strings("tokenizer.ggml.tokens")
    if len(set(tokens)) < len(tokens):
        [(common, times)] = Counter(tokens).most_common(1)
        raise CheckpointError(f"{file}: tokenizer.ggml.tokens has {common!r} {times} times; convert the model again")
    try:
        tokenizer = builders[model](gguf, tokens)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: its tokenizer cannot be built ({error}); convert the model again") from None
    _add_special(tokenizer, gguf, tokens)
    return tokenizer


def chat_template(file: Path) -> str | None:
    """A GGUF file's chat template, as Jinja source; None without one."""
    return read_gguf(file).text("tokenizer.chat_template")


def special_tokens(file: Path) -> dict[str, str]:
    """Texts of a GGUF file's special tokens, by the names that chat templates use: bos_token, eos_token, unk_token,
    pad_token, as far as there are any."""
    gguf = read_gguf(file)
    if "tokenizer.ggml.tokens" not in gguf.fields:
        return {}
    tokens, ids = gguf.strings("tokenizer.ggml.tokens"), special_ids(gguf)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return {names[name]: _text_of(gguf, tokens, name, i) for name, i in ids.items() if name in names}


def _text_of(gguf: GGUFFile, tokens: list[str], name: str, index: int) -> str:
    if index >= len(tokens):
        raise CheckpointError(f"{gguf.path}: tokenizer.ggml.{name}_token_id={index}; there are {len(tokens)} tokens")
    return tokens[index]


def _words(gguf: GGUFFile) -> Words:
    name = gguf.text("tokenizer.ggml.pre")
    if name not in WORDS:
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.pre={name!r}; supported are {', '.join(WORDS)}. To set it in a file "
            "without one: gguf-new-metadata --pre-tokenizer NAME"
        )
    return WORDS[name]


def _byte_level(gguf: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE: the tokens are spelled in GPT-2's alphabet of bytes."""
    words = _words(gguf)
    merges = [_pair(merge) for merge in gguf.strings("tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=words.is_known_whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    _add_ends(tokenizer, gguf, tokens, adds_bos=words.adds_bos)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """The halves of a merge; the first may begin with a space."""
    cut = merge.find(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(gguf: GGUFFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE. The file has no merges, but a score for every token; merges follow from the scores."""
    scores = gguf.numbers("tokenizer.ggml.scores", len(tokens))
    unknown = _text_of(gguf, tokens, "unknown", special_ids(gguf)["unknown"])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for i, token in sorted(enumerate(tokens), key=lambda item: -scores[item[0]])
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = gguf.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        *([decoders.Strip(" ", 1, 0)] if prefixed else []),
    ])  # fmt: skip
    _add_ends(tokenizer, gguf, tokens, adds_bos=True)
    return tokenizer


def _add_ends(tokenizer: Tokenizer, gguf: GGUFFile, tokens: list[str], *, adds_bos: bool) -> None:
    """Put bos and eos around a text where the file wants them."""
    wanted = {
        "bos": gguf.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": gguf.flag("tokenizer.ggml.add_eos_token", False),
    }
    ids = special_ids(gguf)
    ends = {name: _text_of(gguf, tokens, name, ids[name]) for name, on in wanted.items() if on and name in ids}
    if ends:
        before, after = ([ends[name]] if name in ends else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(text, ids[name]) for name, text in ends.items()]
        )


def _add_special(tokenizer: Tokenizer, gguf: GGUFFile, tokens: list[str]) -> None:
    """Encode special tokens and those that the maker defined as a whole, wherever they stand in a text."""
    if "tokenizer.ggml.token_type" not in gguf.fields:
        return
    kinds = gguf.numbers("tokenizer.ggml.token_type", len(tokens))
    for wanted, is_special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        added = [
            AddedToken(token, normalized=False, special=is_special)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in wanted
        ]
        tokenizer.add_special_tokens(added) if is_special else tokenizer.add_tokens(added)
