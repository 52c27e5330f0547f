"""A user's own function by a dotted path 'module:function'."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from coevo_jax.errors import UserError, nearest


def resolve_function(path: str, where: str) -> Callable[..., Any]:
    """The function at 'package.module:function'; the working folder is searched too. `where` is the config key of an error."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"{path!r} is no dotted path", where=where, expected="module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, and something that it imports is not
        raise UserError(
            f"module {module_name!r} of {path!r} can't be imported: {error}", where=where,
            expected="a module of the working folder or of the environment", nearest=_nearest_module(module_name),
        ) from None  # fmt: skip
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        what = f"module {module_name!r} has no function {name!r}"
        raise UserError(what, where=where, expected=", ".join(known) or "a function", nearest=nearest(name, known))
    return function


def _nearest_module(name: str) -> str:
    parent, _, _ = name.rpartition(".")
    folder = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    prefix = f"{parent}." if parent else ""
    return nearest(name, [prefix + m.name for m in pkgutil.iter_modules(folder)]) if folder or not parent else ""
