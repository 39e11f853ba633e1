"""The models that an engine runs: a pair in this machine's backend and its tokenizer, checked against each other."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from aquiline.backends.base import Pair
from aquiline.backends.choose import LoadPair, new_pair, path_of, runs_natively
from aquiline.blocks import PACKED
from aquiline.config import Environment, PairConfig, ParallelMode, SamplingParams
from aquiline.engine.grammar import Grammars
from aquiline.models.draft_config import NO_OVERRIDES, DraftOverrides, read_draft, read_draft_config
from aquiline.models.families import has_blocks
from aquiline.models.files import TensorSource
from aquiline.models.fingerprint import fingerprint
from aquiline.models.formats import read_draft_weights
from aquiline.models.known_pairs import checkpoints, draft_of
from aquiline.models.load import check_fits, open_tensors, read_model_config, resolve, target_of
from aquiline.models.model_config import DraftConfig, ModelConfig
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.ops.allocator import give_back
from aquiline.ops.quantise import GROUP, stored_sizes
from aquiline.spec.drafting import Drafting
from aquiline.text.chat_template import ChatTemplate
from aquiline.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Loading:
    """Settings by which a pair is loaded. dtype, draft_dtype, arithmetic, kv_dtype and device: see LLM. overrides:
    settings that replace those of a draft's checkpoint."""

    dtype: str = "auto"
    arithmetic: str = "auto"
    kv_dtype: str = "auto"
    device: str = "cpu"
    overrides: DraftOverrides = NO_OVERRIDES
    draft_dtype: str = "auto"
    tensor_parallel_size: int = 1
    parallel_mode: ParallelMode = "gather"

    @property
    def settled(self) -> Loading:
        """The same with dtypes in place of "auto": bfloat16, and for the draft the target's, int4 beside blocks."""
        dtype = "bfloat16" if self.dtype == "auto" else self.dtype
        draft = self.draft_dtype
        if draft == "auto":
            draft = "int4" if dtype == PACKED else dtype
        return replace(self, dtype=dtype, draft_dtype=draft)

    def for_draft(self, draft: DraftConfig) -> Loading:
        """The same for a draft of that geometry: beside blocks, one whose widths int4 cannot hold is bfloat16."""
        own = draft.model
        widths = (own.hidden_size, own.intermediate_size, own.num_heads * own.head_dim, draft.target_hidden_size)
        if self.dtype == PACKED and self.draft_dtype == "int4" and any(width % GROUP for width in widths):
            return replace(self, draft_dtype="bfloat16")
        return self


