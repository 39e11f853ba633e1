"""What a mixture of experts and its EAGLE-3 head do here: for whoever has the weights of gpt-oss and a head.

    python benchmarks/gptoss.py --weights gpt-oss-20b --draft gpt-oss-20b-eagle3 --out report/

Three parts. Parity: our logits in float32 arithmetic against transformers' on dequantised experts, on short texts of
which rows with a near tie between experts are left out; it needs four bytes a parameter and is skipped, with the memory
that it wants, where they are not free. Acceptance: chains and adaptive drafting on real text, greedily and sampled,
alone and together; every setting must write the baseline's tokens. Speed: the measured speedup beside the ideal one at
the same tau, and the experts that a step read beside those that independent rows would: from them follows the overlap
of neighbouring rows, and with it a fairer ideal. --gates also measures the scenarios of the gates in
bench/gates/gates.yaml (contexts of 16K and 32K, which take a CPU hours) and judges them for this model.

Any other mixture works too. Writes report.md, report.json and results/ into OUT, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from aquiline.backends.cpu import calls
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.bench.data.prompts import text_prompts
from aquiline.bench.gates.rules import read_gates
from aquiline.bench.gates.verdicts import Judgement, judge
from aquiline.bench.results import speedups
from aquiline.bench.results.result import Result, commit, is_speculative
from aquiline.bench.suite.scenarios import ModelSource
from aquiline.bench.suite.suite import Progress, run_suite
from aquiline.bench.suite.suite_plan import FULL, Load, Plan
from aquiline.bench.tables import NO_FIGURE, Table, percent
from aquiline.bench.theory.choice import LimitsChoice, StorageChoice
from aquiline.bench.theory.roofline import INDEPENDENT, Roofline, Routing, named_roofline
from aquiline.config import Environment, PairConfig
from aquiline.engine.model import Loading, load_models
from aquiline.engine.score import Scorer
from aquiline.models.counting import read_shape
from aquiline.models.files import resolve
from aquiline.spec.drafting import Chain
from aquiline.text.tokenizer import load_tokenizer

NEAR_TIE = 1e-4
"""Rows whose last chosen expert leads the next one by less are left out: two sums may choose differently."""
PARITY_TEXTS, PARITY_TOKENS = 3, 128
CHAINS = (1, 2, 3, 5)


def parity(weights: str) -> dict[str, Any]:
    """How far our logits are from transformers' in float32; "skipped" with the reason where this cannot be asked."""
    if (missing := calls.missing_reason()) is not None:
        return {"skipped": missing}
    wanted, free = 4 * read_shape(weights).num_parameters, psutil.virtual_memory().available
    if wanted > free:
        return {
            "skipped": f"transformers needs {wanted / 1e9:.1f} GB for float32 weights, {free / 1e9:.1f} GB are free"
        }
    place = resolve(weights)
    tokenizer = load_tokenizer(place)
    assert tokenizer is not None, f"{weights}: has no tokenizer"
    texts = [prompt.token_ids for prompt in text_prompts(PARITY_TOKENS, PARITY_TEXTS, tokenizer)]
    theirs = transformers_logits(place, texts)
    gc.collect()
    models = load_models(place, None, Loading("bfloat16", "float32", "float32"), Environment.read())
    assert isinstance(models.pair, CpuPair)
    scorer, differences, agreed, num_rows = Scorer(models, PARITY_TOKENS), list[float](), 0, 0
    for text, (logits, clear) in zip(texts, theirs, strict=True):
        hidden = scorer([np.array(text, np.int32)]).hidden
        ours = models.pair.target_model.logits(hidden, np.arange(len(text), dtype=np.int32))
        differences += np.abs(ours - logits).max(1)[clear].tolist()
        agreed += int((ours.argmax(1) == logits.argmax(1))[clear].sum())
        num_rows += len(text)
    compared = len(differences)
    return {
        "rows": num_rows,
        "near_ties": num_rows - compared,
        "worst": max(differences),
        "same_best": agreed / compared,
    }


