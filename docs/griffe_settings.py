"""Fields of settings on the page of Python: `setting(default, help)` is shown as the default, documented by its help.

mkdocs.yml names this file; griffe reads the package without running it."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Settings(griffe.Extension):
    """Takes a field's default and help from the call that makes it."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **rest: Any) -> None:
        """Replace the value `setting(default, help, ...)` by the default."""
        value = attr.value
        if not isinstance(value, griffe.ExprCall) or str(value.function) != "setting":
            return
        attr.value, said = value.arguments[0], node.value.args[1]
        if attr.docstring is None and isinstance(said, ast.Constant):
            attr.docstring = griffe.Docstring(str(said.value), parent=attr)
