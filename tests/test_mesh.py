"""Meshes, trees placed on them and mapped over them, and every refusal in its own words."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import mesh


def test_programs_of_many_cpus_may_not_come_from_the_compilation_cache(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        with pytest.raises(ValueError, match="can hang or return wrong numbers"):
            mesh.make(data=8)
        mesh.make(data=1, devices=jax.devices()[:1])
        jax.config.update("jax_enable_compilation_cache", False)
        mesh.make(data=8)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", None)


class Linear(eqx.Module):
    weight: jax.Array
    bias: np.ndarray
    activation: object
    name: str
    kind: str = eqx.field(static=True, default="linear")

    def __call__(self, x):
        return self.activation(x @ self.weight + self.bias[None])


def linear(inputs=4, outputs=8):
    return Linear(jnp.ones((inputs, outputs)), np.arange(float(outputs)), jax.nn.relu, "first")


@pytest.fixture(scope="module")
def world():
    return mesh.make(data=4, tensor=2)


@given(st.sampled_from([(8,), (1, 8), (4, 2), (2, 4), (2, 2, 2), (1,), (3,), (5, 1), (2, 3)]))
def test_make(sizes):
    named = dict(zip("abc", sizes, strict=False))
    devices = jax.devices()[: int(np.prod(sizes))]
    made = mesh.make(devices=devices, **named)
    assert dict(made.shape) == named
    assert list(made.shape) == list(named)  # in the order given
    assert set(made.devices.flat) == set(devices)
    assert set(made.axis_types) == {AxisType.Auto}


def test_make_takes_all_devices():
    assert mesh.make(data=8).devices.size == jax.device_count() == 8


MAKE_CPU = "make {0} virtual CPU devices with jax.config.update('jax_num_cpu_devices', {0})"
WRONG_SIZES = {  # the sizes, and what make says
    (
        ("data", 3),
    ): "The mesh sizes data=3 multiply to 3, and there are 8 devices. Either set data=8, or pass "
    f"devices=jax.devices()[:3], or {MAKE_CPU.format(3)}.",
    (
        ("data", 3),
        ("tensor", 2),
    ): "The mesh sizes data=3 x tensor=2 multiply to 6, and there are 8 devices. Either set "
    f"data=4, or pass devices=jax.devices()[:6], or {MAKE_CPU.format(6)}.",
    (
        ("data", 4),
        ("tensor", 4),
    ): "The mesh sizes data=4 x tensor=4 multiply to 16, and there are 8 devices. Either set "
    f"data=2 or tensor=2, or {MAKE_CPU.format(16)}.",
    (
        ("data", 3),
        ("tensor", 5),
    ): "The mesh sizes data=3 x tensor=5 multiply to 15, and there are 8 devices. Either "
    f"{MAKE_CPU.format(15)}.",
    (
        ("data", 1),
    ): "The mesh sizes data=1 multiply to 1, and there are 8 devices. Either set data=8, or pass "
    f"devices=jax.devices()[:1], or {MAKE_CPU.format(1).replace('devices with', 'device with')}.",
    (
        ("data", 0),
    ): "mesh.make needs axes of size 1 or more, as in make(data=4, tensor=2); got (data=0).",
    (
        ("data", -2),
        ("tensor", -4),
    ): "mesh.make needs axes of size 1 or more, as in make(data=4, tensor=2); got (data=-2 x "
    "tensor=-4).",
    (): "mesh.make needs axes of size 1 or more, as in make(data=4, tensor=2); got ().",
}


@pytest.mark.parametrize("sizes", WRONG_SIZES, ids=str)
def test_make_refuses(sizes):
    with pytest.raises(ValueError, match=f"^{re.escape(WRONG_SIZES[sizes])}$"):
        mesh.make(**dict(sizes))


@pytest.mark.parametrize(
    "sizes", [sizes for sizes, said in WRONG_SIZES.items() if "Either" in said], ids=str
)
def test_the_cures_that_make_names_work(sizes):
    said = WRONG_SIZES[sizes]
    for name, size in re.findall(r"(?:set|or) (\w+)=(\d+)", said):
        assert mesh.make(**dict(sizes) | {name: int(size)}).devices.size == 8
    for count in re.findall(r"jax.devices\(\)\[:(\d+)\]", said):
        assert mesh.make(devices=jax.devices()[: int(count)], **dict(sizes)).devices.size == int(
            count
        )


def test_spmd_hands_out_blocks(world):
    x = np.arange(32.0).reshape(8, 4)
    f = mesh.spmd(
        lambda x, y: (
            x + lax.axis_index("data"),
            {"local": jnp.zeros((1, 1)) + x.shape[0], "y": y},
        ),
        mesh=world,
        in_specs=(P("data", "tensor"), P()),
        out_specs=(P("data", "tensor"), {"local": P("data", "tensor"), "y": P()}),
    )
    with jax.numpy_dtype_promotion("standard"):
        blocks, rest = jax.jit(f)(x, np.float32(7))
    np.testing.assert_array_equal(blocks, x + np.arange(4).repeat(2)[:, None])
    np.testing.assert_array_equal(rest["local"], np.full((4, 2), 2.0))
    assert (rest["y"], rest["y"].dtype) == (7, np.float32)


def test_spmd_takes_equinox_modules(world):
    """An MLP holds functions as leaves; a tree prefix of specs covers them too, and they come
    back."""
    model = eqx.nn.MLP(4, 4, 8, 2, jax.nn.gelu, key=jax.random.key(0))
    x = np.linspace(-1, 1, 32).reshape(8, 4)

    def body(model, x):
        assert (model.activation, model.layers[0].use_bias) == (jax.nn.gelu, True)
        return model, jax.vmap(model)(x)

    f = mesh.spmd(body, mesh=world, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
    returned, y = eqx.filter_jit(f)(model, x)
    assert jax.tree.structure(returned) == jax.tree.structure(model)
    assert all(
        jax.tree.leaves(
            jax.tree.map(lambda a, b: a is b if callable(a) else (a == b).all(), returned, model)
        )
    )
    np.testing.assert_allclose(y, jax.vmap(model)(x), rtol=1e-14)


def test_static_leaves_pass_through(world):
    def body(model, count):
        assert (model.name, model.kind, model.bias.shape) == ("first", "linear", (4,))
        return {
            "count": count + 1,
            "f": model.activation,
            "text": "out",
            "sum": lax.psum(model.bias.sum(), "tensor"),
            "no": None,
        }

    specs = Linear(P(None, "tensor"), P("tensor"), None, None)
    f = mesh.spmd(body, mesh=world, in_specs=(specs, None), out_specs=P())
    assert f(linear(), 1) == {"count": 2, "f": jax.nn.relu, "text": "out", "sum": 28.0, "no": None}


def test_spmd_differentiates(world):
    """The gradient of an invariant weight is summed over the devices that used it."""
    x = np.arange(8.0)[:, None]
    loss = mesh.spmd(
        lambda w, x: lax.psum(jnp.sum(w * x), "data"),
        mesh=world,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    np.testing.assert_array_equal(jax.grad(jax.jit(loss))(np.ones((1, 1)), x), [[28.0]])


def test_place(world):
    model = linear()
    specs = Linear(P("data", "tensor"), P("tensor"), None, None)
    placed = mesh.place(model, specs, world)
    assert (placed.activation, placed.name, placed.kind) == (jax.nn.relu, "first", "linear")
    assert placed.weight.sharding == NamedSharding(world, P("data", "tensor"))
    assert [shard.data.shape for shard in placed.bias.addressable_shards] == [(4,)] * 8
    np.testing.assert_array_equal(placed.weight, model.weight)
    np.testing.assert_array_equal(placed.bias, model.bias)
    whole = mesh.place(model, P(), world)  # a prefix: one spec for the whole tree
    assert whole.weight.sharding.is_fully_replicated
    again = mesh.spmd(lambda model: model, mesh=world, in_specs=(specs,), out_specs=specs)(placed)
    assert again.weight.sharding.is_equivalent_to(placed.weight.sharding, 2)


REFUSED = {  # what is wrong: (the weight's spec, what is said of it after its path)
    "unknown axis": (
        P("model"),
        "{spec} names the mesh axis 'model', and the mesh has {'data': 4, 'tensor': 2}. Use one "
        "of those.",
    ),
    "axis twice": (
        P("tensor", "tensor"),
        "{spec} uses the mesh axis 'tensor' 2 times. An array can be split over an axis only once.",
    ),
    "axis twice in a tuple": (
        P(("data", "data")),
        "{spec} uses the mesh axis 'data' 2 times. An array can be split over an axis only once.",
    ),
    "too long": (
        P(None, None, "data"),
        "{spec} has 3 entries, and the array has 2 dims (shape (6, 8)). Drop entries, so "
        "that at most one for each dim is left.",
    ),
    "does not divide": (
        P("data"),
        "{spec}: dim 0 of shape (6, 8) must be a multiple of 4, the size of mesh axis 'data'. "
        "Choose another dim, or replicate this leaf with P().",
    ),
    "several axes do not divide": (
        P(("tensor", "data")),
        "{spec}: dim 0 of shape (6, 8) must be a multiple of 8, the size of mesh axis "
        "'tensor' x 'data'. Choose another dim, or replicate this leaf with P().",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refusals_name_the_leaf(world, wrong):
    spec, said = REFUSED[wrong]
    said = said.replace("{spec}", str(spec))
    tree = {"layers": [linear(), linear(6)]}
    specs = {"layers": [P(), Linear(spec, P(), None, None)]}
    with pytest.raises(ValueError, match=f"^{re.escape('layers.1.weight: ' + said)}$"):
        mesh.place(tree, specs, world)
    f = mesh.spmd(lambda x, tree: x, mesh=world, in_specs=(P(), specs), out_specs=P())
    with pytest.raises(
        ValueError, match=f"^{re.escape('1.layers.1.weight: ' + said)}"
    ):  # 1: the second argument
        jax.jit(f)(np.ones(3), eqx.filter(tree, eqx.is_array))


def test_the_cures_of_refusals_work(world):
    for spec in (P(), P("tensor"), P(None, "data"), P(None, ("tensor", "data"))):
        mesh.place(linear(6), Linear(spec, P(), None, None), world)


@pytest.mark.parametrize(
    "specs", [(P(),), (P(), {"b": P()}), (P(), {"a": P(), "b": P()}), (P(), P(), P())], ids=str
)
def test_specs_of_another_structure(world, specs):
    said = (
        "^The specs must have the structure of the arguments, or of a prefix of it: one "
        "PartitionSpec per argument, or a tree "
    )
    f = mesh.spmd(lambda x, tree: x, mesh=world, in_specs=specs, out_specs=P())
    with pytest.raises(ValueError, match=f"{said}such as rules.specs returns. "):
        f(np.ones(3), {"a": np.ones(2)})


def test_place_refuses_another_structure(world):
    with pytest.raises(ValueError, match="The specs must have the structure of the arguments"):
        mesh.place({"a": np.ones(2)}, {"b": P()}, world)


@pytest.mark.parametrize("collective", [jax.lax.psum, jax.lax.pmax, jax.lax.all_gather])
def test_an_error_of_jax_about_a_misspelt_axis_names_the_axes(world, collective):
    f = mesh.spmd(lambda x: collective(x, "dta"), mesh=world, in_specs=P("data"), out_specs=P())
    with pytest.raises((AssertionError, NameError)) as error:
        f(jnp.ones(8))
    (note,) = (note for note in error.value.__notes__ if "mesh.spmd" in note)
    assert note.startswith("mesh.spmd runs this function over 'data', 'tensor'. JAX raises")


def test_an_error_of_a_users_own_gets_no_note(world):
    def f(x):
        raise AssertionError("mine")

    with pytest.raises(AssertionError, match="mine") as error:
        mesh.spmd(f, mesh=world, in_specs=P("data"), out_specs=P())(jnp.ones(8))
    assert not any("mesh.spmd" in note for note in getattr(error.value, "__notes__", ()))


def test_jax_refuses_copies_that_may_differ(world):
    """What varies along an axis may not leave as if it were the same there: the check is always
    on."""
    f = mesh.spmd(lambda x: x * 2, mesh=world, in_specs=(P("data"),), out_specs=P())
    with pytest.raises(ValueError, match=r"out_specs.*(replicat|vary|varies)"):
        jax.jit(f)(np.ones(8))
