"""Pipelines in turn: 1F1B and zero bubble, in lockstep and per stage, interleaved, GPipe, a
tutorial's, one device.

    python benchmarks/pipeline.py [--quick]

All of them train the same transformer blocks on the same batch, P stages on P virtual CPU devices.
See benchmarks/README.md.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, pipeline, tensor
from parallax.collectives import ring, send_next
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import residuals
from parallax.schedule import (
    Schedule,
    gpipe,
    one_f_one_b,
    one_f_one_b_lockstep,
    zero_bubble,
    zero_bubble_lockstep,
)


class Ideal(NamedTuple):
    """What theory says of a rival."""

    ticks: int
    # Of what a stage computes, its forward 1 (devices share the cores, so one alone is as fast as
    # all together).
    time: float
    held: int  # bytes of residuals on a device


class Rival:
    """A compiled gradient function with its arguments, its theory, and its last result."""

    def __init__(self, program: Callable, arguments: tuple, ideal: Ideal):
        self.compiled = program.lower(*arguments).compile()
        self.arguments, self.ideal = arguments, ideal

    def run(self):
        """The loss and the gradients."""
        self.result = self.compiled(*self.arguments)
        return self.result


class Task(NamedTuple):
    """What every rival does: the layers, the microbatches' size, and the stages."""

    config: gpt2.Config
    sequences: int  # in a microbatch
    stages: int
    blocks: gpt2.Block  # the weights, [L, ...]

    def batch(self, microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets."""
        shape = (microbatches * self.sequences, self.config.context, self.config.width)
        return tuple(np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32))

    def apply(self, blocks: gpt2.Block, x: jax.Array) -> jax.Array:
        """Some layers."""
        block = functools.partial(
            gpt2.block, config=self.config, comms=tensor.comms(()), attend=gpt2.attention
        )
        return gpt2.run_blocks(blocks, x, None, block)


def main():
    arguments = parse()
    measure.virtual_devices(arguments.stages)
    config = gpt2.Config(
        layers=arguments.layers,
        heads=arguments.heads,
        width=arguments.width,
        context=arguments.tokens,
        vocabulary=1,
    )
    blocks = jax.jit(lambda: gpt2.GPT2(config, key=jax.random.key(0)).blocks)()
    task = Task(config, arguments.sequences, arguments.stages, blocks)
    mesh_ = mesh.make(stage=arguments.stages)
    describe(task)
    before: dict[str, tuple[float, float]] = {}
    for M in arguments.microbatches:
        rivals = {
            "1F1B lockstep": ours(task, mesh_, M, one_f_one_b_lockstep(task.stages, M)),
            "1F1B lockstep, remat": ours(
                task, mesh_, M, one_f_one_b_lockstep(task.stages, M), remat=True
            ),
            "interleaved, 2 chunks": ours(
                task, mesh_, M, one_f_one_b_lockstep(task.stages, M, chunks=2)
            ),
            "zero bubble lockstep": ours(task, mesh_, M, zero_bubble_lockstep(task.stages, M)),
            "1F1B": ours(task, mesh_, M, one_f_one_b(task.stages, M)),
            "zero bubble": ours(task, mesh_, M, zero_bubble(task.stages, M)),
            "GPipe": ours(task, mesh_, M, gpipe(task.stages, M)),
            "tutorials' (naive twin)": naive(task, mesh_, M),
            "one device": one_device(task, M),
        }
        times = measure.interleaved(
            {name: rival.run for name, rival in rivals.items()}, rounds=arguments.rounds
        )
        check_same({name: rival.result for name, rival in rivals.items()})
        seconds = measure.medians(times)
        for name, rival in rivals.items():
            before.setdefault(name, (seconds[name], rival.ideal.time))
        report(M, rivals, seconds, before)


def ours(task: Task, mesh_: Mesh, M: int, schedule: Schedule, *, remat: bool = False) -> Rival:
    """`pipeline.value_and_grad` of the blocks as [v, L / v, ...]."""
    v = schedule.chunks

    def chunked(w):
        return w.reshape(v, -1, *w.shape[1:])

    grad = pipeline.value_and_grad(
        lambda blocks, part: part[0],
        lambda blocks, x, part, position: task.apply(blocks, x),
        lambda blocks, x, part: jnp.mean((x - part[1]) ** 2),
        schedule,
        ring("stage"),
        blocks=lambda blocks: blocks,
        save=pipeline.inputs if remat else pipeline.residuals,
    )
    time = (
        schedule.makespan(1, 3 if remat else 2)
        if schedule.weight is None
        else schedule.makespan(1, 1, 1)
    )
    held = schedule.slot_count * (
        input_bytes(task) if remat else residual_bytes(task, v * task.stages)
    )
    held += schedule.deferred_count * handed_bytes(task, v * task.stages)
    if schedule.per_stage:  # a stage that rests computes nothing, and what came may wait
        time, held = 3 * M, held + (schedule.arrival_count + 1) * input_bytes(task)
    return spread(
        task, mesh_, M, grad, P(None, "stage"), chunked, Ideal(schedule.ticks, time, held)
    )


def naive(task: Task, mesh_: Mesh, M: int) -> Rival:
    """The tutorials' pipeline: a scan over forward ticks with a `ppermute` in each, and `jax.grad`
    through all of it."""

    def loss(blocks, batch):
        x, targets = grads.split_into_microbatches(batch, M)
        stage, last = lax.axis_index("stage"), lax.axis_size("stage") - 1

        def tick(received, t):
            entering = lax.dynamic_index_in_dim(x, jnp.minimum(t, M - 1), keepdims=False)
            y = task.apply(blocks, jnp.where(stage == 0, entering, received))
            target = lax.dynamic_index_in_dim(targets, jnp.maximum(t - last, 0), keepdims=False)
            counts = (stage == last) & (t >= last)
            return send_next(y, "stage"), jnp.where(
                counts, jnp.mean((y - target) ** 2), jnp.zeros(())
            )

        start = lax.pcast(jnp.zeros_like(x[0]), "stage", to="varying")
        return jnp.sum(lax.scan(tick, start, jnp.arange(M + last))[1]) / M

    def grad(blocks, batch):
        loss_here, gradients = jax.value_and_grad(loss)(blocks, batch)
        return lax.psum(loss_here, "stage"), gradients

    ticks = M + task.stages - 1
    ideal = Ideal(2 * ticks, 3 * ticks, ticks * residual_bytes(task, task.stages))
    return spread(task, mesh_, M, grad, P("stage"), lambda w: w, ideal)


def spread(
    task: Task, mesh_: Mesh, M: int, grad: Callable, spec: P, shaped: Callable, ideal: Ideal
) -> Rival:
    """`grad` over the stages, its blocks reshaped by `shaped` and split by `spec`."""
    blocks = mesh.place(jax.tree.map(shaped, task.blocks), spec, mesh_)
    batch = mesh.place(task.batch(M), P(), mesh_)
    program = jax.jit(mesh.spmd(grad, mesh=mesh_, in_specs=(spec, P()), out_specs=(P(), spec)))
    return Rival(program, (blocks, batch), ideal)


def one_device(task: Task, M: int) -> Rival:
    """All layers on one device, microbatches one after another."""
    grad = jax.value_and_grad(
        lambda blocks, batch: jnp.mean((task.apply(blocks, batch[0]) - batch[1]) ** 2)
    )
    arguments = jax.device_put((task.blocks, task.batch(M)), jax.devices()[0])
    program = jax.jit(grads.accumulated(grad, microbatches=M))
    return Rival(program, arguments, Ideal(M, 3 * M, residual_bytes(task, 1)))


def residual_bytes(task: Task, parts: int) -> int:
    """What the backward of one part of the layers needs of one microbatch, weights left out."""

    def kept(blocks, x):
        leaves = jax.tree.leaves(jax.vjp(task.apply, blocks, x)[1])
        return [leaf for leaf in leaves if not any(leaf is w for w in jax.tree.leaves(blocks))]

    part = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct((w.shape[0] // parts, *w.shape[1:]), w.dtype), task.blocks
    )
    return sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.eval_shape(kept, part, task.batch(1)[0])
    )


def handed_bytes(task: Task, parts: int) -> int:
    """What the input's gradient of one part of the layers hands on to that of the weights, of one
    microbatch."""
    layout = Layout(microbatches=2)
    layer = residuals.handed(task.config, layout, layout.global_batch(task.sequences), short=4)
    return int(task.config.layers // parts * layer)


def input_bytes(task: Task) -> int:
    """What `remat` keeps of one microbatch."""
    return task.batch(1)[0].nbytes


def check_same(results: dict[str, tuple[jax.Array, gpt2.Block]]):
    """Refuse rivals that do not compute the same loss and gradients."""
    norms = {name: (float(loss), norm_of(gradients)) for name, (loss, gradients) in results.items()}
    for name, found in norms.items():
        if not np.allclose(found, norms["one device"], rtol=1e-4):
            raise AssertionError(
                f"{name}: loss and gradient norm are {found}, one device's {norms['one device']}."
            )


def norm_of(gradients: gpt2.Block) -> float:
    """The global norm, on the host."""
    return float(
        np.sqrt(
            sum(
                np.sum(np.square(np.asarray(leaf), dtype=np.float64))
                for leaf in jax.tree.leaves(gradients)
            )
        )
    )


def describe(task: Task):
    """Print the task."""
    config = task.config
    count = sum(leaf.size for leaf in jax.tree.leaves(task.blocks))
    print(
        f"{config.layers} layers of width {config.width}, {count / 1e6:.2f} M parameters, "
        f"{task.stages} stages; a microbatch is {task.sequences} x {config.context} tokens, "
        f"{6 * count * task.sequences * config.context / 1e9:.2f} GFLOP\n"
    )


def report(
    M: int,
    rivals: dict[str, Rival],
    seconds: dict[str, float],
    before: dict[str, tuple[float, float]],
):
    """Print the table of one M. `before` holds the seconds and the predicted time of each rival at
    the first M."""
    twin = "tutorials' (naive twin)"
    memory = {name: measure.temporary(rival.compiled) for name, rival in rivals.items()}
    lines = []
    for name, rival in rivals.items():
        first_seconds, first_time = before[name]
        to_first = seconds[name] / first_seconds, rival.ideal.time / first_time
        to_twin = seconds[name] / seconds[twin], rival.ideal.time / rivals[twin].ideal.time
        megabytes = memory[name] / measure.MB, rival.ideal.held / measure.MB
        lines.append(
            {
                f"M = {M}": name,
                "ticks": rival.ideal.ticks,
                "work": f"{rival.ideal.time:g}",
                "ms": measure.milliseconds(seconds[name]),
                "to first M (predicted)": "{:.2f} ({:.2f})".format(*to_first),
                "to twin (predicted)": "{:.2f} ({:.2f})".format(*to_twin),
                "temporary MB (held)": "{:.2f} ({:.2f})".format(*megabytes),
                "memory to twin": f"{memory[name] / memory[twin]:.2f}",
            }
        )
    print(measure.table(lines), "\n", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    quick = dict(microbatches=[8, 16], layers=8, heads=2, width=32, tokens=16, rounds=3)
    usual = dict(microbatches=[8, 16, 32, 64], layers=8, heads=4, width=128, tokens=128, rounds=5)
    for name, value in usual.items():
        parser.add_argument(
            f"--{name}", type=int, nargs="+" if name == "microbatches" else None, help=f"({value})"
        )
    parser.add_argument("--stages", type=int, default=4, help="(4)")
    parser.add_argument("--sequences", type=int, default=1, help="in a microbatch (1)")
    parser.add_argument(
        "--quick", action="store_true", help="a run of some seconds, to see that it works"
    )
    found = parser.parse_args(arguments)
    for name, value in (quick if found.quick else usual).items():
        setattr(found, name, value if getattr(found, name) is None else getattr(found, name))
    return found


if __name__ == "__main__":
    main()
