"""OpenVINO GenAI's continuous batching: several sequences over paged caches, with drafting, all in one step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from aquiline.bench.peers.base import PeerOutput, PeerRun, PeerSpec, library

ov = library("openvino")
genai = library("openvino_genai")


class Batched:
    """One pipeline for several prompts."""

    def __init__(self, spec: PeerSpec, target: Path, properties: dict[str, Any]) -> None:
        self.spec = spec
        scheduler = properties.pop("scheduler_config")
        self.pipeline: Any = genai.ContinuousBatchingPipeline(str(target), scheduler, "CPU", properties)

    def generate(self, prompts: list[list[int]], config: Any) -> PeerRun:
        """Continue prompts together, each with the generation config `config`. Arrivals are timed after each step."""
        began = time.perf_counter()
        handles = [
            self.pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        outputs = [_Stream(handle) for handle in handles]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now_ms = (time.perf_counter() - began) * 1e3
            for output in outputs:
                output.take(now_ms)
        return PeerRun([output.result() for output in outputs])


class _Stream:
    """The outputs of one request so far."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.token_ids: list[int] = []
        self.arrivals_ms: list[float] = []

    def take(self, now_ms: float) -> None:
        """Take the tokens that the last step gave this request, if any."""
        if self.handle.can_read():
            for found in self.handle.read().values():
                self.token_ids += [int(token) for token in found.generated_ids]
            self.arrivals_ms.append(now_ms)

    def result(self) -> PeerOutput:
        """The finished output. The pipeline does not say how many tokens were proposed; each delivery after the first
        counts as a step."""
        return PeerOutput(
            len(self.token_ids), self.token_ids, self.arrivals_ms, num_steps=len(self.arrivals_ms) - 1
        )  # fmt: skip
