"""Mistakes with arguments that are split are found on their lines; the right program beside each is
silent."""

import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import grads, lint, mesh, optimizers, tensor, zero
from parallax.collectives import ring
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import varying

MIXES, SUMMED = "update-mixes-a-shard", "shards-summed"
ORDER, LAYERS = "gathered-out-of-order", "layers-not-gathered"


def devices():
    return mesh.make(data=4, tensor=2)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


class Program(NamedTuple):
    """A function inside the map, the specs of its arguments and results, and the shapes of its
    arguments."""

    f: object
    in_specs: tuple
    out_specs: object
    shapes: tuple

    def lint(self):
        f = mesh.spmd(self.f, mesh=devices(), in_specs=self.in_specs, out_specs=self.out_specs)
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):  # optax needs them
            return lint.program(f, *self.shapes)


class Pair(NamedTuple):
    """A program with a mistake on the line that says so, and one without."""

    kind: str
    wrong: Program
    right: Program
    says: tuple


def line_of_the_mistake(f) -> str:
    lines, first = inspect.getsourcelines(f)
    (at,) = (first + i for i, line in enumerate(lines) if line.rstrip().endswith("# wrong"))
    return f"{inspect.getsourcefile(f)}:{at}"


# A net whose hidden units are split over "tensor": a column-parallel matrix, then a row-parallel
# one

NET = {"up": shape(16, 32), "down": shape(32, 16)}
ON_TENSOR = {"up": P(None, "tensor"), "down": P("tensor")}
ROWS = shape(8, 16)


def loss(net, x):
    hidden = jnp.tanh(tensor.copy_to(x, "tensor") @ net["up"])
    return jnp.mean(tensor.reduce_from(hidden @ net["down"], "tensor") ** 2)


def gradients_of(net, x):
    return lax.pmean(jax.grad(loss)(varying(net, "data"), x), "data")


def descended(net, gradients):
    return jax.tree.map(lambda w, g: w - 0.1 * g, net, gradients)


def of_net(f):
    return Program(f, (ON_TENSOR, P("data")), ON_TENSOR, (NET, ROWS))


def lamb_by_hand(net, x):
    optimizer = optax.lamb(1e-3)
    updates, _ = optimizer.update(gradients_of(net, x), optimizer.init(net), net)  # wrong
    return optax.apply_updates(net, updates)


def whole_lamb(net, x):
    optimizer = optimizers.whole(optax.lamb(1e-3), "tensor", ON_TENSOR)
    updates, _ = optimizer.update(gradients_of(net, x), optimizer.init(net), net)
    return optax.apply_updates(net, updates)


def decayed(net, x, norm_of):
    """A step, and a decay of the length that `norm_of` gives."""

    def after(w, g):
        return w - 0.1 * g - 0.01 * w / norm_of(w)

    return jax.tree.map(after, net, gradients_of(net, x))


def decayed_by_the_shard(net, x):
    return decayed(net, x, lambda w: jnp.sqrt(jnp.sum(w**2)))  # wrong


def decayed_by_the_whole(net, x):
    return decayed(net, x, lambda w: jnp.sqrt(lax.psum(jnp.sum(w**2), "tensor")))


def decayed_by_the_shard_after_a_number(net, x):
    def after(w, g):
        return (w + 1e-8) - 0.1 * g / jnp.sqrt(jnp.sum(g**2))  # wrong

    return jax.tree.map(after, net, gradients_of(net, x))


def clipped_by_the_shard(net, x):
    gradients = gradients_of(net, x)
    squares = jax.tree.map(lambda g: jnp.sum(g**2), gradients)  # wrong
    scale = jnp.minimum(1.0, lax.rsqrt(squares["up"] + squares["down"]))
    return descended(net, jax.tree.map(lambda g: g * scale, gradients))


def clipped_by_the_whole(net, x):
    gradients = gradients_of(net, x)
    squares = jax.tree.map(lambda g: lax.psum(jnp.sum(g**2), "tensor"), gradients)
    scale = jnp.minimum(1.0, lax.rsqrt(squares["up"] + squares["down"]))
    return descended(net, jax.tree.map(lambda g: g * scale, gradients))


