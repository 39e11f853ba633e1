"""Many requests at once on the bundled pair: aggregate tokens per second by batch, with and without speculation.

Every batch decodes prompts of real code, 128 new tokens each, greedy and at a temperature; settings alternate inside
one run, medians. Beside each ratio stands what the roofline allows: a step of n rows costs the weights' bytes or the
rows' arithmetic, whichever takes longer, and the same run measures both (a forward of one row, and the slope per row).
The last part gives the share of a step that is the host's. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from aquiline.backends.base import Admit, Chunk, Decode, Pages, Sizes, StepInput
from aquiline.bench.data.prompts import read_prompts
from aquiline.bench.results.intervals import rotated
from aquiline.config import MAX_NODES, EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.metrics import RunSummary, repeated_share
from aquiline.models.known_pairs import BUNDLED_PROMPTS
from aquiline.spec.drafting import Chain, Drafting, NoDraft, Proposal

NEW_TOKENS = 128
PROMPT_TOKENS = 192
BASELINE = NoDraft()


def step_ms(llm: LLM, batch: int, nodes: int) -> float:
    """Median ms of verifying `batch` chains of so many nodes, roots included: a target forward of their rows, the draws
    and what is kept of them."""
    pages = -(-(PROMPT_TOKENS + 64 + MAX_NODES) // 64)
    backend = llm.models.pair.open(Sizes(batch, batch * pages, 64, pages, PROMPT_TOKENS))
    for slot in range(batch):
        admit = Admit(slot, [1] * PROMPT_TOKENS, PROMPT_TOKENS, SamplingParams(seed=0))
        places = Pages(slot, 0, tuple(range(slot * pages, (slot + 1) * pages)))
        chunk = Chunk(slot, 0, PROMPT_TOKENS, is_last=True, draws=True)
        backend.step(StepInput(admits=(admit,), pages=(places,), chunks=(chunk,))).read()
    proposal = Proposal((1,) * (nodes - 1))
    step = StepInput(decodes=tuple(Decode(slot, BASELINE, proposal, num_forced=0) for slot in range(batch)))
    times = []
    for _ in range(40):
        drafts = backend.draft(step)
        began = time.perf_counter()
        backend.verify(step, drafts).read()
        times.append(time.perf_counter() - began)
    backend.close()
    return 1e3 * statistics.median(times)


def measure(
    llm: LLM, prompts: list[list[int]], specs: dict[str, Drafting], temperature: float, repeats: int
) -> dict[str, list[RunSummary]]:
    """Runs of every setting over one batch, another setting first in every round; the first round warms up."""
    sampling = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    found: dict[str, list[RunSummary]] = {name: [] for name in specs}
    expected: list[list[int]] = []
    for round_ in range(repeats + 1):
        for name in rotated(list(specs), round_):
            result = llm.run(prompts, sampling, drafting=specs[name])
            tokens = [o.token_ids for o in result.outputs]
            expected = expected or tokens
            assert tokens == expected, f"{name} changed the text"
            if round_:
                found[name].append(result.summary)
    print(f"  repeated 8-grams {statistics.mean(repeated_share(t) for t in expected):.0%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--num-spec-tokens", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--arithmetic", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    specs = {"baseline": BASELINE} | {f"chain K={k}": Chain(k) for k in args.num_spec_tokens}
    table: list[dict[str, object]] = []
    for batch in args.batches:
        config = EngineConfig(max_batch=batch, prefix_cache=False, max_context=1024)
        llm = LLM("bundled", engine=config, arithmetic=args.arithmetic)
        texts = [llm.encode(prompt.text) for prompt in read_prompts(BUNDLED_PROMPTS)]
        prompts = [texts[i % len(texts)][i // len(texts) :][:PROMPT_TOKENS] for i in range(batch)]
        one_row_ms, plain_ms = step_ms(llm, 1, 1), step_ms(llm, batch, 1)
        for temperature in args.temperatures:
            print(f"batch {batch}, temperature {temperature:g}, {len(prompts[0])} prompt tokens")
            runs = measure(llm, prompts, specs, temperature, args.repeats)
            base = statistics.median(s.decode_tokens_per_s for s in runs["baseline"])
            for name, summaries in runs.items():
                nodes = specs[name].max_nodes
                verify_ms = step_ms(llm, batch, nodes)
                rate = statistics.median(s.decode_tokens_per_s for s in summaries)
                last = summaries[-1]
                steps = last.num_decode_steps
                ms = {stage: value / steps for stage, value in last.stage_ms.items()}
                total = sum(ms.values())
                # With drafting for nothing, no host and everyone active: what the verify forward alone allows.
                allowed = last.counters.tau * plain_ms / verify_ms
                row: dict[str, object] = {
                    "batch": batch, "temperature": temperature, "setting": name, "tokens_per_s": rate,
                    "speedup": rate / base, "speedup_free_draft": allowed, "tau": last.counters.tau,
                    "step_ms": total, "host_share": ms["host"] / total, "stage_ms_per_step": ms,
                    "verify_ms": verify_ms, "one_row_ms": one_row_ms,
                }  # fmt: skip
                table.append(row)
                print(
                    f"  {name:>10}: {rate:6.0f} tok/s {rate / base:.2f}x (a free draft would give {allowed:.2f}x), tau "
                    f"{last.counters.tau:.2f}; step {total:.2f} ms: " + ", ".join(f"{k} {v:.2f}" for k, v in ms.items())
                    + f"; host {ms['host'] / total:.1%}; {batch * nodes} rows cost "
                    f"{verify_ms / one_row_ms:.2f} of one"
                )  # fmt: skip
    print(json.dumps({"benchmark": "throughput", "table": table, "system": llm.models.system()}))


if __name__ == "__main__":
    main()
