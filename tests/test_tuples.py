"""Over a tuple of axes each leaf is reduced along those where its parameter is the same: equal to
one device, whatever is split.

Legend: a parameter is split over axes that split the batch too (a share, gathered before it is
used), over others (a shard, whose partial sums are joined), both or none.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import EXACT, assert_close

from parallax import grads, mesh, rules, step, tensor, zero
from parallax.collectives import Axis, bucketed, halving, ring, xla
from parallax.collectives.types import varying

ALGORITHMS = {
    "xla": xla,
    "ring": ring,
    "halving": halving,
    "bucketed": lambda names: bucketed(ring(names)),
    "in turn": lambda names: Axis.of(
        tuple((ring if i % 2 else halving)(name) for i, name in enumerate(names))
    ),
}


class Case(NamedTuple):
    """A mesh, how each parameter is split, and the axes that split the batch."""

    sizes: dict[str, int]
    specs: dict[str, P]  # of the parameters as they live
    shares: dict[str, P]  # and of their gradients after `zero.reduce_scattered`
    over: tuple[str, ...]
    algorithm: str

    @property
    def axis(self):
        return ALGORITHMS[self.algorithm](self.over)

    def names(self, spec):
        return [name for entry in spec for name in mesh.entry_axes(entry)]


@st.composite
def cases(draw):
    names = ("a", "b", "c")[: draw(st.integers(1, 3), label="axes")]
    sizes: dict[str, int] = {}
    for name in names:
        most = 8 // math.prod(sizes.values())
        sizes[name] = draw(st.integers(1, min(6, most)), label=name)
    over = tuple(
        draw(
            st.permutations(draw(st.lists(st.sampled_from(names), min_size=1, unique=True))),
            label="over",
        )
    )
    specs, shares = {}, {}
    for leaf in ("p", "q", "r"):
        entries: list[list[str]] = [[], []]
        more: list[list[str]] = [[], []]
        # Outermost the axes that do not split the batch: what is gathered or scattered lies
        # innermost.
        for name in sorted(
            names, key=lambda name: (name in over, over.index(name) if name in over else 0)
        ):
            dim = draw(
                st.sampled_from([None, 0, 1] + [2, 3] * (name in over)), label=f"{leaf} over {name}"
            )
            if dim is not None:
                more[dim % 2].append(name)
            if dim in (0, 1):
                entries[dim].append(name)
        # A share lives inside what is scattered of it: the axes that split the parameter itself
        # come first.
        more = [
            [*own, *(name for name in all_ if name not in own)]
            for own, all_ in zip(entries, more, strict=True)
        ]
        specs[leaf], shares[leaf] = (
            P(*(tuple(entry) or None for entry in each)) for each in (entries, more)
        )
    return Case(
        sizes, specs, shares, over, draw(st.sampled_from(sorted(ALGORITHMS)), label="algorithm")
    )


def problem(case, seed=0):
    generator = np.random.default_rng(seed)
    n = math.prod(case.sizes.values())
    size = lambda entry: math.prod(case.sizes[name] for name in mesh.entry_axes(entry))
    shape = lambda spec: [size(entry) * (1 + dim) for dim, entry in enumerate(spec)]
    params = {name: generator.normal(size=shape(spec)) for name, spec in case.shares.items()}
    return params, generator.normal(size=(2 * n,))


def loss(params, x, comms=None):
    """The mean over the batch of a sum over all elements, each by itself; `comms` are the axes that
    split a leaf's elements."""
    total = jnp.zeros_like(x)
    for name, leaf in params.items():
        p = jnp.reshape(leaf, (-1, 1))
        terms = jnp.sum(jnp.sin(p * x[None]) + 0.1 * p**2, axis=0)
        total += tensor.reduce_from(terms, comms[name]) if comms and comms[name] else terms
    return jnp.mean(total)


def parallel(case):
    """The gradient function of local blocks: shares gathered, shards joined."""
    comms = {
        name: tuple(axis for axis in case.names(spec) if axis not in case.over)
        for name, spec in case.specs.items()
    }

    local = functools.partial(loss, comms=comms)
    return jax.value_and_grad(zero.gathered(local, case.axis, case.specs))


