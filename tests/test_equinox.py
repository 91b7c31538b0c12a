"""What the page on Equinox says: these pieces do not run in a checked map, bare or ours, and what
stands in their place does."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import mesh, rules, tensor, zero

WIDTH = 3


def cell():
    return eqx.nn.GRUCell(WIDTH, WIDTH, dtype=jnp.float64, key=jax.random.key(0))


def recurrent(start, x):
    return lax.scan(lambda h, row: (cell()(row, h), None), start, x)[0][None]


def loop(kind, x):
    body = lambda carry: (jnp.sin(carry[0]), carry[1] + 1)
    run = lambda x: eqx.internal.while_loop(
        lambda carry: carry[1] < 4, body, (x, 0), max_steps=8, kind=kind
    )[0]
    return jax.grad(lambda x: jnp.sum(run(x)))(x)


def batch_norm(x):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        WIDTH, axis_name="batch", mode="batch", dtype=jnp.float64
    )
    return jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)[0]


REFUSED = {
    "a loop from zeros": lambda x: recurrent(jnp.zeros(WIDTH), x),
    "error_if": lambda x: eqx.error_if(x, jnp.any(jnp.isnan(x)), "nan"),
    "a checkpointed loop": functools.partial(loop, "checkpointed"),
    "batch norm": batch_norm,
}
RIGHT = {
    "a loop from zeros of an input": lambda x: recurrent(jnp.zeros_like(x[0]), x),
    "a loop from zeros that may differ": lambda x: recurrent(
        lax.pcast(jnp.zeros(WIDTH), "data", to="varying"), x
    ),
    "a bounded loop": functools.partial(loop, "bounded"),
    "dropout": lambda x: eqx.nn.Dropout(0.5)(x, key=jax.random.key(0)),
    "filter_checkpoint": eqx.filter_checkpoint(jnp.sin),
}


def shape_of(mapped):
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # Equinox needs them
        return eqx.filter_eval_shape(mapped, jnp.ones((16, WIDTH)))


@pytest.mark.parametrize("piece", REFUSED)
def test_pieces_that_do_not_run(piece):
    over = mesh.make(data=8)
    for make in (jax.shard_map, mesh.spmd):
        with pytest.raises((TypeError, AssertionError)):
            shape_of(make(REFUSED[piece], mesh=over, in_specs=P("data"), out_specs=P("data")))


@pytest.mark.parametrize("piece", RIGHT)
def test_pieces_that_run(piece):
    shape_of(
        mesh.spmd(RIGHT[piece], mesh=mesh.make(data=8), in_specs=(P("data"),), out_specs=P("data"))
    )


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_a_tensor_rule_of_a_model_without_its_layers_leaves_all_whole(stage):
    """So that one script does for models with such layers and without."""
    shapes = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    rule, devices = rules.first(tensor.rule(shapes), rules.match("**", P())), mesh.make(data=8)
    if stage is None:
        assert rules.specs(shapes, rule, devices) == {"w": P()}
    else:
        sharing = zero.ZeRO(stage, "data", rule, shapes, devices)
        assert sharing.specs == {"w": P("data")}
        assert rules.specs(shapes, sharing.rule, devices) == {"w": P("data") if stage == 3 else P()}


def test_attention_with_a_fixed_number_of_heads_is_refused_on_shards():
    attention = eqx.nn.MultiheadAttention(4, 8, dtype=jnp.float64, key=jax.random.key(0))
    assert tensor.rule({"attention": attention})("attention.query_proj.weight", None) is None
    projections = lambda attention: attention.query_proj
    split = eqx.tree_at(projections, attention, tensor.ColumnLinear(attention.query_proj, "tensor"))
    with pytest.raises(ValueError, match=r"attention is an eqx\.nn\.MultiheadAttention .* 4 heads"):
        tensor.rule({"attention": split})
