"""One function of ours inside a jitted program with shardings: the plain program's numbers, and no
collective but ours.

XLA splits the rest of the program by itself, over the same mesh. Arrays of an Explicit mesh come in
and go out too.
"""

import contextlib
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import EXACT, assert_close

from parallax import cross_entropy, grads, mesh, rules, step, tensor
from parallax.collectives import matmul, ring
from parallax.compiled import certificate

B, T, D, F, H, V = 8, 4, 16, 32, 4, 64
AXES = ("data", "tensor")


@pytest.fixture(scope="module")
def world():
    return mesh.make(data=4, tensor=2)


def drawn(**shapes):
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(shape) / np.sqrt(shape[-1]) for name, shape in shapes.items()
    }


def loss_of_table(table, x):
    """The loss of the words 0, 1, 2 .. after x: [V, D], [B, D]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ table.T, jnp.arange(len(x)))
    return jnp.mean(losses)


def split_loss(table, x):
    targets = lax.axis_index("data") * len(x) + jnp.arange(len(x), dtype=jnp.int32)
    x = tensor.copy_to(x, ring("tensor"))
    return ring.all_mean(cross_entropy.mean(x, table, targets, ring("tensor")), "data")


def attended(out, x):
    """Attention of heads that look at themselves, then the output layer: [H, K, D], [B, T, H,
    K]."""
    shares = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", x, x))
    return jnp.einsum("bhts,bshk,hkd->btd", shares, x, out)


# (plain, ours on local blocks, spec of the weight, specs of x and of the result, shapes of weight
# and x).
CASES = {
    "vocabulary loss": (loss_of_table, split_loss, P("tensor"), P("data"), P(), (V, D), (B, D)),
    "row by a ring": (
        lambda w, x: x @ w,
        lambda w, x: ring.all_reduce(x @ w, "tensor"),
        P("tensor"),
        P("data", "tensor"),
        P("data"),
        (F, D),
        (B, F),
    ),
    "matmul with a reduce-scatter": (
        lambda w, x: x @ w,
        lambda w, x: matmul.matmul_reduce_scatter(x, w, "tensor"),
        P("tensor"),
        P("data", "tensor"),
        P(("data", "tensor")),
        (F, D),
        (B, F),
    ),
    "attention": (
        attended,
        lambda w, x: ring.all_reduce(attended(w, x), "tensor"),
        P("tensor"),
        P("data", None, "tensor"),
        P("data"),
        (H, D // H, D),
        (B, T, H, D // H),
    ),
}


def programs(case, world):
    """value_and_grad of a program: plain, with ours, and with ours and hardly anything else; and
    its placed weights."""
    plain, local, of_weight, of_x, of_result, weight, x = CASES[case]
    ours = mesh.spmd(local, mesh=world, in_specs=(of_weight, of_x), out_specs=of_result)

    def program(inner, weights):
        x = jnp.tanh(weights["x"]) * weights["scale"]  # XLA's own part, before and after
        return jnp.sum(jnp.cos(inner(weights["weight"], x)))

    weights = mesh.place(
        drawn(weight=weight, x=x, scale=x), {"weight": of_weight, "x": of_x, "scale": of_x}, world
    )
    alone = lambda weights: jnp.sum(ours(weights["weight"], weights["x"]) ** 2)
    functions = functools.partial(program, plain), functools.partial(program, ours), alone
    return *map(jax.value_and_grad, functions), weights


def collectives(f, world, *arguments):
    """(kind, axes) -> (how many, bytes) of a compiled program."""
    entries = certificate.read(jax.jit(f).lower(*arguments).compile(), world)
    assert not any(entry.conditional or entry.unbounded for entry in entries)
    return {(entry.kind, entry.axes): (entry.count, entry.bytes) for entry in entries}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
def test_a_function_of_ours_in_a_jitted_program_equals_the_plain_one(case, world):
    plain, ours, _, weights = programs(case, world)
    expected = jax.jit(plain)(jax.tree.map(np.asarray, weights))  # on one device
    found = jax.jit(ours)(weights)
    assert_close(found, expected, EXACT)
    for gradient, weight in zip(jax.tree.leaves(found[1]), jax.tree.leaves(weights), strict=True):
        assert gradient.sharding.is_equivalent_to(weight.sharding, weight.ndim)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", CASES)
def test_the_program_and_its_gradient_send_nothing_but_ours(case, world):
    _, ours, alone, weights = programs(case, world)
    expected = collectives(alone, world, weights)
    assert collectives(ours, world, weights) == expected
    assert expected["collective-permute", ("tensor",)]


def test_a_jitted_model_is_the_body_of_our_step(world):
    """A model that names no axis, one device a group: jitted inside the step, and the step inside a
    jitted loop."""
    everywhere = ("data", "tensor")
    optimizer = optax.sgd(0.1, momentum=0.9)
    batch = tuple(drawn(x=(16, D), y=(16, 4)).values())

    @eqx.filter_jit
    def loss(model, batch):
        x, y = batch
        return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"] - y) ** 2)

    def trained(world, axis):
        make_model = lambda: drawn(up=(D, F), down=(F, 4))
        state, specs = step.init(make_model, optimizer, rules.match("**", P()), world)
        train = step.make(grads.averaged(eqx.filter_value_and_grad(loss), axis), optimizer)
        train = mesh.spmd(
            train, mesh=world, in_specs=(specs, P(everywhere)), out_specs=(specs, P())
        )
        arrays, static = eqx.partition(state, eqx.is_array)

        def body(arrays, _):
            state, info = train(eqx.combine(arrays, static), batch)
            return eqx.filter(state, eqx.is_array), info.loss

        return jax.jit(lambda arrays: lax.scan(body, arrays, length=3))(arrays)

    one = mesh.make(data=1, tensor=1, devices=jax.devices()[:1])
    assert_close(trained(world, ring(everywhere)), trained(one, ring(everywhere)), EXACT)


MESHES = {
    "auto": lambda: mesh.make(data=4, tensor=2),
    "explicit": lambda: jax.make_mesh((4, 2), AXES),
    "mixed": lambda: jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto, AxisType.Explicit)),
    "other explicit": lambda: jax.make_mesh((8,), ("rows",)),
}
ARRAYS = {  # the mesh that the argument lives on, and its spec
    "numpy": None,
    "as the spec": ("explicit", P("data")),
    "whole": ("explicit", P()),
    "split elsewhere": ("explicit", P("tensor")),
    "auto": ("auto", P("tensor")),
    "another mesh": ("other explicit", P("rows")),
}
X = np.arange(64.0).reshape(16, 4)


def summed(world):
    """The sum of each block of two rows, over all blocks; and the rows doubled."""
    body = lambda x: (ring.all_reduce(x[:2] + x[2:], "data"), 2 * x)
    return mesh.spmd(body, mesh=world, in_specs=(P("data"),), out_specs=(P(), P("data")))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("over", ["auto", "explicit"])
def test_arrays_of_an_explicit_mesh_come_in_and_go_out(over, array):
    world = MESHES[over]()
    x = (
        X
        if ARRAYS[array] is None
        else jax.device_put(X, NamedSharding(MESHES[ARRAYS[array][0]](), ARRAYS[array][1]))
    )

    def program(x):
        total, doubled = summed(world)(x + 1 - 1)
        return jnp.sum(total**2), (total, doubled)

    (_, found), gradient = jax.jit(jax.value_and_grad(program, has_aux=True))(x)
    total = X.reshape(8, 2, 4).sum(0)
    for result, expected in zip(
        (*found, gradient), (total, 2 * X, np.tile(2 * total, (8, 1))), strict=True
    ):
        np.testing.assert_array_equal(result, expected)
    assert found[1].sharding.mesh.axis_types == world.axis_types
    assert found[1].sharding.is_equivalent_to(NamedSharding(world, P("data")), 2)
    if array == "split elsewhere":
        np.testing.assert_array_equal(summed(world)(x)[0], total)  # outside of jit too


@pytest.mark.parametrize(
    ("context", "over"), [("explicit", "auto"), ("auto", "explicit"), ("explicit", "explicit")]
)
def test_the_set_mesh_says_the_types_of_the_axes(context, over):
    with jax.set_mesh(MESHES[context]()):
        total, doubled = jax.jit(summed(MESHES[over]()))(X)
    np.testing.assert_array_equal(total, X.reshape(8, 2, 4).sum(0))
    assert doubled.sharding.mesh.axis_types == MESHES[context]().axis_types


def test_a_map_over_an_explicit_mesh_can_be_batched():
    x = np.stack([X, X + 1, X + 2])  # three: it divides by no axis
    total, doubled = jax.jit(jax.vmap(summed(MESHES["explicit"]())))(x)
    np.testing.assert_array_equal(total, x.reshape(3, 8, 2, 4).sum(1))
    np.testing.assert_array_equal(doubled, 2 * x)


def trained(world, context):
    """Three steps from `step.init` on, on a batch of `mesh.place`."""
    optimizer = optax.sgd(0.1, momentum=0.9)
    specs_of = rules.first(rules.match("weight", P("tensor")), rules.match("**", P()))
    with context:
        state, specs = step.init(
            lambda: drawn(weight=(4, D), bias=(1, 4)), optimizer, specs_of, world
        )
        batch = mesh.place(np.ones((8, D)), P("data"), world)

        def loss(model, x):
            return ring.all_reduce(jnp.mean((x @ model["weight"].T) ** 2), "tensor") + jnp.sum(
                model["bias"] ** 2
            )

        train = step.make(grads.averaged(eqx.filter_value_and_grad(loss), ring("data")), optimizer)
        train = eqx.filter_jit(
            mesh.spmd(train, mesh=world, in_specs=(specs, P("data")), out_specs=(specs, P()))
        )
        for _ in range(3):
            state, info = train(state, batch)
    return jax.tree.map(np.asarray, eqx.filter((state, info), eqx.is_array))


def test_a_state_of_an_explicit_mesh_is_trained():
    found = trained(MESHES["explicit"](), jax.set_mesh(MESHES["explicit"]()))
    jax.tree.map(
        np.testing.assert_array_equal, found, trained(MESHES["auto"](), contextlib.nullcontext())
    )


@pytest.mark.parametrize("over", ["auto", "explicit"])
@pytest.mark.parametrize("manual", [AXES, ("data",), ("tensor",)], ids=str)
def test_a_map_inside_a_map_is_refused(over, manual):
    world = MESHES[over]()
    said = (
        f"this call is inside a map already, which runs over {', '.join(map(repr, manual))}. "
        "Inside that map, call the function itself with "
    )
    spec = P(manual[0])
    outer = jax.shard_map(
        summed(world), mesh=world, in_specs=spec, out_specs=spec, axis_names=set(manual)
    )
    with pytest.raises(
        ValueError, match="^mesh.spmd maps over all axes of its mesh, but " + re.escape(said)
    ):
        jax.jit(outer)(mesh.place(X, spec, world))


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("over", ["auto", "explicit"])
def test_another_mesh_than_the_set_one_is_refused_and_the_cures_work(over):
    world, other = MESHES[over](), mesh.make(data=8)
    said = (
        "mesh.spmd was given the mesh {'data': 4, 'tensor': 2}, but jax.set_mesh has set another, "
        "{'data': 8}. Pass that mesh "
    )
    with jax.set_mesh(other):
        with pytest.raises(ValueError, match=re.escape(said)):
            summed(world)(X)
        doubled = mesh.spmd(lambda x: 2 * x, mesh=other, in_specs=(P("data"),), out_specs=P("data"))
        np.testing.assert_array_equal(doubled(X), 2 * X)
    np.testing.assert_array_equal(summed(world)(X)[1], 2 * X)


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("inside", [False, True], ids=["mesh=", "set_mesh"])
def test_a_mesh_of_mixed_axes_is_refused_and_the_cures_work(inside):
    said = (
        "needs a mesh whose axes are all Auto, as mesh.make's are, or all Explicit; got 'data' "
        "Auto, 'tensor' Explicit. Use "
    )
    mixed = MESHES["mixed"]()
    with (
        pytest.raises(ValueError, match=re.escape(said)),
        jax.set_mesh(mixed) if inside else contextlib.nullcontext(),
    ):
        summed(MESHES["auto"]() if inside else mixed)(X)
    cure = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    np.testing.assert_array_equal(summed(cure)(mesh.place(X, P("tensor"), mixed))[1], 2 * X)