def transformers_logits(place: Path, texts: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of every text transformers' logits [n, V], and which rows have no near tie between experts [n]."""
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    fields = json.loads((place / "config.json").read_text(encoding="utf-8"))
    packed = {"quantization_config": Mxfp4Config(dequantize=True)} if fields.get("quantization_config") else {}
    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, **packed
    ).eval()
    per_token, found = model.config.num_experts_per_tok, []
    for text in texts:
        with torch.no_grad():
            out = model(torch.tensor([text]), output_router_logits=True)
        best = [scores.reshape(len(text), -1).sort(-1, descending=True).values for scores in out.router_logits]
        leads = torch.stack([scores[:, per_token - 1] - scores[:, per_token] for scores in best])
        found.append((out.logits[0].numpy(), (leads.amin(0) >= NEAR_TIE).numpy()))
    return found


def measure(args: argparse.Namespace) -> tuple[dict[str, Result], list[str]]:
    """The results of all scenarios by file name, and the scenarios that cannot run here."""
    source, progress = ModelSource(PairConfig(args.weights, args.draft)), Progress(start=lambda name, runs: print(name))
    general = partial(Plan, num_spec_tokens=CHAINS, measurement_runs=args.runs)
    loads = (Load("single", args.context, 1), Load("batch", args.context, args.batch))
    plans = [general(own_loads=loads, temperatures=(0.0, 0.8), micro_steps=args.steps)]
    for gate in gates_of("") if args.gates else ():
        asked = {
            "name": gate.select["scenario"],
            "context": gate.select["context_tokens"],
            "batch": gate.select["batch"],
        }
        load = next(load for load in FULL if {name: getattr(load, name) for name in asked} == asked)
        plans.append(general("full", own_loads=(load,), micro_steps=int(gate.limits["min_steps"])))
    results = [result for plan in plans for result in run_suite(plan, source, source, args.out / "results", progress)]
    return {file_of(result): result for result in results}, progress.skipped


def file_of(result: Result) -> str:
    """A name for a result that says its work and setting."""
    s = result["scenario"]
    work = f"{s['profile']} {s['name']} {s['context_tokens']} x {s['batch']}, temperature {s['temperature']:g}"
    return f"{work}, {result['setting']['name']}"


def gates_of(model: str) -> list[Any]:
    """The micro gates of real contexts, asked of this model."""
    return [replace(g, model=model) for g in read_gates() if g.select["profile"] == "full" and g.level == "micro"]


def experts_of(result: Result, roofline: Roofline) -> dict[str, Any]:
    """Experts that a step read and a layer holds on average, those that independent rows would read, and for one
    sequence the overlap of its rows."""
    slots, layers = result["slots"], [layer for layer in roofline.target.body.layers if layer.num_experts]
    steps = {int(active): count for active, count in slots["steps_by_active"].items()}
    num_steps, num_active = sum(steps.values()), sum(active * count for active, count in steps.items())
    rows, read = slots["num_verify_rows"] / num_active, slots["num_experts"] / num_steps / len(layers)
    expected = sum(
        count * INDEPENDENT.experts(layer, active, rows) for layer in layers for active, count in steps.items()
    )
    seen = Routing.seen(layers[0], read, rows) if set(steps) == {1} else None
    return {
        "rows": rows, "experts_read": read, "experts_independent": expected / num_steps / len(layers),
        "overlap": None if seen is None else seen.overlap,
    }  # fmt: skip


def row_of(result: Result, results: dict[str, Result], roofline: Roofline) -> dict[str, Any]:
    """The figures of one setting: acceptance, speedups measured and ideal, experts."""
    drafting, s = result["eagle_speculation"], result["scenario"]
    ratio = speedups.speedup(result, results) if is_speculative(result) else None
    row = {
        "work": f"{s['name']}, {s['context_tokens']} x {s['batch']}", "setting": result["setting"]["name"],
        "temperature": s["temperature"], "tokens_per_s": result["throughput_tokens_per_sec"]["median"],
        "tau": drafting["mean_acceptance_length"], "per_position": drafting["per_position"],
        "speedup": ratio and ratio.value, "not_compared": list(ratio.reasons) if ratio else [],
        "ideal_speedup": result.get("roofline", {}).get("ideal_speedup"),
        "spec_efficiency": speedups.spec_efficiency(result, ratio) if ratio else None,
        "ideal_speedup_as_routed": None, **experts_of(result, roofline),
    }  # fmt: skip
    length = result["setting"]["num_spec_tokens"]
    if row["overlap"] is not None and length is not None:
        routed = replace(roofline, routing=Routing(row["overlap"]))
        middle = s["context_tokens"] + s["new_tokens"] // 2
        row["ideal_speedup_as_routed"] = routed.cycle(Chain(length), row["tau"], s["batch"], middle).speedup
    return row


