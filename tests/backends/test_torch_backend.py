"""The torch backend is the native one's twin: the same trees, texts and counts; and a step reads nothing back."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.playing import WAYS, Player, Text, foresee, new_pair, words
from tests.conftest import engine_config, needs_native, tiny_pair, weights_of
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, prompts, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from aquiline.backends.base import Extend, Pair
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels
from aquiline.spec.drafting import Chain, Dynamic, NoDraft
from aquiline.spec.tree import DraftTree

GREEDY = SamplingParams(max_tokens=64, seed=1)
SAMPLED = SamplingParams(max_tokens=64, temperature=2.0, seed=3)
FILTERED = dataclasses.replace(SAMPLED, top_k=40, top_p=0.95, min_p=0.01)
RULED = dataclasses.replace(
    SAMPLED, presence_penalty=0.7, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={4: 2.0}, min_tokens=9,
)  # fmt: skip
ALL = {"greedy": GREEDY, "sampled": SAMPLED, "filtered": FILTERED, "ruled": RULED}
RULES: dict[str, Any] = {"end_token_ids": frozenset({4, 9}), "bad_words": ((7,), (12, 30))}


@lru_cache
def torch_pair() -> TorchPair:
    return TorchPair(*weights_of(*tiny_pair()), "float32")


@lru_cache
def native_pair() -> Pair:
    return new_pair()


@lru_cache
def torch_llm(late: bool = True, prefix_cache: bool = False, page_size: int = 16) -> LLM:
    config = engine_config(4, page_size=page_size, late_reads=late, prefix_cache=prefix_cache)
    return LLM.from_models(LoadedModels(torch_pair(), None, "float32", 0), config)


def play_all(pair: Pair) -> list[Text]:
    """Every way to draft beside every other, each drawn in another way, prompts of all lengths in pieces."""
    player = Player(pair, num_slots=len(WAYS))
    for i, (way, sampling) in enumerate(zip(WAYS.values(), (*ALL.values(),) * 3, strict=False)):
        player.add(words(5 + 9 * i, i), way, sampling, chunk=3 + 5 * i, **(RULES if sampling is RULED else {}))
    player.run(24)
    return player.texts


@needs_native
def test_trees_texts_and_ends_of_draft_keys_are_the_native_ones() -> None:
    ours, theirs = play_all(torch_pair()), play_all(native_pair())
    for text, same in zip(ours, theirs, strict=True):
        assert text.trees == same.trees and text.tokens == same.tokens, text.drafting
        for step, other in zip(text.steps, same.steps, strict=True):
            assert step._replace(logprobs=None) == other._replace(logprobs=None)
        assert [p.draft_end for p in text.first] == [p.draft_end for p in same.first]
    assert sum(len(step.kept) - 1 for text in ours for step in text.steps) > 15, "drafts are accepted here"


@pytest.mark.parametrize("name", [name for name in WAYS if name != "none"])
@pytest.mark.parametrize("sampling", ALL.values(), ids=ALL)
def test_no_way_to_draft_changes_a_text(name: str, sampling: SamplingParams) -> None:
    texts = []
    for way in (WAYS[name], NoDraft()):
        player = Player(torch_pair())
        text = player.add(words(19, 2), way, sampling, **RULES)
        player.run(16)
        texts.append(text.output[:16])
    assert texts[0] == texts[1]


@needs_native
@pytest.mark.parametrize("sampling", ["greedy", "filtered", "penalised"])
def test_engines_write_the_same_text(sampling: str) -> None:
    """Whatever drafts, with the same counts; a prompt may begin with cached keys, draft keys and features."""
    params = dataclasses.replace(SAMPLINGS[sampling], max_tokens=12, ignore_eos=True)
    batch = prompts(6)
    more = [*batch[5][:64], 5, 6, 7]
    models = LoadedModels(native_pair(), None, "float32", 0)
    expected = tokens(LLM.from_models(models, engine_config(4)).run([*batch, more], params, drafting=BASELINE))
    for name in ("none", "chain4", "static", "dynamic"):
        drafting = SPECS.get(name, BASELINE)
        native = LLM.from_models(models, engine_config(4, prefix_cache=True))
        twin = torch_llm(prefix_cache=True)
        for prompts_, text in ((batch, expected[:6]), ([more], expected[6:])):
            ours, theirs = (llm.run(prompts_, params, drafting=drafting) for llm in (twin, native))
            assert tokens(ours) == text, name
            found, same = ours.summary.counters, theirs.summary.counters
            assert found.num_accepted_tokens == same.num_accepted_tokens, name
            assert found.num_draft_tokens == same.num_draft_tokens, name
        assert ours.outputs[0].metrics.num_prefix_hits == 64


@pytest.mark.parametrize("name", ["none", "chain4", "dynamic"])
def test_reading_late_changes_nothing(name: str) -> None:
    params = dataclasses.replace(SAMPLINGS["penalised"], max_tokens=16, logprobs=2, prompt_logprobs=1)
    found, logprobs = [], []
    for late in (True, False):
        llm = torch_llm(late)
        assert llm.engine.pipeline.is_late is late
        outputs = llm.run(prompts(6), params, drafting=SPECS.get(name, BASELINE)).outputs
        entries = [e for o in outputs for e in (*(o.prompt_logprobs or []), *(o.logprobs or []))]
        found.append(([(o.token_ids, o.by_draft) for o in outputs], [(e.token_id, e.rank, [*e.top]) for e in entries]))
        # A row's bits depend on what it runs beside, which differs here.
        logprobs.append([e.logprob for e in entries])
    assert found[0] == found[1] and np.allclose(*logprobs, rtol=0, atol=1e-5)


def test_it_may_be_issued_ahead() -> None:
    assert torch_llm(True).engine.backend.is_async
    config = engine_config(4)
    assert LLM.from_models(LoadedModels(torch_pair(), None, "float32", 0), config).engine.pipeline.is_late


class HostRead(AssertionError):
    """A step asked the device for a value."""


class NoHostReads(TorchDispatchMode):
    """Refuses operations whose value, or whose result's shape, the host would have to wait for on a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal.default", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(wait in name for wait in self.WAITS):
            raise HostRead(name)
        if name.startswith(("aten.index.Tensor", "aten.index_put")):
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            if masks:
                raise HostRead(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """No tensor tells its values, by an operation of torch or by one of Python."""
    with NoHostReads(), pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "numpy", "item", "__bool__", "__int__", "__index__", "__float__", "cpu"):
            patch.setattr(torch.Tensor, name, refuse(name))
        yield


