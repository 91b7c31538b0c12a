# pyright: strict
"""A user's file with every name of the contract, which type checkers read strictly (`.ci/run`);
`test_user.py` runs it."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from parallax import (
    cross_entropy,
    data,
    grads,
    hardware,
    mesh,
    optimizers,
    pipeline,
    plan,
    rules,
    schedule,
    step,
    tensor,
    zero,
)
from parallax._typing import PyTree
from parallax.collectives import (
    Axis,
    ErrorFeedback,
    bucketed,
    doubling,
    halving,
    hierarchical,
    quantized,
    ring,
    torus,
    two_rings,
    xla,
)
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.schedule import Schedule

Params = dict[str, Array]
Batch = dict[str, Array]
Numbers = Float[Array, "..."]

# What JAX leaves partly untyped.
GradientOf = Callable[[Callable[..., Numbers]], grads.Grad]
value_and_grad: GradientOf = jax.value_and_grad  # pyright: ignore


def collectives(x: Numbers) -> list[Numbers]:
    """The drop-ins for `lax`'s, on an array; they take trees as well."""
    sums = [
        algorithm.all_reduce(x, "data")
        for algorithm in (ring, two_rings, halving, doubling, quantized, xla)
    ]
    sums += [
        torus.all_reduce(x, ("data", "tensor")),
        hierarchical.all_reduce(x, ("data", "tensor")),
        ring.all_mean(x, "data"),
    ]
    parts = [
        algorithm.reduce_scatter(x, "data", scatter_dimension=0, tiled=True)
        for algorithm in (ring, halving, two_rings, xla)
    ]
    wholes = [
        algorithm.all_gather(x, "data", axis=0, tiled=True)
        for algorithm in (ring, halving, two_rings, xla)
    ]
    return [*sums, *parts, *wholes, ring.all_to_all(x, "data", 0, 1, tiled=True)]


def along(x: Numbers) -> Numbers:
    """An axis with who moves data along it."""
    axis: Axis = ring("data")
    x = axis.all_gather(axis.reduce_scatter(x, tiled=True), tiled=True)
    x = Axis.of(("tensor", bucketed(axis))).all_reduce(x)
    total, _ = ErrorFeedback("data").all_reduce(x, ErrorFeedback("data").initial(x))
    return total * axis.size() * axis.index().astype(total.dtype)


def tensor_parallel(
    x: Float[Array, "batch width"], w: Params, ids: Int[Array, " batch"]
) -> Numbers:
    """One pair of layers, an embedding and a loss over `tensor`."""
    axis = ring("tensor")
    y = tensor.row(jnp.tanh(tensor.column(x, w["up"], w["b"], axis)), w["down"], None, axis)
    y = tensor.reduce_from(tensor.copy_to(y, "tensor") @ w["up"], axis) + tensor.embed(
        w["table"], ids, axis
    )
    return tensor.cross_entropy(y, ids, axis) + cross_entropy.mean(
        tensor.copy_to(y, axis), w["table"], ids, axis
    )


def loss(params: Params, batch: Batch) -> Float[Array, ""]:
    """Any loss function."""
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)


RULE = rules.first(rules.match("b", P()), rules.fsdp("data", size=8))


def placed(
    params: Params, optimizer: optax.GradientTransformation, world: Mesh
) -> tuple[PyTree, PyTree]:
    """Where the parameters and the optimizer's state live."""
    specs = rules.specs(params, RULE, world)
    return mesh.place(params, specs, world), rules.optimizer_specs(optimizer, params, specs)


