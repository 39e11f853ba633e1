"""What must hold of an engine between any two calls, beside the conservation of pages that it checks itself."""

from __future__ import annotations

from collections import Counter

import numpy as np
from tests.engine.storage import draft_stored, settle, target_stored

from aquiline.config import SamplingParams
from aquiline.engine.engine import Engine
from aquiline.engine.sequence import Request, Sequence
from aquiline.kv.prefix import Node
from aquiline.spec.drafting import Chain

CHAIN = Chain(1)


def unread_sequences(engine: Engine) -> set[Sequence]:
    """Those that ran in steps whose outcomes are still to be committed."""
    plans = [step.plan for step in engine.pipeline.unread]
    return {s for plan in plans for s in (*plan.decoding, *plan.prefilling)}


def check_sequences(engine: Engine) -> None:
    """Every request waits or runs, and those that run agree with their slots and pages."""
    scheduler, pool = engine.scheduler, engine.pool
    waiting = [entry[2] for entry in scheduler.waiting]
    running = [s for s in scheduler.running if s is not None]
    assert len(waiting) + len(running) == len(engine.sequences)
    assert {*waiting, *running} == {*engine.sequences.values()}
    assert all(s.slot == -1 and not s.nodes and s.finish_reason is None for s in waiting)
    in_flight = Counter[Sequence]()
    for plan in (step.plan for step in engine.pipeline.unread):
        in_flight.update({s: s.request.drafting.max_depth + 1 for s in plan.decoding})
        in_flight.update({s: 1 for s, chunk in zip(plan.prefilling, plan.chunks, strict=True) if chunk.draws})
    for slot, sequence in enumerate(scheduler.running):
        pages = pool.owned[slot]
        if sequence is None:
            assert not pages, f"slot {slot} is free and owns pages"
            continue
        assert sequence.slot == slot and sequence.finish_reason is None
        assert sequence.num_cached < len(sequence.tokens) and sequence.num_cached <= len(pages) * pool.page_size
        assert [node.page for node in sequence.nodes] == pages[: len(sequence.nodes)]
        published = [token for node in sequence.nodes for token in node.tokens]
        assert published == sequence.tokens[: len(published)], "only committed tokens are published"
        own = pages[len(sequence.nodes) :]
        assert (pool.refcount[own] == 1).all() and pool.cached.isdisjoint(own), "what it writes is its own"
        assert sequence.in_flight == in_flight[sequence]
        if not engine.config.late_reads and not sequence.is_prefilling:
            assert sequence.num_cached == len(sequence.tokens) - 1


def check_outcome(engine: Engine) -> None:
    """The last step by slots: where nobody decoded nothing is accepted, drafted or masked, and nobody is disabled."""
    last, num_slots = engine.pipeline.last, engine.config.max_batch
    assert engine.meter.slots.disabled_other == 0
    if last is None:
        return
    found, (tree, result) = last.by_slot(num_slots), last.output.trees
    shape, slots = tree.topology, [decode.slot for decode in last.message.decodes]
    dead = np.setdiff1d(np.arange(num_slots), slots)
    assert len(dead) == num_slots - len(slots)
    assert not found["accepted"][dead].any() and not found["mask"][dead].any() and (found["draft"][dead] < 0).all()
    assert (found["draft"] >= -1).all()
    for b, (slot, sequence) in enumerate(zip(slots, last.plan.decoding, strict=True)):
        rows, drafting = slice(shape.offsets[b], shape.offsets[b + 1]), sequence.request.drafting
        num_nodes = int(shape.offsets[b + 1] - shape.offsets[b])
        has_room = len(sequence.tokens) + sequence.max_step + sequence.lookahead <= engine.scheduler.capacity
        assert num_nodes == drafting.max_nodes or (
            num_nodes < drafting.max_nodes
            and (drafting.is_adaptive or not drafting.needs_draft_model or (num_nodes == 1 and not has_room))
        )
        assert found["accepted"][slot] == result.num_accepted[b] <= drafting.max_depth
        assert found["draft"][slot, 1:num_nodes].tolist() == tree.tokens[rows].tolist()[1:]
        assert (found["draft"][slot, num_nodes:] == -1).all()
        assert np.array_equal(found["mask"][slot, :num_nodes], shape.ancestors[rows])
        assert not found["mask"][slot, num_nodes:].any()


def check_cached_pages(engine: Engine, other: Engine) -> int:
    """Cached pages hold what a fresh prefill of their tokens by an idle engine writes, whoever wrote them and however:
    keys and values of the target and, where they are said to be there, the draft's and its features.
    Returns the number of pages with draft keys."""
    settle(engine)
    roots = engine.prefix.roots.values() if engine.prefix is not None else ()
    return sum(_check_below(engine, other, root, []) for root in roots)


def _check_below(engine: Engine, other: Engine, node: Node, tokens: list[int]) -> int:
    tokens = [*tokens, *node.tokens]
    has_draft = engine.prefix is not None and engine.prefix.has_draft_keys(node)
    num_drafted = has_draft + sum(_check_below(engine, other, child, tokens) for child in node.children.values())
    if node.children or not tokens:
        return num_drafted
    prompt = (*tokens, 1)
    sequence = other.add(Request("fresh", prompt, SamplingParams(max_tokens=2, ignore_eos=True, seed=0), CHAIN))
    while len(sequence.tokens) == len(prompt):
        other.step()
    for index in reversed(range(len(tokens) // engine.pool.page_size)):
        _check_page(engine, node, index, other, other.pool.owned[sequence.slot][index])
        assert node.parent is not None
        node = node.parent
    other.reset()
    return num_drafted


def _check_page(engine: Engine, node: Node, index: int, other: Engine, fresh: int) -> None:
    size = engine.pool.page_size
    found, wanted = target_stored(engine, [node.page], size), target_stored(other, [fresh], size)
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)), f"target's keys of page {index}"
    if engine.prefix is not None and engine.prefix.has_draft_keys(node):
        first = int(index == 0)  # draft row j stands at j + 1
        found, wanted = (draft_stored(e, [p], first, size) for e, p in ((engine, node.page), (other, fresh)))
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)), f"draft's keys of page {index}"
