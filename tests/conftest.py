"""Small random pairs that run in milliseconds, shared by all suites."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from tests import skips

from aquiline.backends.cpu import calls
from aquiline.config import EngineConfig, Environment
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading, from_weights
from aquiline.models.model_config import DraftConfig, ModelConfig, RopeConfig
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.types import storage_dtype

if TYPE_CHECKING:  # a part of the tests runs without torch: make light
    import torch
    from tokenizers import Tokenizer
    from torch import nn

    from aquiline.backends.torch.decoder import Decoder
    from aquiline.backends.torch.eagle import DraftHead

# A busy machine must not fail a property by taking long. The default run draws the same examples every time; `make
# nightly` draws others, which follow from the seed that it prints.
hypothesis.settings.register_profile("aquiline", deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=300, database=None, print_blob=True)
hypothesis.settings.load_profile("aquiline")

TINY = ModelConfig(
    family="llama", vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, max_positions=400, rms_norm_eps=1e-5, rope=RopeConfig(), eos_token_ids=(0,),
)  # fmt: skip
GEMMA: dict[str, Any] = {
    "windows": (9, 9, 0, 9), "local_rope": RopeConfig(100.0), "output_norms": True, "activation": "geglu",
    "embed_scale": 8.0, "query_pre_attn_scalar": 24.0, "qk_norm": True, "tied_head": True,
}  # fmt: skip
"""What makes TINY a model like Gemma 3."""
TINY_CAPTURE = (0, 1, 2)
TINY_DRAFT = DraftConfig(
    model=dataclasses.replace(TINY, num_layers=1), draft_vocab_size=48, target_hidden_size=64, capture=TINY_CAPTURE
)

needs_native = pytest.mark.skipif(
    calls.missing_reason() is not None, reason=f"native library: {calls.missing_reason()}"
)


def init_random(module: nn.Module, seed: int, scale: float = 0.15) -> None:
    """Fill weights so that the model's distributions are neither flat nor frozen."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if "norm" in name:
            weight.data.copy_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
        else:
            weight.data.copy_(scale * torch.randn(weight.shape, generator=generator))


def round_to(module: nn.Module, dtype: torch.dtype) -> None:
    """Store the weights as a checkpoint of that dtype would be loaded."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)


def tiny_pair(seed: int = 0, config: ModelConfig = TINY, draft: DraftConfig = TINY_DRAFT) -> tuple[Decoder, DraftHead]:
    """A random target and a random draft for it: drafts are almost never accepted."""
    import torch

    from aquiline.backends.torch.decoder import Decoder
    from aquiline.backends.torch.eagle import DraftHead

    decoder, head = Decoder(config, capture=draft.capture), DraftHead(draft)
    init_random(decoder, seed)
    init_random(head, seed + 1)
    step = config.vocab_size // draft.draft_vocab_size
    head.d2t.copy_(torch.arange(draft.draft_vocab_size) * (step - 1))
    head.embed.data.copy_(decoder.embed.data)
    return decoder, head


def weights_of(decoder: Decoder, head: DraftHead | None) -> tuple[ModelWeights, DraftWeights | None]:
    """The weights of modules as backends take them."""
    target = decoder.weights()
    if head is None:
        return target, None
    return target, head.weights(target.embed if head.embed is decoder.embed else None)


def from_modules(
    decoder: Decoder, head: DraftHead | None, tokenizer: Tokenizer | None, how: Loading, environment: Environment
) -> LoadedModels:
    """Modules that were made in memory, packed for the backend that the environment names."""
    return from_weights(*weights_of(decoder, head), tokenizer, how, environment)


@lru_cache
def tiny_models(
    dtype: str = "bfloat16",
    seed: int = 0,
    eos_token_ids: tuple[int, ...] = TINY.eos_token_ids,
    draft_window: int = 0,
) -> LoadedModels:
    """A tiny pair in the backend this machine has."""
    import torch

    draft = dataclasses.replace(TINY_DRAFT, model=dataclasses.replace(TINY_DRAFT.model, windows=(draft_window,)))
    decoder, head = tiny_pair(seed, dataclasses.replace(TINY, eos_token_ids=eos_token_ids), draft)
    for module in (decoder, head):
        round_to(module, getattr(torch, storage_dtype(dtype).name))
    return from_modules(decoder, head, None, Loading(dtype), Environment.read())


def engine_config(max_batch: int = 8, row_budget: int = 48, page_size: int = 16, **settings: Any) -> EngineConfig:
    """Small pages and chunks, so that short texts cross many of either, and conservation checked at every step. What a
    run leaves in the prefix cache must not help the next, unless a test is about that. What steps cost is estimated:
    nothing is measured and written to the user's cache. Steps are issued one by one: how many are repeated in one call
    depends on their time, and tests look at what happens in between."""
    settings = {"prefix_cache": False, "check": True, "calibration": False, "num_continuous_decode_steps": 1} | settings
    return EngineConfig(max_batch=max_batch, page_size=page_size, row_budget=row_budget, **settings)


def tiny_llm(
    dtype: str = "bfloat16", max_batch: int = 8, row_budget: int = 48, page_size: int = 16, **settings: Any
) -> LLM:
    """An LLM over a tiny pair; settings are EngineConfig's."""
    return LLM.from_models(tiny_models(dtype), engine_config(max_batch, row_budget, page_size, **settings))


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_worker() -> Iterator[None]:
    with suppress(ModuleNotFoundError):
        import torch

        torch.set_num_threads(1)
    yield


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure on this machine is not what its user's commands go by."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def run_seed(pytestconfig: pytest.Config) -> int:
    """What random traffic follows from: the seed of a nightly run, else 0."""
    return int(pytestconfig.getoption("--hypothesis-seed") or 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail what is skipped for a reason that nobody listed."""
    return skips.judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for modules."""
    return skips.judged((yield))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was skipped and what would run it, and how to repeat a run of random examples."""
    lines = skips.summary(terminalreporter.stats.get("skipped", []))
    if seed := config.getoption("--hypothesis-seed"):
        lines.append(f"examples of seed {seed}: make nightly SEED={seed}")
    for line in lines:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def harmony_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random gpt-oss, which answers in the Harmony format, and a draft for it."""
    from tests.harmony import write_harmony_pair  # which needs torch

    root = tmp_path_factory.mktemp("harmony")
    write_harmony_pair(root)
    return root
