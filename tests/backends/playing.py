"""The least an engine must do over a backend: it keeps texts in slots, hands out pages, and sends steps.

Storage is NaN until it is written, so that whatever is read too early shows. Pages are scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.conftest import tiny_pair, weights_of

from aquiline.backends.base import (
    Admit,
    Chunk,
    Decode,
    Decoded,
    Extend,
    Pages,
    Prefilled,
    RowEdits,
    Sizes,
    StepInput,
    StepOutput,
    TokenMasks,
)
from aquiline.backends.cpu.native_backend import CpuBackend
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.config import SamplingParams
from aquiline.spec.confidence import Cut
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Proposal, Static
from aquiline.spec.tree import DraftTree
from aquiline.types import AcceptResult, TokenLogprobs

WAYS: dict[str, Drafting] = {
    "none": NoDraft(), "chain1": Chain(1), "chain3": Chain(3), "chain16": Chain(16), "static": Static(),
    "wide": Static(((0,), (1,), (2,), (3,), (1, 0), (3, 1))), "dynamic": Dynamic(), "flat": Dynamic(0, 3, 3),
    "deep": Dynamic(4, 3, 17),
}  # fmt: skip
SAMPLED = SamplingParams(max_tokens=64, temperature=3.0, seed=3)
Propose = Callable[["Text"], Proposal | None]


def new_pair(seed: int = 0, dtype: str = "float32", **settings: Any) -> CpuPair:
    decoder, head = tiny_pair(seed, **settings)
    return CpuPair(*weights_of(decoder, head), dtype, arithmetic="float32")


def words(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, 96, count)]


@dataclass(eq=False)
class Text:
    """One sequence. drafting may change between steps; propose brings host proposals, cut a cut for each step; chunk:
    prompt rows of a step."""

    slot: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    drafting: Drafting
    chunk: int = 7
    propose: Propose | None = None
    cut: Callable[[], Cut | None] = lambda: None
    num_computed: int = 0
    decodes: bool = False
    steps: list[Decoded] = field(default_factory=list)
    trees: list[tuple[list[int], list[int], list[int]]] = field(default_factory=list)  # tokens, parents, path
    first: list[Prefilled] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Player:
    """Plays texts. order: how pages are dealt out, from the first slot's first on; row_costs: of each step."""

    def __init__(self, pair: Any, num_slots: int = 4, page_size: int = 16, row_budget: int = 48) -> None:
        per_slot = 480 // page_size
        self.pair, self.sizes = pair, Sizes(num_slots, (num_slots + 1) * per_slot, page_size, per_slot, row_budget)
        self.backend: Any = pair.open(self.sizes)
        if isinstance(self.backend, CpuBackend):
            poison(self.backend)
        order = np.random.default_rng(1).permutation(self.sizes.num_pages).tolist()
        self.pages = [order[i * per_slot : (i + 1) * per_slot] for i in range(num_slots)]
        self.spare = order[num_slots * per_slot :]
        self.texts: list[Text] = []
        self.admits: list[Admit] = []
        self.news: list[Pages] = []
        self.extends: list[Extend] = []
        self.row_costs: Callable[[], tuple[float, ...]] = lambda: ()

    def add(
        self,
        prompt: Sequence[int],
        drafting: Drafting = NoDraft(),
        sampling: SamplingParams = SAMPLED,
        output: Sequence[int] = (),
        hit: Sequence[int] = (),
        first_draft_key: int = 1,
        drafts: bool | None = None,
        slot: int | None = None,
        **settings: Any,
    ) -> Text:
        """Seat a text; hit: pages of other texts that it begins with; settings are Admit's or Text's."""
        slot = next(s for s in range(self.sizes.num_slots) if not self.at(s)) if slot is None else slot
        admit = {k: settings.pop(k) for k in list(settings) if k in Admit.__dataclass_fields__}
        text = Text(slot, [*prompt, *output], len(prompt), sampling, drafting, **settings)
        text.num_computed = len(hit) * self.sizes.page_size
        self.admits.append(
            Admit(
                slot, list(text.tokens), len(prompt), sampling, num_hit=text.num_computed,
                drafts=drafting.needs_draft_model if drafts is None else drafts,
                first_draft_key=first_draft_key, draft_end=max(text.num_computed, first_draft_key), **admit,
            )
        )  # fmt: skip
        self.pages[slot][: len(hit)] = hit
        self.news.append(Pages(slot, 0, tuple(self.pages[slot])))
        self.texts.append(text)
        return text

    def at(self, slot: int) -> Text | None:
        return next((text for text in self.texts if text.slot == slot), None)

    def drop(self, text: Text) -> None:
        self.texts.remove(text)

    def next_step(self, texts: Iterable[Text] | None = None) -> StepInput:
        """The step that the given texts (None: all) take part in, with what has to be told before it."""
        decodes, chunks = [], []
        for text in self.texts if texts is None else texts:
            if text.decodes:
                proposal = text.propose(text) if text.propose is not None else None
                decodes.append(Decode(text.slot, text.drafting, proposal, text.cut()))
            else:
                chunks.append(self._chunk(text))
        told = tuple(self.admits), tuple(self.news), tuple(self.extends)
        self.admits, self.news, self.extends = [], [], []
        return StepInput(tuple(decodes), tuple(chunks), *told, self.row_costs() if decodes else (), True)

    def _chunk(self, text: Text) -> Chunk:
        end = max(text.num_prompt, len(text.tokens) - 1)
        start = min(text.num_computed, end - 1)
        until = min(end, start + text.chunk)
        return Chunk(text.slot, start, until, until == end, until == end == len(text.tokens))

    def step(
        self,
        texts: Iterable[Text] | None = None,
        in_stages: bool = False,
        change: Callable[[DraftTree], DraftTree] | None = None,
        masks: Callable[[DraftTree, StepInput], TokenMasks] | None = None,
        edits: Callable[[DraftTree, StepInput], RowEdits] | None = None,
    ) -> StepOutput:
        """One step, in one call or in stages; change, masks and edits act between the two."""
        message = self.next_step(texts)
        if not in_stages and change is None and masks is None and edits is None:
            output = self.backend.step(message).read()
        else:
            drafts = self.backend.draft(message)
            tree = drafts.read() if (change or masks or edits) is not None else None
            if tree is not None and change is not None:
                tree = change(tree)
            given = masks(tree, message) if masks is not None and tree is not None else None
            given_edits = edits(tree, message) if edits is not None and tree is not None else ()
            shown = drafts if change is None or tree is None else tree
            output = self.backend.verify(message, shown, given, given_edits).read()
        self.note(message, output)
        return output

    def note(self, message: StepInput, output: StepOutput) -> None:
        assert output.trees is not None
        tree, result = output.trees
        for b, (decode, decoded) in enumerate(zip(message.decodes, output.decodes, strict=True)):
            text = self.at(decode.slot)
            assert text is not None and decoded.root == len(text.tokens) - 1
            text.tokens += decoded.kept
            text.num_computed = len(text.tokens) - 1
            text.logprobs += decoded.logprobs or []
            text.steps.append(decoded)
            text.trees.append(part(tree, result, b))
        for chunk, prefilled in zip(message.chunks, output.chunks, strict=True):
            text = self.at(chunk.slot)
            assert text is not None and (prefilled.first_token is None) == (not chunk.draws)
            text.num_computed, text.decodes = chunk.end, chunk.is_last
            text.prompt_logprobs += prefilled.prompt_logprobs
            text.logprobs += prefilled.logprobs or []
            text.first.append(prefilled)
            if prefilled.first_token is not None:
                text.tokens.append(prefilled.first_token)

    def run(self, count: int, **how: Any) -> None:
        """Steps until every text has at least `count` output tokens; those that have them stand aside."""
        while left := [text for text in self.texts if len(text.output) < count or not text.decodes]:
            self.step(left, **how)


