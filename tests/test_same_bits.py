"""The same bits on every mesh: `==` of all numbers after several steps, for a user's model and for
GPT-2; each collective by cells equals the collective by devices; and what is refused."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import faults
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, rules, same_bits, step
from parallax.collectives import halving, ring, two_rings, types
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.run.checkpoint import Checkpoints

CELLS = {"data": 4, "tensor": 2}
MESHES = [{}, {"data": 2}, {"data": 4}, {"tensor": 2}, {"data": 2, "tensor": 2}, CELLS]
ROWS, WIDTH = 32, 16


@pytest.fixture(autouse=True)
def users_dtypes():
    """Users' own defaults: bits are about the dtypes that users have."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        yield


def mesh_of(sizes, cells=CELLS):
    """A mesh of these sizes, whose other axes have one device."""
    sizes = {axis: sizes.get(axis, 1) for axis in cells}
    return mesh.make(**sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))])


# A few kernels, compiled in a second: by this test a mutant dies that breaks a rule


def descent(weights, rows):
    """Three steps down a made-up slope, with a normalised layer, a clipped norm and a momentum."""

    def trip(carry, _):
        weights, momentum = carry
        hidden = jax.nn.gelu(rows @ weights)
        hidden = hidden / jnp.sqrt(jnp.mean(hidden**2, axis=1, keepdims=True) + 1e-3)
        gradient = lax.psum(rows.T @ (jnp.exp(-hidden) * hidden), "data")
        # A product that is summed at once: a compiler may join the two to a multiply-add.
        gradient -= jnp.mean(lax.psum(hidden * rows[:, : hidden.shape[1]], "data"), axis=0)[None]
        norm = jnp.sqrt(jnp.sum(gradient.astype(jnp.float32) ** 2)).astype(gradient.dtype)
        momentum = 0.9 * momentum + 0.1 * gradient / jnp.maximum(norm, 1)
        return (weights * 0.99 - 0.1 * momentum, momentum), norm

    return lax.scan(trip, (weights, jnp.zeros_like(weights)), None, length=3)


@functools.cache
def slope_run(data, dtype):
    devices = mesh_of({"data": data}, {"data": 8})
    rows = np.random.default_rng(0).standard_normal((8 * 24, 21)).astype(dtype)
    weights = np.random.default_rng(1).standard_normal((21, 13)).astype(dtype)
    run = same_bits.spmd(
        descent, cells={"data": 8}, mesh=devices, in_specs=(P(), P("data")), out_specs=P()
    )
    return jax.tree.leaves(jax.device_get(jax.jit(run)(weights, rows)))


def test_a_weakly_typed_rate_widens_no_parameter():
    run = same_bits.spmd(
        lambda weights, rate: weights - rate * weights,
        cells={"data": 2},
        mesh=mesh_of({"data": 2}, {"data": 2}),
        in_specs=(P(), P()),
        out_specs=P(),
    )
    weights = jnp.ones(4, jnp.bfloat16)
    assert jax.eval_shape(jax.jit(run), weights, 0.1).dtype == jnp.bfloat16


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("data", [2, 4, 8])
def test_a_few_kernels_have_the_same_bits_on_every_mesh(data, dtype):
    assert differing(slope_run(data, dtype), slope_run(1, dtype)) == 0


@functools.cache
def adamw_run(data):
    """The first step of AdamW for eight leaves, which share constants."""
    optimizer = optax.adamw(1e-2)
    draw = np.random.default_rng(0).standard_normal
    weights, gradients = (
        [draw((2 * 32, 33)).astype(np.float32) for _ in range(8)] for _ in range(2)
    )

    def update(weights, gradients):
        first = optimizer.init(weights)
        scale = lax.rsqrt(lax.psum(jnp.sum(gradients[0] ** 2), "data"))
        gradients = [scale * gradient for gradient in gradients]
        updates, _ = optimizer.update(gradients, first, weights)
        return optax.apply_updates(weights, updates)

    run = same_bits.spmd(
        update,
        cells={"data": 2},
        mesh=mesh_of({"data": data}, {"data": 2}),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    return jax.tree.leaves(jax.device_get(jax.jit(run)(weights, gradients)))


@pytest.mark.bits
def test_equal_instructions_are_simplified_alike_on_one_device_and_on_two():
    assert differing(adamw_run(2), adamw_run(1)) == 0


# A user's model: an Equinox module that is split over tensor, with AdamW and a clipped norm


class Net(eqx.Module):
    up: jax.Array
    down: jax.Array
    shift: jax.Array
    activation: Callable = eqx.field(static=True, default=jax.nn.gelu)


RULE = rules.first(
    rules.match("up", P(None, "tensor")), rules.match("down", P("tensor")), rules.match("**", P())
)


def net(dtype):
    up, down = jax.random.split(jax.random.key(0))
    return Net(
        0.3 * jax.random.normal(up, (WIDTH, 2 * WIDTH), dtype),
        0.3 * jax.random.normal(down, (2 * WIDTH, 4), dtype),
        jnp.zeros(4, dtype),
    )


def loss(model, batch):
    hidden = model.activation(batch @ model.up)
    out = lax.psum(hidden @ model.down, "tensor") + model.shift[None]
    return jnp.mean(jax.nn.logsumexp(out.astype(jnp.float32), axis=-1) - out[:, 0])


def user_step(spmd, devices, dtype=jnp.float32):
    """The jitted step, and its first state."""
    optimizer = optax.adamw(1e-2)
    state, specs = step.init(lambda: net(dtype), optimizer, RULE, devices)
    grad = grads.averaged(jax.value_and_grad(loss), "data")
    train = step.make(
        grad, optimizer, max_norm=0.5, reduce_norm_over=("tensor",), specs=specs.model
    )
    train = spmd(train, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P()))
    return eqx.filter_jit(train), state


