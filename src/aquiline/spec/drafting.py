"""Ways to draft, as values: none, chain, static tree, dynamic tree. A request carries one as its upper bound, a step
carries one per sequence, and a backend grows the tree that the value describes.

A value validates itself and knows its bounds, its label and its fields on a command line and in JSON. A way to draft
without a draft model has a Proposer, which sees the sequence's tokens and returns a Proposal. To add one, subclass
Drafting in a new file, as lookup.py does. The engine and the backends need not change.
"""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from aquiline.checks import check_fields
from aquiline.config import MAX_CHAIN, MAX_DEPTH, MAX_NODES, check
from aquiline.settings import setting
from aquiline.spec.past_outputs import PastSpace

if TYPE_CHECKING:
    from aquiline.spec.text_index import NewIndex

DRAFTING = "Drafting"
"""The heading under which fields of ways to draft are listed."""

DEFAULT_STATIC_PATHS: tuple[tuple[int, ...], ...] = (
    (0,),
    (1,),
    (0, 0),
    (0, 1),
    (1, 0),
    (0, 0, 0),
    (0, 0, 1),
    (0, 0, 0, 0),
)
"""A node's path as child ranks from the root: (0, 1) is the second choice below the first. Deep along first choices,
with a little width near the root, where second choices are right most often."""


class Match(NamedTuple):
    """The match that tokens were copied from. length: how many of the latest tokens stood before the copied ones in
    earlier text; occurrences: how often."""

    length: int
    occurrences: int


class Proposal(NamedTuple):
    """Drafted tokens from the host. parents[i]: the entry that token i follows, -1 for the root; () means a chain.
    A parent stands before its children; children of one parent differ.

    confidences[i]: the estimated chance that token i and all tokens above it are accepted. The sum of the confidences
    is the expected number of accepted tokens. () means no estimate. match: the match that the tokens were copied from,
    if any."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    match: Match | None = None

    @property
    def depth(self) -> int:
        """Level of the deepest token. Children of the root are on level 1. Raises ValueError unless `parents` is a
        tree."""
        if not self.parents:
            return len(self.tokens)
        levels: list[int] = []
        for i, parent in enumerate(self.parents):
            check(
                -1 <= parent < i, "parents", self.parents, f"entry {i} follows {parent}, must be one before it, or -1"
            )
            levels.append(1 + (levels[parent] if parent >= 0 else 0))
        return max(levels, default=0)


NO_PROPOSAL = Proposal(())


class Proposer(Protocol):
    """Drafts for one sequence on the host."""

    def propose(self, tokens: Sequence[int], max_tokens: int) -> Proposal:
        """Up to max_tokens tokens that may follow `tokens`, the prompt and the output so far. An empty answer is valid.

        From call to call `tokens` only grows. The proposer must neither change nor keep it."""
        ...


@dataclass(frozen=True)
class Drafting(ABC):
    """The common interface of all ways to draft."""

    name: ClassVar[str]
    needs_draft_model: ClassVar[bool] = True
    reads_prediction: ClassVar[bool] = False
    """Whether it copies from a prediction of the output, which the caller may give."""

    @property
    def max_nodes(self) -> int:
        """Nodes of one slot's tree, the root included."""
        return 1

    @property
    def max_depth(self) -> int:
        """Deepest level of a tree; the root is level 0. A step commits at most max_depth + 1 tokens."""
        return self.max_nodes - 1

    @property
    def draft_passes(self) -> tuple[int, ...]:
        """Rows of each pass of the draft model after the first, which catches up with the root."""
        return ()

    @property
    def draft_rows(self) -> int:
        """Rows that the draft model writes after the root while one slot's tree grows."""
        return sum(self.draft_passes)

    @property
    def width(self) -> int:
        """The greatest number of children of a node."""
        return 1

    @property
    def is_speculative(self) -> bool:
        """Whether a step may verify more than the root."""
        return self.max_nodes > 1

    @cached_property
    def lookahead(self) -> int:
        """Number of KV indices, from a sequence's last token on, that one step may write."""
        return max(self.max_nodes, self.draft_rows + 1)

    @property
    def is_adaptive(self) -> bool:
        """Whether the engine chooses at each step how much of this is drafted (engine/control)."""
        return False

    @property
    def label(self) -> str:
        """Short name for tables and file names."""
        return self.name

    def shared(self, new_index: NewIndex) -> Any:
        """A value that all proposers of this way to draft share within an engine, whatever their fields. Each engine
        makes it once. new_index: makes an index of a text, with the implementation of the engine's backend."""
        return None

    def proposer(
        self, prompt: Sequence[int], prediction: Sequence[int], shared: Any, past: PastSpace | None = None
    ) -> Proposer | None:
        """The proposer of one sequence, which drafts on the host; None if the draft model drafts, or if nothing does.

        prediction: the output that the caller expects, often empty; shared: the engine's value of `shared()`; past: the
        outputs of earlier requests with the same cache_salt, None if the engine keeps no past outputs."""
        return None

    def as_dict(self) -> dict[str, Any]:
        """The value as JSON: its name under "drafter" and its fields."""
        return {"drafter": self.name} | asdict(self)


