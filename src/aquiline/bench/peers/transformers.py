"""transformers in this process: `generate` on the checkpoint itself, prompt lookup included."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import PeerOutput, PeerSetup, versions
from aquiline.models.files import is_gguf


def open_peer(spec: PeerSpec, setup: PeerSetup) -> TransformersPeer:
    """Load the checkpoint. The default is bfloat16 on a CPU with bfloat16 instructions, else float32."""
    has_bf16 = bool(torch.cpu._is_avx512_bf16_supported())
    return TransformersPeer(spec, setup, spec.dtype or ("bfloat16" if has_bf16 else "float32"))


class TransformersPeer:
    """transformers' `generate`, with a streamer that only notes the time."""

    def __init__(self, spec: PeerSpec, setup: PeerSetup, dtype: str) -> None:
        self.spec, self.dtype, self.threads = spec, dtype, setup.threads
        self.attention = "eager" if "eager" in spec.flags else "sdpa"
        transformers.utils.logging.disable_progress_bar()
        where: dict[str, object] = {"pretrained_model_name_or_path": setup.target}
        if is_gguf(setup.target):
            where = {"pretrained_model_name_or_path": setup.target.parent, "gguf_file": setup.target.name}
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            **where,
            dtype=getattr(torch, dtype),
            attn_implementation=self.attention,
            trust_remote_code=False,
        ).eval()
        # generate() would fall back to the checkpoint's generation_config, which must not end or change the text.
        self.model.generation_config = GenerationConfig(pad_token_id=0)

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[PeerOutput]:
        """Continue prompts of one length."""
        input_ids = torch.tensor(prompts)
        config = GenerationConfig(
            max_new_tokens=new_tokens, pad_token_id=0, prompt_lookup_num_tokens=self.spec.num_spec_tokens,
            do_sample=temperature > 0, **({"temperature": temperature} if temperature > 0 else {}),
        )  # fmt: skip
        if temperature > 0:
            config.top_k = 0
        clock = _Clock()
        previous = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode():
                made = self.model.generate(
                    input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config, streamer=clock
                )
        finally:
            torch.set_num_threads(previous)
        first_ms, last_ms, num_steps = clock.arrivals_ms[0], clock.arrivals_ms[-1], len(clock.arrivals_ms) - 1
        rows = made[:, input_ids.shape[1] :].tolist()
        return [PeerOutput(new_tokens, first_ms, last_ms, token_ids, num_steps) for token_ids in rows]

    def system(self) -> dict[str, object]:
        """Versions, threads and the attention in use."""
        return versions("transformers", "torch") | {"threads": self.threads, "attention": self.attention}

    def close(self) -> None:
        """Free the model."""
        self.model = None


class _Clock(BaseStreamer):  # type: ignore[misc]
    """A streamer that notes when tokens arrive. The first delivery is the prompt, which is not noted."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.saw_prompt = False
        self.arrivals_ms: list[float] = []

    def put(self, value: Tensor) -> None:
        """Tokens of one step, or the prompt."""
        if self.saw_prompt:
            self.arrivals_ms.append((time.perf_counter() - self.began_s) * 1e3)
        self.saw_prompt = True

    def end(self) -> None:
        """Do nothing; the times are complete."""
