"""`aquiline learn`: what a draft has learnt from what it served, and what to do about it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from aquiline.cli.fields import with_options
from aquiline.cli.options import AsJson, tell

EXAMPLES = """
Examples:

  aquiline serve --target smollm2 --learn ./learnt

  aquiline learn ./learnt

  aquiline learn ./learnt --export ./better --generation 3

  aquiline learn ./learnt --roll-back

  aquiline learn ./learnt --forget served

--roll-back lets the draft serve that the serving one was trained from, and that one never again; a running server
follows within a second. --forget served deletes the stored requests, everything also what was learnt from them: the
shipped draft serves again.
"""


@with_options
def learn(
    folder: Annotated[Path, typer.Argument(help="Folder that a server was given with --learn.", metavar="DIR")],
    *,
    export: Annotated[Path | None, typer.Option(help="Copy a generation's draft into this new folder.")] = None,
    generation: Annotated[int | None, typer.Option(help="Which one to export. Default: the one that serves.")] = None,
    roll_back: Annotated[bool, typer.Option("--roll-back", help="Serve the draft of before.")] = False,
    forget: Annotated[
        Literal["served", "everything"] | None, typer.Option(help="Delete served requests, or everything.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the generations of a draft that learns from what it serves, export one, roll back, or forget.

    A generation is a draft that was trained on served requests and judged on later ones: tau is the simulated number of
    tokens that a step commits.
    """
    from aquiline.cli.show.learning import show_generations
    from aquiline.engine.learning.store import LearningStore
    from aquiline.engine.learning.upkeep import export_draft, forget_learnt, roll_back_draft

    if not (folder / "pair.json").is_file():
        raise ValueError(f"{folder}: holds nothing that a draft has learnt; name the folder given to --learn")
    if generation is not None and export is None:
        raise ValueError(f"generation={generation}: says what to export; add --export FOLDER")
    store = LearningStore(folder)
    if export is not None:
        tell(f"{export} holds the draft of generation {export_draft(store, generation, export)}")
    if roll_back:
        tell(f"generation {roll_back_draft(store)} serves from now on")
    if forget is not None:
        forget_learnt(store, is_everything=forget == "everything")
        tell("served requests are deleted" + (", and what was learnt from them" if forget == "everything" else ""))
    state, known = store.state(), store.generations()
    if as_json:
        told = [vars(each) | {"has_weights": store.has_weights(each.generation)} for each in known]
        print(json.dumps({"pair": store.pair, **vars(state), "generations": told}))
        return
    show_generations(store.pair, state, known)


learn.__doc__ = f"{inspect.getdoc(learn)}\n{EXAMPLES}"
