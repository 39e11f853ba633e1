"""What `aquiline eval` compares and what it keeps of a run: settings, the plan, texts, timed runs.

Knows nothing of models or files; evaluate.py fills these, eval_figures.py reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aquiline.bench.suite.suite_plan import BASELINE
from aquiline.config import SAMPLING, PairConfig, SamplingParams
from aquiline.models.known_pairs import checkpoints
from aquiline.settings import setting
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static

if TYPE_CHECKING:
    from aquiline.bench.eval.guesses import Accuracy
    from aquiline.ledger import Ledger
    from aquiline.metrics import Counters
    from aquiline.text.questions import Question

SEARCH, OUTPUT = "Settings", "Output"
"""Headings under which settings are listed."""


@dataclass(frozen=True)
class Search:
    """The settings that are compared with the baseline, as a user names them."""

    num_spec_tokens: tuple[int, ...] = setting((), "Chain lengths to compare, as 1 2 3 4 5.", SEARCH)
    trees: tuple[str, ...] = setting(
        (), "Trees to compare: DEPTHxTOP_KxNODES, as 2x2x6 4x8x32 (EAGLE's is 5x10x60), or static. Default: chain 3 "
        "and 2x2x6.", SEARCH,
    )  # fmt: skip

    adaptive: bool = setting(False, "Compare adaptive drafting, too.", SEARCH)

    @property
    def settings(self) -> dict[str, Drafting]:
        """Ways to draft by their names, the baseline first."""
        adaptive = {Adaptive.name: Adaptive()} if self.adaptive else {}
        return settings_of(self.num_spec_tokens, self.trees) | adaptive


@dataclass(frozen=True)
class EvalPlan:
    """What is compared at which lengths; the baseline comes first. A text ends at its length, or at EOS unless
    ignore_eos. Seeds are the same at every setting and in every repeat."""

    settings: dict[str, Drafting]
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
        for name in ("lengths", "temperatures"):
            _check_each_once(name, getattr(self, name))
            if not getattr(self, name):
                raise ValueError(f"{name}=[]: needs at least one value")
        short = min(self.lengths)
        if short < 2:
            raise ValueError(f"lengths={short}: must be at least 2; the prompt's own forward gives the first token")
        for name in ("repeats", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        kinds = [drafting.name for drafting in self.settings.values()]
        if kinds[:1] != ["none"] or "none" in kinds[1:] or len(kinds) < 2:
            raise ValueError(f"settings={list(self.settings)}: needs the baseline first, and at least one that drafts")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, seed=self.seed)

    @property
    def chains(self) -> dict[int, str]:
        """Names of the settings that draft a chain, by its length."""
        return {
            drafting.num_spec_tokens: name for name, drafting in self.settings.items() if isinstance(drafting, Chain)
        }


def check_pair(pair: PairConfig) -> None:
    """Raises ValueError unless there is a draft to evaluate."""
    if checkpoints(pair.target, pair.draft).draft is None:
        raise ValueError(f"target={pair.target!r}, draft=None: name the draft too; only known pairs have their own")


def settings_of(num_spec_tokens: Sequence[int] = (), trees: Sequence[str] = ()) -> dict[str, Drafting]:
    """The baseline, a chain of each length and each tree: DEPTHxTOP_KxNODES (the root included), or static for the
    fixed one. Without either, the default chain and tree. Raises ValueError for a shape that cannot be."""
    _check_each_once("num_spec_tokens", num_spec_tokens)
    _check_each_once("trees", trees)
    if not num_spec_tokens and not trees:
        tree = Dynamic()
        num_spec_tokens, trees = (Chain().num_spec_tokens,), (f"{tree.depth}x{tree.top_k}x{tree.num_nodes}",)
    chains: dict[str, Drafting] = {f"chain-{k}": Chain(k) for k in num_spec_tokens}
    return {BASELINE: NoDraft()} | chains | {f"tree-{tree}": _tree(tree) for tree in trees}


def _check_each_once(name: str, values: Sequence[object]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{name}={list(values)}: give each value once")


def _tree(text: str) -> Drafting:
    if text == "static":
        return Static()
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"trees={text!r}: must be DEPTHxTOP_KxNODES, as 2x2x6, or static")
    depth, top_k, num_nodes = map(int, parts)
    try:
        return Dynamic(depth=depth, top_k=top_k, num_nodes=num_nodes)
    except ValueError as error:
        raise ValueError(f"trees={text!r}: {error}") from None


@dataclass(frozen=True)
class AnsweredText:
    """What one turn was answered, at every setting: `question` is its place among the questions."""

    temperature: float
    length: int
    question: int
    turn: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class TurnRun:
    """One setting writing one text once, by the wall clock: prefill_ms to its first token, decode_ms from there on,
    total_ms to its end. Of texts that were written together, prefill_ms and decode_ms are equal shares of the time to
    the first token of any of them, and of the time from there on."""

    text: AnsweredText
    setting: str
    repeat: int
    prefill_ms: float
    decode_ms: float
    total_ms: float
    counters: Counters


@dataclass(frozen=True)
class Unfit:
    """A turn that was not run, and so none after it, because prompt and length do not fit."""

    question: int
    turn: int
    length: int
    temperature: float
    reason: str


@dataclass(frozen=True)
class TeacherForced:
    """The draft's accuracy along the texts of one temperature and length."""

    temperature: float
    length: int
    repeated_share: float
    accuracy: Accuracy


@dataclass(frozen=True)
class Evaluated:
    """All that was run. choices: of adaptive drafting; prompts_sha256 identifies the token ids of all first turns."""

    plan: EvalPlan
    questions: list[Question]
    runs: list[TurnRun]
    unfit: list[Unfit]
    teacher_forced: list[TeacherForced]
    choices: Ledger
    prompts_sha256: str
