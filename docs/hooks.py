"""What the site has beside the pages of this folder: pages of the repository, files that pages name, the commands.

mkdocs calls the functions whose names begin with `on_`. A page of the repository keeps its path; a source file that a
page links to becomes a page that shows it. Links are rewritten accordingly, so a link that works in a checkout works on
the site. The pages of commands are written from the commands themselves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from aquiline.cli.main import COMMANDS, command_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?=[)#])")
"""The path of a link to a file, without its anchor."""
CROWDED = re.compile(r"^(\*\*.+\*\*|<!-- .+ -->)\n(?=[-|])", re.MULTILINE)
"""A line right above a list or a table, which is a paragraph of its own here."""
LANGUAGES = {".py": "python", ".sh": "sh", ".h": "cpp", ".cpp": "cpp", ".toml": "toml", ".yaml": "yaml", ".txt": "text"}
"""Files that are shown as pages, by the ends of their names."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the commands into the menu."""
    (menu,) = (entry["Commands"] for entry in config.nav or [] if "Commands" in entry)
    menu.extend({name: f"commands/{name}.md"} for name in COMMANDS)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository, what they and the pages of this folder link to, and the commands."""
    waiting = [f"{DOCS}{file.src_uri}" for file in files.documentation_pages()] + list(PAGES)
    known = set(waiting)
    while waiting:
        origin = waiting.pop()
        if not origin.startswith(DOCS):
            files.append(_file(origin, config))
        if origin.endswith(".md"):
            named = {_target(origin, link["path"]) for link in LINK.finditer((ROOT / origin).read_text("utf-8"))}
            found = {target for target in named - known if (ROOT / target).is_file() and not target.startswith(DOCS)}
            known |= found
            waiting += sorted(found)
    for name in COMMANDS:
        files.append(File.generated(config, f"commands/{name}.md", content=_page(name)))
    files.append(File.generated(config, "commands/README.md", content=_list()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links as the site has their targets."""
    here = page.file.src_uri
    origin = here if here in PAGES or (ROOT / here).is_file() else DOCS + here

    def there(link: re.Match[str]) -> str:
        target = _target(origin, link["path"])
        return relpath(_place(target), dirname(here) or ".") if (ROOT / target).is_file() else link["path"]

    return CROWDED.sub(r"\1\n\n", LINK.sub(there, markdown))


def _target(origin: str, link: str) -> str:
    """The path in the repository that a link in a page of the repository means."""
    return normpath(join(dirname(origin), link))


def _place(target: str) -> str:
    """Where the site has a file of the repository."""
    return f"{target}.md" if Path(target).suffix in LANGUAGES else target.removeprefix(DOCS)


def _file(target: str, config: MkDocsConfig) -> File:
    """A file of the repository as the site has it."""
    language = LANGUAGES.get(Path(target).suffix)
    if language is None:
        return File.generated(config, _place(target), abs_src_path=str(ROOT / target))
    text = (ROOT / target).read_text(encoding="utf-8")
    return File.generated(config, _place(target), content=f"# `{target}`\n\n``````{language}\n{text}\n``````\n")


def _list() -> str:
    """The page that lists the commands."""
    said = {name: _escaped((command_of(name).help or "").partition("\n\n")[0]) for name in COMMANDS}
    rows = "".join(f"| [`aquiline {name}`]({name}.md) | {' '.join(text.split())} |\n" for name, text in said.items())
    return f"# Commands\n\n| command | what it does |\n|---|---|\n{rows}"


def _page(name: str) -> str:
    """The page of a command and of the commands below it."""
    return "\n".join(_lines(f"aquiline {name}", command_of(name), "#"))


def _lines(name: str, command: Any, mark: str) -> Iterator[str]:
    """What a command says of itself, its arguments and its options by their headings, then the commands below it."""
    yield f"{mark} {name}\n\n{_described(command.help or '')}\n"
    arguments = [(param.name.upper(), param) for param in command.params if param.param_type_name == "argument"]
    yield from _table(f"{mark}# Arguments", arguments)
    headings: dict[str, list[tuple[str, Any]]] = {}
    for param in command.params:
        if param.param_type_name == "option" and not getattr(param, "hidden", False):
            shown = "`, `".join((*param.opts, *param.secondary_opts))
            headings.setdefault(param.rich_help_panel or "Options", []).append((shown, param))
    for heading, options in headings.items():
        yield from _table(f"{mark}# {heading}", options)
    for below, part in getattr(command, "commands", {}).items():
        yield from _lines(f"{name} {below}", part, f"{mark}#")


def _table(title: str, params: list[tuple[str, Any]]) -> Iterator[str]:
    if params:
        yield f"{title}\n\n| | what it is | default |\n|---|---|---|"
        for shown, param in params:
            default = param.default if isinstance(param.default, int | float | str) and param.default != "" else None
            is_said = default is None or default is False or getattr(param, "required", False)
            yield f"| `{shown}` | {_escaped(param.help or '')} | {'' if is_said else f'`{default}`'} |"
        yield ""


def _described(text: str) -> str:
    """A help text with its examples as blocks of shell."""
    text = inspect.cleandoc(text)
    parts = re.split(r"((?:^  \S.*\n?(?:\n(?=  \S))?)+)", text, flags=re.MULTILINE)
    for place, part in enumerate(parts):
        is_block = part.startswith("  ")
        parts[place] = f"```sh\n{inspect.cleandoc(part)}\n```\n" if is_block else _escaped(part, in_table=False)
    return "\n".join(parts)


def _escaped(text: str, *, in_table: bool = True) -> str:
    """Plain text as Markdown."""
    text = text.replace("<", "&lt;").replace("*", r"\*")
    return " ".join(text.split()).replace("|", r"\|") if in_table else text
