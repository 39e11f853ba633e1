"""Figures of the server for Prometheus: vLLM's names, so that its dashboards work, and aquiline's own beside them.

Sums are counters and never gauges. They go on counting when the engine process is replaced.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from aquiline.engine.learning.store import LearningStore
from aquiline.serve.choices import Job
from aquiline.serve.wire import EngineInfo, Stats, StepMessage

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)

REASONS = {"stop": "stop", "length": "length", "deadline": "length", "abort": "abort", "error": "error"}


class Histogram(Collector):
    """A histogram that counts equal observations at once, as those of the tokens of an event. The library's own takes
    two locks for each observation."""

    def __init__(self, name: str, text: str, model: str, bounds: Sequence[float]) -> None:
        self.name, self.text, self.model, self.bounds = name, text, model, bounds
        self.counts, self.sum, self.began_s = [0] * (len(bounds) + 1), 0.0, time.time()

    def observe(self, value: float, times: int = 1) -> None:
        """A value was observed so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What /metrics shows of it."""
        family = HistogramMetricFamily(self.name, self.text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        family.add_metric([self.model], [*zip(bounds, accumulate(self.counts), strict=True)], self.sum)
        family.add_sample(f"{self.name}_created", {"model_name": self.model}, self.began_s)
        yield family


class Metrics:
    """Everything that /metrics shows, with the model's name as a label. learning: that of a draft that learns."""

    def __init__(self, model: str, learning: LearningStore | None = None) -> None:
        self.learning = learning
        self.registry = CollectorRegistry()
        self._model = model
        self._told = self._now = _NOTHING  # what the figures say, and where the engine stands
        # Since the figures were told:
        self._drafts = Tally[tuple[int, int]]()  # by (drafted, confirmed)
        self._num_steps = self._num_new = 0
        self._num_pages = 1
        self._engine()
        self._speculation()
        self._requests()
        if learning is not None:
            self.generation = self._gauge("aquiline:draft_generation", "Generation of the draft; 0 is as shipped.")
            self.tau_before = self._gauge("aquiline:draft_tau_before", "Simulated tau of the generation before.")
            self.tau_after = self._gauge("aquiline:draft_tau_after", "Simulated tau of the generation that serves.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, ["model_name", *labels], registry=self.registry)
        return made if labels else made.labels(self._model)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, text, self._model, buckets)
        self.registry.register(made)
        return made

    def _engine(self) -> None:
        self.running = self._gauge("vllm:num_requests_running", "Requests that have a slot.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.")
        self.usage = self._gauge("vllm:kv_cache_usage_perc", "Pages that running requests hold; 1 is all of them.")
        self.queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens that the prefix cache had.")
        self.preemptions = self._counter("vllm:num_preemptions", "Requests that lost their pages to others.")
        self.iteration = self._histogram("vllm:iteration_tokens_total", "New tokens of an engine step.", ROWS)
        self.active = self._gauge("aquiline:active_slots", "Slots that decoded in the last step.")
        self.slots = self._gauge("aquiline:slots", "Requests that may run at once.")
        self.pages = self._gauge("aquiline:pages", "Pages of keys and values there are.")
        self.used_pages = self._gauge("aquiline:pages_used", "Pages that running requests hold.")
        self.steps = self._counter("aquiline:engine_steps", "Steps of the engine.")
        self.prefilled = self._counter("aquiline:prefill_tokens", "Prompt tokens that were computed.")
        self.restarts = self._counter("aquiline:engine_restarts", "Engine processes that were replaced.")

    def _speculation(self) -> None:
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
        self.drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self.accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their place in the draft.", "position"
        )
        self.lengths = self._counter("aquiline:draft_lengths", "Drafts by how many tokens they had.", "num_tokens")
        self.tau = self._gauge("aquiline:tau", "Tokens that a decode step gave a request on average, since the start.")
        self.sum_decoded = self.sum_committed = 0  # steps that decoded, for each of their requests; tokens of these

    def _requests(self) -> None:
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that have ended.")
        self.new_tokens = self._counter("vllm:generation_tokens", "New tokens.")
        self.success = self._counter("vllm:request_success", "Requests that have ended.", "finished_reason")
        for reason in REASONS.values():
            self.success.labels(self._model, reason)  # zero until one ends so: dashboards take rates
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", SECONDS
        )
        self.inter_token = self._histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.", GAPS)
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "A request's time after its first token, per token.", GAPS
        )
        self.end_to_end = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", SECONDS)
        self.prompt_sizes = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.output_sizes = self._histogram("vllm:request_generation_tokens", "New tokens of a request.", TOKENS)
        self.refused = self._counter("aquiline:http_errors", "Requests that were refused, by status.", "status")

    def on_start(self, info: EngineInfo) -> None:
        """An engine process is ready."""
        self.slots.set(info.num_slots)
        self.pages.set(info.num_pages)
        self._num_pages = info.num_pages

    def on_down(self) -> None:
        """An engine process has died: its sums begin at zero again."""
        self._publish()
        self.restarts.inc()
        self._told = self._now = _NOTHING
        for gauge in (self.running, self.waiting, self.active, self.used_pages, self.usage):
            gauge.set(0)

    def on_step(self, message: StepMessage) -> None:
        """The engine has run steps, or has carried out commands. What it says is kept, and made figures when somebody
        reads them: these take more time than a step leaves."""
        before, self._now = self._now, message.stats
        num_tokens = self._now.sum_prefill_tokens - before.sum_prefill_tokens
        for delta in message.deltas:
            num_tokens += len(delta.token_ids)
            if delta.is_decoded:
                self.sum_decoded += 1
                self.sum_committed += len(delta.token_ids)
            if delta.num_drafted:
                self._drafts[delta.num_drafted, delta.num_confirmed] += 1
        if num_tokens:
            self._num_steps += message.num_steps
            self.iteration.observe(num_tokens / message.num_steps, message.num_steps)

    def _publish(self) -> None:
        """Bring the figures to where the engine stands."""
        now, told, self._told = self._now, self._told, self._now
        self.running.set(now.num_running)
        self.waiting.set(now.num_waiting)
        self.active.set(now.num_active)
        self.used_pages.set(now.num_used_pages)
        self.usage.set(now.num_used_pages / self._num_pages)
        self.queries.inc(now.sum_prompt_tokens - told.sum_prompt_tokens)
        self.hits.inc(now.sum_cached_tokens - told.sum_cached_tokens)
        self.preemptions.inc(now.sum_preemptions - told.sum_preemptions)
        self.prefilled.inc(now.sum_prefill_tokens - told.sum_prefill_tokens)
        self.steps.inc(self._num_steps)
        self.new_tokens.inc(self._num_new)
        self._num_steps = self._num_new = 0
        drafts, self._drafts = self._drafts, Tally()
        for (num_drafted, num_confirmed), count in drafts.items():
            self.drafts.inc(count)
            self.drafted.inc(num_drafted * count)
            self.accepted.inc(num_confirmed * count)
            self.lengths.labels(self._model, str(num_drafted)).inc(count)
            for position in range(num_confirmed):
                self.accepted_at.labels(self._model, str(position)).inc(count)
        if self.sum_decoded:
            self.tau.set(self.sum_committed / self.sum_decoded)

    def on_tokens(self, num_tokens: int) -> None:
        """A choice has got so many tokens."""
        self._num_new += num_tokens

    def on_gap(self, seconds: float, num_tokens: int) -> None:
        """So many tokens came together, so long after the one before them."""
        if num_tokens:
            self.inter_token.observe(seconds / num_tokens, num_tokens)

    def on_end(self, job: Job, reasons: Sequence[str], now_s: float) -> None:
        """A job has ended, however it did."""
        num_prompt, num_new = sum(map(len, job.prompts)), sum(choice.num_tokens for choice in job.choices)
        self.prompt_tokens.inc(num_prompt)
        self.prompt_sizes.observe(num_prompt)
        self.output_sizes.observe(num_new)
        self.end_to_end.observe(now_s - job.began_s)
        if num_new > 1:
            self.per_token.observe((job.last_s - job.first_s) / (num_new - 1))
        for reason in reasons:
            self.success.labels(self._model, REASONS[reason]).inc()

    def on_refused(self, status: int) -> None:
        """A request was answered with an error."""
        self.refused.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        self._publish()
        if self.learning is not None:
            found = self.learning.serving()
            self.generation.set(found.generation if found else 0)
            self.tau_before.set(found.tau_before if found else 0)
            self.tau_after.set(found.tau_after if found else 0)
        return generate_latest(self.registry)


_NOTHING = Stats(0, 0, 0, 0, 0, 0, 0, 0)
