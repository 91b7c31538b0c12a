"""The step of `test_same_bits.py` in a job of several processes: what its tests start.

    python tests/same_bits_run.py

The mesh has all devices of the job, data=4 and tensor=2. Rank 0 prints a hash of the state and of
the losses after five steps.
"""

import jax
import numpy as np
import test_same_bits as bits
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.run import processes


def main():
    job = processes.initialize(cpu_devices=8, say=lambda line: None)
    devices = mesh.make(**bits.CELLS)
    train, state = bits.user_step(bits.of_cells(), devices)
    losses = []
    for batch in bits.batches(5):
        state, info = train(state, mesh.place(batch, P("data"), devices))
        losses.append(np.asarray(info.loss))
    whole = multihost_utils.process_allgather(state, tiled=True)
    if job.rank == 0:
        print("hash", bits.digest(bits.numbers(whole, losses)))


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        main()
