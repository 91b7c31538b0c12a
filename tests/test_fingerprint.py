"""A bit that turns in one device's copy is found, with its leaf and its device; copies that are
equal raise no alarm."""

import functools
import random

import equinox as eqx
import flips
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, rules, step
from parallax.collectives import ring
from parallax.collectives.types import replicated, varying
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.run import fingerprint

DTYPES = (
    *(
        "bool",
        "int4",
        "uint8",
        "int16",
        "int32",
        "uint32",
        "int64",
        "float8_e4m3fn",
        "bfloat16",
        "float16",
        "float32",
    ),
    *("float64", "complex64", "complex128"),
)
SPECS = (P(), P("data"), P(None, "tensor"), P("data", "tensor"), P(("tensor", "data")))


def over(**sizes):
    return mesh.make(**(sizes or {"data": 4, "tensor": 2}))


def values(dtype, shape=(8, 4)):
    """Any bits, as numbers of the type."""
    generator = np.random.default_rng(0)
    if dtype == "bool":
        return generator.integers(2, size=shape).astype(bool)
    if dtype == "int4":
        return generator.integers(-8, 8, size=shape).astype(jnp.int4)
    dtype = jnp.dtype(dtype)
    return (
        generator.integers(256, size=(*shape, dtype.itemsize), dtype=np.uint8)
        .view(dtype)
        .reshape(shape)
    )


def leaves_of_all_types(devices):
    """A leaf for each type and spec, and random keys, scalars, an empty array, and what is no
    array."""
    tree = {f"{dtype}_{number}": values(dtype) for dtype in DTYPES for number in range(len(SPECS))}
    specs = {f"{dtype}_{number}": spec for dtype in DTYPES for number, spec in enumerate(SPECS)}
    tree |= {
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2), 8),
        "scalar": np.ones(()),
        "none": np.ones((0, 4)),
    }
    specs |= {"key": P(), "keys": P("data"), "scalar": P(), "none": P("data")}
    return mesh.place(tree, specs, devices) | {
        "host": np.ones(3),
        "number": 3,
        "function": jax.nn.relu,
    }, specs


# The words of an array


def by_hand(octets: bytes, width: int) -> list[int]:
    """What the two words are, of numbers of `width` bytes each: in whole numbers, one number after
    another."""
    sums = [0, 0]
    words = [
        int.from_bytes(octets[at : at + min(width, 4)], "little")
        for at in range(0, len(octets), min(width, 4))
    ]
    for place, word in enumerate(words):
        x = word ^ place * 0x9E3779B9 % 2**32
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        x ^= x >> 16
        sums = [(sums[0] + x) % 2**32, (sums[1] + x * (2 * place + 1)) % 2**32]
    return sums


SHORT = ("int4", "int16")  # which become words with their sign


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in SHORT])
def test_words_are_those_by_hand(dtype):
    x = values(dtype)
    width = x.dtype.itemsize // (2 if "complex" in dtype else 1)
    assert fingerprint.of(jnp.asarray(x)).tolist() == by_hand(x.tobytes(), width)


WORDS = jax.jit(fingerprint.of)
NUMBERS = np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)
places = st.tuples(st.integers(0, 63), st.integers(0, 7))


@given(
    place=places,
    bit=st.integers(0, 31),
    other=places,
    second=st.integers(0, 31),
    zeros=st.booleans(),
)
def test_a_bit_changes_the_first_word_and_what_may_cancel_does_not(
    place, bit, other, second, zeros
):
    """Two bits turned, of equal weight too; two numbers or rows exchanged; a number moved to
    another place."""
    x = np.zeros_like(NUMBERS) if zeros else NUMBERS
    before = WORDS(x).tolist()
    once = x.copy()
    once.view(np.uint32)[place] ^= np.uint32(1 << bit)
    assert WORDS(once).tolist()[0] != before[0]
    twice = once.copy()
    twice.view(np.uint32)[other] ^= np.uint32(1 << second)
    if (place, bit) != (other, second):
        assert WORDS(twice).tolist() != before
    swapped = NUMBERS.copy()
    swapped[[place[0], other[0]]] = NUMBERS[[other[0], place[0]]]
    if place[0] != other[0]:
        assert WORDS(swapped).tolist() != WORDS(NUMBERS).tolist()
    moved = np.zeros_like(NUMBERS)
    moved[place], at = 1.0, np.zeros_like(NUMBERS)
    at[other] = 1.0
    if place != other:
        assert WORDS(moved).tolist() != WORDS(at).tolist()


