"""`aquiline generate`: one prompt and its continuation, or a file of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.options import (
    SAMPLING,
    Arithmetic,
    Capture,
    Depth,
    Draft,
    Drafter,
    DraftTopK,
    Dtype,
    MaxTokens,
    NormFeedback,
    NumNodes,
    NumSpecTokens,
    Seed,
    System,
    Target,
    Temperature,
    TemplateOptions,
    TopK,
    TopP,
    chosen_spec,
    default_drafter,
    load_template,
    template_options_of,
)
from aquiline.cli.train import layers

if TYPE_CHECKING:
    from aquiline.config import SamplingParams
    from aquiline.engine.bulk import BulkRun
    from aquiline.engine.llm import LLM, Output, Result

ENGINE = "Many prompts and memory"

EXAMPLES = """
Examples:

  aquiline generate --prompt 'def fibonacci(n):' --max-tokens 64

  aquiline generate --target DIR --draft DIR --prompt-file prompt.txt --temperature 0.8 --seed 1 --json

  aquiline generate --target DIR --chat --system 'Be brief.' --prompt 'Why is the sky blue?'

  aquiline generate --prompts-file questions.jsonl --out answers.jsonl --max-batch 16 --max-tokens 256

  echo 'import os' | aquiline generate --drafter dynamic --depth 4 --draft-top-k 4 --num-nodes 16
"""


def generate(
    target: Target = None,
    draft: Draft = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt text. Default: --prompt-file, else stdin.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File whose whole text is the prompt.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message: wrap it in the target's chat template.")
    ] = False,
    system: System = None,
    template_options: TemplateOptions = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=SAMPLING)] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="TOKEN_ID:BIAS; repeatable.", rich_help_panel=SAMPLING)
    ] = None,
    seed: Seed = None,
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
    drafter: Drafter = None,
    num_spec_tokens: NumSpecTokens = None,
    depth: Depth = None,
    draft_top_k: DraftTopK = None,
    num_nodes: NumNodes = None,
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
    from aquiline.config import EngineConfig, SamplingParams
    from aquiline.engine.bulk import BulkRun
    from aquiline.engine.chat import ending_with, user_prompt
    from aquiline.engine.llm import LLM

    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, logit_bias=_biases(logit_bias or []), seed=seed,
        stop=tuple(stop or ()), stop_token_ids=tuple(stop_token_ids or ()), ignore_eos=ignore_eos,
        logprobs=logprobs, prompt_logprobs=prompt_logprobs,
    )  # fmt: skip
    kind = drafter or default_drafter(target, draft)
    spec = chosen_spec(kind, num_spec_tokens=num_spec_tokens, depth=depth, top_k=draft_top_k, num_nodes=num_nodes)
    if (prompts_file is None) != (out is None):
        raise ValueError("prompts_file: --prompts-file and --out go together")
    if not chat and (system is not None or template_options is not None):
        raise ValueError("system, template_options: go with --chat")
    options = template_options_of(template_options)
    text = _prompt_text(prompt, prompt_file) if prompts_file is None else None
    engine = EngineConfig(
        max_batch=max_batch or (8 if text is None else 1), max_context=max_context, cache_fraction=cache_fraction
    )
    llm = LLM(
        target, None if kind == "none" else draft, spec=spec, dtype=dtype, arithmetic=arithmetic, engine=engine,
        capture=layers(capture), norm_feedback=norm_feedback,
    )  # fmt: skip
    encode = None
    if chat:
        template = load_template(target, llm, options)
        sampling = ending_with(template, sampling)
        encode = partial(user_prompt, template, system=system)
    if text is not None:
        _print(llm, text, encode, sampling, as_json)
    else:
        assert prompts_file is not None and out is not None
        settings = _identity(llm, target, draft) | ({"chat": [system, options]} if chat else {})
        _run_file(BulkRun(llm, prompts_file, out, sampling, settings, encode), as_json)


generate.__doc__ = (generate.__doc__ or "") + "\n\n" + EXAMPLES


def _print(
    llm: LLM, text: str, encode: Callable[[str], list[int]] | None, sampling: SamplingParams, as_json: bool
) -> None:
    streams = not as_json and sys.stdout.isatty()
    result = llm.run(
        text if encode is None else [encode(text)], sampling,
        on_delta=(lambda d: print(d.text, end="", flush=True)) if streams else None,
    )  # fmt: skip
    if as_json:
        result = replace(result, outputs=[replace(output, prompt=text) for output in result.outputs])
        print(json.dumps(as_dict(result, llm)))
        return
    print("" if streams else result.outputs[0].text)
    s = result.summary
    print(
        f"{len(result.outputs[0].token_ids)} tokens, {s.decode_tokens_per_s:.0f} tok/s, tau {s.counters.tau:.2f}, "
        f"acceptance {s.counters.acceptance_rate:.0%}, finish: {result.outputs[0].finish_reason}",
        file=sys.stderr,
    )


def _identity(llm: LLM, target: str | None, draft: str | None) -> dict[str, object]:
    """What decides results beside the sampling: checkpoints by their bytes, how they run, how the draft is used."""
    from aquiline.engine.bundled import BUNDLED_DRAFT, BUNDLED_TARGET
    from aquiline.models.fingerprint import fingerprint
    from aquiline.models.load import resolve

    models, drafts = llm.models, None
    if models.draft_config is not None:
        drafts = [fingerprint(resolve(draft or BUNDLED_DRAFT)), asdict(models.draft_config), asdict(llm.spec)]
    return {
        "target": fingerprint(resolve(target or BUNDLED_TARGET)), "draft": drafts,
        "dtype": models.storage, "arithmetic": models.arithmetic, "path": models.pair.name,
    }  # fmt: skip


def _run_file(run: BulkRun, as_json: bool) -> None:
    llm = run.llm
    if not as_json:
        print(llm.engine.memory, file=sys.stderr)
    result = run.run(progress=not as_json)
    for line, reason in result.failed.items():
        print(f"aquiline: {run.rows}, line {line}: {reason}", file=sys.stderr)
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
        "outputs": [described(output) for output in result.outputs],
        "metrics": result.summary.as_dict(),
        "memory": llm.engine.memory.as_dict(),
        "system": llm.models.system(),
    }


def described(output: Output) -> dict[str, object]:
    """One output of `--json`."""
    both = (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs))
    return {
        "prompt": output.prompt,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "accepted_by": ["draft" if by_draft else "target" for by_draft in output.by_draft],
    } | {name: [asdict(entry) for entry in entries] for name, entries in both if entries is not None}


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
