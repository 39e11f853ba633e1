"""`aquiline compare`: other engines on the same weights and prompts, in one run, and who is faster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.options import wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from aquiline.bench.peers.compare import Plan
    from aquiline.bench.peers.verdict import Comparison


def compare(
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="transformers, openvino, llamacpp with options behind colons, or openai:URL#MODEL. "
            "Default: every setting of the three."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target checkpoint: directory, .gguf file or hub id. Default: bundled.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="EAGLE-3 draft checkpoint: directory or hub id.")] = None,
    random_weights: Annotated[
        str | None,
        typer.Option(help="llama-230m, llama-32m or a config.json: a target of random weights, and no draft."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of every prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens of every continuation, past EOS.")] = 128,
    repeats: Annotated[
        int, typer.Option(help="Rounds: measured runs of every setting, each on a prompt of its own; 6 give intervals.")
    ] = 6,
    batch: Annotated[int, typer.Option(help="Prompts that every run continues together.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    num_spec_tokens: Annotated[
        list[int] | None, typer.Option(help="Chains of aquiline, and of peers with its draft. Default: 3 4 5.")
    ] = None,
    bf16_arithmetic: Annotated[
        bool, typer.Option("--bf16-arithmetic", help="aquiline in bfloat16 arithmetic, too (AVX512_BF16).")
    ] = False,
    text: Annotated[
        str | None, typer.Option(help="Prompts from this file, folder or package. Default: standard library.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for one result JSON per setting.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run aquiline, with and without its draft, and its peers on the same prompts in turn, and say who is faster.

    Peers are optional: pip install 'aquiline[peers]'. Those that are not installed are named and left out. Options of a
    peer: float32, bfloat16, int8 (openvino, llamacpp) or int4 (llamacpp), beside which aquiline runs the same; lookup
    or lookup=K for the prompt lookup of openvino and transformers; ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod,
    each with =NxK to match N tokens and propose K, and ngram-cache for llama.cpp's; openvino:eagle and llamacpp:eagle
    draft with the EAGLE-3 head given here, at every length of --num-spec-tokens or at eagle=K. llamacpp:server and what
    drafts in llama.cpp run in its server, which benchmarks/llama_server.py builds. openvino:sdpa, openvino:samekv,
    transformers:eager and llamacpp:noflash run their attention another way; openvino:DIR/ takes a converted target.

    Examples:

      aquiline compare

      aquiline compare --peer openvino:bfloat16 openvino:bfloat16:lookup llamacpp:bfloat16 --repeats 5

      aquiline compare --random-weights llama-230m --out results/

      aquiline compare --target DIR --draft DIR --peer openai:http://localhost:8000/v1#NAME
    """
    from rich.console import Console

    from aquiline.bench.peers.base import ALL_PEERS, parse_peers
    from aquiline.bench.peers.compare import DEFAULT_CHAINS, Plan
    from aquiline.bench.peers.compare import compare as run
    from aquiline.bench.peers.random_target import random_target
    from aquiline.bench.results.result import write_result
    from aquiline.engine.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
    from aquiline.models.files import resolve

    if random_weights is not None and (target or draft):
        raise ValueError(f"random_weights={random_weights!r}: is a target of its own; leave --target and --draft out")
    if target is None and draft is not None:
        raise ValueError(f"draft={draft!r}: needs --target; the bundled target has its own draft")
    chains = tuple(num_spec_tokens or DEFAULT_CHAINS)
    named = parse_peers(peer or ALL_PEERS, chains)
    if random_weights is not None:
        place, drafts, name = random_target(random_weights), None, f"random weights, {Path(random_weights).name}"
    elif target is None:
        place, drafts, name = BUNDLED_TARGET, BUNDLED_DRAFT, "bundled"
    else:
        place, drafts, name = resolve(target), resolve(draft) if draft is not None else None, Path(target).name
    if peer is None and drafts is None:
        named = tuple(spec for spec in named if spec.eagle is None)
    if peer is None and batch > 1:
        named = tuple(s for s in named if not s.is_served and (s.kind == "openvino" or not s.is_speculative))
    plan = Plan(
        place, drafts, named, (name, Path(draft).name if draft is not None else name if drafts is not None else None),
        is_random=random_weights is not None,
        arithmetics=("float32", "bfloat16") if bf16_arithmetic else ("float32",),
        num_spec_tokens=chains, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
        repeats=repeats, batch=batch, temperature=temperature, text_source=text,
    )  # fmt: skip
    with Console(stderr=True, quiet=as_json).status("") as status:
        found = run(plan, status.update)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for row, result in zip(found.rows, found.results, strict=True):
            write_result(result, out / f"{re.sub('[^a-z0-9=.-]+', '-', row.label.lower())}.json")
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        _show(wide_console(), found, plan)


def _show(console: Console, found: Comparison, plan: Plan) -> None:
    from rich.table import Table

    from aquiline.bench.peers.check import CHECK_TOKENS
    from aquiline.bench.results.result import is_dirty

    prompts = f"{plan.repeats} x {plan.batch} prompts of {plan.prompt_tokens} tokens"
    table = Table(title=f"{plan.names[0]}: {prompts}, {plan.new_tokens} new")
    for column in (
        "setting",
        "weights",
        "arithmetic",
        "tok/s",
        "over baseline",
        "first token",
        "tau",
        "same tokens",
    ):
        table.add_column(column, justify="left" if column in ("setting", "weights", "arithmetic") else "right")
    baseline = found.rows[0]
    for row in found.rows:
        agreed = "?" if row.agreed is None else f"{row.agreed:.0f} of {plan.new_tokens}"
        table.add_row(
            row.label, row.weights, row.arithmetic, row.rate.whole(), row.over(baseline).times(),
            f"{row.ttft_ms:.0f} ms", f"{row.tau:.2f}" if row.tau else "?",
            "VOID" if row.void else agreed, end_section=row is found.last_own,
        )  # fmt: skip
    console.print(table)
    s = found.system
    console.print(f"{s['cpu']}, {s['threads']} threads for every engine; decoding by the wall clock, prompts apart")
    console.print(
        "tok/s: median of the rounds; over baseline: median of the rounds' ratios; [95 % intervals] from 6 on"
    )
    if is_dirty(found.results[0]):
        console.print("uncommitted changes: nobody can measure this again; not to be published", style="bold")
    for label, (rate, reads) in found.moved.items():
        console.print(
            f"{label} moves {rate:.1f} GB/s of weights, keys and values, {rate / reads:.0%} of the {reads:.1f} that "
            "plain reads reach; caches can hold a part"
        )
    for kind, counts in found.checks.items():
        agreed = ", ".join(map(str, counts))
        console.print(f"{kind} in float32: {agreed} of the first {CHECK_TOKENS} tokens are ours, prompt by prompt")
    for row in found.rows:
        if row.void:
            console.print(f"void: {row.label}: {row.void}", markup=False, soft_wrap=True)
    for label, reason in found.absent.items():
        console.print(f"not run: {label}: {reason}", markup=False, soft_wrap=True)
    for line in found.verdict:
        console.print(line, style="bold", soft_wrap=True)
