"""A collective's time on a simulated network is that of its messages, one by one, and of the
formulas where these hold."""

import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import hardware, mesh
from parallax.collectives import cost, halving, machines, pairs, ring, torus, two_rings
from parallax.collectives.cost import Link
from parallax.collectives.from_table import messages
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import algorithms, networks
from parallax.plan import plan as planned
from parallax.plan.networks import Group, Level, Nested, Torus

FAST, SLOW = Link(3e-6, 1 / 300e9), Link(14e-6, 1 / 25e9)
SIZE = 2**24


def flat(n):
    return Nested((Level(n, FAST),))


def test_formulas_where_they_hold():
    """On one switch a ring and halving take what `cost` says of them; so does a ring on a torus of
    one dim."""
    for algorithm, n in itertools.product((ring, halving), (4, 8, 64)):
        alone = cost.seconds(cost.of(algorithm.all_reduce, SIZE, n), FAST._replace(gamma=0.0))
        assert networks.seconds(algorithm.table(n), SIZE, flat(n), Group(n)) == pytest.approx(alone)
    line = networks.seconds(ring.table(16), SIZE, Torus((16,), FAST), Group(16))
    assert line == pytest.approx(networks.seconds(ring.table(16), SIZE, flat(16), Group(16)))


@pytest.mark.parametrize("n", [9, 12, 20])
def test_the_last_machine_may_have_fewer_devices(n):
    """Each round of a ring that leaves a machine of eight takes the network's hop."""
    network = networks.of(hardware.A100, n)
    nbytes = n * 2**20
    price = cost.of(ring.all_reduce, nbytes, n)
    alone = cost.seconds(price, hardware.A100.slow._replace(gamma=0.0))
    assert networks.seconds(ring.table(n), nbytes, network, Group(n)) == pytest.approx(alone)


def test_a_smaller_last_group_has_fewer_shared_links():
    """Two devices of six are a group, whose shared links are as fast as one of a device: 2,000
    bytes leave it."""
    network = Nested((Level(4, Link(0.0, 0.0)), Level(6, Link(0.0, 1.0), shared=2.0)))
    swapped = np.array([4, 5, 2, 3, 0, 1])
    assert network.round([(swapped, 1000)]) == 2000


def test_shared_links_count_if_all_their_messages_go_further():
    """1,000 bytes of each device go over the spine; pairs of devices leave their leaf by links that
    are shared by eight. No message ends at that level."""
    one = Link(0.0, 1.0)
    network = Nested((Level(2, one), Level(4, one, shared=8.0), Level(8, one)))
    across = (np.arange(8) + 4) % 8
    assert network.round([(across, 1000)]) == pytest.approx(8000)
    near = (np.arange(8) + 2) % 4 + np.arange(8) // 4 * 4
    assert network.round([(across, 1000), (near, 1)]) == pytest.approx(8008)


def test_links_that_messages_share():
    """Far messages meet on a bare ring; both ways at once halve the time; a spine that is shared by
    two doubles it."""
    bare = Torus((16,), Link(0.0, 1e-9))
    step = lambda k: networks.destinations((16,), (k,), 16, Group(16))
    assert bare.round([(step(4), 1000)]) == pytest.approx(4e-6)
    assert bare.round([(step(-4), 1000)]) == pytest.approx(4e-6)
    assert bare.round([(step(1), 1000), (step(-1), 1000)]) == pytest.approx(1e-6)
    two = networks.seconds(two_rings.table(16), SIZE, bare, Group(16))
    assert two == pytest.approx(networks.seconds(ring.table(16), SIZE, bare, Group(16)) / 2)
    spine = lambda shared: Nested((Level(8, Link(0.0, 0.0)), Level(64, Link(0.0, 1e-9), shared)))
    away = networks.destinations((64,), (8,), 64, Group(64))
    assert spine(2.0).round([(away, 1000)]) == pytest.approx(2 * spine(1.0).round([(away, 1000)]))
    assert spine(8.0).round(
        [(networks.destinations((64,), (1,), 64, Group(64)), 1000)]
    ) == pytest.approx(1e-6)


def test_an_open_dim_has_no_link_round():
    """The message from the last chip to the first goes back over all links, against the others: so
    two rings share each link."""
    line = Torus((4,), Link(1e-6, 1e-9), rings=(False,))
    step = lambda k: networks.destinations((4,), (k,), 4, Group(4))
    assert line.round([(step(1), 1000)]) == pytest.approx(3e-6 + 1e-6)
    assert line.round([(step(1), 1000), (step(-1), 1000)]) == pytest.approx(3e-6 + 2e-6)
    assert networks.of(hardware.TPU_V5E, 8).rings == (False, False)
    assert networks.of(hardware.TPU_V5E, 256).rings == (True, True)
    assert networks.of(hardware.named("v5e:8x16"), 128).rings == (False, True)
    assert networks.of(hardware.named("v5p:4x4x4"), 64).rings == (True, True, True)


