"""Several processes: one call to join them, what each owns, and the little that crosses between them.

Every process runs the same program over the same mesh. On the host a process owns a range of prompt slots end to end; only
numbers cross (records/facts.py). Device collectives happen in the update, in the count before it and in checkpoints, never while
sampling.
All functions here are called by every process, in the same order; with one process they do nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coevo_jax.config import RunConfig
from coevo_jax.errors import MissingProcesses, UserError
from coevo_jax.mesh import AXES
from coevo_jax.watchdog import Watchdog

AUTO = "auto"  # --processes: ask the environment (Cloud TPU, GKE, Slurm)
FOREVER_MS = 7 * 24 * 3600 * 1000  # of waiting for another process: the watchdog ends a wait that is too long (watchdog.py)
SILENCE_S = 600  # JAX's own heartbeats, a second net below the watchdog's

_calls: dict[str, int] = {}  # how often each function that crosses processes was called: part of its keys


# ------------------------------------------------------------------------------------------------------------- joining


def initialize(processes: str, coordinator: str = "", process_id: str = "") -> None:
    """Join this process to the others; before anything else touches a device. processes: a number, 'auto', or '': 'auto' on a TPU
    VM, else one process.

    UserError where the flags don't go together, MissingProcesses where the others don't come.
    """
    if not processes and not coordinator and not process_id and on_tpu_vm():
        processes = AUTO
    if not processes:
        if coordinator or process_id:
            raise UserError("--coordinator and --process_id name one of several processes", where="command line",
                            expected="--processes=N beside them")  # fmt: skip
        return
    arguments = {} if processes == AUTO else _arguments(processes, coordinator, process_id)
    if arguments.get("num_processes") == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which the loop handles
    try:
        jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=SILENCE_S, shutdown_timeout_seconds=60)
    except (RuntimeError, ValueError) as error:
        kind = UserError if isinstance(error, ValueError) else MissingProcesses
        raise kind(f"this process could not join the others: {str(error).splitlines()[0]}", where="command line",
                   expected="every process started with the same --coordinator and --processes") from error  # fmt: skip


def _arguments(processes: str, coordinator: str, process_id: str) -> dict[str, Any]:
    """Of jax.distributed.initialize."""
    if not processes.isdigit() or int(processes) < 1:
        raise UserError(f"--processes={processes}", where="command line", expected=f"{AUTO}, or a number of at least 1")
    count = int(processes)
    if count > 1 and (":" not in coordinator or not process_id.isdigit() or not 0 <= int(process_id) < count):
        raise UserError(
            f"--processes={count} needs the coordinator's address and this process's number", where="command line",
            expected=f"--coordinator=HOST:PORT (of process 0) and --process_id=0..{count - 1}",
        )  # fmt: skip
    return {"coordinator_address": coordinator, "num_processes": count, "process_id": int(process_id or 0),
            "cluster_detection_method": "deactivate"}  # fmt: skip


def on_tpu_vm() -> bool:
    """Does this machine have TPU chips, and may JAX use them?"""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms:
        return False
    from jax._src import cloud_tpu_init  # which looked at the PCI bus when JAX was imported

    return bool(getattr(cloud_tpu_init, "running_in_cloud_tpu_vm", False))


def client() -> Any:
    """The connection to the coordinator, which holds small values by key."""
    from jax._src import distributed  # the store has no public name

    return distributed.global_state.client


def watchdog(cfg: RunConfig) -> Watchdog:
    """That of this process, not yet started."""
    dog = Watchdog(jax.process_index(), jax.process_count(), client() if jax.process_count() > 1 else None)
    dog.dead_after, dog.hang_after = cfg.dead_after_s, cfg.hang_after_s
    return dog


# ------------------------------------------------------------------------------------------------------- what is whose


def own(total: int, index: int | None = None, count: int | None = None) -> range:
    """The slots of `total` that a process owns (this one, unless another is named): contiguous, sizes differ by at most one."""
    index = jax.process_index() if index is None else index
    count = jax.process_count() if count is None else count
    return range(total * index // count, total * (index + 1) // count)


def most_owned(total: int) -> int:
    """Slots of `total` that the process with most of them owns."""
    return math.ceil(total / jax.process_count())


# ------------------------------------------------------------------------------------------------- what crosses on devices


def largest(numbers: Sequence[int]) -> list[int]:
    """The largest value of each number over all processes: one small collective of the devices, so also a meeting point."""
    if jax.process_count() == 1:
        return list(numbers)
    rows, maximum = _maximum()
    mine = jax.device_put(np.asarray([numbers], np.int32), next(iter(rows.addressable_devices)))
    every = jax.make_array_from_single_device_arrays((jax.process_count(), len(numbers)), rows, [mine])
    return [int(n) for n in np.asarray(maximum(every))]


@functools.cache
def _maximum() -> tuple[NamedSharding, Any]:
    """Where [processes, N] lies, a row on the first device of each process, and the jitted maximum over processes."""
    first = [min((d for d in jax.devices() if d.process_index == i), key=lambda d: d.id) for i in range(jax.process_count())]
    mesh = Mesh(np.asarray(first, dtype=object), ("process",))
    whole = NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec("process")), jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=whole)


def any_process(flag: bool) -> bool:
    """Is it true on any process?"""
    return bool(largest([int(flag)])[0])


def global_rows(tree: Any, sharding: NamedSharding) -> Any:
    """Arrays [M, B, ...] over all processes from the [M, b, ...] of each: b rows of this process, B = b x processes."""
    count = jax.process_count()

    def place(x: np.ndarray) -> jax.Array:
        shape = (x.shape[0], x.shape[1] * count, *x.shape[2:])
        parts = sharding.addressable_devices_indices_map(shape).values()
        starts = sorted({_first_row(index) for index in parts})
        size = x.shape[1] // len(starts)  # rows of one device

        def block(index: Any) -> np.ndarray:
            at = starts.index(_first_row(index)) * size
            return np.asarray(x[:, at : at + size])

        return jax.make_array_from_callback(shape, sharding, block)

    return jax.tree.map(place, tree)


def _first_row(index: Any) -> int:
    return index[1].start or 0


def local_mesh(mesh: Mesh | None) -> Mesh | None:
    """This process's devices as a mesh of data and tensor, for the sampler; None for a single device.

    UserError where a process does not hold the whole of the tensor axis.
    """
    if mesh is None or jax.process_count() == 1:
        return mesh
    tensor, me = mesh.shape["tensor"], jax.process_index()
    rows = [row for row in mesh.devices.reshape(-1, tensor) if any(d.process_index == me for d in row)]
    if any(d.process_index != me for row in rows for d in row):
        raise UserError(f"mesh.tensor={tensor} reaches over several processes", where="mesh.tensor",
                        expected=f"a divisor of the {jax.local_device_count()} devices of a process")  # fmt: skip
    if jax.local_device_count() == 1:
        return None
    return Mesh(np.asarray(rows, dtype=object).reshape(len(rows), 1, tensor), AXES)


def local_copy(params: Any, local: Mesh | None) -> Any:
    """This process's part of arrays that every process holds whole, as arrays of its own devices."""

    def take(x: jax.Array) -> jax.Array:
        shards = [shard.data for shard in x.addressable_shards]
        if local is None:
            return shards[0]
        assert isinstance(x.sharding, NamedSharding)
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(local, x.sharding.spec), shards)

    return jax.tree.map(take, params)


