"""coevo-jax. The library's surface, loaded when it is first used: `import coevo_jax` itself is cheap (docs/serving.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coevo_jax.errors import UserError
    from coevo_jax.serve.library import System, load_system

_PUBLIC = {
    "System": "coevo_jax.serve.library",
    "UserError": "coevo_jax.errors",
    "load_system": "coevo_jax.serve.library",
}
__all__ = ["System", "UserError", "load_system"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'coevo_jax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
