"""Topologies for tests, and what can be read off them."""

from __future__ import annotations

import numpy as np

from aquiline.spec.tree import Topology, own_bits
from aquiline.types import Int32, Int64


def chain_topology(num_slots: int, num_nodes: int) -> Topology:
    """num_slots chains of num_nodes rows each, the root included."""
    places = np.arange(num_nodes, dtype=np.int32)
    offsets = np.arange(0, (num_slots + 1) * num_nodes, num_nodes, dtype=np.int32)
    return Topology(np.tile(np.maximum(places - 1, 0), num_slots), np.tile(places, num_slots), offsets)


def bits(shape: Topology) -> Int64:
    """int64 [R, W]: each row's own bit, as `ancestors` numbers them."""
    return own_bits(shape.local)


def rank(shape: Topology) -> Int32:
    """int32 [R]: depth * (R + 1) + R - row: orders rows by depth, then by place, and gives both back."""
    num_rows = np.int32(len(shape.parents))
    places = np.arange(len(shape.parents), dtype=np.int32)
    return shape.depths * (num_rows + np.int32(1)) + (num_rows - places)


def paths(shape: Topology) -> Int32:
    """int32 [R, D + 1]: slot-local nodes of each row's path by level, the row itself at its depth, then 0."""
    result = np.zeros((len(shape.parents), shape.max_depth + 1), np.int32)
    node = np.arange(len(shape.parents), dtype=np.int32)
    for level in range(shape.max_depth, 0, -1):
        reached = shape.depths >= level
        result[reached, level] = shape.local[node[reached]]
        node = np.where(reached, shape.parent_rows[node], node)
    return result
