"""The models that the benchmark suite runs on: checkpoints, or random weights of a config with a simulated tau."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from aquiline.bench.suite.suite_plan import RandomWeights
from aquiline.blocks import BLOCK_TYPES, PACKED
from aquiline.config import Environment, PairConfig
from aquiline.engine.model import LoadedModels, Loading, for_checkpoint, from_modules, load_models
from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead
from aquiline.models.known_pairs import PairCheckpoints, checkpoints
from aquiline.models.load import read_model_config, resolve
from aquiline.models.model_config import DraftConfig, ModelConfig, RopeConfig, default_capture
from aquiline.types import storage_dtype

RANDOM = ModelConfig(
    family="llama", vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=4, num_heads=8, num_kv_heads=4,
    head_dim=64, max_positions=131_072, rms_norm_eps=1e-5, rope=RopeConfig(),
)  # fmt: skip
"""The small random-weight target of the CPU profile's long contexts."""
SIMULATED_TAU = 2.5


@dataclass(frozen=True)
class ModelSource:
    """Where the models of a suite come from: checkpoints, or random weights of a config with a fixed tau."""

    target: str | None = None
    draft: str | None = None
    dtype: str = "auto"
    draft_dtype: str = "auto"
    arithmetic: str = "auto"
    random_config: ModelConfig | None = None
    simulated_tau: float | None = None

    @property
    def names(self) -> tuple[str, str | None]:
        """Target and draft as a reader of results would know them."""
        if self.random_config is not None:
            c = self.random_config
            shape = f"{c.num_layers}x{c.hidden_size}, heads {c.num_heads}/{c.num_kv_heads}, MLP {c.intermediate_size}"
            return f"random {c.family} {shape}, vocabulary {c.vocab_size}", "random EAGLE-3 head"
        return self._named.names

    def load(self) -> LoadedModels:
        """Load or make the models."""
        if self.random_config is not None:
            return random_models(self.random_config, self._how)
        return load_models(self._named.target, self._named.draft, self._how, Environment.read())

    def stores(self, dtype: object) -> bool:
        """Whether a result's dtype is what these models are stored as."""
        if self.random_config is not None:
            return dtype == self._how.settled.dtype
        expected = for_checkpoint(self._how, resolve(self._named.target), Environment.read()).dtype
        return str(dtype).partition("+")[0].upper() in BLOCK_TYPES if expected == PACKED else dtype == expected

    @property
    def _named(self) -> PairCheckpoints:
        return checkpoints(self.target, self.draft)

    @property
    def _how(self) -> Loading:
        return Loading(self.dtype, self.arithmetic, draft_dtype=self.draft_dtype)


def sources_of(pair: PairConfig, random: RandomWeights) -> tuple[ModelSource, ModelSource]:
    """The models of scenarios, and those of scenarios that need random weights."""
    plain = ModelSource(pair.target, pair.draft, pair.dtype, pair.draft_dtype, pair.arithmetic)
    if random.random_weights is None:
        small = replace(plain, target=None, draft=None, random_config=RANDOM, simulated_tau=SIMULATED_TAU)
        return plain, small
    tau = random.simulate_tau or SIMULATED_TAU
    own = replace(plain, random_config=random_config(random.random_weights), simulated_tau=tau)
    return own, own


def random_models(config: ModelConfig, how: Loading) -> LoadedModels:
    """A target with random weights and a draft head of its width, by a fixed seed."""
    L = config.num_layers
    capture = default_capture(L) if L >= 7 else tuple(sorted({0, L // 2, L - 1}))
    head = DraftConfig(
        model=replace(config, num_layers=1), draft_vocab_size=min(config.vocab_size, 32_000),
        target_hidden_size=config.hidden_size, capture=capture,
    )  # fmt: skip
    decoder, draft = Decoder(config, capture=capture), DraftHead(head)
    generator = torch.Generator().manual_seed(0)
    for module in (decoder, draft):
        for name, weight in module.named_parameters():
            scale = (
                torch.ones(weight.shape) if "norm" in name else 0.02 * torch.randn(weight.shape, generator=generator)
            )
            weight.data = scale.to(storage_dtype(how.settled.dtype))
    draft.d2t.zero_()
    return from_modules(decoder, draft, None, how, Environment.read())


def random_config(path: str) -> ModelConfig:
    """The shapes of a config.json, or of the directory that holds one."""
    file = Path(path)
    directory = file if file.is_dir() else file.parent
    if not (directory / "config.json").exists() or (file.is_file() and file.name != "config.json"):
        raise ValueError(f"random_weights={path!r}: name a config.json or the directory that holds one")
    return read_model_config(directory)
