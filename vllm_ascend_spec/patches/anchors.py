"""Edits of a Python file, placed by its syntax tree; everything outside them stays as it was."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from typing import TypeVar

from vllm_ascend_spec.errors import UserError

Node = TypeVar("Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class AnchorError(UserError):
    """The source does not hold what an edit hangs on: it is of another version."""


class Module:
    """One source file and the edits collected for it; `text()` applies them."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._edits: list[tuple[int, int, str]] = []
        self.tree = ast.parse(source)

    def text(self) -> str:
        """The file with its edits.

        Raises:
            AnchorError: two edits overlap.
        """
        text, before = self._source, len(self._source) + 1
        for start, end, new in sorted(self._edits, key=lambda edit: edit[:2], reverse=True):
            if end > before:
                raise AnchorError(
                    f"{self.path}: two edits overlap at line {text[:start].count(chr(10))}"
                )
            text, before = text[:start] + new + text[end:], start
        return text

    def segment(self, node: ast.AST) -> str:
        """The node's own text."""
        return self._source[self._start(node) : self._end(node)]

    def replace(self, node: ast.AST, new: str) -> None:
        """Put `new` in the node's place, as it is."""
        self._edits.append((self._start(node), self._end(node), new))

    def insert_before(self, statement: ast.stmt, new: str) -> None:
        """Put the statements `new` before `statement`, at its indentation."""
        line = self._offset(self._first_line(statement), 0)
        self._edits.append((line, line, self._indented(statement, new)))

    def insert_after(self, statement: ast.stmt, new: str) -> None:
        """Put the statements `new` after `statement`, at its indentation."""
        line = self._offset((statement.end_lineno or 0) + 1, 0)
        self._edits.append((line, line, self._indented(statement, new)))

    def add_method(self, definition: ast.ClassDef, new: str) -> None:
        """Put the method `new` at the end of the class."""
        last = definition.body[-1]
        line = self._offset((last.end_lineno or 0) + 1, 0)
        self._edits.append((line, line, "\n" + self._indented(last, new)))

    def replace_statement(self, statement: ast.stmt, new: str) -> None:
        """Put the statements `new` in the place of the lines of `statement`."""
        start = self._offset(self._first_line(statement), 0)
        end = self._offset((statement.end_lineno or 0) + 1, 0)
        self._edits.append((start, end, self._indented(statement, new)))

    def lines_of(self, statement: ast.stmt) -> str:
        """The statement's lines, dedented."""
        first, last = self._first_line(statement), statement.end_lineno or 0
        return textwrap.dedent("".join(self._lines[first - 1 : last]))

    def add_import(self, module: str, name: str) -> None:
        """`from module import name`, where isort wants it among the imports of that package."""
        new = f"from {module} import {name}\n"
        imports = [
            node
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
        ]
        package = module.split(".")[0]
        own = [node for node in imports if str(node.module).split(".")[0] == package]
        later = [node for node in own if str(node.module) > module]
        if later:
            self.insert_before(later[0], new)
        elif own:
            self.insert_after(own[-1], new)
        else:
            last = [n for n in self.tree.body if isinstance(n, ast.Import | ast.ImportFrom)][-1]
            end = self._offset((last.end_lineno or 0) + 1, 0)
            self._edits.append((end, end, "\n" + new))

    def scope(self, name: str) -> ast.ClassDef | Function:
        """A class or function by its qualified name, `Class.method`."""
        here: ast.AST = self.tree
        for part in name.split("."):
            here = self.only(
                (
                    node
                    for node in ast.iter_child_nodes(here)
                    if isinstance(node, ast.ClassDef | Function) and node.name == part
                ),
                f"definition of {name}",
            )
        assert isinstance(here, ast.ClassDef | Function)
        return here

    def assignment(self, scope: ast.AST, target: str) -> ast.Assign | ast.AnnAssign:
        """The one assignment to `target` in the scope."""
        return self.only(self.assignments(scope, target), f"assignment to {target}")

    def assignments(self, scope: ast.AST, target: str) -> list[ast.Assign | ast.AnnAssign]:
        """Every assignment to `target` in the scope, in order."""
        found: list[ast.Assign | ast.AnnAssign] = []
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                first = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if ast.unparse(first) == target:
                    found.append(node)
        return sorted(found, key=lambda node: node.lineno)

    def calls(self, scope: ast.AST, callee: str) -> list[ast.Call]:
        """Every call of `callee` in the scope, in order."""
        found = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == callee
        ]
        return sorted(found, key=lambda node: node.lineno)

    def call(self, scope: ast.AST, callee: str) -> ast.Call:
        """The one call of `callee` in the scope."""
        return self.only(self.calls(scope, callee), f"call of {callee}")

    def keyword(self, call: ast.Call, name: str) -> ast.expr:
        """The value that the call passes as `name`."""
        return self.only(
            (keyword.value for keyword in call.keywords if keyword.arg == name),
            f"argument {name} of {ast.unparse(call.func)}",
        )

    def statement(self, scope: ast.AST, matches: Callable[[ast.stmt], bool], what: str) -> ast.stmt:
        """The one statement of the scope that matches."""
        statements = (node for node in ast.walk(scope) if isinstance(node, ast.stmt))
        return self.only((node for node in statements if matches(node)), what)

    def only(self, found: Iterator[Node] | list[Node], what: str) -> Node:
        """The single element.

        Raises:
            AnchorError: there is none, or more than one.
        """
        nodes = list(found)
        if len(nodes) != 1:
            raise AnchorError(
                f"{self.path}: expected one {what}, found {len(nodes)}. The series is written for "
                "another version of this file; `patches export --help` names the supported one."
            )
        return nodes[0]

    def _indented(self, statement: ast.stmt, new: str) -> str:
        text = textwrap.indent(textwrap.dedent(new).strip("\n"), " " * statement.col_offset)
        return text + "\n" if text else ""

    @staticmethod
    def _first_line(statement: ast.stmt) -> int:
        decorators = getattr(statement, "decorator_list", [])
        return min([statement.lineno, *(node.lineno for node in decorators)])

    def _start(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        """Index into the text; the syntax tree counts columns in UTF-8 bytes."""
        before = sum(len(text) for text in self._lines[: line - 1])
        if not column:
            return before
        return before + len(self._lines[line - 1].encode()[:column].decode())
