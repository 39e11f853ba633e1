"""llama.cpp in this process, by llama-cpp-python, on a GGUF file: plain decoding of one prompt, or of several together.

llama.cpp's drafting is part of its server, not of the library that Python calls; `llama_server` runs the server. The
prompt lookup of llama-cpp-python is a class of the binding's own and says nothing about llama.cpp's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import _logger
from numpy.typing import NDArray

from aquiline.bench.peers.llama_server import LlamaServerPeer, LlamaSetting
from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import Peer, PeerOutput, PeerSetup, versions

MAX_ROWS = 512
"""The most rows of a forward of several prompts."""


def open_peer(spec: PeerSpec, setup: PeerSetup) -> Peer:
    """Write the GGUF files if they are not there, and load them. The default is bfloat16, which llama.cpp has on every
    CPU.

    Raises ValueError for a peer that needs the server if there is no server."""
    dtype = spec.dtype or "bfloat16"
    if spec.is_served:
        return LlamaServerPeer(spec, setup, dtype)
    return LlamaCppPeer(spec, setup, dtype) if setup.batch == 1 else LlamaCppBatchPeer(spec, setup, dtype)


class InProcess(LlamaSetting):
    """A model in this process."""

    @property
    def kv_type(self) -> int:
        """The type of keys and values in llama.cpp's terms."""
        return int(llama_cpp.GGML_TYPE_F32 if self.kv_precision == "f32" else llama_cpp.GGML_TYPE_F16)

    def system(self) -> dict[str, object]:
        """The settings, versions, and the instructions llama.cpp was built for."""
        features = llama_cpp.llama_print_system_info().decode().strip()
        return super().system() | versions("llama-cpp-python") | {"features": features}


class LlamaCppPeer(InProcess):
    """One loaded model for one prompt, by the binding's own loop."""

    def __init__(self, spec: PeerSpec, setup: PeerSetup, dtype: str) -> None:
        super().__init__(spec, setup, dtype)
        self.model: Any = llama_cpp.Llama(
            str(self.file), n_ctx=setup.max_context, n_batch=setup.max_context, n_threads=setup.threads,
            n_threads_batch=setup.threads, type_k=self.kv_type, type_v=self.kv_type, flash_attn=self.is_flash,
            verbose=False,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[PeerOutput]:
        """Continue one prompt."""
        (prompt,) = prompts
        self.model.reset()  # otherwise it would reuse the last prompt's keys and values
        token_ids: list[int] = []
        arrivals: list[float] = []
        began = time.perf_counter()
        stream = self.model.generate(
            prompt, temp=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, reset=True
        )
        for token in stream:
            arrivals.append((time.perf_counter() - began) * 1e3)
            token_ids.append(int(token))
            if len(token_ids) == new_tokens:
                break
        stream.close()
        return [PeerOutput(len(token_ids), arrivals[0], arrivals[-1], token_ids, new_tokens - 1)]

    def close(self) -> None:
        """Free the model."""
        self.model.close()


class LlamaCppBatchPeer(InProcess):
    """One loaded model and a context of several sequences, by llama.cpp's C interface: a token of each per forward."""

    def __init__(self, spec: PeerSpec, setup: PeerSetup, dtype: str) -> None:
        super().__init__(spec, setup, dtype)
        _logger.set_verbose(False)  # otherwise llama.cpp prints every graph that it plans
        self.model: Any = llama_cpp.llama_model_load_from_file(
            str(self.file).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = setup.max_context * setup.batch, setup.batch
        params.n_batch = params.n_ubatch = MAX_ROWS
        params.n_threads = params.n_threads_batch = setup.threads
        params.type_k = params.type_v = self.kv_type
        params.flash_attn_type = int(self.is_flash)
        self.context: Any = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model)))
        self.rows: Any = llama_cpp.llama_batch_init(MAX_ROWS, 0, 1)

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[PeerOutput]:
        """Continue prompts of one length together."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        noise = np.random.default_rng(0)
        began = time.perf_counter()
        drawn: list[list[int]] = [[] for _ in prompts]
        arrivals: list[float] = []
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for step in range(new_tokens):
            logits = list(self._forward(rows))
            if temperature > 0:
                logits = [row / temperature + noise.gumbel(size=len(row)) for row in logits]
            for tokens, row in zip(drawn, logits, strict=True):
                tokens.append(int(row.argmax()))
            rows = [(tokens[-1], len(prompts[0]) + step, sequence, True) for sequence, tokens in enumerate(drawn)]
            arrivals.append((time.perf_counter() - began) * 1e3)
        return [PeerOutput(len(tokens), arrivals[0], arrivals[-1], tokens, new_tokens - 1) for tokens in drawn]

    def _forward(self, rows: list[tuple[int, int, int, bool]]) -> Iterator[NDArray[Any]]:
        """Run rows (token, position, sequence, whether its logits are wanted); yield the wanted logits in order."""
        for first in range(0, len(rows), MAX_ROWS):
            part = rows[first : first + MAX_ROWS]
            batch = self.rows
            batch.n_tokens = len(part)
            for i, (token, position, sequence, is_wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, is_wanted
                batch.seq_id[i][0] = sequence
            code = llama_cpp.llama_decode(self.context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode: {code}")
            for i, (_, _, _, is_wanted) in enumerate(part):
                if is_wanted:
                    found = llama_cpp.llama_get_logits_ith(self.context, i)
                    yield np.ctypeslib.as_array(found, (self.vocab_size,)).copy()

    def close(self) -> None:
        """Free context and model."""
        llama_cpp.llama_batch_free(self.rows)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)
