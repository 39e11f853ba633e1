"""A comparison as a user names it: who takes part, and what everybody continues. Knows neither engines nor models."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.bench.results.intervals import LEAST_RUNS
from aquiline.settings import setting


@dataclass(frozen=True)
class Contest:
    """Who is compared: peers by name, () for all; on a target of random weights, or on a pair that is named apart."""

    peer: tuple[str, ...] = setting(
        (), "transformers, openvino, llamacpp with options behind colons, or openai:URL#MODEL. Default: every setting "
        "of the three."
    )  # fmt: skip
    random_weights: str | None = setting(
        None, "llama-230m, llama-494m, llama-32m or a config.json: a target of random weights, and no draft."
    )
    bf16_arithmetic: bool = setting(False, "aquiline in bfloat16 arithmetic, too (AVX512_BF16).")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What everybody continues; one more run of every setting warms up."""

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
        for name, least in (("new_tokens", 2), ("repeats", 1), ("batch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
