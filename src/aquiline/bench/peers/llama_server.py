"""llama.cpp's server in a process of its own. All drafting of llama.cpp runs there: EAGLE-3 heads and drafts from the
text itself. It reads our target and head as GGUF files and takes token ids, one prompt at a time. It puts no BOS before
ids; an answer that counts more prompt tokens than were sent is refused.

With every answer the server says which way to draft it used; if that is not the one asked for, the run fails.

Answers are not streamed: sending tokens one by one would take time on the measured cores, which the peers inside this
process do not spend. This process's clock says when the answer came, the server's clock how long it decoded.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError

from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import PeerOutput, PeerSetup, conversion, request_json
from aquiline.blocks import PACKED
from aquiline.config import Environment

BINARY = "llama-server"
BUILD = "python benchmarks/llama_server.py"
"""The command that builds a server."""
HOST = "127.0.0.1"
START_S, STOP_S = 300.0, 10.0
MOST_DRAFTED = 64
"""The most tokens that any setting proposes in a step."""
SPARE_TOKENS = 8
"""Context beyond prompt, output and draft, since the server drafts nothing near the end of its context."""
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


class LlamaSetting:
    """How llama.cpp runs a GGUF file, in this process or in its server. Keys and values are float32 beside float32
    weights, else float16, llama.cpp's default."""

    def __init__(self, spec: PeerSpec, setup: PeerSetup, dtype: str) -> None:
        self.spec, self.dtype, self.threads = spec, dtype, setup.threads
        self.file = target_file(spec, setup, dtype)
        self.kv_precision = "f32" if dtype == "float32" else "f16"
        self.is_flash = "noflash" not in spec.flags

    def system(self) -> dict[str, object]:
        """Threads, and the settings that decide the speed."""
        return {"threads": self.threads, "kv_precision": self.kv_precision, "flash_attention": self.is_flash}


class LlamaServerPeer(LlamaSetting):
    """One running server."""

    def __init__(self, spec: PeerSpec, setup: PeerSetup, dtype: str) -> None:
        binary = find_server(spec.label)
        super().__init__(spec, setup, dtype)
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = int(probe.getsockname()[1])  # a free one
        self.address = f"http://{HOST}:{self.port}"
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process ends
        self.drafting = drafting(spec, setup.threads, self.kv_precision)
        self.expected, self.reported = self.drafting[1] if self.drafting else "none", "nothing was run"
        command = [str(binary), *self._arguments(setup.max_context)]
        if spec.drafter == "eagle":
            gguf_file = conversion("gguf_file", f"peer={spec.label!r}")
            command += ["--model-draft", str(gguf_file.draft_file(setup.target, setup.draft, dtype))]
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

    def _arguments(self, max_context: int) -> list[str]:
        threads, kv = str(self.threads), self.kv_precision
        return [
            "--host", HOST, "--port", str(self.port), "--offline", "--no-ui", "--verbosity", "2",
            "--parallel", "1", "--cache-ram", "0", "--no-cache-idle-slots", "--fit", "off",
            "--model", str(self.file), "--ctx-size", str(max_context + MOST_DRAFTED + SPARE_TOKENS),
            "--threads", threads, "--threads-batch", threads, "--cache-type-k", kv, "--cache-type-v", kv,
            "--flash-attn", "on" if self.is_flash else "off", *self.drafting,
        ]  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[PeerOutput]:
        """Continue one prompt."""
        (prompt,) = prompts
        draws = {"samplers": ["temperature"], "temperature": temperature}
        body = (draws if temperature > 0 else {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0}) | {
            "prompt": prompt, "n_predict": new_tokens, "ignore_eos": True, "cache_prompt": False,
            "return_tokens": True,
        }  # fmt: skip
        began = time.perf_counter()
        answer = self._request("/completion", body)
        total_ms = (time.perf_counter() - began) * 1e3
        token_ids, timings = answer["tokens"], answer["timings"]
        if answer["tokens_evaluated"] != len(prompt):
            raise self._error(f"read {answer['tokens_evaluated']} prompt tokens, {len(prompt)} were sent")
        if len(token_ids) != new_tokens:
            raise self._error(f"made {len(token_ids)} tokens, {new_tokens} were asked for")
        # The server lists its default "none" before the type it was told.
        self.reported = answer["generation_settings"]["speculative.types"].removeprefix("none,")
        if self.reported != self.expected:
            raise self._error(f"says that {self.reported!r} drafts; {self.expected!r} was asked for")
        first_ms = total_ms - timings["predicted_ms"]  # predicted_ms begins at the first token
        # A step keeps its accepted drafts and one token more, and never drafts more than may still be kept.
        steps = new_tokens - 1 - timings.get("draft_n_accepted", 0)
        drafted = timings.get("draft_n", 0)
        return [PeerOutput(new_tokens, first_ms, total_ms, token_ids, steps, drafted)]

    def system(self) -> dict[str, object]:
        """The settings, the server's version, and how it was asked to draft and says it did."""
        build = self._request("/props")["build_info"]
        drafting = " ".join(self.drafting) or "none"
        return super().system() | {"server": build, "drafting": drafting, "drafting_reported": self.reported}

    def close(self) -> None:
        """End the process."""
        self._end()

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self._error("ended before it was ready")
            try:
                with request_json(f"{self.address}/health"):
                    return
            except (OSError, HTTPException):
                time.sleep(0.1)  # it does not listen yet, or is loading
        raise self._error(f"was not ready after {START_S:.0f} s")

    def _check_speculative(self) -> None:
        """Raise ValueError if the server does not draft as it was told. A server that cannot draft runs on without
        drafts and states that for its slot."""
        (slot,) = self._request("/slots")
        if slot["speculative"] != bool(self.drafting):
            raise self._error(f"says speculative={slot['speculative']} of its slot; {self.expected!r} was asked for")

    def _request(self, path: str, body: dict[str, object] | None = None) -> Any:
        """The JSON of the server's answer. Raises ValueError for a broken connection or an error status."""
        try:
            with request_json(self.address + path, body) as response:
                return json.load(response)
        except HTTPError as error:
            raise self._error(f"answered {error.code}: {error.read().decode(errors='replace')}") from None
        except (OSError, HTTPException) as error:
            raise self._error(f"broke off its answer ({error!r})") from None

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
    match, length = str(spec.match), str(spec.num_spec_tokens)
    if spec.drafter is None:
        return []
    if spec.drafter == "eagle":
        return [
            "--spec-type", "draft-eagle3", "--spec-draft-n-max", length, "--threads-draft", str(threads),
            "--threads-batch-draft", str(threads), "--cache-type-k-draft", kv, "--cache-type-v-draft", kv,
        ]  # fmt: skip
    options = ["--spec-type", spec.drafter]
    if spec.match is None:
        return options
    if spec.drafter == "ngram-mod":
        return [*options, "--spec-ngram-mod-n-match", match, "--spec-ngram-mod-n-max", length,
                "--spec-ngram-mod-n-min", "1"]  # fmt: skip
    return [*options, f"--spec-{spec.drafter}-size-n", match, f"--spec-{spec.drafter}-size-m", length]


def _end(process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    log.close()
