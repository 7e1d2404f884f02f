"""Static check of Triton kernels against the rules of the Ascend back end.

    python tools/ascend_lint.py [FILE_OR_FOLDER ...]      (default: kernels)

Triton's interpreter runs code that does not compile for an NPU, or that compiles into element by
element loops. What is refused here was seen to fail or to be slow when lowered with triton-ascend
3.2 (tests/npu/test_lowering.py lowers the kernels themselves). A rule marked (excusable) accepts a
comment `# ascend: <reason>` on the line or the lines above it: such code compiles, but is slow.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

RULES = {
    "break": "`break` does not compile; use a flag or a mask",
    "continue": "`continue` does not compile; use a condition",
    "while": "a loop whose end depends on data; use `range` with a bound (excusable)",
    "grid": "the grid has one axis: program_id(0) and num_programs(0) only",
    "launch": "a launch has a grid of one axis: kernel[(n,)]",
    "stride": "a launched kernel loops over its work, range(program_id(0), n, num_programs(0)), "
    "for a grid holds at most 65535 programs; or it is one program without program_id",
    "dtype": "this type does not exist on the device (float64, float8, unsigned 16 to 64 bits)",
    "operation": "this operation does not compile, or takes seconds to and runs element by element",
    "scalar": "this operation runs element by element (excusable)",
    "hot": "a scalar load or store in a loop other than the stride over work (excusable)",
    "autotune": "autotuning inside a graph capture is unsafe: tile on the host",
    "excuse": "`# ascend:` without a reason",
}
EXCUSABLE = {"while", "scalar", "hot"}
NO_DTYPES = {
    "float64", "float8e4nv", "float8e4b8", "float8e4b15", "float8e5", "float8e5b16",
    "uint16", "uint32", "uint64",
}  # fmt: skip
NO_OPERATIONS = {
    "sort", "topk", "bitonic_merge", "inline_asm_elementwise", "make_tensor_descriptor",
    "map_elementwise", "dot_scaled", "fp8e5", "libdevice",
}  # fmt: skip
SCALAR_OPERATIONS = {
    "cumsum", "cumprod", "associative_scan", "gather", "histogram", "atomic_add", "atomic_max",
    "atomic_min", "atomic_cas", "atomic_xchg", "atomic_and", "atomic_or", "atomic_xor",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One violation; `path:line: rule: text`."""

    path: str
    line: int
    rule: str
    detail: str = ""

    def __str__(self) -> str:
        detail = f" [{self.detail}]" if self.detail else ""
        return f"{self.path}:{self.line}: {self.rule}: {RULES[self.rule]}{detail}"


@dataclass
class Excuses:
    """`# ascend: reason` comments: a comment covers its own line and the statement after it."""

    lines: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str) -> Excuses:
        found = {}
        for number, line in enumerate(source.splitlines(), start=1):
            code, mark, reason = line.partition("# ascend:")
            if mark:
                found[number] = reason.strip()
                if not code.strip():
                    found[number + 1] = reason.strip()
        # a reason of several comment lines reaches the statement below them
        for number, line in enumerate(source.splitlines(), start=1):
            if number in found and line.strip().startswith("#"):
                found[number + 1] = found[number]
        return cls(found)

    def cover(self, node: ast.AST) -> bool:
        first, last = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
        return any(self.lines.get(line) for line in range(first, last + 1))


