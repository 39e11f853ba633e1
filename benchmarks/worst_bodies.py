"""The worst bodies that a client may send: every field as large as a body allows, of right types and of wrong ones.
chaos_clients.py sends them in the storm, and before it one by one while a stream is watched, as
tests/serve/test_worst_bodies.py does.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from served import Served, posted

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"

ASKED = {
    COMPLETIONS: '"prompt":"a","max_tokens":1', CHATS: '"messages":[{"role":"user","content":"a"}],"max_tokens":1',
    RESPONSES: '"input":"a","max_output_tokens":1', TOKENIZE: '"prompt":"a"', DETOKENIZE: '"tokens":[1]',
}  # fmt: skip
"""What a request of each path needs beside the field that is large. Of a field that is there twice the last counts."""


class Worst(NamedTuple):
    """A body of a path that is as large as it may be: as many units as fit, `most` at most, where `...` stands in
    `fields`. KEY000 in a unit becomes another key each time."""

    path: str
    fields: str
    unit: str
    most: int = 2**30

    def body(self, num_bytes: int) -> bytes:
        """The body, of at most num_bytes."""
        before, after = f"{{{ASKED[self.path]},{self.fields}}}".encode().split(b"...")
        unit = self.unit.encode()
        number = min(self.most, (num_bytes - len(before) - len(after)) // len(unit))
        units = unit * number
        if b"KEY000" in unit:
            units = b"".join(unit.replace(b"KEY000", b"%06d" % i) for i in range(number))
        return before + units.removesuffix(b",") + after


CODE = r"def f(x):\n    return x + 1\n"
CALL = r'{"function":{"name":"","arguments":""}},'

WORST = {
    "prompts of no type": Worst(COMPLETIONS, '"prompt":[...]', "null,"),
    "prompts that are objects": Worst(COMPLETIONS, '"prompt":[...]', "{},"),
    "prompts, wrong inside": Worst(COMPLETIONS, '"prompt":[[...]]', "null,"),
    "many texts": Worst(COMPLETIONS, '"prompt":[...]', '"a",'),
    "many prompts": Worst(COMPLETIONS, '"prompt":[...]', "[1],"),
    "token ids": Worst(COMPLETIONS, '"prompt":[...]', "1,"),
    "a prompt of code": Worst(COMPLETIONS, '"prompt":"..."', CODE),
    "a prompt of spaces": Worst(COMPLETIONS, '"prompt":"..."', " "),
    "a prompt of rare characters": Worst(COMPLETIONS, '"prompt":"..."', "\u1234"),
    "a prompt of escapes": Worst(COMPLETIONS, '"prompt":"..."', "\\u1234"),
    "stop of wrong types": Worst(COMPLETIONS, '"stop":[...]', "1,"),
    "many stop strings": Worst(COMPLETIONS, '"stop":[...]', '"a",'),
    "a long stop string": Worst(COMPLETIONS, '"stop":"..."', "a"),
    "stop tokens of wrong types": Worst(COMPLETIONS, '"stop_token_ids":[...]', "null,"),
    "stop tokens": Worst(COMPLETIONS, '"stop_token_ids":[...]', "1,"),
    "bad words of wrong types": Worst(COMPLETIONS, '"bad_words":[...]', "1,"),
    "bad words": Worst(COMPLETIONS, '"bad_words":[...]', '"a",'),
    "biases of wrong types": Worst(COMPLETIONS, '"logit_bias":{...}', '"KEY000":null,'),
    "biases": Worst(COMPLETIONS, '"logit_bias":{...}', '"KEY000":1,'),
    "a prediction": Worst(COMPLETIONS, '"n":16,"max_tokens":2,"prediction":{"content":"..."}', CODE),
    "a prediction in parts": Worst(COMPLETIONS, '"prediction":{"content":[...]}', '{"type":"text","text":"a"},'),
    "a prediction of wrong parts": Worst(COMPLETIONS, '"prediction":{"content":[...]}', "{},"),
    "a salt": Worst(COMPLETIONS, '"cache_salt":"..."', "a"),
    "a way to draft": Worst(COMPLETIONS, '"drafter":"..."', "a"),
    "unknown fields": Worst(COMPLETIONS, "...", '"KEY000":{},'),
    "a user": Worst(COMPLETIONS, '"user":"..."', "a"),
    "options of streams": Worst(COMPLETIONS, '"stream_options":{...}', '"KEY000":0,'),
    "a schema": Worst(COMPLETIONS, '"response_format":{"a":[...]}', "{},"),
    "properties of a grammar": Worst(
        COMPLETIONS, '"structured_outputs":{"json":{"type":"object","properties":{...}}}', '"KEY000":{"type":"string"},'
    ),
    "choices of a grammar": Worst(COMPLETIONS, '"structured_outputs":{"choice":[...]}', '"KEY000",'),
    "a regular expression": Worst(COMPLETIONS, '"structured_outputs":{"regex":"..."}', "a?"),
    "a deep regular expression": Worst(COMPLETIONS, '"structured_outputs":{"regex":"..."}', "("),
    "a model": Worst(COMPLETIONS, '"model":"..."', "a"),
    "a body that is deep": Worst(COMPLETIONS, '"user":...', "["),
    "numbers": Worst(COMPLETIONS, '"user":[...]', "1.5,"),
    "lists": Worst(COMPLETIONS, '"user":[...]', "[],"),
    "a number": Worst(COMPLETIONS, '"seed":...', "1"),
    "messages of no type": Worst(CHATS, '"messages":[...]', "null,"),
    "messages that are empty": Worst(CHATS, '"messages":[...]', "{},"),
    "many messages": Worst(CHATS, '"messages":[...]', '{"role":"user"},'),
    "a message": Worst(CHATS, '"messages":[{"role":"user","content":"..."}]', CODE),
    "parts of wrong types": Worst(CHATS, '"messages":[{"role":"user","content":[...]}]', "null,"),
    "parts that are empty": Worst(CHATS, '"messages":[{"role":"user","content":[...]}]', "{},"),
    "many parts": Worst(CHATS, '"messages":[{"role":"user","content":[...]}]', '{"type":"text","text":"a"},'),
    "fields of a message": Worst(CHATS, '"messages":[{"role":"user","content":"a",...}]', '"KEY000":{},'),
    "a field of a message": Worst(CHATS, '"messages":[{"role":"user","content":"a","b":[...]}]', "[],"),
    "calls of wrong types": Worst(CHATS, '"messages":[{"role":"assistant","tool_calls":[...]}]', "null,"),
    "many calls": Worst(CHATS, '"messages":[{"role":"assistant","tool_calls":[...]}]', CALL),
    "arguments of a call": Worst(
        CHATS, '"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"[...0]"}}]}]', "[],"
    ),
    "tools of wrong types": Worst(CHATS, '"tools":[...]', "null,"),
    "tools that are empty": Worst(CHATS, '"tools":[...]', "{},"),
    "many tools": Worst(CHATS, '"tools":[...]', '{"function":{"name":"f"}},'),
    "parameters of a tool": Worst(CHATS, '"tools":[{"function":{"name":"f","parameters":{...}}}]', '"KEY000":{},'),
    "what a tool is": Worst(CHATS, '"tools":[{"function":{"name":"f","description":"..."}}]', CODE),
    "a choice of tools": Worst(CHATS, '"tool_choice":{...}', '"KEY000":{},'),
    "options of the template": Worst(CHATS, '"chat_template_kwargs":{...}', '"KEY000":0,'),
    "an option of the template": Worst(CHATS, '"chat_template_kwargs":{"documents":["..."]}', CODE),
    "items of no type": Worst(RESPONSES, '"input":[...]', "null,"),
    "items that are empty": Worst(RESPONSES, '"input":[...]', "{},"),
    "items of reasoning": Worst(RESPONSES, '"input":[{"role":"user","content":"a"},...]', '{"type":"reasoning"},'),
    "an item of reasoning": Worst(
        RESPONSES, '"input":[{"role":"user","content":"a"},{"type":"reasoning","content":[...]}]', "[],"
    ),
    "many items": Worst(RESPONSES, '"input":[...]', '{"role":"user","content":"a"},'),
    "an input": Worst(RESPONSES, '"input":"..."', CODE),
    "instructions": Worst(RESPONSES, '"instructions":"..."', CODE),
    "metadata of wrong types": Worst(RESPONSES, '"metadata":{...}', '"KEY000":1,'),
    "metadata": Worst(RESPONSES, '"metadata":{"a":"..."}', "a"),
    "tools of a response": Worst(RESPONSES, '"tools":[...]', "{},"),
    "a text to tokenise": Worst(TOKENIZE, '"return_token_strs":true,"prompt":"..."', CODE),
    "messages to tokenise": Worst(
        TOKENIZE, '"prompt":null,"return_token_strs":true,"messages":[{"role":"user","content":"..."}]', CODE
    ),
    "log-probabilities of a prompt": Worst(
        COMPLETIONS, '"n":1,"max_tokens":1,"prompt_logprobs":20,"prompt":[...]', "5,", 1000
    ),
    "log-probabilities of prompts": Worst(
        COMPLETIONS, '"n":16,"max_tokens":1,"prompt_logprobs":20,"prompt":[...]', "5,", 1000
    ),
    "log-probabilities": Worst(
        CHATS, '"n":2,"max_tokens":700,"ignore_eos":true,"logprobs":true,"top_logprobs":20,"user":"..."', "a"
    ),
    "a prediction that fits": Worst(COMPLETIONS, '"n":16,"max_tokens":2,"prediction":{"content":"..."}', CODE, 80),
    "ids of no type": Worst(DETOKENIZE, '"tokens":[...]', "null,"),
    "ids to detokenise": Worst(DETOKENIZE, '"tokens":[...]', "1,"),
}
"""By what is large."""


MAX_GROWN_BYTES = 100 * 10**6
"""By which a request may make a process larger."""

TRIES = 4
"""A machine that is busy stops a stream now and then; a request that stops it does so each time."""


def most_gap_s(idle: list[float]) -> float:
    """How long a request may keep another stream waiting, by the gaps of that stream when it is alone."""
    return 0.2 + 3 * float(np.percentile(idle, 99))


class Felt(NamedTuple):
    """What a request did to others. gap_s: the longest time between two events of the canary; grown_bytes: by which the
    HTTP process or the engine process, whichever took more, was larger at its largest than before."""

    status: int
    gap_s: float
    grown_bytes: int


class Canary:
    """A stream beside which requests are sent; `async with` it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.gaps: list[float] = []

    async def __aenter__(self) -> Canary:
        self._singing = asyncio.create_task(self._sing())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._singing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._singing

    async def _sing(self) -> None:
        body, last = {"prompt": "def", "max_tokens": 300, "stream": True, "ignore_eos": True}, math.inf
        while True:
            async with posted(self.served, COMPLETIONS, body) as reply:
                if reply.status != 200:
                    raise RuntimeError(f"the canary was refused: {(await reply.body()).decode()}")
                async for _ in reply.events():
                    now = time.perf_counter()
                    self.gaps.append(max(0.0, now - last))
                    last = now

    async def listen(self, num_events: int) -> list[float]:
        """The gaps up to the next so many events."""
        self.gaps.clear()
        while len(self.gaps) < num_events:
            if self._singing.done():
                self._singing.result()
            await asyncio.sleep(0.01)
        return list(self.gaps)

    async def felt(self, path: str, body: bytes, most_gap_s: float) -> Felt:
        """What a request does to others: the first of TRIES that is within the bounds, or the last one."""
        for _ in range(TRIES):
            found = await self._beside(path, body)
            if found.gap_s <= most_gap_s and found.grown_bytes <= MAX_GROWN_BYTES:
                break
        return found

    async def _beside(self, path: str, body: bytes) -> Felt:
        """Send a request while the canary sings, and say what that did."""
        sizes = {process.pid: _size(process.pid, "VmRSS") for process in self.served.processes}
        for pid in sizes:
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")  # forget the largest size so far
        await self.listen(2)
        async with posted(self.served, path, body) as reply:
            status = reply.status
            await reply.body()
        gap_s = max(*self.gaps, *await self.listen(2))
        return Felt(status, gap_s, max(_size(pid, "VmHWM") - before for pid, before in sizes.items()))


def _size(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
