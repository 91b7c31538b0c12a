"""One GPT-2 train step, five ways: plain and ours on one device, GSPMD and ours (psum, ring) over
data x tensor.

    python benchmarks/train_step.py [--quick]

All of them train the same model on the same batch, with the same accumulation, in one process on
virtual CPU devices; the losses after the last step show it. See benchmarks/README.md for the
columns.
"""

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallax import mesh, rules, step
from parallax.collectives import Algorithm, ring, xla
from parallax.layout import Layout
from parallax.models import decoder, gpt2

REMAT: dict[str, Callable] = {  # the rest is computed again
    "everything": lambda block: block,
    "products": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "nothing": jax.checkpoint,
}


class Task(NamedTuple):
    """What every rival does."""

    config: gpt2.Config
    batch: int
    accumulation: int
    remat: Callable  # wraps a block
    key: jax.Array

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """A fresh one, the same each time."""
        return optax.adamw(3e-4)


def main():
    arguments = parse()
    measure.virtual_devices(arguments.data * arguments.tensor)
    config = gpt2.Config(
        layers=arguments.layers,
        heads=arguments.heads,
        width=arguments.width,
        context=arguments.context,
        vocabulary=arguments.vocabulary,
    )
    task = Task(
        config, arguments.batch, arguments.accumulation, REMAT[arguments.remat], jax.random.key(0)
    )
    shape = (arguments.batch, config.context + 1)
    windows = np.random.default_rng(0).integers(config.vocabulary, size=shape, dtype=np.int32)

    many = Layout(data=arguments.data, tensor=arguments.tensor, microbatches=arguments.accumulation)
    one = Layout(microbatches=arguments.accumulation)
    over = f"data {many.data} x tensor {many.tensor}"
    rivals = {
        "a plain, 1 device": plain(task, windows),
        "b ours, 1 device": ours(task, windows, one, xla),
        f"c GSPMD, {over}": gspmd(task, windows, mesh.make(data=many.data, tensor=many.tensor)),
        f"d ours, psum, {over}": ours(task, windows, many, xla),
        f"e ours, ring, {over}": ours(task, windows, many, ring),
    }
    product, operations = measure.matrix_product()
    times = measure.interleaved(
        {name: rival.run for name, rival in rivals.items()} | {"matrix": product},
        rounds=arguments.rounds,
    )
    rate = operations / min(times["matrix"])
    report(task, rivals, measure.medians(times), rate)


class Rival:
    """A compiled step that carries its own state along."""

    def __init__(self, program: Callable, state: object, windows: jax.Array):
        self.compiled = program.lower(state, windows).compile()
        self.state, self.windows = state, windows

    def run(self):
        """One step. Returns the loss and the gradients' norm."""
        self.state, self.info = self.compiled(self.state, self.windows)
        return self.state, self.info


def plain(task: Task, windows: np.ndarray) -> Rival:
    """Equinox and optax on one device, with no code of ours but the model's."""
    device = jax.devices()[0]
    state = jax.device_put(jax.jit(functools.partial(plain_state, task))(), device)
    program = jax.jit(functools.partial(plain_step, task), donate_argnums=0)
    return Rival(program, state, jax.device_put(windows, device))


def gspmd(task: Task, windows: np.ndarray, mesh_: Mesh) -> Rival:
    """The plain step under `jax.jit` with the same shardings as ours; XLA finds the collectives."""
    shapes = jax.eval_shape(functools.partial(plain_state, task))
    specs = rules.specs(shapes[0], gpt2.rules(), mesh_)
    specs = (specs, rules.optimizer_specs(task.optimizer, shapes[0], specs))
    shardings = mesh.shardings(specs, mesh_)
    state = jax.jit(functools.partial(plain_state, task), out_shardings=shardings)()
    program = jax.jit(
        functools.partial(plain_step, task),
        donate_argnums=0,
        in_shardings=(shardings, mesh.shardings(P("data"), mesh_)),
        out_shardings=(shardings, mesh.shardings(P(), mesh_)),
    )
    return Rival(program, state, mesh.place(windows, P("data"), mesh_))