def train_steps(specs: PyTree) -> list[step.Step]:
    """Data parallelism, and ZeRO in three stages."""
    optimizer = optax.adamw(3e-4)
    grad = value_and_grad(loss)
    plain = grads.clipped(
        grads.averaged(grads.accumulated(grad, microbatches=4), ring("data")), 1.0
    )
    tokens = grads.summed(grad, "tensor")
    one = zero.reduce_scattered(grads.accumulated(grad, microbatches=4), ring("data"), specs)
    three = grads.averaged(value_and_grad(zero.gathered(loss, ring("data"), specs)), "data")
    sharded = zero.sharded(optimizer, ring("data"), specs)
    whole = optimizers.whole(optax.lamb(1e-3), "data", specs)
    muon = optimizers.by_matrix(optax.contrib.muon(1e-3), ring("data"), specs, layers={"w": 0})
    return [
        step.make(one, whole),
        step.make(one, muon),
        step.make(plain, optimizer),
        step.make(tokens, optimizer),
        step.make(one, sharded),
        step.make(three, optimizer),
    ]


def pipelined() -> grads.Grad:
    """Any functions on any schedule."""

    def embed(params: Params, part: Batch) -> Numbers:
        return part["x"] @ params["in"]

    def stage(params: Params, x: Numbers, part: Batch, position: Array) -> Numbers:
        return jnp.tanh(x @ params["blocks"])

    def head(params: Params, x: Numbers, part: Batch) -> Float[Array, ""]:
        return jnp.mean((x @ params["out"] - part["y"]) ** 2)

    blocks: Callable[[Params], Array] = lambda params: params["blocks"]
    assert pipeline.unpipelined(embed, stage, head, blocks=blocks)
    assert pipeline.value(
        embed, stage, head, schedule.one_f_one_b_lockstep(4, 8), "stage", blocks=blocks
    )
    assert pipeline.stored(blocks, schedule.looped_placement(4)).to_disk
    return pipeline.value_and_grad(
        *(embed, stage, head, schedule.one_f_one_b_lockstep(4, 8), "stage"),
        blocks=blocks,
        save=pipeline.inputs,
        send=pipeline.split_over("tensor"),
    )


def schedules(path: Path) -> list[Schedule]:
    """Tables, their makers, and files of them."""
    tables = [
        schedule.gpipe(4, 8),
        schedule.one_f_one_b_lockstep(4, 8, chunks=2),
        schedule.zero_bubble_lockstep(4, 8),
    ]
    turns = schedule.zero_bubble(4, 8, in_flight=6)
    assert turns.in_flight.max() == 6
    schedule.to_csv(tables[0], path)
    assert tables[0].makespan() > tables[0].bubble() > 0
    assert len(tables[0].phases) > 0
    assert tables[0].in_flight.max() > 0
    return [*tables, turns, schedule.from_csv(path)]


def init(make: Callable[[], Params], world: Mesh) -> tuple[step.State, step.State]:
    """A state made in its place."""
    return step.init(make, optax.adamw(3e-4), RULE, world)


def gpt2_step(world: Mesh, path: Path) -> tuple[step.State, step.Info]:
    """The recipe: planned, compiled, certified, run; the weights saved and loaded."""
    config, layout = (
        gpt2.Config(layers=2, heads=2, width=32, context=16, vocabulary=64),
        Layout(data=4, tensor=2, zero=1),
    )
    planned = plan.plan(config, layout, hardware.A100, batch=8, axes={"data": halving("data")})
    assert planned.memory.peak > 0
    assert plan.search(config, 8, hardware.A100, batch=8)
    prepared = decoder.train_step(
        *(gpt2.FAMILY, config, optax.adamw(3e-4), layout, world),
        batch=8,
        key=jax.random.key(0),
        compute=decoder.Compute(axes={"data": halving("data")}, max_norm=1.0),
    )
    windows = data.batch(
        np.frombuffer(b"It was." * 99, np.uint8) % 64, seed=0, step=0, size=8, length=16
    )
    compiled = prepared.train.lower(prepared.shapes, windows).compile()
    assert certificate.read(compiled, world)
    state, info = prepared.train(prepared.init(), windows)
    gpt2.save(gpt2.GPT2(config, key=jax.random.key(0)), path)
    assert gpt2.load(path).config == config
    return state, info


def mapped(f: Callable[[Numbers], Numbers], world: Mesh) -> Callable[[Numbers], Numbers]:
    """The one wrapper of `shard_map`."""
    return mesh.spmd(f, mesh=world, in_specs=(P("data"),), out_specs=P())
