"""Calls a function when another package is imported, without importing it.

Every command begins by importing this one, and Ctrl-C is a traceback until it has: `typing` alone is 10 ms.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def after_import(name: str, act: Callable[[], object]) -> None:
    """Calls `act` as soon as module `name` has been imported: now, if it has been."""
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """Finds one module as usual, and calls `act` after it has been loaded."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name, self._act = name, act
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            from typing import cast

            spec.loader = cast("Loader", _ThenAct(spec.loader, self))
        return spec

    def loaded(self) -> None:
        """Acts, once."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._act()


class _ThenAct:
    """Loads a module by its own loader, puts that loader back, and calls `act`."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.loaded()
