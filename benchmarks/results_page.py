"""Measure what the tables of docs/results.md show, and write them there. Run: python benchmarks/results_page.py

About an hour and a half on two quiet cores. The rules: every figure a median over six rounds or more with its 95 %
interval; in every round all settings run in turn, another one first; decoding by the wall clock for every engine; peers
swept over the lengths that our chains are, llama.cpp with flash attention and without; nothing is written from
uncommitted source. Which parts run can be named (--only), and which comparisons (--comparison); results of others stay.
The part `eval` asks the pair's own questions and those of a folder (--questions) with EAGLE's mt_bench.jsonl,
gsm8k.jsonl and humaneval.jsonl, which is not in the repository. --smoke runs all of them for seconds, in a folder of
its own, and writes no page. Needs the extra `peers`, llama.cpp's server (benchmarks/llama_server.py) and the weights of
`smollm2`. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compared import published, read_comparisons
from conversions.converted import cached
from restored import STORED, restore

from aquiline.bench.data.datasets import load_questions
from aquiline.bench.results.result import DIRTY, commit, read_results
from aquiline.bench.results.table import summary
from aquiline.bench.tables import Table
from aquiline.models.known_pairs import PAIRS, SMOLLM2, SMOLLM2_WEIGHTS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
COMMAND = [sys.executable, "-c", "from aquiline.cli.main import app; app()"]
EAGLE = ("openvino:eagle", "openvino:eagle:samekv", "llamacpp:eagle", "llamacpp:eagle:noflash")
PLAIN = (
    "transformers", "openvino", "openvino:samekv", "openvino:sdpa", "openvino:int8", "llamacpp", "llamacpp:noflash",
    "llamacpp:server", "llamacpp:int8", "llamacpp:int8:noflash", "llamacpp:int4", "llamacpp:int4:noflash",
)  # fmt: skip
LOOKUP = (
    "openvino:lookup", "openvino:lookup=10", "llamacpp:ngram-simple", "llamacpp:ngram-simple=3x8",
    "llamacpp:ngram-map-k=3x8", "llamacpp:ngram-map-k4v=3x8", "llamacpp:ngram-mod=3x8", "llamacpp:ngram-cache",
)  # fmt: skip
BATCHED = (
    "openvino", "openvino:samekv", "openvino:sdpa", "openvino:eagle", "openvino:lookup", "llamacpp", "llamacpp:noflash",
)  # fmt: skip
RANDOM = (
    "transformers", "openvino", "openvino:int8", "openvino:lookup", "llamacpp", "llamacpp:noflash", "llamacpp:int8",
    "llamacpp:int4", "llamacpp:ngram-simple=3x8",
)  # fmt: skip
SAME_FILE = ("llamacpp:packed", "llamacpp:packed:noflash")
SAME_FILE_DRAFTED = (
    "llamacpp:packed:server", "llamacpp:packed:eagle", "llamacpp:packed:eagle:noflash",
    "llamacpp:packed:ngram-simple=3x8", "llamacpp:packed:ngram-map-k=3x8", "llamacpp:packed:ngram-mod=3x8",
    "llamacpp:packed:ngram-cache",
)  # fmt: skip
OTHER_WEIGHTS = ("openvino", "openvino:int8", "openvino:lookup", "openvino:int8:lookup", "openvino:eagle")
PROMPTS = ("llamacpp:packed", "llamacpp:packed:noflash", "openvino:int8")
SHORT = ["--new-tokens", "9", "--num-spec-tokens", "1"]
COMPARISONS: dict[str, list[str]] = {
    "smollm2": ["--target", SMOLLM2, "--num-spec-tokens", "1", "2", "3", "--peer",
                *SAME_FILE, *SAME_FILE_DRAFTED, *OTHER_WEIGHTS],
    "smollm2-t08": ["--target", SMOLLM2, "--temperature", "0.8", "--num-spec-tokens", "1", "2", "--peer",
                    *SAME_FILE, *SAME_FILE_DRAFTED[:3]],
    "smollm2-q8_0": ["--target", "q8_0", "--draft", SMOLLM2, "--num-spec-tokens", "1", "2", "3", "--peer",
                     *SAME_FILE, *SAME_FILE_DRAFTED[:3]],
    "smollm2-bf16": ["--target", "bf16", "--draft", SMOLLM2, "--num-spec-tokens", "1", "2", "3", "--peer",
                     *SAME_FILE, *SAME_FILE_DRAFTED[:3]],
    **{f"smollm2-batch{batch}": ["--target", SMOLLM2, "--batch", f"{batch}", "--num-spec-tokens", "1", "2", "--peer",
                                 *SAME_FILE, "openvino:int8"] for batch in (4, 8, 16)},
    **{f"smollm2-prompt{length}": ["--target", SMOLLM2, "--prompt-tokens", f"{length}", *SHORT, "--peer", *PROMPTS,
                                  *(["--repeats", "3"] if length > 4096 else [])] for length in (512, 2048, 8000)},
    "random-494m": ["--random-weights", "llama-494m", "--new-tokens", "64", "--peer", *RANDOM],
    "bundled": ["--target", "bundled", "--num-spec-tokens", "3", "4", "5", "--peer", *PLAIN, *EAGLE, *LOOKUP,
                "transformers:lookup=10"],
    "bundled-t08": ["--target", "bundled", "--temperature", "0.8", "--num-spec-tokens", "2", "3", "--peer", *PLAIN[1:3],
                    *PLAIN[5:8], *EAGLE],
    **{f"bundled-batch{batch}": ["--target", "bundled", "--batch", f"{batch}", "--num-spec-tokens", "1", "2", "--peer",
                                *BATCHED]
       for batch in (4, 8, 16)},
    **{f"bundled-prompt{length}": ["--target", "bundled", "--prompt-tokens", f"{length}", *SHORT, "--peer", *PLAIN[1:7]]
       for length in (512, 2048)},
    "random-230m": ["--random-weights", "llama-230m", "--new-tokens", "64", "--peer", *RANDOM],
    "random-32m": ["--random-weights", "llama-32m", "--peer", *RANDOM],
}  # fmt: skip
EVALUATION = ["--target", SMOLLM2, "--lengths", "128", "--temperature", "0", "1", "--adaptive", "--no-teacher-forced"]
FIXED = {1: ["--num-spec-tokens", "1", "2", "3", "--trees", "2x2x6"], 4: ["--num-spec-tokens", "1", "2"]}
"""By questions that are answered together, from which number on: the fixed settings beside adaptive drafting."""
BATCHES = (1, 4, 8, 16)
PUBLIC: dict[str, int | None] = {"mt_bench": None, "gsm8k": 30, "humaneval": 30}
"""Files of --questions and how many of each are asked, the first ones; None: all."""
SUITE = ["--target", "bundled", "--temperature", "0", "0.8", "--num-spec-tokens", "2", "3", "5"]
LOADS = [
    ["--scenario", "baseline", "single", "batch", "large-context", "stress"],
    ["--scenario", "long", "--contexts", "8192", "32768"],
]
SMOKE_SUITE = ["--measurement-runs", "1", "--warmup-runs", "0", "--micro-steps", "8"]
SMOKE_LOADS = [["--scenario", "baseline"], ["--scenario", "long", "--contexts", "8192"]]
SMOKE_COMPARE = ["--repeats", "1", "--new-tokens", "9", "--prompt-tokens", "32"]


@dataclass(frozen=True)
class Job:
    """Where results go, whether this is a smoke run, the comparisons that run, and the folder of public questions."""

    results: Path
    smoke: bool
    comparisons: list[str]
    questions: Path | None


def demo(job: Job) -> str:
    """The demo's table and picture. The chat model must be installed."""
    plot = [] if job.smoke else ["--plot", str(ROOT / "docs" / "demo.png")]
    found = json.loads(_run(["demo", "--json", *plot]))
    if found["pair"] != SMOLLM2:
        raise SystemExit(f"demo: the weights are missing; {SMOLLM2_WEIGHTS.command}")
    return _demo_table(found)


