"""A split run of a small GPT-2 beside the record of one device: `python bisected_run.py LAYOUT RECORD` prints what differs first.

The record is made where there is none. Then the package must be the right one.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from parallax import bisect, mesh
from parallax.layout import Layout
from parallax.models import decoder, gpt2

CONFIG = gpt2.Config(layers=2, heads=2, width=8, context=4, vocabulary=19, vocabulary_multiple=4, dropout=0.2)
BATCH = 8


def run(layout):
    """What `bisect.record` takes."""

    def make():
        devices = mesh.make(devices=jax.devices()[: layout.devices], **layout.axes)
        windows = np.random.default_rng(0).integers(0, CONFIG.vocabulary, (BATCH, CONFIG.context + 1)).astype(np.int32)
        compute = decoder.Compute(dtype=jnp.float64, max_norm=0.5)
        options = {"batch": BATCH, "key": jax.random.key(0), "compute": compute}
        prepared = decoder.prepare(gpt2.FAMILY, CONFIG, optax.sgd(0.1), layout, devices, **options)
        return prepared.train, (prepared.init(), windows)

    return make


def said(layout, stored):
    """The first difference, in the words of `bisected.Said`."""
    if not stored.exists():
        bisect.record(run(Layout())).save(stored)
    found = bisect.compare(bisect.load(stored), run(Layout.parse(layout))).first
    if found is None:
        return ["equal", ""]
    lies = ((), ()) if found.between is None else (found.between.collectives, found.between.functions)
    return ["missed" if found.key.way == "result" and "info" in found.key.path else "found", str(found.key), found.looks, *lies]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    print(json.dumps(said(sys.argv[1], Path(sys.argv[2]))))
