"""The official client, synchronous and asynchronous, on everything that it has a method for."""

from __future__ import annotations

import asyncio

import pytest
from tests.conftest import needs_native
from tests.serve.serving import KEY, PROMPT, Server

openai = pytest.importorskip("openai", reason="not installed: openai")
pytestmark = needs_native


def test_synchronous(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    assert [model.id for model in client.models.list()] == ["code", "other"]
    whole = client.completions.create(model="code", prompt=PROMPT, max_tokens=20, temperature=0)
    chunks = client.completions.create(model="code", prompt=PROMPT, max_tokens=20, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    messages = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(
        model="code", messages=messages, max_completion_tokens=20, temperature=0, logprobs=True, top_logprobs=2,
        extra_body={"drafter": "none"},
    )  # fmt: skip
    assert chat.choices[0].message.content == whole.choices[0].text
    assert len(chat.choices[0].logprobs.content) == 20 == chat.usage.completion_tokens
    assert chat.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert chat.usage.prompt_tokens_details.cached_tokens >= 0
    asked = {"model": "code", "messages": messages, "max_completion_tokens": 99, "temperature": 0, "stop": "generic"}
    with client.chat.completions.stream(**asked) as said:
        final = said.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].text.partition("generic")[0]
    response = client.responses.create(model="code", input=PROMPT, max_output_tokens=20, temperature=0)
    assert response.output_text == whole.choices[0].text
    with client.responses.stream(model="code", input=PROMPT, max_output_tokens=20, temperature=0) as events:
        assert [event.type for event in events][-1] == "response.incomplete"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="code", prompt=PROMPT, best_of=2)
    assert caught.value.param == "best_of"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt=PROMPT)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no").models.list()


def test_asynchronous(server: Server) -> None:
    async def main() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY)

        async def ask(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="code", messages=[{"role": "user", "content": PROMPT}], max_tokens=20, seed=seed, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                usage = chunk.usage
            assert usage is not None and usage.completion_tokens <= 20
            return text

        texts = await asyncio.gather(*(ask(seed) for seed in (1, 2, 1, 2)))
        await client.close()
        return list(texts)

    first, second, third, fourth = asyncio.run(main())
    assert first == third != second == fourth