@pytest.mark.parametrize(
    ("chip", "axes"),
    [
        ("v5e:2x4", {"data": 8}),
        ("v5e:2x4", {"data": 2, "tensor": 4}),
        ("v5e:4x8", {"data": 8, "tensor": 4}),
        ("v5e:16x16", {"data": 16, "tensor": 16}),
        ("v5p:4x4x4", {"data": 8, "tensor": 8}),
    ],
)
def test_devices_are_on_the_chips_where_the_mesh_lays_them(chip, axes):
    """A ring whose hops are all of one link takes what the formula says, and two rings the half;
    with longer hops, a ring takes longer, or its hops take all links, so that two rings gain
    nothing."""
    chip = hardware.named(chip)
    for axis, links in chip.hops(axes).items():
        found = networks.along(axis, axes, chip, [("all_reduce", SIZE, 1)])
        price = cost.of(ring.all_reduce, SIZE, axes[axis])
        alone = cost.seconds(price, chip.fast._replace(gamma=0.0))
        if links == 1.0:
            assert found["ring"] == pytest.approx(alone)
            if axes[axis] > 2:  # two rings of two devices are one
                assert found["two_rings"] == pytest.approx(alone / 2, rel=0.05)
        else:
            assert found["ring"] > 1.2 * alone or found["two_rings"] > 0.98 * found["ring"]
    alone = networks.along("data", {"data": 1}, chip, [("all_reduce", SIZE, 1)])
    assert set(alone.values()) == {0.0}


def test_two_devices_of_a_chip_have_its_figures_together():
    """They are on the slice's torus, not on the network between slices."""
    chip = hardware.named("tpu7x:2x2x1")
    one, two = (
        planned(gpt2.SMALL, Layout(data=n, precision="bfloat16"), chip, batch=32) for n in (4, 8)
    )
    assert two.seconds.products == pytest.approx(one.seconds.products)
    assert two.hardware.memory == one.hardware.memory / 2
    # The half of the hops is inside a chip, and a link carries the bytes of 7 hops, not of 3, of
    # blocks half as large.
    assert two.seconds.messages == pytest.approx(one.seconds.messages * 7 / 6, rel=0.03)
    device = chip.for_devices(8)
    assert device.for_devices(8) is device
    assert chip.for_devices(4) is chip
    assert networks.of(device, 8).devices == 8
    assert device.link(8).beta == 2 * chip.link(4).beta  # both devices send over the chip's links
    # A message to the other device of a chip crosses no link.
    assert networks.of(device, 8).round([(np.arange(8) ^ 1, 1000)]) == 0.0
    assert networks.of(device, 8).round([(np.arange(8) ^ 2, 1000)]) == pytest.approx(
        chip.fast.alpha + 2000 * chip.fast.beta
    )


def test_a_chip_of_one_core_is_one_device():
    with pytest.raises(ValueError, match=r"torus 2x4 has 8 chips, and the layout has 16 devices"):
        hardware.named("v5e:2x4").hops({"data": 16})
    # Two slices, as three slices are
    chip = hardware.named("v5e:2x4")
    assert chip.for_devices(16) is chip


def test_a_slice_of_one_layer_of_a_cube_has_no_rings():
    axes = {"data": 4, "tensor": 4}
    assert hardware.named("v4:4x4").hops(axes) == hardware.named("v4:4x4x1").hops(axes)
    assert networks.of(hardware.named("v5p:8x8"), 64).rings == (False, False)


@pytest.mark.parametrize("name", ["v5e:2x2x4", "v5e:8", "v4:8", "v5p:2x2x2x2"])
def test_a_torus_of_other_dims_than_the_chips_is_refused(name):
    with pytest.raises(ValueError, match=f"sizes for the torus of a v.*got {name!r}. Write"):
        hardware.named(name)


def test_devices_that_do_not_fill_their_chips_are_refused():
    """The record of a plan for 8 devices on 4 chips, for 3 devices."""
    device = hardware.named("tpu7x:2x2x1").for_devices(8)
    with pytest.raises(ValueError, match=r"for 2 devices on each chip .* 3 devices do not fill"):
        networks.along("data", {"data": 3}, device, [("all_reduce", SIZE, 1)])


