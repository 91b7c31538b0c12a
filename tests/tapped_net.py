"""A model of one's own with taps, over data x stage x tensor x ZeRO, whose parts can be replaced by
wrong ones."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import bisect, data, grads, mesh, pipeline, rules, schedule, step, tensor, zero
from parallax.collectives import ring
from parallax.layout import Layout

D, F, L, ROWS = 4, 8, 4, 24
OF_LAYER = {"up": P(None, "tensor"), "down": P("tensor")}
WHERE = lambda net: net.blocks
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Net(eqx.Module):
    """A residual net of L layers.

    Attributes:
        blocks: of the layers, [v, L / v, ...].
        out: the weights of the loss.
    """

    blocks: dict[str, jax.Array]
    out: jax.Array


class Parts(NamedTuple):
    """What a fault may replace: the functions that join devices and microbatches."""

    enter: Any = functools.partial(tensor.copy_to, axis=ring("tensor"))
    leave: Any = functools.partial(tensor.reduce_from, axis=ring("tensor"))
    accumulated: Any = grads.accumulated
    averaged: Any = grads.averaged
    rows: Any = lambda x: x
    key: Any = lambda key: key
    weights: Any = lambda weights: weights
    update: Any = lambda optimizer: optimizer


RIGHT = Parts()


def functions(parts):
    """`(enter, stage, head)`, as pipelines take them."""

    def enter(net, batch):
        return bisect.tap(parts.rows(batch[0]), "in", P("batch"))

    def stage(net, x, batch, position):
        keys = batch[2]

        def layer(x, each):
            weights, number = each
            with bisect.at(layer=number):
                weights = bisect.tap_tree(parts.weights(weights), "layers.*", OF_LAYER)
                up = bisect.tap(
                    jnp.tanh(parts.enter(x) @ weights["up"]),
                    "layers.*.hidden",
                    P("batch", "tensor"),
                )
                down = bisect.tap(parts.leave(up @ weights["down"]), "layers.*.summed", P("batch"))
                kept = jax.vmap(
                    lambda key: jax.random.bernoulli(
                        jax.random.fold_in(parts.key(key), number), 0.7, (D,)
                    )
                )(keys)
                down = bisect.tap(
                    jnp.where(kept, down, jnp.zeros((), x.dtype)), "layers.*.dropped", P("batch")
                )
                return bisect.tap(x + down, "layers.*.out", P("batch")), None

        count = net.blocks["up"].shape[0]
        return lax.scan(
            layer, x, (net.blocks, position * count + jnp.arange(count, dtype=jnp.int32))
        )[0]

    def head(net, x, batch):
        y = bisect.tap(x * bisect.tap(net.out, "out")[None], "head", P("batch"))
        return bisect.tap(jnp.mean((y - batch[1]) ** 2), "loss", P(unreduced=frozenset({"batch"})))

    return enter, stage, head


def made(dtype="float64", chunks=1):
    """The net, and the global batch: rows, targets and keys."""
    r = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(r.standard_normal(shape), dtype)
    blocks = {"up": normal(chunks, L // chunks, D, F), "down": normal(chunks, L // chunks, F, D)}
    windows = data.batch(np.arange(200), seed=0, step=3, size=ROWS, length=2 * D)[:, 1:]
    rows, targets = jnp.split(jnp.asarray(np.sin(windows.astype(np.float64)), dtype), 2, axis=1)
    return Net(blocks, normal(D)), (rows, targets, jax.random.split(jax.random.key(1), ROWS))


def run(parts=RIGHT, *, remat=False, dtype="float64", algorithm=ring, **fields):
    """What `bisect.record` takes: a train step of the net under the layout of these fields."""

    def make():
        layout, replicas = Layout(**fields), algorithm("data")
        net, batch = made(dtype, layout.chunks)
        devices = mesh.make(devices=jax.devices()[: layout.devices], **layout.axes)
        by_stage = "stage" if layout.stage > 1 else None
        of_blocks = (
            rules.match(f"blocks.{name}", P(None, by_stage, *spec))
            for name, spec in OF_LAYER.items()
        )
        whole = rules.first(*of_blocks, rules.match("out", P()))
        share = rules.fsdp("data", size=layout.data, keep={"blocks.**": (0, 1)}, inside=whole)
        of_model, of_moments = share if layout.zero == 3 else whole, share if layout.zero else whole
        specs = rules.specs(net, of_moments, devices)
        enter, stage, head = functions(parts)
        if layout.stage > 1:
            interleaved = {"chunks": layout.chunks} if layout.chunks > 1 else {}
            table = getattr(schedule, layout.schedule)(
                layout.stage, layout.microbatches, **interleaved
            )
            grad = pipeline.value_and_grad(
                enter, stage, head, table, algorithm("stage"), blocks=WHERE
            )
        else:
            loss = pipeline.unpipelined(enter, stage, head, blocks=WHERE)
            grad = jax.value_and_grad(jax.checkpoint(loss) if remat else loss)
            grad = parts.accumulated(grad, microbatches=layout.microbatches)
        optimizer = parts.update(OPTIMIZER)
        if layout.zero == 1:
            grad, optimizer = (
                zero.reduce_scattered(grad, replicas, specs),
                zero.sharded(optimizer, replicas, specs),
            )
        elif layout.zero == 3:
            grad = grads.averaged(zero.gathered_once(grad, replicas, specs), replicas)
        else:
            grad = parts.averaged(grad, replicas)

        def tapped(net, batch):
            value, found = grad(net, batch)
            return value, bisect.tap_tree(found, "gradients", specs, way=bisect.AFTER)

        state, of_state = step.init(
            lambda: net, OPTIMIZER, of_model, devices, optimizer_rule=of_moments
        )
        train = step.make(tapped, optimizer)
        return mesh.spmd(
            train, mesh=devices, in_specs=(of_state, P("data")), out_specs=(of_state, P())
        ), (state, batch)

    return make
