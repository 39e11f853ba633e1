"""What `model.generate` was asked for, as prompts and sampling parameters of the engine. What the engine cannot do is
refused by name, before anything is packed or computed.

Source of the classes and of what they do: transformers 5.24, generation/{logits_process,stopping_criteria}.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.logits_process import (
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

from aquiline.config import SamplingParams
from aquiline.engine.sequence import TextEdit
from aquiline.types import Float32

_OTHER_MODES = (
    "num_beams", "num_beam_groups", "penalty_alpha", "constraints", "force_words_ids", "dola_layers",
    "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp",
)  # fmt: skip
_MORE_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_PREPARED = ("attention_mask", "position_ids", "cache", "past_key_values", "logits_to_keep", "use_cache")
"""What `generate` itself adds to a call."""

_STAGES: dict[type[LogitsProcessor], int] = {
    RepetitionPenaltyLogitsProcessor: 0,
    NoBadWordsLogitsProcessor: 0,
    MinLengthLogitsProcessor: 0,
    MinNewTokensLengthLogitsProcessor: 0,
    SuppressTokensLogitsProcessor: 0,
    TemperatureLogitsWarper: 1,
    TopKLogitsWarper: 2,
    TopPLogitsWarper: 3,
    MinPLogitsWarper: 4,
    LogitNormalization: 5,
}
"""Processors that become sampling parameters, and the order in which the engine applies them. Those of stage 0 may
stand in any order; those after it decide among tokens that are drawn, and change nothing greedily."""


@dataclass
class Arguments:
    """A call of `generate`. length: tokens of the padded prompts; prompts: without padding; criteria: those that run on
    the host after each token; pad: what shorter rows end with; on_host: processors that run at every node of a tree."""

    length: int
    prompts: list[list[int]]
    ends: frozenset[int]
    max_length: int
    criteria: StoppingCriteriaList
    is_sampled: bool
    pad: int | None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    on_host: list[LogitsProcessor] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)

    def sampling(self) -> list[SamplingParams]:
        """The parameters of each row. Seeds are drawn from torch's generator, so `torch.manual_seed` decides them; rows
        of one prompt differ. Raises ValueError naming a value out of range."""
        most = self.max_length - self.length
        common = {
            "temperature": 1.0 if self.is_sampled else 0.0,
            "min_tokens": min(self.min_tokens, most),
        } | self.params
        common |= {"max_tokens": most, "ignore_eos": True, "stop_token_ids": tuple(sorted(self.ends))}
        rows = len(self.prompts)
        seeds = torch.randint(2**63 - 1, (rows,)).tolist() if self.is_sampled else [0] * rows
        return [SamplingParams(**common, seed=seed) for seed in seeds]

    def read_processors(self, processors: list[LogitsProcessor], host_processors: bool) -> None:
        """Take over what the processors do. With host_processors, those that the engine cannot stand in for run on the
        host, and so do those beside them that would change places; without, they are refused: raises ValueError naming
        one."""
        if host_processors and any(type(processor) not in _STAGES for processor in processors):
            stages = [_STAGES.get(type(processor)) for processor in processors]
            first = next(i for i, stage in enumerate(stages) if stage != 0)
            end = max(i for i, stage in enumerate(stages) if not stage) + 1
            self.on_host, processors = processors[first:end], processors[:first] + processors[end:]
        seen: list[type[LogitsProcessor]] = []
        for processor in processors:
            kind = type(processor)
            if kind not in _STAGES:
                known = ", ".join(each.__name__ for each in _STAGES)
                told = f"{kind.__name__}: is a logits processor that does not run here; there are {known}"
                raise ValueError(
                    f"{told}. One that is a function of (input_ids, scores) alone runs on the host with "
                    "speculative(host_processors=True)"
                )
            if kind in seen or (seen and _STAGES[kind] < _STAGES[seen[-1]]):
                before = f"{seen[-1].__name__}: the order here is temperature, top-k, top-p, min-p, each once"
                raise ValueError(f"{kind.__name__}: stands after {before}")
            _check_filter(processor)
            seen.append(kind)
            if self.is_sampled or not _STAGES[kind]:
                self._read(processor)

    def check_host(self, input_ids: Tensor, vocab_size: int) -> None:
        """Try the processors of the host on rows [B, L]. Raises ValueError naming one whose scores depend on earlier
        calls or on other rows, as far as that shows."""
        scores = torch.randn(len(input_ids), vocab_size, generator=torch.Generator().manual_seed(0))
        scores = scores.to(input_ids.device)
        for processor in self.on_host:
            together = processor(input_ids, scores.clone())
            for row, expected in enumerate(together):
                found = _of_row(processor, row, len(scores), input_ids[row], scores[row])
                if not torch.allclose(found, expected, equal_nan=True):
                    name = type(processor).__name__
                    raise ValueError(f"{name}: is no function of a row's (input_ids, scores) alone; leave it out")
            scores = together

    def edits(self, input_ids: Tensor) -> list[TextEdit | None]:
        """What the processors of the host do with the logits of each row [L], padding included."""
        if not self.on_host:
            return [None] * len(self.prompts)
        processors, device = LogitsProcessorList(self.on_host), input_ids.device

        def edit(row: int, tokens: Sequence[int], logits: Float32) -> None:
            padding = input_ids[row, : self.length - len(self.prompts[row])]
            with torch.inference_mode(False), torch.no_grad():
                ids = torch.cat((padding, padding.new_tensor(tokens)))
                scores = _of_row(processors, row, len(input_ids), ids, torch.from_numpy(logits).to(device))
            logits[:] = scores.float().cpu().numpy()

        return [partial(edit, row) for row in range(len(input_ids))]

    def _read(self, processor: LogitsProcessor) -> None:
        match processor:
            case RepetitionPenaltyLogitsProcessor():
                self._check_counted(processor.prompt_ignore_length)
                self.params["repetition_penalty"] = float(processor.penalty)
            case NoBadWordsLogitsProcessor():
                self.bad_words = tuple(processor.sequence_bias)
            case SuppressTokensLogitsProcessor():
                self.params["logit_bias"] = dict.fromkeys(processor.suppress_tokens.tolist(), -math.inf)
            case MinLengthLogitsProcessor():
                self._need_tokens(processor, processor.min_length)
            case MinNewTokensLengthLogitsProcessor():
                self._need_tokens(processor, processor.prompt_length_to_skip + processor.min_new_tokens)
            case TemperatureLogitsWarper():
                self.params["temperature"] = float(processor.temperature)
            case TopKLogitsWarper():
                self.params["top_k"] = int(processor.top_k)
            case TopPLogitsWarper():
                self.params["top_p"] = float(processor.top_p)
            case MinPLogitsWarper():
                self.params["min_p"] = float(processor.min_p)

    def _need_tokens(self, processor: Any, length: int) -> None:
        """No end before a row, its padding included, has that length."""
        forbidden = _ids(processor.eos_token_id)
        if forbidden != self.ends:
            name = type(processor).__name__
            raise ValueError(f"{name}: forbids {sorted(forbidden)}, and rows end at {sorted(self.ends)}; use the same")
        self.min_tokens = max(self.min_tokens, length - self.length)

    def _check_counted(self, ignored: Tensor | int | None) -> None:
        """The engine's repetition penalty counts a whole prompt, and no padding."""
        padding = torch.tensor([self.length - len(prompt) for prompt in self.prompts])
        if ignored is not None and not (torch.as_tensor(ignored).cpu() == padding).all():
            raise ValueError(
                f"RepetitionPenaltyLogitsProcessor: prompt_ignore_length={ignored}: the whole prompt counts here; "
                "leave it out"
            )


