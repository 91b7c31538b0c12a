"""The link that is fitted is the one that the times were made from; what is chosen is a twin of
`psum`, and told."""

import hlo
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import cost, doubling, halving, ring, send_next, tuning, two_rings
from parallax.collectives.cost import Link
from parallax.collectives.types import varying

PRICES = [
    cost.of(f, nbytes, 8)
    for nbytes in (2**12, 2**16, 2**20, 2**24)
    for f in (send_next, ring.all_gather, two_rings.all_gather, ring.reduce_scatter)
]
terms = st.tuples(
    st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8), st.floats(1e-11, 1e-8), st.floats(1e-6, 1e-3)
)


@pytest.mark.sweep(3, "wholes")
@given(terms, st.booleans())
def test_finds_the_link_behind_the_times(terms, one_port):
    link = Link(*terms, one_port=one_port)
    found = tuning.solved(PRICES, [cost.seconds(price, link) for price in PRICES])
    np.testing.assert_allclose(
        [cost.seconds(p, found) for p in PRICES], [cost.seconds(p, link) for p in PRICES], rtol=1e-6
    )
    assert found.error < 1e-6


def test_spoilt_times_do_not_spoil_the_link():
    link = Link(5e-5, 1e-9, 2e-10, 1e-5)
    measured = [
        cost.seconds(price, link) * (30 if k % 5 == 2 else 1) for k, price in enumerate(PRICES)
    ]
    found = tuning.solved(PRICES, measured)
    np.testing.assert_allclose(
        found[:3], link[:3], rtol=0.05
    )  # the iteration ends near, not at, the least sum


def test_no_term_is_negative_and_the_error_is_told():
    measured = [
        1e-3 if price.reduced else 2e-3 for price in PRICES
    ]  # adding makes it faster: no link does that
    found = tuning.solved(PRICES, measured)
    assert min(found) >= 0
    assert found.error == pytest.approx(
        np.median(
            [abs(cost.seconds(p, found) / t - 1) for p, t in zip(PRICES, measured, strict=True)]
        )
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("sizes", "axis"), [({"x": 1}, "x"), ({"x": 2, "y": 2}, "y"), ({"x": 2, "y": 2}, ("x", "y"))]
)
def test_fits_on_a_live_mesh(sizes, axis):
    world = mesh.make(devices=jax.devices()[: np.prod(list(sizes.values()))], **sizes)
    found = tuning.fit(world, axis, sizes=(64, 4096), rounds=2)
    assert min(found) >= 0
    assert sum(found[:4]) > 0


def test_a_fit_prices_the_bytes_that_its_calls_send(monkeypatch):
    world, priced, sent = mesh.make(x=2, devices=jax.devices()[:2]), [], []

    def measure(world, axis_name, calls, *, rounds):
        for f, nbytes in calls:
            over = mesh.spmd(
                lambda x, f=f: varying(f(x), axis_name),
                mesh=world,
                in_specs=(P("x"),),
                out_specs=P("x"),
            )
            ops = hlo.collectives(over, jax.ShapeDtypeStruct((2 * nbytes // 4,), jnp.float32))
            sent.append(sum(op.bytes for op in ops))
        return [1.0] * len(calls)

    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(
        tuning,
        "solved",
        lambda costs, _: priced.extend(cost.sent for cost in costs) or Link(1.0, 0.0),
    )
    tuning.fit(world, "x", sizes=(4096,))
    assert priced == sent


CHOICE = tuning.Choice(
    (2**10, 2**20),
    {lax.psum: [2.0, 4.0], doubling.all_reduce: [1.0, 16.0], ring.all_reduce: [9.0, 3.9]},
)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, doubling.all_reduce),
        (2**10, doubling.all_reduce),
        (2**15, lax.psum),  # on lines between the sizes, in logarithms
        (2**20, ring.all_reduce),
        (2**30, ring.all_reduce),
    ],
)
def test_chooses_the_fastest_at_each_size(nbytes, expected):
    assert CHOICE.fastest(nbytes) is expected


def test_auto_is_a_twin_of_psum(monkeypatch):
    """On whole numbers; each leaf by the function of its size, other axes by psum, and the text
    says so."""
    raced = []

    def measure(mesh, axis, calls, *, rounds):
        if len(calls) > 2 * 2:  # the fit
            return [1e-4 if nbytes < 2**12 else 1e-2 for _, nbytes in calls]
        sizes = [
            nbytes for _, nbytes in calls[: len(calls) // 2]
        ]  # the race: halving is fast where psum is slow
        raced.append(sizes)
        return [1e-3 if size < 1000 else 1e-4 for size in sizes] + [
            1e-4 if size < 1000 else 1e-3 for size in sizes
        ]

    monkeypatch.setattr(tuning, "measure", measure)
    world = mesh.make(x=4, y=2)
    auto, text = tuning.auto(world, "x", among=[halving.all_reduce], sizes=(64, 4096))
    assert raced == [[64, 4096], [512], [1448]]  # closer and closer to where psum begins to win
    psum, halved = (
        "lax.psum: 64 B 1, 512 B 1, 1.414 kB 0.1, 4 kB 0.1",
        "halving.all_reduce: 64 B 0.1 (",
    )
    for words in ("Axis 'x' of 4 devices", psum, halved, "lax.psum from 1 kB"):
        assert words in text, text
    tree = {
        "small": jnp.arange(8.0 * 3).reshape(8, 3),
        "large": jnp.arange(8.0 * 2048).reshape(8, 2048),
    }
    over = lambda f: jax.jit(
        mesh.spmd(lambda t: f(f(t, "x"), "y"), mesh=world, in_specs=(P(("x", "y")),), out_specs=P())
    )
    jax.tree.map(np.testing.assert_array_equal, over(auto.all_reduce)(tree), over(lax.psum)(tree))
    lowered = over(auto.all_reduce).lower(tree).as_text()
    assert lowered.count('collective_permute"(') == 4  # halving on the small leaf, 2 hops each way
    assert lowered.count('all_reduce"(') == 1 + 2  # psum on the large one, and over y


@pytest.mark.sweep(3, "wholes")
def test_auto_on_a_live_mesh():
    world = mesh.make(x=2, y=2, devices=jax.devices()[:4])
    auto, text = tuning.auto(
        world, "x", ("x", "y"), sizes=(64, 4096), rounds=1, link=Link(1e-5, 1e-9)
    )
    assert "Axis ('x', 'y') of (2, 2) devices" in text
    assert text.count("Chosen as the fastest for each array size:") == 2
    run = lambda f: jax.jit(
        mesh.spmd(lambda x: f(x, ("y", "x")), mesh=world, in_specs=(P(("x", "y")),), out_specs=P())
    )
    x = np.arange(4 * 64.0, dtype=np.float32)
    np.testing.assert_array_equal(run(auto.all_reduce)(x), run(lax.psum)(x))
