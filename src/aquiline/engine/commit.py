"""The outcome of a step becomes text: tokens are appended and cut at their stop, full pages are published for others.

An outcome may be read at once, or after the next step was issued. A sequence that has ended meanwhile ignores the
tokens which that step computed for it.
"""

from __future__ import annotations

from aquiline.backends.base import Decode, Decoded, Extend
from aquiline.engine.sequence import Sequence, TokenDelta
from aquiline.engine.step import Step
from aquiline.kv.pool import PagePool
from aquiline.kv.prefix import PrefixCache
from aquiline.types import Source, TokenLogprobs


class Committer:
    """Commits outcomes to sequences. `extends` collects by slot the draft keys that published pages still lack; the
    next step that is issued has the backend write them."""

    def __init__(self, pool: PagePool, prefix: PrefixCache | None) -> None:
        self.pool, self.prefix = pool, prefix
        self.extends: dict[int, Extend] = {}

    def take_extends(self) -> list[Extend]:
        """The Extends collected since the last call."""
        extends, self.extends = self.extends, {}
        return [*extends.values()]

    def commit(self, step: Step) -> tuple[list[TokenDelta], list[Sequence]]:
        """Append what a step decided. Returns the deltas, and the sequences that have new tokens in their pages."""
        output, plan = step.read(), step.plan
        deltas: list[TokenDelta] = []
        touched: list[Sequence] = []
        for sequence, message, decoded in zip(plan.decoding, step.message.decodes, output.decodes, strict=True):
            sequence.in_flight -= sequence.max_step
            if sequence.finish_reason is not None:
                continue
            num_accepted = len(decoded.kept) - 1
            delta = append(sequence, decoded.kept, num_accepted, decoded.logprobs, drafter_of(message, decoded))
            num_kept = len(delta.token_ids)
            sequence.counters.add(decoded.num_drafted, num_accepted, num_kept, len(decoded.kept) - num_kept)
            deltas.append(delta._replace(num_drafted=decoded.num_drafted, num_confirmed=num_accepted))
            touched.append(sequence)
            if sequence.slot == message.slot:
                sequence.num_cached += num_kept
                sequence.draft_end = decoded.draft_end
                sequence.num_rows = 1 + decoded.num_drafted
        for chunk, prefilled in zip(plan.chunks, output.chunks, strict=True):
            sequence = chunk.sequence
            sequence.in_flight -= chunk.draws
            if sequence.finish_reason is not None:
                continue
            sequence.prompt_logprobs += prefilled.prompt_logprobs
            if sequence.slot == chunk.slot:
                sequence.num_cached = chunk.end
                sequence.draft_end = prefilled.draft_end
            if prefilled.first_token is not None:
                delta = append(sequence, [prefilled.first_token], 0, prefilled.logprobs)
                sequence.counters.num_prefilled += len(delta.token_ids)
                deltas.append(delta)
            touched.append(sequence)
        return deltas, touched

    def publish(self, sequence: Sequence) -> None:
        """Offer the sequence's full pages of committed tokens to the prefix cache. If the sequence drafts, a page is
        offered only when its draft keys are written, or will be written before another sequence can read them."""
        size, end = self.pool.page_size, sequence.num_cached
        if not sequence.is_published or end // size <= len(sequence.nodes) or sequence.slot < 0:
            return
        assert self.prefix is not None
        if sequence.drafts and sequence.draft_end // size < end // size:
            if sequence.finish_reason is None:
                end = sequence.draft_end  # its next drafting step writes them
                if sequence.num_cached - end >= size:  # it does not draft at present
                    self._extend(sequence.slot, sequence.num_cached // size * size)
            else:
                self._extend(sequence.slot, end // size * size)
        for index in range(len(sequence.nodes), end // size):
            parent = sequence.nodes[-1] if sequence.nodes else None
            tokens = sequence.tokens[index * size : (index + 1) * size]
            space = sequence.request.cache_salt
            has_draft = sequence.drafts and sequence.first_draft_key <= max(1, index * size)
            node = self.prefix.publish(space, sequence.slot, parent, index, tokens, sequence.drafts, has_draft)
            if node is None:
                sequence.is_published = False
                return
            sequence.nodes.append(node)

    def _extend(self, slot: int, until: int) -> None:
        self.extends[slot] = Extend(slot, until)


def drafter_of(message: Decode, decoded: Decoded) -> Source:
    """Who drafted the accepted tokens. Where the draft model and the host drafted in one tree: the host, if all of them
    are its own too."""
    if message.proposal is None:
        return "draft"
    accepted = tuple(decoded.kept[:-1])
    return "lookup" if message.cut is None or accepted == message.proposal.tokens[: len(accepted)] else "draft"


def append(
    sequence: Sequence,
    tokens: list[int],
    num_accepted: int,
    logprobs: list[TokenLogprobs] | None,
    drafter: Source = "draft",
) -> TokenDelta:
    """Append a step's tokens. A last token of -1 says that the target's logits are not numbers. The sequence then ends
    with an error, unless the tokens before the last one already end it."""
    if tokens[-1] >= 0:
        return sequence.append(tokens, num_accepted, logprobs, drafter)
    delta = sequence.append(tokens[:-1], num_accepted, logprobs, drafter)
    if delta.finish_reason is not None:
        return delta
    sampling, cause = sequence.request.sampling, "check the checkpoint's weights and dtype"
    if sampling.logit_bias or sampling.bad_words or sampling.min_tokens:
        cause += ", and whether logit_bias, bad_words and min_tokens leave any token"
    where = f"request {sequence.request.id}: the target's logits at position {len(sequence.tokens)}"
    end = sequence.end("error", f"{where} are NaN or have no finite value; {cause}")
    return delta._replace(text=delta.text + end.text, finish_reason="error", error=end.error)