def on(case, f, out):
    world = mesh.make(**case.sizes, devices=jax.devices()[: math.prod(case.sizes.values())])
    return jax.jit(
        mesh.spmd(f, mesh=world, in_specs=(case.specs, P(case.over)), out_specs=(P(), out))
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("how", ["averaged", "summed", "scattered"])
@settings(max_examples=3)
@given(case=cases())
def test_equals_one_device(how, case):
    params, x = problem(case)
    x = x[: 2 * math.prod(case.sizes[name] for name in case.over)]
    expected = jax.value_and_grad(loss)(params, x)
    grad = parallel(case)
    if how == "averaged":
        found = on(case, grads.averaged(grad, case.axis), case.specs)(params, x)
    elif how == "summed":
        n = math.prod(case.sizes[name] for name in case.over)
        part = lambda params, x: jax.tree.map(lambda leaf: leaf / n, grad(params, x))
        found = on(case, grads.summed(part, case.axis, loss=True), case.specs)(params, x)
    else:
        found = on(case, zero.reduce_scattered(grad, case.axis, case.shares), case.shares)(
            params, x
        )
    assert_close(found, expected, EXACT)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hybrid_shares(algorithm):
    """A parameter split inside a group of 4 and copied in 2 groups, the batch over all 8: five
    steps are those of one device."""
    case = Case({"a": 2, "b": 4}, {"p": P("b"), "q": P()}, {}, ("a", "b"), algorithm)
    params = {"p": np.arange(8.0).reshape(4, 2) / 8, "q": np.ones((2, 2))}
    x = np.linspace(-1, 1, 16)
    optimizer = optax.sgd(0.1)
    states = step.State(case.specs, P(), P())
    train = step.make(grads.averaged(parallel(case), case.axis), optimizer, max_norm=1.0)
    plain = jax.jit(step.make(jax.value_and_grad(loss), optimizer, max_norm=1.0))
    world = mesh.make(a=2, b=4)
    train = jax.jit(
        mesh.spmd(train, mesh=world, in_specs=(states, P(case.over)), out_specs=(states, P()))
    )
    ours = theirs = step.State(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    for _ in range(5):
        (ours, info), (theirs, expected) = train(ours, x), plain(theirs, x)
        np.testing.assert_allclose(info[:3], expected[:3], rtol=EXACT)
    assert_close(ours.model, theirs.model, EXACT)


@pytest.mark.parametrize("algorithm", ["xla", "ring"])
def test_experts_over_data_and_expert(algorithm):
    """Tokens go to the device of their expert and back; its weights are summed over `data` alone,
    and divided by all devices."""
    experts, width, tokens = 4, 3, 16
    draw = np.random.default_rng(1).normal
    params = {"w": draw(size=(experts, width, width)), "scale": draw(size=(width,))}
    x = draw(size=(8 * tokens, width))  # on each device the same number for each expert, in order
    axis = ALGORITHMS[algorithm](("data", "expert"))

    def plain_loss(params, x):
        by_expert = x.reshape(8, experts, -1, width)
        return jnp.mean(
            jnp.tanh(jnp.einsum("netd,edf->netf", by_expert, params["w"])) @ params["scale"]
        )

    def local_loss(params, x):
        sent = lax.all_to_all(
            x.reshape(experts, -1, width), "expert", 0, 1, tiled=True
        )  # [1, tokens of all, D]
        y = jnp.tanh(jnp.einsum("etd,edf->etf", sent, params["w"]))
        back = lax.all_to_all(y, "expert", 1, 0, tiled=True)
        return jnp.mean(back @ params["scale"])

    specs = {"w": P("expert"), "scale": P()}
    grad = grads.averaged(jax.value_and_grad(local_loss), axis)
    world = mesh.make(data=2, expert=4)
    f = jax.jit(
        mesh.spmd(grad, mesh=world, in_specs=(specs, P(("data", "expert"))), out_specs=(P(), specs))
    )
    assert_close(f(params, x), jax.value_and_grad(plain_loss)(params, x), EXACT)


def test_a_gather_over_the_outer_axis_is_refused_and_its_cure_works():
    world = mesh.make(fsdp=2, tensor=4)
    w = np.arange(64.0).reshape(16, 4)

    def total(specs):
        local = zero.gathered(
            lambda w: tensor.reduce_from(jnp.sum(w["w"] ** 2), "tensor"), "fsdp", specs
        )
        value = lambda w: lax.pmean(local(w), "fsdp")
        return jax.jit(mesh.spmd(value, mesh=world, in_specs=(specs,), out_specs=P()))({"w": w})

    with pytest.raises(
        ValueError,
        match=(
            r"Dim 0 of w is split over \('fsdp', 'tensor'\).* In the spec, name \('fsdp',\) last, "
            r"as in \('tensor', 'fsdp'\)"
        ),
    ):
        total({"w": P(("fsdp", "tensor"))})
    np.testing.assert_allclose(total({"w": P(("tensor", "fsdp"))}), np.sum(w**2), rtol=EXACT)


@pytest.mark.sweep(3, "wholes")
def test_shares_that_are_scattered_over_the_outer_axis_are_refused():
    world = mesh.make(fsdp=2, tensor=4)
    grad = zero.reduce_scattered(
        jax.value_and_grad(lambda w, x: jnp.sum(w * x)), "fsdp", P(("fsdp", "tensor"))
    )
    f = mesh.spmd(
        grad, mesh=world, in_specs=(P("tensor"), P("fsdp")), out_specs=(P(), P(("fsdp", "tensor")))
    )
    with pytest.raises(ValueError, match=r"Dim 0 of the leaf is split over \('fsdp', 'tensor'\)"):
        f(np.ones(16), np.ones(2))


def test_a_gradient_that_mixes_shards_is_refused():
    """The same along an axis where its parameter differs: the shards' gradients were summed."""
    world = mesh.make(a=8)

    def grad(params, x):
        loss, gradients = jax.value_and_grad(lambda params: jnp.sum(params["w"] * x))(params)
        return lax.pmean(loss, "a"), lax.psum(gradients, "a")

    train = step.make(grad, optax.sgd(0.1))
    states = step.State({"w": P("a")}, P(), P())
    state = step.State(
        {"w": np.ones(8)}, optax.sgd(0.1).init({"w": np.ones(8)}), jnp.zeros((), jnp.int32)
    )
    with pytest.raises(
        ValueError,
        match=r"the parameter w differs along \['a'\], and its gradient is the same there",
    ):
        mesh.spmd(train, mesh=world, in_specs=(states, P("a")), out_specs=(states, P()))(
            state, np.ones(8)
        )


def test_layers_that_are_shared_out_are_refused_where_they_are_looped_over():
    """`rules.fsdp` without `keep` splits the longest dim, and here that is the layers: each replica
    would run 8 of 64."""
    world = mesh.make(data=8)
    draw = np.random.default_rng(0).normal
    params = {"blocks": {"w": draw(size=(64, 16, 16)) / 10, "b": draw(size=(64, 16)) / 10}}
    x = draw(size=(16, 16))
    block = lambda w, x: jnp.tanh(x @ w["w"] + w["b"][None])

    def run(params, x, block=block):
        return jnp.mean(lax.scan(lambda x, w: (block(w, x), None), x, params["blocks"])[0] ** 2)

    def trained(fsdp, layer_of):
        specs = rules.specs(params, fsdp, world)
        gathered = zero.gathered(block, "data", layer_of(specs))
        grad = grads.accumulated(
            jax.value_and_grad(functools.partial(run, block=gathered)), microbatches=2
        )
        grad = grads.averaged(grad, "data")
        return jax.jit(
            mesh.spmd(grad, mesh=world, in_specs=(specs, P("data")), out_specs=(P(), specs))
        )(params, x)

    by_hand = lambda specs: jax.tree.map(lambda spec: P(*spec[1:]), specs["blocks"])
    by_parts = lambda specs: (
        zero.part_specs(specs, "data", blocks=lambda specs: specs["blocks"]).layer
    )
    fsdp = functools.partial(rules.fsdp, "data", size=8, min_size=0)
    with pytest.raises(
        ValueError,
        match=r"blocks.b, here of shape \(8, 16\), differs along 'data', so it.*keep=.*\(0,\)",
    ):
        trained(fsdp(), by_hand)
    with pytest.raises(
        ValueError,
        match=r"part_specs: dim 0 of b, which is looped over, is split over 'data'.*keep=.*\(0,\)",
    ):
        trained(fsdp(), by_parts)
    expected = jax.value_and_grad(run)(params, x)
    for layer_of in (by_hand, by_parts):
        assert_close(trained(fsdp(keep={"blocks.**": (0,)}), layer_of), expected, EXACT)


@pytest.mark.sweep(3, "wholes")
def test_what_is_gathered_may_be_declared_varying_by_hand():
    """Leaves that stay whole differ in type alone, as `grads.averaged` and users declare them."""
    specs = {"w": P("data"), "b": P()}
    local = zero.gathered(lambda p, x: jnp.mean(x * p["w"].sum() + p["b"]), "data", specs)
    grad = lambda p, x: jax.value_and_grad(local)(varying(p, "data"), x)
    f = mesh.spmd(
        lambda p, x: lax.pmean(grad(p, x)[0], "data"),
        mesh=mesh.make(data=8),
        in_specs=(specs, P("data")),
        out_specs=P(),
    )
    assert f({"w": np.ones(8), "b": np.ones(())}, np.ones(8)) == 9


@pytest.mark.sweep(3, "wholes")
def test_a_gradient_function_inside_another_knows_what_that_declared():
    """Shares over data, gathered; an inner sum over tensor, of shards. The outer mean has declared
    all varying over data."""
    specs = {"w": P("data", "tensor"), "b": P()}
    local = zero.gathered(
        lambda p, x: jnp.mean(x * tensor.reduce_from(jnp.sum(p["w"]), "tensor") + p["b"]),
        "data",
        specs,
    )
    half = lambda p, x: jax.tree.map(lambda leaf: leaf / 2, jax.value_and_grad(local)(p, x))
    grad = grads.averaged(grads.summed(half, "tensor", loss=True), "data")
    f = mesh.spmd(
        grad, mesh=mesh.make(data=4, tensor=2), in_specs=(specs, P("data")), out_specs=(P(), specs)
    )
    loss, gradients = f({"w": np.ones((4, 2)), "b": np.ones(())}, np.ones(8))
    assert (loss, float(gradients["b"])) == (9, 1)
