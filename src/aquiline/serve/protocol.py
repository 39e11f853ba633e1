"""What clients send, by OpenAI's names and, beyond those, vLLM's. Ranges are checked in sampling.py.

Fields that are not known are ignored, as vLLM and OpenAI do; fields that are known and not supported are refused by
name (`sampling.refuse_unsupported`). Of what is wrong in a body one thing is told, so no list and no object is looked
at after its first error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

MAX_LOGPROBS = 20
"""Alternatives that a request may ask for at each token."""

MAX_SALT = 256
"""Characters of a cache_salt, which is kept as long as pages are cached under it."""

MAX_METADATA = 16
"""Entries of a response's metadata, as OpenAI has it."""

T = TypeVar("T")
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Listed = Annotated[list[T], Field(fail_fast=True)]
Keyed = Annotated[dict[str, T], Field(fail_fast=True)]
Salt = Annotated[str, Field(max_length=MAX_SALT)]


class Body(BaseModel):
    """A body of a request; unknown fields are kept, so that refused ones can be named."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(Body):
    """include_usage: a last chunk with the usage and no choice; continuous_usage_stats: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(Body):
    """A part of a message; text alone is understood."""

    type: str
    text: str | None = None


class Prediction(Body):
    """What the caller expects to come back, for drafts to be copied from."""

    type: Literal["content"] = "content"
    content: str | Listed[ContentPart]


class Sampling(Body):
    """What completions and chats share. Names and meaning are OpenAI's; those it does not have are vLLM's.
    Ours are four: `return_token_sources`; `drafter`, a way to draft by name, "none" for plain decoding;
    `num_spec_tokens`, the longest draft of a step; and `learn`, whether a server whose draft learns may store the
    request. No way to draft changes the text."""

    model: str | None = None
    max_tokens: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Keyed[Number] | None = None
    seed: Whole | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[Whole] | None = None
    ignore_eos: bool | None = None
    min_tokens: Whole | None = None
    bad_words: Listed[str] | None = None
    prompt_logprobs: Whole | None = None
    n: Whole | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Whole | None = None
    cache_salt: Salt | None = None
    prediction: Prediction | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    drafter: str | None = None
    num_spec_tokens: Whole | None = None
    return_token_sources: bool | None = None
    learn: bool | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | Listed[str] | Listed[Whole] | Listed[Listed[Whole]]
    echo: bool | None = None
    logprobs: Whole | None = None


class FunctionCall(Body):
    """A call that the model made; arguments is JSON."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(Body):
    """A call of a tool, as assistant messages hold it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """A message; other fields than these reach the template as they are."""

    role: Annotated[str, Field(min_length=1)]
    content: str | Listed[ContentPart] | None = None
    tool_calls: Listed[ToolCall] | None = None


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: Function


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[Listed[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: Listed[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @property
    def has_tools(self) -> bool:
        """Whether there are tools that may be called."""
        return bool(self.tools) and self.tool_choice != "none"


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Listed[ChatMessage], Field(min_length=1)] | None = None
    tools: Listed[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Listed[Whole]


class ResponseRequest(Body):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Listed[dict[str, Any]]
    text: dict[str, Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Whole | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[Keyed[str], Field(max_length=MAX_METADATA)] | None = None
    seed: Whole | None = None
    cache_salt: Salt | None = None
    priority: Whole | None = None
    drafter: str | None = None
    num_spec_tokens: Whole | None = None
    return_token_sources: bool | None = None
    learn: bool | None = None
