"""/metrics: vLLM's names, and figures that agree with what replies say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import needs_native
from tests.serve.serving import Server

from aquiline.serve.prometheus import GAPS, Histogram, Metrics
from aquiline.serve.wire import Begin, Delta, Stats, StepMessage

pytestmark = needs_native

NAMES = [
    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count", "vllm:iteration_tokens_total_count", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:num_preemptions_total", "aquiline:tau",
    "aquiline:active_slots", "aquiline:draft_lengths_total", "aquiline:engine_restarts_total",
]  # fmt: skip


def test_names_and_sums(server: Server) -> None:
    assert server.figure("vllm:request_success_total") >= 0, "there before any request has ended"
    server.complete(temperature=0, max_tokens=20)  # labels of lengths are there once something was drafted
    server.settle()
    before = {name: server.figure(name) for name in NAMES}
    reply = server.complete(temperature=0, max_tokens=50, ignore_eos=True)
    server.settle()
    gained = {name: server.figure(name) - before[name] for name in NAMES}
    record = reply["metrics"]["speculative_decoding"]
    assert gained["vllm:spec_decode_num_drafts_total"] == record["num_spec_steps"]
    assert gained["vllm:spec_decode_num_draft_tokens_total"] == record["num_draft_tokens"]
    assert gained["vllm:spec_decode_num_accepted_tokens_total"] == record["num_accepted_draft_tokens"]
    assert gained["vllm:generation_tokens_total"] == 50 and gained["vllm:request_success_total"] == 1
    assert gained["vllm:prompt_tokens_total"] == reply["usage"]["prompt_tokens"]
    assert gained["vllm:time_to_first_token_seconds_count"] == 1
    assert gained["vllm:inter_token_latency_seconds_count"] == 49
    assert record["mean_acceptance_length"] == 1 + record["num_accepted_draft_tokens"] / record["num_spec_steps"]
    assert sum(record["acceptance_histogram"]) == record["num_spec_steps"] == len(record["per_step_accepted"])
    by_length = record["acceptance_histogram_by_draft_length"]
    assert all(len(counts) == int(length) + 1 for length, counts in by_length.items())
    assert sum(map(sum, by_length.values())) == record["num_spec_steps"]


def test_positions_add_up_and_the_page_parses(server: Server) -> None:
    server.complete(temperature=0, max_tokens=20)
    text = server.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    positions = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    counts = {s.labels["position"]: s.value for s in positions if s.name.endswith("_total")}
    assert list(counts) == [str(place) for place in range(len(counts))] and len(counts) >= 3
    assert list(counts.values()) == sorted(counts.values(), reverse=True) and counts["2"] > 0
    assert sum(counts.values()) == server.figure("vllm:spec_decode_num_accepted_tokens_total")
    assert families["vllm:spec_decode_num_drafts"].type == "counter"
    assert all(s.labels["model_name"] == "code" for family in families.values() for s in family.samples)


def test_the_dashboard_shows_figures_that_exist(server: Server) -> None:
    server.complete(temperature=0, max_tokens=20)
    server.client.get("/v1/nothing")
    text = server.client.get("/metrics").text
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in re.findall(r"(?:vllm|aquiline):\w+", expression)}
    assert len(names) > 15
    assert [name for name in sorted(names) if f"\n{name}{{" not in text] == []


def test_tau_is_of_all_steps() -> None:
    """The prompt gives the first token; a step that drafts gives four, two that draft nothing give one each."""
    metrics, stats = Metrics("m"), Stats(1, 0, 1, 1, 9, 0, 9, 0)
    for number, drafted, begin in ((1, 0, Begin(0, None)), (4, 5, None), (1, 0, None), (1, 0, None)):
        delta = Delta(0, [5] * number, number - 1, "draft", drafted, number - 1, None, None, None, begin)
        metrics.on_step(StepMessage([], [], [delta], stats, 1))
    assert 'aquiline:tau{model_name="m"} 2.0' in metrics.text().decode()


@given(st.lists(st.tuples(st.sampled_from(GAPS) | st.floats(0, 20), st.integers(1, 9))))
def test_equal_observations_count_as_the_library_counts_them_one_by_one(seen: list[tuple[float, int]]) -> None:
    ours, registry = Histogram("gap", "A gap.", "m", GAPS), prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("gap", "A gap.", ["model_name"], buckets=GAPS, registry=registry).labels("m")
    for value, times in seen:
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    told = []
    for collector in (ours, registry):
        page = prometheus_client.generate_latest(collector).decode()
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        told.append({(sample.name, *sample.labels.items()): sample.value for sample in samples})
        assert [line for line in page.splitlines() if line.startswith("#")][:2] == [
            "# HELP gap A gap.", "# TYPE gap histogram",
        ]  # fmt: skip
    assert told[0] == pytest.approx(told[1])
