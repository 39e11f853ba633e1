"""Pairs of random weights on one GPU, and what their decode steps take. A step's time depends on neither the weights'
values nor what is accepted, so contexts are seated as hits of a prefix cache whose keys are random."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from aquiline.backends.base import Admit, Chunk, Decode, Pages, Pending, Sizes, StepInput
from aquiline.backends.gpu.gpu_backend import GpuBackend
from aquiline.backends.gpu.weights import DeviceDraft, DeviceModel, DeviceStorage
from aquiline.bench.theory.ceilings import Ceilings
from aquiline.bench.theory.roofline import Roofline
from aquiline.blocks import Array, Parts, Weight
from aquiline.config import SamplingParams
from aquiline.models.counting import draft_shape_of, shape_of
from aquiline.models.model_config import DraftConfig, ModelConfig
from aquiline.models.model_weights import AttentionWeights, DenseWeights, DraftWeights, LayerWeights, ModelWeights
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.launches import TorchCall
from aquiline.ops.triton.tile_table import TileTable
from aquiline.spec.drafting import Drafting

PAGE_SIZE = 16
PARTS = {"draft": ("EAGLE_DRAFT",), "verify": ("BASE_",), "rest": ("HOST", "EAGLE_TREE", "EAGLE_ACCEPT", "EAGLE_TAIL")}
"""Parts of a step by how the names of their launches begin."""


class RandomStorage(DeviceStorage):
    """Puts normal values of a weight's shape on the device, in the place of its own; norms stay as they are."""

    def put(self, weight: Parts | Array) -> Tensor:
        """See DeviceStorage."""
        if not isinstance(weight, tuple):
            return super().put(weight)
        n, k = sum(part.shape[0] for part in weight), weight[0].shape[1]
        return torch.randn(n, k, device=self.device, dtype=self.dtype).mul_(k**-0.5)


def _weight(n: int, k: int) -> Parts:
    return (Weight("bfloat16", (n, k), partial(np.zeros, (n, k))),)