def read_arguments(
    input_ids: Tensor, criteria: Iterable[StoppingCriteria], config: GenerationConfig, rest: Mapping[str, Any]
) -> Arguments:
    """The arguments as `generate` prepared them, except its processors. rest: all further keyword arguments.

    Raises ValueError naming an argument that the engine cannot obey, and its value."""
    _refuse_modes(config)
    _refuse_inputs(rest)
    max_length, ends, others = config.max_length, frozenset[int](), StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            max_length = min(max_length, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            ends |= _ids(criterion.eos_token_id)
        else:
            others.append(criterion)
    pad = getattr(config, "_pad_token_tensor", None)
    if others and pad is None and len(input_ids) > 1:
        names = ", ".join(type(each).__name__ for each in others)
        raise ValueError(f"pad_token_id=None: rows that {names} may end early need one; pass pad_token_id")
    prompts = _prompts(input_ids, rest)
    is_sampled = bool(config.do_sample)
    pad_id = None if pad is None else int(pad)
    return Arguments(input_ids.shape[1], prompts, ends, max_length, others, is_sampled, pad_id)


def _refuse_modes(config: GenerationConfig) -> None:
    told = "is another way to generate than drawing one token after the other; leave it out"
    for name in _OTHER_MODES:
        value = getattr(config, name, None)
        if value is not None and value not in (0, 1):
            raise ValueError(f"{name}={value!r}: {told}")
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise ValueError(f"generation mode {mode!r}: {told}")
    for name in _MORE_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name):
            raise ValueError(f"{name}=True: the engine does not keep them; leave it out")


