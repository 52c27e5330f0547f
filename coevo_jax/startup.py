"""The check of several processes before their first update: one line of each, and nothing goes on that differs between them."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import time
from typing import Any

import jax

from coevo_jax.config.override import to_dict
from coevo_jax.distributed import largest, to_all
from coevo_jax.errors import UserError
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.records.run_folder import CONFIG, RunFolder
from coevo_jax.system import System


def check_processes(system: System, folder: RunFolder) -> None:
    """Print this process's mesh, memory, the time of a small collective and the weights' fingerprints; one process: nothing.

    UserError where processes have other configs, inputs, versions or weights, or don't see one run folder.
    """
    if jax.process_count() == 1:
        return
    seconds = statistics.median(_timed_collective() for _ in range(5))
    weights = {name: fingerprint(learner.state.params) for name, learner in system.learners.items()} | system.frozen_fingerprints
    print(f"[process {jax.process_index()}] {_line(system, seconds, weights)}", flush=True)
    facts = {
        "the config": _config_hash(system), "versions": f"jax {jax.__version__}", "the weights": weights,
        "inputs (prompt templates, data, tokenizers)": {key: item.hash for key, item in system.inputs.items()},
        "the run folder": (folder.path / CONFIG).exists(),
    }  # fmt: skip
    told = to_all("startup", facts)
    for what in facts:
        for index, other in enumerate(told):
            if other[what] != told[0][what]:
                raise UserError(f"process {index} differs from process 0 in {what}: {other[what]}", where=str(folder.path),
                                expected=f"{told[0][what]}, on every process (one folder that all share)")  # fmt: skip


def _timed_collective() -> float:
    start = time.perf_counter()
    largest([0])
    return time.perf_counter() - start


def _line(system: System, seconds: float, weights: dict[str, str]) -> str:
    mesh = next(iter(system.learners.values())).mesh
    devices, slots = jax.local_devices(), system.context.slots
    return (
        f"{jax.process_index() + 1} of {jax.process_count()} on {socket.gethostname()}: {len(devices)} of {jax.device_count()} "
        f"{devices[0].platform} devices, mesh {dict(mesh.shape)}, prompt slots {slots.start}..{slots.stop - 1} "
        f"of {system.cfg.schedule.prompts}, {_memory()}, small collective {1e3 * seconds:.1f} ms, weights {weights}"
    )


def _memory() -> str:
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return f"{stats.get('bytes_in_use', 0) / 2**30:.2f} of {stats['bytes_limit'] / 2**30:.2f} GiB a device in use"
    return f"{os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB of the host free"


def _config_hash(system: System) -> str:
    config = {key: value for key, value in to_dict(system.cfg).items() if key != "run"}  # how a run is recorded may differ
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
