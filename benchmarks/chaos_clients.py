"""The clients of chaos.py: canaries, whose texts are known, and every bad kind; and what is counted of them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from served import Served, posted
from worst_bodies import MAX_GROWN_BYTES, WORST, Canary, Felt, most_gap_s

from aquiline.serve.server_config import Limits

PROMPTS = ["def fibonacci(n):\n", "class Stack:\n    def __init__(self):\n", "import os\n\n\ndef walk(path):\n"]
PATIENCE_S = 120.0
"""A request that takes longer counts as lost."""


@dataclass
class Storm:
    """What has happened. wrong: what must not have; kills: when engines were killed and when the next was ready; worst:
    the largest bodies, made once."""

    served: Served
    rng: random.Random
    canaries: dict[str, str] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kills: list[tuple[float, float]] = field(default_factory=list)
    rss: list[tuple[float, int]] = field(default_factory=list)
    worst: dict[str, bytes] = field(
        default_factory=lambda: {name: worst.body(Limits().max_body_bytes) for name, worst in WORST.items()}
    )

    def excuse(self, began: float) -> bool:
        """Whether an engine was killed, or not back yet, while a request that began then was running."""
        return any(began < back + 1.0 for _, back in self.kills)

    def count(self, kind: str, outcome: str, began: float, is_expected: bool) -> None:
        """Count an outcome; one that is not expected must come from a killed engine."""
        excused = not is_expected and self.excuse(began)
        self.outcomes[f"{kind}: {outcome}{' (engine killed)' if excused else ''}"] += 1
        if not is_expected and not excused:
            self.wrong.append(f"{kind}: {outcome}")


def canary_body(name: str) -> dict[str, Any]:
    """A request by its name, which says prompt, temperature, and the grammar, if it has one."""
    place, temperature, *grammar = name.split()
    body = {
        "prompt": PROMPTS[int(place)], "max_tokens": 48, "temperature": float(temperature), "seed": 11,
        "frequency_penalty": 0.3,
    }  # fmt: skip
    return body | ({"structured_outputs": {"regex": grammar[0]}} if grammar else {})


async def text_of(served: Served, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of a request, streamed where the body says so; text of a stream that breaks off: "broken"."""
    async with posted(served, "/v1/completions", body) as reply:
        if reply.status != 200:
            return reply.status, (await reply.body()).decode()
        if not body.get("stream"):
            return 200, json.loads(await reply.body())["choices"][0]["text"]
        texts = []
        async for event in reply.events():
            if event == b"[DONE]":
                return 200, "".join(texts)
            value = json.loads(event)
            if "error" in value:
                break
            texts.append(value["choices"][0]["text"])
        return 200, "broken"


async def canary(storm: Storm) -> None:
    """A text that is known, asked for in a random way."""
    name, began = storm.rng.choice(list(storm.canaries)), time.monotonic()
    body = canary_body(name) | {"stream": storm.rng.random() < 0.5}
    ways: list[dict[str, Any]] = [{}, {"drafter": "none"}, {"drafter": "lookup"}, {"num_spec_tokens": 1}]
    status, text = await text_of(storm.served, body | storm.rng.choice(ways))
    if status == 200 and text not in ("broken", storm.canaries[name]):
        storm.wrong.append(f"canary {name!r} differs: {text[:80]!r}")
    is_fine = status == 429 or (status == 200 and text != "broken")
    outcome = "broken" if text == "broken" else str(status) if is_fine else f"{status} {text[:80]}"
    storm.count("canary", outcome, began, is_fine)


async def leaver(storm: Storm) -> None:
    """A client that leaves in the middle of its stream."""
    began = time.monotonic()
    body = {"prompt": storm.rng.choice(PROMPTS), "max_tokens": 400, "stream": True, "n": storm.rng.choice([1, 1, 2])}
    async with posted(storm.served, "/v1/completions", body) as reply:
        if reply.status == 200:
            left = storm.rng.randint(0, 20)
            async for _ in reply.events():
                left -= 1
                if left < 0:
                    break
        storm.count("leaver", str(reply.status), began, reply.status in (200, 429))


async def impatient(storm: Storm) -> None:
    """A client that leaves before it has a reply."""
    body = {"prompt": storm.rng.choice(PROMPTS), "max_tokens": 400}
    with suppress(TimeoutError):
        async with asyncio.timeout(storm.rng.uniform(0.0, 0.5)):
            await text_of(storm.served, body)
    storm.outcomes["impatient: left"] += 1


async def slow(storm: Storm) -> None:
    """A client that reads a little now and then, and may stop to read at all."""
    began = time.monotonic()
    body = {"prompt": storm.rng.choice(PROMPTS), "max_tokens": 200, "stream": True, "logprobs": 20}
    async with posted(storm.served, "/v1/completions", body) as reply:
        for _ in range(storm.rng.randint(1, 8)):
            await asyncio.sleep(storm.rng.uniform(0.1, 1.5))
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await reply.reader.read(64)
        storm.count("slow", str(reply.status), began, reply.status in (200, 429))


BODIES = [
    b"", b"{", b"null", b"[1]", b"\x00\xff", b"[" * 2000, b'{"prompt": 1e999}', b'{"prompt": "a", "n": 1e9}',
    b'{"prompt": "a", "best_of": 3}', b'{"prompt": [4095, -1]}', b'{"prompt": "\\ud800"}', b'{"prompt": {}}',
    b'{"prompt": "a", "logit_bias": {"1": NaN}}', b'{"prompt": "a", "stop": [""]}', b'{"prompt": "a", "seed": -1}',
]  # fmt: skip


