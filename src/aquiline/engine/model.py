"""What an engine runs: target, draft and tokenizer, loaded once, checked against each other, in their runners."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from aquiline.config import MAX_NODES, EngineConfig, Environment, SpecConfig
from aquiline.kv import view
from aquiline.kv.pool import KVGeometry, new_group
from aquiline.models.config import DraftConfig, ModelConfig
from aquiline.models.decoder import Decoder
from aquiline.models.draft_config import NO_OVERRIDES, DraftOverrides, read_draft
from aquiline.models.eagle import DraftHead
from aquiline.models.formats import load_draft
from aquiline.models.load import check_fits, load_target, read_model_config, resolve
from aquiline.models.runner import (
    DraftRunner,
    NativeDraft,
    NativeTarget,
    TargetRunner,
    TorchDraft,
    TorchTarget,
    resolve_arithmetic,
    use_native,
    weight_bytes,
)
from aquiline.ops import cpu
from aquiline.ops.cycle import NativeCycle, Side, SlotState
from aquiline.ops.quantise import QUANTISED
from aquiline.spec.accept import accept, accept_native
from aquiline.spec.drafters import DraftSession
from aquiline.spec.simulate import SimulatedAcceptance
from aquiline.spec.tree import DraftTree
from aquiline.text.tokenizer import load_tokenizer
from aquiline.types import AcceptResult, Int32, KVGroup, Rows, kv_dtype


@dataclass(frozen=True, eq=False)
class LoadedModels:
    """Target, optional draft and tokenizer, ready to run; shared by any number of engines, one at a time."""

    target: TargetRunner
    draft: DraftRunner | None
    tokenizer: Tokenizer | None
    target_config: ModelConfig
    draft_config: DraftConfig | None
    dtype: torch.dtype  # of KV
    storage: str  # the `dtype` setting
    arithmetic: str
    max_rows: int
    is_native: bool
    weight_bytes: int
    simulated: SimulatedAcceptance | None = None  # random weights only: a fixed acceptance length

    @property
    def vocab_size(self) -> int:
        """Rows of the target's embedding."""
        return self.target_config.vocab_size

    @property
    def max_positions(self) -> int:
        """Positions the target was built for."""
        return self.target_config.max_positions

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.target_config.eos_token_ids

    def new_target_kv(self, num_pages: int, page_size: int) -> KVGroup:
        """Storage for the target's keys and values."""
        return new_group(geometry(self.target_config), num_pages, page_size, self.dtype)

    def new_draft_kv(self, num_pages: int, page_size: int) -> KVGroup:
        """Storage for the draft's keys and values, under the same page table."""
        assert self.draft_config is not None
        return new_group(geometry(self.draft_config.model), num_pages, page_size, self.dtype)

    def kv_bytes_per_token(self) -> tuple[int, int]:
        """KV bytes of one token: the target's, the draft's."""
        target = geometry(self.target_config).bytes_per_token(self.dtype)
        return target, geometry(self.draft_config.model).bytes_per_token(self.dtype) if self.draft_config else 0

    def new_cycle(self, rows: Rows, kv: KVGroup, slots: SlotState, session: DraftSession | None) -> NativeCycle | None:
        """What runs whole cycles in one call over these buffers; None where there is no such thing."""
        if self.simulated is not None or not isinstance(self.target, NativeTarget):
            return None
        target, draft = Side(self.target.model, kv, rows, self.target.hidden), None
        if session is not None:
            if not isinstance(session.runner, NativeDraft):
                return None
            draft = session.runner.side(session.kv, session.rows)
        return NativeCycle(target, self.target.features, slots, draft)

    def move_kv(self, kv: KVGroup, page_table: Int32, slots: Int32, src: Int32, dst: Int32) -> None:
        """Copy keys and values of every layer from KV index src[i] to dst[i] of slots[i], in order."""
        move = cpu.move_kv if self.is_native else view.move_kv
        move(kv, page_table, *(np.ascontiguousarray(a, np.int32) for a in (slots, src, dst)))

    def accept(self, tree: DraftTree, drawn: Int32) -> AcceptResult:
        """Select each slot's path given the token drawn [R] at every row."""
        if self.simulated is not None:
            return self.simulated(tree, drawn)
        return accept_native(tree, drawn) if self.is_native else accept(tree, drawn)

    def check_spec(self, spec: SpecConfig) -> None:
        """Raises ValueError if there is no draft, or a tree asks for more children than its vocabulary has."""
        if self.draft_config is None:
            raise ValueError(f"drafter={spec.drafter!r}: no draft model is loaded; pass one or use drafter='none'")
        widths = {"chain": 1, "dynamic": spec.top_k, "static": 1 + max(rank for p in spec.static_paths for rank in p)}
        width = widths[spec.drafter]
        size = self.draft_config.draft_vocab_size
        if width > size:
            raise ValueError(f"draft_top_k={width}: the draft's vocabulary has {size} tokens")

    def system(self) -> dict[str, object]:
        """What ran, for results: library, instruction set, arithmetic, versions."""
        torch_system: dict[str, object] = {"isa": "torch", "threads": torch.get_num_threads()}
        ran = dict[str, object](cpu.system()) if self.is_native else torch_system
        common: dict[str, object] = {
            "path": "native" if self.is_native else "torch",
            "exact_trees": self.is_native,
            "dtype": self.storage,
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        return common | ran | {"arithmetic": self.arithmetic}


def load_models(
    target: str | Path,
    draft: str | Path | None,
    dtype: str,
    config: EngineConfig,
    environment: Environment,
    arithmetic: str = "auto",
    overrides: DraftOverrides = NO_OVERRIDES,
) -> LoadedModels:
    """Load and pack a target and its draft, whose checkpoint's own words `overrides` may replace.

    Raises CheckpointError listing everything that is wrong or does not fit, OutOfMemory, and ValueError for an
    arithmetic this machine or dtype does not have."""
    target_dir = resolve(target)
    draft_dir = resolve(draft) if draft is not None else None
    capture: tuple[int, ...] = ()
    if draft_dir is not None:
        reading = read_draft(draft_dir, read_model_config(target_dir), overrides)
        capture = () if reading.problems else reading.config.capture  # load_draft lists the problems, tensors' too
    check_fits([target_dir] + ([draft_dir] if draft_dir is not None else []), dtype)
    decoder = load_target(target_dir, dtype=dtype, capture=capture)
    head = None
    if draft_dir is not None:
        head = load_draft(
            draft_dir, decoder, dtype=dtype, capture=overrides.capture, norm_feedback=overrides.norm_feedback
        )
    return from_modules(decoder, head, load_tokenizer(target_dir), dtype, config, environment, arithmetic)


def from_modules(
    decoder: Decoder,
    head: DraftHead | None,
    tokenizer: Tokenizer | None,
    dtype: str,
    config: EngineConfig,
    environment: Environment,
    arithmetic: str = "float32",
) -> LoadedModels:
    """Put loaded modules into the runners this machine has. Raises ValueError for an arithmetic it does not have."""
    is_native = use_native(environment)
    arithmetic = resolve_arithmetic(arithmetic, dtype, is_native)
    quantised = dtype if dtype in QUANTISED else None
    num_bytes = weight_bytes([decoder] if head is None else [decoder, head], quantised)
    max_rows = config.row_budget + config.max_batch * MAX_NODES
    new_target: Callable[[Decoder, int], TargetRunner] = partial(TorchTarget, dtype=quantised)
    new_draft: Callable[[DraftHead, int], DraftRunner] = partial(TorchDraft, dtype=quantised)
    if is_native:
        new_target = partial(NativeTarget, arithmetic=arithmetic, dtype=quantised)
        new_draft = partial(NativeDraft, arithmetic=arithmetic, dtype=quantised)
    return LoadedModels(
        target=new_target(decoder, max_rows),
        draft=new_draft(head, max_rows) if head is not None else None,
        tokenizer=tokenizer,
        target_config=decoder.config,
        draft_config=head.config if head is not None else None,
        dtype=kv_dtype(dtype),
        storage=dtype,
        arithmetic=arithmetic,
        max_rows=max_rows,
        is_native=is_native,
        weight_bytes=num_bytes,
    )


def geometry(config: ModelConfig) -> KVGeometry:
    """What one token of a model stores."""
    return KVGeometry(config.num_layers, config.num_kv_heads, config.head_dim)


def cpu_name() -> str:
    """The processor's name as the operating system reports it and, since virtual machines shorten it, the family and
    model that tell generations apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    numbers = [f"{name.removeprefix('cpu ')} {fields[name]}" for name in ("cpu family", "model") if name in fields]
    return " ".join([fields.get("model name") or platform.processor() or platform.machine(), *numbers])
