"""The prefix cache: a tree of whole pages, keyed by the tokens in them. Knows pages and tokens, nothing of models.

A page's keys depend on the tokens up to its end and on nothing else, bit for bit, so any sequence that begins with
them may use it, within one space: a salt, or whatever else must not be shared. Only committed tokens enter. A sequence
uses the tree's page for all that it has published, so a page is never dropped before those below it, and the oldest
idle page is always a leaf.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from aquiline.kv.pool import PagePool


@dataclass(eq=False)
class Node:
    """One page of tokens below those of its parents. has_draft: the draft's keys are there too."""

    tokens: tuple[int, ...]
    page: int
    has_draft: bool
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class PrefixCache:
    """All cached pages of a pool. Reads take no page: PagePool.share does."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.roots: dict[Hashable, Node] = {}
        self.by_page: dict[int, Node] = {}
        pool.evicted = self._forget

    def match(self, space: Hashable, tokens: list[int]) -> list[Node]:
        """The longest path of cached pages that `tokens` begins with, among those that were published in this space."""
        path, node, size = [], self._root(space), self.pool.page_size
        for start in range(0, len(tokens) - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

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
        """Offer the slot's index-th page, which holds `tokens` below `parent` (None: the first), to its space.

        drafts: the slot goes on reading draft keys in that page. has_draft: all of the page's are there.
        Where the tree has that page already the slot takes it and drops its own. If it would lose draft keys by that
        the tree takes the slot's page instead; None, and nothing more to publish below, if the tree's is in use, or
        `parent` was forgotten meanwhile."""
        if parent is not None and self.by_page.get(parent.page) is not parent:
            return None
        parent, key, page = parent or self._root(space), tuple(tokens), self.pool.owned[slot][index]
        assert len(key) == self.pool.page_size, (len(key), self.pool.page_size)
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(key, page, has_draft, parent)
        elif node.page == page:
            return node
        elif node.has_draft or not drafts:
            self.pool.replace(slot, index, node.page)
            return node
        elif self.pool.refcount[node.page] == 0:
            del self.by_page[node.page]
            self.pool.uncache(node.page)
            node.page, node.has_draft = page, has_draft
        else:
            return None
        self.by_page[page] = node
        self.pool.cache(page)
        return node

    def clear(self) -> None:
        """Forget everything; pages in use stay with their users."""
        for page in list(self.by_page):
            self.pool.uncache(page)
        self.by_page.clear()
        self.roots.clear()

    def check(self) -> None:
        """Every node's page is cached and named once, and nothing hangs below a page that was dropped."""
        pages = [node.page for node in self._nodes()]
        assert len(set(pages)) == len(pages) and set(pages) == set(self.by_page) == self.pool.cached, "tree and pool"
        for node in self.by_page.values():
            used = self.pool.refcount[node.page] > 0
            below = sum(int(self.pool.refcount[child.page]) for child in node.children.values())
            assert used or not below, f"page {node.page} is idle, pages below it are in use"

    def _root(self, space: Hashable) -> Node:
        return self.roots.setdefault(space, Node((), -1, False, None))

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
            self.roots = {space: root for space, root in self.roots.items() if root is not node.parent}
