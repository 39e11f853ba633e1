"""`aquiline vocab`: a draft head with a smaller vocabulary, and what that costs and gives."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer

from aquiline.bench.suite.suite_plan import PruningWork
from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import AsJson, chosen, tell
from aquiline.config import PairConfig, check
from aquiline.spec.registry import DraftingChoice

EXAMPLES = """
Examples:

  aquiline vocab smollm2 --target smollm2 --text answers.txt --keep 8192 --out ./smaller

  aquiline vocab ./draft --target ./target --text answers.txt --keep 4096 --out ./smaller --drafter chain --json
"""


@with_options
def vocab(
    draft: Annotated[
        str, typer.Argument(help="Draft: directory, hub id or the name of a known pair.", metavar="DRAFT")
    ],
    *,
    pair: Annotated[PairConfig, Fields(only=("target", "dtype", "draft_dtype", "arithmetic"))],
    text: Annotated[Path, typer.Option(help="Text file whose tokens, and the target's choices in it, are counted.")],
    keep: Annotated[int, typer.Option(help="Tokens that the smaller draft can name, special ones included.")],
    out: Annotated[Path, typer.Option(help="Folder that the smaller draft is written to.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the files of a folder that exists.")] = False,
    work: PruningWork,
    choice: DraftingChoice,
    as_json: AsJson = False,
) -> None:
    """Keep the tokens of a draft's vocabulary that a target chooses most often in a text, and every special one.

    The text should be like the target's own answers (`aquiline regenerate` writes some), and long: a token that it does
    not have ranks by its id. One piece in five is held out to tell the share of its tokens, and of the target's choices
    in it, that both drafts name. Both are then served on the same questions, by turns: tau and tok/s.
    """
    from aquiline.bench.suite.pruning import questions_of, serve_drafts
    from aquiline.cli.show.pruning_tables import pruning_rows, show_pruning
    from aquiline.engine.coverage import read_text, text_choices
    from aquiline.models.formats import check_destination
    from aquiline.models.prune import choose_rows, draft_ids, write_pruned

    if pair.target is None:
        raise ValueError("target: name the target that the draft was trained for")
    check_destination(out, force)
    words, ids, questions = read_text(text), draft_ids(draft, pair.target), questions_of(pair, work)
    sizes = f"must exceed its special tokens, and be below the {len(ids)} tokens of the draft's vocabulary"
    check(0 < keep < len(ids), "keep", keep, sizes)
    seen, held_out = text_choices(pair, words).split()
    small = choose_rows(ids, seen.weights, seen.special, keep)
    write_pruned(draft, pair.target, small, out, force)
    drafts, said = {"before": draft, "after": str(out)}, tell if not as_json else lambda _: None
    served = serve_drafts(pair, drafts, chosen(choice, pair), questions, work, said) if questions else []
    show_pruning(pruning_rows({"before": ids, "after": small.ids}, held_out, served), str(out), as_json)


vocab.__doc__ = f"{inspect.getdoc(vocab)}\n{EXAMPLES}"
