"""Prints a hash of the lowered program of several steps, a line each: what
`test_trace_alike` compares between processes."""

import functools
import hashlib

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import Axis, ring
from parallax.grads.devices import summed_over
from parallax.layout import Layout
from parallax.models import decoder, gpt2, llama
from parallax.models.decoder import Compute

SIZES = {"layers": 4, "heads": 4, "width": 16, "context": 8, "vocabulary": 64}
GPT2 = gpt2.Config(**SIZES, dropout=0.1)
LLAMA = llama.Config(
    layers=4, heads=4, groups=2, width=16, hidden=32, context=8, vocabulary=64, experts=4, chosen=2
)
LAYOUTS = (
    "data=2,stage=2,tensor=2,microbatches=2",
    "data=2,stage=2,tensor=2,microbatches=2,zero=1,schedule=zero_bubble",
    "replica=2,data=2,tensor=2,zero=3,remat=block",
    "data=2,context=2,tensor=2,sequence=True,zero=2,microbatches=2",
)


def main():
    for family, config, texts in (
        (gpt2.FAMILY, GPT2, LAYOUTS),
        (llama.FAMILY, LLAMA, ("data=2,expert=2,tensor=2,zero=1",)),
    ):
        for text in texts:
            layout = Layout.parse(text)
            devices = mesh.make(**layout.axes)
            compute = Compute(axes={"data": ring("data")}, max_norm=1.0)
            made = decoder.train_step(
                family, config, optax.adamw(1e-3), layout, devices,
                batch=16, key=jax.random.key(0), compute=compute,
            )  # fmt: skip
            show(text, made.train, made.shapes, np.zeros((16, 9), np.int32))
    by_hand()


def by_hand():
    """Sums whose leaves each have axes of their own, as many for all of them."""
    axes = ("island", "data", "tensor")
    devices = mesh.make(**dict.fromkeys(axes, 2))
    names = {"a": ("data",), "b": ("tensor",), "c": ("island",), "d": ("island", "data"), "e": ()}
    names |= {"f": ("island", "tensor"), "g": ("data", "tensor"), "h": ("tensor",)}
    for over in (axes, ring(axes)):
        added = functools.partial(summed_over, names=names, axis=Axis.of(over))
        mapped = mesh.spmd(added, mesh=devices, in_specs=(P(axes),), out_specs=P(axes))
        show("sums over axes of their own", mapped, dict.fromkeys(names, np.ones((8, 4))))


def show(name, train, *arguments):
    text = jax.jit(train).lower(*arguments).as_text()
    print(name, hashlib.sha256(text.encode()).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
