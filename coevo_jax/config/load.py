"""From a Python file with get_config() to an Experiment. Imports no JAX."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib
import sys

from coevo_jax.config import Experiment
from coevo_jax.config.validate import compat_warnings, validate
from coevo_jax.errors import UserError, nearest

__all__ = ["compat_warnings", "load_config", "validate"]


def load_config(path: str) -> Experiment:
    """Run the file at `path` and call its get_config(). UserError: no such file, bad syntax, no get_config, another result."""
    file = pathlib.Path(path)
    if not file.is_file():
        close = nearest(str(file), map(str, sorted(file.parent.glob("*.py")) if file.parent.is_dir() else []))
        raise UserError(
            f"no config file {path}",
            where="--config",
            expected="a Python file with get_config()",
            nearest=close,
        )
    module = _run(file)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        close = nearest("get_config", [name for name in vars(module) if not name.startswith("__")])
        raise UserError("the config file has no function get_config", where=path, expected="def get_config():", nearest=close)
    cfg = get_config()
    if not isinstance(cfg, Experiment):
        kind = type(cfg).__name__
        raise UserError(f"get_config() returned {kind}", where=path, expected="a coevo_jax.config.Experiment")
    return cfg


def _run(file: pathlib.Path) -> object:
    """The file as a module of its own. It may import its neighbours by name, as a script may."""
    name = f"coevo_config_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, loader=importlib.machinery.SourceFileLoader(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, UnicodeDecodeError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(
            f"the config file is not valid Python: {error}", where=f"{file}{line}", expected="a Python file"
        ) from None
    except ImportError as error:
        raise UserError(
            f"the config file could not be imported: {error}", where=str(file), expected="imports that exist"
        ) from error
    finally:
        sys.path.remove(folder)
    return module
