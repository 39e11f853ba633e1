"""The callable that `model.generate` runs instead of its own loop, and what models are packed into for it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from aquiline.config import EngineConfig, Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading, from_weights, read_pair
from aquiline.engine.sequence import TokenDelta
from aquiline.errors import NumericalError
from aquiline.models.draft_config import DraftOverrides
from aquiline.models.files import resolve
from aquiline.models.known_pairs import draft_of
from aquiline.models.model_config import ModelConfig
from aquiline.ops.allocator import give_back
from aquiline.spec.drafting import Drafting
from aquiline.spec.registry import drafting_named
from aquiline.transformers.arguments import Arguments, read_arguments
from aquiline.transformers.module_tensors import ModuleTensors, check_parts, config_of, state_of

_WITHOUT_EFFECT = ("cache_implementation", "prefill_chunk_size", "compile_config")


@dataclass(frozen=True, eq=False)
class Speculation:
    """What `speculative` returns: a `custom_generate` for any number of models and calls. Fields as its parameters."""

    draft: Path | None
    drafting: Drafting | None
    asked: Loading
    device: str | None
    engine: EngineConfig
    streamer: BaseStreamer | None
    host_processors: bool

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: list[LogitsProcessor],
        stopping_criteria: list[StoppingCriteria],
        generation_config: GenerationConfig,
        **rest: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Continue int64 input_ids [B, L], padded on the left, as `generate` prepared them. Returns [B, L + N], or
        `generate`'s output object around it.

        Raises ValueError naming an argument or a part of the model that the engine cannot obey, CheckpointError for a
        family that it does not run or a draft that does not fit, NumericalError for logits that are not numbers."""
        _check_lost()
        arguments = read_arguments(input_ids, stopping_criteria, generation_config, rest)
        arguments.read_processors(logits_processor, self.host_processors)
        if arguments.on_host:
            arguments.check_host(input_ids, config_of(model).vocab_size)
        sampling = arguments.sampling()
        if self.streamer is not None and len(input_ids) > 1:
            raise ValueError(f"streamer: takes one row, and there are {len(input_ids)}; pass them one by one")
        unused = [name for name in _WITHOUT_EFFECT if getattr(generation_config, name, None) is not None]
        if unused:
            warnings.warn(f"{', '.join(unused)}: the engine has its own cache and loop; no effect", stacklevel=3)
        packed = _packed(model)
        with packed.lock:
            llm = packed.llm(model, self)
            rows = _Call(llm, arguments, sampling, input_ids, self.streamer).finish()
        pad, longest = arguments.pad or 0, max(map(len, rows))
        padded = input_ids.new_tensor([row + [pad] * (longest - len(row)) for row in rows])
        sequences = torch.cat([input_ids, padded], dim=1)
        return GenerateDecoderOnlyOutput(sequences) if generation_config.return_dict_in_generate else sequences

    def load(self, model: PreTrainedModel, config: ModelConfig) -> LoadedModels:
        """Pack a model's weights and the draft's. Raises as a call does."""
        how = replace(self.asked, device=self.device or str(model.device))
        if how.dtype == "auto":
            how = replace(how, dtype=str(model.dtype).removeprefix("torch."))
        target, draft = read_pair(config, ModuleTensors(model), self.draft, how.settled)
        return from_weights(target, draft, None, how, Environment.read())


def speculative(
    draft: str | Path | None = None,
    drafter: str | Drafting | None = None,
    *,
    streamer: BaseStreamer | None = None,
    host_processors: bool = False,
    dtype: str = "auto",
    draft_dtype: str = "auto",
    arithmetic: str = "auto",
    kv_dtype: str = "auto",
    device: str | None = None,
    engine: EngineConfig | None = None,
    capture: Sequence[int] | None = None,
    norm_feedback: bool | None = None,
) -> Speculation:
    """A `custom_generate` for transformers' `model.generate`, which decodes with an EAGLE-3 draft: a path, a hub id or
    the name of a known pair. Greedily it writes what `generate` writes, as far as both compute the same logits.

    The model's own weights are used: packed at the first call, once for each storage, freed with the model, and packed
    again when they have changed. Threads that use one model take turns.

    drafter: a way to draft or its name; by default adaptively with a draft, else none. dtype: by default the model's.
    device: by default the model's. streamer: gets the prompt and every token of a single row; `generate` does not hand
    its own to a callable. host_processors: whether logits processors that the engine cannot stand in for run on the
    host, at every node; each must be a function of (input_ids, scores) alone. The rest is as in LLM. Raises
    CheckpointError for a draft that is not there, and ValueError for an unknown drafter."""
    drafting = drafting_named(drafter) if isinstance(drafter, str) else drafter
    place = None if draft is None else resolve(draft_of(draft))
    overrides = DraftOverrides(tuple(capture) if capture else None, norm_feedback)
    asked = Loading(dtype, arithmetic, kv_dtype, overrides=overrides, draft_dtype=draft_dtype)
    return Speculation(place, drafting, asked, device, engine or EngineConfig(), streamer, host_processors)