def skipped_by_the_shard(net, x):
    gradients = gradients_of(net, x)
    keep = jax.tree.map(lambda g: jnp.all(jnp.isfinite(g)), gradients)  # wrong
    return jax.tree.map(
        lambda new, old, keep: jnp.where(keep, new, old), descended(net, gradients), net, keep
    )


def skipped_by_all(net, x):
    gradients = gradients_of(net, x)
    keep = jax.tree.map(
        lambda g: lax.pmin(jnp.all(jnp.isfinite(g)).astype(jnp.float32), "tensor") > 0, gradients
    )
    return jax.tree.map(
        lambda new, old, keep: jnp.where(keep, new, old), descended(net, gradients), net, keep
    )


def counted_beside_the_norm(net, x):
    """A count of zeros, which rounds nothing."""
    gradients = gradients_of(net, x)
    zeros = jax.tree.map(lambda g: jnp.sum(g == 0).astype(g.dtype), gradients)
    lengths = jax.tree.map(jnp.linalg.norm, gradients)  # wrong
    return jax.tree.map(
        lambda w, g, n, zeros: w - 0.1 * g / n + 0 * lax.psum(zeros, "tensor"),
        net,
        gradients,
        lengths,
        zeros,
    )


def mixing_in_a_loop_of_steps(net, x):
    def step(net, _):
        gradients = gradients_of(net, x)
        lengths = jax.tree.map(jnp.linalg.norm, gradients)  # wrong
        return descended(net, jax.tree.map(lambda g, length: g / length, gradients, lengths)), None

    return lax.scan(step, net, length=3)[0]


def joined_in_a_loop_of_steps(net, x):
    def step(net, _):
        gradients = gradients_of(net, x)
        lengths = jax.tree.map(
            lambda g: jnp.sqrt(ring.all_reduce(jnp.sum(g * g), "tensor")), gradients
        )
        return descended(net, jax.tree.map(lambda g, length: g / length, gradients, lengths)), None

    return lax.scan(step, net, length=3)[0]


def summed_over_its_own_axis(net, x):
    local = jax.grad(loss)(varying(net, "data"), x)
    return descended(net, lax.pmean(local, ("data", "tensor")))  # wrong


def summed_over_data(net, x):
    local = jax.grad(loss)(varying(net, "data"), x)
    return descended(net, lax.pmean(local, "data"))


def ring_over_its_own_axis(net, x):
    local = jax.grad(loss)(varying(net, "data"), x)
    sums = jax.tree.map(lambda g: ring.all_reduce(g, ("data", "tensor")), local)  # wrong
    momentum = jax.tree.map(lambda w, g: 0.9 * w + g / 8, net, sums)
    return descended(net, momentum)


def ring_over_data(net, x):
    local = jax.grad(loss)(varying(net, "data"), x)
    sums = jax.tree.map(lambda g: ring.all_reduce(g, "data"), local)
    momentum = jax.tree.map(lambda w, g: 0.9 * w + g / 4, net, sums)
    return descended(net, momentum)


# Rows split over two axes, and gathered over one


def of_rows(f):
    return Program(f, (P(("data", "tensor")), P("data")), P("data"), (shape(16, 6), shape(8, 16)))


def gathered_over_the_outer(w, x):
    rows = lax.all_gather(0.5 * w, "data", tiled=True)  # wrong
    rows = lax.all_gather(rows, "tensor", tiled=True)
    return lax.pmax(x @ rows, "tensor")


def gathered_over_the_inner_first(w, x):
    rows = lax.all_gather(0.5 * w, "tensor", tiled=True)
    rows = lax.all_gather(rows, "data", tiled=True)
    return lax.pmax(x @ rows, "tensor")


def gathered_in_the_other_order(w, x):
    return lax.pmax(x @ lax.all_gather(w, ("tensor", "data"), tiled=True), "tensor")  # wrong


def gathered_in_order(w, x):
    return lax.pmax(x @ lax.all_gather(w, ("data", "tensor"), tiled=True), "tensor")


