"""Copies of recurrent states at the ends of tree nodes, from which others go on.

A model with recurrent layers (gated delta nets) has besides keys and values one state for each sequence, which every
token changes: a prefix can only be taken over where its state was kept. It knows slot numbers, but no device memory.
A slot is free, a running request's, or a node's. The least recently used ones of nodes give way, those first whose
pages nobody holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from sgl.runtime.cache.node import Node


class Checkpoints:
    """`num_slots` slots. Evicting a node drops its checkpoint: it is the `RadixCache.end_watcher`."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free: list[int] = list(range(num_slots - 1, -1, -1))
        self.of_node: OrderedDict[Node, int] = OrderedDict()
        """Least recently used first."""
        self.on_taken: Callable[[Node], None] | None = None
        """Called before a node's slot is taken for another."""

    def alloc(self, *, spares_locked: bool = False) -> int | None:
        """A slot, taken from a node if none is free; None if nodes have none. spares_locked: only from nodes that
        nobody holds."""
        if not self.free and self.of_node:
            node = next((node for node in self.of_node if not node.lock_ref), None)
            if node is None and not spares_locked:
                node = next(iter(self.of_node))
            if node is not None:
                if self.on_taken is not None:
                    self.on_taken(node)
                self.cut(node)
        return self.free.pop() if self.free else None

    def release(self, slot: int) -> None:
        """Take a request's slot back."""
        assert slot not in self.free, f"slot {slot} is free already"
        self.free.append(slot)

    def attach(self, node: Node, slot: int) -> None:
        """Pass a request's slot, which holds the state at `node`'s end, to the node. One that it has already stays."""
        if node in self.of_node:
            self.release(slot)
        else:
            self.of_node[node] = slot
        self.of_node.move_to_end(node)

    def deepest(self, node: Node) -> Node:
        """The node with a checkpoint, at `node` or next above it; else the root."""
        while node.parent is not None and node not in self.of_node:
            node = node.parent
        return node

    def use(self, node: Node) -> int:
        """The slot of a node that has one, which becomes the most recently used."""
        self.of_node.move_to_end(node)
        return self.of_node[node]

    def cut(self, node: Node) -> None:
        """See `radix.EndWatcher`."""
        slot = self.of_node.pop(node, None)
        if slot is not None:
            self.free.append(slot)
