"""The seam between the engine and what computes: a step goes in as one message, what it decided comes back as one.

The engine says which slots decode and how their trees may grow, which pieces of prompts to compute, and which pages
hold a slot's keys. A backend owns everything that a step computes with: weights, keys and values, the tokens and the
features of every slot, penalty counts, buffers. Nothing above this module knows rows, kernels or devices; nothing below
it knows requests, texts or who runs next.

Words: a token's *index* is its place in its sequence, prompt and output together, counted from 0. A sequence's *root*
is its last known token, whose keys are not written yet. Draft row j pairs the target's feature of token j with token
j + 1, and its key stands at KV index j + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from aquiline.config import MAX_NODES, SamplingParams
from aquiline.models.model_config import DraftConfig, ModelConfig
from aquiline.models.model_weights import DraftWeights
from aquiline.spec.confidence import Cut, Guess
from aquiline.spec.drafting import Drafting, Proposal
from aquiline.spec.match_events import MatchEvents
from aquiline.spec.text_index import TextIndex
from aquiline.spec.tree import DraftTree
from aquiline.types import AcceptResult, Float32, Int32, TokenLogprobs

TokenMasks = NDArray[np.int32]
"""[R, ceil(V / 32)]: bit t % 32 of word t // 32 says whether row r may draw token t (xgrammar's bitmask)."""

RowEdits = Sequence[Callable[[Float32], None] | None]
"""What changes the logits [V] of each row in place, on the host; None: nothing does. Empty: no row's are changed."""