class _Packed:
    """What one model object was packed into, by draft and storage, and the engines over it."""

    def __init__(self) -> None:
        self.lock = RLock()  # a streamer may call generate again
        self._state: tuple[Any, ...] = ()
        self._models: dict[object, LoadedModels] = {}
        self._llms: dict[object, LLM] = {}

    def llm(self, model: PreTrainedModel, how: Speculation) -> LLM:
        """An engine over a model's present weights."""
        config = config_of(model)
        check_parts(model)
        state = config, state_of(model)
        if state != self._state:
            self.drop()
            self._state = state
        storage = how.draft, how.asked, how.device
        if storage not in self._models:
            self._models[storage] = how.load(model, config)
            give_back()
        name = storage, how.engine, how.drafting
        if name not in self._llms:
            self._llms[name] = LLM.from_models(self._models[storage], how.engine, how.drafting)
        return self._llms[name]

    def drop(self) -> None:
        """Free all of it."""
        for llm in self._llms.values():
            llm.close()
        self._llms, self._models, self._state = {}, {}, ()
        give_back()


_PACKED: WeakKeyDictionary[PreTrainedModel, _Packed] = WeakKeyDictionary()
_LOCK = Lock()


def _packed(model: PreTrainedModel) -> _Packed:
    with _LOCK:
        if model not in _PACKED:
            _PACKED[model] = packed = _Packed()
            finalize(model, packed.drop).atexit = False
        return _PACKED[model]


class _Call:
    """One call: rows of a batch on their way through an engine."""

    def __init__(
        self, llm: LLM, arguments: Arguments, sampling: list[SamplingParams], input_ids: Tensor,
        streamer: BaseStreamer | None,
    ) -> None:  # fmt: skip
        first = 1 + max((name for name in llm.engine.sequences if isinstance(name, int)), default=-1)
        self._llm, self._criteria, self._streamer = llm, arguments.criteria, streamer
        self._prompt, self._rows = input_ids.cpu(), {first + i: list[int]() for i in range(len(input_ids))}
        self._padded = dict(zip(self._rows, self._prompt.tolist(), strict=True))
        self._ended: set[int] = set()  # by a criterion
        self._requests = [
            replace(llm.request(name, prompt, params), bad_word_ids=arguments.bad_words, edit=edit)
            for name, prompt, params, edit in zip(
                self._rows, arguments.prompts, sampling, arguments.edits(input_ids), strict=True
            )
        ]
        for request in self._requests:
            llm.engine.check(request)

    def finish(self) -> list[list[int]]:
        """The new tokens of every row, its end token included."""
        if self._streamer is not None:
            self._streamer.put(self._prompt)
        for output in self._llm.outputs(self._requests, self._take):
            if output.error is not None:
                raise NumericalError(output.error)
        if self._streamer is not None:
            self._streamer.end()
        return list(self._rows.values())

    def _take(self, delta: TokenDelta) -> None:
        assert isinstance(delta.request_id, int)
        name, row = delta.request_id, self._rows[delta.request_id]
        for token in delta.token_ids:
            if name in self._ended:
                return
            row.append(token)
            if self._streamer is not None:
                self._streamer.put(torch.tensor([token]))
            if self._criteria and self._criteria(torch.tensor([self._padded[name] + row]), None).any():
                self._ended.add(name)
                if name in self._llm.engine.sequences:
                    self._llm.engine.abort(name)


def _check_lost() -> None:
    """Look at what `generate` was given and does not hand on, or hands on like values of its own: its frame has it.

    Raises ValueError for an assistant and for a cache of the caller's. Warns of a streamer and ends it, so that nobody
    waits for it."""
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return
    given = {**frame.f_locals["kwargs"], **frame.f_locals}
    if given.get("assistant_model") is not None:
        raise ValueError("assistant_model: is another way to draft; leave it out")
    for name in ("cache", "past_key_values"):
        if given.get(name) is not None:
            raise ValueError(f"{name}: the engine has its own cache, which keeps what prompts share; leave it out")
    streamer = given.get("streamer")
    if streamer is not None:
        told = "streamer: transformers does not hand it to custom_generate; pass speculative(streamer=...)"
        warnings.warn(told, stacklevel=4)
        streamer.end()