def test_the_signs_of_any_two_numbers_do_not_cancel():
    """A sum whose weights are odd would not see it: 2^31 and 2^31 are 0."""
    x = jnp.asarray(NUMBERS[:, 0])
    turned = jax.vmap(
        lambda i: jax.vmap(lambda j: fingerprint.of(x.at[i].multiply(-1).at[j].multiply(-1)))(
            jnp.arange(64)
        )
    )
    words = np.asarray(turned(jnp.arange(64)))
    same = (words == np.asarray(fingerprint.of(x))).all(-1)
    np.testing.assert_array_equal(same, np.eye(64, dtype=bool))


# Copies


@pytest.mark.sweep(3, "wholes")
def test_copies_of_all_types_and_specs_are_equal_and_a_turned_bit_of_each_is_named():
    devices = over()
    tree, specs = leaves_of_all_types(devices)
    assert fingerprint.differing(tree) == []
    alone = set(fingerprint.uncompared(tree))
    assert alone == {f"{dtype}_{number}" for dtype in DTYPES for number in (3, 4)}
    generator = random.Random(0)
    for name, spec in specs.items():
        if name in alone or name == "none":
            continue
        device = generator.randrange(8)
        bit = generator.randrange(128)
        wrong = tree | {name: flips.flipped(tree[name], device, generator.randrange(99), bit)}
        found = fingerprint.differing(wrong)
        copies = {P(): 8, P("data"): 2, P(None, "tensor"): 4}[spec]
        assert {each.leaf for each in found} == {name}, (name, bit)
        assert {(each.alike, each.copies, each.outvoted) for each in found} == {
            (1, copies, copies > 2)
        }
        pair = {device // 2 * 2, device // 2 * 2 + 1}  # along tensor, of the same rows
        assert {each.device for each in found} == (pair if copies == 2 else {device})
        if not (name.startswith("int4") or "key" in name):  # of an int4 the host sees a byte
            assert flips.of_other_bits(wrong) == {name}


@pytest.mark.parametrize("faulty", [(1, 3, 5, 7), (4, 5, 6, 7)])
def test_a_fault_that_all_copies_along_an_axis_share_is_found(faulty):
    """All of one column of the mesh, or of rows: compared along the other axis they differ."""
    tree = mesh.place({"a": np.ones(5)}, P(), over())
    for device in faulty:
        tree["a"] = flips.flipped(tree["a"], device, 2, 60)
    assert {(each.device, each.alike) for each in fingerprint.differing(tree)} == {
        (device, 4) for device in range(8)
    }


def test_many_faults_are_named_and_the_rarest_is_first():
    devices = over(data=8)
    tree = mesh.place({"a": np.ones(5), "b": np.ones(3), "c": np.ones(2)}, P(), devices)
    for device in (1, 2, 3):
        tree["b"] = flips.flipped(tree["b"], device, 0, 3)
    tree["c"] = flips.flipped(flips.flipped(tree["c"], 6, 0, 3), 7, 1, 3)
    found = fingerprint.differing(tree)
    assert [(each.leaf, each.device, each.alike) for each in found] == [
        ("c", 6, 1),
        ("c", 7, 1),
        ("b", 1, 3),
        ("b", 2, 3),
        ("b", 3, 3),
    ]
    for device in range(4):
        tree["a"] = flips.flipped(tree["a"], device, 2, 60)
    halves = [each for each in fingerprint.differing(tree) if each.leaf == "a"]
    assert [(each.device, each.alike, each.outvoted) for each in halves] == [
        (device, 4, False) for device in range(8)
    ]


def test_the_error_is_a_line_with_step_leaf_and_device():
    tree = mesh.place({"w": [np.ones(5), np.ones(5)]}, P(), over(data=8))
    fingerprint.check(3, tree)
    tree["w"] = [tree["w"][0], flips.flipped(tree["w"][1], 5, 0, 0)]
    with pytest.raises(fingerprint.CopiesDiffer) as raised:
        fingerprint.check(3, tree)
    line = (
        "step 3: device 5 (process 0) holds other bits of w.1 than 7 of the 8 devices that "
        "should hold the same."
    )
    assert str(raised.value) == line
    assert (raised.value.step, raised.value.found[0].device) == (3, 5)
    tree["w"][0] = flips.flipped(tree["w"][0], 5, 0, 0)
    with pytest.raises(fingerprint.CopiesDiffer, match=r"should hold the same \(and 1 more\)\.$"):
        fingerprint.check(3, tree)
    pair = mesh.place(np.ones(4), P("data"), over())
    with pytest.raises(fingerprint.CopiesDiffer) as raised:
        fingerprint.check(4, [flips.flipped(pair, 3, 0, 0)])
    assert str(raised.value) == (
        "step 4: device 2 (process 0) holds other bits of 0 than 1 of the 2 devices that "
        "should hold the same. Two versions are "
        "equally common, so it is not known which one is right (and 1 more)."
    )


def test_it_is_one_gather_of_eight_bytes_a_leaf_and_takes_no_memory():
    devices = over()
    tree = mesh.place(
        {
            "w": np.ones((1024, 512), np.float32),
            "h": np.ones((64, 8), np.float16),
            "n": np.ones(()),
        },
        P(),
        devices,
    )
    program = fingerprint.lower(tree).compile()
    (sent,) = certificate.read(program, devices)
    assert (sent.kind, sent.axes, sent.count, sent.bytes) == (
        "all-gather",
        ("data", "tensor"),
        1,
        8 * 3 * 8,
    )
    assert program.memory_analysis().temp_size_in_bytes < 4096
    assert fingerprint.lower(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    )


@pytest.mark.sweep(3, "wholes")
def test_a_mover_of_ones_own_and_some_of_the_axes():
    devices = over()
    specs = {"w": P(None, "tensor"), "b": P()}
    tree = mesh.place({"w": np.ones((3, 4)), "b": np.ones(3)}, specs, devices)
    wrong = tree | {"b": flips.flipped(tree["b"], 3, 1, 2)}

    def same(axis, out):
        local = lambda tree: jnp.broadcast_to(fingerprint.compared(tree, specs, axis)[0], (1,))
        return jax.jit(mesh.spmd(local, mesh=devices, in_specs=(specs,), out_specs=out))

    for axis in (("data", "tensor"), ring(("tensor", "data")), (ring("data"), "tensor")):
        assert (same(axis, P())(tree).tolist(), same(axis, P())(wrong).tolist()) == (
            [True],
            [False],
        ), axis
    assert same("data", P("tensor"))(wrong).tolist() == [
        True,
        False,
    ]  # device 3 is data 1, tensor 1
    moved = same(ring(("data", "tensor")), P()).lower(tree).compile()
    assert {entry.kind for entry in certificate.read(moved, devices)} == {"collective-permute"}


def test_refusals():
    devices = over()
    placed = mesh.place({"w": np.ones(4)}, P(), devices)
    with pytest.raises(
        ValueError, match=r"needs a tree with JAX arrays, such as a step\.State; got a tree"
    ):
        fingerprint.differing({"w": np.ones(3), "f": jax.nn.relu})
    with pytest.raises(
        ValueError, match=r"needs arrays on a mesh; b has the sharding .* Place it: mesh\.place"
    ):
        fingerprint.differing(placed | {"b": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"compares arrays of one mesh; w is on .*, and a on"):
        fingerprint.differing(placed | {"a": mesh.place(np.ones(4), P(), over(data=8))})
    with pytest.raises(ValueError, match=r"w is being traced\. .* call fingerprint\.compared"):
        jax.jit(fingerprint.differing)(placed)
    with pytest.raises(
        ValueError, match=r"needs arrays with values, and w is a jax\.ShapeDtypeStruct\. Pass the"
    ):
        fingerprint.check(
            1, {"w": jax.ShapeDtypeStruct((4,), float, sharding=placed["w"].sharding)}
        )
    with pytest.raises(ValueError, match="a PartitionSpec for each; got 1 arrays and 2 specs"):
        mesh.spmd(
            lambda tree: fingerprint.compared(tree, (P(), P()), "data")[0],
            mesh=devices,
            in_specs=(P(),),
            out_specs=P(),
        )(placed)


# States of real steps


CONFIG = gpt2.Config(layers=2, heads=2, width=16, context=12, vocabulary=61, vocabulary_multiple=8)
LAYOUTS = {
    "data": Layout(data=8),
    "zero 1": Layout(data=8, zero=1),
    "zero 2, tensor": Layout(data=4, tensor=2, zero=2),
    "zero 3, tensor": Layout(data=4, tensor=2, zero=3),
    "tensor, sequence": Layout(data=2, tensor=2, microbatches=2, sequence=True),
    "pipeline": Layout(data=2, stage=2, tensor=2, microbatches=2, zero=1),
    "float16": Layout(data=8, precision="float16"),
}


def prepared(layout, optimizer=None):
    """The step, jitted, of a small GPT-2 and its mesh."""
    devices = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    optimizer = optimizer or optax.adamw(1e-3)
    return decoder.train_step(
        gpt2.FAMILY, CONFIG, optimizer, layout, devices, batch=8, key=jax.random.key(0)
    ), devices


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_leaf_that_a_layout_copies_is_compared(name):
    """Each leaf in turn, on a device drawn; what is split over all devices alone is named as not
    compared."""
    one, devices = prepared(LAYOUTS[name])
    state, generator = one.init(), random.Random(name)
    assert fingerprint.differing(state) == []
    whole, alone = dict(jax.tree.leaves_with_path(state)), fingerprint.uncompared(state)
    assert fingerprint.uncompared(one.shapes) == alone
    assert bool(alone) == ("zero" in name or name == "pipeline")
    for path, leaf in whole.items():
        device = generator.choice(devices.devices.flat).id
        wrong = flips.flipped(leaf, device, generator.randrange(10**6), generator.randrange(64))
        leaves = [wrong if at == path else x for at, x in jax.tree.leaves_with_path(state)]
        found = fingerprint.differing(jax.tree.unflatten(jax.tree.structure(state), leaves))
        if mesh.dotted(path) in alone:
            assert found == []
            assert len({str(shard.index) for shard in leaf.addressable_shards}) == devices.size
        else:
            assert {each.leaf for each in found} == {mesh.dotted(path)}
            assert device in {each.device for each in found}


class Layers(eqx.Module):
    first: jax.Array
    second: jax.Array
    bias: jax.Array
    activation: object = jax.nn.gelu

    def __call__(self, x):
        return self.activation(x @ self.first) @ self.second + self.bias


def made():
    keys = jax.random.split(jax.random.key(0), 2)
    draw = functools.partial(jax.random.normal, dtype=jnp.float32)
    return Layers(
        draw(keys[0], (16, 32)) / 4, draw(keys[1], (32, 4)) / 6, jnp.zeros(4, jnp.float32)
    )


NO_FAULT = np.zeros(3, np.int32)


def trained(state, specs, devices, optimizer, *, faulty=lambda gradients, fault: gradients):
    """The step of `Layers` over data: `(state, batch, fault) -> state`. `faulty` has the reduced
    gradients in its hands."""

    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["x"][:, :4]) ** 2)

    averaged = grads.averaged(eqx.filter_value_and_grad(loss), "data")

    def grad(model, batch):
        value, gradients = averaged(model, batch)
        return value, faulty(gradients, batch["fault"])

    local = step.make(grad, optimizer)
    in_specs = (specs, {"x": P("data"), "fault": P()})
    whole = mesh.spmd(
        lambda state, batch: local(state, batch)[0],
        mesh=devices,
        in_specs=in_specs,
        out_specs=specs,
    )
    jitted = eqx.filter_jit(whole)
    x = lambda i: jax.random.normal(jax.random.key(i), (16, 16), jnp.float32)

    def one(state, i, fault=NO_FAULT):
        with jax.numpy_dtype_promotion("standard"):  # optax mixes a decay in float64 with a count
            return jitted(state, {"x": x(i), "fault": fault})

    return one


