"""The plan of `aquiline eval`: the settings that are compared, and the texts that they write."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from aquiline.bench.suite.suite_plan import BASELINE
from aquiline.config import SAMPLING, SamplingParams, check
from aquiline.settings import setting
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static

SEARCH, OUTPUT = "Settings", "Output"
"""Headings under which settings are listed."""


@dataclass(frozen=True)
class EvalPlan:
    """The settings that are compared with the baseline, and the texts that they write. A text ends at its length, or at
    EOS unless ignore_eos. Seeds are the same at every setting and in every repeat."""

    num_spec_tokens: tuple[int, ...] = setting((), "Chain lengths to compare, as 1 2 3 4 5.", SEARCH)
    trees: tuple[str, ...] = setting(
        (), "Trees to compare: DEPTHxTOP_KxNODES, as 2x2x6 4x8x32 (EAGLE's is 5x10x60), or static. Default: chain 3 "
        "and 2x2x6.", SEARCH,
    )  # fmt: skip
    adaptive: bool = setting(False, "Compare adaptive drafting, too.", SEARCH)
    lengths: tuple[int, ...] = setting((50, 100, 200), "New tokens at most.", SAMPLING)
    temperatures: tuple[float, ...] = setting((0.0,), "One or several.", SAMPLING, name="temperature")
    repeats: int = setting(1, "Runs of each text, for the times.", SAMPLING)
    batch: int = setting(1, "Questions that are answered together.", SAMPLING)
    seed: int = setting(0, "Question i draws with seed + i.", SAMPLING)
    ignore_eos: bool = setting(False, "Write every text to its length.", SAMPLING)
    teacher_forced: bool = setting(
        True, "Also judge the draft at every position, which takes one more slow run per text.", OUTPUT
    )

    def __post_init__(self) -> None:
        for name in ("num_spec_tokens", "trees", "lengths", "temperatures"):
            values = getattr(self, name)
            check(len(set(values)) == len(values), name, list(values), "give each value once")
            check(bool(values) or name in ("num_spec_tokens", "trees"), name, [], "needs at least one value")
        short = min(self.lengths)
        check(short >= 2, "lengths", short, "must be at least 2; the prompt's own forward gives the first token")
        for name in ("repeats", "batch"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)
        names = list(self.settings)  # a shape that cannot be is refused here
        assert names[0] == BASELINE and len(names) > 1, names

    @cached_property
    def settings(self) -> dict[str, Drafting]:
        """Ways to draft by their names: the baseline, a chain of each length, each tree (DEPTHxTOP_KxNODES, the root
        included, or static for the fixed one), and adaptive drafting. Without chains and trees, the default ones."""
        lengths, trees, tree = self.num_spec_tokens, self.trees, Dynamic()
        if not lengths and not trees:
            lengths, trees = (Chain().num_spec_tokens,), (f"{tree.depth}x{tree.top_k}x{tree.num_nodes}",)
        chains: dict[str, Drafting] = {f"chain-{k}": Chain(k) for k in lengths}
        adaptive = {Adaptive.name: Adaptive()} if self.adaptive else {}
        return {BASELINE: NoDraft()} | chains | {f"tree-{text}": _tree(text) for text in trees} | adaptive

    def as_dict(self) -> dict[str, object]:
        """The plan as eval.json states it."""
        names = ("lengths", "temperatures", "repeats", "batch", "seed", "ignore_eos")
        settings = {name: drafting.as_dict() for name, drafting in self.settings.items()}
        return {name: getattr(self, name) for name in names} | {"settings": settings}

    @property
    def chains(self) -> dict[int, str]:
        """Names of the settings that draft a chain, by its length."""
        return {
            drafting.num_spec_tokens: name for name, drafting in self.settings.items() if isinstance(drafting, Chain)
        }


def _tree(text: str) -> Drafting:
    if text == "static":
        return Static()
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"trees={text!r}: must be DEPTHxTOP_KxNODES, as 2x2x6, or static")
    try:
        return Dynamic(*map(int, parts))
    except ValueError as error:
        raise ValueError(f"trees={text!r}: {error}") from None
