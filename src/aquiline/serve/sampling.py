"""A client's parameters as the engine's: how tokens are drawn, how they are drafted, and what is refused by name."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from aquiline.checks import shown
from aquiline.config import SamplingParams
from aquiline.serve.admission import check_sizes
from aquiline.serve.api_errors import ApiError, bad_request
from aquiline.serve.protocol import MAX_LOGPROBS, ChatRequest, CompletionRequest, Sampling
from aquiline.serve.server_config import Limits
from aquiline.serve.structured import asked_of
from aquiline.spec.adaptive import MAX_COPY, Adaptive
from aquiline.spec.drafting import Chain, Drafting, NoDraft
from aquiline.spec.lookup import Lookup
from aquiline.spec.registry import drafting_named

COMPLETION_TOKENS = 16
"""New tokens of a completion that names no number, as OpenAI has it."""

MAX_TEMPERATURE = 2.0
"""OpenAI's bound. The engine draws at any temperature; what clients send beyond it is a mistake."""

SUPERSEDED = "is superseded; use structured_outputs"
UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((), "is not supported: the server returns every choice; use n"),
    "suffix": (("",), "is not supported"),
    "use_beam_search": ((False,), "is not supported"),
    "length_penalty": ((1, 1.0), "belongs to beam search, which is not supported"),
    "functions": ((), "is superseded; use tools"),
    "function_call": (("none", "auto"), "is superseded; use tool_choice"),
    "modalities": ((["text"],), "text is the only one"),
    "audio": ((), "is not supported"),
    "web_search_options": ((), "is not supported"),
    "logits_processors": ((), "is not supported"),
    "prompt_embeds": ((), "is not supported"),
    "truncate_prompt_tokens": ((), "is not supported: a prompt is never cut silently"),
    "skip_special_tokens": ((True,), "special tokens are always left out of the text"),
    "spaces_between_special_tokens": ((True,), "special tokens are always left out of the text"),
    "include_stop_str_in_output": ((False,), "a stop string is always cut from the text"),
    "continue_final_message": ((False,), "is not supported"),
    "guided_json": ((), SUPERSEDED),
    "guided_regex": ((), SUPERSEDED),
    "guided_choice": ((), SUPERSEDED),
    "guided_grammar": ((), SUPERSEDED),
}  # fmt: skip
"""Fields of OpenAI's and vLLM's interfaces that change the answer and are not supported: the values that mean nothing
special, and what is said of any other. null is always such a value."""

PASSED_ON = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos",
    "min_tokens", "prompt_logprobs",
)  # fmt: skip
"""Parameters that the engine has under the same name."""


