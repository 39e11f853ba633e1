"""Jinja as chat templates expect it: sandboxed, with the filters, functions and tags that checkpoints rely on.

Owns the template language only; chat.py and answers.py decide what goes into a template and what its text means.
Source of the expected names and settings: transformers 5.23, utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ANSWER_MARKS = ("_answer_begins", "_answer_ends")
"""Variables that a caller may set to strings: they are written around the body of every `{% generation %}` block."""


class GenerationBlock(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, with which a template says what the model itself writes."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body in a scope of its own, between the variables of ANSWER_MARKS, which are empty unless set."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in ANSWER_MARKS)
        return [node.set_lineno(line) for node in (begin, nodes.Scope(body), end)]


@dataclass(frozen=True)
class CompiledTemplate:
    """A template ready to render; marks_answers: whether it has a `{% generation %}` block."""

    template: Template
    marks_answers: bool


def compile_template(source: str) -> CompiledTemplate:
    """Compile a chat template. Raises jinja2.TemplateSyntaxError.

    A rendering raises jinja2.TemplateError for what the sandbox forbids and for what the template itself refuses."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    names = {name.name for name in environment.parse(source).find_all(nodes.Name)}
    return CompiledTemplate(environment.from_string(source), ANSWER_MARKS[0] in names)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is; Jinja's own filter would write < and > as escapes, for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