def poison(backend: CpuBackend) -> None:
    """Storage that nobody has written holds no numbers."""
    groups = [backend.kv] if backend.draft_kv is None else [backend.kv, backend.draft_kv]
    for group in groups:
        for storage in (group.k, group.v, group.k_scales, group.v_scales):
            if storage is not None:
                storage.fill(77 if storage.dtype.kind in "iu" else float("nan"))
    if backend.fused is not None:
        backend.fused[:] = np.nan


def part(tree: DraftTree, result: AcceptResult, b: int) -> tuple[list[int], list[int], list[int]]:
    first, end = tree.topology.offsets[b : b + 2]
    path = result.path[b, : result.num_accepted[b] + 1]
    return tree.tokens[first:end].tolist(), tree.topology.parents[first:end].tolist(), path.tolist()


def play(pair: CpuPair, prompt: Sequence[int], drafting: Drafting, count: int, **settings: Any) -> Text:
    """One text by itself."""
    player = Player(pair)
    text = player.add(prompt, drafting, **settings)
    player.run(count)
    return text


def foresee(text: Text, future: list[int], width: int = 0) -> Proposal:
    """The three tokens that will come, and `width` wrong siblings before the first of them."""
    right = future[len(text.tokens) : len(text.tokens) + 3]
    wrong = [token for token in range(1, 96) if token not in right][:width]
    if not width:
        return Proposal(tuple(right))
    return Proposal((*wrong, *right), (*(-1 for _ in wrong), -1, *range(width, width + len(right) - 1)))
