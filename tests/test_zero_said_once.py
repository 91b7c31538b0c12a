"""ZeRO said once: a user's program on an Equinox MLP equals one device, and each way to forget a
part of it is told."""

import functools
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from parallax import jaxprs, mesh, rules, step, tensor, zero
from parallax.collectives import ring

EXACT = 1e-11
X = jax.random.normal(jax.random.key(1), (16, 8), jnp.float64)
BATCH = X, jnp.sin(X[:, :1])
WHOLE = rules.match("**", P())
STANDARD = functools.partial(
    jax.numpy_dtype_promotion, "standard"
)  # optax mixes whole numbers with float64


def plain_mlp(width=16):
    return eqx.nn.MLP(8, 1, width, depth=1, dtype=jnp.float64, key=jax.random.key(0))


def make_mlp(width=16):
    mlp = plain_mlp(width)
    up, down = mlp.layers
    pair = tensor.ColumnLinear(up, "tensor"), tensor.RowLinear(down, "tensor")
    return eqx.tree_at(lambda mlp: mlp.layers, mlp, pair)


def without_bias():
    return eqx.tree_at(lambda mlp: mlp.layers[1].linear.bias, make_mlp(), None)


def loss(mlp, batch):
    return jnp.mean((jax.vmap(mlp)(batch[0]) - batch[1]) ** 2)


SHAPES = eqx.filter_eval_shape(make_mlp)
RULE = tensor.rule(SHAPES)
as_it_is = lambda function, **options: function
PARTS = ("loss", "grad", "optimizer")


def program(
    stage,
    *,
    axis="data",
    inside=RULE,
    model=SHAPES,
    optimizer=None,
    microbatches=1,
    forgotten=(),
    model_rule=None,
    specs_in=None,
    sizes=(2, 2),
    sizes_of_zero=(2, 2),
):
    """The step that a user writes, some parts of it forgotten, and its first state."""
    optimizer = optax.adamw(1e-2, eps=1e-6) if optimizer is None else optimizer
    meshes = [
        mesh.make(data=d, tensor=t, devices=jax.devices()[: d * t])
        for d, t in (sizes, sizes_of_zero)
    ]
    sharing = zero.ZeRO(stage, axis, inside, model, meshes[1], min_size=1)
    on_loss, on_grad, on_optimizer = (
        as_it_is if part in forgotten else getattr(sharing, part) for part in PARTS
    )
    optimizer_rule = None if "optimizer_rule" in forgotten else sharing.optimizer_rule
    rule = sharing.rule if model_rule is None else model_rule(sharing)
    state, specs = step.init(make_mlp, optimizer, rule, meshes[0], optimizer_rule=optimizer_rule)
    grad = on_grad(eqx.filter_value_and_grad(on_loss(loss)), microbatches=microbatches)
    train = step.make(grad, on_optimizer(optimizer), max_norm=0.5)
    specs_in = specs if specs_in is None else specs_in
    return mesh.spmd(
        train, mesh=meshes[0], in_specs=(specs_in, P("data")), out_specs=(specs, P())
    ), state


def trained(stage, *, steps=1, **changes):
    """The state and losses of that program."""
    train, state = program(stage, **changes)
    train, losses = eqx.filter_jit(train), []
    for _ in range(steps):
        with STANDARD():
            state, info = jax.block_until_ready(train(state, BATCH))
        losses.append(float(info.loss))
    return state, losses