def _model(c: ModelConfig, inputs: int, vocab_size: int, **settings: object) -> ModelWeights:
    """A dense decoder of weights that have shapes and no values. inputs: of a layer's qkv."""
    ones, heads = np.ones(c.hidden_size, np.float32), (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    attention = AttentionWeights(
        _weight(heads, inputs), _weight(c.hidden_size, c.num_heads * c.head_dim),
        np.zeros(heads, np.float32) if c.qkv_bias else None,
    )  # fmt: skip
    mlp = DenseWeights(
        _weight(2 * c.intermediate_size, c.hidden_size), _weight(c.hidden_size, c.intermediate_size)
    )  # fmt: skip
    layer = LayerWeights(attention, mlp, ones, ones, ones if inputs > c.hidden_size else None)
    embed, head = _weight(c.vocab_size, c.hidden_size), _weight(vocab_size, c.hidden_size)
    return ModelWeights(c, embed, (layer,) * c.num_layers, ones, head, **settings)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class RandomPair:
    """A pair of a geometry on one device, and the configs that its ideal follows from."""

    target: DeviceModel
    draft: DeviceDraft
    table: TileTable

    @classmethod
    def new(
        cls, target: ModelConfig, draft: DraftConfig, dtype: torch.dtype, device: torch.device, table: TileTable
    ) -> RandomPair:
        """Random weights in a dtype; the draft shares the target's embedding."""
        storage, own = RandomStorage(dtype, device), _model(target, target.hidden_size, target.vocab_size)
        own = replace(own, capture=draft.capture)
        model = _model(draft.model, 2 * draft.model.hidden_size, draft.draft_vocab_size, is_draft=True)
        model = replace(model, embed=own.embed)
        fc = _weight(draft.model.hidden_size, len(draft.capture) * draft.target_hidden_size)
        weights = DraftWeights(draft, model, fc, np.zeros(draft.draft_vocab_size, np.int64))
        on_device = DeviceModel.of(own, storage)
        return cls(on_device, DeviceDraft.of(weights, storage, own, on_device.embed), table)

    def roofline(self, ceilings: Ceilings) -> Roofline:
        """The ideal of this pair on a device."""
        shape = shape_of(self.target.config, str(self.target.dtype).removeprefix("torch."))
        return Roofline(shape, draft_shape_of(self.draft.config, shape), ceilings)


class Decoding:
    """Sequences that decode together behind contexts of one length, a multiple of PAGE_SIZE.

    room: tokens that each may write."""

    def __init__(self, pair: RandomPair, batch: int, context: int, room: int) -> None:
        per_slot = -(-(context + room) // PAGE_SIZE)
        sizes = Sizes(batch, batch * per_slot, PAGE_SIZE, per_slot, PAGE_SIZE)
        self.backend = GpuBackend(pair.target, pair.draft, pair.target.dtype, sizes, pair.table)
        self.batch, self.context, self.per_slot = batch, context, per_slot
        self.device = pair.target.embed.device
        self.room, self.vocab_size = room, pair.target.config.vocab_size

    def seat(self, way: Drafting, temperature: float) -> list[list[int]]:
        """Seat every sequence anew over the same keys, and draw its first token. Returns the texts, [batch][1]."""
        torch.manual_seed(0)
        draft = self.backend._draft  # its keys and features have no public name
        assert draft is not None
        for stored in (self.backend.storage.k, self.backend.storage.v, draft.storage.k, draft.storage.v, draft.fused):
            stored.normal_()
        tokens = np.random.default_rng(0).integers(1, self.vocab_size, (self.batch, self.context)).tolist()
        texts = []
        for slot, own in enumerate(tokens):
            sampling = SamplingParams(max_tokens=self.room, temperature=temperature, seed=slot, ignore_eos=True)
            admit = Admit(slot, own, self.context, sampling, num_hit=self.context, drafts=way.needs_draft_model)
            pages = Pages(slot, 0, tuple(range(slot * self.per_slot, (slot + 1) * self.per_slot)))
            chunk = Chunk(slot, self.context - 1, self.context, True, True)
            [prefilled] = self.backend.step(StepInput(chunks=(chunk,), admits=(admit,), pages=(pages,))).read().chunks
            texts.append([-1 if prefilled.first_token is None else prefilled.first_token])
        return texts

    def decode(self, way: Drafting, num_steps: int, texts: list[list[int]]) -> None:
        """Decode steps, each issued before the last was read; what they keep is added to the texts."""
        step, last = StepInput(tuple(Decode(slot, way) for slot in range(self.batch))), None
        for _ in range(num_steps):
            pending = self.backend.step(step)
            add(last, texts)
            last = pending
        add(last, texts)

    def measure(self, way: Drafting, num_steps: int) -> dict[str, float]:
        """Milliseconds of a whole step as the host sees it, and of its parts as the device does."""
        texts = self.seat(way, 0.0)
        self.decode(way, 2, texts)
        began = time.perf_counter()
        self.decode(way, num_steps, texts)
        found = {"step_ms": 1e3 * (time.perf_counter() - began) / num_steps}
        [program] = self.backend.programs.values()
        for part, names in PARTS.items():
            launches = [own for own in program.launches if own.name.startswith(names)]
            found[f"{part}_ms"] = ms_of(launches, self.device) if launches else 0.0
        return found


def add(pending: Pending | None, texts: list[list[int]]) -> None:
    """Read a step, if there is one, and add the tokens that it kept."""
    if pending is not None:
        for text, decoded in zip(texts, pending.read().decodes, strict=True):
            text += decoded.kept


@torch.inference_mode()
def ms_of(launches: Iterable[Launch | TorchCall], device: torch.device, repeats: int = 5) -> float:
    """Milliseconds of launches, the median of a few runs after one: on a CUDA device as one graph."""
    each = list(launches)

    def run() -> None:
        for own in each:
            own.run()

    return ms_of_call(run, device, repeats)


def ms_of_call(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The same of a call that allocates nothing or is captured with what it allocates."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    found = list[float]()
    for _ in range(repeats):
        began = time.perf_counter()
        if device.type == "cuda":
            first, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record(), run(), end.record()
            end.synchronize()
            found.append(first.elapsed_time(end))
        else:
            run()
            found.append(1e3 * (time.perf_counter() - began))
    return statistics.median(found)
