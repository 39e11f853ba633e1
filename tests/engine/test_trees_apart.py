"""What is drafted, and so tau, equals trees grown apart from the engine: each node by a forward over its own path, each
path scored by the product of its probabilities. A wrong draft changes no text, so nothing else would notice it."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from tests.conftest import needs_native
from tests.engine.pair_apart import Path, Text
from tests.engine.test_sampling_apart import NOISY, PLAIN, bundled
from tests.spec.topologies import paths

from aquiline.bench.data.prompts import read_prompts
from aquiline.engine.llm import Output
from aquiline.engine.pipeline import Step
from aquiline.models.known_pairs import BUNDLED_PROMPTS
from aquiline.spec.drafting import Chain, Drafting, Dynamic, Static

pytestmark = needs_native

SPECS = {
    "chain": Chain(5), "static": Static(),
    "second choices": Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (0, 1, 0, 0))),
    "dynamic": Dynamic(), "wide": Dynamic(depth=4, top_k=4, num_nodes=16),
}  # fmt: skip
SAMPLINGS = {name: dataclasses.replace(s, max_tokens=48) for name, s in (("greedy", PLAIN), ("sampled", NOISY))}
NUM_STEPS = {
    "greedy": {"chain": 13, "static": 13, "second choices": 19, "dynamic": 15, "wide": 13},
    "sampled": {"chain": 19, "static": 17, "second choices": 19, "dynamic": 18, "wide": 14},
}
"""Steps that the same 47 tokens take: tau, pinned. Another bundled pair has its own."""


def prompt(number: int = 0) -> list[int]:
    return bundled().encode(read_prompts(BUNDLED_PROMPTS)[number].text)[: 30 + 9 * number]


def speculated(text: Text, num_prompt: int, drafting: Drafting) -> tuple[list[bool], list[set[Path]]]:
    """Who wrote each output token, and the tree of each step, if trees grow as they should."""
    by_draft, trees, root = [False], [], num_prompt
    while root + 1 < len(text.tokens):
        trees.append(text.tree(root, drafting))
        ahead = text.tokens[root + 1 :]
        accepted = max(depth for depth in range(len(ahead) + 1) if not depth or tuple(ahead[:depth]) in trees[-1])
        by_draft += [True] * accepted + [False]
        root += accepted + 1
    return by_draft[: len(text.tokens) - num_prompt], trees


def paths_of(step: Step) -> set[Path]:
    """The nodes of the one tree of a step, the root excluded."""
    tree, _ = step.output.trees
    shape, tokens = tree.topology, tree.tokens
    ways = paths(shape)
    return {tuple(tokens[ways[row, 1 : shape.depths[row] + 1]].tolist()) for row in range(1, len(tokens))}


@cache
def serve(sampling: str, name: str) -> tuple[Output, list[set[Path]]]:
    """A text, and the trees the engine says it verified."""
    llm, trees = bundled(), list[set[Path]]()

    def listen(_: object) -> None:
        assert llm.engine.pipeline.last is not None
        if llm.engine.pipeline.last.plan.decoding:
            trees.append(paths_of(llm.engine.pipeline.last))

    return llm.run([prompt()], SAMPLINGS[sampling], drafting=SPECS[name], on_delta=listen).outputs[0], trees


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", SPECS)
def test_trees_and_acceptance_are_those_of_the_paths_alone(name: str, sampling: str) -> None:
    output, trees = serve(sampling, name)
    text = Text([*prompt(), *output.token_ids], SAMPLINGS[sampling])
    by_draft, expected = speculated(text, len(prompt()), SPECS[name])
    assert trees == expected
    assert output.by_draft == by_draft and output.metrics.num_steps == len(expected)
    assert len(expected) == NUM_STEPS[sampling][name]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_nobody_drafts_otherwise_beside_others(sampling: str) -> None:
    """Four prompts at once, each with a drafter of its own."""
    llm, params = bundled(), SAMPLINGS[sampling]
    requests = [
        llm.request(name, prompt(number), params, drafting) for number, (name, drafting) in enumerate(SPECS.items())
    ]
    for output in llm.outputs(requests):
        name = str(output.request_id)
        text = Text([*output.prompt_ids, *output.token_ids], params)
        assert output.by_draft == speculated(text, len(output.prompt_ids), SPECS[name])[0], name