def ours(task: Task, windows: np.ndarray, layout: Layout, algorithm: Algorithm) -> Rival:
    """`decoder.train_step` over data x tensor."""
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    made = decoder.train_step(
        gpt2.FAMILY,
        task.config,
        task.optimizer,
        layout,
        mesh_,
        batch=task.batch,
        key=task.key,
        compute=decoder.Compute(
            axes={name: algorithm(name) for name in layout.axes}, remat=task.remat
        ),
    )
    state, program = made.init(), made.train
    return Rival(program, state, mesh.place(windows, P("data"), mesh_))


def plain_state(task: Task):
    """The model that `decoder.train_step` makes from the same key, and the optimizer's state."""
    model = gpt2.GPT2(task.config, key=jax.random.split(task.key)[0])
    return model, task.optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def plain_step(task: Task, state, windows):
    """The step as one writes it for one device: a scan over microbatches, then optax."""
    model, optimizer_state = state
    # A part takes every A-th sequence, so that under GSPMD each device cuts its own block.
    parts = windows.reshape(-1, task.accumulation, windows.shape[1]).swapaxes(0, 1)

    def add(sums, part):
        terms = jax.value_and_grad(gpt2.loss)(model, (part, None), remat=task.remat)
        return jax.tree.map(jnp.add, sums, terms), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, model))
    sums, _ = lax.scan(add, zeros, parts)
    loss, gradients = jax.tree.map(lambda total: total / task.accumulation, sums)
    updates, optimizer_state = task.optimizer.update(gradients, optimizer_state, model)
    norm = optax.global_norm(gradients)
    return (eqx.apply_updates(model, updates), optimizer_state), step.Info(
        loss, norm, ~jnp.isfinite(norm)
    )


def report(task: Task, rivals: dict[str, Rival], seconds: dict[str, float], rate: float):
    """Print what was predicted, the table and the ratios."""
    N, tokens = task.config.parameters, task.batch * task.config.context
    work = 6 * N * tokens
    remat = next(name for name, wrap in REMAT.items() if wrap is task.remat)
    print(
        f"{N / 1e6:.1f} M parameters, {task.batch} x {task.config.context} tokens a step in "
        f"{task.accumulation} parts, keeping {remat} of each block\n6 N a token: {work / 1e9:.1f} "
        f"GFLOP a step; matrix rate {rate / 1e9:.0f} GFLOP/s (best round, float32); at that rate a "
        f"step takes {1e3 * work / rate:.0f} ms\n"
    )
    lines = []
    for name, rival in rivals.items():
        sent = measure.collectives(rival.compiled)
        lines.append(
            {
                "rival": name,
                "ms": measure.milliseconds(seconds[name]),
                "of matrix rate": f"{work / seconds[name] / rate:.1%}",
                "temporary MB a device": f"{measure.temporary(rival.compiled) / measure.MB:.1f}",
                "collectives a device (count, MB)": ", ".join(
                    f"{kind} {of.count} ({of.bytes / measure.MB:.1f})"
                    for kind, of in sorted(sent.items())
                )
                or "none",
                "loss": f"{float(rival.info.loss):.5f}",
                "norm": f"{float(rival.info.gradient_norm):.4f}",
            }
        )
    print(measure.table(lines), "\n")
    a, b, c, d, e = list(seconds.values())[:5]
    print(f"ours to plain, 1 device (b/a): {b / a:.3f}")
    print(f"ours with psum to GSPMD (d/c): {d / c:.3f}")
    print(f"ours with ring to GSPMD (e/c): {e / c:.3f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    quick = dict(layers=2, heads=4, width=64, context=32, vocabulary=512, rounds=3)
    usual = dict(layers=6, heads=6, width=384, context=256, vocabulary=8192, rounds=5)
    for name, value in usual.items():
        parser.add_argument(f"--{name}", type=int, default=None, help=f"({value})")
    for name, value in dict(batch=16, accumulation=4, data=4, tensor=2).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"({value})")
    parser.add_argument(
        "--remat",
        choices=REMAT,
        default="products",
        help="what of each block is kept for the backward pass",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a run of some seconds, to see that it works"
    )
    arguments = parser.parse_args()
    for name, value in (quick if arguments.quick else usual).items():
        setattr(
            arguments, name, value if getattr(arguments, name) is None else getattr(arguments, name)
        )
    return arguments


if __name__ == "__main__":
    main()