def of_cells(cells=CELLS):
    return functools.partial(same_bits.spmd, cells=cells)


def batches(count, dtype=np.float32):
    return [
        np.random.default_rng(i).standard_normal((ROWS, WIDTH)).astype(dtype) for i in range(count)
    ]


def numbers(state, losses):
    """All numbers of the state, and the losses."""
    leaves = jax.tree.leaves(jax.device_get(eqx.filter(state, eqx.is_array)))
    return [np.asarray(leaf) for leaf in leaves] + losses


@functools.cache
def user_run(spmd_of, sizes, dtype=jnp.float32, steps=5):
    """What five steps leave on a mesh."""
    train, state = user_step(spmd_of(), mesh_of(dict(sizes)), dtype)
    losses = []
    for batch in batches(steps, dtype):
        state, info = train(state, batch)
        losses.append(np.asarray(info.loss))
    return numbers(state, losses)


def ordinary():
    return mesh.spmd


def digest(arrays):
    """A hash of all numbers."""
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


def differing(found, wanted):
    """How many arrays differ in a bit."""
    assert len(found) == len(wanted)
    return sum(a.tobytes() != b.tobytes() for a, b in zip(found, wanted, strict=True))


@pytest.mark.sweep(10)
@pytest.mark.bits
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
def test_a_users_step_has_the_same_bits_on_every_mesh(sizes, dtype):
    wanted = user_run(of_cells, (), dtype)
    assert differing(user_run(of_cells, tuple(sizes.items()), dtype), wanted) == 0


@pytest.mark.bits
@pytest.mark.long
def test_an_ordinary_step_has_not():
    wanted = user_run(ordinary, ())
    assert differing(user_run(ordinary, (("data", 4),)), wanted) > 0


@pytest.mark.bits
@pytest.mark.long
def test_a_run_may_change_its_mesh_at_a_checkpoint(tmp_path):
    train, state = user_step(of_cells(), mesh_of({"data": 4}))
    losses = []
    with Checkpoints(tmp_path, settings={}) as checkpoints:
        for k, batch in enumerate(batches(5)):
            if k == 2:
                checkpoints.save(k, state)
                train, other = user_step(of_cells(), mesh_of({"tensor": 2}))
                state = checkpoints.restore(other).state
            state, info = train(state, batch)
            losses.append(np.asarray(info.loss))
    assert differing(numbers(state, losses), user_run(of_cells, ())) == 0


# GPT-2

CONFIG = gpt2.Config(layers=4, heads=4, width=32, context=16, vocabulary=90, vocabulary_multiple=16)
BATCH = 16
LAYOUTS = {  # the cells, and meshes that run them
    "data=4,tensor=2": MESHES[1:],
    "data=4,tensor=2,microbatches=2,zero=1,precision=bfloat16": MESHES[1::2],
    "data=4,tensor=2,zero=1,sequence=True": [{"data": 4}, {"data": 2, "tensor": 2}],
    "data=4,microbatches=2,zero=3,remat=block": [{"data": 2}, {"data": 4}],
    "data=8,zero=3,precision=bfloat16": [{"data": 4}],
    "data=2,context=2,tensor=2": [{"context": 2}, {"data": 2, "context": 2, "tensor": 2}],
    "data=4,context=2,precision=bfloat16,zero=1,dropout": [{"data": 2, "context": 2}],
    "data=2,stage=2,tensor=2,microbatches=4": [
        {"stage": 2},
        {"data": 2, "stage": 2, "tensor": 2},
    ],
    "data=4,stage=2,microbatches=4,zero=1,precision=bfloat16": [{"data": 4}, {"stage": 2}],
    "stage=4,microbatches=4": [{"stage": 2}, {"stage": 4}],
    "data=8,dropout": [{"data": 2}, {"data": 8}],
}