def shown(row: dict[str, Any]) -> dict[str, str]:
    """A row of the report's table."""

    def times(name: str) -> str:
        return NO_FIGURE if row[name] is None else f"{row[name]:.2f}x"

    return {
        "work": row["work"], "temperature": f"{row['temperature']:g}", "setting": row["setting"],
        "tok/s": f"{row['tokens_per_s']:.1f}", "tau": f"{row['tau']:.2f}",
        "accepted by position": " ".join(f"{share:.2f}" for share in row["per_position"]) or NO_FIGURE,
        "speedup": times("speedup"), "ideal": times("ideal_speedup"), "of ideal": percent(row["spec_efficiency"]),
        "ideal as routed": times("ideal_speedup_as_routed"), "rows": f"{row['rows']:.2f}",
        "experts a layer": f"{row['experts_read']:.1f}", "if independent": f"{row['experts_independent']:.1f}",
        "overlap": percent(row["overlap"]),
    }  # fmt: skip


def judged(judgement: Judgement) -> dict[str, str]:
    """A gate as a row of the report's table."""
    checks = ", ".join(
        f"{c.limit} {c.threshold:g}: {c.measured:.2f}" for c in judgement.checks if c.measured is not None
    )
    ideal = NO_FIGURE if judgement.ideal_speedup is None else f"{judgement.ideal_speedup:.2f}x"
    why = "; ".join(judgement.refusals) or checks or "not measured"
    return {"gate": judgement.name, "verdict": judgement.verdict, "ideal speedup": ideal, "limits": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="the target: a folder or a hub id")
    parser.add_argument("--draft", required=True, help="its EAGLE-3 head")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--batch", type=int, default=8, help="prompts that are answered together")
    parser.add_argument("--steps", type=int, default=128, help="decode steps of the baseline")
    parser.add_argument("--runs", type=int, default=6, help="rounds of every setting")
    parser.add_argument("--gates", action="store_true", help="measure the scenarios of the gates too")
    args = parser.parse_args()
    compared = parity(args.weights)
    print(f"parity: {compared}")
    results, skipped = measure(args)
    first = next(iter(results.values()))
    storage = StorageChoice(draft_dtype=first["system"]["draft_dtype"])
    arithmetic = LimitsChoice(arithmetic=first["model"]["arithmetic"])
    roofline = named_roofline(args.weights, args.draft, storage, arithmetic, print)
    rows = [row_of(result, results, roofline) for result in results.values()]
    gates = [judge(gate, results) for gate in gates_of(first["model"]["target"])]
    doubts = [f"{row['work']}, {row['setting']}: {why}" for row in rows for why in row["not_compared"]]
    about = f"{speedups.machine(first)}; {speedups.model(first)}; draft {args.draft}; commit {commit()}"
    notes = [f"skipped: {why}" for why in skipped] + doubts + roofline.notes()
    cells = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in compared.items()}
    pages = [
        Table.of_cells([cells], title="logits against transformers, float32"),
        Table.of_cells(list(map(shown, rows)), title="acceptance, speed and experts", facts=about, notes=notes),
        Table.of_cells(list(map(judged, gates)), title="gates"),
    ]  # fmt: skip
    told = {
        "benchmark": "gptoss", "parity": compared, "rows": rows, "gates": list(map(asdict, gates)), "notes": notes,
        "same_text": not doubts, "system": first["system"], "commit": commit(),
    }  # fmt: skip
    (args.out / "report.md").write_text("\n".join(page.markdown() for page in pages), encoding="utf-8")
    (args.out / "report.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: told[name] for name in ("benchmark", "parity", "same_text", "commit")}))


if __name__ == "__main__":
    main()
