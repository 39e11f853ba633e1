"""A comparison with other engines, as a table and its verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from aquiline.bench.peers.compare import Plan, compare
from aquiline.bench.peers.verdict import Comparison
from aquiline.bench.results.result import is_dirty
from aquiline.cli.options import wide_console


def compare_shown(plan: Plan, is_shown: bool) -> Comparison:
    """Run a comparison, what it does on standard error."""
    with Console(stderr=True, quiet=not is_shown).status("") as status:
        return compare(plan, status.update)


def show_comparison(found: Comparison, plan: Plan) -> None:
    """Print every setting beside the baseline, what voids it, and who is faster."""
    console = wide_console()
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
    for kind, checked in found.checks.items():
        console.print(f"{kind}: {checked} are ours, prompt by prompt")
    for row in found.rows:
        if row.void:
            console.print(f"void: {row.label}: {row.void}", markup=False, soft_wrap=True)
    for label, reason in found.absent.items():
        console.print(f"not run: {label}: {reason}", markup=False, soft_wrap=True)
    for line in found.verdict:
        console.print(line, style="bold", soft_wrap=True)
