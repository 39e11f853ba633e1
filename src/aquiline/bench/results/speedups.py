"""Which results may be compared: a setting with its baseline, with its result in an older run, with another engine's.

Nothing is guessed: there is a ratio, or the reason why there is none. `integrity.differences` has the rules for one
pair of results. This module applies them to all results, with further rules for other machines and commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aquiline.bench.results.integrity import differences
from aquiline.bench.results.intervals import Estimate, paired
from aquiline.bench.results.result import Result, is_speculative
from aquiline.bench.tables import NO_FIGURE

Results = Mapping[str, Result]
"""Results by their files."""
NOISE = 0.03
"""A change must be larger than this to count, and larger than the spread of either run."""


@dataclass(frozen=True)
class Ratio:
    """The ratio of a result to another, or the reasons why there is none. other: the other result's file, or the file
    of the most similar one. against: the other result; empty if there is no ratio.

    low, high: the interval of the value; only for results of the same rounds, and from six rounds on."""

    value: float | None
    other: str | None = None
    reasons: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    against: Result = field(default_factory=dict)

    def __str__(self) -> str:
        return "none" if self.value is None else Estimate(self.value, self.low, self.high).times()


def spec_efficiency(result: Result, ratio: Ratio) -> float | None:
    """Measured speedup / ideal speedup at the same tau. None without a roofline, a fair baseline or drafts."""
    roofline = result.get("roofline", {})
    if ratio.value is None or not is_speculative(result):
        return None
    stated: float | None = roofline.get("spec_efficiency")
    ideal: float | None = roofline.get("ideal_speedup")
    return stated if stated is not None or ideal is None else ratio.value / ideal


FIGURES: dict[str, Callable[[Result, Ratio], float | None]] = {
    "speedup": lambda result, ratio: ratio.value,
    "tau": lambda result, ratio: result["eagle_speculation"]["mean_acceptance_length"],
    "steps": lambda result, ratio: min(result["output"]["num_tokens"]) - 1,
    "runs": lambda result, ratio: result["scenario"]["measurement_runs"],
    "acceptance_rate": lambda result, ratio: result["eagle_speculation"]["mean_acceptance_rate"],
    "tokens_per_s": lambda result, ratio: result["throughput_tokens_per_sec"]["median"],
    "ttft_ms": lambda result, ratio: result["ttft_ms"]["median"],
    "itl_ms": lambda result, ratio: result["itl_ms"]["median"],
    "peak_bytes": lambda result, ratio: result["memory"]["peak_bytes"],
    "repeated_share": lambda result, ratio: result["scenario"]["repeated_share"],
    "percent_of_ideal": lambda result, ratio: result.get("roofline", {}).get("percent_of_ideal"),
    "spec_efficiency": spec_efficiency,
}
"""What a gate's limit may ask of a result and its speedup; None if it was not measured."""


@dataclass(frozen=True)
class Change:
    """A figure compared with an older run's. above_noise: the change is more than 3 % and more than the spread of
    either result's runs. A single run has no spread, so only the 3 % count."""

    figure: str
    ratio: float
    above_noise: bool

    @property
    def is_regression(self) -> bool:
        """Whether the figure fell by more than the noise."""
        return self.above_noise and self.ratio < 1

    def __str__(self) -> str:
        word = "REGRESSION" if self.is_regression else "better"
        return f"{word}: {self.figure} {self.ratio:.2f}x" if self.above_noise else ""


def machine(result: Result) -> str:
    """The machine of a result in words, as far as the result names it."""
    system = result["system"]
    words = {"threads": "{} threads", "isa": "{}", "path": "{} path"}
    known = [form.format(system[name]) for name, form in words.items() if name in system]
    return ", ".join([system.get("cpu", "unnamed CPU"), *known])


def model(result: Result) -> str:
    """The target of a result in words, with its storage and arithmetic."""
    m = result["model"]
    weights = ", random weights" if m["random_weights"] else ""
    return f"{m['target']}, {m['dtype']} storage, {m['arithmetic']} arithmetic{weights}"


def tau(result: Result) -> str:
    """The mean acceptance length of a result, marked if it was simulated; a dash for an engine that states none."""
    counted, simulated = result["eagle_speculation"], result["model"]["simulated_tau"]
    mark = "" if simulated is None else " simulated"
    return f"{counted['mean_acceptance_length']:.2f}{mark}" if counted["num_steps"] else NO_FIGURE


def work(result: Result) -> tuple[Any, ...]:
    """The work of a result, with its model and engine: all that the rows of one table share besides the machine. Works
    can be sorted."""
    s = result["scenario"]
    asked = s["name"], s["profile"], s["context_tokens"], s["batch"], float(s["temperature"])
    return (*asked, model(result), result["engine"])


