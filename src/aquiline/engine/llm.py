"""The offline interface: `LLM(target, draft).generate(prompts)`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from aquiline.config import EngineConfig, Environment, SamplingParams, SpecConfig
from aquiline.engine.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
from aquiline.engine.engine import Engine, new_request
from aquiline.engine.model import LoadedModels, load_models
from aquiline.engine.sequence import Sequence, TokenDelta
from aquiline.metrics import Counters, Meter, RunSummary
from aquiline.models.draft_config import DraftOverrides
from aquiline.types import FinishReason

Prompts = str | list[str] | list[list[int]]


@dataclass(frozen=True)
class Output:
    """One finished request. token_ids include the stop token, text does not; by_draft says per token whether the draft
    wrote it; metrics count this request's steps alone."""

    prompt: str | None
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    by_draft: list[bool]
    metrics: Counters


@dataclass(frozen=True)
class Result:
    """Outputs in prompt order and the figures of the whole run."""

    outputs: list[Output]
    summary: RunSummary


class LLM:
    """A target with or without a draft. Without arguments it is the pair that comes with the package.

    `spec` is the default way to draft: chain where a draft is there, none elsewhere. `dtype` names how weights and KV
    are stored. `arithmetic` "bfloat16" rounds activations too, where the CPU has AVX512_BF16: faster, as exact between
    drafters, but not the text that float32 gives on every CPU. `capture` (target layers whose outputs the draft
    reads) and `norm_feedback` replace what a draft's checkpoint says or leaves open. Raises CheckpointError before the
    first token if anything is wrong or does not fit, ValueError for settings that cannot work.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        spec: SpecConfig | None = None,
        dtype: str = "bfloat16",
        arithmetic: str = "float32",
        device: str = "cpu",
        engine: EngineConfig | None = None,
        capture: tuple[int, ...] | None = None,
        norm_feedback: bool | None = None,
    ) -> None:
        if device != "cpu":
            raise ValueError(f"device={device!r}: this version runs on 'cpu'")
        if target is None:
            is_plain = spec is not None and spec.drafter == "none"
            target, draft = BUNDLED_TARGET, draft or (None if is_plain else BUNDLED_DRAFT)
        config = engine or EngineConfig()
        models = load_models(
            target, draft, dtype, config, Environment.read(), arithmetic, DraftOverrides(capture, norm_feedback)
        )
        self._start(models, config, spec)

    @classmethod
    def from_models(cls, models: LoadedModels, config: EngineConfig, spec: SpecConfig | None = None) -> LLM:
        """An LLM over models that are already loaded."""
        llm = cls.__new__(cls)
        llm._start(models, config, spec)
        return llm

    def _start(self, models: LoadedModels, config: EngineConfig, spec: SpecConfig | None) -> None:
        self.models = models
        self.spec = spec or SpecConfig(drafter="none" if models.draft is None else "chain")
        self.engine = Engine(models, config)
        self.engine.configure(self.spec)

    def generate(self, prompts: Prompts, sampling: SamplingParams | None = None) -> list[Output]:
        """Continue one prompt or many, text or token ids; outputs in the order of the prompts."""
        return self.run(prompts, sampling).outputs

    def run(
        self,
        prompts: Prompts,
        sampling: SamplingParams | None = None,
        *,
        spec: SpecConfig | None = None,
        on_delta: Callable[[TokenDelta], None] | None = None,
    ) -> Result:
        """`generate` with the run's figures, another SpecConfig for this call, and deltas as they come."""
        sampling = sampling or SamplingParams()
        batch: list[str | list[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        engine = self.engine
        engine.configure(spec or self.spec)
        engine.meter = Meter()
        sequences: list[Sequence] = []
        texts: dict[int, list[str]] = {}
        try:
            for index, prompt in enumerate(batch):
                seed = secrets.randbits(64)
                sequences.append(engine.add(new_request(index, self.encode(prompt), sampling, seed)))
                texts[index] = []
            while engine.is_busy:
                for delta in engine.step():
                    texts[delta.request_id].append(delta.text)
                    if on_delta is not None:
                        on_delta(delta)
        except BaseException:
            engine.reset()
            raise
        outputs = [
            self._output(prompt, sequence, "".join(texts[sequence.request.id]))
            for prompt, sequence in zip(batch, sequences, strict=True)
        ]
        return Result(outputs, engine.meter.summary())

    def encode(self, prompt: str | Iterable[int] | int) -> list[int]:
        """Token ids of a prompt, with the tokens its tokenizer puts around a text. Raises ValueError without one."""
        if isinstance(prompt, int):
            raise ValueError(f"prompts=[{prompt}, ...]: token ids come as a list per prompt; write [[{prompt}, ...]]")
        if not isinstance(prompt, str):
            return list(prompt)
        if not prompt:  # a tokenizer that adds BOS would make a token of it
            raise ValueError("prompt='': is empty; give at least one character, or token ids")
        if self.models.tokenizer is None:
            raise ValueError(f"prompt={prompt[:40]!r}: the target has no tokenizer.json; pass token ids")
        try:
            ids: list[int] = self.models.tokenizer.encode(prompt).ids
        except TypeError:  # lone surrogates: bytes that were no UTF-8
            raise ValueError(f"prompt={prompt[:40]!r}: holds bytes that are not UTF-8") from None
        return ids

    @staticmethod
    def _output(prompt: str | list[int], sequence: Sequence, text: str) -> Output:
        assert sequence.finish_reason is not None
        return Output(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=list(sequence.request.prompt_ids),
            token_ids=sequence.output_ids,
            text=text,
            finish_reason=sequence.finish_reason,
            by_draft=sequence.by_draft,
            metrics=sequence.counters,
        )
