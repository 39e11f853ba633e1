"""What the service hears of replicas that are lost, late or refuse, with the calls to them played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.sequence import Request
from aquiline.errors import NumericalError
from aquiline.serve.client import EngineDown
from aquiline.serve.wire import Begin, Delta, EngineInfo, Opening, StepMessage
from aquiline.spec.drafting import NoDraft
from aquiline.types import TokenLogprobs

ray = pytest.importorskip("ray", reason="not installed: ray")
from ray.exceptions import ActorDiedError, RayTaskError  # noqa: E402

from aquiline.serve.ray import Scale  # noqa: E402
from aquiline.serve.ray.replica import MAX_PAGES  # noqa: E402
from aquiline.serve.ray.replicas import MAX_TRIES, ReplicaClient, after  # noqa: E402
from aquiline.serve.ray.router import packed, unpacked  # noqa: E402
from aquiline.serve.routing import EngineReport, Routed  # noqa: E402

INFO = EngineInfo(254, 4096, 4, 10, True, "", {})
Step = list[Delta] | Exception | None
"""What a call brings: deltas, an error, or nothing for ever."""


class Handle:
    """A deployment whose calls bring one script after the other."""

    def __init__(self, *scripts: list[Step]) -> None:
        self.left, self.asked, self.num_cancelled = list(scripts), list[Routed](), 0
        self.run = SimpleNamespace(remote=self._call)
        self.info = SimpleNamespace(remote=self._told)

    def options(self, stream: bool) -> Handle:
        assert stream
        return self

    async def _told(self) -> EngineInfo:
        return INFO

    def _call(self, routed: Routed) -> Any:
        self.asked.append(routed)
        script, handle = self.left.pop(0), self

        class Response:
            async def __aiter__(self) -> AsyncIterator[list[Delta]]:
                for step in script:
                    if isinstance(step, Exception):
                        raise step
                    if step is None:
                        await asyncio.Event().wait()
                    else:
                        yield step

            def cancel(self) -> None:
                handle.num_cancelled += 1

        return Response()


def delta(*ids: int, is_first: bool = False, is_last: bool = False, accepted: int = 0) -> Delta:
    begin = Begin(3, None) if is_first else None
    entries = [TokenLogprobs(token, -1.0, 1, {}) for token in ids]
    return Delta(0, list(ids), accepted, "chain", 4, accepted, "length" if is_last else None, entries, None, begin)


def run(handle: Handle, deadline_s: float | None = None, leave: bool = False) -> tuple[list[Delta], StepMessage]:
    """All deltas of a request, and the last message."""
    told = list[StepMessage]()

    async def main() -> list[Delta]:
        client = ReplicaClient(Opening(PairConfig("bundled"), EngineConfig(page_size=16), NoDraft()), handle, 3)  # type: ignore[arg-type]
        client.on_step = told.append
        await client.start()
        assert client.info == INFO._replace(num_slots=12, num_pages=30)
        sampling = SamplingParams(max_tokens=9, seed=0)
        request = Request(client.new_id(), tuple(range(40)), sampling, NoDraft(), deadline_s=deadline_s)
        stream, found = await client.submit([request]), list[Delta]()
        if leave:
            stream.close()
        async for deltas in stream:
            found += deltas
        for _ in range(3):  # the call's task ends after its last delta
            await asyncio.sleep(0)
        await client.close()
        assert client.num_streams == 0
        return found

    return asyncio.run(asyncio.wait_for(main(), 30)), told[-1]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for each in deltas for token in each.token_ids]


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 12))
def test_what_is_known_is_left_out_and_nothing_else(sizes: list[int], num_known: int) -> None:
    numbers = iter(range(99))
    deltas = [delta(*[next(numbers) for _ in range(size)], accepted=max(0, size - 1)) for size in sizes]
    deltas.append(delta(is_last=True))
    left = after(deltas, num_known)
    assert tokens(left) == tokens(deltas)[num_known:] and left[-1].finish_reason == "length"
    assert [entry.token_id for each in left for entry in each.logprobs or ()] == tokens(left)
    authors = [author for each in deltas for author in each.authors]
    assert [author for each in left for author in each.authors] == authors[num_known:]
    assert num_known or left == deltas


def test_a_lost_replica_s_request_goes_on_where_its_tokens_ended() -> None:
    """Another replica brings the same tokens in other pieces."""
    lost: list[Step] = [[], [delta(1, is_first=True)], [delta(2, 3, accepted=1)], ActorDiedError()]
    again: list[Step] = [[], [delta(1, 2, is_first=True)], [delta(3, 4, accepted=1), delta(5, is_last=True)]]
    handle = Handle(lost, [ActorDiedError()], [[], ActorDiedError()], again)
    found, last = run(handle)
    assert tokens(found) == [1, 2, 3, 4, 5] and found[-1].finish_reason == "length"
    assert [each.begin is not None for each in found] == [True, False, False, False], "it began once"
    assert len(handle.asked) == handle.num_cancelled == 4 and handle.asked == handle.asked[:1] * 4
    stats = last.stats
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert (stats.sum_prompt_tokens, stats.sum_cached_tokens, stats.sum_prefill_tokens) == (40, 3, 37)


def test_a_request_that_loses_every_replica_ends_with_an_error_that_may_be_tried_again() -> None:
    handle = Handle(*[[[], ActorDiedError()]] * (MAX_TRIES + 1))  # type: ignore[list-item]
    with pytest.raises(EngineDown, match="send it again"):
        run(handle)
    assert len(handle.asked) == MAX_TRIES


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RayTaskError("run", "trace", ValueError("max_tokens=9: told")), ValueError),
        (RayTaskError("run", "trace", NumericalError("max_tokens=9: told")), NumericalError),
        (RuntimeError("told"), EngineDown),
    ],
    ids=["refused", "bad logits", "another"],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "later"])
def test_an_error_is_the_engine_s_own(error: Exception, kind: type[Exception], is_late: bool) -> None:
    """Its message has no trace of another process, and the request is not sent again."""
    handle = Handle([[], [delta(1, is_first=True)], error] if is_late else [error])
    with pytest.raises(kind, match="told") as raised:
        run(handle)
    assert "trace" not in str(raised.value) and len(handle.asked) == 1


@pytest.mark.parametrize("brought", [[], [[]], [[], [delta(1, is_first=True)]]], ids=["waiting", "taken", "begun"])
def test_a_request_ends_at_its_deadline_wherever_it_is(brought: list[Step]) -> None:
    handle = Handle([*brought, None])
    found, last = run(handle, deadline_s=0.05)
    assert found[-1].finish_reason == "deadline" and tokens(found) == ([1] if len(brought) == 2 else [])
    assert handle.num_cancelled == 1 and last.stats.num_running == last.stats.num_waiting == 0


def test_a_client_that_leaves_ends_the_call() -> None:
    handle = Handle([[], [delta(1, is_first=True)], None])
    found, last = run(handle, leave=True)
    assert not found and handle.num_cancelled == 1 and last.stats.num_running == last.stats.num_waiting == 0


@pytest.mark.parametrize("num_pages", [0, MAX_PAGES])
def test_a_report_comes_as_it_was_sent(num_pages: int) -> None:
    report = EngineReport(7, 123, 4.5, frozenset(hash((place, ())) for place in range(num_pages)))
    stats = packed(report)
    assert unpacked(stats) == report and len(stats["pages"]) == 8 * num_pages
    assert unpacked({}) is None, "a replica that has told nothing"


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_replicas": 0}, {"max_replicas": 0}, {"min_replicas": 2}, {"num_cpus": 0}, {"num_http": 0},
        {"autoscaling": 3}, {"actor_options": {1: 2}},
    ],
    ids=lambda wrong: "-".join(wrong),
)  # fmt: skip
def test_a_scale_that_cannot_be_is_refused_by_its_field(wrong: dict[str, Any]) -> None:
    Scale(2, 3, {"downscale_delay_s": 60, "target_ongoing_requests": 2.5}, 2, 0.5, {"resources": {"fast": 1}}, 2)
    with pytest.raises(ValueError, match=r"^(min_replicas|max_replicas|num_cpus|num_http|autoscaling|actor_options)="):
        Scale(**wrong)
