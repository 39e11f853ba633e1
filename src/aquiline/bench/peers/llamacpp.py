"""llama.cpp in this process, by llama-cpp-python, on a GGUF file written from the checkpoint: plain decoding.

llama.cpp's drafting is part of its server, not of the library that Python calls; `llama_server` runs the server. The
prompt lookup of llama-cpp-python is a class of the binding's own and says nothing about llama.cpp's.
"""

from __future__ import annotations

import time
from typing import Any

from aquiline.bench.peers.base import Peer, PeerOutput, PeerRun, PeerSpec, Place, library
from aquiline.bench.peers.llama_server import LlamaServerPeer
from aquiline.bench.peers.llamacpp_batch import LlamaCppBatchPeer, describe

llama_cpp = library("llama_cpp")


def open_peer(spec: PeerSpec, place: Place) -> Peer:
    """Write the GGUF files if they are not there, and load them. The default is bfloat16, which llama.cpp has on every
    CPU.

    Raises ValueError for eagle without a draft, and for a peer that needs the server if there is no server or if
    several prompts run together."""
    dtype = spec.dtype or "bfloat16"
    if spec.is_served:
        if place.batch > 1:
            raise ValueError(f"peer {spec.label}: the server runs one prompt at a time here; {place.batch} given")
        return LlamaServerPeer(spec, place, dtype)
    return LlamaCppPeer(spec, place, dtype) if place.batch == 1 else LlamaCppBatchPeer(spec, place, dtype)


class LlamaCppPeer:
    """One loaded model. Keys and values are float32 beside float32 weights, else float16, llama.cpp's default."""

    def __init__(self, spec: PeerSpec, place: Place, dtype: str) -> None:
        from aquiline.bench.peers.gguf_file import target_file

        self.spec, self.dtype, self.threads = spec, dtype, place.threads
        file = target_file(place.target, dtype)
        kind = llama_cpp.GGML_TYPE_F32 if dtype == "float32" else llama_cpp.GGML_TYPE_F16
        self.model: Any = llama_cpp.Llama(
            str(file), n_ctx=place.max_context, n_batch=place.max_context, n_threads=place.threads,
            n_threads_batch=place.threads, type_k=kind, type_v=kind, flash_attn="noflash" not in spec.flags,
            verbose=False,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> PeerRun:
        """Continue one prompt."""
        if len(prompts) > 1:
            raise ValueError(f"peer {self.spec.label}: runs one prompt at a time, {len(prompts)} given")
        self.model.reset()  # otherwise it would reuse the last prompt's keys and values
        token_ids: list[int] = []
        arrivals: list[float] = []
        began = time.perf_counter()
        stream = self.model.generate(
            prompts[0], temp=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, reset=True
        )
        for token in stream:
            arrivals.append((time.perf_counter() - began) * 1e3)
            token_ids.append(int(token))
            if len(token_ids) == new_tokens:
                break
        stream.close()
        return PeerRun([PeerOutput(len(token_ids), token_ids, arrivals, num_steps=new_tokens - 1)])

    def system(self) -> dict[str, object]:
        """Versions, threads, and the instructions llama.cpp was built for."""
        return describe(self.spec, self.threads, self.dtype)

    def close(self) -> None:
        """Free the model."""
        self.model.close()
