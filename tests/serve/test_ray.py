"""Replicas on Ray: one server whose texts do not tell which engine wrote them, whatever happens to engines."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.conftest import needs_native
from tests.serve.serving import ENGINE, HEADERS, KEY, PAIR, PROMPT, until

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.serve.resuming import resumed_text
from aquiline.serve.server_config import ServerConfig
from aquiline.spec.drafting import Chain

ray = pytest.importorskip("ray", reason="not installed: ray")
from ray import serve  # noqa: E402

from aquiline.serve.ray import Scale, app  # noqa: E402

pytestmark = needs_native

TOKEN = secrets.token_hex(16)
"""Ray reads it once in a process; without one it keeps one in the home."""
NUM_CPUS = 5
"""Three engines, HTTP, and one that replaces another. Ray starts a process for each at once."""
CONFIG = ServerConfig(api_key=(KEY,), served_model_name=("code",), drain_s=20.0, stream_interval=1)
SAMPLED: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}


class Cluster:
    """Ray on this machine, with the application; engines are its engine processes by their replicas' ids."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = httpx.Client(base_url=url, headers=HEADERS, timeout=120)

    def scale(self, least: int, most: int | None = None, **autoscaling: Any) -> None:
        """Run the application with so many engines."""
        settings = Scale(least, most or least, autoscaling)
        serve.run(app(PAIR, ENGINE, CONFIG, drafting=Chain(), scale=settings))
        until(lambda: self.client.get("/ready").status_code == 200, "the application does not start")

    def complete(self, prompt: str = PROMPT, **body: Any) -> dict[str, Any]:
        reply = self.client.post("/v1/completions", json={"prompt": prompt, **body})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def text(self, prompt: str = PROMPT, **body: Any) -> str:
        return str(self.complete(prompt, **body)["choices"][0]["text"])

    def figure(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    @property
    def num_engines(self) -> int:
        states = serve.status().applications["default"].deployments["engines"].replica_states
        return int(states.get("RUNNING", 0))

    @property
    def engines(self) -> dict[int, psutil.Process]:
        """The engine process of each replica, by the replica's process id."""
        found = [process for process in psutil.Process().children(recursive=True) if is_engine(process)]
        return {process.ppid(): process for process in found}


def is_engine(process: psutil.Process) -> bool:
    try:
        command, above = " ".join(process.cmdline()), process.parent()
        return "spawn_main" in command and above is not None and "engines" in " ".join(above.cmdline())
    except psutil.Error:
        return False


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster that leaves no process behind. It speaks HTTP to this machine alone, and Ray's own ports ask for a
    token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    before = set(psutil.Process().children(recursive=True))  # of other tests
    told = {"RAY_AUTH_TOKEN": TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in told.items():
            patched.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            object_store_memory=80_000_000,
            log_to_driver=False,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield Cluster(f"http://127.0.0.1:{port}")
        finally:
            ours = set(psutil.Process().children(recursive=True)) - before
            serve.shutdown()
            ray.shutdown()
            _, left = psutil.wait_procs(ours, timeout=30)
            for process in left:
                process.kill()
            assert not left


def expected(llm: LLM, max_tokens: int, *seeds: int) -> list[str]:
    sampling = [SamplingParams(max_tokens=max_tokens, seed=seed, **SAMPLED) for seed in seeds]
    return [output.text for output in llm.generate([PROMPT] * len(seeds), sampling)]


def check_texts(cluster: Cluster, llm: LLM) -> None:
    """Eight requests at once go to both engines, and are refused as elsewhere."""
    before = {name: process.cpu_times().user for name, process in cluster.engines.items()}
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda seed: cluster.text(max_tokens=200, seed=seed, **SAMPLED), range(8)))
    assert texts == expected(llm, 200, *range(8))
    used = [process.cpu_times().user - before[name] for name, process in cluster.engines.items()]
    assert len(used) == 2 and min(used) > 0, used
    assert (
        cluster.client.post("/v1/completions", json={"prompt": PROMPT}, headers={"authorization": ""}).status_code
        == 401
    )
    refused = cluster.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 9999})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


