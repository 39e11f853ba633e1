"""What a backend refuses changes nothing; what it cannot compute it says of the sequence alone."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from ctypes import byref
from functools import lru_cache

import numpy as np
import pytest
from tests.backends.playing import SAMPLED, WAYS, Player, new_pair, words
from tests.conftest import needs_native, tiny_pair, weights_of

from aquiline.backends.base import Admit, Chunk, Decode, Extend, Pages, Sizes, StepInput
from aquiline.backends.cpu.native import AqConfidence
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.backends.cpu.native_weights import library
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.errors import NativeError
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Proposal
from aquiline.spec.tree import DraftTree, Topology

pytestmark = needs_native

PLAIN = SamplingParams(seed=0)


@lru_cache
def pair() -> CpuPair:
    return new_pair()


def admit(slot: int = 2, **settings: object) -> Admit:
    return dataclasses.replace(Admit(slot, [5, 6, 7], 3, PLAIN), **settings)  # type: ignore[arg-type]


class Unknown(Drafting):
    pass


# Slot 0 decodes a chain, slot 1 a text that never drafts, slot 2 prefills, slot 3 is empty.
BAD: dict[str, tuple[StepInput, str]] = {
    "a slot that is none": (StepInput((Decode(4, NoDraft()),)), r"decode slot=4: must be in \[0, 4\)"),
    "no sequence": (StepInput((Decode(3, NoDraft()),)), "decode slot=3: has no root yet"),
    "no root yet": (StepInput((Decode(2, NoDraft()),)), "decode slot=2: has no root yet"),
    "twice": (StepInput((Decode(0, NoDraft()), Decode(0, Chain(1)))), "slot=0: stands twice"),
    "decode and chunk": (
        StepInput((Decode(0, NoDraft()),), (Chunk(0, 0, 1, False, False),)), "chunk slot=0: holds no sequence that",
    ),
    "who never drafts": (StepInput((Decode(1, Chain(1)),)), "slot=1: was admitted as a sequence that never drafts"),
    "an unknown way": (StepInput((Decode(0, Unknown()),)), "does not know how to grow it"),
    "too wide": (StepInput((Decode(0, Dynamic(1, 60, 2)),)), "width=60: the draft's vocabulary has 48 tokens"),
    "a token that is none": (
        StepInput((Decode(0, NoDraft(), Proposal((1, 96))),)), r"proposal\[1\]=96: must be in \[0, 96\)",
    ),
    "a parent behind": (
        StepInput((Decode(0, NoDraft(), Proposal((1, 2), (1, -1))),)), "entry 0 follows entry 1, must be one before it",
    ),
    "a parent too few": (StepInput((Decode(0, NoDraft(), Proposal((1, 2), (-1,))),)), "a parent for every token"),
    "too deep": (StepInput((Decode(0, NoDraft(), Proposal((1,) * 33)),)), "proposal: is deeper than 32"),
    "too many": (StepInput((Decode(0, NoDraft(), Proposal((1,) * 256)),)), "must be below 256"),
    "a chunk ahead": (StepInput(chunks=(Chunk(2, 8, 9, False, False),)), r"chunk \[8, 9\) of slot 2: 20 tokens are"),
    "a chunk beyond": (StepInput(chunks=(Chunk(2, 7, 21, True, True),)), r"chunk \[7, 21\) of slot 2"),
    "a draw too early": (StepInput(chunks=(Chunk(2, 7, 9, False, True),)), "is_last=0 and draws=1"),
    "a last one too early": (StepInput(chunks=(Chunk(2, 7, 9, True, True),)), "is_last=1 and draws=1"),
    "an extend of nobody": (StepInput(extends=(Extend(3, 1),)), "extend slot=3: holds no sequence that drafts"),
    "an extend ahead": (StepInput(extends=(Extend(2, 9),)), "slot=2 until=9: 20 tokens are known and 7 computed"),
    "a page that is none": (StepInput(pages=(Pages(0, 0, (150,)),)), r"page 150: must be in \[0, 150\)"),
    "a page too many": (StepInput(pages=(Pages(0, 29, (1, 2)),)), r"pages \[29, 31\) of slot 0: a slot has 30"),
    "a group that is none": (StepInput(pages=(Pages(0, 0, (1,), 1),)), "pages group=1: there is one group"),
    "no tokens": (StepInput(admits=(admit(tokens=[], num_prompt=0),)), "admit slot 2: 0 tokens"),
    "an admitted token": (StepInput(admits=(admit(tokens=[5, -1, 7]),)), r"tokens\[1\]=-1: must be in \[0, 96\)"),
    "more prompt than tokens": (StepInput(admits=(admit(num_prompt=4),)), r"num_prompt=4: must be in \[1, 3\]"),
    "a hit beyond": (StepInput(admits=(admit(num_hit=4),)), r"num_hit=4: must be in \[0, 3\]"),
    "draft keys ahead": (StepInput(admits=(admit(first_draft_key=4),)), r"first_draft_key=4: must be in \[1, 3\]"),
    "draft keys that no page has": (StepInput(admits=(admit(draft_end=2),)), r"draft_end=2: must be in \[1, 1\]"),
    "an end token": (StepInput(admits=(admit(end_token_ids=frozenset((1, 99))),)), r"end_token_ids\[1\]=99"),
    "a bad word": (StepInput(admits=(admit(bad_words=((1, 2), (3, 200))),)), r"bad_words\[1\]=200"),
    "an empty bad word": (StepInput(admits=(admit(bad_words=((),)),)), "a word has 0 tokens"),
    "a bias": (
        StepInput(admits=(admit(sampling=SamplingParams(seed=0, logit_bias={96: 1.0})),)), r"logit_bias\[0\]=96",
    ),
    "one admitted twice": (StepInput(admits=(admit(), admit())), "admit slot=2: stands twice"),
    "admitted and decoding": (StepInput((Decode(0, NoDraft()),), admits=(admit(0),)), "is admitted in the same step"),
}  # fmt: skip


def seated() -> Player:
    player = Player(pair())
    player.add(words(6), Chain(3))
    player.add(words(9), NoDraft())
    player.run(3)
    player.add(words(20), Dynamic())
    player.step()
    assert [text.decodes for text in player.texts] == [True, True, False]
    return player


@lru_cache
def undisturbed() -> list[list[int]]:
    player = seated()
    player.run(16)
    return [text.tokens for text in player.texts]


@pytest.mark.parametrize("way", ["step", "draft"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_changes_nothing(name: str, way: str) -> None:
    """Beside it stand an admission, pages and an extend that are in order: they must not happen either."""
    step, message = BAD[name]
    taken = {a.slot for a in step.admits} | {d.slot for d in step.decodes} | {c.slot for c in step.chunks}
    if 1 not in taken:
        step = step._replace(admits=(*step.admits, admit(1)), pages=(*step.pages, Pages(1, 0, (3,))))
    player = seated()
    with pytest.raises(ValueError, match=message):
        getattr(player.backend, way)(step)
    player.run(16)
    assert [text.tokens for text in player.texts] == undisturbed()


def bad_tree(tokens: list[int], parents: list[int], offsets: list[int]) -> Callable[[DraftTree], DraftTree]:
    def change(tree: DraftTree) -> DraftTree:
        flat = (np.array(a, np.int32) for a in (parents, [0] * len(parents), offsets))
        own = [int(tree.tokens[0]) if token is None else token for token in tokens]
        return DraftTree(Topology(*flat), np.array(own, np.int32))

    return change


ROOT: int = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("tokens", "parents", "offsets", "message"),
    [
        ([ROOT, 200], [0, 0], [0, 2], r"token 200: must be in \[0, 96\)"),
        ([ROOT, 1], [0, 1], [0, 2], r"parents\[1\]=1: must be in \[0, 1\)"),
        ([ROOT, 1], [0, 0], [0, 3], "trees of 2 nodes"),
        ([ROOT, 1], [0, 0], [0, 1, 2], "one for each of 1 decodes"),
        ([0, 1], [0, 0], [0, 2], "its root is token 0, must be"),
        ([ROOT, *[1] * 33], [0, *range(33)], [0, 34], "node 33 stands on level 33"),
        ([ROOT, *[1] * 300], [0] * 301, [0, 301], "a tree has 1 to 256 nodes"),
    ],
)
def test_trees_that_are_none(tokens: list[int], parents: list[int], offsets: list[int], message: str) -> None:
    player = seated()
    with pytest.raises(ValueError, match=message):
        player.step(player.texts[:1], change=bad_tree(tokens, parents, offsets))
    player.run(16)
    assert [text.tokens for text in player.texts] == undisturbed()


def test_a_step_is_verified_once_and_in_turn() -> None:
    player = seated()
    step = player.next_step()
    drafts = player.backend.draft(step)
    stale = player.backend.draft(step)
    for wrong in ((step, drafts), (step._replace(), stale)):
        with pytest.raises(ValueError, match="takes the step that was drafted last"):
            player.backend.verify(*wrong)
    player.note(step, player.backend.verify(step, stale).read())
    with pytest.raises(ValueError, match="takes the step that was drafted last"):
        player.backend.verify(step, stale)
    with pytest.raises(ValueError, match="no trees that wait"):
        stale.read()
    player.run(16)
    assert [text.tokens for text in player.texts] == undisturbed()


def test_pages_that_are_not_there_fail_inside() -> None:
    """The step finds out in its forward. Roots, tokens and keys are as before: with the pages it goes on."""
    player = Player(pair())
    text = player.add(words(14), Chain(3))
    player.news = [Pages(0, 0, tuple(player.pages[0][:1]))]
    player.run(1)
    assert len(text.tokens) == 15
    with pytest.raises(NativeError, match="lies in page -1"):
        player.step()
    player.news = [Pages(0, 1, tuple(player.pages[0][1:]))]
    player.run(20)
    same = Player(pair())
    other = same.add(words(14), Chain(3))
    same.run(20)
    assert text.tokens == other.tokens and text.trees == other.trees


def test_a_slots_next_text_has_none_of_the_last_ones_pages() -> None:
    player = Player(pair())
    player.drop(player.add(words(14), NoDraft()))
    player.backend.step(player.next_step([]))
    text = player.add(words(14), NoDraft())
    player.news = [Pages(0, 0, tuple(player.pages[0][:1]))]
    player.run(2)
    assert len(text.tokens) == 16
    with pytest.raises(NativeError, match="lies in page -1"):
        player.run(4)


@pytest.mark.parametrize("name", WAYS)
def test_a_target_whose_logits_are_not_numbers(name: str) -> None:
    """-1 for what was drawn, in a prompt and in a step; the backend lives on."""
    decoder, head = tiny_pair()
    decoder.final_norm.data[3] = float("nan")
    player = Player(CpuPair(*weights_of(decoder, head), "float32"))
    text = player.add(words(5), WAYS[name])
    player.step()
    assert text.tokens[5] == -1
    text.tokens[5] = 0
    for _ in range(3):
        player.step()
        assert text.steps[-1].kept == [-1]
        text.tokens[-1] = 0


@pytest.mark.parametrize("name", [name for name in WAYS if name != "none"])
def test_a_draft_whose_logits_are_not_numbers(name: str) -> None:
    """It proposes tokens that exist, and the text is the target's."""
    decoder, head = tiny_pair()
    head.norm.data[5] = float("nan")
    player = Player(CpuPair(*weights_of(decoder, head), "float32"))
    text, plain = player.add(words(5), WAYS[name]), player.add(words(5), NoDraft())
    player.run(12)
    assert text.output[:12] == plain.output[:12]
    assert all(0 <= token < 96 for tree in text.trees for token in tree[0])


