"""llama.cpp's server in a process of its own. All drafting of llama.cpp runs there: EAGLE-3 heads and drafts from the
text itself. It reads our target and head as GGUF files and takes token ids, one prompt at a time. It puts no BOS before
ids; an answer that counts more prompt tokens than were sent is refused.

With every answer the server says which way to draft it used; if that is not the one asked for, the run fails.

Answers are not streamed: sending tokens one by one would take time on the measured cores, which the peers inside this
process do not spend. This process's clock says when the answer came, the server's clock how long it decoded.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO, Any

from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import PeerOutput, PeerRun, PeerSetup, check_batch, conversion
from aquiline.blocks import PACKED
from aquiline.config import Environment

BINARY = "llama-server"
BUILD = "python benchmarks/llama_server.py"
"""The command that builds a server."""
HOST = "127.0.0.1"
OK = 200
START_S, ANSWER_S, STOP_S = 300.0, 600.0, 10.0
MOST_DRAFTED = 64
"""The most tokens that any setting proposes in a step."""
SPARE_TOKENS = 8
"""Context behind prompt, output and draft, since the server drafts nothing near the end of its context."""
_SHOWN_LINES = 4  # lines of the server's log in an error


def server_folder() -> Path:
    """The folder of a server that was built for these comparisons, unless another folder was chosen."""
    from huggingface_hub import cached_assets_path

    return cached_assets_path("aquiline", namespace="peers", subfolder=BINARY)


def find_server(label: str) -> Path:
    """The server's binary: AQUILINE_LLAMA_SERVER, else one on the PATH, else the one in `server_folder`.

    Raises ValueError naming the command that builds one."""
    named = Environment.read().llama_server
    if named is not None:
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise ValueError(f"AQUILINE_LLAMA_SERVER={named!r}: is no program; leave it out or build one by {BUILD}")
        return Path(named)
    found = shutil.which(BINARY) or shutil.which(BINARY, path=server_folder())
    if found is None:
        raise ValueError(
            f"peer {label}: drafts in llama.cpp's server, and there is no {BINARY} on the PATH or in "
            f"{server_folder()}; build one by {BUILD}, or name one in AQUILINE_LLAMA_SERVER"
        )
    return Path(found)


class LlamaServerPeer:
    """One running server. Keys and values are float32 beside float32 weights, else float16, as in `LlamaCppPeer`."""

    def __init__(self, spec: PeerSpec, setup: PeerSetup, dtype: str) -> None:
        draft = setup.draft_for(spec.label) if spec.eagle is not None else None
        binary = find_server(spec.label)
        self.spec, self.dtype, self.threads = spec, dtype, setup.threads
        self.kv_precision = "f32" if dtype == "float32" else "f16"
        self.port = _free_port()
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process ends
        self.drafting = drafting(spec, setup.threads, self.kv_precision)
        self.expected, self.reported = self.drafting[1] if self.drafting else "none", "nothing was run"
        command = [str(binary), *self._arguments(target_file(spec, setup, dtype), setup)]
        if draft is not None:
            gguf_file = conversion("gguf_file", f"peer={spec.label!r}")
            command += ["--model-draft", str(gguf_file.draft_file(setup.target, draft, dtype))]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        except OSError as error:
            raise ValueError(f"peer {spec.label}: {binary} does not start ({error}); build one by {BUILD}") from None
        self._end = weakref.finalize(self, _end, self.process, self.log)  # ends the process without close() too
        try:
            self._await_health()
            self._check_speculative()
        except ValueError:
            self.close()
            raise

    def _arguments(self, target: Path, setup: PeerSetup) -> list[str]:
        threads, kv = str(setup.threads), self.kv_precision
        return [
            "--host", HOST, "--port", str(self.port), "--offline", "--no-ui", "--verbosity", "2",
            "--parallel", "1", "--cache-ram", "0", "--no-cache-idle-slots", "--fit", "off",
            "--model", str(target), "--ctx-size", str(setup.max_context + MOST_DRAFTED + SPARE_TOKENS),
            "--threads", threads, "--threads-batch", threads, "--cache-type-k", kv, "--cache-type-v", kv,
            "--flash-attn", "off" if "noflash" in self.spec.flags else "on", *self.drafting,
        ]  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> PeerRun:
        """Continue one prompt."""
        check_batch(self.spec.label, prompts, 1)
        draws = {"samplers": ["temperature"], "temperature": temperature}
        body = (draws if temperature > 0 else {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0}) | {
            "prompt": prompts[0], "n_predict": new_tokens, "ignore_eos": True, "cache_prompt": False,
            "return_tokens": True,
        }  # fmt: skip
        began = time.perf_counter()
        answer = self._request("POST", "/completion", json.dumps(body))
        total_ms = (time.perf_counter() - began) * 1e3
        token_ids, timings = answer["tokens"], answer["timings"]
        if answer["tokens_evaluated"] != len(prompts[0]):
            raise self._error(f"read {answer['tokens_evaluated']} prompt tokens, {len(prompts[0])} were sent")
        if len(token_ids) != new_tokens:
            raise self._error(f"made {len(token_ids)} tokens, {new_tokens} were asked for")
        # The server lists its default "none" before the type it was told.
        self.reported = answer["generation_settings"]["speculative.types"].removeprefix("none,")
        if self.reported != self.expected:
            raise self._error(f"says that {self.reported!r} drafts; {self.expected!r} was asked for")
        arrivals = [total_ms - timings["predicted_ms"], total_ms]  # predicted_ms begins at the first token
        # A step keeps its accepted drafts and one token more, and never drafts more than may still be kept.
        steps = new_tokens - 1 - timings.get("draft_n_accepted", 0)
        drafted = timings.get("draft_n", 0)
        return PeerRun([PeerOutput(new_tokens, token_ids, arrivals, num_steps=steps, num_draft_tokens=drafted)])

    def system(self) -> dict[str, object]:
        """The server's version, its threads, and the settings that decide its speed."""
        return {
            "server": self._request("GET", "/props")["build_info"], "threads": self.threads,
            "kv_precision": self.kv_precision, "flash_attention": "noflash" not in self.spec.flags,
            "drafting": " ".join(self.drafting) or "none", "drafting_reported": self.reported,
        }  # fmt: skip

    def close(self) -> None:
        """End the process."""
        self._end()

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self._error("ended before it was ready")
            try:
                if self._ask("GET", "/health")[0] == OK:
                    return
            except (OSError, http.client.HTTPException):
                pass  # it does not listen yet
            time.sleep(0.1)
        raise self._error(f"was not ready after {START_S:.0f} s")

    def _check_speculative(self) -> None:
        """Raise ValueError if the server does not draft as it was told. A server that cannot draft runs on without
        drafts and states that for its slot."""
        (slot,) = self._request("GET", "/slots")
        if slot["speculative"] != bool(self.drafting):
            raise self._error(f"says speculative={slot['speculative']} of its slot; {self.expected!r} was asked for")

    def _request(self, method: str, path: str, body: str | None = None) -> Any:
        """The JSON of the server's answer. Raises ValueError for a broken connection or an error status."""
        try:
            status, said = self._ask(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise self._error(f"broke off its answer ({error!r})") from None
        if status != OK:
            raise self._error(f"answered {status}: {said.decode(errors='replace')}")
        return json.loads(said)

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        """Status and body of the server's answer."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _log(self) -> list[str]:
        """The lines that the server printed. pread leaves the file's position alone, at which the server writes."""
        said = os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size, 0)
        return [line for line in said.decode(errors="replace").splitlines() if line.strip()]

    def _error(self, what: str) -> ValueError:
        """An error that says what went wrong, with the end of the server's log if its process has ended."""
        try:
            self.process.wait(1)  # a connection breaks shortly before its process ends
        except subprocess.TimeoutExpired:
            return ValueError(f"peer {self.spec.label}: the server {what}")
        said = " | ".join(self._log()[-_SHOWN_LINES:])
        return ValueError(f"peer {self.spec.label}: the server {what}; it ended with {self.process.returncode}: {said}")


