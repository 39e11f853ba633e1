"""A comparison as a user asks for it: who takes part, and what all continue. Knows neither engines nor models."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.bench.results.intervals import LEAST_RUNS
from aquiline.config import SamplingParams, check
from aquiline.settings import setting
from aquiline.spec.drafting import Chain


@dataclass(frozen=True)
class Contest:
    """The peers by name, () for all, and their work. Every setting also runs once to warm up."""

    peer: tuple[str, ...] = setting(
        (), "transformers, openvino, llamacpp with options after colons, or openai:URL#MODEL, with eagle=K: "
        "before the URL for a server that drafts K tokens. Default: every setting of the three."
    )  # fmt: skip
    random_weights: str | None = setting(
        None, "llama-230m, llama-494m, llama-32m or a config.json: a target of random weights, and no draft."
    )
    bf16_arithmetic: bool = setting(False, "aquiline in bfloat16 arithmetic, too (by AMX or AVX512_BF16).")
    num_spec_tokens: tuple[int, ...] = setting((3, 4, 5), "Chains of aquiline, and of peers with its draft.")
    prompt_tokens: int = setting(128, "Tokens of every prompt.")
    new_tokens: int = setting(128, "Tokens of every continuation, past EOS.")
    repeats: int = setting(
        LEAST_RUNS, "Rounds: measured runs of every setting, each on a prompt of its own; "
        f"{LEAST_RUNS} give intervals."
    )  # fmt: skip
    batch: int = setting(1, "Prompts that every run continues together.")
    temperature: float = setting(0.0, "0 is greedy.")
    text_source: str | None = setting(
        None, "Prompts from this file, folder or package. Default: standard library.", name="text"
    )

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("repeats", 1), ("batch", 1)):
            check(getattr(self, name) >= least, name, getattr(self, name), f"must be at least {least}")
        for k in self.num_spec_tokens:
            Chain(k)  # refuses lengths that no chain has
        self.sampling(0)  # refuses temperatures that no request has

    def sampling(self, round_number: int) -> list[SamplingParams]:
        """How the prompts of a round are sampled."""
        first = round_number * self.batch
        return [
            SamplingParams(max_tokens=self.new_tokens, temperature=self.temperature, seed=seed, ignore_eos=True)
            for seed in range(first, first + self.batch)
        ]
