"""Optimizers of matrices on shards: shares of shards, one matrix at a time, and the bytes that each
way sends."""

import functools
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from optimizers_steps import (
    BATCH,
    BATCHES,
    DEVICES,
    PARAMS,
    SPECS,
    STEPS,
    Way,
    as_it_is,
    as_optax_computes,  # noqa: F401 (an autouse fixture)
    local,
    on_one_device,
    on_shards,
    refusal,
)
from optimizers_table import BARE, RATE, WRAPPED, of_leaves
from reference import EXACT, assert_close

from parallax import mesh, optimizers, rules, zero
from parallax.collectives import ring

# Shares of shards: ZeRO-1 over two devices of tensor shards over two

BOTH = {
    "blocks": {"weight": P(None, "data", "tensor"), "bias": P("data", "tensor")},
    "head": P("tensor", "data"),
    "scale": P(),
}
OF_SHARDS = Way(
    "tensor",
    zero.reduce_scattered(local, "data", BOTH),
    True,
    lambda each: zero.sharded(each, "data", BOTH),
)
on_both = {"specs": BOTH, "live": SPECS["tensor"], "data": 2, "tensor": 2}


@pytest.mark.sweep(3, "wholes")
def test_shares_of_shards_train_as_one_device():
    table = {"adamw": BARE["adamw"], "muon": WRAPPED["muon"]}
    plain = on_one_device(table)
    table = {
        "adamw": OF_SHARDS.bare(table["adamw"]),
        "muon": optimizers.whole(table["muon"], ("data", "tensor"), BOTH),
    }
    for name, (params, _) in on_shards(OF_SHARDS, table, **on_both).items():
        assert_close(params, plain[name][0], EXACT)


@pytest.mark.parametrize("told", [True, False])
def test_a_share_is_compared_with_the_whole_leaf_and_not_with_the_shard(told):
    """A sum that appears above 200 elements: a leaf of 384 has shards of 192, and shares of 96."""
    specs = (
        BOTH
        if told
        else {
            "blocks": {"weight": P(None, "data"), "bias": P("data")},
            "head": P(None, "data"),
            "scale": P(),
        }
    )
    from_200 = of_leaves(lambda g, w: g / jnp.sum(jnp.abs(g)) if g.size > 200 else g)
    message = refusal(OF_SHARDS, {"": zero.sharded(from_200, "data", specs)}, **on_both)
    assert "zero.sharded: each device updates its shards alone" in message
    assert "the update depends on the size of a leaf" in message


# One matrix at a time

BY_MATRIX = {name: WRAPPED[name] for name in ("muon", "lamb", "lars", "adafactor")}
LAYERS = {"blocks.**": 1}
SPLIT = {
    "layers": lambda axis: {
        "blocks": {"weight": P(axis), "bias": P(axis)},
        "head": P(None, axis),
        "scale": P(),
    },
    "rows": lambda axis: {
        "blocks": {"weight": P(None, axis), "bias": P(None, axis)},
        "head": P(axis),
        "scale": P(),
    },
    "columns": lambda axis: {
        "blocks": {"weight": P(None, None, axis), "bias": P()},
        "head": P(None, axis),
        "scale": P(),
    },
}


def layer_by_layer(tree, lead=0):
    """The stacked leaves as a list of layers."""
    layer = lambda i: jax.tree.map(lambda leaf: np.take(leaf, i, axis=lead), tree["blocks"])
    return tree | {"blocks": [layer(i) for i in range(4)]}


def stacked(tree):
    return tree | {"blocks": jax.tree.map(lambda *layers: np.stack(layers), *tree["blocks"])}


@functools.cache
def matrices_on_one_device():
    """Five steps of each, whose layers are leaves of two dims, as optimizers of matrices want them;
    and LAMB's moments."""
    runs = on_one_device(BY_MATRIX, layer_by_layer(PARAMS), layer_by_layer(BATCHES, lead=2))
    return {name: stacked(params) for name, (params, _) in runs.items()}, stacked(
        runs["lamb"][1][0].mu
    )["blocks"]


