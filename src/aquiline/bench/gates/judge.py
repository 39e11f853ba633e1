"""One gate over results: which results it judges, which must not be judged, and every limit with its margin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from aquiline.bench.gates.rules import GAP, Gate
from aquiline.bench.results import speedups
from aquiline.bench.results.integrity import differences
from aquiline.bench.results.result import Result, is_speculative
from aquiline.bench.results.speedups import Ratio

Results = Mapping[str, Result]


@dataclass(frozen=True)
class Check:
    """One limit of a gate and the measurement, None if there is none."""

    limit: str
    threshold: float
    measured: float | None

    @property
    def margin(self) -> float | None:
        """The distance between measurement and limit; negative if the limit was missed, None without a measurement."""
        if self.measured is None:
            return None
        return self.threshold - self.measured if self.limit.startswith("max_") else self.measured - self.threshold

    @property
    def is_held(self) -> bool:
        """Whether there is a measurement and it holds the limit."""
        return self.margin is not None and self.margin >= 0


@dataclass(frozen=True)
class Judgement:
    """One gate's judgement. file: the result that was judged; None if the gate selects no result, which makes it
    red."""

    gate: Gate
    file: str | None = None
    result: Result | None = None
    checks: tuple[Check, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """green, red or refused."""
        if self.refusals:
            return "refused"
        return "green" if self.result is not None and all(check.is_held for check in self.checks) else "red"

    @property
    def ideal(self) -> float | None:
        """The speedup that the roofline allows at this tau on this device; None if it was not measured."""
        ideal: float | None = (self.result or {}).get("roofline", {}).get("ideal_speedup")
        return ideal

    def as_dict(self) -> dict[str, object]:
        """A gate in the JSON of `aquiline gate --json`."""
        return {
            "name": self.gate.name,
            "model": self.gate.model,
            "select": str(self.gate.select),
            "verdict": self.verdict,
            "file": self.file,
            "setting": self.result["setting"]["name"] if self.result is not None else None,
            "ideal_speedup": self.ideal,
            "checks": [asdict(check) | {"margin": check.margin, "is_held": check.is_held} for check in self.checks],
            "changed_limits": list(self.gate.changed),
            "refusals": list(self.refusals),
        }


def judge(gate: Gate, results: Results, parity: Results | None = None) -> Judgement:
    """Judge one gate over the results that it selects: check the limits of the fastest, and refuse if any of them must
    not be judged."""
    selected = {
        name: result
        for name, result in results.items()
        if gate.is_of(result) and gate.select.takes(result) and is_speculative(result)
    }
    if not selected:
        return Judgement(gate)
    ratios = {name: speedups.speedup(result, results) for name, result in selected.items()}
    refusals = [f"{name}: {why}" for name in selected for why in _unfit(selected[name], ratios[name], results)]
    settings = [result["setting"]["name"] for result in selected.values()]
    for setting in sorted({setting for setting in settings if settings.count(setting) > 1}):
        refusals.append(f"{settings.count(setting)} results of {setting} ({', '.join(selected)}); keep one")
    if refusals:
        return Judgement(gate, refusals=tuple(refusals))
    best = max(selected, key=lambda name: ratios[name].value or 0.0)
    figures = _figures(selected[best], ratios[best])
    limits = [limit for limit in gate.limits if limit != GAP]
    checks = [Check(limit, gate.limits[limit], figures[limit.partition("_")[2]]) for limit in limits]
    if parity is not None:
        peers, why = _peers(selected[best], parity)
        if why:
            return Judgement(gate, refusals=tuple(f"{best}: {reason}" for reason in why))
        tau = figures["tau"]
        assert tau is not None, "every result has a tau"
        gaps = [abs(tau - peer["eagle_speculation"]["mean_acceptance_length"]) for peer in peers]
        checks.append(Check(GAP, gate.limits[GAP], max(gaps, default=None)))
    return Judgement(gate, best, selected[best], tuple(checks))


def _unfit(result: Result, ratio: Ratio, results: Results) -> list[str]:
    """Why a gate must not judge a result: it has no fair baseline, its figures are simulated, its weights are random,
    or it broke a rule of PERF mode."""
    against = f"against {ratio.other}: " if ratio.other is not None else ""
    found = [f"{against}{reason}" for reason in ratio.reasons]
    if result["model"]["simulated_tau"] is not None:
        found.append(f"model.simulated_tau: {result['model']['simulated_tau']:g} was chosen, not measured")
    if result["model"]["random_weights"]:
        found.append("model.random_weights: a gate asks about a real model")
    for run in [result] + ([results[ratio.other]] if ratio.other is not None else []):
        found += [f"PERF violation of {run['setting']['name']}: {violation}" for violation in _violations(run)]
    return found


def _violations(result: Result) -> list[str]:
    """The rules of PERF mode that a run broke."""
    found = list(result.get("perf_violations", []))
    disabled = result.get("slots", {}).get("disabled_other")
    if disabled is None:
        found.append("slots.disabled_other: is missing, so whether every slot decoded is not known")
    elif disabled:
        found.append(f"slots.disabled_other: {disabled} slots did not decode for another reason than their end")
    if result["system"]["path"] == "torch":
        found.append("system.path: torch, the fallback without the native library")
    return found


def _figures(result: Result, ratio: Ratio) -> dict[str, float | None]:
    drafting, roofline = result["eagle_speculation"], result.get("roofline", {})
    return {
        "speedup": ratio.value,
        "tau": drafting["mean_acceptance_length"],
        "steps": min(result["output"]["num_tokens"]) - 1,
        "runs": result["scenario"]["measurement_runs"],
        "acceptance_rate": drafting["mean_acceptance_rate"],
        "tokens_per_s": result["throughput_tokens_per_sec"]["median"],
        "ttft_ms": result["ttft_ms"]["median"],
        "itl_ms": result["itl_ms"]["median"],
        "peak_bytes": result["memory"]["peak_bytes"],
        "repeated_share": result["scenario"]["repeated_share"],
        "percent_of_ideal": roofline.get("percent_of_ideal"),
        "spec_efficiency": speedups.spec_efficiency(result, ratio),
    }


def _peers(result: Result, parity: Results) -> tuple[list[Result], list[str]]:
    """Another engine's results of the same work with drafts of the same length, and the reasons why they cannot be
    compared. Tau is compared, not speed, so the device does not matter."""
    found, reasons = [], []
    names = ("name", "profile", "context_tokens", "batch", "temperature")
    for file, peer in parity.items():
        is_same_work = all(peer["scenario"][name] == result["scenario"][name] for name in names)
        is_same_model = peer["model"]["target"].split("/")[-1] == result["model"]["target"].split("/")[-1]
        is_same_length = peer["setting"].get("num_spec_tokens") == result["setting"].get("num_spec_tokens")
        if not (is_same_work and is_same_model and is_same_length) or not is_speculative(peer):
            continue
        why = [reason for reason in differences(result, peer) if not reason.startswith("system.")]
        if not peer["eagle_speculation"]["mean_acceptance_length"]:
            why.append("eagle_speculation.mean_acceptance_length: is 0; the engine states no tau")
        if peer["model"]["simulated_tau"] is not None:
            why.append("model.simulated_tau: was chosen, not measured")
        reasons += [f"parity against {file}: {reason}" for reason in why]
        found.append(peer)
    return found, reasons
