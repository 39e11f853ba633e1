"""A pool and its prefix cache, driven as the engine does."""

from __future__ import annotations

from aquiline.kv.pool import PagePool
from aquiline.kv.prefix import Node, PrefixCache

SIZE, SLOTS, PER_SLOT = 16, 4, 6


class Kept:
    """A pool and its cache, driven as the engine does: a text is a string, one letter to a page of tokens."""

    def __init__(self, num_pages: int = 12) -> None:
        self.pool = PagePool(num_pages, SIZE, SLOTS, PER_SLOT)
        self.cache = PrefixCache(self.pool)
        self.nodes: list[list[Node]] = [[] for _ in range(SLOTS)]

    def tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text for _ in range(SIZE)]

    def match(self, text: str) -> str:
        return "".join(chr(node.tokens[0]) for node in self.cache.match(None, self.tokens(text)))

    def seat(self, slot: int, text: str) -> int:
        """Take what the cache has of a text and pages for the rest; how many pages it had."""
        found = self.cache.match(None, self.tokens(text))
        self.pool.share(slot, [node.page for node in found])
        self.pool.reserve(slot, len(text) * SIZE)
        self.nodes[slot] = found
        return len(found)

    def publish(self, slot: int, text: str, has_draft: bool = True, drafts: bool = True) -> bool:
        """Offer every page of a text; whether all of them could be."""
        for index in range(len(self.nodes[slot]), len(text)):
            parent = self.nodes[slot][-1] if self.nodes[slot] else None
            node = self.cache.publish(None, slot, parent, index, self.tokens(text[index]), drafts, has_draft)
            if node is None:
                return False
            self.nodes[slot].append(node)
        return True

    def keep(self, text: str, has_draft: bool = True, slot: int = 0) -> None:
        """Compute a text, publish it and leave it idle."""
        self.seat(slot, text)
        self.publish(slot, text, has_draft, has_draft)
        self.leave(slot)

    def leave(self, slot: int) -> None:
        self.pool.release(slot)
        self.nodes[slot] = []

    def check(self) -> None:
        self.pool.check()
        self.cache.check()
