"""Compiled programs by name and shape: built ahead by warm-up, and none later (design.md 3)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np

from coevo_jax.models.quantize import compiler_options

Compiling = Callable[[int, int], None]  # programs done, programs in all


class Programs:
    """Executables by key. After `seal`, asking for a key that was not built is an error that names it."""

    def __init__(self) -> None:
        self._built: dict[Hashable, Any] = {}
        self._shapes: dict[Hashable, Any] = {}  # of results, for `ahead`
        self._coming: dict[Hashable, concurrent.futures.Future[Any]] = {}
        self._pool: concurrent.futures.Executor | None = None
        self.sealed = False

    def __len__(self) -> int:
        return len(self._built)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._built

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of each executable by its key: arguments, results, those of them in one place, and temporaries."""
        out = {}
        for key, built in self._built.items():
            found = built.memory_analysis()
            if found is not None:
                out[str(key)] = {
                    "arguments": found.argument_size_in_bytes, "results": found.output_size_in_bytes,
                    "aliased": found.alias_size_in_bytes, "temporaries": found.temp_size_in_bytes,
                }  # fmt: skip
        return out

    def get(self, key: Hashable, function: Callable[..., Any], args: tuple[Any, ...], **jit_options: Any) -> Any:
        """The executable for `key`; the first time, `function` is lowered for the shapes of `args` and compiled."""
        if self._pool is not None:
            return self._plan(key, function, args, jit_options)
        if key not in self._built:
            if self.sealed:
                known = "\n  ".join(map(str, self._built))
                raise RuntimeError(f"sampler program {key} was not compiled by warm-up; compiled are\n  {known}")
            self._built[key] = jax.jit(function, **jit_options).lower(*args).compile(_options(args))
        return self._built[key]

    @contextlib.contextmanager
    def ahead(self, progress: Compiling | None = None) -> Iterator[None]:
        """Inside, `get` runs nothing: what it hands out gives shapes for results. Programs compile side by side in threads (XLA
        compiles one on little more than one core); when the block ends all of them are there."""
        self._pool = pool = concurrent.futures.ThreadPoolExecutor(max_workers=max(2, min(8, os.cpu_count() or 2)))
        try:
            yield
            for i, (key, coming) in enumerate(self._coming.items()):
                self._built[key] = coming.result()
                if progress is not None:
                    progress(i + 1, len(self._coming))
        finally:
            self._pool = None
            self._coming.clear()
            pool.shutdown(cancel_futures=True)

    def _plan(self, key: Hashable, function: Callable[..., Any], args: tuple[Any, ...], jit_options: dict[str, Any]) -> Any:
        if key not in self._shapes or not (key in self._built or key in self._coming):
            traced = jax.jit(function, **jit_options).trace(*args)
            self._shapes[key] = _placed(traced.out_info, jit_options.get("out_shardings"))
            if key not in self._built:
                assert self._pool is not None
                self._coming[key] = self._pool.submit(traced.lower().compile, _options(args))
        shapes = self._shapes[key]
        return lambda *_: shapes


@functools.cache
def cpu_options(by_library: str = "REDUCE") -> dict[str, Any]:
    """Compiler options on a CPU. jax 0.10.2 gives sums and matrix products to YNNPACK; these leave it one of the two.

    REDUCE, of the sampler: products by Eigen, which is faster for few rows. DOT, of the update: sums in XLA's own loops, where
    they join what is around them. None where XLA doesn't know the option.
    """
    if jax.default_backend() != "cpu":
        return {}
    options: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": f"LIBRARY_FUSION_TYPE_{by_library}"}
    try:
        jax.jit(lambda x: x + 1).lower(np.float32(0)).compile(options)
    except (RuntimeError, ValueError):  # XlaRuntimeError: no such option, or no such value
        return {}
    return options


def _options(args: tuple[Any, ...]) -> dict[str, Any]:
    return cpu_options() | compiler_options(args)


def _placed(info: Any, shardings: Any) -> Any:
    """Shapes of results, with the shardings that were asked for (None: not said)."""
    is_none = lambda x: x is None  # noqa: E731
    shape = lambda sharding, tree: jax.tree.map(  # noqa: E731
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )
    return jax.tree.map(shape, shardings, info, is_leaf=is_none)


def signature(tree: Any) -> int:
    """Tells apart weights that need their own programs: shapes, dtypes and shardings of the leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return hash((treedef, tuple((x.shape, str(x.dtype), x.sharding) for x in leaves)))
