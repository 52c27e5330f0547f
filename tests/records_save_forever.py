"""Helper of test_records_checkpoint.py, run by path: rounds of a child that saves until it is killed, and one that restores.

Usage: records_save_forever.py FOLDER ROUNDS SEED. Imports once and forks before any backend starts, so a round takes a second.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np

from coevo_jax.records.checkpoint import Checkpoints


def state_of(step: int) -> dict[str, jax.Array]:
    mesh = jax.make_mesh((2,), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    return {"w": jax.device_put(jnp.full((256, 128), step, jnp.float32), rows), "count": jnp.int32(step)}


def restore(folder: pathlib.Path) -> int:
    """The step that comes back, after a check that every part of it belongs to that step; 0 when there is none."""
    checkpoints = Checkpoints(folder, keep=1)
    restored = checkpoints.restore_latest(state_of(0))
    if restored is None:
        return 0
    step = restored.step
    assert restored.host == {"step": step} and restored.arrays["tokens"].tolist() == [step] * (step % 50)
    assert int(restored.state["count"]) == step and bool(np.all(np.asarray(restored.state["w"]) == step))
    return step


def save_forever(folder: pathlib.Path, pipe: int) -> None:
    step = restore(folder)
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.restore_latest(state_of(0))
    while True:
        step += 1
        checkpoints.save(step, state_of(step), {"step": step}, {"tokens": np.full(step % 50, step)})
        checkpoints.wait()
        os.write(pipe, b"%d\n" % step)  # committed: from here on this step or a later one must come back


def fork(work, *args) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = work(*args) or 0
    finally:
        os._exit(code)


def main(folder: pathlib.Path, rounds: int, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(rounds):
        reader, writer = os.pipe()
        child = fork(save_forever, folder, writer)
        os.close(writer)
        committed = int(os.read(reader, 4096).split()[-1])  # the child is at work
        time.sleep(draw.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        said = os.read(reader, 1 << 20).split()
        os.close(reader)
        committed = int(said[-1]) if said else committed

        def check(committed: int = committed) -> int:
            step = restore(folder)
            assert step in (committed, committed + 1), f"committed {committed}, restored {step}"
            return 0

        _, status = os.waitpid(fork(check), 0)
        assert status == 0, f"round {number}: nothing good after committed step {committed}"
        print("round", number, "committed", committed, sorted(path.name for path in folder.iterdir()), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
