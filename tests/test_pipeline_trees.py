"""Trees between the stages, what all stages share, their own losses, frozen leaves, uneven layers:
all of it as on one device."""

import functools
import operator
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from reference import EXACT, FLOAT64, assert_close, one_device

from parallax import grads, mesh, pipeline, rules, step, tensor, zero
from parallax.collectives import ring, xla
from parallax.compiled import certificate
from parallax.schedule import gpipe, looped_placement, one_f_one_b_lockstep, zero_bubble_lockstep

WIDTH, HIDDEN, WORDS = 8, 8, 16
KEEP = [pipeline.residuals, pipeline.inputs]


class Net(eqx.Module):
    """`table` is used at both ends, `turn` in embed and in all stages, `frozen` in the head and in
    all stages."""

    table: Array
    turn: Array
    frozen: Array
    blocks: dict[str, Any]
    squash: Any = eqx.field(static=True, default=jnp.tanh)


TRAINABLE = Net(True, True, False, {"up": True, "down": True, "bias": False, "number": False})


def net(layers, seed=0):
    """Blocks of [L, ...]."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape, FLOAT64) / 3
    blocks = {
        "up": normal(layers, WIDTH, HIDDEN),
        "down": normal(layers, HIDDEN, WIDTH),
        "bias": normal(layers, HIDDEN),
    }
    blocks["number"] = jnp.arange(layers, dtype=jnp.int32) % 3
    return Net(normal(WORDS, WIDTH), normal(WIDTH), normal(WIDTH), blocks)


def batch_of(rows, seed=0):
    keys = jax.random.split(jax.random.key(seed + 1), rows + 2)
    ids = jax.random.randint(keys[0], (rows,), 0, WORDS, dtype=jnp.int32)
    return {"ids": ids, "y": jax.random.normal(keys[1], (rows, WIDTH), FLOAT64), "key": keys[2:]}


def embed(model, part):
    """A stream, a skip connection, a mask and a counter of integers, and a scalar that collects a
    penalty."""
    x = model.table[part["ids"]] * jnp.cos(model.turn)[None]
    counter = jnp.zeros(part["ids"].shape, jnp.int32)
    return {
        "x": x,
        "skip": 2 * x,
        "odd": part["ids"] % 2 == 1,
        "layers": counter,
        "penalty": jnp.zeros((), FLOAT64),
    }


def layer(model, w, x, number, part, axis):
    """Two products over tensor, dropout computed again, a parameter of all stages, and all that
    travels beside the stream."""

    keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(
        part["key"]
    )  # which `checkpoint` keeps as keys

    @jax.checkpoint
    def dropped(y, keys):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (WIDTH,)))(keys)
        return jnp.where(kept, y / 0.8, jnp.zeros((), y.dtype))

    y = model.squash(
        tensor.column(x["x"] + 0.1 * x["skip"], w["up"], w["bias"], axis)
        * (1 + w["number"].astype(FLOAT64))
    )
    y = tensor.row(y, w["down"], None, axis) * jnp.sin(model.turn)[None] + model.frozen[None]
    y = (
        dropped(y, keys)
        * jnp.where(x["odd"], 1.0, 0.5)[:, None]
        * (1 + x["layers"][:, None].astype(FLOAT64) / 9)
    )
    penalty = tensor.reduce_from(jnp.sum(w["up"] ** 2), axis) / 99
    return x | {"x": x["x"] + y, "layers": x["layers"] + 1, "penalty": x["penalty"] + penalty}


def stage_of(table, axis, gather=lambda blocks: blocks):
    def stage(model, x, part, position):
        of_layer = lambda w, x, number: layer(model, gather(w), x, number, part, axis)
        x = pipeline.run_layers(of_layer, model.blocks, x, position, table)
        size = jnp.mean(x["x"] ** 2)
        return pipeline.Output(
            x,
            loss=size / 7,
            aux={
                "size": size,
                "rows": len(part["ids"]),
                "big": size > 1,
                "columns": jnp.mean(x["x"], 0),
            },
        )

    return stage


def head(model, x, part):
    out = (x["x"] + x["skip"]) @ model.table.T @ model.table * model.frozen[None]
    error = jnp.mean((out - part["y"]) ** 2)
    return error + x["penalty"], {"error": error, "layers": x["layers"][0], "out": jnp.mean(out, 0)}


def total(found):
    """Sizes are means over microbatches, rows are added up."""
    means = {name: jnp.mean(found.stages[name], axis=0) for name in ("size", "columns")}
    stages = means | {"rows": jnp.sum(found.stages["rows"], dtype=jnp.int32)}
    of_head = {name: jnp.mean(found.head[name], axis=0) for name in ("error", "out")}
    return {"stages": stages, **of_head, "layers": found.head["layers"][0]}


def of_devices(aux, axis):
    """What is a mean over the batch is one over devices too; rows are added up."""
    rows = axis.all_reduce(aux["stages"]["rows"])
    return eqx.tree_at(lambda aux: aux["stages"]["rows"], grads.mean_over_devices(aux, axis), rows)


def on_one_device(table, model, batch):
    """Layer after layer of the whole batch, with nothing of the pipeline: `(loss, aux)`."""
    x, sizes, columns, number = embed(model, batch), [], [], 0
    for count in table.reshape(-1):
        for _ in range(count):
            x = layer(
                model,
                jax.tree.map(operator.itemgetter(number), model.blocks),
                x,
                jnp.int32(number),
                batch,
                (),
            )
            number += 1
        sizes.append(jnp.mean(x["x"] ** 2))
        columns.append(jnp.mean(x["x"], 0))
    loss, aux = head(model, x, batch)
    stages = {"size": jnp.stack(sizes), "columns": jnp.stack(columns)}
    stages["rows"] = jnp.asarray(table.size * len(batch["ids"]), jnp.int32)
    return loss + sum(sizes) / 7, {"stages": stages, **aux}


class Case(NamedTuple):
    """What a run is made of; `layers` is a table."""

    layers: tuple[tuple[int, ...], ...]
    microbatches: int
    data: int = 1
    tensor: int = 1
    make: Any = one_f_one_b_lockstep
    keep: Any = pipeline.residuals
    exchange: bool = False
    zero: int = 0
    algorithm: Any = xla

    @property
    def table(self):
        return np.array(self.layers)


SPLIT = {
    "up": P(None, "stage", None, "tensor"),
    "down": P(None, "stage", "tensor"),
    "bias": P(None, "stage", "tensor"),
}


def plain_rule(path, leaf):
    return SPLIT.get(
        path.removeprefix("blocks."), P(None, "stage") if path.startswith("blocks") else P()
    )


def shared_rule(case):
    """With ZeRO the replicas share all leaves; those that are frozen too, where parameters are
    shared (ZeRO-3)."""
    if not case.zero:
        return plain_rule
    return rules.fsdp(
        "data", size=case.data, min_size=1, keep={"blocks.**": (0, 1)}, inside=plain_rule
    )


def pipelined(case, params):
    """The compiled gradient function, the specs of its parameters, and those of its gradients."""
    v, stages = case.table.shape
    world = mesh.make(
        data=case.data,
        stage=stages,
        tensor=case.tensor,
        devices=jax.devices()[: case.data * stages * case.tensor],
    )
    plain, shared = (rules.specs(params, rule, world) for rule in (plain_rule, shared_rule(case)))
    specs = shared if case.zero == 3 else plain
    axis, data = case.algorithm("tensor"), case.algorithm("data")
    gather = lambda w: w
    if case.zero == 3:
        of_layer = zero.part_specs(shared, "data", loops=2).layer
        gather = zero.gathered(lambda w: w, data, of_layer)
    table = (
        case.make(stages, case.microbatches) if v == 1 else case.make(stages, case.microbatches, v)
    )
    options = {"save": case.keep, "aux": total, "trainable": TRAINABLE}
    options["send"] = pipeline.split_over(axis) if case.exchange else pipeline.whole
    if case.zero == 2:
        options["scatter"] = functools.partial(zero.reduce_scatter, axis=data, specs=shared)
    grad = pipeline.value_and_grad(
        embed, stage_of(case.table, axis, gather), head, table, case.algorithm("stage"), **options
    )
    if case.zero == 3:
        grad = zero.gathered_once(grad, data, zero.part_specs(shared, "data", loops=2).ends)
    wrap = (
        functools.partial(zero.reduce_scattered, specs=shared)
        if case.zero in (1, 2)
        else grads.averaged
    )
    grad = wrap(grad, data, aux=of_devices)
    out = eqx.filter(shared, TRAINABLE)
    run = mesh.spmd(grad, mesh=world, in_specs=(specs, P("data")), out_specs=((P(), P()), out))
    return eqx.filter_jit(run)


def check(case, seed=0):
    """Loss, auxiliary values and gradients are those of one device; what is frozen has none, and
    nor has padding."""
    params, batch = (
        net(int(case.table.sum()), seed),
        batch_of(2 * case.data * case.microbatches, seed),
    )
    padded = eqx.tree_at(lambda p: p.blocks, params, pipeline.pad_layers(params.blocks, case.table))
    (loss, aux), gradients = pipelined(case, padded)(padded, batch)
    trained, rest = eqx.partition(params, TRAINABLE)
    of = lambda trained, batch: on_one_device(case.table, eqx.combine(trained, rest), batch)
    (plain, plain_aux), expected = eqx.filter_jit(jax.value_and_grad(of, has_aux=True))(
        trained, batch
    )
    np.testing.assert_allclose(loss, plain, rtol=EXACT)
    assert_close(aux | {"layers": aux["layers"].astype(jnp.int32)}, plain_aux, EXACT)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    unpadded = eqx.tree_at(
        lambda p: p.blocks, gradients, pipeline.unpad_layers(gradients.blocks, case.table)
    )
    assert_close(unpadded, expected, EXACT)
    jax.tree.map(
        np.testing.assert_array_equal, only_real(gradients.blocks, case.table), gradients.blocks
    )


def only_real(blocks, table):
    real = (np.arange(table.max()) < table[..., None]).reshape(len(table), -1)
    return jax.tree.map(
        lambda w: np.where(real.reshape(*real.shape, *[1] * (w.ndim - 2)), np.asarray(w), 0), blocks
    )


@st.composite
def cases(draw, biggest=8):
    stages = draw(st.integers(1, biggest))
    chunks = draw(st.sampled_from([1, 1, 2, 3]))
    counts = st.lists(st.integers(1, 2), min_size=stages, max_size=stages).map(tuple)
    beside = [(d, t) for d in (1, 2) for t in (1, 2) if d * t * stages <= 8]
    data, tensor = draw(st.sampled_from(beside[::-1]))
    return Case(
        layers=tuple(draw(counts) for _ in range(chunks)),
        microbatches=draw(st.integers(1, 5)),
        data=data,
        tensor=tensor,
        make=draw(
            st.sampled_from([one_f_one_b_lockstep, zero_bubble_lockstep] + [gpipe] * (chunks == 1))
        ),
        keep=draw(st.sampled_from(KEEP)),
        exchange=draw(st.booleans()),
        zero=draw(st.sampled_from([0, 1, 2, 3])) if data > 1 else 0,
        algorithm=draw(st.sampled_from([xla, ring])),
    )


no_shrinking = [Phase.explicit, Phase.generate]  # each example compiles a program


@pytest.mark.sweep(3, "wholes")
@settings(max_examples=2, phases=no_shrinking)
@given(case=cases(), seed=st.integers(0, 1000))
def test_everything_at_once_is_as_on_one_device(case, seed):
    check(case, seed)


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=4, phases=no_shrinking)
@given(case=cases(), seed=st.integers(0, 1000))
def test_everything_at_once_is_as_on_one_device_wherever(case, seed):
    check(case, seed)


def program(exchange, rows=4):
    """A compiled pipeline of stages 2 x tensor 2 that sends a stream, an odd array, and a
    counter."""
    table = one_f_one_b_lockstep(2, 4)
    embed = lambda params, part: {
        "x": part,
        "odd": jnp.mean(part[:, :3], axis=0),
        "count": jnp.zeros((), jnp.int32),
    }

    def stage(params, at, part, position):
        return at | {"x": jnp.tanh(at["x"] @ params["blocks"][0]), "count": at["count"] + 1}

    head = lambda params, at, part: jnp.mean(at["x"]) + jnp.mean(at["odd"])
    where = lambda params: params["blocks"]
    grad = pipeline.value_and_grad(embed, stage, head, table, "stage", blocks=where, send=exchange)
    world, specs = (
        mesh.make(stage=2, tensor=2, devices=jax.devices()[:4]),
        {"blocks": P(None, "stage")},
    )
    run = jax.jit(mesh.spmd(grad, mesh=world, in_specs=(specs, P()), out_specs=(P(), specs)))
    params = {"blocks": jax.random.normal(jax.random.key(0), (1, 2, WIDTH, WIDTH), FLOAT64)}
    batch = jax.random.normal(jax.random.key(1), (rows * table.microbatches, WIDTH), FLOAT64)
    return run(params, batch), certificate.read(run.lower(params, batch).compile(), world)


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("schedule", [one_f_one_b_lockstep, zero_bubble_lockstep])
def test_a_constant_that_is_computed_in_a_checkpoint_waits_as_one(schedule):
    """What the transpose needs of it is the same on all stages and for all microbatches; it is
    typed so, and has no slots.

    A table of NumPy's is a constant too.
    """
    order = np.arange(WIDTH)[::-1].copy()

    def stage(model, x, part, position):
        turns = jnp.cos(jnp.arange(WIDTH, dtype=FLOAT64))[None]

        @jax.checkpoint
        def one(x, w):
            return jnp.tanh(x @ w)[:, order] * x * turns, None

        return jax.lax.scan(one, x, model["blocks"])[0]

    embed, head = lambda model, x: x @ model["in"], lambda model, x, part: jnp.mean((x - part) ** 2)
    normal = lambda i, *shape: 0.3 * jax.random.normal(jax.random.key(i), shape, FLOAT64)
    model, x = (
        {"in": normal(0, WIDTH, WIDTH), "blocks": normal(1, 1, 4, WIDTH, WIDTH)},
        normal(2, 8, WIDTH),
    )
    grad = pipeline.value_and_grad(
        embed, stage, head, schedule(2, 4), ring("stage"), blocks=lambda model: model["blocks"]
    )
    over, specs = (
        mesh.make(stage=2, devices=jax.devices()[:2]),
        {"in": P(), "blocks": P(None, "stage")},
    )
    loss, found = jax.jit(
        mesh.spmd(grad, mesh=over, in_specs=(specs, P()), out_specs=(P(), specs))
    )(model, x)
    whole = lambda model: head(
        model, stage(model | {"blocks": model["blocks"][0]}, embed(model, x), x, 0), x
    )
    assert_close((loss, found), jax.value_and_grad(whole)(model), EXACT)


@pytest.mark.parametrize("schedule", [one_f_one_b_lockstep, zero_bubble_lockstep])
def test_a_random_key_of_a_checkpoint_may_differ_between_data_devices(schedule):
    """The key is the same on all stages and for all microbatches, and differs along "data"."""
    normal = lambda i, *shape: 0.3 * jax.random.normal(jax.random.key(i), shape, FLOAT64)
    model, x = {"blocks": normal(1, 1, 4, WIDTH, WIDTH)}, normal(2, 16, WIDTH)

    def stage_on(data_device):
        def stage(model, x, part, position):
            key = jax.random.fold_in(jax.random.key(0), data_device())

            @jax.checkpoint
            def one(x, w, key):
                return jnp.tanh(x @ w) * jax.random.uniform(key, (WIDTH,), FLOAT64)[None]

            for w in model["blocks"].reshape(-1, WIDTH, WIDTH):
                x = one(x, w, key)
            return x

        return stage

    embed, head = lambda model, x: x, lambda model, x, part: jnp.mean((x - part) ** 2)
    grad = pipeline.value_and_grad(
        embed,
        stage_on(lambda: jax.lax.axis_index("data")),
        head,
        schedule(2, 4),
        "stage",
        blocks=lambda model: model["blocks"],
    )
    over = mesh.make(data=2, stage=2, devices=jax.devices()[:4])
    specs = {"blocks": P(None, "stage")}
    loss, found = jax.jit(
        mesh.spmd(
            grads.averaged(grad, "data"),
            mesh=over,
            in_specs=(specs, P("data")),
            out_specs=(P(), specs),
        )
    )(model, x)

    def whole(model):
        blocks = {"blocks": model["blocks"][0]}
        first, second = (
            head(model, stage_on(device.item)(blocks, rows, rows, 0), rows)
            for device, rows in zip(np.arange(2), jnp.split(x, 2), strict=True)
        )
        return (first + second) / 2

    assert_close((loss, found), jax.value_and_grad(whole)(model), EXACT)


def test_a_split_exchange_sends_its_part():
    """Half of the stage's bytes from each of two tensor devices, where a dim divides; the values
    are the same bit for bit."""
    (whole, sent), (part, less) = program(pipeline.whole), program(pipeline.split_over("tensor"))
    jax.tree.map(np.testing.assert_array_equal, part, whole)
    over = lambda found: sum(entry.bytes for entry in found if entry.kind == "collective-permute")
    # 5 ticks forward and 5 backward; what the last would send, nobody reads. No dim of `odd`
    # divides by 2, nor of the counter.
    stream, odd, count = 8 * 4 * WIDTH, 8 * 3, 4
    assert (over(sent), over(less)) == (
        9 * (stream + odd) + 5 * count,
        9 * (stream // 2 + odd) + 5 * count,
    )


@pytest.mark.sweep(30, "steps")
def test_the_example_of_skip_connections_is_as_on_one_device():
    """The functions of `examples/pipeline.py`, which train there."""
    names = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "pipeline.py"))
    normal = lambda i, *shape: 0.3 * jax.random.normal(jax.random.key(i), shape, FLOAT64)
    own = names["Net"](normal(0, 16, 8), normal(5, 8), normal(1, 1, 8, 8, 8), normal(2, 8, 1))
    batch = normal(3, 12, 16), normal(4, 12, 1)
    functions = [names[name] for name in ("embed", "stage", "head")]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        grad = pipeline.value_and_grad(*functions, one_f_one_b_lockstep(4, 3), "stage")
        specs = rules.specs(own, lambda path, leaf: P(None, "stage") if path == "blocks" else P())
        world = mesh.make(stage=4, devices=jax.devices()[:4])
        (loss, _), gradients = jax.jit(
            mesh.spmd(grad, mesh=world, in_specs=(specs, P()), out_specs=(P(), specs))
        )(own, batch)
        expected = jax.value_and_grad(one_device(*functions, 4))(own, batch)
    np.testing.assert_allclose(loss, expected[0], rtol=EXACT)
    assert_close(gradients, expected[1], EXACT)


def test_a_state_of_any_model_goes_to_disk_and_back():
    """A dict with uneven layers, and AdamW's moments of it: stored as [L, ...], and read back with
    its padding."""
    table = np.array([[2, 1], [1, 1]])
    blocks = {"w": jnp.arange(5 * 3.0).reshape(5, 3)}
    model = {
        "blocks": pipeline.pad_layers(blocks, table),
        "own": {"blocks": jnp.ones((2, 4))},
        "name": "a net",
    }
    optimizer = optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array))
    state = step.State(model, optimizer, jnp.zeros((), jnp.int32))
    form = pipeline.stored(lambda model: model["blocks"], looped_placement(2, 2), table=table)
    disk = form.to_disk(state)
    np.testing.assert_array_equal(disk.model["blocks"]["w"], blocks["w"])
    assert disk.optimizer[0].mu["blocks"]["w"].shape == (5, 3)
    assert disk.model["own"]["blocks"].shape == (
        2,
        4,
    )  # its path ends alike, and it is not one of them
    back = form.from_disk(disk)
    jax.tree.map(
        np.testing.assert_array_equal,
        eqx.filter(back, eqx.is_array),
        eqx.filter(state, eqx.is_array),
    )
    even = pipeline.stored(lambda model: model["blocks"], looped_placement(2, 2))
    shapes = lambda state: [leaf.shape for leaf in jax.tree.leaves(eqx.filter(state, eqx.is_array))]
    assert shapes(even.from_disk(even.to_disk(state))) == shapes(state)