def speedup(result: Result, results: Results) -> Ratio:
    """The speedup of a result over the one baseline that did the same work on the same machine at the same commit: the
    median of the rounds' throughput ratios."""
    same = {
        name: other
        for name, other in results.items()
        if not is_speculative(other)
        and other["engine"] == result["engine"]
        and other["scenario"]["name"] == result["scenario"]["name"]
    }
    return _over(result, same, "baseline")


def over_setting(result: Result, other: Result) -> Ratio:
    """Throughput over that of another setting of the same run: the median of the rounds' ratios."""
    return _over(result, {other["setting"]["name"]: other}, "other setting")


def against_older(result: Result, older: Results) -> Ratio:
    """Median throughput / median throughput of the same setting in an older run on the same machine."""
    same = {name: other for name, other in older.items() if _setting(other) == _setting(result)}
    return _over(result, same, "older result", is_same_run=False)


def changes(result: Result, older: Result) -> list[Change]:
    """Changes of throughput, and of tau if the older result has one, against a comparable older result. Tau has no
    spread, because the same text with the same draft takes the same steps."""
    new, old = result["throughput_tokens_per_sec"], older["throughput_tokens_per_sec"]
    spread = max(new["max"] - new["min"], old["max"] - old["min"])
    now, was = (r["eagle_speculation"]["mean_acceptance_length"] for r in (result, older))
    return [_change("tok/s", new["median"], old["median"], spread)] + ([_change("tau", now, was, 0.0)] if was else [])


def vanished(results: Iterable[Result], older: Results) -> list[str]:
    """File names of older results whose work and setting have no result any more, on any machine."""
    there = {_setting(result) for result in results}
    return [name for name, result in older.items() if _setting(result) not in there]


def tau_gaps(result: Result, others: Results) -> tuple[list[float], list[str]]:
    """How far tau is from another engine's in each of its results of the same work with drafts of the same length, and
    the reasons why they cannot be compared. Tau is compared, not speed, so the device does not matter."""
    gaps, reasons = [], []
    for file, other in others.items():
        if _job(other) != _job(result) or not is_speculative(other):
            continue
        why = differences(result, other, is_one_machine=False)
        ours, theirs = (r["eagle_speculation"]["mean_acceptance_length"] for r in (result, other))
        why += [] if theirs else ["eagle_speculation.mean_acceptance_length: is 0; the engine states no tau"]
        is_measured = other["model"]["simulated_tau"] is None
        why += [] if is_measured else ["model.simulated_tau: was chosen, not measured"]
        reasons += [f"parity against {file}: {reason}" for reason in why]
        gaps.append(abs(ours - theirs))
    return gaps, reasons


def _job(result: Result) -> tuple[object, ...]:
    """The work, the model and the length of drafts. Owners of hub names do not count."""
    return *work(result)[:5], result["model"]["target"].split("/")[-1], result["setting"].get("num_spec_tokens")


def _setting(result: Result) -> tuple[Any, ...]:
    """The work and setting of a result, on whichever machine."""
    m = result["model"]
    return work(result), result["setting"]["name"], m["draft"], m["simulated_tau"]


def _over(result: Result, others: Results, what: str, is_same_run: bool = True) -> Ratio:
    """Throughput over that of the one fitting result of several. is_same_run: rounds of the two are compared in
    pairs; otherwise their medians are."""
    if not others:
        return Ratio(None, reasons=(f"there is no {what}",))
    reasons = {
        name: differences(result, other) + (_other_run(result, other) if is_same_run else [])
        for name, other in others.items()
    }
    fit = [name for name, found in reasons.items() if not found]
    if len(fit) > 1:
        return Ratio(None, reasons=(f"{len(fit)} {what}s would do ({', '.join(fit)}); keep one",))
    if not fit:
        nearest = min(reasons, key=lambda name: len(reasons[name]))
        return Ratio(None, nearest, tuple(reasons[nearest]))
    against = others[fit[0]]
    own, other = (r["throughput_tokens_per_sec"] for r in (result, against))
    found = paired(own["values"], other["values"]) if is_same_run else Estimate(own["median"] / other["median"])
    return Ratio(found.value, fit[0], (), found.low, found.high, against)


def _other_run(result: Result, other: Result) -> list[str]:
    """Reasons why two results cannot be rounds of one run."""
    a, b = result["commit"], other["commit"]
    runs, others = (r["scenario"]["measurement_runs"] for r in (result, other))
    found = [] if a == b else [f"commit: {a!r} against {b!r}"]
    return found if runs == others else [*found, f"scenario.measurement_runs: {runs} against {others}"]


def _change(figure: str, new: float, old: float, spread: float) -> Change:
    ratio = new / old
    return Change(figure, ratio, abs(ratio - 1) > NOISE and abs(new - old) > spread)
