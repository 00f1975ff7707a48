"""What a radix tree is made of and found by: nodes, matches, and who learns of changes."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np

from sgl.runtime.batch import Int32Array
from sgl.runtime.cache.keys import TOKEN_BYTES, Namespace

Edge = bytes | tuple[Namespace, bytes]
"""The child's first page of tokens; below the root with the namespace."""

NO_PAGES: Final[Int32Array] = np.empty(0, np.int32)


class Node:
    """Whole pages in the tree. Only the cache writes it.

    `parent` leads to shorter prefixes (None: the root, a removed node or the first of detached ones). `id` is unique,
    ascending and stable.
    """

    __slots__ = ("children", "edge", "id", "is_attached", "key", "length", "lock_ref", "pages", "parent")

    def __init__(self, node_id: int, parent: Node | None, edge: Edge, key: bytes, pages: Int32Array, length: int):
        self.id = node_id
        self.parent = parent
        self.edge = edge
        self.key = key  # the node's own tokens
        self.pages = pages  # int32 [len(key) / 4 / page_size]
        self.length = length  # tokens from the root to the node's end; 0 for the root and for removed nodes
        self.lock_ref = 0
        self.is_attached = True  # to the root
        self.children: dict[Edge, Node] = {}

    def __repr__(self) -> str:
        return f"<node {self.id}: {self.length} tokens, {len(self.pages)} pages, lock_ref {self.lock_ref}>"

    def pages_from(self, start: int = 0) -> Int32Array:
        """The pages of tokens `start` to `length` - 1, a fresh int32 array. `start` must be the length of an
        ancestor."""
        parts = []
        node: Node | None = self
        at = self.length
        while node is not None and at > start:
            parts.append(node.pages)
            at -= len(node.key) // TOKEN_BYTES
            node = node.parent
        assert at == start, f"{start} tokens is not where one of the nodes above {self} ends"
        return np.concatenate(parts[::-1]) if parts else NO_PAGES


class Match(NamedTuple):
    """The longest stored prefix of a key at the time of the look-up."""

    node: Node  # lock it before anything may evict
    length: int  # tokens, a multiple of the page size
    namespace: Namespace
    next_edge: Edge | None  # a child under this edge would lengthen the match; None: the key has no further page

    @property
    def pages(self) -> Int32Array:
        """The prefix's pages, int32 [length / page_size]. Safe only while the node is locked."""
        assert self.node.length == self.length, f"{self.node} has lost some of the {self.length} tokens matched"
        return self.node.pages_from(0)


class Inserted(NamedTuple):
    """The result of an insertion: `pages` replaces the caller's first pages, the tree has taken the rest."""

    node: Node  # the end of the inserted key
    num_matched_tokens: int  # of the inserted key, stored before
    pages: Int32Array  # [num_matched_tokens / page_size] the tree's pages for these
    duplicates: Int32Array  # the caller's pages for these, still PRIVATE: the caller frees them


class Watcher(Protocol):
    """Learns which kept matches may have grown."""

    def grown(self, node: Node, edge: Edge) -> None:
        """`node` has a new child under this edge."""

    def split(self, node: Node, upper: Node) -> None:
        """`upper` is new, above `node`."""


class EndWatcher(Protocol):
    """Learns which nodes lose their end."""

    def cut(self, node: Node) -> None:
        """`node` is removed or shortened."""


class PageWatcher(Protocol):
    """Other pages of the same tokens; learns how nodes change."""

    def cut(self, node: Node, num_pages: int) -> None:
        """`node` will keep only so many of its pages, the first ones; none: it is removed."""

    def split(self, node: Node, upper: Node) -> None:
        """`upper` is new, above `node`, and has the beginning of its pages."""
