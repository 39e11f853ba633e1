"""The clients that people build structured output with, each by its own means, against the server.

They are installed nowhere here: pip install langchain-openai instructor llama-index-llms-openai-like openai"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from tests.conftest import needs_native
from tests.serve.serving import KEY, Server, running

from aquiline.serve.server_config import ServerConfig

pytest.importorskip("xgrammar", reason="not installed: xgrammar")
pytestmark = [needs_native, pytest.mark.slow]

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:\n"
ASKED = "Where do you live?"


class City(BaseModel):
    """A city and how warm it is."""

    name: Literal["Paris", "Rome", "Oslo"]
    degrees: Literal[10, 20, 30]
    is_raining: bool


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a chat model whose template knows no tools."""
    file: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with running(ServerConfig(api_key=(KEY,), served_model_name=("code",), chat_template=str(file))) as server:
        yield server


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchains_structured_output(served: Server, method: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="not installed: langchain-openai")
    model = langchain.ChatOpenAI(
        base_url=f"{served.url}/v1", api_key=KEY, model="code", max_tokens=200, temperature=1, seed=1
    )
    if method == "json_mode":  # whose schema is the prompt's alone: any object comes
        found = model.with_structured_output(None, method=method, include_raw=True).invoke(ASKED)
        assert found["raw"].content.startswith("{")
    else:
        assert isinstance(model.with_structured_output(City, method=method).invoke(ASKED), City)


def test_langchains_tools(served: Server) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="not installed: langchain-openai")
    model = langchain.ChatOpenAI(
        base_url=f"{served.url}/v1", api_key=KEY, model="code", max_tokens=200, temperature=1, seed=1
    )
    (call,) = model.bind_tools([City], tool_choice="City").invoke(ASKED).tool_calls
    assert call["name"] == "City" and City.model_validate(call["args"])
    calls = model.bind_tools([City], tool_choice="required", parallel_tool_calls=False).invoke(ASKED).tool_calls
    assert [call["name"] for call in calls] == ["City"]
    assert model.bind_tools([City]).invoke(ASKED).response_metadata["finish_reason"] in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructors_modes(served: Server, mode: str) -> None:
    instructor = pytest.importorskip("instructor", reason="not installed: instructor")
    openai = pytest.importorskip("openai", reason="not installed: openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY)
    patched = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    asked: dict[str, Any] = {
        "model": "code", "messages": [{"role": "user", "content": ASKED}], "max_tokens": 200, "temperature": 1,
        "seed": 1, "max_retries": 0,
    }  # fmt: skip
    if mode == "JSON":  # whose schema is the prompt's alone, so a small model's object need not follow it

        class Anything(BaseModel, extra="allow"):
            pass

        assert isinstance(patched.chat.completions.create(response_model=Anything, **asked), Anything)
    else:
        assert isinstance(patched.chat.completions.create(response_model=City, **asked), City)


def test_llamaindex_structured_output(served: Server) -> None:
    llama = pytest.importorskip("llama_index.llms.openai_like", reason="not installed: llama-index-llms-openai-like")
    model = llama.OpenAILike(
        model="code", api_base=f"{served.url}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True,
        max_tokens=200, temperature=1, context_window=1024,
    )  # fmt: skip
    from llama_index.core.llms import ChatMessage

    structured = model.as_structured_llm(City)
    assert isinstance(structured.chat([ChatMessage(role="user", content=ASKED)]).raw, City)


def test_openais_parse(served: Server) -> None:
    openai = pytest.importorskip("openai", reason="not installed: openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY)
    asked: dict[str, Any] = {"model": "code", "temperature": 1}
    messages = [{"role": "user", "content": ASKED}]
    chat = client.chat.completions.parse(messages=messages, response_format=City, max_tokens=200, seed=1, **asked)
    assert isinstance(chat.choices[0].message.parsed, City)
    response = client.responses.parse(input=ASKED, text_format=City, max_output_tokens=200, **asked)
    assert isinstance(response.output_parsed, City)
    tool = openai.pydantic_function_tool(City)
    (call,) = (
        client.chat.completions.parse(
            messages=messages, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=200, **asked
        )
        .choices[0]
        .message.tool_calls
    )
    assert isinstance(call.function.parsed_arguments, City)