async def malformed(storm: Storm) -> None:
    """A body that is no request: an error of the client, told as such."""
    began = time.monotonic()
    path = storm.rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
    async with posted(storm.served, path, storm.rng.choice(BODIES)) as reply:
        text = await reply.body()
        is_fine = 400 <= reply.status < 500 and b'"error"' in text
        # Some of these bodies are requests to other paths than the one they were made for.
        is_fine = is_fine or (reply.status == 200 and path == "/tokenize")
        storm.count("malformed", str(reply.status), began, is_fine)


BOMBS: list[dict[str, Any]] = [
    {"regex": "(a{1,900}){1,900}"}, {"regex": "((a|b){0,60}c){0,60}"}, {"json": {"type": "string", "maxLength": 10**6}},
    {"json": {"type": "array", "items": {"type": "array", "maxItems": 999}, "minItems": 999}},
    {"json": {"$ref": "#"}}, {"grammar": "root ::= root"}, {"grammar": "root ::= a"}, {"regex": "(?=a)"},
]  # fmt: skip


async def compiler(storm: Storm) -> None:
    """A grammar that the server has not seen for long, or one that takes long to compile or none can follow. An answer
    that ended follows its schema."""
    began, number = time.monotonic(), storm.rng.randrange(200)
    schema = {"type": "object", "properties": {f"n{number}": {"enum": [number]}}, "required": [f"n{number}"]}
    is_bomb = storm.rng.random() < 0.2
    asked: dict[str, Any] = storm.rng.choice(BOMBS) if is_bomb else {"json": schema | {"additionalProperties": False}}
    body = {"prompt": storm.rng.choice(PROMPTS), "max_tokens": 40, "structured_outputs": asked}
    status, text = await text_of(storm.served, body)
    if status == 200 and not is_bomb and json.loads(text) != {f"n{number}": number}:
        storm.wrong.append(f"compiler: {text[:80]!r} does not follow its schema")
    storm.count("compiler", str(status), began, status in (200, 429) or (status == 400 and "structured" in text))


async def worst(storm: Storm) -> None:
    """A body as large as the server takes, of one field above all."""
    began, name = time.monotonic(), storm.rng.choice(list(WORST))
    async with posted(storm.served, WORST[name].path, storm.worst[name]) as reply:
        text = await reply.body()
        is_fine = reply.status == 200 or (400 <= reply.status < 500 and b'"error"' in text)
        storm.count("worst", str(reply.status), began, is_fine)


async def feel_worst(storm: Storm) -> dict[str, Felt]:
    """Send each of these bodies before the storm, and note what a stream beside it feels."""
    felt: dict[str, Felt] = {}
    async with Canary(storm.served) as canary:
        await canary.listen(20)
        most = most_gap_s(await canary.listen(300))
        for name, worst in WORST.items():
            felt[name] = found = await canary.felt(worst.path, storm.worst[name], most)
            if found.gap_s > most or found.grown_bytes > MAX_GROWN_BYTES:
                told = f"{found.gap_s:.2f} s ({most:.2f} allowed), {found.grown_bytes / 1e6:.0f} MB"
                storm.wrong.append(f"beside {name!r} a stream waited {told}")
    return felt


async def unfinished(storm: Storm) -> None:
    """A client that says more than it sends, and leaves."""
    with suppress(TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(storm.rng.uniform(0.1, 1.0)):
            async with posted(storm.served, "/v1/completions", b'{"prompt": "a', length=500):
                storm.wrong.append("a body that never ended was answered")
    storm.outcomes["unfinished: left"] += 1


async def large(storm: Storm) -> None:
    """A request that takes most pages, so that others have to give theirs up."""
    began = time.monotonic()
    prompt = "".join(f"value_{i} = {storm.rng.randint(0, 9)}\n" for i in range(storm.rng.randint(20, 70)))
    body = {"prompt": prompt, "max_tokens": 150, "priority": storm.rng.randint(-1, 1), "ignore_eos": True}
    status, text = await text_of(storm.served, body)
    storm.count("large", str(status), began, status in (200, 429) or (status == 400 and "shorten" in text))


async def figures(storm: Storm) -> None:
    """Somebody looks at the figures."""
    began = time.monotonic()
    status = await asyncio.to_thread(lambda: storm.served.get("/metrics") and storm.served.get("/v1/models") and 200)
    storm.count("figures", str(status), began, status == 200)


ACTORS: list[tuple[Callable[[Storm], Awaitable[None]], int]] = [
    (canary, 8), (leaver, 4), (impatient, 3), (slow, 2), (malformed, 3), (worst, 1), (unfinished, 1), (large, 3),
    (figures, 1), (compiler, 2),
]  # fmt: skip


async def act(storm: Storm) -> None:
    """One client; what it must not meet is wrong."""
    actor = storm.rng.choices([actor for actor, _ in ACTORS], [weight for _, weight in ACTORS])[0]
    name, began = actor.__name__, time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            await actor(storm)
    except TimeoutError:
        storm.wrong.append(f"{name}: lost, no end after {PATIENCE_S} s")
    except (OSError, EOFError, ValueError) as error:
        storm.count(name, f"{type(error).__name__}: {error}"[:100], began, False)
