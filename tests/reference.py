"""The plain versions: one device, the pipeline that `jax.grad` walks back through, and how near is
near enough."""

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from parallax import pipeline
from parallax.collectives import ring
from parallax.grads import split_into_microbatches
from parallax.models import decoder, gpt2

FLOAT64 = jnp.dtype("float64")
EXACT = 1e-11  # in float64: a few thousand roundings of 1e-16, with room


def one_device(embed: Callable, stage: Callable, head: Callable, positions: int) -> Callable:
    """What a pipeline computes: the loss of the whole batch, each chunk of layers after the one
    before."""

    def loss(params, batch):
        x = embed(params, batch)
        blocks, functions = eqx.partition(params.blocks, eqx.is_array)
        blocks = jax.tree.map(lambda w: w.reshape(positions, -1, *w.shape[2:]), blocks)
        for k in range(positions):
            own = eqx.combine(jax.tree.map(operator.itemgetter(k), blocks), functions)
            made = stage(_with_blocks(params, own), x, batch, jnp.asarray(k, jnp.int32))
            x = made.x if isinstance(made, pipeline.Output) else made
        return head(params, x, batch)

    return loss


def _with_blocks(params, blocks):
    return eqx.tree_at(lambda params: params.blocks, params, blocks)


def naive_pipeline(
    embed: Callable, stage: Callable, head: Callable, microbatches: int, axis_name: str
) -> Callable:
    """The same loss, pipelined as a first lesson does it: in tick t stage s runs microbatch t - s,
    if there is one.

    Inside `mesh.spmd`, with one chunk a stage. Its gradient is what `jax.grad` makes of it: all
    backward ticks after all forward ticks, in reverse, so that every stage holds what each of M + P
    - 1 ticks left behind.
    """

    def loss(params, batch):
        P, s = lax.axis_size(axis_name), lax.axis_index(axis_name)
        own = jax.tree.map(lambda w: w[0] if eqx.is_array(w) else w, params.blocks)
        parts = split_into_microbatches(batch, microbatches)

        def tick(carry, t):
            x, total = carry
            part = jax.tree.map(lambda leaf: leaf[jnp.clip(t - s, 0, microbatches - 1)], parts)
            y = stage(_with_blocks(params, own), jnp.where(s == 0, embed(params, part), x), part, s)
            counts = (s == P - 1) & (t >= s) & (t - s < microbatches)
            total += jnp.where(counts, head(params, y, part), jnp.zeros((), total.dtype))
            return (lax.ppermute(y, axis_name, [(i, i + 1) for i in range(P - 1)]), total), None

        x = jnp.zeros_like(embed(params, jax.tree.map(lambda leaf: leaf[0], parts)))
        zeros = lax.pcast((x, jnp.zeros((), x.dtype)), axis_name, to="varying")
        (_, total), _ = lax.scan(tick, zeros, jnp.arange(microbatches + P - 1, dtype=jnp.int32))
        return lax.psum(total, axis_name) / microbatches

    return loss


class Run(NamedTuple):
    """Training a decoder: where it began, its first gradients, its losses, and where it ended."""

    start: Any
    gradients: Any
    losses: list[float]
    end: Any