def check_turns(cluster: Cluster) -> None:
    """Each turn of a conversation finds the pages of the turns before it, the answers' too."""
    said, num_before = "def add(a, b):\n    return a + b\n\n" * 4, 0
    for turn in range(4):
        reply = cluster.complete(said, max_tokens=48, seed=turn, **SAMPLED)
        usage = reply["usage"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert num_cached >= num_before // ENGINE.page_size * ENGINE.page_size, (turn, num_cached, num_before)
        said, num_before = said + reply["choices"][0]["text"] + "\n", usage["prompt_tokens"]


def check_killed(cluster: Cluster, llm: LLM, what: str) -> None:
    """The engine that writes a text is killed, or its replica; nobody sees it."""
    before = {name: process.cpu_times().user for name, process in cluster.engines.items()}
    body = {"prompt": PROMPT, "max_tokens": 900, "seed": 11, **SAMPLED}
    pieces, text = resumed_text([cluster.url], body, api_key=KEY, max_tries=1), ""
    while len(text) < 400:
        text += next(pieces)
    engines = cluster.engines
    busy = max(engines, key=lambda name: engines[name].cpu_times().user - before[name])
    engines[busy].suspend()
    os.kill(busy if what == "replica" else engines[busy].pid, signal.SIGKILL)
    assert [text + "".join(pieces)] == expected(llm, 900, 11)
    assert psutil.wait_procs([engines[busy]], timeout=10)[0], "the engine of the lost replica runs on"
    until(lambda: len(cluster.engines) == 2 and cluster.num_engines == 2, "no new replica")


def check_drained(cluster: Cluster, llm: LLM) -> None:
    """An engine is taken away while both work: what runs goes on, and nothing new comes to it."""
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda seed: cluster.text(max_tokens=600, seed=seed, **SAMPLED), range(8))
        until(lambda: cluster.figure("vllm:num_requests_running") > ENGINE.max_batch, "both do not work")
        cluster.scale(1)
        assert list(texts) == expected(llm, 600, *range(8))
    until(lambda: len(cluster.engines) == 1 == cluster.num_engines, "the engine stays")
    assert [cluster.text(max_tokens=20, seed=1, **SAMPLED)] == expected(llm, 20, 1)


def check_left(cluster: Cluster) -> None:
    """A client that leaves ends its request."""
    body = {"prompt": PROMPT, "max_tokens": 900, "stream": True, **SAMPLED}
    with cluster.client.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    until(lambda: not any(map(cluster.figure, names)), "it runs on")


@pytest.mark.rare
def test_replicas_are_one_server(llm: LLM) -> None:
    """One test, as a cluster takes long to start."""
    with cluster() as two:
        two.scale(2)
        check_texts(two, llm)
        check_turns(two)
        check_left(two)
        check_killed(two, llm, "replica")
        check_killed(two, llm, "engine")
        check_drained(two, llm)


@pytest.mark.slow
def test_engines_come_and_go_with_load(llm: LLM) -> None:
    """From one to three and back while requests run, none of which is lost or differs."""
    with cluster() as grown, ThreadPoolExecutor(12) as pool:
        delays = {"upscale_delay_s": 1, "downscale_delay_s": 2, "metrics_interval_s": 0.5, "look_back_period_s": 2}
        grown.scale(1, 3, target_ongoing_requests=2, **delays)
        is_full, texts = True, dict[int, str]()

        def ask(first: int) -> None:
            seed = first
            while is_full:
                texts[seed] = grown.text(max_tokens=300, seed=seed, **SAMPLED)
                seed += 12

        asking = [pool.submit(ask, first) for first in range(12)]
        try:
            until(lambda: grown.num_engines == 3, "no engine is added")
            until(lambda: min(process.cpu_times().user for process in grown.engines.values()) > 1, "one has no work")
        finally:
            is_full = False
        for each in asking:
            each.result()
        until(lambda: grown.num_engines == 1 == len(grown.engines), "no engine is taken away")
        seeds = [seed for seed in range(100) if seed in texts]
        assert [texts[seed] for seed in seeds] == expected(llm, 300, *seeds)
        assert [grown.text(max_tokens=20, seed=1, **SAMPLED)] == expected(llm, 20, 1)


@pytest.mark.slow
def test_the_page_says_how(llm: LLM) -> None:
    """What docs/serving.md shows of replicas and of resuming clients, as it stands there but for the model."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    begun, asked = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with cluster() as shown, redirect_stdout(StringIO()) as told:
        exec(begun.replace('"smollm2"', '"bundled"'), {})
        until(lambda: shown.client.get("/ready").status_code == 200, "the application does not start")
        exec(asked.replace("http://127.0.0.1:8000", shown.url).replace('": 64', '": 64, "temperature": 0'), {})
    (output,) = llm.generate("def add(a, b):", SamplingParams(max_tokens=64, temperature=0.0))
    assert told.getvalue() == output.text != ""