def refuse(name: str) -> Any:
    def refused(*args: object, **kwargs: object) -> None:
        raise HostRead(f"Tensor.{name}")

    return refused


@pytest.mark.parametrize("name", ["none", "chain4", "static", "dynamic"])
def test_a_step_reads_nothing_back(name: str) -> None:
    """Prompts in chunks, cached pages, decodes by every rule and their log-probabilities: all are only issued."""
    llm, drafting = torch_llm(prefix_cache=True, page_size=32), SPECS.get(name, BASELINE)
    backend, step = llm.engine.backend, llm.engine.backend.step
    num_steps = 0

    def issued(message: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        with no_host_reads():
            return step(message)

    each = [
        dataclasses.replace(SAMPLINGS[n], max_tokens=5, logprobs=2, prompt_logprobs=1, min_tokens=m)
        for n, m in (("greedy", 0), ("filtered", 3), ("penalised", 4))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "step", issued)
        llm.run(prompts(6)[3:], each, drafting=drafting)
        again = llm.run([prompts(6)[5]], SamplingParams(max_tokens=3, ignore_eos=True), drafting=drafting)
    assert num_steps > 4 and again.outputs[0].metrics.num_prefix_hits == 64


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: int(x[0]), lambda x: bool(x[0]), lambda x: x[x > 0],
        lambda x: x.nonzero(), lambda x: list(range(x[1])), lambda x: x.numpy(), lambda x: torch.equal(x, x),
        lambda x: x.cpu(),
    ],
)  # fmt: skip
def test_reads_are_noticed(read: Any) -> None:
    with pytest.raises(HostRead), no_host_reads():
        read(torch.arange(3))


@pytest.mark.parametrize("width", [0, 2])
def test_the_host_proposes(width: int) -> None:
    """Draft keys lag behind what the host proposed; the draft model then goes on as if it had drafted all along."""
    plain = Player(torch_pair())
    future = plain.add(words(5), NoDraft(), SAMPLED)
    plain.run(40)
    player = Player(torch_pair())
    text = player.add(words(5), Chain(3), SAMPLED, propose=lambda t: foresee(t, future.tokens, width))
    other = player.add(words(14, 1), Dynamic(), FILTERED)
    player.run(16)
    assert text.tokens == future.tokens[: len(text.tokens)]
    assert [len(step.kept) for step in text.steps[:3]] == [4, 4, 4]
    assert {step.draft_end for step in text.steps} == {len(words(5))}, "no draft model, no draft keys"
    text.propose = None
    player.step([text])
    same = Player(torch_pair())
    chain = same.add(words(5), Chain(3), SAMPLED, output=text.tokens[5 : -len(text.steps[-1].kept)], chunk=50)
    same.step(), same.step()
    assert text.trees[-1] == chain.trees[0] and text.steps[-1].draft_end == text.steps[-1].root + 1
    assert len(other.output) >= 16