def assert_those_of_one_device(found):
    """Of all parameters, and of the moments of LAMB, whose layers lie in order."""
    plain, moments = matrices_on_one_device()
    for name, (params, _) in found.items():
        assert_close(params, plain[name], EXACT)
    (of_layers,) = (group for group in found["lamb"][1].groups if group[0].count.ndim)
    assert_close(of_layers[0].mu["blocks"], moments, EXACT)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("axis", ["tensor", "data"])
def test_by_matrix_is_the_optimizer_on_a_list_of_layers(axis, split):
    """Of tensor shards, and of ZeRO-1's shares of gradients."""
    specs = SPLIT[split](axis)
    grad = local if axis == "tensor" else zero.reduce_scattered(local, "data", specs)
    table = {
        name: optimizers.by_matrix(each, axis, specs, layers=LAYERS)
        for name, each in BY_MATRIX.items()
    }
    assert_those_of_one_device(on_shards(Way(axis, grad, axis == "tensor", as_it_is), table, specs))


@pytest.mark.long
def test_by_matrix_of_shares_of_shards():
    table = {
        name: optimizers.by_matrix(each, ("data", "tensor"), BOTH, layers=LAYERS)
        for name, each in BY_MATRIX.items()
    }
    assert_those_of_one_device(on_shards(OF_SHARDS, table, **on_both))


def test_muon_takes_a_stack_of_matrices_for_something_else_and_becomes_adam():
    reshaped = lambda tree, *shape: (
        tree | {"blocks": tree["blocks"] | {"weight": tree["blocks"]["weight"].reshape(shape)}}
    )
    muon = {"": BY_MATRIX["muon"]}
    plain = on_one_device(muon)[""][0]
    vector = on_one_device(muon, reshaped(PARAMS, -1), reshaped(BATCHES, STEPS, BATCH, -1))[""][0]
    assert_close(
        reshaped(jax.tree.map(np.asarray, vector), 4, 8, 12), jax.tree.map(np.asarray, plain), EXACT
    )
    assert (
        np.max(
            np.abs(
                plain["blocks"]["weight"] - matrices_on_one_device()[0]["muon"]["blocks"]["weight"]
            )
        )
        > RATE / 10
    )


def assert_refused_by_matrix(message, optimizer, specs=None, *, layers=LAYERS):
    specs = specs or SPLIT["rows"]("tensor")
    wrapped = optimizers.by_matrix(optimizer, "tensor", specs, layers=layers)
    assert message in refusal(Way("tensor", local, True, as_it_is), {"": wrapped}, specs)