EVERY = 5  # steps from one check to the next


@pytest.fixture(scope="module")
def training():
    """A state with parameters, moments and sums of gradients, three steps old, and its step."""
    devices, optimizer = over(data=8), optax.MultiSteps(optax.adamw(1e-3), 3)
    state, specs = step.init(made, optimizer, rules.match("**", P()), devices)
    one = trained(state, specs, devices, optimizer)
    for i in range(4):
        state = one(state, i)
    return state, one


KINDS = {"parameters": "model.", "moments": "u.", "sums of gradients": "acc_grads."}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_turned_bit_is_found_in_100_of_100_draws(training, kind):
    """It turns between two steps; the steps go on until the next check, which names the leaf and
    the device.

    A later step may round the difference away (the last bits of a moment fade by 0.9 a step; sums
    of gradients begin again from 0): then the copies are equal again, to the bit, and there is
    nothing left to find. What is left is found.
    """
    state, one = training
    generator, found, healed = random.Random(kind), 0, 0
    arrays = jax.tree.leaves_with_path(eqx.filter(state, eqx.is_array))
    leaves = [path for path, _ in arrays if KINDS[kind] in mesh.dotted(path)]
    assert len(leaves) >= 3
    for draw in range(100):
        path, device = generator.choice(leaves), generator.randrange(8)
        number, bit, left = generator.randrange(10**6), generator.randrange(32), draw % EVERY
        turned = [
            flips.flipped(x, device, number, bit) if at == path else x
            for at, x in jax.tree.leaves_with_path(state)
        ]
        wrong = jax.tree.unflatten(jax.tree.structure(state), turned)
        assert [(each.leaf, each.device) for each in fingerprint.differing(wrong)] == [
            (mesh.dotted(path), device)
        ]
        for i in range(left):
            wrong = one(wrong, 4 + i)
        told, seen = fingerprint.differing(wrong), flips.of_other_bits(wrong)
        assert {each.leaf for each in told} == seen
        assert {each.device for each in told} <= {device}
        found, healed = found + bool(told), healed + (not seen)
    print(
        f"{kind}: {found} of 100 found after up to {EVERY - 1} more steps; {healed} had been "
        f"rounded away"
    )
    assert found + healed == 100


