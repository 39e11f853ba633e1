"""`aquiline generate`: one prompt and its continuation, or a file of them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.options import Arithmetic, Capture, Dtype, NormFeedback
from aquiline.cli.train import layers

if TYPE_CHECKING:
    from aquiline.config import SamplingParams
    from aquiline.engine.llm import LLM, Result

SAMPLING, DRAFTING, ENGINE = "Sampling", "Drafting", "Many prompts and memory"
FLAGS = {
    "num_spec_tokens": "--num-spec-tokens", "depth": "--depth", "top_k": "--draft-top-k", "num_nodes": "--num-nodes",
}  # fmt: skip
USED_BY = {"none": (), "chain": ("num_spec_tokens",), "static": (), "dynamic": ("depth", "top_k", "num_nodes")}

EXAMPLES = """
Examples:

  aquiline generate --prompt 'def fibonacci(n):' --max-tokens 64

  aquiline generate --target DIR --draft DIR --prompt-file prompt.txt --temperature 0.8 --seed 1 --json

  aquiline generate --prompts-file questions.jsonl --out answers.jsonl --max-batch 16 --max-tokens 256

  echo 'import os' | aquiline generate --drafter dynamic --depth 4 --draft-top-k 4 --num-nodes 16
"""


def generate(
    target: Annotated[
        str | None, typer.Option(help="Target checkpoint: directory, .gguf file or hub id. Default: bundled.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="EAGLE-3 draft checkpoint: directory or hub id.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt text. Default: --prompt-file, else stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File whose whole text is the prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=SAMPLING)] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=SAMPLING)] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="TOKEN_ID:BIAS; repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: a fresh one.", rich_help_panel=SAMPLING)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.", rich_help_panel=SAMPLING)] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option(help="Stop token id; repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Run on past EOS.", rich_help_panel=SAMPLING)
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="In JSON: log-probability of each token and the N best.", rich_help_panel=SAMPLING),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="In JSON: the same for prompt tokens.", rich_help_panel=SAMPLING)
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="none, chain, static or dynamic. Default: chain.", rich_help_panel=DRAFTING)
    ] = None,
    num_spec_tokens: Annotated[int | None, typer.Option(help="Chain length.", rich_help_panel=DRAFTING)] = None,
    depth: Annotated[int | None, typer.Option(help="Dynamic: passes past the first.", rich_help_panel=DRAFTING)] = None,
    draft_top_k: Annotated[int | None, typer.Option(help="Dynamic: beam width.", rich_help_panel=DRAFTING)] = None,
    num_nodes: Annotated[int | None, typer.Option(help="Dynamic: nodes, root too.", rich_help_panel=DRAFTING)] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help='JSONL of {"prompt": text}; resumes where --out ends.', rich_help_panel=ENGINE)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSONL of results for --prompts-file, in its order.", rich_help_panel=ENGINE)
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Requests that run at once. Default: 8 with a file.", rich_help_panel=ENGINE)
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Tokens per request, prompt and output.", rich_help_panel=ENGINE)
    ] = None,
    cache_fraction: Annotated[
        float, typer.Option(help="Share of the free memory that keys and values may take.", rich_help_panel=ENGINE)
    ] = 0.5,
    capture: Capture = None,
    norm_feedback: NormFeedback = None,
    dtype: Dtype = "bfloat16",
    arithmetic: Arithmetic = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue a prompt, or each of a file, with a target, with or without a draft; the text is the same either way."""
    from aquiline.config import EngineConfig, SamplingParams, SpecConfig
    from aquiline.engine.llm import LLM

    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, logit_bias=_biases(logit_bias or []), seed=seed,
        stop=tuple(stop or ()), stop_token_ids=tuple(stop_token_ids or ()), ignore_eos=ignore_eos,
        logprobs=logprobs, prompt_logprobs=prompt_logprobs,
    )  # fmt: skip
    given = {
        "num_spec_tokens": num_spec_tokens, "depth": depth, "top_k": draft_top_k, "num_nodes": num_nodes,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    kind = drafter or ("none" if target is not None and draft is None else "chain")
    spec = SpecConfig(drafter=kind, **given)  # type: ignore[arg-type]
    for name in given.keys() - set(USED_BY[spec.drafter]):
        print(f"aquiline: {FLAGS[name]} has no effect with drafter {spec.drafter}", file=sys.stderr)
    if target is None and draft is not None:
        raise ValueError(f"draft={draft!r}: needs --target; the bundled target has its own draft")
    if (prompts_file is None) != (out is None):
        raise ValueError("prompts_file: --prompts-file and --out go together")
    text = _prompt_text(prompt, prompt_file) if prompts_file is None else None
    engine = EngineConfig(
        max_batch=max_batch or (8 if text is None else 1), max_context=max_context, cache_fraction=cache_fraction
    )
    llm = LLM(
        target, None if kind == "none" else draft, spec=spec, dtype=dtype, arithmetic=arithmetic, engine=engine,
        capture=layers(capture), norm_feedback=norm_feedback,
    )  # fmt: skip
    if text is not None:
        _print(llm, text, sampling, as_json)
    else:
        assert prompts_file is not None and out is not None
        settings: dict[str, object] = {"target": target, "dtype": dtype, "arithmetic": llm.models.arithmetic}
        _run_file(llm, prompts_file, out, sampling, settings, as_json)


generate.__doc__ = (generate.__doc__ or "") + "\n\n" + EXAMPLES


def _print(llm: LLM, text: str, sampling: SamplingParams, as_json: bool) -> None:
    streams = not as_json and sys.stdout.isatty()
    result = llm.run(text, sampling, on_delta=(lambda d: print(d.text, end="", flush=True)) if streams else None)
    if as_json:
        print(json.dumps(as_dict(result, llm)))
        return
    print("" if streams else result.outputs[0].text)
    s = result.summary
    print(
        f"{len(result.outputs[0].token_ids)} tokens, {s.decode_tokens_per_s:.0f} tok/s, tau {s.counters.tau:.2f}, "
        f"acceptance {s.counters.acceptance_rate:.0%}, finish: {result.outputs[0].finish_reason}",
        file=sys.stderr,
    )


def _run_file(
    llm: LLM, rows: Path, out: Path, sampling: SamplingParams, settings: dict[str, object], as_json: bool
) -> None:
    from aquiline.engine.bulk import BulkRun

    run = BulkRun(llm, rows, out, sampling, settings)
    if not as_json:
        print(llm.engine.memory, file=sys.stderr)
    result = run.run(progress=not as_json)
    for line, reason in result.failed.items():
        print(f"aquiline: {rows}, line {line}: {reason}", file=sys.stderr)
    s = result.summary
    if as_json:
        print(json.dumps({
            "num_rows": result.num_rows, "num_resumed": result.num_resumed, "failed": result.failed,
            "metrics": s.as_dict(), "memory": llm.engine.memory.as_dict(), "system": llm.models.system(),
        }))  # fmt: skip
        return
    print(
        f"{result.num_rows} rows ({result.num_resumed} were there, {len(result.failed)} failed), "
        f"{s.tokens_per_s:.0f} tok/s, tau {s.counters.tau:.2f}; {s.slots_line}",
        file=sys.stderr,
    )


def as_dict(result: Result, llm: LLM) -> dict[str, object]:
    """The JSON of `aquiline generate --json`."""
    return {
        "outputs": [
            {
                "prompt": o.prompt,
                "token_ids": o.token_ids,
                "text": o.text,
                "finish_reason": o.finish_reason,
                "accepted_by": ["draft" if by_draft else "target" for by_draft in o.by_draft],
            }
            | {
                name: [asdict(entry) for entry in entries]
                for name, entries in (("logprobs", o.logprobs), ("prompt_logprobs", o.prompt_logprobs))
                if entries is not None
            }
            for o in result.outputs
        ],
        "metrics": result.summary.as_dict(),
        "memory": llm.engine.memory.as_dict(),
        "system": llm.models.system(),
    }


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise ValueError(f"prompt_file={str(prompt_file)!r}: give --prompt or --prompt-file, not both")
    if prompt_file is not None:
        return prompt_file.read_text(encoding="utf-8")
    if prompt is None and sys.stdin.isatty():
        raise ValueError("prompt: give --prompt, --prompt-file or text on stdin")
    return sys.stdin.read() if prompt is None else prompt


def _biases(pairs: list[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, bias = pair.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise ValueError(f"logit_bias={pair!r}: must be TOKEN_ID:BIAS, for example 42:-5") from None
    return biases