def test_a_torus_by_its_own_table():
    square = Torus((8, 8), Link(0.0, 1e-9))
    own = networks.seconds(torus.table(8, 8), SIZE, square, Group(64))
    assert own == pytest.approx(SIZE * 1e-9 * 2 * 63 / 64 / 2, rel=0.02)  # both dims at once
    assert own < networks.seconds(halving.table(64), SIZE, square, Group(64))


def events(routes, nbytes, network, group):
    """The same, a message at a time: each waits for its device's last round, then for the ports and
    links that it takes."""
    ports, done = {}, np.zeros(network.devices)
    for back in (False, True):
        for each in messages(
            routes, [-(-nbytes // group.size // len(routes))] * len(routes), back=back
        ):
            come = done.copy()
            queue = []
            for message in each.messages:
                to = networks.destinations(routes[0].shape, message.step, network.devices, group)
                for i in range(network.devices):
                    heapq.heappush(queue, (done[i], i, int(to[i]), message.bytes))
            while queue:
                ready, i, j, size = heapq.heappop(queue)
                level = next(
                    k
                    for k, level in enumerate(network.levels)
                    if i // level.devices == j // level.devices
                )
                link, shared = network.levels[level].link, network.levels[level].shared
                inside = network.levels[level - 1].devices if level else 1
                taken = [(("port", i, level), size * link.beta)]
                taken += (
                    [(("up", i // inside, level), size * link.beta * shared / inside)]
                    if level
                    else []
                )
                for name, busy in taken:  # a message that waits for one link leaves the others free
                    ports[name] = max(ready, ports.get(name, 0.0)) + busy
                end = link.alpha + max(ports[name] for name, _ in taken)
                come[i], come[j] = max(come[i], end), max(come[j], end)
            done = come
    return done.max()


@pytest.mark.parametrize(
    "algorithm",
    [ring, two_rings, halving, pairs, machines(8), machines(8, halving)],
    ids=lambda algorithm: algorithm.name,
)
@pytest.mark.parametrize("shared", [1.0, 4.0])
def test_message_by_message(algorithm, shared):
    network = Nested((Level(8, FAST), Level(64, SLOW, shared)))
    routes = algorithm.table(32)
    routes = routes if isinstance(routes, tuple) else (routes,)
    for group in (Group(32), Group(32, stride=2)):
        fold = networks.seconds(routes, SIZE, network, group)
        one_by_one = events(routes, SIZE, network, group)
        # Where links are shared unevenly, devices that wait for none go on before the round is
        # over: up to 30 % sooner.
        assert (
            one_by_one == pytest.approx(fold)
            if shared == 1.0
            else 0.7 * fold < one_by_one < 1.0001 * fold
        )


def test_a_step_in_a_group_goes_to_its_own_next_device():
    """Two groups of four, of every second device each, and one step round both."""
    next_device = networks.destinations((4,), (1,), 8, Group(4, stride=2))
    assert next_device.tolist() == [2, 3, 4, 5, 6, 7, 0, 1]


@pytest.mark.parametrize("n", [6, 8])
def test_halving_between_machines_is_psum(n):
    """What the search proposes for thousands of machines, on those that are here."""
    world = mesh.make(data=n, devices=jax.devices()[:n])
    x = jnp.arange(n * 35.0).reshape(n * 5, 7)
    both = lambda x: (machines(2, halving).all_reduce(x, "data"), lax.psum(x, "data"))
    ours, theirs = jax.jit(mesh.spmd(both, mesh=world, in_specs=P("data"), out_specs=P()))(x)
    assert (ours == theirs).all()  # whole numbers add exactly
    assert machines(2, halving).name == "machines(2, halving)"


def test_the_search_of_movers():
    """On few devices of a machine anything will do; on 2,048 machines a ring's rounds are most of
    the time."""
    wide = planned(
        gpt2.XL, Layout(data=2048, zero=1, precision="bfloat16"), hardware.A100, batch=2048
    )
    by_rings = planned(
        gpt2.XL,
        wide.layout,
        hardware.A100,
        batch=2048,
        axes={"data": ring("data")},
    )
    (data,) = wide.algorithms
    assert data.axis == "data"
    assert data.algorithm != "ring"
    assert wide.seconds.messages < by_rings.seconds.messages
    assert by_rings.algorithms == ()
    assert data.algorithm in algorithms.table(wide.algorithms)
    with pytest.raises(ValueError, match="tables of 8 devices"):
        networks.seconds(ring.table(4), SIZE, flat(8), Group(8))
