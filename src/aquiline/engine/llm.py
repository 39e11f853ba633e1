"""The offline interface: `LLM(target, draft).generate(prompts)`."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aquiline.config import EngineConfig, Environment, PairConfig, ParallelMode, SamplingParams
from aquiline.engine.encode import Conversations, encode_chats, encode_prediction, encode_prompt, ending_with
from aquiline.engine.engine import Engine
from aquiline.engine.model import LoadedModels, Loading, ResolvedPair
from aquiline.engine.progress import RequestProgress
from aquiline.engine.sequence import Request, Sequence, TokenDelta
from aquiline.errors import NumericalError
from aquiline.metrics import Counters, RunSummary
from aquiline.models.draft_config import DraftOverrides
from aquiline.models.known_pairs import checkpoints
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Drafting, NoDraft
from aquiline.text.chat_template import ChatTemplate
from aquiline.types import FinishReason, Source, TokenLogprobs

Prompts = str | list[str] | list[list[int]]
Sampling = SamplingParams | list[SamplingParams] | None
Predictions = str | list[str | list[int] | None]


@dataclass(frozen=True)
class Output:
    """One finished request. token_ids include the stop token, text does not. sources name who wrote each token. metrics
    count this request's steps alone. If asked for, logprobs hold one entry per output token, and prompt_logprobs one
    per prompt token but the first. ttft_ms: from the arrival to the first token; total_ms: to the end. error: why
    finish_reason is "error"."""

    request_id: int | str
    prompt: str | None
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    sources: list[Source]
    metrics: Counters
    ttft_ms: float
    total_ms: float
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None

    @property
    def by_draft(self) -> list[bool]:
        """For each token whether it was drafted, by the draft model or as a copy of earlier text."""
        return [source != "target" for source in self.sources]


@dataclass(frozen=True)
class Result:
    """Outputs in prompt order and the figures of the whole run."""

    outputs: list[Output]
    summary: RunSummary


@dataclass(eq=False)
class _Run:
    """One call of `outputs`. live: its requests whose output has not been yielded; arrived: deltas of these requests
    that the call has not handled."""

    live: dict[int | str, Sequence] = field(default_factory=dict)
    arrived: deque[TokenDelta] = field(default_factory=deque)


class LLM:
    """A target with or without a draft, each a path, a hub id or the name of a known pair ("smollm2", "bundled"), whose
    own draft comes with its target. Without arguments it is smollm2 where its weights are installed, else bundled.

    `drafting`: the way to draft; by default Adaptive() if a draft is loaded, else none. `dtype`: how weights are
    stored: bfloat16, float16, float32, int8, int4, or "packed", as a GGUF file has them. "auto" is "packed" for a GGUF
    file, else bfloat16. `draft_dtype`: the same of the draft; "auto" is the target's, and int4 beside packed blocks.
    `kv_dtype`: how keys and values are stored: float32, bfloat16 or int8, which takes half the bytes of bfloat16, is
    multiplied as integers and gives other texts; "auto" is float32 beside float32 weights, else bfloat16. `arithmetic`:
    "float32" gives the same text on every x86 and Arm CPU. "bfloat16" and "bfloat16_tiles", for bfloat16 weights, also
    round activations: the first on CPUs with AVX512_BF16, of which AMD's are faster in it, the second on every CPU, but
    fast only by Intel's AMX. The text is the same with and without speculation, but each gives another one than
    float32. "int8", for int8, int4 and packed weights, rounds activations to integers. It is the fastest and gives the
    same text on every CPU. "auto" is int8 for these weights, else what is fastest for the storage. `capture`
    (target layers whose outputs the draft reads) and `norm_feedback` replace the values of a draft's checkpoint, or
    provide them if it has none. `tensor_parallel_size`: processes that share the models, with device "torch";
    `parallel_mode`: what they exchange, "gather" (outputs; the text of one process) or "reduce" (sums of parts).

    Raises CheckpointError before the first token if a checkpoint is wrong or target and draft do not fit, OutOfMemory,
    and ValueError for settings that cannot work.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        drafting: Drafting | None = None,
        dtype: str = "auto",
        draft_dtype: str = "auto",
        arithmetic: str = "auto",
        kv_dtype: str = "auto",
        device: str = "cpu",
        engine: EngineConfig | None = None,
        capture: tuple[int, ...] | None = None,
        norm_feedback: bool | None = None,
        tensor_parallel_size: int = 1,
        parallel_mode: ParallelMode = "gather",
    ) -> None:
        pair, is_plain = checkpoints(target, draft), drafting is not None and not drafting.needs_draft_model
        config = engine or EngineConfig()
        overrides = DraftOverrides(capture, norm_feedback)
        how = Loading(
            dtype, arithmetic, kv_dtype, device, overrides, draft_dtype, tensor_parallel_size, parallel_mode
        )  # fmt: skip
        resolved = ResolvedPair.find(pair.target, draft if is_plain else pair.draft, how, Environment.read())
        self._start(resolved.load(), config, drafting)
        self._owns_models = True

    @classmethod
    def open(cls, pair: PairConfig, config: EngineConfig, drafting: Drafting | None = None) -> LLM:
        """An LLM of the pair that settings name. A draft model that `drafting` does not use is not loaded.

        Raises as LLM does."""
        llm = cls.from_models(ResolvedPair.of(pair, drafting).load(), config, drafting)
        llm._owns_models = True
        return llm

    @classmethod
    def from_models(cls, models: LoadedModels, config: EngineConfig, drafting: Drafting | None = None) -> LLM:
        """An LLM over models that are already loaded."""
        llm = cls.__new__(cls)
        llm._start(models, config, drafting)
        return llm

    def _start(self, models: LoadedModels, config: EngineConfig, drafting: Drafting | None) -> None:
        self.models, self._owns_models = models, False
        self.drafting = drafting or default_drafting(models)
        models.check_drafting(self.drafting)
        self.engine = Engine(models, config)
        self._owners: dict[int | str, _Run] = {}  # by request id, the run that gets its deltas

    def close(self) -> None:
        """Free the caches, and end the other ranks of models that this LLM has loaded; nothing can be generated
        afterwards. `with LLM(...) as llm:` calls it at its end."""
        self.engine.close()
        if self._owns_models:
            self.models.pair.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling = None,
        *,
        drafting: Drafting | None = None,
        predictions: Predictions | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Continue one prompt or many, text or token ids; outputs in the order of the prompts.

        sampling: one for all, or one per prompt. drafting: another way to draft for this call. predictions: the
        expected output of each prompt, text or token ids, or None. A way to draft that reads predictions, such as
        Lookup(), copies from them. Neither changes the text. progress: show a bar on stderr."""
        return self.run(prompts, sampling, drafting=drafting, predictions=predictions, progress=progress).outputs

    def chat(
        self,
        messages: Conversations,
        sampling: Sampling = None,
        *,
        drafting: Drafting | None = None,
        tools: list[dict[str, Any]] | None = None,
        template_options: dict[str, object] | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Answer one conversation, a list of {"role": ..., "content": text}, or each of a list of conversations; a list
        of outputs in either case.

        The target's chat template makes the prompts, and the token that ends a turn there ends the answer; without a
        template the messages are continued as text. tools, template_options: further values for the template, such as
        {"enable_thinking": False}. The rest is as in `generate`. Raises CheckpointError for a broken template,
        ValueError for messages or options that it refuses."""
        options = (template_options or {}) | ({"tools": tools} if tools else {})
        template = self.template(options)
        if isinstance(sampling, list):
            ending: Sampling = [ending_with(template, own) for own in sampling]
        else:
            ending = ending_with(template, sampling or SamplingParams())
        return self.generate(encode_chats(template, messages), ending, drafting=drafting, progress=progress)

    def template(self, options: dict[str, Any] | None = None) -> ChatTemplate:
        """The target's chat template with these options. Raises as `chat` does."""
        return self.models.template.with_options(options or {})

    def run(
        self,
        prompts: Prompts,
        sampling: Sampling = None,
        *,
        drafting: Drafting | None = None,
        predictions: Predictions | None = None,
        on_delta: Callable[[TokenDelta], None] | None = None,
        progress: bool = False,
    ) -> Result:
        """`generate` with the run's figures, another way to draft for this call, and deltas as they come.

        Every prompt is checked before the first token is computed. The figures cover everything that the engine
        computed during the call. Raises NumericalError if the target's logits are not numbers."""
        batch: list[str | list[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = sampling if isinstance(sampling, list) else [sampling or SamplingParams()] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"sampling: {len(each)} parameters for {len(batch)} prompts; give one, or one per prompt")
        expected = [predictions] if isinstance(predictions, str) else list(predictions or [None] * len(batch))
        if len(expected) != len(batch):
            raise ValueError(
                f"predictions: {len(expected)} for {len(batch)} prompts; give one per prompt, or None for it"
            )
        # Ids count from 0, or, inside another run, from after the ids that are in use.
        first = 1 + max((name for name in self.engine.sequences if isinstance(name, int)), default=-1)
        requests = [
            self.request(first + i, prompt, params, drafting, prediction=prediction)
            for i, (prompt, params, prediction) in enumerate(zip(batch, each, expected, strict=True))
        ]
        for request in requests if len(requests) > 1 else ():  # a single one is checked when it is added
            self.engine.check(request)
        began, outputs = self.engine.meter.mark(), dict[int | str, Output]()
        with RequestProgress(len(requests), self.engine, is_shown=True) if progress else nullcontext() as bar:
            for output in self.outputs(requests, on_delta):
                if output.error is not None:
                    raise NumericalError(output.error)
                outputs[output.request_id] = output
                if bar is not None:
                    bar.advance()
        return Result([outputs[request.id] for request in requests], self.engine.meter.since(began))

    def outputs(
        self, requests: Iterable[Request | None], on_delta: Callable[[TokenDelta], None] | None = None
    ) -> Iterator[Output]:
        """Run requests and yield each output as it finishes.

        Requests are taken from the iterable as there is room, so it may be endless. The iterable may yield None instead
        of a request to say that the next request depends on an output; it is then asked again after the next step.
        Closing the returned iterator drops the requests that have not finished.

        The LLM may be used between two outputs, in on_delta and in the iterable. A nested `generate` runs its own
        requests to their end while the requests of this call go on beside them; the deltas that this call gets
        meanwhile are delivered afterwards. A request that other code aborts is yielded as an output too.

        Raises ValueError for a request that cannot work, and for None while no request runs."""
        engine, run = self.engine, _Run()
        ahead = 2 * engine.config.max_batch + 16  # enough that no slot waits
        source = iter(requests)
        try:
            while True:
                yield from self._finished(run, on_delta)
                for request in itertools.islice(source, max(0, ahead - len(run.live))):
                    if request is None:
                        if not run.live:
                            raise ValueError("requests: None waits for an output, and no request runs")
                        break
                    self._add(request, run)
                if not run.live and (engine.sequences or not engine.is_busy):
                    return
                self._step()
        finally:
            for name in list(run.live):
                sequence = self._take(name, run)
                if sequence.finish_reason is None:
                    engine.abort(name)
            if not engine.sequences:
                engine.reset()

    def _finished(self, run: _Run, on_delta: Callable[[TokenDelta], None] | None) -> Iterator[Output]:
        """Deliver the deltas that arrived, and yield the outputs of requests that have ended."""
        while run.arrived:  # on_delta and the caller may run steps, which add more
            delta = run.arrived.popleft()
            if on_delta is not None:
                on_delta(delta)
            if delta.finish_reason is not None:
                yield output_of(self._take(delta.request_id, run))
        ended = [name for name, sequence in run.live.items() if sequence.finish_reason is not None]
        for name in ended:  # by Engine.abort or Engine.reset, called from elsewhere
            yield output_of(self._take(name, run))

    def _add(self, request: Request, run: _Run) -> None:
        if request.id in run.live and request.id not in self.engine.sequences:
            raise ValueError(
                f"request id {request.id!r}: is in use by an output that waits to be taken; choose another"
            )
        run.live[request.id] = self.engine.add(request)
        self._owners[request.id] = run

    def _take(self, name: int | str, run: _Run) -> Sequence:
        if self._owners.get(name) is run:  # otherwise a later request of another run has this id
            del self._owners[name]
        return run.live.pop(name)

    def _step(self) -> None:
        """One step of the engine; each delta goes to the run that its request belongs to."""
        try:
            deltas = self.engine.step()
        except BaseException:
            self.engine.reset()  # the failed step may have left any sequence half done
            raise
        for delta in deltas:
            if delta.request_id in self._owners:
                self._owners[delta.request_id].arrived.append(delta)

    def request(
        self,
        request_id: int | str,
        prompt: str | Iterable[int],
        sampling: SamplingParams,
        drafting: Drafting | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        cache_salt: str | None = None,
        prediction: str | Iterable[int] | None = None,
    ) -> Request:
        """A request for the engine, with prompt and prediction as tokens, a seed, a compiled grammar where its text is
        structured, and this LLM's `drafting` if none is given."""
        if isinstance(sampling, SamplingParams) and sampling.seed is None:
            sampling = sampling.with_seed(secrets.randbits(64))
        text = prompt if isinstance(prompt, str) else None
        request = Request(
            request_id, tuple(self.encode(prompt)), sampling, drafting or self.drafting, priority, deadline_s, text,
            cache_salt, tuple(encode_prediction(self.models, prediction)),
        )  # fmt: skip
        if sampling.structured is None:
            return request
        self.engine.check(request)  # first, as compiling takes up to seconds
        compiled = self.models.grammars.compile(sampling.structured, self.models.end_ids(sampling))
        return replace(request, grammar=compiled)

    def encode(self, prompt: str | Iterable[int] | int) -> list[int]:
        """Token ids of a prompt, as `encode_prompt` makes them."""
        return encode_prompt(self.models, prompt)


def default_drafting(models: LoadedModels) -> Drafting:
    """The default way to draft of an LLM of these models: adaptively, if there is a draft model."""
    return NoDraft() if models.draft_config is None else Adaptive()


def output_of(sequence: Sequence) -> Output:
    """The output of a finished sequence."""
    assert sequence.finish_reason is not None
    sampling = sequence.request.sampling
    return Output(
        request_id=sequence.request.id,
        prompt=sequence.request.prompt,
        prompt_ids=list(sequence.request.prompt_ids),
        token_ids=sequence.output_ids,
        text=sequence.text,
        finish_reason=sequence.finish_reason,
        sources=sequence.sources,
        metrics=sequence.counters,
        ttft_ms=(sequence.first_token_s - sequence.request.arrival) * 1e3 if sequence.first_token_s else 0.0,
        total_ms=(sequence.ended_s - sequence.request.arrival) * 1e3,
        logprobs=sequence.logprobs if sampling.logprobs is not None else None,
        prompt_logprobs=sequence.prompt_logprobs if sampling.prompt_logprobs is not None else None,
        error=sequence.error,
    )