def test_by_matrix_refuses_layers_that_do_not_divide():
    specs = SPLIT["rows"]("tensor")
    init = optimizers.by_matrix(BY_MATRIX["muon"], "tensor", specs, layers=LAYERS).init
    run = mesh.spmd(init, mesh=mesh.make(tensor=8), in_specs=(specs,), out_specs=P())
    message = (
        "optimizers.by_matrix: blocks.bias has 4 layers on a device (dim 0 of (4, 1)). This number "
        "must be a multiple of 8, the number of devices among which these layers are divided. Use "
        "optimizers.whole, or other axes."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(run, PARAMS)


def test_by_matrix_refuses_whole_layers_that_do_not_divide():
    """Along the layers' axis, over which ZeRO-1's parameters are whole, and then the other."""
    params, specs = {"weight": jnp.ones((12, 2, 2))}, {"weight": P("tensor")}
    optimizer = optimizers.by_matrix(BY_MATRIX["muon"], ("tensor", "data"), specs)
    over = mesh.make(tensor=4, data=2)
    run = mesh.spmd(optimizer.init, mesh=over, in_specs=(P(),), out_specs=P())
    message = (
        "weight has 12 layers on a device (dim 0 of (12, 2, 2)). This number must be a multiple of "
        "8, the number of devices among which these layers are divided."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(run, params)


@pytest.mark.parametrize("wrapper", [optimizers.whole, optimizers.by_matrix])
@pytest.mark.parametrize("told", ["another tree", "no split", "no spec"])
def test_a_shard_whose_spec_names_no_split_is_refused(wrapper, told):
    """The norm of LAMB would be that of each shard."""
    specs = SPECS["tensor"] | {"blocks": {"weight": P(None, None, "tensor"), "bias": P()}}
    given = {
        "another tree": {"model": specs},
        "no split": specs | {"head": P()},
        "no spec": {name: spec for name, spec in specs.items() if name != "head"},
    }[told]
    wrapped = {"": wrapper(optax.stateless(lambda g, w: g), "tensor", given)}
    message = refusal(Way("tensor", local, True, as_it_is), wrapped, specs)
    leaf = "blocks.weight" if told == "another tree" else "head"
    assert (
        f"optimizers: {leaf} varies along 'tensor', and `specs` names no dim of it that this axis "
        "splits. Each device would update its shard as if it were the whole leaf."
    ) in message


@pytest.mark.parametrize("wrapper", [optimizers.whole, optimizers.by_matrix])
@pytest.mark.parametrize(("tensor", "data"), [(2, 2), (2, 1), (1, 2)])
def test_shares_of_a_shard_along_the_same_dim_are_refused(wrapper, tensor, data):
    """If the axis of the shards has one device, the parameter is whole, and the update is right."""
    columns, both = P(None, None, "tensor"), P(None, None, ("tensor", "data"))
    weight = PARAMS["blocks"]["weight"]
    by_norm = optax.stateless(
        lambda g, w: g / jnp.sqrt(jnp.sum(g**2, axis=(-2, -1), keepdims=True))
    )
    wrapped = wrapper(by_norm, ("tensor", "data"), both)

    def update(gradient, weight):
        terms = lax.pcast(gradient / data, "data", to="varying")
        share = zero.reduce_scatter(terms, "data", both)
        return wrapped.update(share, wrapped.init(weight), weight)[0]

    world = mesh.make(tensor=tensor, data=data, devices=jax.devices()[: tensor * data])
    run = jax.jit(mesh.spmd(update, mesh=world, in_specs=(columns, columns), out_specs=columns))
    if tensor == 1:
        assert_close(run(weight, weight), by_norm.update(weight, None, weight)[0], EXACT)
        return
    message = (
        "optimizers: in `specs`, dim 2 of the parameter is split over ('tensor', 'data'), and the "
        "parameter does not vary along 'data'."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(run, weight, weight)


@pytest.mark.parametrize("name", ["whole", "by_matrix"])
def test_a_refusal_of_leaves_that_stay_split_names_the_wrapper(name):
    specs = {"w": P("data", "tensor")}
    wrapped = getattr(optimizers, name)(optax.lars(0.1), "data", specs)

    def run(params):
        return wrapped.update(params, wrapped.init(params), params)[0]

    over = mesh.make(data=2, tensor=2, devices=jax.devices()[:4])
    mapped = mesh.spmd(run, mesh=over, in_specs=(specs,), out_specs=specs)
    with pytest.raises(ValueError, match=rf"^optimizers\.{name}: .* w is split along 'tensor'"):
        jax.eval_shape(mapped, {"w": jnp.ones((8, 8))})


def test_by_matrix_refuses_a_glob_of_layers_that_matches_no_leaf():
    message = (
        "optimizers.by_matrix: the glob 'block.**' in `layers` matches none of the 4 leaves of "
        "`specs`; the first paths are ['blocks.bias', 'blocks.weight', 'head']. Correct the glob, "
        "or remove it."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizers.by_matrix(
            BY_MATRIX["muon"], "tensor", SPECS["tensor"], layers={"head": 0, "block.**": 1}
        )


def test_by_matrix_refuses_outer_layers_that_are_split():
    assert_refused_by_matrix(
        "optimizers.by_matrix: blocks.weight has 2 dims of layers, and dim 0 of them is split "
        "over 'tensor'. Split dim 1, or a dim of the matrices.",
        BY_MATRIX["lars"],
        SPLIT["layers"]("tensor"),
        layers={"blocks.weight": 2, "blocks.bias": 1},
    )


def test_by_matrix_refuses_what_joins_leaves():
    assert_refused_by_matrix(
        "optimizers.by_matrix: the update of a leaf must not depend on other leaves, but this "
        "optimizer computes 'blocks.bias' from 'blocks.weight'. Use optimizers.whole, or combine "
        "leaves outside of the optimizer, as step.make and grads.clipped do to clip by the norm.",
        optax.chain(optax.clip_by_global_norm(1.0), BY_MATRIX["muon"]),
    )


def test_by_matrix_refuses_what_looks_at_a_leaf_to_update_another():
    scales = optax.stateless(
        lambda g, w: g | {"head": lax.cond(jnp.max(g["scale"]) > 0, jnp.tanh, jnp.sin, g["head"])}
    )
    assert_refused_by_matrix(
        "this optimizer computes 'head' from 'scale'. Use optimizers.whole", scales, layers={}
    )


def drawing(draw):
    """An optimizer that multiplies a gradient by random numbers; `draw` takes a shape."""
    return optax.stateless(lambda g, w: jax.tree.map(lambda x: x * draw(x.shape), g))


NOISE = {
    **{name: WRAPPED[name] for name in ("add_noise", "noisy_sgd")},
    "gamma": drawing(lambda shape: jax.random.gamma(jax.random.key(0), 1.0, shape)),
    "uniform": drawing(lambda shape: lax.rng_uniform(0.0, 1.0, shape)),
}


@pytest.mark.parametrize("noise", NOISE)
def test_by_matrix_refuses_what_draws_noise(noise):
    assert_refused_by_matrix(
        "optimizers.by_matrix: this optimizer draws random numbers, which would be the same "
        "in every layer. Use optimizers.whole, which draws them for whole leaves, as one device "
        "does.",
        NOISE[noise],
    )


# Bytes on the wire: an update of one leaf of S bytes on n devices, in S

n = DEVICES
SENT = {  # by where parameters live, which wrapper, and which dim is split
    ("shares", "whole", "rows"): 2 * (n - 1) / n,  # gradient and parameter
    ("shares", "by_matrix", "rows"): 3 * (n - 1) / n**2,  # and the update
    ("shares", "by_matrix", "columns"): 3 * (n - 1) / n**2,
    ("shares", "by_matrix", "layers"): 0,
    ("whole", "whole", "rows"): (n - 1) / n,  # gradient
    ("whole", "by_matrix", "rows"): (n - 1) / n**2 + (n - 1) / n,  # gradient and update
    ("whole", "by_matrix", "layers"): (n - 1) / n,  # update
    ("whole", "sharded", "rows"): (n - 1) / n,  # of ZeRO-1, to compare
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("live", "wrapper", "split"), SENT)
def test_the_bytes_on_the_wire_are_those_of_theory(live, wrapper, split):
    weight, optimizer, axis = PARAMS["blocks"]["weight"], optax.adamw(RATE), ring("tensor")
    spec = SPLIT[split]("tensor")["blocks"]["weight"]
    wrapped = {
        "whole": lambda: optimizers.whole(optimizer, axis, spec),
        "by_matrix": lambda: optimizers.by_matrix(optimizer, axis, spec, layers={"": 1}),
        "sharded": lambda: zero.sharded(optimizer, axis, spec),
    }[wrapper]()
    where = spec if live == "shares" else P()
    state_specs = rules.optimizer_specs(wrapped, weight, spec)
    update = mesh.spmd(
        wrapped.update,
        mesh=mesh.make(tensor=n, devices=jax.devices()[:n]),
        in_specs=(spec, state_specs, where),
        out_specs=(where, state_specs),
    )
    ops = hlo.collectives(update, weight, wrapped.init(weight), weight)
    assert {op.kind for op in ops} <= {"collective-permute"}
    assert sum(op.bytes for op in ops) == SENT[live, wrapper, split] * weight.nbytes


@pytest.mark.parametrize(
    ("shape", "spec", "lead"),
    [((4, 8, 3, 3), P(None, "tensor"), 0), ((4, 8, 4, 2), P(None, "tensor"), 1)],
)
def test_more_than_three_dims_need_a_number_of_layers(shape, spec, lead):
    """A convolution has no dim of layers, attention weights [L, D, H, K] have one: the shape does
    not tell."""
    params, specs = {"w": jnp.ones(shape)}, {"w": spec}
    with pytest.raises(
        ValueError, match=r"by_matrix: w has 4 dims, .* Pass layers=\{'w': 1\}, or another number"
    ):
        optimizers.by_matrix(WRAPPED["lars"], "tensor", specs).init(params)
    optimizers.by_matrix(WRAPPED["lars"], "tensor", specs, layers={"w": lead}).init(params)