@pytest.mark.sweep(3, "wholes")
def test_a_bit_that_turns_inside_the_step_is_found():
    """In one device's copy of the reduced gradient: its parameters and moments are others from then
    on."""
    devices, optimizer = over(data=8), optax.adamw(1e-3)
    state, specs = step.init(made, optimizer, rules.match("**", P()), devices)

    def faulty(gradients, fault):
        device, number, mask = fault
        bits = lax.bitcast_convert_type(varying(gradients.first, "data"), jnp.int32)
        here = (lax.axis_index("data") == device) & (
            jnp.arange(bits.size, dtype=jnp.int32).reshape(bits.shape) == number
        )
        turned = lax.bitcast_convert_type(jnp.where(here, bits ^ mask, bits), jnp.float32)
        return eqx.tree_at(
            lambda g: g.first, gradients, replicated(turned, "data")
        )  # as the program believes

    one = trained(state, specs, devices, optimizer, faulty=faulty)
    state, generator, silent = one(state, 0), random.Random(0), 0
    for draw in range(100):
        device, bit = generator.randrange(8), generator.randrange(31)
        wrong = one(state, 1, np.asarray([device, generator.randrange(512), 1 << bit], np.int32))
        wrong = one(wrong, 2) if draw % 2 else wrong
        told, seen = fingerprint.differing(wrong), flips.of_other_bits(wrong)
        assert {each.leaf for each in told} == seen
        assert {each.device for each in told} <= {device}
        # Alone, or, where the gradient is not finite any more, all leaves of its device.
        assert (
            all(each.leaf.endswith("first") for each in told)
            or len({each.leaf for each in told}) > 6
        )
        silent += not told
    print(f"{100 - silent} of 100 turned bits of gradients reached the state")
    assert silent < 40  # the last bits of a gradient are rounded away in the moments


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_two_thousand_steps_raise_no_alarm(name):
    layout = LAYOUTS[name]
    one, devices = prepared(layout)
    windows = (
        np.random.default_rng(0).integers(CONFIG.vocabulary, size=(64, 8, 13)).astype(np.int32)
    )
    placed = [mesh.place(each, P("data"), devices) for each in windows]
    state = one.init()
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of a count
        train = one.train.lower(state, placed[0]).compile()
    for i in range(2000):
        state, info = jax.block_until_ready(train(state, placed[i % len(placed)]))
        if i % 10 == 9:
            fingerprint.check(i + 1, state)
    assert np.isfinite(float(info.loss))
