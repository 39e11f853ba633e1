"""The prefix cache: a tree of whole pages, keyed by the tokens in them. Knows pages and tokens, nothing of models.

A page's keys depend on the tokens up to its end and on nothing else, bit for bit. So any sequence that begins with
these tokens may use the page, within one space; a space is a salt, and pages of different spaces are never shared.
Only committed tokens enter the tree. A sequence uses the tree's own page for everything it has published. Therefore no
page is dropped before the pages below it, and the least recently used idle page is always a leaf.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

from aquiline.kv.pool import PagePool


def page_digests(space: Hashable, tokens: Sequence[int], page_size: int) -> list[int]:
    """A number of 64 bits for each whole page of `tokens`. It depends on the space and on all tokens up to the page's
    end, and is the same in every process that runs one version of Python. Two texts may share a number by chance: who
    routes by them loses time then, and never a token."""
    digests, digest = list[int](), _space_digest(space)
    for start in range(0, len(tokens) - page_size + 1, page_size):
        digest = _digest(digest, tuple(tokens[start : start + page_size]))
        digests.append(digest)
    return digests


def _digest(parent: int, page: tuple[int, ...]) -> int:
    return hash((parent, page))  # of numbers alone, so that it is not salted by the process


def _space_digest(space: Hashable) -> int:
    return int.from_bytes(blake2b(repr(space).encode(), digest_size=8).digest())


@dataclass(eq=False)
class Node:
    """One page of tokens of a space, after the tokens of its parents. has_draft: the page also holds the fused features
    of its tokens and all its draft keys, which the draft of that draft_version has written; was_missed: a sequence that
    may draft wanted them, and they were not there; digest: as in `page_digests`."""

    space: Hashable
    tokens: tuple[int, ...]
    page: int
    has_draft: bool
    parent: Node | None
    digest: int
    draft_version: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    was_missed: bool = False


class PrefixCache:
    """All cached pages of a pool. `match` only looks pages up; PagePool.share takes them for a slot.

    roots: the root of each space that has pages; nothing is kept of other spaces. draft_version: that of the draft that
    runs (backends/base.py, Pair)."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.roots: dict[Hashable, Node] = {}
        self.by_page: dict[int, Node] = {}
        self.draft_version = 0
        pool.evicted = self._forget

    def match(self, space: Hashable, tokens: list[int]) -> list[Node]:
        """The longest path of cached pages that `tokens` begins with, among those that were published in this space."""
        path, node, size = list[Node](), self.roots.get(space), self.pool.page_size
        for start in range(0, len(tokens) - size + 1, size):
            node = None if node is None else node.children.get(tuple(tokens[start : start + size]))
            if node is None:
                break
            path.append(node)
        return path

    def has_draft_keys(self, node: Node) -> bool:
        """Whether a page holds all its draft keys, as the draft that runs writes them."""
        return node.has_draft and node.draft_version == self.draft_version

    def publish(
        self,
        space: Hashable,
        slot: int,
        parent: Node | None,
        index: int,
        tokens: list[int],
        drafts: bool,
        has_draft: bool,
    ) -> Node | None:
        """Offer a slot's page to a space: its page `index`, with `tokens` after those of `parent` (None: no page).

        drafts: the slot will read draft keys in that page. has_draft: the page holds all its draft keys. Returns the
        page's node. If the tree already has a page for these tokens, the slot takes the tree's page and drops its own.
        But if the slot would lose draft keys that way, the tree takes the slot's page instead.

        Returns None, and the slot's later pages cannot be published either, in two cases: the tree's page should give
        way but is in use, or `parent` has been evicted meanwhile."""
        if parent is not None and self.by_page.get(parent.page) is not parent:
            return None
        parent = parent or self.roots.setdefault(space, Node(space, (), -1, False, None, _space_digest(space)))
        key, page = tuple(tokens), self.pool.owned[slot][index]
        assert len(key) == self.pool.page_size, (len(key), self.pool.page_size)
        node = parent.children.get(key)
        if node is None:
            digest = _digest(parent.digest, key)
            node = parent.children[key] = Node(space, key, page, has_draft, parent, digest, self.draft_version)
        elif node.page == page:
            return node
        elif self.has_draft_keys(node) or not drafts:
            self.pool.replace(slot, index, node.page)
            return node
        elif self.pool.refcount[node.page] == 0:
            del self.by_page[node.page]
            self.pool.uncache(node.page)
            node.page, node.has_draft, node.draft_version = page, has_draft, self.draft_version
        else:
            return None
        self.by_page[page] = node
        self.pool.cache(page)
        return node

    def digests(self, most: int) -> list[int]:
        """Digests of the cached pages, of `most` at most: those in use, then those used last. So a page is never there
        without the pages before it."""
        used = [page for page in self.by_page if page not in self.pool.idle]
        last = islice(reversed(self.pool.idle), max(0, most - len(used)))
        return [self.by_page[page].digest for page in (*used[:most], *last)]

    def clear(self) -> None:
        """Forget everything; pages in use stay with their users."""
        for page in list(self.by_page):
            self.pool.uncache(page)
        self.by_page.clear()
        self.roots.clear()

    def check(self) -> None:
        """Assert that every node's page is cached and named once, and that no page in use lies below an idle page."""
        pages = [node.page for node in self._nodes()]
        assert len(set(pages)) == len(pages) and set(pages) == set(self.by_page) == self.pool.cached, "tree and pool"
        for node in self.by_page.values():
            used = self.pool.refcount[node.page] > 0
            below = sum(int(self.pool.refcount[child.page]) for child in node.children.values())
            assert used or not below, f"page {node.page} is idle, pages below it are in use"

    def _nodes(self) -> Iterator[Node]:
        left = [node for root in self.roots.values() for node in root.children.values()]
        while left:
            node = left.pop()
            yield node
            left += node.children.values()

    def _forget(self, page: int) -> None:
        node = self.by_page.pop(page)
        assert not node.children and node.parent is not None, f"page {page} is dropped before those below it"
        del node.parent.children[node.tokens]
        if node.parent.parent is None and not node.parent.children:
            del self.roots[node.space]
