"""A step of Llama 3's 8 B over 64 devices, compiled from shapes alone, beside its trace; a process
of its own has so many.

Run: python tests/eight_billion.py. Prints one line of JSON: what was foretold, and what the program
has.
"""

import dataclasses
import json
import os
import time

import flags

os.environ.update(flags.quick())  # before the first compilation

import jax
import jax.numpy as jnp

from parallax import mesh, plan
from parallax.collectives import ring
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import decoder, llama

LAYOUT = Layout.parse("data=4,context=4,tensor=4,zero=3,sequence=True,remat=block")
CONFIG, BATCH = dataclasses.replace(llama.B8, context=8192), 4


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", LAYOUT.devices)
    world = mesh.make(**LAYOUT.axes)
    prepared = decoder.train_step(
        *(llama.FAMILY, CONFIG, plan.ADAMW, LAYOUT, world),
        batch=BATCH,
        key=jax.random.key(0),
        compute=decoder.Compute(axes={name: ring(name) for name in LAYOUT.axes}),
    )
    split = mesh.shardings(jax.P(LAYOUT.batch_axes), world)
    shapes = (
        prepared.shapes,
        jax.ShapeDtypeStruct((BATCH, CONFIG.context + 1), jnp.int32, sharding=split),
    )
    began = time.process_time()
    traced = plan.trace(prepared.train, shapes, world, platform="cpu")
    read = time.process_time()
    compiled = prepared.train.lower(*shapes).compile()
    memory, ended, sent = compiled.memory_analysis(), time.process_time(), {}
    for entry in certificate.read(compiled, world):
        sent[entry.axes] = sent.get(entry.axes, 0) + entry.bytes
    assert memory is not None
    along = lambda found: {" x ".join(axes): size for axes, size in found.items()}
    print(
        json.dumps(
            {
                "parameters": CONFIG.parameters,
                "foretold": {
                    "arguments": traced.arguments,
                    "temporaries": traced.temporaries,
                    "sent": along(traced.sent),
                },
                "program": {
                    "arguments": memory.argument_size_in_bytes,
                    "temporaries": memory.temp_size_in_bytes,
                    "sent": along(sent),
                },
                "conditional": " conditional(" in (compiled.as_text() or ""),
                "seconds of processor time": {"trace": read - began, "compile": ended - read},
            }
        )
    )


if __name__ == "__main__":
    main()