@pytest.mark.sweep(12)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("axis", ["data", ring("data")], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_equals_one_device(stage, axis, microbatches):
    optimizer = optax.adamw(1e-2, eps=1e-6)
    state, losses = trained(
        stage, axis=axis, optimizer=optimizer, microbatches=microbatches, steps=4
    )
    alone = step.State(
        plain_mlp(), optimizer.init(eqx.filter(plain_mlp(), eqx.is_array)), jnp.zeros((), jnp.int32)
    )
    one = eqx.filter_jit(step.make(eqx.filter_value_and_grad(loss), optimizer, max_norm=0.5))
    for expected in losses:
        with STANDARD():
            alone, info = one(alone, BATCH)
        np.testing.assert_allclose(expected, info.loss, rtol=EXACT)
    leaves = zip(
        jax.tree.leaves(eqx.filter(state, eqx.is_array)),
        jax.tree.leaves(eqx.filter(alone, eqx.is_array)),
        strict=True,
    )
    for split, whole in leaves:
        np.testing.assert_allclose(split, whole, rtol=EXACT, atol=EXACT)
    held = lambda leaf: leaf.addressable_shards[0].data.size / leaf.size
    weights, moments = (
        state.model.layers[0].linear.weight,
        state.optimizer[0].mu.layers[0].linear.weight,
    )
    assert (held(weights), held(moments)) == (
        1 / 4 if stage == 3 else 1 / 2,
        1 / 4,
    )  # half is tensor's


@pytest.mark.parametrize("stage", [1, 2])
def test_stage_2_alone_scatters_each_microbatch(stage):
    train, state = program(stage, microbatches=4)
    with STANDARD():
        traced = eqx.filter_make_jaxpr(train)(state, BATCH)[0]
    loops = [eqn for eqn in jaxprs.every(traced.jaxpr) if eqn.primitive.name == "scan"]
    inside = {
        eqn.primitive.name
        for loop in loops
        for body in jaxprs.inner(loop)
        for eqn in jaxprs.every(body)
    }
    outside = {eqn.primitive.name for eqn in jaxprs.every(traced.jaxpr)} - inside
    assert ("reduce_scatter" in inside, "reduce_scatter" in outside) == (stage == 2, stage == 1)


# Each device runs its own experts on the rows of all devices; the sum over the experts goes back to
# the rows. The table is ZeRO's to split; the experts' other dims are odd, so `fsdp` splits none.
EXPERTS = {
    "up": jnp.sin(jnp.arange(4 * 3 * 5.0)).reshape(4, 3, 5),
    "table": jnp.cos(jnp.arange(8 * 3.0)).reshape(8, 3),
}
OF_EXPERTS = rules.first(rules.experts("up", P("expert")), WHOLE)


def expert_loss(model, rows, *, axis=None):
    x = rows @ model["table"]
    if axis is not None:
        x = jax.lax.all_gather(x, axis, tiled=True)
    y = jnp.tanh(jnp.einsum("rd,edf->erf", x, model["up"])).sum((0, 2))
    if axis is not None:
        y = jax.lax.psum_scatter(y, axis, tiled=True)
    return jnp.mean(y**2)


def experts_trained(stage, axis, sizes, microbatches):
    """The model after three steps, and what each call of the loss got of the experts."""
    optimizer, seen = optax.adam(1e-2, eps=1e-6), set()
    world = mesh.make(**sizes, devices=jax.devices()[: math.prod(sizes.values())])

    def split_loss(model, rows):
        seen.add(model["up"].shape)
        return expert_loss(model, rows, axis="expert")

    sharing = zero.ZeRO(stage, axis, OF_EXPERTS, EXPERTS, world, min_size=1)
    state, specs = step.init(
        lambda: EXPERTS, optimizer, sharing.rule, world, optimizer_rule=sharing.optimizer_rule
    )
    grad = jax.value_and_grad(sharing.loss(split_loss))
    grad = sharing.grad(grad, microbatches=microbatches)
    train = step.make(grad, sharing.optimizer(optimizer), max_norm=0.5)
    in_specs = specs, P(tuple(sizes))
    train = jax.jit(mesh.spmd(train, mesh=world, in_specs=in_specs, out_specs=(specs, P())))
    for _ in range(3):
        with STANDARD():
            state, _ = train(state, X)
    return state.model, seen


@pytest.mark.sweep(6)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("axis", "sizes"),
    [
        (("data", "expert"), {"data": 2, "expert": 2}),
        (("expert", "data"), {"data": 2, "expert": 2}),
        ("expert", {"expert": 4}),
        (ring(("data", "expert")), {"data": 4, "expert": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts_stay_split_over_an_axis_of_the_batch(stage, axis, sizes, microbatches):
    optimizer = optax.adam(1e-2, eps=1e-6)
    alone = step.State(EXPERTS, optimizer.init(EXPERTS), jnp.zeros((), jnp.int32))
    train = jax.jit(step.make(jax.value_and_grad(expert_loss), optimizer, max_norm=0.5))
    for _ in range(3):
        with STANDARD():
            alone, _ = train(alone, X)
    model, seen = experts_trained(stage, axis, sizes, microbatches)
    assert seen == {(4 // sizes["expert"], 3, 5)}
    for name, expected in alone.model.items():
        np.testing.assert_allclose(model[name], expected, rtol=EXACT, atol=EXACT)
    held = 1 / math.prod(sizes.values()) if stage == 3 else 1
    table = model["table"]
    assert table.addressable_shards[0].data.size == held * table.size


FORGOTTEN = {
    "1: grad": (1, {"forgotten": ("grad",)}, "zero.reduce_scattered or ZeRO.grad"),
    "2: grad": (2, {"forgotten": ("grad",)}, "zero.reduce_scattered or ZeRO.grad"),
    "3: grad": (3, {"forgotten": ("grad",)}, "zero.reduce_scattered or ZeRO.grad"),
    "1: optimizer": (1, {"forgotten": ("optimizer",)}, "or ZeRO.optimizer, and pass"),
    "2: optimizer": (2, {"forgotten": ("optimizer",)}, "or ZeRO.optimizer, and pass"),
    "1: the optimizer's rule": (
        1,
        {"forgotten": ("optimizer_rule",)},
        "or ZeRO.optimizer_rule. Or make the state for shards",
    ),
    "2: the optimizer's rule": (
        2,
        {"forgotten": ("optimizer_rule",)},
        "or ZeRO.optimizer_rule. Or make the state for shards",
    ),
    "3: loss": (3, {"forgotten": ("loss",)}, "ZeRO.loss"),
    "3: the model's rule": (
        3,
        {"model_rule": lambda sharing: RULE},
        "a device needs a part of shape (8, 4) of layers.0.linear.weight",
    ),
    "1: which rule is the model's": (
        1,
        {"model_rule": lambda sharing: sharing.optimizer_rule},
        "in stage 1, a device needs a part of shape (8, 8) of layers.0.linear.weight; got (8, 4). "
        "The whole shape is (16, 8), and the spec is P('tensor',).",
    ),
    "the rule of the split layers": (
        1,
        {"inside": WHOLE},
        "tensor.ColumnLinear needs an eqx.nn.Linear whose 16 outputs are split over the 2 devices",
    ),
    "the rule of the other leaves": (
        1,
        {"inside": lambda path, leaf: RULE(path, leaf) if "0" in path else None},
        "needs a rule",
    ),
    "the axis of the mesh": (
        1,
        {"axis": "replica"},
        "ZeRO over 'replica' needs a mesh with that axis; the axes are {'data': 2",
    ),
    "the stage": (0, {}, "ZeRO has the stages 1, 2 and 3; got stage=0"),
    "the model's other sizes": (
        1,
        {"model": eqx.filter_eval_shape(make_mlp, 32)},
        "a device needs a part of shape (16, 8) of",
    ),
    "a leaf of the model": (
        1,
        {"model": eqx.filter_eval_shape(without_bias)},
        "have a leaf 'layers.1.linear.bias'",
    ),
    "the state's specs": (
        1,
        {"specs_in": P()},
        "a device needs a part of shape (8, 8) of layers.0.linear.weight",
    ),
    "the size of the mesh": (1, {"sizes": (4, 2)}, "the mesh has 4 devices along 'data', not 2"),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_what_was_forgotten_is_told(forgotten):
    stage, changes, message = FORGOTTEN[forgotten]
    with pytest.raises(ValueError, match=re.escape(message)):
        trained(stage, **changes)