def ring_over_the_outer_in_a_loop(w, x):
    def repeat(x, _):
        columns = ring.all_gather(w.T, "data", axis=1, tiled=True)  # wrong
        return jnp.tanh(x + jnp.sum(x @ columns.T[:1].T @ columns[:1, :1])), None

    return lax.pmax(
        lax.scan(repeat, lax.pcast(x[:, :6], "tensor", to="varying"), None, length=1)[0], "tensor"
    )


def ring_over_the_inner_in_a_loop(w, x):
    def repeat(x, _):
        columns = ring.all_gather(w.T, "tensor", axis=1, tiled=True)
        return jnp.tanh(x + jnp.sum(x @ columns.T[:1].T @ columns[:1, :1])), None

    return lax.pmax(
        lax.scan(repeat, lax.pcast(x[:, :6], "tensor", to="varying"), None, length=1)[0], "tensor"
    )


# Layers


FIRST = P("data")


def of_layers(f, spec=FIRST):
    return Program(f, (spec, P("data")), spec, (shape(8, 16, 16), ROWS))


def block(x, w):
    return jnp.tanh(x @ w), None


def layers_of_one_replica(layers, x):
    def loss(layers):
        return jnp.mean(lax.scan(block, x, layers)[0] ** 2)  # wrong

    return layers - 0.1 * jax.grad(loss)(layers)


def gathered_layers(layers, x):
    def loss(layers):
        gathered = lambda x, w: block(x, lax.all_gather(w, "data", tiled=True))
        return jnp.mean(lax.scan(gathered, x, layers)[0] ** 2)

    return layers - 0.1 * jax.grad(loss)(layers)


def accumulated_on_one_replica(layers, x):
    def loss(layers, x):
        run = jax.checkpoint(lambda x: lax.scan(block, x, layers)[0])  # wrong
        return jnp.mean(run(x) ** 2)

    _, gradients = grads.accumulated(jax.value_and_grad(loss), microbatches=2)(layers, x)
    return layers - 0.1 * gradients


def accumulated_of_gathered(layers, x):
    def loss(layers, x):
        gathered = zero.gathered(lambda w, x: block(x, w), ring("data"), P("data"))
        run = jax.checkpoint(lambda x: lax.scan(lambda x, w: gathered(w, x), x, layers)[0])
        return jnp.mean(run(x) ** 2)

    _, gradients = grads.averaged(
        grads.accumulated(jax.value_and_grad(loss), microbatches=2), ring("data")
    )(layers, x)
    return layers - 0.1 * gradients


PAIRS = [
    Pair(
        MIXES,
        of_net(lamb_by_hand),
        of_net(whole_lamb),
        ("reduce_sum takes float32[16,16]", "along 'tensor'", "each of 2"),
    ),
    Pair(MIXES, of_net(decayed_by_the_shard), of_net(decayed_by_the_whole), ("reduce_sum",)),
    Pair(MIXES, of_net(decayed_by_the_shard_after_a_number), of_net(clipped_by_the_whole), ()),
    Pair(
        MIXES,
        of_net(clipped_by_the_shard),
        of_net(clipped_by_the_whole),
        ("with no collective between",),
    ),
    Pair(
        MIXES,
        of_net(skipped_by_the_shard),
        of_net(skipped_by_all),
        ("this reduce_and takes bool[16,16]",),
    ),
    Pair(MIXES, of_net(counted_beside_the_norm), of_net(skipped_by_all), ()),
    Pair(
        MIXES,
        of_net(mixing_in_a_loop_of_steps),
        of_net(joined_in_a_loop_of_steps),
        ("a shard along 'tensor'",),
    ),
    Pair(
        SUMMED,
        of_net(summed_over_its_own_axis),
        of_net(summed_over_data),
        ("over 'tensor', 2 devices", "each shard gets"),
    ),
    Pair(
        SUMMED,
        of_net(ring_over_its_own_axis),
        of_net(ring_over_data),
        ("float32[16,16] over 'tensor'",),
    ),
    Pair(
        ORDER,
        of_rows(gathered_over_the_outer),
        of_rows(gathered_over_the_inner_first),
        ("dim 0 of this float32[2,6] is split over ('data', 'tensor')", "gathered over ('data',)"),
    ),
    Pair(
        ORDER,
        of_rows(gathered_in_the_other_order),
        of_rows(gathered_in_order),
        ("gathered over ('tensor', 'data')",),
    ),
    Pair(
        ORDER,
        of_rows(ring_over_the_outer_in_a_loop),
        of_rows(ring_over_the_inner_in_a_loop),
        ("dim 1 of this float32[6,2]", "gathered over ('data',)"),
    ),
    Pair(
        LAYERS,
        of_layers(layers_of_one_replica),
        of_layers(gathered_layers, P(None, "data")),
        ("the 2 layers of a device's float32[2,16,16]", "split over 'data'", "each of 4 replicas"),
    ),
    Pair(
        LAYERS,
        of_layers(accumulated_on_one_replica),
        of_layers(accumulated_of_gathered, P(None, "data")),
        ("each of 4",),
    ),
]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.wrong.f.__name__)


