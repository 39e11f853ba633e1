"""Draft keys may lag and catch up: what a tree is grown from never depends on when its keys were written."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import pytest
from tests.backends.playing import SAMPLED, Player, Text, new_pair, words
from tests.conftest import TINY_DRAFT, needs_native, tiny_pair, weights_of

from aquiline.backends.base import Extend, Pair
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static
from aquiline.types import Float32

pytestmark = needs_native

WAYS: dict[str, Drafting] = {"chain": Chain(3), "static": Static(), "dynamic": Dynamic(3, 3, 12)}
PROMPT, WINDOW = words(37), 24
TREE = tuple[list[int], list[int], list[int]]


@lru_cache
def pair() -> CpuPair:
    return new_pair()


def steps_by_root(text: Text) -> dict[int, TREE]:
    return {step.root: tree for step, tree in zip(text.steps, text.trees, strict=True)}


@lru_cache
def plain() -> list[int]:
    player = Player(pair())
    text = player.add(PROMPT)
    player.run(60)
    return text.tokens


@lru_cache
def tree_at(name: str, root: int) -> TREE:
    """The tree below a root of the one text where all keys were written by chunks."""
    player = Player(pair())
    text = player.add(PROMPT, WAYS[name], output=plain()[len(PROMPT) : root + 1], drafts=True)
    while not text.decodes:
        player.step()
    player.step()
    assert text.steps[0].root == root
    return text.trees[0]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("spell", [1, 5, 23])
def test_a_spell_without_drafts(name: str, spell: int) -> None:
    """Steps that draft nothing write no draft key; the next that drafts grows the tree it would have grown."""
    player = Player(pair())
    text = player.add(PROMPT, NoDraft(), drafts=True)
    player.run(1 + spell)
    behind = text.steps[-1].draft_end
    assert behind == len(PROMPT), "keys stop at the prompt"
    text.drafting = WAYS[name]
    output = player.step()
    root = text.steps[-1].root
    assert text.steps[-1].draft_end == root + 1 and text.trees[-1] == tree_at(name, root)
    assert output.num_draft_rows >= root + 1 - behind
    player.run(30)
    assert text.tokens[: len(plain())] == plain()[: len(text.tokens)]


def test_a_spell_longer_than_a_pass_has_rows() -> None:
    """257 rows are all there is; the keys of 300 tokens are written in pieces."""
    player = Player(pair(), num_slots=1, row_budget=1)
    assert player.sizes.max_rows == 257
    text = player.add(words(3), NoDraft(), drafts=True, chunk=1)
    player.run(300)
    text.drafting = Chain(3)
    output = player.step()
    assert output.num_draft_rows == len(text.tokens) - len(text.steps[-1].kept) - 1 - 2 + 2
    same = Player(pair(), num_slots=1, row_budget=48)
    other = same.add(words(3), Chain(3), output=text.output[: text.steps[-1].root - 2], drafts=True, chunk=48)
    while not other.steps:
        same.step()
    assert other.trees[0] == text.trees[-1]


def test_a_long_spell_without_drafts_holds_few_features() -> None:
    """Those of 256 tokens at most wait to be fused, however long a text goes on without its draft. What is fused then
    is what a step that drafts fuses."""
    player = Player(pair(), num_slots=2)
    text, other = player.add(PROMPT, NoDraft(), drafts=True), player.add(PROMPT, Chain(1))
    most = 0
    while len(text.tokens) < 400:
        player.step([each for each in (text, other) if each is text or len(other.tokens) < 400])
        waiting = np.isnan(fused_of(player, text)[: len(text.tokens) - 1]).any(1)
        most = max(most, int(waiting.sum()))
        assert np.array_equal(np.sort(waiting), waiting), "the first tokens are fused first"
    assert 1 < most <= 256
    assert text.tokens[:300] == other.tokens[:300]
    assert np.array_equal(fused_of(player, text)[:200], fused_of(player, other)[:200])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("spell", [3, 20, 100, 250])
def test_a_draft_with_a_window_begins_from_what_is_held(name: str, spell: int) -> None:
    """Neither a prompt nor a step that drafts nothing computes anything for the draft. It then reads what its window
    holds, and guesses as the twin that computed all."""
    ours, theirs = (Player(pair, num_slots=1) for pair in windowed_pairs())
    texts = [player.add(PROMPT, NoDraft(), drafts=True, chunk=30) for player in (ours, theirs)]
    ours.run(2 + spell)
    assert np.isnan(fused_of(ours, texts[0])).all() and texts[0].steps[-1].draft_end <= texts[0].steps[-1].root + 1
    while len(texts[1].tokens) < len(texts[0].tokens):
        theirs.step()
    for text, player in zip(texts, (ours, theirs), strict=True):
        text.drafting = WAYS[name]
        output = player.step()
        if player is ours:
            assert WINDOW <= output.num_draft_rows <= len(PROMPT) + min(spell, WINDOW + 64) + 12
        player.run(12)
    assert texts[0].trees[spell:] == texts[1].trees[spell:] and texts[0].tokens == texts[1].tokens
    root, first = texts[0].steps[-1].root, texts[0].steps[-1].first_draft_key
    assert (first == 1) == (spell < 64) and first <= root + 1 - WINDOW


def test_features_are_captured_where_the_draft_reads_them() -> None:
    """Of a chunk that is longer than what a slot holds only the last ones, of a text that never drafts none."""
    player = Player(windowed_pairs()[0], num_slots=2, row_budget=200)
    player.add(words(200), NoDraft(), drafts=True, chunk=200)
    player.step()
    with pytest.raises(ValueError, match="row 0: has no features"):
        player.backend.features_of(1)
    player.step()
    assert np.isfinite(player.backend.features_of(1)).all()
    with pytest.raises(ValueError, match="num_rows=2: the last step had 1"):
        player.backend.features_of(2)
    never = Player(windowed_pairs()[0], num_slots=1)
    never.add(PROMPT, NoDraft())
    never.run(3)
    with pytest.raises(ValueError, match="row 0: has no features"):
        never.backend.features_of(1)


@pytest.mark.parametrize(("prompt", "chunk", "spell", "most"), [
    (37, 30, 51, WINDOW + 64), (37, 30, 52, WINDOW), (37, 30, 116, WINDOW + 64), (40, 40, 150, WINDOW + 36),
    (200, 100, 9, WINDOW + 9),
])  # fmt: skip
def test_what_a_slot_holds_is_fused_as_ever(prompt: int, chunk: int, spell: int, most: int) -> None:
    """All features that a slot holds, not only those that its next tree reads: up to the last token that there is room
    for, over and over again, and of a chunk that is longer than what a slot holds."""
    ours, theirs = Player(windowed_pairs()[0], num_slots=1, row_budget=chunk), Player(pair(), num_slots=1)
    text = ours.add(words(prompt), NoDraft(), drafts=True, chunk=chunk)
    ours.run(1 + spell)
    other = theirs.add(words(prompt), NoDraft(), output=text.output, drafts=True)
    text.drafting = other.drafting = Chain(2)
    ours.step()
    while not other.steps:
        theirs.step()
    root, first = text.steps[-1].root, text.steps[-1].first_draft_key - 1
    assert root - first == most
    assert np.array_equal(fused_of(ours, text)[first:root], fused_of(theirs, other)[first:root])
    for index in range(first + 1, root + 1):
        assert np.array_equal(key_at(ours, text, index), key_at(theirs, other, index))


def windowed_pairs() -> tuple[Pair, Pair]:
    draft = dataclasses.replace(TINY_DRAFT, model=dataclasses.replace(TINY_DRAFT.model, windows=(WINDOW,)))
    return new_pair(draft=draft), TorchPair(*weights_of(*tiny_pair(draft=draft)), "float32")


def fused_of(player: Player, text: Text) -> Float32:
    """By KV index, the draft's inputs that are there."""
    return np.concatenate([player.backend.fused[page] for page in player.pages[text.slot]])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("num_pages", [1, 2])