@dataclass(frozen=True)
class Wanted:
    """What a request asks of the engine for each of its prompts. max_tokens None: whatever room there is, and `most` at
    most. structured_by: the field of the body that asks for structured output, if one does."""

    sampling: SamplingParams
    drafting: Drafting
    n: int
    seed: int
    max_tokens: int | None
    most: int
    priority: int
    cache_salt: str | None
    structured_by: str = ""

    def choice(self, index: int, room: int) -> SamplingParams:
        """The sampling of one choice of a prompt after which `room` tokens fit, as the engine gets it: stop strings are
        the reader's. Choice i has the seed + i, so each choice is the text of a request with n=1 and that seed."""
        max_tokens = min(room, self.most) if self.max_tokens is None else self.max_tokens
        told: dict[str, Any] = {"seed": (self.seed + index) % 2**64, "max_tokens": max_tokens, "stop": ()}
        is_told = all(getattr(self.sampling, name) == value for name, value in told.items())
        return self.sampling if is_told else replace(self.sampling, **told)


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raises ApiError naming the first field that is known and cannot be obeyed."""
    for name, (harmless, why) in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise bad_request(f"{name}={shown(value)}: {why}", name)


def wanted(
    request: CompletionRequest | ChatRequest, limits: Limits, default: Drafting, tool_parser: str | None = None
) -> Wanted:
    """What a request asks for; tool_parser: how its calls of tools are read. Raises ApiError and ValueError naming the
    field that cannot work."""
    refuse_unsupported(request.model_extra or {})
    check_sizes(request, limits)
    given: dict[str, Any] = {"temperature": 1.0, "max_tokens": 2**31 - 1, "logprobs": num_logprobs(request)}
    given |= {name: value for name in PASSED_ON if (value := getattr(request, name)) is not None}
    if request.top_k is not None:
        given["top_k"] = 0 if request.top_k == -1 else request.top_k
    given["logit_bias"] = _biases(request.logit_bias or {})
    given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    given["stop_token_ids"] = tuple(request.stop_token_ids or ())
    given["bad_words"] = tuple(request.bad_words or ())
    if request.prompt_logprobs is not None:
        if request.stream:
            raise bad_request("prompt_logprobs: cannot be streamed; drop stream or prompt_logprobs", "prompt_logprobs")
        _check_logprobs("prompt_logprobs", request.prompt_logprobs)
    if request.temperature is not None and request.temperature > MAX_TEMPERATURE:
        message = f"temperature={request.temperature}: must be between 0 and {MAX_TEMPERATURE:g}"
        raise bad_request(message, "temperature")
    max_tokens, most = num_new_tokens(request), max(limits.default_output_tokens, request.min_tokens or 0)
    if limits.max_output_tokens is not None:
        most = min(most, limits.max_output_tokens)
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
        if limits.max_output_tokens is not None and max_tokens > limits.max_output_tokens:
            raise bad_request(f"max_tokens={max_tokens}: at most {limits.max_output_tokens} are allowed", "max_tokens")
    seed = secrets.randbits(63) if request.seed is None else request.seed
    asked = asked_of(request, tool_parser)
    sampling = SamplingParams(**given, seed=seed, structured=asked.structured)
    return Wanted(
        sampling, chosen_drafting(request, default), _num_choices(request, limits), seed, max_tokens, most,
        request.priority or 0, request.cache_salt, asked.field,
    )  # fmt: skip


def num_new_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    """The most tokens that a request may get, None where it says nothing."""
    if isinstance(request, ChatRequest):
        return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens


def num_logprobs(request: CompletionRequest | ChatRequest) -> int | None:
    """Alternatives at each token; None where no log-probabilities are asked for."""
    if isinstance(request, CompletionRequest):
        number = request.logprobs
        _check_logprobs("logprobs", number)
        return number
    if request.top_logprobs and not request.logprobs:
        raise bad_request(f"top_logprobs={request.top_logprobs}: needs logprobs=true", "top_logprobs")
    number = (request.top_logprobs or 0) if request.logprobs else None
    _check_logprobs("top_logprobs", number)
    return number


def chosen_drafting(request: Sampling, default: Drafting) -> Drafting:
    """How to draft for a request: as it says, by a lookup where it has a prediction and names no other way, else as
    the server does."""
    if request.drafter is not None:
        drafting = default if request.drafter == default.name else _named(request.drafter)
    elif request.prediction is not None and not default.reads_prediction:
        drafting = Lookup()
    else:
        drafting = default
    return drafting if request.num_spec_tokens is None else _bounded(drafting, request.num_spec_tokens)


def _named(drafter: str) -> Drafting:
    try:
        return drafting_named(drafter)
    except ValueError as error:
        raise bad_request(str(error), "drafter") from None


def _bounded(drafting: Drafting, num_tokens: int) -> Drafting:
    """The same way to draft with no draft longer than num_tokens."""
    if num_tokens == 0 or isinstance(drafting, NoDraft):
        return NoDraft()
    try:
        if isinstance(drafting, Chain):
            return Chain(num_tokens)
        if isinstance(drafting, Lookup):
            return replace(drafting, max_draft=num_tokens)
        if isinstance(drafting, Adaptive):  # which copies up to MAX_COPY tokens a step, or none
            return replace(drafting, max_spec_tokens=num_tokens, lookup=drafting.lookup and num_tokens >= MAX_COPY)
    except ValueError as error:
        raise bad_request(str(error), "num_spec_tokens") from None
    raise bad_request(
        f"num_spec_tokens={num_tokens}: a {drafting.name} tree has its own size; name the drafter adaptive, chain or "
        "lookup", "num_spec_tokens",
    )  # fmt: skip


def _num_choices(request: Sampling, limits: Limits) -> int:
    n = 1 if request.n is None else request.n
    if not 1 <= n <= limits.max_choices:
        raise bad_request(f"n={n}: must be between 1 and {limits.max_choices}", "n")
    return n


def _check_logprobs(name: str, number: int | None) -> None:
    if number is not None and not 0 <= number <= MAX_LOGPROBS:
        raise bad_request(f"{name}={number}: must be between 0 and {MAX_LOGPROBS}", name)


def _biases(given: dict[str, float]) -> dict[int, float]:
    bad = next((key for key in given if not (key.isascii() and key.isdecimal() and len(key) < 10)), None)
    if bad is not None:
        raise ApiError(400, f"logit_bias: {bad[:40]!r} is no token id; keys are whole numbers", "logit_bias")
    return {int(key): bias for key, bias in given.items()}
