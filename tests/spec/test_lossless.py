"""Losslessness, three ways: exact enumeration on a toy vocabulary, a chi-square test of joint laws with real noise, and
mutants of the verifier that both must catch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats
from tests.conftest import needs_native
from tests.ops.native_calls import accept, draw
from tests.spec.topologies import paths

from aquiline.spec.tree import DraftTree, Topology
from aquiline.types import SAMPLING, AcceptResult, Int32

pytestmark = needs_native

Verifier = Callable[[DraftTree, Int32], AcceptResult]
Law = dict[tuple[int, ...], float]

V = 3
# A little of everything: siblings, depth 3, a subtree below a second choice.
PARENTS = np.array([0, 0, 0, 1, 1, 3], np.int32)
DEPTHS = np.array([0, 1, 1, 2, 2, 3], np.int32)
TOPOLOGY = Topology(PARENTS, DEPTHS, np.array([0, 6], np.int32))
TOKENS = np.array([0, 1, 2, 0, 2, 1], np.int32)
LENGTH = 4


def target_law(prefix: tuple[int, ...]) -> np.ndarray:
    """The target's next-token distribution after a prefix: arbitrary, strongly dependent on it, one zero entry."""
    rng = np.random.default_rng([7, len(prefix), *prefix])
    law = rng.dirichlet(np.full(V, 0.7))
    if sum(prefix) % 4 == 3:
        law[prefix[-1]] = 0.0
        law /= law.sum()
    return law


def tree_below(prefix: tuple[int, ...]) -> DraftTree:
    """A deterministic tree whose tokens depend on the prefix; siblings differ."""
    tokens = (TOKENS + len(prefix)) % V
    tokens[0] = prefix[-1] if prefix else 0
    return DraftTree(TOPOLOGY, tokens.astype(np.int32))


def node_prefix(tree: DraftTree, prefix: tuple[int, ...], node: int) -> tuple[int, ...]:
    path = paths(tree.topology)[node, 1 : tree.topology.depths[node] + 1]
    return (*prefix, *tree.tokens[path].tolist())


def speculative_law(
    verify: Verifier, prefix: tuple[int, ...], weight: float, law: dict[tuple[int, ...], float]
) -> None:
    """Add the law of the first LENGTH tokens, by enumerating every joint draw of every step."""
    if len(prefix) >= LENGTH:
        law[prefix[:LENGTH]] = law.get(prefix[:LENGTH], 0.0) + weight
        return
    tree = tree_below(prefix)
    laws = [target_law(node_prefix(tree, prefix, node)) for node in range(len(PARENTS))]
    ends: Law = {}
    for drawn in itertools.product(range(V), repeat=len(PARENTS)):
        chance = float(np.prod([laws[node][token] for node, token in enumerate(drawn)]))
        if chance:
            result = verify(tree, np.array(drawn, np.int32))
            committed = tuple(result.tokens[0, : result.num_accepted[0] + 1].tolist())
            ends[committed] = ends.get(committed, 0.0) + chance
    for committed, chance in ends.items():
        speculative_law(verify, (*prefix, *committed), weight * chance, law)


def enumerated_distance(verify: Verifier) -> float:
    """Total variation between the speculative and the autoregressive law of LENGTH tokens."""
    law: Law = {}
    speculative_law(verify, (), 1.0, law)
    distance = 0.0
    for text in itertools.product(range(V), repeat=LENGTH):
        exact = float(np.prod([target_law(text[:i])[text[i]] for i in range(LENGTH)]))
        distance += abs(exact - law.get(text, 0.0)) / 2
    return distance


def _with(tree: DraftTree, drawn: Int32, ok: np.ndarray) -> AcceptResult:
    """Deepest accepted node and its draw as bonus, for a given per-node verdict: the mutants' shared tail."""
    shape = tree.topology
    accepted = [all(ok[n] for n in paths(shape)[i, 1 : shape.depths[i] + 1]) for i in range(len(ok))]
    leaf = max(range(len(ok)), key=lambda i: (accepted[i], shape.depths[i], -i))
    depth = int(shape.depths[leaf])
    path = paths(shape)[leaf]
    tokens = np.full((1, shape.max_depth + 1), -1, np.int32)
    tokens[0, :depth] = tree.tokens[path[1 : depth + 1]]
    tokens[0, depth] = drawn[leaf]
    return AcceptResult(path[None], tokens, np.array([depth]))


def wrong_parent(tree: DraftTree, drawn: Int32) -> AcceptResult:
    """Compares a node with its own draw, not its parent's."""
    return _with(tree, drawn, tree.tokens == drawn)


def ignores_ancestors(tree: DraftTree, drawn: Int32) -> AcceptResult:
    """Accepts a node whose own test passes below a rejected parent."""
    ok = tree.tokens == drawn[PARENTS]
    deep = [i for i in range(1, len(ok)) if ok[i]]
    leaf = max(deep, key=lambda i: DEPTHS[i], default=0)
    mask = np.zeros(len(ok), bool)
    mask[paths(tree.topology)[leaf, : DEPTHS[leaf] + 1]] = True
    return _with(tree, drawn, mask)


