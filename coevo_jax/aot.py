"""Compile for a TPU slice without owning one: the compile-only client of libtpu, and what it says of memory and collectives.

The compile proves lowering, memory and communication. It says nothing of speed or numbers: nothing is run.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from coevo_jax import hlo
from coevo_jax.errors import UserError, nearest
from coevo_jax.mesh import AXES, by_host

GIB = 2**30
REMATERIALISED = "nvoluntary full rematerialization"  # XLA's warning that it gathers a whole array to lay it out anew
TOPOLOGIES = ("v4:2x2x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4")
HOST_BOUNDS = (2, 2, 1)  # chips of one host of a multi-host slice, for every generation below
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server is near
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may hold libtpu's lock on this machine
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip, per second and in bytes. ici_link: one way, over one link."""

    name: str
    hbm_bytes: int
    hbm_program: int  # what libtpu 0.0.42 lets a program use, as its error for a program that is too large says
    bf16_flops: float
    hbm_bandwidth: float
    ici_link: float
    chips_per_host: int
    cores: int
    config: str | None  # libtpu's chip configuration, where its default is not what JAX runs with
    source: str


_DOCS = "docs.cloud.google.com/tpu/docs/{} (HBM, peak, bandwidth); ici_link: jax-ml.github.io/scaling-book/tpus"
# 'GB' of HBM on those pages are read as GiB: libtpu has 95.74 GiB for v5p, whose page says 95 GB. Uncertain: ici_link (Cloud's
# pages give 400 GB/s a v5e chip and 4800 Gbit/s a v5p chip over all links: 50 and 100 GB/s a link) and the bandwidth of v5e
# (another of its pages says 800 GiB/s).
CHIPS = {
    "v4": Chip("v4", 32 * GIB, int(30.75 * GIB), 275e12, 1228e9, 45e9, 4, 2, "megacore", _DOCS.format("v4")),
    "v5e": Chip("v5e", 16 * GIB, int(15.75 * GIB), 197e12, 819e9, 45e9, 4, 1, None, _DOCS.format("v5e")),
    "v5p": Chip("v5p", 95 * GIB, int(95.74 * GIB), 459e12, 2765e9, 90e9, 4, 2, None, _DOCS.format("v5p")),
    "v6e": Chip("v6e", 32 * GIB, int(31.25 * GIB), 918e12, 1640e9, 90e9, 4, 1, None, _DOCS.format("v6e")),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice, or several equal ones, as devices that can be compiled for and not run on."""

    name: str  # 'v5e:4x4', or 'v5e:4x4*2' for two slices
    chip: Chip
    slices: int
    devices: tuple[Any, ...]  # slice by slice, host by host

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each device."""
        return tuple(_host(d) for d in self.devices)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device. Arguments, outputs (aliased ones included), temporaries; peak as the compiler reckons it."""

    arguments: int
    outputs: int
    temporaries: int
    alias: int
    code: int
    peak: int


def require_libtpu() -> None:
    """UserError where libtpu can't be imported."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu is not installed: nothing can be compiled for a TPU", where="pip",
                        expected="the extra 'tpu': pip install 'coevo-jax[tpu]' (no TPU is needed)")  # fmt: skip


def parse_name(name: str) -> tuple[Chip, tuple[int, ...], int]:
    """'v5p:2x2x4*2' -> chip, (2, 2, 4), 2 slices."""
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})(?:\*(\d+))?", name)
    if found is None or found[1] not in CHIPS:
        raise UserError(f"{name!r} is not the name of a TPU topology", where="topology",
                        expected=f"{' | '.join(CHIPS)}, then ':' and chips along each axis, then '*slices' if several",
                        nearest=nearest(name, TOPOLOGIES))  # fmt: skip
    return CHIPS[found[1]], tuple(int(n) for n in found[2].split("x")), int(found[3] or 1)