@pytest.mark.sweep(2)
@every_pair
def test_the_mistake_is_found_on_its_line(pair):
    (found,) = pair.wrong.lint()
    assert (found.kind, found.where) == (pair.kind, line_of_the_mistake(pair.wrong.f))
    for part in pair.says:
        assert part in found.harm
    assert found.cure.endswith(".")


@pytest.mark.sweep(2)
@every_pair
def test_the_right_program_is_silent(pair):
    assert pair.right.lint() == []


def test_axes_of_one_device_do_not_count():
    one = mesh.make(data=8, tensor=1)
    for f in (mixing_in_a_loop_of_steps, clipped_by_the_shard, summed_over_its_own_axis):
        program = mesh.spmd(f, mesh=one, in_specs=(ON_TENSOR, P("data")), out_specs=ON_TENSOR)
        assert lint.program(program, NET, ROWS) == []


def mixing():
    """Optimizers of optax that look at more than one element of a leaf."""
    then = lambda transform: optax.chain(transform, optax.sgd(0.1))
    return {
        "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4),
        "adaptive clipping": then(optax.adaptive_grad_clip(0.1)),
        "block clipping": then(optax.clip_by_block_rms(1.0)),
        "centralized": then(optax.centralize()),
        "global clipping": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        "in several steps": optax.MultiSteps(optax.lamb(1e-3), 2),
        "lars": optax.lars(1e-3),
        "masked": optax.masked(optax.lamb(1e-3), {"up": True, "down": False}),
        "muon": optax.contrib.muon(1e-3),
        "normalized": then(optax.normalize_by_update_norm()),
        "novograd": optax.novograd(1e-3),
    }


def elementwise():
    """Optimizers of optax that look at one element at a time."""
    return {
        "accumulating": optax.MultiSteps(optax.adam(1e-3), 2),
        "adabelief": optax.adabelief(1e-3),
        "adagrad": optax.adagrad(0.1),
        "adan": optax.adan(1e-3),
        "clipping": optax.chain(optax.clip(1.0), optax.nadamw(1e-3)),
        "lion": optax.lion(1e-3),
        "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
        "radam": optax.radam(1e-3),
        "rmsprop": optax.rmsprop(1e-3, momentum=0.9, centered=True),
    }


def kinds_with(optimizer):
    def step(net, x):
        updates, _ = optimizer.update(gradients_of(net, x), optimizer.init(net), net)
        return optax.apply_updates(net, updates)

    return {found.kind for found in of_net(step).lint()}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", mixing())
def test_optimizers_that_mix(name):
    assert kinds_with(mixing()[name]) == {MIXES}


@pytest.mark.parametrize("name", elementwise())
def test_optimizers_that_do_not(name):
    assert kinds_with(elementwise()[name]) == set()


# What looks like a mistake and is none

ROW = shape(16, 6)


def normalised_rows(x):
    """Statistics of a device's own rows, as of local batch norm: no update."""
    return (x - jnp.mean(x)) / jnp.sqrt(jnp.var(x) + 1e-6)