class Recorded(NamedTuple):
    """An optimizer's state, and the gradients it saw last."""

    inner: optax.OptState
    gradients: optax.Updates


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer`, which also remembers the gradients that it was given."""

    def update(gradients, state, params=None):
        updates, inner = optimizer.update(gradients, state.inner, params)
        return updates, Recorded(inner, gradients)

    return optax.GradientTransformation(
        lambda params: Recorded(optimizer.init(params), jax.tree.map(jnp.zeros_like, params)),
        update,
    )


# AdamW divides by sqrt(v) + eps. A gradient that is all rounding (of a key's bias: its softmax does
# not see it) is some 1e-17: with the usual eps of 1e-8 it would move its weight by 1e-12 a step,
# whatever the losses do; with 1e-6 by 1e-14.
OPTIMIZER = recording(optax.adamw(1e-3, eps=1e-6))


def windows(config: decoder.Configuration, seed: int, number: int, batch: int) -> np.ndarray:
    """The global batch of one step."""
    return (
        np.random.default_rng((seed, number))
        .integers(0, config.vocabulary, (batch, config.context + 1))
        .astype(np.int32)
    )


@functools.cache
def gpt2_on_one_device(
    config: decoder.Configuration,
    seed: int,
    steps: int,
    batch: int,
    kind=gpt2,
    apart=lambda batch: batch,
) -> Run:
    """`decoder.train_step` with nothing of ours but the model and its keys: the whole batch at
    once, `jax.grad`, optax."""
    weights_key, dropout_key = jax.random.split(jax.random.key(seed))

    @jax.jit
    def train(model, optimizer, number, tokens):
        keys = (
            decoder.sequence_keys(dropout_key, number, batch)
            if kind.FAMILY.uses_dropout(config)
            else None
        )
        loss, gradients = jax.value_and_grad(kind.loss)(model, apart(decoder.Batch(tokens, keys)))
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # optax mixes float32 schedules with float64 weights
            updates, optimizer = OPTIMIZER.update(gradients, optimizer, model)
        return jax.tree.map(jnp.add, model, updates), optimizer, loss

    start = model = jax.jit(lambda: kind.FAMILY.model(config, key=weights_key, dtype=FLOAT64))()
    optimizer, losses, first = OPTIMIZER.init(model), [], None
    for number in range(steps):
        model, optimizer, loss = train(
            model, optimizer, jnp.asarray(number, jnp.int32), windows(config, seed, number, batch)
        )
        first = first or optimizer.gradients
        losses.append(float(loss))
    return Run(start, first, losses, model)


def moved_by(algorithm, names=("data", "stage", "tensor")):
    """Every axis of a layout, moved by `algorithm`."""
    return {name: algorithm(name) for name in names}


def gpt2_on(
    layout, mesh, config, seed: int, steps: int, batch: int, *, algorithm=ring, kind=gpt2, **compute
) -> Run:
    """The same run by `decoder.train_step` under `layout` on `mesh`, its blocks [L, ...] again, on
    the host."""
    host = lambda model: jax.tree.map(np.asarray, decoder.joined(kind.FAMILY, layout, model))
    with jax.numpy_dtype_promotion("standard"):
        made = decoder.train_step(
            *(kind.FAMILY, config, OPTIMIZER, layout, mesh),
            batch=batch,
            key=jax.random.key(seed),
            compute=decoder.Compute(
                axes=moved_by(algorithm, layout.axes), dtype=FLOAT64, **compute
            ),
        )
        state, train = made.init(), made.train
        start, losses, first = host(state.model), [], None
        for number in range(steps):
            state, info = train(state, windows(config, seed, number, batch))
            first = first or host(state.optimizer.gradients)
            losses.append(float(info.loss))
    return Run(start, first, losses, host(state.model))


def assert_same_run(run: Run, plain: Run) -> None:
    """The weights begin with the same bits; the losses, the gradients and the weights at the end
    are those of one device."""
    jax.tree.map(np.testing.assert_array_equal, run.start, plain.start)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=EXACT)
    assert_close(run.gradients, plain.gradients, EXACT)
    assert_close(run.end, plain.end, EXACT)


def assert_close(tree, reference, tolerance: float) -> None:
    """Every leaf within `tolerance` of the largest number in the reference's leaf, and of the same
    shape and type."""

    def check(path, leaf, right):
        leaf, right = np.asarray(leaf), np.asarray(right)
        assert (leaf.shape, leaf.dtype) == (right.shape, right.dtype)
        atol = tolerance * np.max(np.abs(right), initial=0)
        np.testing.assert_allclose(
            leaf, right, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path)
        )

    jax.tree.map_with_path(check, tree, reference)


def products(module, name):
    """The operations in the products of a compiled program's computation, loops counted out: 2 for
    each term of each sum."""
    shape = lambda text: [
        int(size) for size in re.match(r"\w+\[([\d,]*)\]", text)[1].split(",") if size
    ]
    inside, total = module[name], 0
    results = {instruction.name: instruction.result for instruction in inside}
    for each in inside:
        if each.opcode == "dot":
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)[1].split(
                ","
            )
            left = shape(results[each.operands[0]])
            total += 2 * math.prod(shape(each.result)) * math.prod(left[int(i)] for i in contracted)
        total += sum(
            (times or each.counted) * products(module, called) for called, times in each.called
        )
    return total