@functools.cache
def topology(name: str) -> Topology:
    """Devices of a slice by name, from libtpu. Sets libtpu's environment where it is not set: for processes without a TPU."""
    chip, dims, slices = parse_name(name)
    require_libtpu()
    from jax.experimental import topologies

    for key, value in {**ENVIRONMENT, "TPU_ACCELERATOR_TYPE": _accelerator(chip, dims)}.items():
        os.environ.setdefault(key, value)
    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")  # else JAX would look for a TPU of its own
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    options["chips_per_host_bounds"] = tuple(min(a, b) for a, b in zip(HOST_BOUNDS, (*dims, 1)))
    if chip.config:
        options["chip_config_name"] = chip.config
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=name.split("*")[0], **options)
    except Exception as error:  # libtpu's own errors have no common type
        raise UserError(f"libtpu knows no topology {name!r}: {str(error)[:300]}", where="topology",
                        expected="a slice shape that is sold", nearest=nearest(name, TOPOLOGIES)) from error  # fmt: skip
    devices = tuple(by_host(described.devices))
    if len(devices) != int(np.prod(dims)) * slices:
        raise RuntimeError(
            f"{name}: {len(devices)} devices for {int(np.prod(dims)) * slices} chips; the chip is split into cores"
        )
    return Topology(name, chip, slices, devices)


