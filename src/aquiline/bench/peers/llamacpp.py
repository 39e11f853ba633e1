"""llama.cpp in this process, by llama-cpp-python, on a GGUF file written from the checkpoint; prompt lookup included.

Its EAGLE-3 drafting lives in llama.cpp's server, outside the library that Python sees: `llama_server` runs that.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aquiline.bench.peers.base import Peer, PeerOutput, PeerRun, PeerSpec, Place, library
from aquiline.bench.peers.llama_server import LlamaServerPeer
from aquiline.bench.peers.llamacpp_batch import LlamaCppBatchPeer, describe

llama_cpp = library("llama_cpp")
speculative = library("llama_cpp.llama_speculative")


def open_peer(spec: PeerSpec, place: Place) -> Peer:
    """Write the GGUF files if they are not there, and load them; bfloat16, which it has on every CPU, by default.

    Raises ValueError for eagle without a draft or a server."""
    dtype = spec.dtype or "bfloat16"
    if spec.eagle is not None:
        return LlamaServerPeer(spec, place, dtype)
    return LlamaCppPeer(spec, place, dtype) if place.batch == 1 else LlamaCppBatchPeer(spec, place, dtype)


class LlamaCppPeer:
    """One loaded model. Keys and values are float32 beside float32 weights, else float16, its default."""

    def __init__(self, spec: PeerSpec, place: Place, dtype: str) -> None:
        from aquiline.bench.peers.gguf_file import target_file

        self.spec, self.dtype, self.threads = spec, dtype, place.threads
        file = target_file(place.target, dtype)
        kind = llama_cpp.GGML_TYPE_F32 if dtype == "float32" else llama_cpp.GGML_TYPE_F16
        self.drafter = _CountingLookup(spec.lookup) if spec.lookup is not None else None
        self.model: Any = llama_cpp.Llama(
            str(file), n_ctx=place.max_context + (spec.lookup or 0), n_batch=place.max_context, n_threads=place.threads,
            n_threads_batch=place.threads, type_k=kind, type_v=kind, flash_attn="flash" in spec.flags,
            logits_all=self.drafter is not None, draft_model=self.drafter, verbose=False,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> PeerRun:
        """Continue one prompt."""
        if len(prompts) > 1:
            raise ValueError(f"peer {self.spec.label}: runs one prompt at a time, {len(prompts)} given")
        self.model.reset()  # or it would find the last prompt's keys and values
        if self.drafter is not None:
            self.drafter.num_calls = self.drafter.num_tokens = 0
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
        steps, drafted = new_tokens - 1, 0
        if self.drafter is not None:
            steps, drafted = self.drafter.num_calls, self.drafter.num_tokens
        return PeerRun([PeerOutput(len(token_ids), token_ids, arrivals, num_steps=steps, num_draft_tokens=drafted)])

    def system(self) -> dict[str, object]:
        """Versions, threads, and the instructions llama.cpp was built for."""
        return describe(self.threads, self.dtype)

    def close(self) -> None:
        """Free the model."""
        self.model.close()


class _CountingLookup(speculative.LlamaPromptLookupDecoding):  # type: ignore[misc, name-defined]
    """llama-cpp-python's own prompt lookup, which tells how often it was asked and what it proposed."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_pred_tokens=num_tokens)
        self.num_calls = self.num_tokens = 0

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """The tokens proposed behind input_ids."""
        found: NDArray[np.intc] = super().__call__(input_ids, **kwargs)
        self.num_calls += 1
        self.num_tokens += len(found)
        return found
