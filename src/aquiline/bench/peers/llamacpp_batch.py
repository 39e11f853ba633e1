"""llama.cpp's batched decoding by its C interface: several sequences in one context, one token of each per forward."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aquiline.bench.peers.base import PeerOutput, PeerRun, PeerSpec, Place, library, versions

llama_cpp = library("llama_cpp")


class LlamaCppBatchPeer:
    """One loaded model and a context of place.batch sequences. Keys and values as LlamaCppPeer has them."""

    def __init__(self, spec: PeerSpec, place: Place, dtype: str) -> None:
        from aquiline.bench.peers.gguf_file import target_file

        self.spec, self.dtype, self.threads, self.batch = spec, dtype, place.threads, place.batch
        library("llama_cpp._logger").set_verbose(False)  # otherwise llama.cpp prints every graph that it plans
        file = str(target_file(place.target, dtype)).encode()
        self.model: Any = llama_cpp.llama_model_load_from_file(file, llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = place.max_context * place.batch, place.batch
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = place.threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32 if dtype == "float32" else llama_cpp.GGML_TYPE_F16
        params.flash_attn_type = int("noflash" not in spec.flags)
        self.context: Any = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model)))
        self.rows: Any = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self.max_rows = int(params.n_batch)

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> PeerRun:
        """Continue up to place.batch prompts of one length together."""
        if len(prompts) > self.batch:
            raise ValueError(f"peer {self.spec.label}: was opened for {self.batch} prompts, {len(prompts)} given")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        noise = np.random.default_rng(0)
        began = time.perf_counter()
        drawn: list[list[int]] = []
        arrivals: list[float] = []
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for step in range(new_tokens):
            if step > 0:
                at = len(prompts[0]) + step - 1
                rows = [(tokens[-1], at, sequence, True) for sequence, tokens in enumerate(drawn)]
            logits = list(self._forward(rows))
            if temperature > 0:
                logits = [row / temperature + noise.gumbel(size=len(row)) for row in logits]
            chosen = [int(row.argmax()) for row in logits]
            drawn = [[token] for token in chosen] if step == 0 else drawn
            if step > 0:
                for tokens, token in zip(drawn, chosen, strict=True):
                    tokens.append(token)
            arrivals.append((time.perf_counter() - began) * 1e3)
        return PeerRun([PeerOutput(len(tokens), tokens, arrivals, num_steps=new_tokens - 1) for tokens in drawn])

    def _forward(self, rows: list[tuple[int, int, int, bool]]) -> Iterator[NDArray[Any]]:
        """Run rows (token, position, sequence, whether its logits are wanted); yield the wanted logits in order."""
        for first in range(0, len(rows), self.max_rows):
            part = rows[first : first + self.max_rows]
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

    def system(self) -> dict[str, object]:
        """Versions, threads, and the instructions llama.cpp was built for."""
        return describe(self.spec, self.threads, self.dtype)

    def close(self) -> None:
        """Free context and model."""
        llama_cpp.llama_batch_free(self.rows)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


def describe(spec: PeerSpec, threads: int, dtype: str) -> dict[str, object]:
    """The system of a peer that llama-cpp-python runs in process."""
    return versions("llama-cpp-python") | {
        "threads": threads, "features": llama_cpp.llama_print_system_info().decode().strip(),
        "kv_precision": "f32" if dtype == "float32" else "f16", "flash_attention": "noflash" not in spec.flags,
    }  # fmt: skip
