"""The lint finds tokens in another order than the one that the program takes, from their values;
`lint.check` raises what the lint finds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import context, grads, lint, mesh

KIND = "tokens-not-split"
TOKENS, WIDTH, VOCABULARY = 32, 8, 11
WEIGHTS = {
    "table": jnp.linspace(-1.0, 1.0, VOCABULARY * WIDTH).reshape(VOCABULARY, WIDTH),
    "places": jnp.linspace(-0.5, 0.5, TOKENS * WIDTH).reshape(TOKENS, WIDTH),
}


def shuffled(n):
    """An order that is neither of ours."""
    return [[(i + 1) % n] for i in range(n)]


ORDERS = [context.zigzag, context.contiguous, shuffled]


def windows_of(rows=2, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (rows, TOKENS + 1), np.int32)


def gradient(order, devices, axes="context"):
    """A gradient over tokens that are split over `axes` in `order`."""
    names = (axes,) if isinstance(axes, str) else axes

    def loss(weights, batch):
        tokens, targets = batch
        x = weights["table"][tokens]
        x += weights["places"][context.positions(tokens.shape[1], names, order=order)][None]
        q = x[:, :, None]
        x = context.attention(q, q, q, names, order=order)[:, :, 0]
        likely = jax.nn.log_softmax(x @ weights["table"].T)
        return -jnp.mean(jnp.take_along_axis(likely, targets[..., None], -1))

    grad = grads.averaged(jax.value_and_grad(loss), ("data", *names))
    return mesh.spmd(grad, mesh=devices, in_specs=(P(), P("data", axes)), out_specs=P())


def kinds(f, *args):
    return [finding.kind for finding in lint.program(f, *args)]


def halves(windows):
    return windows[:, :-1], windows[:, 1:]


@pytest.mark.sweep(18)
@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit, lambda f: f], ids=["jit", "eqx", "none"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [{"data": 2, "context": 4}, {"data": 4, "context": 2}])
def test_tokens_in_the_order_of_the_text_are_found_where_the_program_has_another(sizes, order, jit):
    f = jit(gradient(order, mesh.make(**sizes)))
    batch = halves(windows_of(sizes["data"]))
    split = [context.split(half, sizes["context"], order=order) for half in batch]
    is_wrong = order is not context.contiguous
    for arrays in (batch, tuple(map(jnp.asarray, batch))):
        assert kinds(f, WEIGHTS, arrays) == [KIND] * is_wrong
    assert kinds(f, WEIGHTS, tuple(split)) == []


def test_tokens_over_two_axes_are_found():
    devices = mesh.make(data=1, inner=2, outer=4)
    f = gradient(context.zigzag, devices, ("outer", "inner"))
    (finding,) = [x for x in lint.program(f, WEIGHTS, halves(windows_of())) if x.kind == KIND]
    assert "split over 'inner' and 'outer'" in finding.harm
    assert "context.split(tokens, 8)" in finding.cure


@pytest.mark.sweep(3, "wholes")
def test_no_alarm_where_the_values_do_not_tell():
    f = gradient(context.zigzag, mesh.make(data=2, context=4))
    tokens, targets = halves(windows_of())
    shapes = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)
    assert kinds(f, WEIGHTS, (shapes, shapes)) == []
    assert kinds(f, WEIGHTS, (tokens, np.roll(targets, 3, 1))) == []  # no successors
    assert kinds(f, WEIGHTS, (tokens * 0, targets * 0)) == []  # successors in any order


def test_no_alarm_where_the_program_splits_them_itself():
    mapped = gradient(context.zigzag, mesh.make(data=2, context=4))

    @jax.jit
    def f(weights, batch):
        return mapped(weights, tuple(context.split(half, 4) for half in batch))

    def local(weights, batch):
        tokens, targets = (context.local_tokens(half, "context") for half in batch)
        places = weights["places"][context.positions(tokens.shape[1], "context")][None]
        x = weights["table"][tokens] + places
        return lax.pmean(jnp.sum(x * weights["table"][targets]), ("data", "context"))

    of_whole = mesh.spmd(
        local,
        mesh=mesh.make(data=2, context=4),
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    for program in (f, of_whole):
        assert kinds(program, WEIGHTS, halves(windows_of())) == []


@pytest.mark.sweep(3, "wholes")
def test_batches_of_a_loop_are_read_one_by_one():
    """In a scan over steps, each array of tokens has one dim more than in the `shard_map`."""
    devices, orders = mesh.make(data=2, context=4), (context.zigzag, context.contiguous)
    windows = np.stack([windows_of(seed=step) for step in range(3)])
    tokens, targets = windows[..., :-1], windows[..., 1:]
    for order in orders:
        step = gradient(order, devices)

        def train(weights, batches, step=step):
            return jax.lax.scan(lambda w, batch: (w, step(w, batch)[0]), weights, batches)[1]

        assert KIND not in kinds(train, WEIGHTS, (tokens[:0], targets[:0]))
        is_found = KIND in kinds(train, WEIGHTS, (tokens, targets))
        assert is_found == (order is context.zigzag)
    # As many rows as tokens, each row the one before, a token later: rows are no tokens.
    rows = np.arange(TOKENS)[:, None] + np.arange(TOKENS + 1)
    split = [context.split(half, 4) for half in halves(rows.astype(np.int32) % VOCABULARY)]
    mapped = gradient(context.zigzag, devices)

    def train_on_rows(weights, batches):
        return jax.lax.scan(lambda w, batch: (w, mapped(w, batch)[0]), weights, batches)[1]

    assert KIND not in kinds(train_on_rows, WEIGHTS, tuple(np.stack([half] * 3) for half in split))


@pytest.mark.sweep(3, "wholes")
def test_check_raises_what_changes_numbers():
    devices = mesh.make(data=2, context=4)
    f, batch = gradient(context.zigzag, devices), halves(windows_of())
    with pytest.raises(ValueError, match=f"{KIND}\n.*the order of the text.*\n.*split"):
        lint.check(f, WEIGHTS, batch)
    lint.check(f, WEIGHTS, batch, allowed=[KIND])
    lint.check(gradient(context.contiguous, devices), WEIGHTS, batch)


def test_check_lets_slow_programs_pass():
    """A mean that is taken twice has the right numbers, and moves them for nothing."""

    def twice(x):
        return lax.pmean(lax.pmean(jnp.mean(x), "data"), "data")

    f = mesh.spmd(twice, mesh=mesh.make(data=8), in_specs=P("data"), out_specs=P())
    assert kinds(f, jnp.arange(8.0)) == ["summed-twice"]
    lint.check(f, jnp.arange(8.0))
    with pytest.raises(ValueError, match="summed-twice"):
        lint.check(f, jnp.arange(8.0), allowed=())


def test_a_line_under_filter_jit_is_the_callers():
    def norm(w, x):
        h = x @ w
        return jnp.sum((h - jnp.mean(h, -1, keepdims=True)) ** 2)  # this line

    def grad(w, x):
        return eqx.filter_value_and_grad(lambda w: lax.pmean(norm(w, x), ("data", "tensor")))(w)

    specs = P(None, "tensor"), P("data")
    devices = mesh.make(data=2, tensor=4)
    f = mesh.spmd(grad, mesh=devices, in_specs=specs, out_specs=(P(), specs[0]))
    args = jax.ShapeDtypeStruct((8, 16), jnp.float32), jax.ShapeDtypeStruct((4, 3, 8), jnp.float32)
    lines = [[x.where for x in lint.program(g, *args)] for g in (f, eqx.filter_jit(f))]
    assert lines[0] == lines[1]
    assert __file__ in lines[1][0]