def bundled_demo(job: Job) -> str:
    """The same table of the bundled pair."""
    return _demo_table(json.loads(_run(["demo", "--bundled", "--json"])))


def _demo_table(found: dict[str, Any]) -> str:
    columns = ("setting", "temperature", "tok/s", "speedup", "tau", "accepted by position", "repeated 8-grams")
    rows = []
    for row in found["runs"]:
        (low, high), (slow, fast) = row["tokens_per_s_interval"], row["speedup_interval"]
        rows.append((
            row["title"], f"{row['temperature']:g}",
            f"{row['tokens_per_s']:.0f} [{low:.0f}, {high:.0f}]",
            f"{row['speedup']:.2f}x [{slow:.2f}, {fast:.2f}]" if row["drafter"] != "none" else "",
            f"{row['tau']:.2f}", " ".join(f"{p:.2f}" for p in row["per_position"][:5]), f"{row['repeated_share']:.0%}",
        ))  # fmt: skip
    identical = "yes" if found["identical"] else "NO"
    return f"{Table(columns, rows).markdown()}\nEvery token identical to its baseline's: {identical}.\n"


def evaluation(job: Job) -> str:
    """SmolLM2's answers by kind of question and by how many are answered together."""
    if job.questions is None:
        raise SystemExit("eval: needs a folder with EAGLE's question files; --questions DIR")
    asked = evaluation_questions(job.questions)
    out = job.results / "eval"
    out.mkdir(parents=True, exist_ok=True)
    for batch in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            fixed = FIXED[max(least for least in FIXED if least <= batch)]
            count = ["--count", "2"] if job.smoke else []
            dataset = Path(folder) / "questions.jsonl"
            dataset.write_text("".join(f"{json.dumps(row)}\n" for row in asked), encoding="utf-8")
            _run(["eval", *EVALUATION, *fixed, "--dataset", str(dataset), "--batch", f"{batch}", *count,
                  "--out", folder])  # fmt: skip
            keep_evaluation(Path(folder) / "eval.json", out / f"batch{batch}.json")
            if batch == 1 and not job.smoke:
                shutil.copy(Path(folder) / "eval.png", ROOT / "docs" / "evaluation.png")
    return evaluation_tables(out)


