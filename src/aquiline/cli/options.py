"""What commands share: options and what follows from them, options of several values (`--contexts 512 1024`), groups
with a default command, a console."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aquiline.checks import parse_json

if TYPE_CHECKING:
    from rich.console import Console

    from aquiline.config import PairConfig
    from aquiline.engine.llm import LLM
    from aquiline.spec.drafting import Drafting, DraftingChoice
    from aquiline.text.chat import ChatTemplate

SAMPLING, DRAFTING = "Sampling", "Drafting"

Target = Annotated[
    str | None, typer.Option(help="Target checkpoint: directory, .gguf file or hub id. Default: bundled.")
]
Draft = Annotated[str | None, typer.Option(help="EAGLE-3 draft checkpoint: directory or hub id.")]
System = Annotated[str | None, typer.Option(help="System message that a chat begins with.")]
TemplateOptions = Annotated[
    str | None, typer.Option(help="JSON for the chat template, as '{\"enable_thinking\": false}'.")
]
MaxTokens = Annotated[int, typer.Option(help="New tokens at most.", rich_help_panel=SAMPLING)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="1 is off.", rich_help_panel=SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="Default: a fresh one.", rich_help_panel=SAMPLING)]
Drafter = Annotated[
    str | None, typer.Option(help="none, chain, static or dynamic. Default: chain.", rich_help_panel=DRAFTING)
]
NumSpecTokens = Annotated[int | None, typer.Option(help="Chain length.", rich_help_panel=DRAFTING)]
Depth = Annotated[int | None, typer.Option(help="Dynamic: passes past the first.", rich_help_panel=DRAFTING)]
DraftTopK = Annotated[int | None, typer.Option(help="Dynamic: beam width.", rich_help_panel=DRAFTING)]
NumNodes = Annotated[int | None, typer.Option(help="Dynamic: nodes, root too.", rich_help_panel=DRAFTING)]
Capture = Annotated[
    str | None,
    typer.Option(help="Target layers whose outputs the draft reads, as 1,4,6. Default: as its checkpoint says."),
]
NormFeedback = Annotated[
    bool | None, typer.Option(help="Feed the draft's normed output back. Default: as its checkpoint says.")
]
Dtype = Annotated[str, typer.Option(help="Storage of weights: bfloat16, float16, float32, int8 or int4.")]
Arithmetic = Annotated[str, typer.Option(help="auto, float32, or bfloat16, the faster where the CPU has AVX512_BF16.")]

_FLAGS = {
    "num_spec_tokens": "--num-spec-tokens", "depth": "--depth", "top_k": "--draft-top-k", "num_nodes": "--num-nodes",
}  # fmt: skip

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

PIPE_WIDTH = 140
"""Columns where nobody says how many there are, as in a file; tables would be cut to 80."""


def wide_console() -> Console:
    """Standard output for tables."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def chosen_spec(drafter: str, **shape: int | None) -> Drafting:
    """The way to draft from its name and what options give of its fields; names on stderr what has no effect."""
    from aquiline.spec.drafting import drafting

    given = {name: value for name, value in shape.items() if value is not None}
    spec = drafting(drafter, **given)
    for name in given.keys() - spec.as_dict().keys():
        print(f"aquiline: {_FLAGS[name]} has no effect with drafter {spec.name}", file=sys.stderr)
    return spec


def chosen(drafting: DraftingChoice, pair: PairConfig) -> Drafting:
    """The way to draft that the options say, by default the pair's; names on stderr what has no effect."""
    spec = drafting.value(pair.default_drafter)
    for name in drafting.without_effect(spec):
        print(f"aquiline: --{name.replace('_', '-')} has no effect with drafter {spec.name}", file=sys.stderr)
    return spec


def default_drafter(target: str | None, draft: str | None) -> str:
    """The drafter where none is named. Raises ValueError for a draft without its target."""
    if target is None and draft is not None:
        raise ValueError(f"draft={draft!r}: needs --target; the bundled target has its own draft")
    return "none" if target is not None and draft is None else "chain"


def load_template(target: str | None, llm: LLM, options: dict[str, object] | None = None) -> ChatTemplate:
    """The chat template of the target that `llm` runs."""
    from aquiline.engine.bundled import BUNDLED_TARGET
    from aquiline.models.load import resolve
    from aquiline.text.chat import ChatTemplate

    checkpoint = resolve(target or BUNDLED_TARGET)
    return ChatTemplate.load(checkpoint, llm.models.tokenizer, options)


def template_options_of(text: str | None) -> dict[str, object] | None:
    """What --template-options says."""
    if text is None:
        return None
    try:
        options = parse_json(text)
    except ValueError as error:
        raise ValueError(f"template_options={text!r}: not JSON ({error})") from None
    if not isinstance(options, dict):
        raise ValueError(f"template_options={text!r}: must be a JSON object")
    return options


class ListCommand(typer.core.TyperCommand):
    """A command whose repeatable options also take their values in a row, up to the next option.

    A required argument that stands nowhere else is the end of the last row: `--only NAME DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--name a b` as `--name a --name b`, which is what the parser below knows."""
        options = [param for param in self.params if param.param_type_name == "option"]
        several = {name for param in options if getattr(param, "multiple", False) for name in param.opts}
        valued = {name for param in options if not getattr(param, "is_flag", False) for name in param.opts}
        missing = sum(param.required for param in self.params if param.param_type_name == "argument")
        spread: list[str] = []
        repeats: list[int] = []  # where an option was written again
        row: str | None = None
        is_value = False
        for arg in args:
            if is_value:
                is_value = False
            elif arg.startswith("-"):
                row, is_value = arg if arg in several else None, arg in valued
            elif row is not None:
                repeats.append(len(spread))
                spread.append(row)
            else:
                missing -= 1
            spread.append(arg)
        for place in reversed(repeats[len(repeats) - max(0, missing) :]):
            del spread[place]
        return super().parse_args(ctx, spread)


class DefaultGroup(typer.core.TyperGroup):
    """A group whose command `run` is meant where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` before options that follow the group's name."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)
