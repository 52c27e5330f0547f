"""Helper of test_records_checkpoint.py, run by path: process INDEX of two that save and restore one checkpoint folder.

Usage: records_two_processes.py FOLDER INDEX PORT
"""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np

folder, index, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)

from coevo_jax.preference.buffer import ReplayBuffer  # noqa: E402
from coevo_jax.records.checkpoint import Checkpoints  # noqa: E402
from coevo_jax.records.fingerprint import fingerprint  # noqa: E402

rows = jax.sharding.NamedSharding(jax.make_mesh((4,), ("data",)), jax.sharding.PartitionSpec("data"))
values = np.arange(32, dtype=np.float32).reshape(8, 4)


def state_of(step: int) -> dict[str, jax.Array]:
    return {"w": jax.make_array_from_callback(values.shape, rows, lambda part: values[part] + step)}


buffer = ReplayBuffer(range(2 * index, 2 * index + 2), 4, 1, 4)
checkpoints = Checkpoints(folder, keep=1)
checkpoints.save_reference(state_of(0))
for step in (1, 2, 3):
    for slot in buffer.slots:
        buffer.add(slot, step, f"r{slot}", "q", [slot, step])
    checkpoints.save(step, state_of(step), {"process": index}, buffer.state())
checkpoints.close()

again = Checkpoints(folder, keep=1)
restored = again.restore_latest(state_of(0))
assert restored is not None and restored.step == 3
assert [host["process"] for host in restored.host_parts] == [0, 1]
for shard in restored.state["w"].addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index] + 3)
again.load_reference(state_of(0))
again.close()
print(fingerprint(restored.state))