def evaluation_questions(folder: Path) -> list[dict[str, Any]]:
    """Rows in EAGLE's format. A public set is a category; the pair's own questions have the kinds their file names."""
    found = [(name, each) for name, count in PUBLIC.items() for each in load_questions(folder / f"{name}.jsonl", count)]
    found += [(each.category, each) for each in load_questions(PAIRS[SMOLLM2].questions)]
    return [
        {"question_id": f"{category}/{each.id}", "category": category, "turns": list(each.turns)}
        for category, each in found
    ]


def keep_evaluation(found: Path, to: Path) -> None:
    """Write an eval.json without its rows, one of which stands for every text and setting."""
    document = json.loads(found.read_text(encoding="utf-8"))
    del document["rows"]
    to.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def evaluation_tables(folder: Path) -> str:
    """The two tables, from the files that keep_evaluation wrote."""
    found = {batch: json.loads((folder / f"batch{batch}.json").read_text(encoding="utf-8")) for batch in BATCHES}
    columns = (
        "plain tok/s",
        "adaptive tok/s",
        "speedup",
        "tau",
        "accepted by position",
        "fastest fixed",
        "its speedup",
    )
    tables = found[BATCHES[0]]["tables"]
    kinds = _grouped(tables["by_category"]) | {
        ("all", t): group for (_, t), group in _grouped(tables["by_length"]).items()
    }
    together = {
        (f"{batch}", t): group
        for batch, document in found.items()
        for (_, t), group in _grouped(document["tables"]["by_length"]).items()
    }
    return "\n".join(
        Table(
            (name, "temperature", *columns),
            [[kind, f"{temperature:g}", *_evaluated(group)] for (kind, temperature), group in groups.items()],
        ).markdown()
        for name, groups in (("questions, one at a time", kinds), ("together", together))
    )