def mesh_for(topology: Topology, data: int = -1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """Mesh (data, fsdp, tensor) with every tensor group on one host and slices outermost; data = -1 takes what is left."""
    count, a_host = len(topology.devices), topology.hosts.count(topology.hosts[0])
    if tensor < 1 or a_host % tensor:
        raise UserError(f"tensor={tensor} does not fit into hosts of {a_host} chips", where="mesh.tensor",
                        expected=f"a divisor of {a_host}")  # fmt: skip
    data = count // (fsdp * tensor) if data == -1 else data
    if data * fsdp * tensor != count or data % topology.slices:
        raise UserError(f"a mesh of data={data} fsdp={fsdp} tensor={tensor} does not use {topology.name} exactly", where="mesh",
                        expected=f"{count} chips; data a multiple of {topology.slices} slices")  # fmt: skip
    return Mesh(np.asarray(topology.devices, dtype=object).reshape(data, fsdp, tensor), AXES)


def lower_for(fn: Callable[..., Any], args: Sequence[Any], *, donate: Sequence[int] = (), out_shardings: Any = None) -> Any:
    """jax.stages.Lowered of fn over jax.ShapeDtypeStructs, whose shardings name the devices to compile for. A jitted fn keeps
    its own options."""
    if hasattr(fn, "lower"):
        return fn.lower(*args)
    options = {} if out_shardings is None else {"out_shardings": out_shardings}
    return jax.jit(fn, donate_argnums=tuple(donate), **options).lower(*args)


def compile_for(
    fn: Callable[..., Any], args: Sequence[Any], *, donate: Sequence[int] = (), out_shardings: Any = None,
    options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """jax.stages.Compiled of fn for the devices of its arguments' shardings. options: XLA's compiler options."""
    with _no_compilation_cache():
        return lower_for(fn, args, donate=donate, out_shardings=out_shardings).compile(options)


def memory(compiled: Any) -> Memory:
    m = compiled.memory_analysis()
    return Memory(
        m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes, m.alias_size_in_bytes,
        m.generated_code_size_in_bytes, m.peak_memory_in_bytes,
    )  # fmt: skip


def hosts_of(mesh: Mesh) -> tuple[int, ...]:
    """The host of each device in the mesh's flat order, as `collectives` wants it."""
    return tuple(_host(d) for d in mesh.devices.flat)


def collectives(compiled: Any, hosts: Sequence[int] | None = None) -> list[hlo.Collective]:
    """hlo.collectives of a compiled program or of its text."""
    return hlo.collectives(_text(compiled), hosts)


def large_copies(compiled: Any, at_least_bytes: int) -> list[hlo.Copy]:
    """hlo.large_copies of a compiled program or of its text."""
    return hlo.large_copies(_text(compiled), at_least_bytes)


def figures(
    fn: Callable[..., Any], args: Sequence[Any], mesh: Mesh, *, cache: Path | None = None, copies_from: int = 2**24,
    donate: Sequence[int] = (), out_shardings: Any = None, options: dict[str, Any] | None = None, texts: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """memory, collectives and copies (of at least `copies_from` bytes) of a program as JSON, kept in the file `cache`.

    The key is a hash of the lowered text, of the versions of jax, jaxlib and libtpu, and of the devices: a program that was
    compiled before is only lowered. texts: a folder that keeps the compiled text packed; 'text' names the file.
    """
    lowered = lower_for(fn, args, donate=donate, out_shardings=out_shardings)
    devices = [(str(d.device_kind), _host(d), list(d.coords), d.id) for d in mesh.devices.flat]
    named = json.dumps([versions(), devices, copies_from, options or {}, lowered.as_text()])
    key = hashlib.sha256(named.encode()).hexdigest()
    kept = _read(cache)
    if key not in kept or (texts is not None and not (texts / f"{key}.hlo.gz").exists()):
        with _no_compilation_cache(), _stderr_of_xla() as said:
            compiled = lowered.compile(options)
        text = compiled.as_text()
        kept[key] = {
            "memory": dataclasses.asdict(memory(compiled)),
            "collectives": [dataclasses.asdict(c) for c in collectives(text, hosts_of(mesh))],
            "copies": [dataclasses.asdict(c) for c in large_copies(text, copies_from)],
            "warnings": [line for line in said if REMATERIALISED in line],
        }
        _write(cache, key, kept[key])
        _keep_text(texts, key, text)
    found = json.loads(json.dumps(kept[key]))  # the same types whether it was read or made
    return found if texts is None else {**found, "text": f"{key}.hlo.gz"}


def versions() -> dict[str, str]:
    """Versions that decide what is compiled."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def _read(cache: Path | None) -> dict[str, Any]:
    if cache is None or not cache.exists():
        return {}
    try:
        return json.loads(cache.read_text())
    except json.JSONDecodeError as error:
        raise UserError(
            f"the figures can't be read: {error}", where=str(cache), expected="JSON; delete the file to compile again"
        ) from error


def _write(cache: Path | None, key: str, value: dict[str, Any]) -> None:
    if cache is None:
        return
    cache.parent.mkdir(parents=True, exist_ok=True)
    part = cache.with_name(f"{cache.name}.{os.getpid()}.part")
    part.write_text(json.dumps({**_read(cache), key: value}, indent=1, sort_keys=True) + "\n")
    part.replace(cache)


def _keep_text(texts: Path | None, key: str, text: str) -> None:
    if texts is None:
        return
    texts.mkdir(parents=True, exist_ok=True)
    part = texts / f"{key}.{os.getpid()}.part"
    with gzip.open(part, "wt", compresslevel=3) as file:
        file.write(text)
    part.replace(texts / f"{key}.hlo.gz")


@contextmanager
def _stderr_of_xla() -> Iterator[list[str]]:
    """Lines that XLA writes to the process's standard error, which is given back afterwards with all of them on it."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+b") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text = file.read().decode(errors="replace")
            lines += text.splitlines()
            sys.stderr.write(text)


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """A compile-only client can't read the persistent cache back: it warns and compiles again."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def _text(compiled: Any) -> str:
    return compiled if isinstance(compiled, str) else compiled.as_text()


def _accelerator(chip: Chip, dims: tuple[int, ...]) -> str:
    """As Cloud names it: v4 and v5p count cores, v5e is called v5litepod."""
    name = {"v5e": "v5litepod"}.get(chip.name, chip.name)
    return f"{name}-{int(np.prod(dims)) * chip.cores}"


def _host(device: Any) -> int:
    return int(device.process_index)