def test_closing() -> None:
    player = seated()
    player.backend.close()
    player.backend.close()
    with pytest.raises(ValueError, match="batch is NULL"):
        player.backend.step(StepInput((Decode(0, NoDraft()),)))


def test_a_text_as_long_as_its_pages() -> None:
    """Up to the last KV index that a slot can address; one more is refused."""
    player = Player(pair(), num_slots=1)
    limit = player.sizes.max_context
    text = player.add(words(limit - 8), NoDraft(), SAMPLED, chunk=48)
    player.run(8)
    assert len(text.tokens) == limit
    player.step()  # the last index's key
    with pytest.raises(Exception, match=r"write\[0\]=480: must be in"):
        player.step()
    player.drop(text)
    with pytest.raises(ValueError, match="admit slot 0: 481 tokens, there is room for 480"):
        player.backend.step(StepInput(admits=(Admit(0, words(481), 481, PLAIN),)))


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize(
    ("lengths", "named"),
    [
        ([5, 0], "2 documents of 5 tokens in 1 pages"),
        ([], "0 documents"),
        ([3] * 5, "room for 4 documents"),
        ([400], "1 documents of 400 tokens in 25 pages"),
    ],
)
def test_documents_that_do_not_fit_are_refused(name: str, lengths: list[int], named: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = pair() if name == "native" else TorchPair(*weights_of(*tiny_pair()), "float32")
    backend = own.open(Sizes(4, 20, 16, 8, 64))
    with pytest.raises(ValueError, match=named):
        backend.score([np.ones(length, np.int32) for length in lengths])
    assert backend.score([np.ones(3, np.int32)]).hidden.shape == (3, 64)
    backend.close()
    backend.close()


@pytest.mark.parametrize("num_pages", [-1, 1 << 30])
def test_a_message_of_impossible_length_is_refused(num_pages: int) -> None:
    player = seated()
    batch = player.backend._batch  # type: ignore[attr-defined]
    batch._message[:4] = (0, 0, 0, num_pages)
    assert batch._library.draft(batch._handle, batch._message, byref(AqConfidence()), None, 0) == -1
    assert f"a step with {num_pages} runs of pages" in str(batch._library.last_error())


def test_weights_of_no_size_are_refused() -> None:
    with pytest.raises(NativeError, match="n=0, k=16: must be positive"):
        library().packed_bytes(0, 16, 0)
