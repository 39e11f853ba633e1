"""How long it takes to build a draft tree's ancestor masks: three constructions, at 59, 127 and 255 nodes.

The baselines are the two found in the field (EAGLE's loop of row additions over a boolean matrix, and cloning the
parent's row node by node), written anew in torch as their shapes demand; ours packs ancestors in int64 words by pointer
doubling. Every construction is checked against a walk up the parents first. Ends with one JSON line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
import torch

from aquiline.spec.tree import ancestor_masks

NODES = (59, 127, 255)
DEPTH = 6


def random_tree(num_nodes: int, rng: np.random.Generator) -> np.ndarray:
    """Slot-local parents, the root included, no deeper than DEPTH."""
    parents, depths = [0], [0]
    for i in range(1, num_nodes + 1):
        shallow = [j for j in range(i) if depths[j] < DEPTH]
        parents.append(int(rng.choice(shallow)))
        depths.append(depths[parents[-1]] + 1)
    return np.array(parents, np.int32)


def row_additions(parents: np.ndarray) -> torch.Tensor:
    """Adds the parent's row to each node's own, one node after the other."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    mask[:, 0] = True
    for i, parent in enumerate(parents.tolist()):
        mask[i].add_(mask[parent])
    return mask


def row_clones(parents: np.ndarray) -> torch.Tensor:
    """Grows the matrix by a row per node: clone the parent's, set one bit."""
    rows = [torch.zeros(len(parents), dtype=torch.bool)]
    rows[0][0] = True
    for i, parent in enumerate(torch.from_numpy(parents)[1:], 1):
        row = rows[parent.item()].clone()
        row[i] = True
        rows.append(row)
    return torch.stack(rows)


def packed_words(parents: np.ndarray) -> np.ndarray:
    """Packed ancestors as spec/tree.py builds them, the depth of the tree found first."""
    depth, jump = 0, parents
    while jump.any():
        depth, jump = depth + 1, parents[jump]
    return ancestor_masks(parents, np.arange(len(parents), dtype=np.int32), depth + 1)


def unpack(words: np.ndarray) -> np.ndarray:
    """bool [N, N] of int64 words [N, W]."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return bits[:, : len(words)].astype(bool)


def median_us(build: Callable[[np.ndarray], object], parents: np.ndarray, repeats: int = 200) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        build(parents)
        times.append(time.perf_counter() - began)
    return 1e6 * sorted(times)[repeats // 2]


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    results = {}
    for num_nodes in NODES:
        parents = random_tree(num_nodes, rng)
        expected = np.zeros((len(parents), len(parents)), bool)
        for node in range(len(parents)):
            at = node
            while at:
                expected[node, at] = True
                at = int(parents[at])
            expected[node, 0] = True
        for build in (row_additions, row_clones):
            assert (build(parents).numpy() == expected).all(), build.__name__
        assert (unpack(packed_words(parents)) == expected).all()
        timed = {b.__name__: median_us(b, parents) for b in (row_additions, row_clones, packed_words)}
        results[num_nodes] = timed
        print(f"{num_nodes:>4} nodes: " + "  ".join(f"{name} {us:.0f} us" for name, us in timed.items()))
        assert timed["packed_words"] == min(timed.values()), "packed words should be the fastest"
    print(json.dumps({"benchmark": "trees", "median_us": results}))


if __name__ == "__main__":
    main()