# ------------------------------------------------------------------------------------------------ what crosses on the host


def barrier(name: str) -> None:
    """Until every process is here."""
    if jax.process_count() > 1:
        client().wait_at_barrier(f"coevo/{name}/{_number(name)}", FOREVER_MS)


def to_first(name: str, value: Any) -> list[Any]:
    """A JSON value of each process, in their order, on process 0; nothing on the others, which don't wait."""
    if jax.process_count() == 1:
        return [value]
    store, key = client(), f"coevo/{name}/{_number(name)}"
    if jax.process_index() != 0:
        store.key_value_set_bytes(f"{key}/{jax.process_index()}", json.dumps(value).encode())
        return []
    found = [json.loads(store.blocking_key_value_get_bytes(f"{key}/{i}", FOREVER_MS)) for i in range(1, jax.process_count())]
    with contextlib.suppress(RuntimeError):
        store.key_value_delete(key)
    return [value, *found]


def to_all(name: str, value: Any) -> list[Any]:
    """A JSON value of each process, in their order, on every process."""
    if jax.process_count() == 1:
        return [value]
    store, key = client(), f"coevo/{name}/{_number(name)}"
    store.key_value_set_bytes(f"{key}/{jax.process_index()}", json.dumps(value).encode())
    return [json.loads(store.blocking_key_value_get_bytes(f"{key}/{i}", FOREVER_MS)) for i in range(jax.process_count())]


def _number(name: str) -> int:
    _calls[name] = _calls.get(name, 0) + 1
    return _calls[name]
