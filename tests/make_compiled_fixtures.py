"""Makes the saved programs of `tests/fixtures/compiled`: run it once where the TPU's compiler is,
and once where the GPU's is.

    python tests/make_compiled_fixtures.py v5e:2x4
    python tests/make_compiled_fixtures.py "8 x h100"
    python tests/make_compiled_fixtures.py "2 x v5e:2x2"

The texts are as the compilers give them, but for the folders in the paths of sources.
"""

import functools
import gzip
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallax import mesh, plan
from parallax.collectives import ring
from parallax.compiled import targets
from parallax.layout import Layout
from parallax.models import decoder, gpt2

FOLDER = Path(__file__).parent / "fixtures" / "compiled"
CONFIG = gpt2.Config(layers=2, heads=2, width=128, context=128, vocabulary=512)
LAYOUT, BATCH = Layout(data=4, tensor=2, precision="bfloat16"), 8


def step(there):
    """A GPT-2 step over data x tensor."""
    world = mesh.make(devices=there.devices, **LAYOUT.axes)
    compute = decoder.Compute(axes={name: ring(name) for name in LAYOUT.axes})
    options = {"batch": BATCH, "key": jax.random.key(0), "compute": compute}
    prepared = decoder.train_step(gpt2.FAMILY, CONFIG, plan.ADAMW, LAYOUT, world, **options)
    windows = jax.ShapeDtypeStruct(
        (BATCH, CONFIG.context + 1), jnp.int32, sharding=mesh.shardings(P("data"), world)
    )
    return targets.compile(prepared.train, prepared.shapes, windows, target=there)


def guarded(there, name):
    """A ring's gather or sum of a product and a sum, which a compiler could compute twice."""
    world, spec = mesh.make(devices=there.devices, x=8), P("x") if name == "all_gather" else P()
    of = functools.partial(getattr(ring, name), **({"tiled": True} if name == "all_gather" else {}))
    program = jax.jit(
        mesh.spmd(lambda x: of(x * 1.5 + 1, "x"), mesh=world, in_specs=(P("x"),), out_specs=spec)
    )
    x = jax.ShapeDtypeStruct((8 * 64, 128), jnp.float32, sharding=mesh.shardings(P("x"), world))
    return targets.compile(program, x, target=there)


def between(there, name):
    """A sum over the axis between two slices, by our ring or by XLA, after one inside each."""
    world, spec = mesh.make(devices=there.devices, far=2, near=4), P(("far", "near"))
    of = ring.all_reduce if name == "ring" else jax.lax.psum
    program = jax.jit(
        mesh.spmd(
            lambda x: of(jax.lax.psum(x, "near"), "far"),
            mesh=world,
            in_specs=(spec,),
            out_specs=P(),
        )
    )
    x = jax.ShapeDtypeStruct((8 * 1024, 128), jnp.float32, sharding=mesh.shardings(spec, world))
    return targets.compile(program, x, target=there)


def halves(there):
    """A ring along an axis of which some neighbours are in one slice and others in two."""
    world, spec = mesh.make(devices=there.devices, data=8), P("data")
    program = jax.jit(
        mesh.spmd(
            lambda x: ring.all_reduce(x * 2, "data"), mesh=world, in_specs=(spec,), out_specs=spec
        )
    )
    x = jax.ShapeDtypeStruct((8 * 64, 128), jnp.float32, sharding=mesh.shardings(spec, world))
    return targets.compile(program, x, target=there)


def hidden(there):
    """Weights that are gathered in front of each product, as ZeRO-3 does: XLA makes all gathers but
    the first asynchronous."""
    world, spec = mesh.make(devices=there.devices, data=8), P("data")

    def product(x, weights):
        for weight in weights:
            x = jnp.tanh(x @ jax.lax.all_gather(weight, "data", tiled=True))
        return x

    program = jax.jit(mesh.spmd(product, mesh=world, in_specs=(spec, spec), out_specs=spec))
    like = lambda rows: jax.ShapeDtypeStruct(
        (rows, 2048), jnp.bfloat16, sharding=mesh.shardings(spec, world)
    )
    return targets.compile(program, like(8 * 2048), [like(2048)] * 3, target=there)


def save(kind, made):
    """The texts, without the folders of this machine."""
    for what, program in made.items():
        text = re.sub(r'"/[^"]*/(parallax|site-packages|tests)/', r'"/src/\1/', program.text)
        (FOLDER / f"{kind}_{what}.txt.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main(name):
    there = targets.target(name)
    kind = there.hardware.platform
    if name.startswith("2 x"):
        made = {f"slices_{what}": between(there, what) for what in ("ring", "psum")}
        return save(kind, made | {"slices_halves": halves(there)})
    made = {
        "step": step(there),
        "all_gather": guarded(there, "all_gather"),
        "all_reduce": guarded(there, "all_reduce"),
    }
    if kind == "tpu":
        made["hidden"] = hidden(there)
    save(kind, made)
    places = [[int(k) for k in device.coords] for device in made["step"].mesh.devices.flat]
    about = {"target": name, "memory": made["step"].memory, "places": places}
    (FOLDER / f"{kind}_step.json").write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1])