def _grouped(figures: list[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Figures of settings by category and temperature; the category of all questions is None."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for each in figures:
        groups.setdefault((each["category"], each["temperature"]), []).append(each)
    return groups


def _evaluated(group: list[dict[str, Any]]) -> list[str]:
    """The cells of a group of settings: the baseline, adaptive drafting and the fastest of the others."""
    named = {each["setting"]: each for each in group}
    plain, adaptive = named.pop("baseline"), named.pop("adaptive")
    best = max(named.values(), key=lambda each: each["speedup"]["value"])

    def speedup(each: dict[str, Any]) -> str:
        ratio = each["speedup"]
        return f"{ratio['value']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"

    return [
        f"{plain['decode_tokens_per_s']:.0f}", f"{adaptive['decode_tokens_per_s']:.0f}", speedup(adaptive),
        f"{adaptive['tau']:.2f}", " ".join(f"{share:.2f}" for share in adaptive["per_position"][:5]), best["setting"],
        speedup(best),
    ]  # fmt: skip


def suite(job: Job) -> str:
    """Every scenario of the suite's table."""
    for file in job.results.glob("*.json"):
        if json.loads(file.read_text(encoding="utf-8")).get("commit") != commit():
            file.unlink()  # a run that was broken off goes on; another commit's results do not stay
    for loads in SMOKE_LOADS if job.smoke else LOADS:
        _run(["bench", "--out", str(job.results), *SUITE, *loads, *(SMOKE_SUITE if job.smoke else [])])
    return summary(read_results(job.results))


def peers(job: Job) -> str:
    """The comparisons."""
    for name in job.comparisons:
        options = [str(restored(option)) if option in STORED else option for option in COMPARISONS[name]]
        began = time.perf_counter()
        out = job.results / "peers" / name
        shutil.rmtree(out, ignore_errors=True)  # settings that are no longer run
        said = json.loads(
            _run(["compare", "--out", str(out), "--json", *options, *(SMOKE_COMPARE if job.smoke else [])])
        )
        print(f"{name}: {time.perf_counter() - began:.0f} s", *said["verdict"], sep="\n  ")
        for label, reason in said["absent"].items():
            print(f"  not run: {label}: {reason}")
    return published(read_comparisons(job.results / "peers")).markdown()


def restored(stored: str) -> Path:
    """The file of SmolLM2 with its matrices stored so (restored.py), written if it is not there."""
    name = f"smollm2-{stored}"
    return (
        cached(name, lambda folder: restore(SMOLLM2_WEIGHTS.find(), folder / f"{name}.gguf", stored)) / f"{name}.gguf"
    )


PARTS: dict[str, tuple[str, Callable[[Job], str]]] = {
    "demo": ("<!-- aquiline demo -->", demo),
    "eval": ("<!-- aquiline eval --target smollm2 -->", evaluation),
    "bundled": ("<!-- aquiline demo --bundled -->", bundled_demo),
    "suite": ("<!-- aquiline bench table results --short -->", suite),
    "peers": ("<!-- aquiline compare -->", peers),
}
"""Parts by name: what marks their place in the page, up to the next `<!-- end -->`, and what measures them."""


def insert(text: str, mark: str, table: str) -> str | None:
    """A text with the block behind its mark replaced; None if it has no such mark."""
    before, found, after = text.partition(f"{mark}\n")
    _, end, rest = after.partition("<!-- end -->")
    return f"{before}{mark}\n{table}{end}{rest}" if found and end else None


def _run(arguments: list[str]) -> str:
    """What the command printed."""
    done = subprocess.run([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"aquiline {' '.join(arguments)}: ended with {done.returncode}")
    return done.stdout


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[name for name in PARTS if name != "eval"])
    parser.add_argument("--questions", type=Path, metavar="DIR", help="EAGLE's question files; `eval` needs them")
    parser.add_argument("--comparison", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    parser.add_argument("--smoke", action="store_true", help="seconds each, into a folder of its own")
    args = parser.parse_args()
    if commit().endswith(DIRTY) or commit() == "unknown":
        raise SystemExit(f"commit {commit()}: commit the source first, or nobody can measure this again")
    job = Job(Path(tempfile.mkdtemp()) if args.smoke else ROOT / "results", args.smoke, args.comparison, args.questions)
    seconds = {}
    for name in args.only:
        began = time.perf_counter()
        mark, measure = PARTS[name]
        table = measure(job)
        seconds[name] = time.perf_counter() - began
        print(f"{mark}\n{table}<!-- end -->\n")
        text = insert(PAGE.read_text(encoding="utf-8"), mark, table)
        if text is None:
            print(f"{PAGE.name} has no {mark} ... <!-- end -->: put the table there by hand")
        elif not args.smoke:
            PAGE.write_text(text, encoding="utf-8")
    print(json.dumps({"benchmark": "results", "commit": commit(), "seconds": seconds, "results": str(job.results)}))


if __name__ == "__main__":
    main()