def a_residual_stream(x):
    """Rows with an update, and a norm of each row alone."""
    return x + jnp.tanh(x / jnp.linalg.norm(x, axis=1, keepdims=True))


def models_of_their_own(x):
    """Each device trains its own row, and clips by its own norm."""
    return x - x / jnp.linalg.norm(x)


def towards_the_mean_of_models(x):
    """One model a row: elastic averaging."""
    return x - 0.1 * (x - lax.pmean(x, ("data", "tensor")))


def towards_the_mean_of_places(x):
    """What is summed is made of the argument alone, place by place, and no gradient."""
    return x - 0.1 * lax.pmean(jnp.tanh(x), ("data", "tensor"))


def towards_the_mean_of_turned_places(x):
    """A transpose moves numbers, and makes none."""
    return x - 0.1 * lax.pmean(jnp.tanh(x.T).T, ("data", "tensor"))


def rounded_with_its_own_scale(x):
    """What a quantiser leaves over."""
    scale = jnp.max(jnp.abs(x)) / 127
    return x - 0.5 * jnp.round(x / scale) * scale


def rounded_down_with_its_own_scale(x):
    scale = jnp.max(jnp.abs(x)) / 127
    return x - 0.5 * jnp.floor(x / scale) * scale


def rounded_up_with_its_own_scale(x):
    scale = jnp.max(jnp.abs(x)) / 127
    return x - 0.5 * jnp.ceil(x / scale) * scale


def shard_of_a_sum(x):
    """A reduce-scatter by hand: a sum over the axis, of which each device takes its rows."""
    total = lax.psum(jnp.concatenate([x] * 8), ("data", "tensor"))
    return x - lax.dynamic_slice_in_dim(
        total, lax.axis_index(("data", "tensor")) * x.shape[0], x.shape[0]
    )


def handed_round(x):
    """The first device's rows, on all."""
    first = jnp.where(lax.axis_index(("data", "tensor")) == 0, x, 0.0)
    return lax.pcast(lax.psum(first, ("data", "tensor")), ("data", "tensor"), to="varying")


def centred_by_columns(x):
    """One number a column, from a device's own rows: by hand this may be meant, in optax it is
    not."""
    return x + jnp.tanh(x - jnp.mean(x, axis=0, keepdims=True))


def sum_of_products(x):
    """No update: nothing of the argument is added to it."""
    total = lax.psum(jnp.tanh(x @ jnp.ones((6, 6))), ("data", "tensor"))
    return lax.pcast(total, ("data", "tensor"), to="varying")


def waits_for_its_norm(x):
    """Something that is computed later, and whose value does not change."""
    return x + sequence_after(jnp.tanh(x @ jnp.ones((6, 6))), jnp.sum(x * x))


SILENT = {
    centred_by_columns: ROW,
    sum_of_products: ROW,
    waits_for_its_norm: ROW,
    towards_the_mean_of_places: ROW,
    towards_the_mean_of_turned_places: ROW,
    normalised_rows: ROW,
    a_residual_stream: ROW,
    models_of_their_own: shape(8, 6),
    towards_the_mean_of_models: shape(8, 6),
    rounded_with_its_own_scale: ROW,
    rounded_down_with_its_own_scale: ROW,
    rounded_up_with_its_own_scale: ROW,
    shard_of_a_sum: ROW,
    handed_round: ROW,
}


@pytest.mark.parametrize("f", SILENT, ids=lambda f: f.__name__)
def test_no_mistake(f):
    spec = P(("data", "tensor"))
    assert Program(f, (spec,), spec, (SILENT[f],)).lint() == []


def test_token_numbers_may_be_gathered_in_any_order():
    """Rows of a batch: only weights are multiplied by position."""
    f = lambda ids: lax.all_gather(ids, "data", tiled=True)
    assert (
        Program(
            f, (P(("data", "tensor")),), P(("data", "tensor")), (shape(16, dtype=jnp.int32),)
        ).lint()
        == []
    )


