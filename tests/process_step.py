"""Two AdamW steps of a small GPT-2 over data x stage x tensor, in one process or in several that share eight devices.

    python tests/process_step.py PROCESS PROCESSES PORT FILE.npz

Process 0 writes the losses, the norms and the weights.
"""

import os
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from parallax import mesh, step
from parallax.collectives import ring
from parallax.layout import Layout
from parallax.models import gpt2

CONFIG = gpt2.Config(
    layers=4, heads=2, width=16, context=12, vocabulary=61, vocabulary_multiple=8, dropout=0.1, attention_dropout=0.1
)
BATCH, STEPS = 8, 2
EIGHT = Layout(data=2, stage=2, tensor=2, microbatches=2)
ONE = Layout(microbatches=2)


def train(layout: Layout) -> dict[str, np.ndarray]:
    """The losses, the gradients' norms and the final weights, by path, in float64, on the first devices of all processes."""
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    state, run = step.train_step(
        CONFIG,
        optax.adamw(1e-2),
        layout,
        mesh_,
        batch=BATCH,
        all_reduce=ring.all_reduce,
        dtype=jnp.dtype("float64"),
        key=jax.random.key(0),
    )
    infos = []
    for seed in range(STEPS):
        windows = np.random.default_rng(seed).integers(CONFIG.vocabulary, size=(BATCH, CONFIG.context + 1), dtype=np.int32)
        state, info = run(state, mesh.place(windows, P("data"), mesh_))
        infos.append(np.array([info.loss, info.gradient_norm]))
    model = jax.jit(lambda model: model, out_shardings=mesh.shardings(P(), mesh_))(state.model)
    model = model if layout.stage == 1 else gpt2.unchunked(model)
    weights = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(model)}
    return {"infos": np.stack(infos), **weights}


def main():
    process, processes, port, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", EIGHT.devices // processes)
    try:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
        assert (jax.device_count(), jax.local_device_count()) == (EIGHT.devices, EIGHT.devices // processes)
        found = train(EIGHT)
        if process == 0:
            np.savez(path, **found)
        jax.distributed.shutdown()
    except Exception:  # the others would wait for this process for minutes: end at once
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
