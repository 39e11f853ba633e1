"""A model's weights are packed once, are its own at every call, and go with it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import psutil
import pytest
import torch
from tests.conftest import needs_native

import aquiline.transformers.speculation as speculation
from aquiline import Chain
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.ops.allocator import give_back
from custom_generate.models import batch, draft_of, new_model, speculating

pytestmark = needs_native


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The storage of each packing."""
    done: list[str] = []
    pack = speculation.from_weights

    def counted(target: Any, draft: Any, tokenizer: Any, how: Any, environment: Any) -> Any:
        done.append(how.dtype)
        return pack(target, draft, tokenizer, how, environment)

    monkeypatch.setattr(speculation, "from_weights", counted)
    yield done


def equal(model: Any, how: Any, **arguments: Any) -> bool:
    inputs = batch(3) | {"max_new_tokens": 12} | arguments
    return torch.equal(model.generate(**inputs), model.generate(**inputs, custom_generate=how))


def test_a_model_is_packed_once_for_each_storage(packings: list[str]) -> None:
    model = new_model()
    assert equal(model, speculating()) and equal(model, speculating()) and equal(model, speculating(drafter="lookup"))
    assert packings == ["float32"]
    model.generate(**batch(1), max_new_tokens=3, custom_generate=speculating(dtype="int8"))
    assert equal(model, speculating(draft_of(), Chain(2)))
    assert packings == ["float32", "int8", "float32"]
    assert equal(new_model(seed=8), speculating())
    assert len(packings) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_is_stored_as_it_is(packings: list[str], dtype: torch.dtype) -> None:
    model = new_model().to(dtype)
    drafted = model.generate(**batch(3), max_new_tokens=8, custom_generate=speculating(draft_of(), Chain(2)))
    assert torch.equal(drafted, model.generate(**batch(3), max_new_tokens=8, custom_generate=speculating()))
    assert set(packings) == {str(dtype).removeprefix("torch.")}


def test_changed_weights_are_noticed(packings: list[str]) -> None:
    model, other, how = new_model(), new_model(seed=9), speculating()
    before = model.generate(**batch(3), max_new_tokens=12, custom_generate=how)
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.add_(0.3)
    assert equal(model, how)
    model.load_state_dict(other.state_dict())
    assert equal(model, how)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * -1)
    assert equal(model, how)
    assert len(packings) == 4
    assert not torch.equal(before, model.generate(**batch(3), max_new_tokens=12, custom_generate=how))


def test_weights_of_inference_mode_run(packings: list[str]) -> None:
    with torch.inference_mode():
        model = new_model()
        assert equal(model, speculating())
    assert packings == ["float32"]


def test_threads_take_turns_on_a_model_and_run_beside_each_other_on_two() -> None:
    models = [new_model(seed=1), new_model(seed=2)]
    hows = [speculating(draft_of(), Chain(3)), speculating(drafter="lookup")]
    prompts = [batch(4, seed=seed) for seed in range(4)]
    want = {(m, p): models[m].generate(**prompts[p], max_new_tokens=16) for m in range(2) for p in range(4)}
    wrong: list[tuple[int, int]] = []

    def work(first: int) -> None:
        for i in range(8):
            m, p = (first + i) % 2, (first + i // 2) % 4
            got = models[m].generate(**prompts[p], max_new_tokens=16, custom_generate=hows[i % 2])
            wrong.extend([(m, p)] * (not torch.equal(got, want[m, p])))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def num_pairs() -> int:
    return sum(type(each) is CpuPair for each in gc.get_objects())


def come_and_go() -> tuple[int, list[int], list[int]]:
    """Two models of 40 MB, packed by two threads, and one of them freed with its engines; then others come and go.

    Returns a model's bytes, and the process's bytes and packed pairs: at first, packed, and each time one is freed."""
    process = psutil.Process()
    fields = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    models = {seed: new_model(seed=seed, **fields) for seed in (1, 2)}
    held, pairs = list[int](), list[int]()

    def note() -> None:
        held.append(process.memory_info().rss)
        pairs.append(num_pairs())

    def pack(seed: int) -> None:
        models[seed].generate(**batch(2), max_new_tokens=4, custom_generate=speculating(drafter="lookup"))

    note()
    threads = [threading.Thread(target=pack, args=(seed,)) for seed in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    note()
    for seed in (1, 3, 4, 5):
        if seed not in models:
            models[seed] = new_model(seed=seed, **fields)
            pack(seed)
        del models[seed]
        gc.collect()
        give_back()
        note()
    pack(2)
    note()
    return sum(each.numel() * 4 for each in models[2].parameters()), held, pairs


def test_memory_returns_with_the_model() -> None:
    """In a process of its own: what other tests left to the collector would count here."""
    with get_context("spawn").Pool(1) as pool:
        size, (before, packed, *held), pairs = pool.apply(come_and_go)
    assert size > 40e6 and pairs == [0, 2, 1, 1, 1, 1, 1]
    freed, least = packed - held[0], size + 0.3 * (packed - before)
    assert freed > least, f"{freed / 1e6:.0f} MB came back, {least / 1e6:.0f} MB are the model's"
    assert held[3] - held[0] < size, f"three models came and went, and {(held[3] - held[0]) / 1e6:.0f} MB are left"