def dotted(node: ast.AST) -> str:
    """`tl.load` of the node `tl.load`, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def is_jit(function: ast.FunctionDef) -> bool:
    return any(
        dotted(d.func if isinstance(d, ast.Call) else d) in ("triton.jit", "jit")
        for d in function.decorator_list
    )


def calls(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            yield dotted(inner.func), inner


def launched(tree: ast.Module) -> set[str]:
    """Names that the module launches: name[grid](...)."""
    return {
        dotted(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }


def is_grid_stride(loop: ast.For, programs: set[str]) -> bool:
    """`range(start, n, step)` whose step is num_programs(0), by call or by a name bound to it."""
    if not (isinstance(loop.iter, ast.Call) and len(loop.iter.args) == 3):
        return False
    step = loop.iter.args[2]
    return dotted(step) in programs or any(name == "tl.num_programs" for name, _ in calls(step))


def vector_names(function: ast.FunctionDef) -> set[str]:
    """Names that may hold a vector: parameters of helpers aside, all that arange, full, zeros, a
    vector or a load through one flows into. Iterates, because loops carry values backwards."""
    vectors: set[str] = set()
    makers = {"tl.arange", "tl.full", "tl.zeros"}

    def is_vector(node: ast.AST) -> bool:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in vectors:
                return True
            if isinstance(inner, ast.Call) and dotted(inner.func) in makers:
                return True
        return False

    while True:
        before = len(vectors)
        for node in ast.walk(function):
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if is_vector(value):
                    vectors |= {
                        n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)
                    }
        if len(vectors) == before:
            return vectors


class Kernel:
    """The rules for one jit function."""

    def __init__(self, path: str, function: ast.FunctionDef, excuses: Excuses, entry: bool):
        self.path, self.function, self.excuses, self.entry = path, function, excuses, entry

    def findings(self) -> Iterator[Finding]:
        yield from self._statements()
        yield from self._operations()
        yield from self._hot_scalars()
        if self.entry:
            yield from self._grid_stride()

    def _at(self, node: ast.AST, rule: str, detail: str = "") -> Iterator[Finding]:
        if not (rule in EXCUSABLE and self.excuses.cover(node)):
            yield Finding(self.path, node.lineno, rule, detail)  # type: ignore[attr-defined]

    def _statements(self) -> Iterator[Finding]:
        kinds = {ast.Break: "break", ast.Continue: "continue"}
        for node in ast.walk(self.function):
            if type(node) in kinds:
                yield from self._at(node, kinds[type(node)])
            elif isinstance(node, ast.While):
                yield from self._at(node.test, "while")
        for decorator in self.function.decorator_list:
            if isinstance(decorator, ast.Call) and dotted(decorator.func).endswith("autotune"):
                yield from self._at(decorator, "autotune")

    def _operations(self) -> Iterator[Finding]:
        for node in ast.walk(self.function):
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            last = name.rpartition(".")[2]
            if not name.startswith("tl."):
                continue
            if last in NO_DTYPES:
                yield from self._at(node, "dtype", last)
            elif last in NO_OPERATIONS or ".extra." in name or ".experimental" in name:
                yield from self._at(node, "operation", name)
            elif last in SCALAR_OPERATIONS:
                yield from self._at(node, "scalar", last)
        for name, call in calls(self.function):
            if name == "tl.reduce" and isinstance(call.args[0], ast.Tuple):
                yield from self._at(call, "operation", "tl.reduce over a tuple")
            if name in ("tl.program_id", "tl.num_programs"):
                axis = call.args[0] if call.args else call.keywords[0].value
                if not (isinstance(axis, ast.Constant) and axis.value == 0):
                    yield from self._at(call, "grid", ast.unparse(call))

    def _programs(self) -> set[str]:
        """Names bound to num_programs(0)."""
        return {
            target.id
            for node in ast.walk(self.function)
            if isinstance(node, ast.Assign) and dotted_call(node.value) == "tl.num_programs"
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def _grid_stride(self) -> Iterator[Finding]:
        if not any(name == "tl.program_id" for name, _ in calls(self.function)):
            return
        programs = self._programs()
        loops = [n for n in ast.walk(self.function) if isinstance(n, ast.For)]
        if not any(is_grid_stride(loop, programs) for loop in loops):
            yield from self._at(self.function, "stride", self.function.name)

    def _hot_scalars(self) -> Iterator[Finding]:
        if not self.entry:
            return  # whether a helper's parameter is a vector is known only where it is called
        vectors, programs = vector_names(self.function), self._programs()
        seen: set[int] = set()
        for loop in ast.walk(self.function):
            if not isinstance(loop, ast.For) or is_grid_stride(loop, programs):
                continue
            for name, call in calls(loop):
                if name not in ("tl.load", "tl.store") or id(call) in seen:
                    continue
                seen.add(id(call))
                used = {n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name)}
                made = any(inner == "tl.arange" for inner, _ in calls(call.args[0]))
                if not (used & vectors or made):
                    yield from self._at(call, "hot", ast.unparse(call.args[0]))


def dotted_call(node: ast.AST) -> str:
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def lint_source(
    source: str, path: str = "<source>", entries: set[str] | None = None
) -> list[Finding]:
    """Findings of one file, by line. A file without jit functions has none.

    entries: kernels that are launched from elsewhere, besides those that this file launches.
    """
    tree = ast.parse(source, path)
    excuses = Excuses.of(source)
    kernels = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and is_jit(n)]
    if not kernels:
        return []
    entries = launched(tree) | (entries or set())
    found = [
        finding
        for kernel in kernels
        for finding in Kernel(path, kernel, excuses, kernel.name in entries).findings()
    ]
    found += [Finding(path, line, "excuse") for line, why in excuses.lines.items() if not why]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            grid = node.func.slice
            if isinstance(grid, ast.Tuple) and len(grid.elts) > 1:
                found.append(Finding(path, node.lineno, "launch", ast.unparse(grid)))
    return sorted(set(found), key=lambda f: (f.line, f.rule, f.detail))


def lint_paths(paths: list[Path]) -> list[Finding]:
    """Findings of files, and of all Python files below folders.

    A kernel counts as launched if any of the files launches that name.
    """
    files = [f for p in paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    sources = {file: file.read_text("utf-8") for file in files}
    entries = {name for source in sources.values() for name in launched(ast.parse(source))}
    return [f for file, source in sources.items() for f in lint_source(source, str(file), entries)]


def main(arguments: list[str] | None = None) -> int:
    """Print findings; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = Path(__file__).resolve().parents[1] / "kernels"
    parser.add_argument("paths", nargs="*", type=Path, default=[default])
    parser.add_argument("--rules", action="store_true", help="list the rules")
    options = parser.parse_args(arguments)
    if options.rules:
        print("\n".join(f"{rule}: {text}" for rule, text in RULES.items()))
        return 0
    missing = [str(path) for path in options.paths if not path.exists()]
    if missing:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    found = lint_paths(options.paths)
    for finding in found:
        print(finding)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