@functools.cache
def gpt2_start(line):
    """A GPT-2's step for the cells of a layout, and its first state."""
    config = CONFIG
    if line.endswith(",dropout"):
        config = dataclasses.replace(config, dropout=0.1)
    layout = Layout.parse(line.removesuffix(",dropout"))
    make = functools.partial(
        decoder.train_step,
        *(gpt2.FAMILY, config, optax.adamw(1e-2), layout),
        batch=BATCH,
        key=jax.random.key(0),
        compute=decoder.Compute(max_norm=0.5),
    )
    state = jax.device_get(make(mesh_of(layout.axes, layout.axes)).init())
    return layout, make(mesh.abstract(**layout.axes)), state


@functools.cache
def gpt2_run(line, sizes, steps=5):
    """What five steps of a GPT-2 leave, by the cells of a layout, on a mesh."""
    layout, prepared, state = gpt2_start(line)
    train = decoder.compiled(
        *(prepared.local, prepared.shapes, prepared.specs),
        functools.partial(of_cells(layout.axes), mesh=mesh_of(dict(sizes), layout.axes)),
        prepared.keys,
        batch_spec=P(layout.batch_axes),
    )
    losses = []
    for k in range(steps):
        tokens = np.random.default_rng(k).integers(90, size=(BATCH, 17)).astype(np.int32)
        state, info = train(state, tokens)
        losses.append(np.asarray(info.loss))
    return numbers(state, losses)


@pytest.mark.bits
@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "sizes"), [(line, sizes) for line, each in LAYOUTS.items() for sizes in each], ids=str
)
def test_gpt2_has_the_same_bits_on_every_mesh(line, sizes):
    assert differing(gpt2_run(line, tuple(sizes.items())), gpt2_run(line, ())) == 0


# By cells as by devices


@pytest.mark.long
def test_the_step_is_the_ordinary_one():
    found, wanted = user_run(of_cells, (("data", 2),)), user_run(ordinary, (("data", 4),))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def whole(x):
    """Whole numbers, which a sum keeps exactly, in the dtype of `x`."""
    return jnp.round(8 * x)


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "data"),
    "psum of two axes": lambda x: lax.psum(x, ("data", "tensor")),
    "psum of a shared value": lambda x: lax.psum(
        lax.pcast(lax.psum(x, "data"), "data", to="varying"), "data"
    ),
    "pmean": lambda x: lax.pmean(x, "data"),
    "pmax": lambda x: lax.pmax(x, ("tensor", "data")),
    "pmin": lambda x: lax.pmin(x, "data"),
    "all_gather": lambda x: lax.all_gather(x, "data").sum(0) * x,
    "tiled all_gather": lambda x: lax.all_gather(x, "data", axis=1, tiled=True)[:, : x.shape[1]],
    "all_gather of two axes": lambda x: lax.all_gather(x, ("tensor", "data"))[3] + x,
    "psum_scatter": lambda x: lax.psum_scatter(x, "data", tiled=True),
    "psum_scatter of a dim": lambda x: lax.psum_scatter(x[:, :4], "data", scatter_dimension=1),
    "ppermute": lambda x: lax.ppermute(x, "data", [(0, 1), (1, 2), (3, 0)]),
    "ppermute of two axes": lambda x: lax.ppermute(
        x, ("data", "tensor"), [(k, (k + 3) % 8) for k in range(8)]
    ),
    "all_to_all": lambda x: lax.all_to_all(x[:, :4], "data", 1, 0),
    "tiled all_to_all": lambda x: lax.all_to_all(x, "data", 0, 1, tiled=True),
    "axis_index": lambda x: x + lax.axis_index("data").astype(x.dtype),
    "axis_index of two axes": lambda x: x * lax.axis_index(("tensor", "data")).astype(x.dtype),
    "ring": lambda x: ring("data").all_reduce(x),
    "ring's shares": lambda x: ring("data").reduce_scatter(x),
    "two rings": lambda x: two_rings("data").all_gather(x)[: x.shape[0]],
    "halving": lambda x: halving("tensor").all_reduce(x),
    "a sum in a scan": lambda x: lax.scan(
        lambda c, _: (lax.ppermute(c, "data", [(k, (k + 1) % 4) for k in range(4)]) + 1, c[0]),
        x,
        None,
        length=3,
    ),
    "a sum in a branch": lambda x: lax.cond(
        lax.psum(x[0, 0], ("data", "tensor")) > 0,
        lambda x: lax.psum(x, "tensor"),
        lambda x: -lax.psum(x, "tensor"),
        x,
    ),
    "a sum in a branch of its own": lambda x: lax.cond(
        lax.axis_index("data") < 2,
        lambda x: lax.pcast(lax.psum(x, "tensor"), "tensor", to="varying"),
        lambda x: 2 * x,
        x,
    ),
    "a window's maximum by a function": lambda x: lax.reduce_window(
        x, -jnp.inf, lambda a, b: jnp.minimum(jnp.maximum(a, b), 6), (2, 2), (2, 2), "VALID"
    ),
    "a loop without end": lambda x: lax.while_loop(
        lambda c: c[0, 0] < 99, lambda c: c + jnp.abs(c) + 1, x
    ),
}