def test_behind_a_prefix_hit(name: str, num_pages: int) -> None:
    """Pages with draft keys: the first row behind them reads the fused feature at their end."""
    player = Player(pair())
    first = player.add(PROMPT, Chain(2))
    player.run(4)
    player.drop(first)
    second = player.add(PROMPT, WAYS[name], hit=player.pages[first.slot][:num_pages], slot=1)
    player.run(1)
    player.step()
    assert second.trees[0] == tree_at(name, len(PROMPT))
    assert second.first[-1].draft_end == len(PROMPT)


@pytest.mark.parametrize("name", WAYS)
def test_behind_pages_without_draft_keys(name: str) -> None:
    """Nothing of such pages is read but the target's keys: no feature, no draft key. The text is the same."""
    player = Player(pair())
    first = player.add(PROMPT, NoDraft())
    player.run(4)
    assert np.isnan(player.backend.fused).all(), "a text that never drafts fuses nothing"
    second = player.add(PROMPT, WAYS[name], hit=player.pages[first.slot][:2], first_draft_key=33)
    player.run(20)
    assert second.tokens[: len(plain())] == plain()[: len(second.tokens)]
    used = player.pages[first.slot][:2]
    assert np.isnan(player.backend.fused[used]).all()
    assert np.isnan(player.backend.draft_kv.v[used]).all()
    assert max(step.num_drafted for step in second.steps) > 0
    tokens = [token for tree, _, _ in second.trees for token in tree]
    assert len(set(tokens)) > 10, "drafts from keys that are not numbers would all be one token"


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_prompt_that_is_cached_whole(has_keys: bool) -> None:
    """Its last row runs again without a key of its own. Without draft keys in its pages nothing can be drafted at once,
    unless the engine says that the row's own feature will do."""
    prompt = PROMPT[:32]
    player = Player(pair())
    first = player.add(prompt, Chain(2) if has_keys else NoDraft())
    player.run(4)
    hit = player.pages[first.slot][:2]
    for first_key, drafted in ((1, 3),) if has_keys else ((33, 0), (32, 3)):
        kept = player.backend.kv.v[hit].copy()
        text = player.add(prompt, Chain(3), hit=hit, first_draft_key=first_key, slot=1)
        player.run(12)
        assert text.output[:8] == first.output[:8] or len(first.output) < 8
        assert text.first[0].draft_end == (33 if first_key == 33 else 32)
        assert [step.num_drafted for step in text.steps[:2]] == [drafted, 3]
        assert np.array_equal(player.backend.kv.v[hit], kept)
        player.drop(text)


