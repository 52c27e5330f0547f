"""Compiled programs by name and shape: built ahead by warm-up, and none later (design.md 3)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax

from coevo_jax.models.quantize import compiler_options


class Programs:
    """Executables by key. After `seal`, asking for a key that was not built is an error that names it."""

    def __init__(self) -> None:
        self._built: dict[Hashable, Any] = {}
        self.sealed = False

    def __len__(self) -> int:
        return len(self._built)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._built

    def get(self, key: Hashable, function: Callable[..., Any], args: tuple[Any, ...], **jit_options: Any) -> Any:
        """The executable for `key`; the first time, `function` is lowered for the shapes of `args` and compiled."""
        if key not in self._built:
            if self.sealed:
                known = "\n  ".join(map(str, self._built))
                raise RuntimeError(f"sampler program {key} was not compiled by warm-up; compiled are\n  {known}")
            self._built[key] = jax.jit(function, **jit_options).lower(*args).compile(compiler_options(args))
        return self._built[key]


def signature(tree: Any) -> int:
    """Tells apart weights that need their own programs: shapes, dtypes and shardings of the leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return hash((treedef, tuple((x.shape, str(x.dtype), x.sharding) for x in leaves)))