def test_copies_may_be_gathered():
    """Along an axis that does not split the rows: the result has each row several times, and no row
    is out of order."""
    f = lambda w: lax.all_gather(lax.pcast(w, "tensor", to="varying"), "tensor", tiled=True)
    assert Program(f, (P("data"),), P(("data", "tensor")), (shape(16, 6),)).lint() == []


def a_pipeline_by_hand(layers, x):
    """Stages along "data" that pass their activations on; the rows lie there too."""

    def loss(layers):
        def tick(h, i):
            h = jnp.where(lax.axis_index("data") == 0, x, h)
            h = lax.scan(block, h, layers)[0]
            return lax.ppermute(h, "data", [(i, (i + 1) % 4) for i in range(4)]), None

        return jnp.mean(lax.scan(tick, x, jnp.arange(4))[0] ** 2)

    return layers - 0.1 * jax.grad(loss)(layers)


def rows_that_go_round(layers, x):
    """All rows visit all devices in turn: nothing is chosen by the device's index."""

    def loss(layers):
        h = x
        for _ in range(4):
            h = lax.ppermute(
                lax.scan(block, h, layers)[0], "data", [(i, (i + 1) % 4) for i in range(4)]
            )
        return jnp.mean(h**2)

    return layers - 0.1 * jax.grad(loss)(layers)


def rows_of_one_device(layers, x):
    """The first device's rows alone go in, and nothing is exchanged."""

    def loss(layers):
        return jnp.mean(
            lax.scan(block, jnp.where(lax.axis_index("data") == 0, x, 0.0), layers)[0] ** 2
        )

    return layers - 0.1 * jax.grad(loss)(layers)


def four_layers_a_trip(layers, x):
    """Each trip gathers the layers of all devices, and runs them."""

    def loss(layers):
        run = lambda x, w: (lax.scan(block, x, lax.all_gather(w, "data"))[0], None)
        return jnp.mean(lax.scan(run, x, layers)[0] ** 2)

    return layers - 0.1 * jax.grad(loss)(layers)


def models_in_a_row(models, x):
    """A device's own models, each of which sees the same rows."""

    def loss(models):
        squares = lambda total, w: (total + jnp.mean(block(x, w)[0] ** 2), None)
        return lax.scan(squares, lax.pcast(0.0, "data", to="varying"), models)[0]

    return models - 0.1 * jax.grad(loss)(models)


LAYERS_ELSEWHERE = [
    a_pipeline_by_hand,
    rows_that_go_round,
    rows_of_one_device,
    four_layers_a_trip,
    models_in_a_row,
]


@pytest.mark.parametrize("layers", [4, 8])
def test_a_single_layer_on_each_device_is_found_too(layers):
    program = of_layers(layers_of_one_replica)._replace(shapes=(shape(layers, 16, 16), ROWS))
    assert [found.kind for found in program.lint()] == [LAYERS]


@pytest.mark.parametrize("rows", [16, 8])
def test_tokens_of_the_shape_of_a_table_are_a_batch(rows):
    """The table has as many rows and columns as the tokens of the second case."""

    def after(layers, table, tokens):
        def loss(layers, table):
            table = lax.all_gather(table, "data", tiled=True)
            return jnp.mean(lax.scan(block, table[tokens], layers)[0] ** 2)

        gradients = jax.grad(loss, (0, 1))(layers, table)
        return layers - 0.1 * gradients[0], table - 0.1 * gradients[1]

    shapes = shape(8, 8, 8), shape(8, 8), shape(rows, 8, dtype=jnp.int32)
    program = Program(after, (P("data"),) * 3, (P("data"),) * 2, shapes)
    assert [found.kind for found in program.lint()] == [LAYERS]


def test_rows_beside_rows():
    """A scan over a batch, one row a trip, that begins with another batch: no output tells that
    these are layers."""

    def loss(rows, x):
        return lax.psum(jnp.mean(lax.scan(block, x, rows)[0] ** 2), "data")

    assert Program(loss, (P("data"), P("data")), P(), (shape(8, 16, 16), ROWS)).lint() == []


@pytest.mark.parametrize("f", LAYERS_ELSEWHERE)
def test_layers_that_are_no_mistake(f):
    assert of_layers(f).lint() == []