def _refuse_inputs(rest: Mapping[str, Any]) -> None:
    for name, value in rest.items():
        if name not in _PREPARED and value is not None:
            raise ValueError(f"{name}: is an argument of the model's forward, which does not run here; leave it out")


def _prompts(input_ids: Tensor, rest: Mapping[str, Any]) -> list[list[int]]:
    """The rows without their padding. Raises ValueError for a mask that is no left padding, and for other positions."""
    mask = rest.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: is {list(mask.shape)} beside input_ids {list(input_ids.shape)}; pass its like"
        )
    is_token = mask != 0
    for row, kept in enumerate(is_token.tolist()):
        if not kept or not kept[-1] or kept != sorted(kept):
            raise ValueError(f"attention_mask: row {row} has zeros after its first one; pad on the left")
    expected = (is_token.long().cumsum(-1) - 1).clamp(min=0)
    positions = rest.get("position_ids")
    if positions is None:
        positions = expected
    is_other = positions.shape[-1] != expected.shape[-1] or (positions.to(expected.device) != expected)[is_token].any()
    if is_other:
        raise ValueError("position_ids: differ from those that attention_mask implies; leave them out")
    return [ids[kept].tolist() for ids, kept in zip(input_ids, is_token, strict=True)]


def _check_filter(processor: Any) -> None:
    name, filtered = type(processor).__name__, getattr(processor, "filter_value", -math.inf)
    if filtered != -math.inf:
        raise ValueError(f"{name}: filter_value={filtered}: what is filtered is never drawn here; leave it out")
    kept = getattr(processor, "min_tokens_to_keep", 1)
    if kept > 1 and not isinstance(processor, TopKLogitsWarper):  # which has it in its top_k
        raise ValueError(f"{name}: min_tokens_to_keep={kept}: one token is kept here; leave it out")


def _of_row(processor: LogitsProcessor, row: int, num_rows: int, ids: Tensor, scores: Tensor) -> Tensor:
    """What a processor makes of one row's scores [V], given its tokens [L]. A processor may know rows by their numbers,
    so it gets a whole batch, each row of which is this one."""
    changed: Tensor = processor(ids.repeat(num_rows, 1), scores.repeat(num_rows, 1))
    return changed[row]


def _ids(tokens: Tensor) -> frozenset[int]:
    return frozenset(tokens.flatten().tolist())
