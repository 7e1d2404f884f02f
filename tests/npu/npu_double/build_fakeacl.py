"""Builds the CANN libraries that torch_npu links against, as doubles.

    python build_fakeacl.py SITE_PACKAGES OUT

fakeacl.c does what matters; every other symbol that torch_npu needs, or looks up by name, becomes
a function that returns 0 (success). The result is a test double: keep it off any default loader
path.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("fakeacl.c")
# Loaded by name or needed by torch_npu; empty shells around libascendcl.so.
SHELLS = (
    "hccl", "hcomm", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb",
    "fmk_parser", "ascend_protobuf", "nnopbase", "runtime",
)  # fmt: skip
SYSTEM_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64")
SYSTEM_LIBRARIES = (
    "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2",
)  # fmt: skip
_RUNTIME_NAME = re.compile(
    r"(acl(rt|mdl|op|prof|sys|tdt|Create|Destroy|Get|Set|Init|Finalize|dump)\w*"
    r"|Hccl[A-Z]\w*|rt[A-Z]\w*|Hcom[A-Za-z]+)"
)
_OPERATOR_NAME = re.compile(r"aclnn[A-Z]\w*")
_WORKSPACE = "GetWorkspaceSize"


def main(site: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    own = set(
        re.findall(r"^(?:int|size_t|void \*|const char \*) ?(\w+)\(", SOURCE.read_text(), re.M)
    )
    targets = [*site.glob("torch_npu/_C*.so"), *site.glob("torch_npu/lib/*.so")]
    if not targets:
        raise SystemExit(f"build_fakeacl.py: no torch_npu in {site}")
    named = _strings(site / "torch_npu/lib/libtorch_npu.so")
    runtime = {name for name in named if _RUNTIME_NAME.fullmatch(name)}
    operators = {name for name in named if _OPERATOR_NAME.fullmatch(name)}
    operators |= {name + _WORKSPACE for name in operators if not name.endswith(_WORKSPACE)}
    operators |= {name.removesuffix(_WORKSPACE) for name in operators}
    undefined = _undefined(site, targets)
    _return_zero(out / "runtime.s", (undefined | runtime) - own)
    _return_zero(out / "operators.s", operators)
    _link(out, "ascendcl", str(out / "runtime.s"), str(SOURCE))
    dependency = ("-Wl,--no-as-needed", f"-L{out}", "-lascendcl")
    _link(out, "opapi", str(out / "operators.s"), *dependency)
    (out / "shell.c").write_text("int shell;\n")
    for name in SHELLS:
        _link(out, name, str(out / "shell.c"), *dependency)
    stubs = len((undefined | runtime) - own)
    print(f"{len(own)} functions, {len(operators)} operators, {stubs} stubs")


def _undefined(site: Path, targets: list[Path]) -> set[str]:
    """Symbols that torch_npu needs and neither torch, the system nor Python defines."""
    system = [Path(folder, name) for folder in SYSTEM_FOLDERS for name in SYSTEM_LIBRARIES]
    defining = [*targets, *site.glob("torch/lib/*.so*"), *(p for p in system if p.exists())]
    needed = set().union(*(_symbols(path, "--undefined-only") for path in targets))
    defined = set().union(*(_symbols(path, "--defined-only") for path in defining))
    return {name for name in needed - defined if not re.match("_?Py", name)}


def _symbols(library: Path, which: str) -> set[str]:
    """Names in the dynamic symbol table, weak ones left out."""
    listing = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True).stdout
    fields = [line.split() for line in listing.splitlines()]
    return {f[-1].split("@")[0] for f in fields if len(f) > 1 and f[-2] not in ("w", "v")}


def _strings(library: Path) -> set[str]:
    texts = re.findall(rb"[\x21-\x7e]{4,}", library.read_bytes())
    return {text.decode() for text in texts}


def _return_zero(path: Path, names: set[str]) -> None:
    lines = [".text"]
    for name in sorted(names):
        lines.append(f".globl {name}\n.type {name},@function\n{name}:")
        lines.append(" xorl %eax,%eax\n xorl %edx,%edx\n ret")
    path.write_text("\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""]))


def _link(out: Path, name: str, *arguments: str) -> None:
    library = f"lib{name}.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{library}", *arguments]
    subprocess.run([*command, "-o", str(out / library)], check=True)


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:3]))