@dataclass(frozen=True)
class NoDraft(Drafting):
    """One token a step: plain autoregressive decoding."""

    name: ClassVar[str] = "none"
    needs_draft_model: ClassVar[bool] = False

    @property
    def label(self) -> str:  # noqa: D102
        return "baseline"


@dataclass(frozen=True)
class Chain(Drafting):
    """num_spec_tokens drafted tokens, one after the other."""

    name: ClassVar[str] = "chain"
    num_spec_tokens: int = setting(3, "Chain length.", DRAFTING)

    def __post_init__(self) -> None:
        check_fields(self)
        check(
            1 <= self.num_spec_tokens <= MAX_CHAIN, "num_spec_tokens", self.num_spec_tokens,
            f"must be between 1 and {MAX_CHAIN}; drafter='none' switches speculation off",
        )  # fmt: skip

    @property
    def max_nodes(self) -> int:  # noqa: D102
        return 1 + self.num_spec_tokens

    @property
    def draft_passes(self) -> tuple[int, ...]:  # noqa: D102
        return (1,) * (self.num_spec_tokens - 1)

    @property
    def label(self) -> str:  # noqa: D102
        return f"chain-{self.num_spec_tokens}"


@dataclass(frozen=True)
class Static(Drafting):
    """A fixed tree, given as paths of child ranks."""

    name: ClassVar[str] = "static"
    static_paths: tuple[tuple[int, ...], ...] = setting(
        DEFAULT_STATIC_PATHS, "Every node's path as child ranks.", DRAFTING, is_option=False
    )

    def __post_init__(self) -> None:
        check_fields(self)
        paths = set(self.static_paths)
        check(0 < len(paths) < MAX_NODES, "static_paths", len(paths), f"needs 1 to {MAX_NODES - 1} different paths")
        check(len(paths) == len(self.static_paths), "static_paths", self.static_paths, "a path stands twice")
        for path in self.static_paths:
            check(
                1 <= len(path) <= MAX_DEPTH and all(0 <= rank < 64 for rank in path),
                "static_paths", path, f"a path is 1 to {MAX_DEPTH} child ranks, each 0 to 63",
            )  # fmt: skip
            check(len(path) == 1 or path[:-1] in paths, "static_paths", path, f"its parent {path[:-1]} is missing")

    @property
    def max_nodes(self) -> int:  # noqa: D102
        return 1 + len(self.static_paths)

    @property
    def max_depth(self) -> int:  # noqa: D102
        return max(len(path) for path in self.static_paths)

    @property
    def draft_passes(self) -> tuple[int, ...]:  # noqa: D102
        expanded = {path[:-1] for path in self.static_paths if len(path) > 1}
        by_level = Counter(len(path) for path in expanded)
        return tuple(by_level[level] for level in sorted(by_level))

    @property
    def width(self) -> int:  # noqa: D102
        return 1 + max(rank for path in self.static_paths for rank in path)

    @property
    def label(self) -> str:  # noqa: D102
        return f"static-{self.max_nodes}"


@dataclass(frozen=True)
class Dynamic(Drafting):
    """EAGLE-2's tree: from the top_k best children of the root on, the top_k best nodes of a level are expanded,
    `depth` times; of all nodes found the num_nodes - 1 best are verified. num_nodes counts the root; the deepest level
    is depth + 1. Source: Li et al., arXiv 2406.16858."""

    name: ClassVar[str] = "dynamic"
    depth: int = setting(2, "Dynamic: passes past the first.", DRAFTING)
    top_k: int = setting(2, "Dynamic: beam width.", DRAFTING, name="draft_top_k")
    num_nodes: int = setting(6, "Dynamic: nodes, root too.", DRAFTING)

    def __post_init__(self) -> None:
        check_fields(self)
        check(0 <= self.depth < MAX_DEPTH, "depth", self.depth, f"must be between 0 and {MAX_DEPTH - 1}")
        check(self.top_k >= 1, "draft_top_k", self.top_k, "must be at least 1")
        rows = self.depth * self.top_k
        check(rows <= MAX_NODES, "depth", self.depth, f"depth * draft_top_k = {rows} must be at most {MAX_NODES}")
        limit = min(MAX_NODES, 1 + self.top_k + self.depth * self.top_k**2)
        check(
            2 <= self.num_nodes <= limit, "num_nodes", self.num_nodes,
            f"must be between 2 and {limit}, the root included (1 + top_k + depth * top_k^2, at most {MAX_NODES})",
        )  # fmt: skip

    @property
    def max_nodes(self) -> int:  # noqa: D102
        return self.num_nodes

    @property
    def max_depth(self) -> int:  # noqa: D102
        return min(self.depth + 1, self.num_nodes - 1)

    @property
    def draft_passes(self) -> tuple[int, ...]:  # noqa: D102
        return (self.top_k,) * self.depth

    @property
    def width(self) -> int:  # noqa: D102
        return self.top_k

    @property
    def label(self) -> str:  # noqa: D102
        return f"dynamic-{self.num_nodes}"