def test_the_host_changes_the_trees() -> None:
    """Between the stages the host may cut a tree or plant a wider or deeper one; text and later drafts stay."""
    plain = Player(torch_pair())
    future = plain.add(words(5), NoDraft(), SAMPLED)
    plain.run(60)
    rng = np.random.default_rng(0)

    def change(tree: DraftTree) -> DraftTree:
        shape, own, parents, offsets = tree.topology, [], [], [0]
        for text, first, end in zip(player.texts, shape.offsets[:-1], shape.offsets[1:], strict=True):
            kept = int(rng.integers(1, end - first + 1))  # a parent stands before its children
            ahead = [] if text is texts[0] else future.tokens[len(text.tokens) : len(text.tokens) + 5]
            own += [*tree.tokens[first : first + kept], *ahead]
            parents += [*shape.parents[first : first + kept], *([0, *range(kept, kept + 4)] if ahead else [])]
            offsets.append(len(own))
        depths: list[int] = []
        for first, end in itertools.pairwise(offsets):
            levels = [0]
            for parent in parents[first + 1 : end]:
                levels.append(levels[parent] + 1)
            depths += levels
        flat = (np.array(a, np.int32) for a in (parents, depths, offsets))
        return DraftTree(type(shape)(*flat), np.array(own, np.int32))

    player = Player(torch_pair())
    texts = [player.add(words(5), way, SAMPLED, chunk=9) for way in (Chain(3), NoDraft(), Chain(2))]
    player.step()
    for _ in range(6):
        player.step(change=change)
    for text in texts:
        assert text.tokens == future.tokens[: len(text.tokens)], text.drafting
    assert all(len(text.output) > 18 for text in texts[1:]), "the deep path is accepted"
    own = texts[2]
    player.step([own])
    same = Player(torch_pair())
    again = same.add(words(5), Chain(2), SAMPLED, output=own.tokens[5 : -len(own.steps[-1].kept)], chunk=99)
    same.step(), same.step()
    assert own.trees[-1] == again.trees[0], "its draft keys are all there"


@pytest.mark.parametrize("way", [Chain(3), Dynamic(5, 10, 60)])
def test_a_draft_pass_has_the_rows_of_what_may_be_new(way: Chain | Dynamic) -> None:
    """The pass that catches up is as long as a step can commit, however wide its tree is."""
    player = Player(torch_pair())
    player.add(words(5), way, GREEDY)
    player.run(2)
    assert player.step().num_draft_rows == way.max_depth + 1 + way.draft_rows


def test_missing_draft_keys_are_written_when_asked_for() -> None:
    player = Player(torch_pair())
    text = player.add(words(37), NoDraft(), SAMPLED, drafts=True)
    player.run(20)
    assert text.steps[-1].draft_end == 37
    player.extends.append(Extend(text.slot, 48))
    player.step()
    assert text.steps[-1].draft_end == 48
    text.drafting = Chain(3)
    player.step()
    root = text.steps[-1].root
    same = Player(torch_pair())
    again = same.add(words(37), Chain(3), SAMPLED, output=text.tokens[37 : root + 1], chunk=99)
    same.step(), same.step()
    assert text.trees[-1] == again.trees[0] and text.steps[-1].draft_end == root + 1


def test_devices() -> None:
    for device in ("tpu", "cuda:0") if not torch.cuda.is_available() else ("tpu",):
        with pytest.raises(ValueError, match=f"device='{device}': torch has no such device here"):
            TorchPair(*weights_of(*tiny_pair()), "float32", device=device)
    with pytest.raises(ValueError, match="kv_dtype='float16': must be one of auto, float32, bfloat16, int8"):
        TorchPair(*weights_of(*tiny_pair()), "float32", kv_dtype="float16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_writes_the_text_of_a_cpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = TorchPair(*weights_of(*tiny_pair()), "float32", device="cuda")
    for text, same in zip(play_all(there), play_all(torch_pair()), strict=True):
        assert text.tokens == same.tokens, text.drafting