def target_file(spec: PeerSpec, setup: PeerSetup, dtype: str) -> Path:
    """The GGUF file of a target, written if it is not there; with dtype "packed" the target itself."""
    if dtype == PACKED:
        return setup.target
    file: Path = conversion("gguf_file", f"peer={spec.label!r}").target_file(setup.target, dtype)
    return file


def drafting(spec: PeerSpec, threads: int, kv: str) -> list[str]:
    """The server's command-line options for a way to draft; none for plain decoding."""
    if spec.eagle is not None:
        return [
            "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(spec.eagle), "--threads-draft", str(threads),
            "--threads-batch-draft", str(threads), "--cache-type-k-draft", kv, "--cache-type-v-draft", kv,
        ]  # fmt: skip
    if spec.ngram is None:
        return []
    kind, match, draft = spec.ngram.kind, spec.ngram.match, spec.ngram.draft
    options = ["--spec-type", kind]
    if match is None or draft is None:
        return options
    if kind == "ngram-mod":
        return [*options, "--spec-ngram-mod-n-match", str(match), "--spec-ngram-mod-n-max", str(draft),
                "--spec-ngram-mod-n-min", "1"]  # fmt: skip
    return [*options, f"--spec-{kind}-size-n", str(match), f"--spec-{kind}-size-m", str(draft)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()