def bonus_of_the_root(tree: DraftTree, drawn: Int32) -> AcceptResult:
    """Emits the root's draw after a longer path."""
    result = accept(tree, drawn)
    tokens = result.tokens.copy()
    tokens[0, result.num_accepted[0]] = drawn[0]
    return AcceptResult(result.path, tokens, result.num_accepted)


def first_child_free(tree: DraftTree, drawn: Int32) -> AcceptResult:
    """Takes the first child whatever was drawn."""
    ok = tree.tokens == drawn[PARENTS]
    ok[1] = True
    return _with(tree, drawn, ok)


MUTANTS = [wrong_parent, ignores_ancestors, bonus_of_the_root, first_child_free]


def test_enumerated_law_is_exactly_the_autoregressive_one() -> None:
    assert enumerated_distance(accept) < 1e-12


@pytest.mark.parametrize("mutant", MUTANTS)
def test_enumeration_catches(mutant: Verifier) -> None:
    assert enumerated_distance(mutant) > 1e-3


def test_expected_tau_is_one_plus_the_mass_of_the_tree() -> None:
    tree = tree_below((1,))
    laws = [target_law(node_prefix(tree, (1,), node)) for node in range(len(PARENTS))]
    expected = 1.0
    for node in range(1, len(PARENTS)):
        path = paths(tree.topology)[node, : DEPTHS[node] + 1]
        expected += np.prod([laws[a][tree.tokens[b]] for a, b in itertools.pairwise(path)])
    tau = 0.0
    for drawn in itertools.product(range(V), repeat=len(PARENTS)):
        chance = np.prod([laws[node][token] for node, token in enumerate(drawn)])
        tau += chance * (accept(tree, np.array(drawn, np.int32)).num_accepted[0] + 1)
    assert abs(tau - expected) < 1e-12


NUM_SEEDS = 12_000


def sampled_texts(verify: Verifier, *, positions_count: bool = True, length: int = 3) -> Counter[tuple[int, ...]]:
    """Texts of many seeds, every node drawn with the engine's own noise."""
    pending = {(): np.arange(NUM_SEEDS, dtype=np.uint64)}
    texts: Counter[tuple[int, ...]] = Counter()
    while pending:
        prefix, seeds = pending.popitem()
        if len(prefix) >= length:
            texts[prefix[:length]] += len(seeds)
            continue
        tree = tree_below(prefix)
        drawn = np.empty((len(seeds), len(PARENTS)), np.int32)
        for node in range(len(PARENTS)):
            with np.errstate(divide="ignore"):
                logits = np.log(target_law(node_prefix(tree, prefix, node))).astype(np.float32)
            position = len(prefix) + int(DEPTHS[node]) if positions_count else 0
            drawn[:, node] = draw_many(logits, seeds, position)
        for draws, group in groups(drawn, seeds):
            result = verify(tree, draws)
            text = (*prefix, *result.tokens[0, : result.num_accepted[0] + 1].tolist())
            pending[text] = np.concatenate((pending.get(text, group[:0]), group))
    return texts


def groups(drawn: Int32, seeds: np.ndarray) -> list[tuple[Int32, np.ndarray]]:
    kinds, which = np.unique(drawn, axis=0, return_inverse=True)
    return [(kind.astype(np.int32), seeds[which.ravel() == i]) for i, kind in enumerate(kinds)]


def draw_many(logits: np.ndarray, seeds: np.ndarray, position: int) -> Int32:
    n = len(seeds)
    sampling = np.zeros(n, SAMPLING)
    sampling["temperature"] = sampling["top_p"] = 1
    sampling["seed"], sampling["position"] = seeds, position
    return draw(np.ascontiguousarray(np.broadcast_to(logits, (n, len(logits)))), sampling)


def p_value(texts: Counter[tuple[int, ...]], length: int = 3) -> float:
    """Chi-square of the joint law of `length` tokens; 0 if an impossible text occurs."""
    expected, observed = [], []
    for text in itertools.product(range(V), repeat=length):
        mass = float(np.prod([target_law(text[:i])[text[i]] for i in range(length)])) * NUM_SEEDS
        if mass == 0 and texts[text]:
            return 0.0
        if mass > 0:
            expected.append(mass)
            observed.append(texts[text])
    rare = np.array(expected) < 5  # pooled, as the test's approximation asks
    pool = lambda a: np.append(np.array(a)[~rare], np.array(a)[rare].sum())  # noqa: E731
    e, o = pool(expected), pool(observed)
    return float(stats.chisquare(o[e > 0], e[e > 0] * o.sum() / e.sum()).pvalue)


def test_joint_law_of_three_tokens_passes_chi_square() -> None:
    assert p_value(sampled_texts(accept)) > 1e-3


@pytest.mark.parametrize("mutant", MUTANTS)
def test_chi_square_catches(mutant: Verifier) -> None:
    assert p_value(sampled_texts(mutant)) < 1e-6


def test_chi_square_catches_noise_without_its_position() -> None:
    assert p_value(sampled_texts(accept, positions_count=False)) < 1e-6