@pytest.mark.sweep(24)
@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"tensor": 2}, CELLS], ids=str)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_by_cells_as_by_devices(name, sizes):
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)

    def run(spmd, devices):
        f = lambda x: jax.tree.map(lambda y: y.reshape(1, -1), COLLECTIVES[name](whole(x)))
        varied = lambda x: jax.tree.map(_varying, f(x))
        both = P(("data", "tensor"))
        mapped = spmd(varied, mesh=devices, in_specs=P("data", "tensor"), out_specs=both)
        return jax.device_get(jax.jit(mapped)(x))

    wanted = run(mesh.spmd, mesh_of(CELLS))
    jax.tree.map(np.testing.assert_array_equal, run(of_cells(), mesh_of(sizes)), wanted)


def _varying(x):
    """The same value, declared to differ along both axes."""
    return types.varying(x, tuple(CELLS))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=jnp.dtype)
@pytest.mark.parametrize("sizes", [{}, {"data": 2}], ids=str)
def test_the_largest_and_smallest_floats_of_8_bits_are_kept(dtype, sizes):
    """Floats such as float8_e4m3fn have no infinities, and a half-filled sum is exact."""
    limits = jnp.finfo(dtype)
    row = jnp.stack([limits.max, limits.smallest_subnormal])
    x = jnp.stack([row, jnp.zeros_like(row)]).astype(dtype)
    cells = {"data": 2}
    total = same_bits.spmd(
        lambda x: lax.psum(x, "data"),
        cells=cells,
        mesh=mesh_of(sizes, cells),
        in_specs=P("data"),
        out_specs=P(),
    )
    assert jax.jit(total)(x).tolist() == [row.tolist()]


# Refusals


def mapped(f, cells=CELLS, sizes=None):
    devices = mesh_of({} if sizes is None else sizes, sizes or cells)
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    return same_bits.spmd(f, cells=cells, mesh=devices, **specs)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mapped(lambda x: x, {"data": 3}), "a power of two along each axis; got data=3"),
        (lambda: mapped(lambda x: x, {"data": 2}, {"data": 4}), "must divide.*'data': 4"),
        (lambda: mapped(lambda x: x, {"data": 2}, {"data": 2, "tensor": 1}), "same axes as `cell"),
        (lambda: mapped(_prints)(jnp.ones(8)), "prints, calls Python or has another effect"),
        (lambda: mapped(_calls_python)(jnp.ones(8)), "cannot run `pure_callback`"),
        (lambda: mapped(_grouped)(jnp.ones(8)), "axis_index_groups"),
        (lambda: mapped(_summed_without_end)(jnp.ones(8)), "no rule for `while`"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_other_devices_than_cpus_are_refused(monkeypatch):
    monkeypatch.setattr(mesh, "platform_of", lambda mesh_: "tpu")
    with pytest.raises(ValueError, match=r"needs a mesh of CPUs.*got a mesh of tpu devices"):
        mapped(lambda x: x)


def _prints(x):
    jax.debug.print("{}", x[0])
    return x


def _calls_python(x):
    return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _grouped(x):
    return x + lax.all_gather(x, "data", axis_index_groups=[[0, 1], [2, 3]])[0]


def _summed_without_end(x):
    return lax.while_loop(lambda c: c[0] < 9, lambda c: c + lax.pmax(jnp.abs(c), "data") + 1, x)


# Processes


def hash_of_job(folder, processes, **options):
    """What rank 0 prints. Each job is compiled with users' flags."""
    program = Path(__file__).with_name("same_bits_run.py")
    with faults.Running(folder, processes=processes, program=program, **options) as job:
        code, printed = job.wait(), job.printed()
    assert code == 0, printed
    return re.search("hash [0-9a-f]{64}", printed)[0]


@pytest.mark.programs
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_have_the_same_bits_as_one(tmp_path, processes):
    alone = hash_of_job(tmp_path / "one", 1, launcher="one process")
    assert hash_of_job(tmp_path / "several", processes) == alone
