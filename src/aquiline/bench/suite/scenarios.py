"""The models that the benchmark suite runs on: checkpoints, or random weights of a config with a simulated tau."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from aquiline.bench.suite.suite_plan import RandomWeights
from aquiline.blocks import BLOCK_TYPES, PACKED, Array
from aquiline.config import Environment, PairConfig
from aquiline.engine.model import LoadedModels, Loading, ResolvedPair, from_weights
from aquiline.models.files import Entry
from aquiline.models.formats import draft_entries, draft_weights
from aquiline.models.known_pairs import checkpoints
from aquiline.models.load import read_model_config, target_entries, target_weights
from aquiline.models.model_config import DraftConfig, ModelConfig, RopeConfig, default_capture
from aquiline.models.parameters import Parameters

RANDOM = ModelConfig(
    family="llama", vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=4, num_heads=8, num_kv_heads=4,
    head_dim=64, max_positions=131_072, rms_norm_eps=1e-5, rope=RopeConfig(),
)  # fmt: skip
"""The small random-weight target of the CPU profile's long contexts."""
SIMULATED_TAU = 2.5


@dataclass(frozen=True)
class ModelSource:
    """Where the models of a suite come from: the checkpoints of a pair, or random weights of a config, stored as the
    pair is, with a fixed tau."""

    pair: PairConfig = field(default_factory=PairConfig)
    random_config: ModelConfig | None = None
    simulated_tau: float | None = None

    @property
    def names(self) -> tuple[str, str | None]:
        """Target and draft as a reader of results would know them."""
        if self.random_config is not None:
            c = self.random_config
            shape = f"{c.num_layers}x{c.hidden_size}, heads {c.num_heads}/{c.num_kv_heads}, MLP {c.intermediate_size}"
            return f"random {c.family} {shape}, vocabulary {c.vocab_size}", "random EAGLE-3 head"
        return checkpoints(self.pair.target, self.pair.draft).names

    def load(self) -> LoadedModels:
        """Load or make the models."""
        if self.random_config is not None:
            return random_models(self.random_config, self._how)
        return ResolvedPair.of(self.pair).load()

    def stores(self, dtype: object) -> bool:
        """Whether a result's dtype is the one that these models are stored in."""
        if self.random_config is not None:
            return dtype == self._how.dtype
        expected = ResolvedPair.of(self.pair).how.dtype
        return str(dtype).partition("+")[0].upper() in BLOCK_TYPES if expected == PACKED else dtype == expected

    @property
    def _how(self) -> Loading:
        return Loading(self.pair.dtype, self.pair.arithmetic, draft_dtype=self.pair.draft_dtype).settled


def sources_of(pair: PairConfig, random: RandomWeights) -> tuple[ModelSource, ModelSource]:
    """The models of scenarios, and those of scenarios that need random weights."""
    if random.random_weights is None:
        return ModelSource(pair), ModelSource(pair, RANDOM, SIMULATED_TAU)
    own = ModelSource(pair, random_config(random.random_weights), random.simulate_tau or SIMULATED_TAU)
    return own, own


class RandomTensors:
    """The tensors of a weight map, made when they are read: norms of ones, all else normal numbers of deviation 0.02
    that follow from the tensor's name."""

    path = Path("random weights")
    readable: tuple[str, ...] = ("F32",)

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._shapes = {entry.source: entry.shape for entry in entries}

    @property
    def names(self) -> list[str]:  # noqa: D102
        return sorted(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:  # noqa: D102
        return self._shapes[name]

    def dtype(self, name: str) -> str:  # noqa: D102
        return "F32"

    def get(self, name: str, index: int | None = None) -> Array:  # noqa: D102
        shape = self._shapes[name] if index is None else self._shapes[name][1:]
        if "norm" in name:
            return np.ones(shape, np.float32)
        generator = np.random.default_rng(zlib.crc32((name if index is None else f"{name}[{index}]").encode()))
        return np.float32(0.02) * generator.standard_normal(shape, np.float32)


def random_head(config: ModelConfig) -> DraftConfig:
    """An EAGLE-3 head of this target's width, with at most 32,000 tokens."""
    L = config.num_layers
    capture = default_capture(L) if L >= 7 else tuple(sorted({0, L // 2, L - 1}))
    return DraftConfig(config.draft_layer, min(config.vocab_size, 32_000), config.hidden_size, capture)


def random_models(config: ModelConfig, how: Loading) -> LoadedModels:
    """A target with random weights and the head that would be published for it, always the same."""
    head, dtype = random_head(config), how.dtype
    of_target, of_draft = target_entries(config), draft_entries(head, "midlayer", embed=False, head=True)
    target = target_weights(config, Parameters(RandomTensors(of_target), of_target, dtype), head.capture)
    own = Parameters(RandomTensors(of_draft), of_draft, dtype)
    draft = draft_weights(head, own, target.embed, own.matrix("head"), np.zeros(head.draft_vocab_size, np.int64))
    return from_weights(target, draft, None, how, Environment.read())


def random_config(path: str) -> ModelConfig:
    """The shapes of a config.json, or of the directory that holds one."""
    file = Path(path)
    directory = file if file.is_dir() else file.parent
    if not (directory / "config.json").exists() or (file.is_file() and file.name != "config.json"):
        raise ValueError(f"random_weights={path!r}: name a config.json or the directory that holds one")
    return read_model_config(directory)