@dataclass(frozen=True)
class Sizes:
    """What a backend is opened for: slots, pages of one KV group, the pages a slot can hold, prompt rows of a step."""

    num_slots: int
    num_pages: int
    page_size: int
    pages_per_slot: int
    row_budget: int

    @property
    def max_rows(self) -> int:
        """Rows of one target forward at most: a full budget of prompt rows beside a full tree in every slot."""
        return self.row_budget + self.num_slots * MAX_NODES

    @property
    def max_context(self) -> int:
        """KV indices that one slot can address."""
        return self.pages_per_slot * self.page_size

    def pages_of(self, documents: Sequence[Int32]) -> list[int]:
        """How many pages each document takes that is scored beside the others, a slot each.

        Raises ValueError if they need more slots, rows or pages than there are."""
        lengths = [len(tokens) for tokens in documents]
        num, used = sum(lengths), [-(-length // self.page_size) for length in lengths]
        fits = num <= self.max_rows and sum(used) <= self.num_pages and len(lengths) <= self.num_slots
        if not fits or min(lengths, default=0) < 1 or max(used) > self.pages_per_slot:
            raise ValueError(
                f"score: {len(lengths)} documents of {num} tokens in {sum(used)} pages: there is room for "
                f"{self.num_slots} documents, {self.max_rows} tokens and {self.num_pages} pages, {self.pages_per_slot} "
                "a document, and none may be empty"
            )
        return used


@dataclass(frozen=True, eq=False)
class Admit:
    """A sequence takes a slot, from now on and until the next Admit of that slot.

    tokens: all that are known, prompt and, after a preemption, output; the first num_prompt are the prompt. sampling:
    how its tokens are drawn, the seed resolved; its penalties, bias, min_tokens and log-probabilities are the
    backend's to apply. end_token_ids: what min_tokens forbids, and where Backend.repeat stops. bad_words: sequences of
    tokens that must not be completed. num_hit: KV indices whose pages come from the prefix cache; they are read and
    never written. drafts: whether the sequence may ever ask for the draft model: only then are features and draft keys
    kept. first_draft_key: the first KV index that holds, or will hold, a draft key; draft keys exist from there to
    draft_end - 1, and the pages that were hit have the features of all that are missing. num_prompt_logprobs: prompt
    log-probabilities that an earlier stay has already returned."""

    slot: int
    tokens: Sequence[int]
    num_prompt: int
    sampling: SamplingParams
    end_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_hit: int = 0
    drafts: bool = False
    first_draft_key: int = 1
    draft_end: int = 1
    num_prompt_logprobs: int = 0


class Pages(NamedTuple):
    """From now on the slot's pages first, first + 1, ... of a KV group are these."""

    slot: int
    first: int
    pages: tuple[int, ...]
    group: int = 0


class Chunk(NamedTuple):
    """Compute tokens [start, end) of an admitted sequence: their keys and, if it drafts, features. A backend may write
    their draft keys later, when the sequence first drafts.

    is_last: the sequence decodes after it. draws: the last row draws the first output token, which becomes the root;
    otherwise the root is the admitted token at index `end`. Rows of cached pages may be computed again, for the token
    that the last one draws or for draft keys that the pages lack; the target's keys there are not written."""

    slot: int
    start: int
    end: int
    is_last: bool
    draws: bool


class Decode(NamedTuple):
    """One decode step of a slot from its root.

    drafting: how its tree grows in this step. proposal: drafted tokens that the host brings; without a cut the draft
    model then adds none. cut: how confidence ends the Chain that the draft model drafts; None: it has its whole length.

    A proposal beside a cut is a chain, and both are verified in one tree. Its tokens are the nodes of the draft model's
    chain, or the runner-up at its end, as far as these are the same tokens; from there on they have nodes of their own.
    A tree with a cut has up to most_nodes(length) nodes and the proposal's, and its keys are written as far behind the
    root: the pages must reach there."""

    slot: int
    drafting: Drafting
    proposal: Proposal | None = None
    cut: Cut | None = None


class Extend(NamedTuple):
    """Write the draft keys of KV indices below `until` that are still missing, for pages that will be shared. The
    tokens up to index until - 1 must be known."""

    slot: int
    until: int


class StepInput(NamedTuple):
    """One step. Its parts take effect in this order: extends (under the pages the slots had), admits, pages, then
    chunks and decodes in one target forward. At most one of chunk and decode names a slot. No callables and no
    references to sequences: a step may be sent to another process or rank.

    row_costs chooses among the nodes that cuts let through. A row costs a step more or less by how many there are, so
    the nodes of all decodes are chosen together, the likeliest first: node n of them makes row_costs[c + n] of
    row_costs[c + n - 1], where the step's proposals have c tokens. Costs are in tokens. The number of nodes is taken
    for which the chances added up less row_costs[c + n] are the most, the smallest such number, and no more than
    row_costs has. The order of equal chances is that of the decodes, then of levels, a token before its runner-up;
    chances are added up in float64. Empty: all nodes that cuts let through are verified.

    with_trees: the outcome brings the verified trees."""

    decodes: tuple[Decode, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    admits: tuple[Admit, ...] = ()
    pages: tuple[Pages, ...] = ()
    extends: tuple[Extend, ...] = ()
    row_costs: tuple[float, ...] = ()
    with_trees: bool = False


class Decoded(NamedTuple):
    """What a Decode did. root: the root's index before the step; kept: the accepted drafts, then the target's own
    token (-1 where its logits are not numbers); num_drafted: nodes offered, the root apart; logprobs: one per kept
    token, where the sampling asks; guesses: of a Decode with a cut, what the draft said at each level that was drafted,
    whether it was verified or not.

    The slot's draft keys are those of the KV indices [first_draft_key, draft_end). The features of tokens below
    features_end stand in its pages if they are kept at all; the backend has later ones elsewhere, until the slot
    drafts."""

    root: int
    kept: list[int]
    num_drafted: int
    draft_end: int
    logprobs: list[TokenLogprobs] | None = None
    guesses: list[Guess] = []
    first_draft_key: int = 1
    features_end: int = 0


class Prefilled(NamedTuple):
    """What a Chunk did. first_token: what its last row drew (-1 where the logits are not numbers), None where it does
    not draw; logprobs of the first token; prompt_logprobs: the next ones, in order; the others as in Decoded."""

    first_token: int | None
    draft_end: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] = []
    first_draft_key: int = 1
    features_end: int = 0


class VerifiedTrees(NamedTuple):
    """The trees of a step, in the order of its decodes, and the paths that were kept."""

    drafted: DraftTree
    kept: AcceptResult


class StepOutput(NamedTuple):
    """What a step decided, in the order of its decodes and chunks.

    num_draft_rows: rows of the draft's passes. seconds: what each of metrics.STAGES but the host's took; None where the
    backend does not time its steps: nothing is then learnt of what steps take. parts: the same by part of the models
    (metrics.PARTS), where Backend.time_parts asked. trees: where StepInput.with_trees asked. num_experts: experts that
    the target's forward read, of all layers together; 0 without experts, and where the backend does not count. All of
    it is plain values, so that an outcome can be sent to another process."""

    decodes: list[Decoded]
    chunks: list[Prefilled]
    num_draft_rows: int
    seconds: dict[str, float] | None
    parts: dict[str, float] = {}
    trees: VerifiedTrees | None = None
    num_experts: int = 0


class Drafts(Protocol):
    """Drafted trees, possibly still on a device."""

    def read(self) -> DraftTree:
        """Wait for the trees, in the order of the step's decodes."""
        ...


class Pending(Protocol):
    """A step that has been issued."""

    def read(self) -> StepOutput:
        """Wait for what the step decided; the only wait there is. May be called once, in the order of issue."""
        ...


class Scored(NamedTuple):
    """What the target computes at every position of given documents, one document after the other.

    hidden [n, H] float32: the residual stream before the final norm; features [n, C * H]: of the captured layers;
    best int32 [n] and best_logprob float32 [n]: the most probable next token. The first two are overwritten by the next
    call."""

    hidden: Float32
    features: Float32
    best: Int32
    best_logprob: Float32


HEAD_ROWS = 256
"""Scored positions whose logits over the whole vocabulary exist at once."""


class Backend(Protocol):
    """Runs steps over storage of its own. Not thread-safe.

    step(s) is verify(s, draft(s)) to the bit. verify also takes a tree that the host has changed or made. Steps are
    issued in order; where is_async, the next may be issued before the last was read."""

    is_async: bool

    def draft(self, step: StepInput) -> Drafts:
        """Apply the step's extends, admits and pages, and grow a tree below the root of every Decode."""
        ...

    def verify(
        self, step: StepInput, drafts: Drafts | DraftTree, masks: TokenMasks | None = None, edits: RowEdits = ()
    ) -> Pending:
        """Run the target over the trees and the chunks, draw at every row, keep the drawn paths, and make every slot
        ready for its next step. masks: what each row of the trees, then of the chunks that draw, may draw. edits: what
        changes the logits of the same rows, after the slot's own rules and before the mask; none: nothing does. What an
        edit raises is raised."""
        ...

    def step(self, step: StepInput) -> Pending:
        """Both, with nothing in between."""
        ...

    def repeat(self, step: StepInput, most: int) -> Sequence[Pending]:
        """The step, then its decodes again and again from where they stand: at most `most` steps in one call, and at
        least one. It spares the host's work between them. A step in which a sequence draws one of its end tokens
        (Admit.end_token_ids) or the last of its sampling's max_tokens, or has no numbers to draw from, is the last one;
        a backend may stop before. Where `most` is above 1, the step has no chunks and no proposals, and the
        slots' pages reach as far as all the steps may go."""
        ...

    def score(self, documents: Sequence[Int32]) -> Scored:
        """Run whole documents, each from position 0. Uses the pages of all slots: nothing may be running."""
        ...

    def renew_draft(self, first_draft_keys: Mapping[int, int]) -> None:
        """Draft with the pair's present draft from now on (Pair.replace_draft). Called between two steps, all outcomes
        read. first_draft_keys: for each slot whose sequence drafts, the first KV index that is to have a draft key; all
        from there on count as missing, and the next pass of the draft writes them from the features in the pages.
        Extends that were asked for before are written by the present draft too."""
        ...

    def time_parts(self, is_wanted: bool) -> None:
        """Whether StepOutput.parts is filled from now on."""
        ...

    def close(self) -> None:
        """Give the storage back. Nothing may be called afterwards; closing twice does nothing."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A backend that can notice what slows a step down without changing its result."""

    def watch_perf(self) -> list[str]:
        """The warm-up is over. Breaches of the rules of PERF mode, which are added as they are noticed, until the next
        call."""
        ...


class Pair(Protocol):
    """A target and an optional draft, loaded into one backend's layout. Any number of backends share its weights.

    name: "native", "torch" or "gpu", for results. is_exact: whether text is bit for bit the same with speculation on or
    off. arithmetic: what weights are multiplied in. kv_dtype: "float32", "bfloat16" or "int8", on a GPU also "float16".
    draft_version: how often the draft was replaced."""

    name: str
    is_exact: bool
    arithmetic: str
    kv_dtype: str
    target: ModelConfig
    draft: DraftConfig | None
    draft_version: int

    def open(self, sizes: Sizes) -> Backend:
        """Storage and buffers for an engine of that size."""
        ...

    def replace_draft(self, draft: DraftWeights) -> None:
        """Draft with the layer, norm and head of these weights. What fuses features, the embedding and d2t stay those
        that the pair was loaded with, so that features in pages stay valid. An open backend goes on with the weights it
        has until `Backend.renew_draft`. May be called by any thread while backends run.

        Raises ValueError for a draft of another geometry or vocabulary, and where the pair cannot replace its draft."""
        ...

    def new_index(self, min_length: int, events: MatchEvents) -> TextIndex:
        """The index of an empty text, for drafts on the host that are copied from it. min_length: of a match."""
        ...

    def kv_bytes_per_token(self) -> tuple[int, int]:
        """Bytes that one token takes in the pages: the target's; the draft's, its fused features included."""
        ...

    def free_bytes(self) -> int:
        """Memory that is free for pages, where the pair's backends keep them."""
        ...

    def system(self) -> dict[str, object]:
        """What runs, for results: instruction set, threads, device, ranks."""
        ...

    def close(self) -> None:
        """End the other processes that share the pair, if there are any. Closing twice does nothing."""
        ...


def check_replaces(draft: DraftConfig | None, d2t: Int32 | None, new: DraftWeights) -> None:
    """Raises ValueError unless a pair with this draft can go on with a new one: see Pair.replace_draft. d2t [Vd]: the
    offsets of the present draft."""
    if draft is None or d2t is None:
        raise ValueError("replace_draft: the pair has no draft model")
    if new.config != draft or not np.array_equal(new.d2t, d2t):
        raise ValueError(
            f"replace_draft: {new.config} with its d2t is not the draft that runs, {draft}; train on from that one"
        )
