"""GPT-2's gradients summed over processes by psum and by the ring, leaf by leaf and in buckets.

    python benchmarks/buckets.py [--quick]

Every process has one device, and talks over gloo. The layers are not stacked: 148 leaves for GPT-2
small, as most frameworks hold them. See benchmarks/README.md.
"""

import argparse
import functools
import sys
from collections.abc import Sequence

import jax
import measure
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import Algorithm, Axis, bucketed, buckets, ring, xla
from parallax.models import gpt2

ALGORITHMS: dict[str, Algorithm] = {"psum": xla, "ring": ring}


def main():
    arguments = parse()
    if arguments.process is not None:
        run = functools.partial(report, arguments)
        return measure.one_of_many(
            run, port=arguments.port, processes=arguments.processes, process=arguments.process
        )
    given = ["--quick"] if arguments.quick else []
    flags = [
        f"--processes={arguments.processes}",
        f"--port={measure.free_port()}",
        f"--rounds={arguments.rounds}",
        *given,
    ]
    commands = [
        [sys.executable, __file__, f"--process={i}", *flags] for i in range(arguments.processes)
    ]
    first, *_ = measure.run_together(commands, timeout=arguments.timeout)
    print(first[first.index("A GPT-2") :])


def leaves_of(config: gpt2.Config) -> list[tuple[int, ...]]:
    """The shapes of a model's arrays, each layer's by itself."""
    model = jax.eval_shape(lambda: gpt2.GPT2(config, key=jax.random.key(0)))
    stacked = {id(leaf) for leaf in jax.tree.leaves(model.blocks)}
    ends = [leaf.shape for leaf in jax.tree.leaves(model) if id(leaf) not in stacked]
    return ends + [
        leaf.shape[1:] for _ in range(config.layers) for leaf in jax.tree.leaves(model.blocks)
    ]


def report(arguments: argparse.Namespace):
    """Time all rivals in turn, and print the table."""
    config = (
        gpt2.Config(layers=2, heads=2, width=32, context=16, vocabulary=64)
        if arguments.quick
        else gpt2.SMALL
    )
    world, shapes = mesh.make(data=arguments.processes), leaves_of(config)
    gradients = [placed(world, shape, i) for i, shape in enumerate(shapes)]
    rivals = {f"{name}, leaf by leaf": algorithm("data") for name, algorithm in ALGORITHMS.items()}
    rivals |= {
        f"{name}, buckets": bucketed(algorithm("data"), nbytes=arguments.nbytes)
        for name, algorithm in ALGORITHMS.items()
    }
    programs = {name: compiled(world, axis, gradients) for name, axis in rivals.items()}
    runs = {name: functools.partial(program, gradients) for name, program in programs.items()}
    expected = arguments.processes * (arguments.processes + 1) / 2
    for name, run in runs.items():
        if not all(
            (np.asarray(total.addressable_data(0)) == expected + i).all()
            for i, total in enumerate(run())
        ):
            raise AssertionError(f"{name}: the sums are wrong.")
    seconds = measure.medians(measure.interleaved(runs, rounds=arguments.rounds))
    nbytes = 4 * sum(map(np.prod, shapes))
    packed = buckets.assign_buckets(
        [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes], arguments.nbytes
    )
    print(
        f"A GPT-2 with {len(shapes)} arrays of {measure.size(nbytes)} in all, over "
        f"{arguments.processes} processes\n"
    )
    lines = []
    for name, program in programs.items():
        algorithm = name.split(",")[0]
        sent = measure.collectives(program)
        lines.append(
            {
                "rival": name,
                "reductions (predicted)": len(packed) if "buckets" in name else len(shapes),
                "messages": sum(kind.count for kind in sent.values()),
                "ms": measure.milliseconds(seconds[name]),
                "to leaf by leaf": f"{seconds[name] / seconds[f'{algorithm}, leaf by leaf']:.2f}",
                "to psum, leaf by leaf": f"{seconds[name] / seconds['psum, leaf by leaf']:.2f}",
                "temporary MB": f"{measure.temporary(program) / measure.MB:.1f}",
            }
        )
    print(measure.table(lines), flush=True)


def placed(world: jax.sharding.Mesh, shape: tuple[int, ...], number: int) -> jax.Array:
    """An array on each device, full of one number: that of the device, and on the first also that
    of the array."""

    def block(index):
        device = index[0].start or 0
        return np.full((1, *shape), device + 1 + (number if device == 0 else 0), np.float32)

    return jax.make_array_from_callback(
        (world.size, *shape), NamedSharding(world, P("data")), block
    )


def compiled(
    world: jax.sharding.Mesh, axis: Axis, gradients: list[jax.Array]
) -> jax.stages.Compiled:
    """The program that sums every array over the processes."""

    def local(leaves):
        return axis.all_reduce([leaf[0] for leaf in leaves])

    return (
        jax.jit(mesh.spmd(local, mesh=world, in_specs=(P("data"),), out_specs=P()))
        .lower(gradients)
        .compile()
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4, help="(4)")
    parser.add_argument("--rounds", type=int, default=5, help="(5)")
    parser.add_argument("--nbytes", type=int, default=buckets.NBYTES, help="of a bucket (1 MB)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds (900)")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it works")
    parser.add_argument("--process", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