def test_a_cached_page_is_never_written() -> None:
    """Not even by the row that runs again: what stands there stays, were it another's."""
    prompt = PROMPT[:32]
    player = Player(pair())
    player.add(prompt, NoDraft())
    player.run(1)
    page = player.pages[0][1]
    kept = player.backend.kv.v[page, :, :, -1] = 7.0
    player.add(prompt, NoDraft(), hit=player.pages[0][:2], slot=1)
    player.run(1)
    assert (player.backend.kv.v[page, :, :, -1] == kept).all()


@pytest.mark.parametrize("way", [*WAYS.values(), NoDraft()], ids=lambda way: way.name)
def test_a_text_that_gave_way_comes_back(way: Drafting) -> None:
    """Admitted with its output, in another slot: its tokens, trees and penalties go on as if it had stayed."""
    sampling = SamplingParams(
        max_tokens=64, temperature=3.0, seed=9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
    )
    player = Player(pair())
    stayed = player.add(PROMPT, way, sampling)
    player.run(40)
    gone = player.add(PROMPT, way, sampling, slot=1)
    player.run(12)
    player.drop(gone)
    back = player.add(PROMPT, way, sampling, output=gone.output, slot=2, chunk=11)
    player.run(40)
    assert back.first[-1].first_token is None
    assert back.output[:40] == stayed.output[:40]
    theirs = steps_by_root(stayed)
    assert all(theirs[root] == tree for root, tree in steps_by_root(back).items() if root in theirs)


def test_extends_write_the_keys_that_are_missing() -> None:
    """Of a text that stopped drafting: the same keys, to the bit, as of one whose chunks wrote them; once."""
    player = Player(pair())
    text = player.add(PROMPT, NoDraft(), drafts=True)
    player.run(20)
    until = 48
    player.extends.append(Extend(text.slot, until))
    output = player.step()
    assert output.num_draft_rows == until - len(PROMPT) and output.decodes[0].draft_end == until
    player.extends.append(Extend(text.slot, until - 5))
    assert player.step().num_draft_rows == 0
    player.extends.append(Extend(text.slot, until + 1))
    assert player.step().num_draft_rows == 1
    same = Player(pair())
    other = same.add(PROMPT, NoDraft(), output=text.output, drafts=True)
    while not other.decodes:
        same.step()
    for index in (1, 15, 16, 37, 40, until):
        mine, theirs = key_at(player, text, index), key_at(same, other, index)
        assert np.array_equal(mine, theirs) and not np.isnan(mine).any()
    assert np.isnan(key_at(player, text, until + 1)).all(), "no further"


def key_at(player: Player, text: Text, index: int) -> Float32:
    page, place = player.pages[text.slot][index // 16], index % 16
    return player.backend.draft_kv.v[page, 0, :, place]


def test_a_slot_goes_to_another_while_its_keys_are_completed() -> None:
    """Extends act on what the slots hold before the admissions of the same step."""
    player = Player(pair())
    text = player.add(PROMPT, NoDraft(), drafts=True)
    player.run(16)
    pages = list(player.pages[0])
    player.drop(text)
    player.extends.append(Extend(0, 48))
    player.pages[0] = player.spare[: len(player.pages[0])]
    other = player.add(words(20, 3), Chain(3), slot=0)
    assert player.step().num_draft_rows > 48 - len(PROMPT)
    player.run(6)
    assert not np.isnan(player.backend.draft_kv.v[pages[2], 0]).any(), "keys up to 47"
    alone = Player(pair())
    same = alone.add(words(20, 3), Chain(3))
    alone.run(6)
    assert other.trees == same.trees


def test_a_step_drafted_twice_is_the_same() -> None:
    """A step that was drafted and never verified has changed no slot."""
    player = Player(pair())
    text = player.add(PROMPT, Dynamic(), SAMPLED)
    player.run(3)
    message = player.next_step()
    trees = [player.backend.draft(message).read() for _ in range(3)]
    assert len({tuple(tree.tokens.tolist()) for tree in trees}) == 1
    player.note(message, player.backend.step(message).read())
    assert text.trees[-1][0] == trees[0].tokens.tolist()
    player.run(20)
    assert text.tokens[: len(plain())] == plain()[: len(text.tokens)]