@dataclass(frozen=True, eq=False)
class LoadedModels:
    """Target, optional draft and tokenizer, ready to run; any number of engines share them."""

    pair: Pair
    tokenizer: Tokenizer | None
    storage: str  # the target's `dtype`; of packed blocks their types, as "q4_1+q8_0" with the head's after the plus
    weight_bytes: int
    draft_storage: str | None = None  # the draft's
    checkpoint: Path | None = None  # where the target was read from; None for modules that were made in memory

    @property
    def target_config(self) -> ModelConfig:
        """The target's geometry."""
        return self.pair.target

    @property
    def draft_config(self) -> DraftConfig | None:
        """The draft's geometry; None without a draft."""
        return self.pair.draft

    @property
    def arithmetic(self) -> str:
        """The arithmetic that weights are multiplied in."""
        return self.pair.arithmetic

    @property
    def vocab_size(self) -> int:
        """Rows of the target's embedding."""
        return self.pair.target.vocab_size

    @property
    def max_positions(self) -> int:
        """Positions the target was built for."""
        return self.pair.target.max_positions

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.pair.target.eos_token_ids

    def end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end a text under these parameters."""
        return sampling.ends(self.eos_token_ids)

    @cached_property
    def template(self) -> ChatTemplate:
        """The target's chat template. Raises CheckpointError if it is broken or ends answers with a token that the
        model does not have."""
        template = ChatTemplate(None, {}, self.tokenizer)
        if self.checkpoint is not None:
            template = ChatTemplate.load(self.checkpoint, self.tokenizer)
        template.check_ends(self.vocab_size)
        return template

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars that answers may follow. Raises ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("structured: needs a tokenizer, and none is loaded")
        return Grammars(self.tokenizer, self.vocab_size)

    def check_drafting(self, drafting: Drafting) -> None:
        """Raises ValueError if `drafting` needs a draft model and none is loaded, or if a tree asks for more children
        than the draft's vocabulary has."""
        if not drafting.needs_draft_model:
            return
        if self.draft_config is None:
            raise ValueError(
                f"drafter={drafting.name!r}: no draft model is loaded; pass one or use drafter='lookup' or 'none'"
            )
        size = self.draft_config.draft_vocab_size
        if drafting.width > size:
            raise ValueError(f"draft_top_k={drafting.width}: the draft's vocabulary has {size} tokens")

    def token_sequences(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids that write each word, at the start of a text and after a space. Raises ValueError without a
        tokenizer, and for a word with a token that the tokenizer has and the model has not."""
        if not words:
            return ()
        if self.tokenizer is None:
            raise ValueError(f"bad_words={list(words)!r}: needs a tokenizer, and none is loaded")
        found: dict[tuple[int, ...], None] = {}  # in order, each once
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
                if max(ids, default=0) >= self.vocab_size:
                    raise ValueError(
                        f"bad_words={word!r}: is written with token {max(ids)}, and the model has tokens "
                        f"0 to {self.vocab_size - 1}, so it never writes that; leave the word out"
                    )
                found.update({ids: None} if ids else {})
        return tuple(found)

    def system(self) -> dict[str, object]:
        """The facts that results state of a run: library, instruction set, arithmetic, versions."""
        common: dict[str, object] = {
            "path": self.pair.name,
            "exact_trees": self.pair.is_exact,
            "dtype": self.storage,
            **({} if self.draft_storage is None else {"draft_dtype": self.draft_storage}),
            "kv_dtype": self.pair.kv_dtype,
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        return common | self.pair.system() | {"arithmetic": self.pair.arithmetic}


@dataclass(frozen=True)
class ResolvedPair:
    """A pair whose checkpoints were found and whose dtypes are settled; nothing is loaded. `asked`: the settings before
    they were settled; `how`: after."""

    target: Path
    draft: Path | None
    asked: Loading
    how: Loading
    environment: Environment

    @classmethod
    def find(
        cls, target: str | Path, draft: str | Path | None, asked: Loading, environment: Environment
    ) -> ResolvedPair:
        """The checkpoints that paths, hub ids and names of known pairs mean. Raises CheckpointError for one that is not
        there, ValueError for settings this machine does not have."""
        place = resolve(target)
        draft_place = None if draft is None else resolve(draft_of(draft))
        return cls(place, draft_place, asked, for_checkpoint(asked, place, environment), environment)

    @classmethod
    def of(cls, pair: PairConfig, drafting: Drafting | None = None) -> ResolvedPair:
        """The checkpoints of a pair that settings name, without a draft model that `drafting` does not use. Raises as
        `find`."""
        named, overrides = checkpoints(pair.target, pair.draft), DraftOverrides(pair.capture, pair.norm_feedback)
        asked = Loading(
            pair.dtype, pair.arithmetic, pair.kv_dtype, pair.device, overrides, pair.draft_dtype,
            pair.tensor_parallel_size, pair.parallel_mode,
        )  # fmt: skip
        draft = named.draft if drafting is None or drafting.needs_draft_model else None
        return cls.find(named.target, draft, asked, Environment.read())

    def identity(self, drafting: Drafting) -> dict[str, object]:
        """Everything but the sampling on which results depend: checkpoints by their bytes, how they run, and how the
        draft is used.

        Loads nothing, so that results of another pair are refused before weights are read. Raises CheckpointError for a
        checkpoint that cannot be read, ValueError for settings that this machine does not have."""
        dtype, overrides = self.how.dtype, self.asked.overrides
        path = path_of(self.asked.device, self.asked.arithmetic, self.asked.kv_dtype, dtype, self.environment)
        if self.asked.parallel_mode == "reduce":
            path |= {"parallel_mode": "reduce", "ranks": str(self.asked.tensor_parallel_size)}
        draft: object = None
        if drafting.needs_draft_model and self.draft is not None:
            config = read_draft_config(
                self.draft, self.target, capture=overrides.capture, norm_feedback=overrides.norm_feedback
            )
            draft = [fingerprint(self.draft), asdict(config), asdict(drafting)]
        elif drafting.is_speculative:
            draft = drafting.as_dict()
        target = fingerprint(self.target)
        return {"target": target, "draft": draft, "dtype": dtype, **path}

    @property
    def draft_storage(self) -> str:
        """How the draft is stored where it serves. Raises CheckpointError for a draft that cannot be read."""
        if self.draft is None or self.asked.draft_dtype != "auto":
            return self.how.draft_dtype
        draft = read_draft(self.draft, read_model_config(self.target), self.how.overrides)
        return self.how.for_draft(draft.config).draft_dtype

    def draft_weights(self, checkpoint: Path) -> DraftWeights:
        """The weights of another draft of the target's, to replace the pair's: Pair.replace_draft. Raises
        CheckpointError as `load`."""
        how, config = replace(self.how, draft_dtype=self.draft_storage), read_model_config(self.target)
        draft = read_pair(config, open_tensors(self.target), checkpoint, how, is_checked=False)[1]
        assert draft is not None
        return draft

    def load(self) -> LoadedModels:
        """Load and pack the models.

        Raises CheckpointError listing everything that is wrong or does not fit, OutOfMemory, and ValueError for
        settings this machine does not have."""
        how, config = replace(self.how, draft_dtype=self.draft_storage), read_model_config(self.target)
        target, draft = read_pair(config, open_tensors(self.target), self.draft, how)
        with ThreadPoolExecutor(1) as beside:  # packing is the library's, and leaves the interpreter to the tokenizer
            tokenizer = beside.submit(load_tokenizer, self.target)
            load = partial(read_share, self.target, self.draft, how)
            models = from_weights(target, draft, None, how, self.environment, load)
        models = replace(models, tokenizer=tokenizer.result(), checkpoint=self.target)
        give_back()
        return models


def read_pair(
    config: ModelConfig, tensors: TensorSource, draft: Path | None, how: Loading, *, is_checked: bool = True
) -> tuple[ModelWeights, DraftWeights | None]:
    """The weights of a target, from its geometry and tensors, and of its draft, from a directory. `how` is settled.
    is_checked: whether they must fit into the free memory.

    Raises CheckpointError listing everything that is wrong or does not fit, and OutOfMemory."""
    capture: tuple[int, ...] = ()
    fitting = {tensors: how.dtype}
    if draft is not None:
        reading = read_draft(draft, config, how.overrides)
        capture = () if reading.problems else reading.config.capture  # which read_draft_weights lists, tensors' too
        fitting[open_tensors(draft)] = how.draft_dtype
    if is_checked:
        check_fits(fitting)
    target = target_of(config, tensors, dtype=how.dtype, capture=capture)
    if draft is None:
        return target, None
    wanted, fed_back = how.overrides.capture, how.overrides.norm_feedback
    return target, read_draft_weights(draft, target, dtype=how.draft_dtype, capture=wanted, norm_feedback=fed_back)


def read_share(target: Path, draft: Path | None, how: Loading) -> tuple[ModelWeights, DraftWeights | None]:
    """The weights of a pair for a rank that packs its share of them; rank 0 has checked that all fit."""
    return read_pair(read_model_config(target), open_tensors(target), draft, how, is_checked=False)


def load_models(target: str | Path, draft: str | Path | None, how: Loading, environment: Environment) -> LoadedModels:
    """Load and pack a target and its draft. Raises as ResolvedPair.find and ResolvedPair.load do."""
    return ResolvedPair.find(target, draft, how, environment).load()


def for_checkpoint(how: Loading, target: Path, environment: Environment) -> Loading:
    """The settings with dtypes to load: if none is named, a checkpoint's own blocks if it has any and the native
    library runs, else bfloat16.

    Raises ValueError for blocks that nothing here can multiply."""
    native = runs_natively(how.device, environment)
    if how.dtype == PACKED and not native:
        raise ValueError("dtype='packed': only the native library multiplies blocks; use dtype='bfloat16'")
    if how.draft_dtype == PACKED:
        raise ValueError("draft_dtype='packed': a draft has no blocks; use 'bfloat16', 'int8' or 'int4'")
    if how.dtype == "auto" and native and how.arithmetic in ("auto", "float32", "int8") and has_blocks(target):
        how = replace(how, dtype=PACKED)
    return how.settled


def from_weights(
    target: ModelWeights,
    draft: DraftWeights | None,
    tokenizer: Tokenizer | None,
    how: Loading,
    environment: Environment,
    load: LoadPair | None = None,
) -> LoadedModels:
    """Pack weights for the backend this machine has. load: finds them again, for the processes of other ranks. Raises
    ValueError for settings it does not have, and CheckpointError for weights that cannot be read."""
    how = how.settled
    draft_dtype = None if draft is None else how.draft_dtype
    pair = new_pair(
        target, draft, how.dtype, how.arithmetic, how.kv_dtype, how.device, environment, draft_dtype,
        how.tensor_parallel_size, load, how.parallel_mode,
    )  # fmt: skip
    return LoadedModels(pair, tokenizer, storage_of(target, how.dtype), stored_bytes(target, draft, how), draft_dtype)


def storage_of(target: ModelWeights, dtype: str) -> str:
    """The storage of the target's linears: `dtype`, or the type of most blocks of its layers and, if it differs, the
    type of the head's."""
    sizes: Counter[str] = Counter()
    for layer in target.layers:
        for _, parts in layer.named():
            if isinstance(parts, tuple):
                sizes.update({part.kind.lower(): part.num_bytes for part in parts if part.is_blocks})
    if not sizes:
        return "bfloat16" if dtype == PACKED else dtype
    kind, head = sizes.most_common(1)[0][0], target.head[0]
    other = head.kind.lower() if head.is_blocks else "bfloat16" if dtype == PACKED else dtype
    return kind if other == kind else f"{kind}+{other}"


def stored_bytes(target: ModelWeights, draft: DraftWeights | None, how: Loading) -> int:
    """Bytes of the pair's weights in storage. An embedding that both models read counts once."""
    sizes = stored_sizes(target.named(), how.dtype)
    return sum((sizes if draft is None else sizes | stored_sizes(draft.named(), how.draft_dtype)).values())


def cpu_name() -> str:
    """The processor's name as the operating system reports it, with family and model: virtual machines may shorten the
    name, and family and model still tell the generation."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    numbers = [f"{name.removeprefix('cpu ')} {fields[name]}" for name in ("cpu family", "model") if name in fields]
    return " ".join([fields.get("model name") or platform.processor() or platform.machine(), *numbers])
