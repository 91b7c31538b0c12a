"""A mixture of experts over any axes computes what all experts on all tokens compute on one
device."""

import functools
import math
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

import equinox as eqx
import flags
import jax
import jax.numpy as jnp
import mixtures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from mixtures import TOKENS, D, Plain, gathered_ragged, layer_of
from reference import EXACT, OPTIMIZER, assert_close
from user_models import on

from parallax import (
    context,
    experts,
    grads,
    jaxprs,
    mesh,
    pipeline,
    rules,
    schedule,
    sequence,
    step,
    zero,
)
from parallax.collectives import ring
from parallax.collectives.axis import xla
from parallax.collectives.types import varying
from parallax.compiled import certificate, targets
from parallax.tensor import comms as tensor_joins

ALL = math.inf
DISPATCHES = {
    "gathered": (experts.gathered, xla),
    "gathered, ring": (experts.gathered, ring),
    "exchanged": (experts.exchanged(ALL), xla),
    "exchanged, ring": (experts.exchanged(ALL), ring),
    "ragged": (experts.ragged(ALL, gathered_ragged), xla),
}

# One layer, whatever the router says

SEQUENCES = 8


class Layer(NamedTuple):
    """How one layer is split, and how it chooses."""

    sizes: dict[str, int]
    axis: tuple[str, ...]
    dispatch: str
    count: int
    plain: Plain
    tensor: str | None = None
    sequence: str | None = None


LAYERS = {
    "data 8, k 1 of 8": Layer({"data": 8}, ("data",), "exchanged, ring", 8, Plain(1)),
    "data 4 x tensor 2, k 2 of 4": Layer(
        {"data": 4, "tensor": 2}, ("data",), "gathered, ring", 4, Plain(2), tensor="tensor"
    ),
    "data 2 x expert 4, k 4 of 16": Layer(
        {"data": 2, "expert": 4}, ("expert",), "exchanged", 16, Plain(4, jax.nn.sigmoid, True)
    ),
    "data 4 x context 2, k 3 of 8": Layer(
        {"data": 4, "context": 2},
        ("data", "context"),
        "gathered",
        8,
        Plain(3, jax.nn.sigmoid),
        sequence="context",
    ),
    "expert 4 x tensor 2, k 2 of 12": Layer(
        {"expert": 4, "tensor": 2},
        ("expert",),
        "ragged",
        12,
        Plain(2, normalised=True),
        tensor="tensor",
    ),
    "one device, k 2 of 8": Layer({"data": 8}, (), "gathered", 8, Plain(2)),
}


@functools.cache
def compiled_layer(name):
    """Loss, statistics and gradients: split, and on one device."""
    case, (dispatch, algorithm) = LAYERS[name], DISPATCHES[LAYERS[name].dispatch]
    plain, split, tensor = (
        case.plain,
        tuple(n for n in case.sizes if n != "tensor"),
        case.tensor or (),
    )
    hows = {"route": plain.route, "dispatch": dispatch, "compute": experts.grouped(size=3)}

    def comms():
        shared = algorithm(tensor) if tensor else ()
        return (
            context.comms(shared, context=case.sequence) if case.sequence else tensor_joins(shared)
        )

    def loss(params, x):
        w, x = params["w"], x + jnp.sin(x @ params["before"])  # so that the cotangent of x is seen
        y, told = experts.moe(
            x, w, algorithm(case.axis) if case.axis else (), comms=comms(), **hows
        )
        return jnp.mean(jnp.sin(y) ** 2 + y) + told.balance + told.z / 9, told

    def whole(params, x):
        w, x = params["w"], x + jnp.sin(x @ params["before"])
        y, told = mixtures.dense(x, w, plain)
        return jnp.mean(jnp.sin(y) ** 2 + y) + told.balance + told.z / 9, told

    specs = {"w": mixtures.layer_specs(case.axis or None, case.tensor), "before": P()}
    of = lambda f: jax.value_and_grad(f, has_aux=True)
    batch = P(tuple(n for n in split if n != case.sequence), case.sequence)
    grad = on(
        mesh.make(**case.sizes), grads.averaged(of(loss), split), (specs, batch), (P(), specs)
    )
    return grad, jax.jit(of(whole))


@st.composite
def routers(draw, count):
    """A router and its bias: any, with ties everywhere, with all tokens to one expert, with an
    expert that gets none."""
    seed, kind = (
        draw(st.integers(0, 10**6)),
        draw(st.sampled_from(["any", "ties", "some ties", "one", "none"])),
    )
    expert = draw(st.integers(0, count - 1))
    w = layer_of(count, seed)
    router, bias = np.array(w.router), np.zeros(count)
    if kind in ("ties", "some ties"):
        router[:, : count if kind == "ties" else count // 2] = 0
    if kind in ("one", "none"):
        bias[expert] = 1e3 if kind == "one" else -1e3
    return (
        eqx.tree_at(lambda w: (w.router, w.bias), w, (jnp.asarray(router), jnp.asarray(bias))),
        kind,
        expert,
    )


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", LAYERS)
def test_one_layer_is_all_experts_on_all_tokens(name):
    case = LAYERS[name]

    @settings(max_examples=12)
    @given(drawn=routers(case.count), seed=st.integers(0, 1000))
    def check(drawn, seed):
        (w, kind, expert), (split, whole) = drawn, compiled_layer(name)
        x = np.random.default_rng(seed).normal(size=(SEQUENCES, TOKENS, D))
        params = {"w": w, "before": mixtures.normal(seed, D, D)}
        ((loss, told), gradients), ((plain, expected), plain_gradients) = (
            split(params, x),
            whole(params, x),
        )
        np.testing.assert_allclose(loss, plain, rtol=EXACT)
        assert_close(told, expected, EXACT)
        assert_close(gradients, plain_gradients, EXACT)
        assert told.dropped == 0
        assert not np.any(gradients["w"].bias)
        if kind in ("one", "none"):
            np.testing.assert_allclose(
                told.load[expert], 1 / case.plain.k if kind == "one" else 0, rtol=1e-15
            )

    check()


# What finds no room

TIGHT = {
    "exchanged": (experts.exchanged(0.6), False),
    "exchanged, a row at least": (experts.exchanged(0.01), False),
    "ragged": (experts.ragged(0.7, gathered_ragged), True),
}


@functools.cache
def tight(name):
    dispatch, k = TIGHT[name][0], 2

    def layer(w, x):
        y, told = experts.moe(
            x, w, "data", route=experts.top_k(k), dispatch=dispatch, compute=experts.grouped(size=4)
        )
        return y, jax.tree.map(lambda leaf: jax.lax.pmean(leaf, "data"), told)

    specs = mixtures.layer_specs("data")
    return on(
        mesh.make(data=4, devices=jax.devices()[:4]), layer, (specs, P("data")), (P("data"), P())
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", TIGHT)
@settings(max_examples=8)
@given(drawn=routers(8), seed=st.integers(0, 1000))
def test_what_finds_no_room_adds_nothing_and_is_counted(name, drawn, seed):
    (w, _, _), (dispatch, shared), plain = drawn, TIGHT[name], Plain(2)
    x = np.random.default_rng(seed).normal(size=(SEQUENCES, TOKENS, D))
    ids = np.asarray(plain.route(x @ w.router, w.bias).experts)
    room = math.ceil(dispatch.capacity * 2 * TOKENS * SEQUENCES / 4 / (1 if shared else 4))
    kept = mixtures.dropping(ids, 4, 2, room, shared=shared)
    y, told = tight(name)(w, x)
    expected, statistics = mixtures.dense(x, w, plain, jnp.asarray(kept))
    assert_close(y, expected, EXACT)
    assert_close(told, statistics, EXACT)
    assert float(told.dropped) * SEQUENCES == np.sum(~kept)
    nothing = ~kept.any(axis=-1)
    assert not np.any(np.asarray(y)[nothing])  # the residual alone


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("name", TIGHT)
def test_a_token_that_is_not_finite_changes_no_other_token(name):
    w = layer_of(8)
    x = np.random.default_rng(0).normal(size=(SEQUENCES, TOKENS, D))
    others = np.ones((SEQUENCES, TOKENS), bool)
    others[:: SEQUENCES // 4, 0] = False  # the first token of each of 4 devices
    x[~others] = np.nan
    y, _ = tight(name)(w, x)
    assert np.all(np.isfinite(np.asarray(y)[others]))


@pytest.mark.sweep(3, "wholes")
def test_an_expert_that_is_chosen_twice_counts_twice():
    """A block then has a row twice, so no sum over its rows may promise that they differ."""
    w, x, once = layer_of(8), mixtures.normal(1, SEQUENCES, TOKENS, D), experts.top_k(1)

    def twice(logits, bias):
        routing = once(logits, bias)
        ids, weights = (jnp.repeat(a, 2, axis=-1) for a in (routing.experts, routing.weights))
        return routing._replace(experts=ids, weights=weights)

    def by(route):
        total = lambda w, x: jnp.sum(experts.moe(x, w, (), route=route)[0])
        return jax.value_and_grad(total, argnums=(0, 1))

    assert_close(by(twice)(w, x), jax.tree.map(lambda a: 2 * a, by(once)(w, x)), EXACT)
    scatters = [
        eqn
        for eqn in jaxprs.every(jax.make_jaxpr(by(twice))(w, x).jaxpr)
        if eqn.primitive.name == "scatter-add" and eqn.invars[1].aval.shape[0] > 1
    ]
    assert scatters
    assert not any(eqn.params["unique_indices"] for eqn in scatters)


# Five steps of a decoder


class Case(NamedTuple):
    """How the decoder is split. The batch is split over data and expert; experts are over
    `axis`."""

    sizes: dict[str, int]
    axis: tuple[str, ...] = ("data",)
    dispatch: str = "gathered"
    plain: Plain = Plain(2)
    count: int = 4
    microbatches: int = 1
    chunks: int = 1
    zero: bool = False


EXPERT = ("expert",)
CASES = {
    "data, accumulated by 2": Case({"data": 4}, microbatches=2, plain=Plain(1)),
    "data, accumulated by 4": Case({"data": 4}, dispatch="exchanged, ring", microbatches=4),
    "data x expert": Case(
        {"data": 2, "expert": 4}, EXPERT, "exchanged, ring", Plain(3, jax.nn.sigmoid, True), 16
    ),
    "data x expert, experts over both": Case(
        {"data": 2, "expert": 4}, ("data", "expert"), "gathered, ring", count=8
    ),
    "data x tensor": Case({"data": 4, "tensor": 2}, dispatch="exchanged"),
    "data x expert x tensor": Case(
        {"data": 2, "expert": 2, "tensor": 2}, EXPERT, "ragged", Plain(4), 8
    ),
    "data x stage": Case({"data": 4, "stage": 2}, dispatch="exchanged, ring", microbatches=2),
    "data x stage, interleaved": Case({"data": 4, "stage": 2}, microbatches=4, chunks=2),
    "data x expert x stage": Case(
        {"data": 2, "expert": 2, "stage": 2}, EXPERT, "gathered, ring", Plain(3), 8, 2
    ),
    "expert x tensor x stage": Case(
        {"expert": 2, "tensor": 2, "stage": 2}, EXPERT, "exchanged", Plain(2), 4, 2
    ),
    "data, ZeRO": Case({"data": 4}, dispatch="exchanged, ring", zero=True),
    "data x expert, ZeRO": Case(
        {"data": 2, "expert": 4}, EXPERT, count=8, microbatches=2, zero=True
    ),
}
STEPS, BATCH, DEPTH = 5, 32, 4


class Trained(NamedTuple):
    """Losses, auxiliary values, gradients, and the model at the end."""

    losses: list
    aux: list
    gradients: list
    model: Any


@functools.cache
def alone(count, plain):
    """One device, all experts on all tokens, the whole batch, optax, and the bias by hand."""
    grad = mixtures.grad_of(mixtures.loss_of(lambda x, w: mixtures.dense(x, w, plain)))
    model = mixtures.decoder(count, DEPTH)
    moved = lambda model: eqx.filter(model, mixtures.trained(model))
    optimizer, found = OPTIMIZER.init(moved(model)), Trained([], [], [], None)

    @jax.jit
    def train(model, optimizer, batch):
        (loss, aux), gradients = grad(model, batch)
        updates, optimizer = OPTIMIZER.update(gradients, optimizer, moved(model))
        model = eqx.apply_updates(model, updates)
        choices = BATCH * TOKENS * plain.k
        fewer = choices - jnp.round(aux.stages.load * choices) * count  # whole numbers
        bias = lambda m: m["blocks"]["mixture"].bias
        return (
            eqx.tree_at(bias, model, bias(model) + 0.01 * jnp.sign(fewer)),
            optimizer,
            loss,
            aux,
            gradients,
        )

    with jax.numpy_dtype_promotion("standard"):
        for number in range(STEPS):
            model, optimizer, loss, aux, gradients = train(
                model, optimizer, mixtures.windows(number, BATCH)
            )
            for values, value in zip(found, (loss, aux, gradients), strict=False):
                values.append(value)
    return found._replace(model=model)


def prepared(case):
    """The state and the step."""
    dispatch, algorithm = DISPATCHES[case.dispatch]
    tensor = tensor_joins(algorithm("tensor") if "tensor" in case.sizes else ())
    hows = {
        "route": case.plain.route,
        "dispatch": dispatch,
        "compute": experts.grouped(size=8),
        "comms": tensor,
    }
    mixed = lambda x, w: experts.moe(x, w, algorithm(case.axis), **hows)
    own, where = functools.partial(mixtures.stage, mixed=mixed), lambda model: model["blocks"]
    split = tuple(name for name in ("data", "expert") if name in case.sizes)
    after = mixtures.after
    make_model = lambda: regrouped(mixtures.decoder(case.count, DEPTH), case.chunks)
    trainable = mixtures.trained(eqx.filter_eval_shape(make_model))
    world = mesh.make(**case.sizes, devices=jax.devices()[: math.prod(case.sizes.values())])
    if stages := case.sizes.get("stage"):
        table = schedule.one_f_one_b_lockstep(stages, case.microbatches, case.chunks)
        options = {"blocks": where, "trainable": trainable}
        grad = pipeline.value_and_grad(
            mixtures.enter, own, mixtures.head, table, algorithm("stage"), **options
        )
        after = functools.partial(after, axis="stage", placement=table.placed)
    else:
        grad = grads.accumulated(
            mixtures.grad_of(mixtures.loss_of(mixed)), microbatches=case.microbatches
        )
    plain_rule = mixtures.rule_of(
        case.axis, *(name if name in case.sizes else None for name in ("stage", "tensor"))
    )
    rule, optimizer = plain_rule, OPTIMIZER
    if case.zero:
        rule = rules.fsdp(
            "data",
            size=case.sizes["data"],
            min_size=1,
            keep={"blocks.**": (0, 1)},
            inside=plain_rule,
        )
        shares = rules.specs(eqx.filter_eval_shape(make_model), rule, world, batch_axes=split)
        grad, optimizer = (
            zero.reduce_scattered(grad, algorithm(split), shares),
            zero.sharded(OPTIMIZER, "data", shares),
        )
    else:
        grad = grads.averaged(grad, algorithm(split))
    options = {"optimizer_rule": rule, "trainable": trainable, "batch_axes": split}
    state, specs = step.init(make_model, OPTIMIZER, plain_rule, world, **options)
    train = step.make(grad, optimizer, after_update=after)
    return state, on(world, train, (specs, P(split)), (specs, P()), donate="all")


def regrouped(model, chunks):
    """Its blocks [chunks, layers, ...]; 1: one device's."""
    blocks = jax.tree.map(lambda w: w.reshape(chunks, -1, *w.shape[2:]), model["blocks"])
    return model | {"blocks": blocks}


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long) if "stage" in case.sizes else name
        for name, case in CASES.items()
    ],
)
def test_five_steps_of_a_decoder_are_those_of_one_device(name):
    check(CASES[name])


def check(case):
    plain = alone(case.count, case.plain)
    with jax.numpy_dtype_promotion("standard"):
        state, train = prepared(case)
        for number in range(STEPS):
            state, info = train(state, mixtures.windows(number, BATCH))
            np.testing.assert_allclose(info.loss, plain.losses[number], rtol=EXACT)
            layers = lambda aux: jax.tree.map(
                lambda leaf: np.asarray(leaf).reshape(DEPTH, *leaf.shape[2:]), aux
            )
            assert_close(layers(info.aux.stages), layers(plain.aux[number].stages), EXACT)
            assert_close(regrouped(state.optimizer.gradients, 1), plain.gradients[number], EXACT)
        assert not np.any(info.aux.stages.dropped)
        assert_close(regrouped(state.model, 1), plain.model, EXACT)
        assert np.any(plain.model["blocks"]["mixture"].bias)


@pytest.mark.sweep(2, "experts")
def test_a_gradient_that_was_summed_twice_is_refused():
    """An expert's gradient is the sum over the tokens of all devices already."""
    case, plain = CASES["data, accumulated by 2"], Plain(1)
    mixed = lambda x, w: experts.moe(x, w, "data", route=plain.route)
    grad = grads.averaged(mixtures.grad_of(mixtures.loss_of(mixed)), "data")

    def twice(model, batch):
        value, gradients = grad(model, batch)
        of = lambda g: g["blocks"]["mixture"].experts
        return value, eqx.tree_at(
            of, gradients, jax.tree.map(lambda g: jax.lax.psum(g, "data"), of(gradients))
        )

    world = mesh.make(**case.sizes, devices=jax.devices()[:4])
    with jax.numpy_dtype_promotion("standard"):
        make_model = lambda: mixtures.decoder(case.count, DEPTH)
        trainable = mixtures.trained(eqx.filter_eval_shape(make_model))
        state, specs = step.init(
            make_model, OPTIMIZER, mixtures.rule_of("data"), world, trainable=trainable
        )
        with pytest.raises(
            ValueError,
            match=(
                r"experts.gate differs along \['data'\], .* the gradients of different shards "
                r"were"
            ),
        ):
            on(world, step.make(twice, OPTIMIZER), (specs, P("data")), (specs, P()))(
                state, mixtures.windows(0, BATCH)
            )


SIXTEEN = {
    "four axes": Case(
        {"data": 2, "expert": 2, "tensor": 2, "stage": 2}, EXPERT, "exchanged, ring", Plain(2), 4, 2
    ),
    "four axes, experts over two": Case(
        {"data": 2, "expert": 2, "tensor": 2, "stage": 2},
        ("data", "expert"),
        "gathered, ring",
        Plain(3),
        8,
        2,
        zero=True,
    ),
}


@pytest.mark.programs
@pytest.mark.long
def test_four_axes_on_sixteen_devices():
    """In a process of its own, set up by its environment, since models of the tests are made on
    import."""
    settings = {
        "NUM_CPU_DEVICES": "16",
        "ENABLE_X64": "1",
        "NUMPY_DTYPE_PROMOTION": "strict",
        "NUMPY_RANK_PROMOTION": "raise",
    }
    environment = (
        os.environ | flags.quick() | {f"JAX_{name}": value for name, value in settings.items()}
    )
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def on_sixteen_devices():
    for name, case in SIXTEEN.items():
        print(name, flush=True)
        check(case)


# What is sent

SENT = {
    "gathered, ring": (experts.gathered, ring),
    "exchanged, ring": (experts.exchanged(1.0), ring),
    "exchanged": (experts.exchanged(1.5), xla),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", SENT)
def test_bytes_in_the_compiled_program_are_those_of_the_formula(name):
    (dispatch, algorithm), n, k, count, sequences = SENT[name], 4, 2, 8, 2
    world = mesh.make(data=n, devices=jax.devices()[:n])

    def forward(w, x):
        return experts.moe(x, w, algorithm("data"), route=experts.top_k(k), dispatch=dispatch)[0]

    def both(w, x):
        y, transposed = jax.vjp(forward, w, x)
        return y, transposed(y)

    specs, found = mixtures.layer_specs("data"), []
    vary = lambda f: lambda w, x: f(varying(w, "data"), x)  # so that no gradient is summed
    arguments = layer_of(count), jnp.ones((n * sequences, TOKENS, D))
    by_device = jax.tree.map(lambda _: P("data"), specs)
    for f, out in ((forward, P("data")), (vary(both), (P("data"), (by_device, P("data"))))):
        program = (
            jax.jit(mesh.spmd(f, mesh=world, in_specs=(specs, P("data")), out_specs=out))
            .lower(*arguments)
            .compile()
        )
        entries = certificate.read(program, world)
        assert {entry.kind for entry in entries} == {
            "all-to-all" if algorithm == xla else "collective-permute"
        }
        # An all-to-all's result has the own block too, which does not travel.
        found.append(
            sum(entry.bytes for entry in entries) * (n - 1 if algorithm == xla else n) // n
        )
    sent = dispatch.sent(sequences * TOKENS, D, k=k, experts=count, n=n, itemsize=8)
    assert found == [sum(sent), sum(sent) + sent.out + sent.back + sent.weights]


@pytest.mark.parametrize(("k", "capacity"), [(1, 1.0), (2, 1.0), (3, 1.25), (4, 1.0)])
def test_an_all_to_all_pays_where_a_token_has_fewer_choices_than_there_are_devices(k, capacity):
    tokens, width, itemsize = 2048, 64, 2
    for n in (2, 4, 8, 16):
        price = functools.partial(
            sent_by, tokens, width, k=k, experts=4 * n, n=n, itemsize=itemsize
        )
        gather, exchange = price(experts.gathered), price(experts.exchanged(capacity))
        assert gather == (n - 1) * tokens * width * itemsize
        np.testing.assert_allclose(
            exchange, capacity * k * (n - 1) / n * tokens * width * itemsize, rtol=1e-2
        )
        assert (exchange < gather) == (min(capacity * k, n) < n)


# What is refused


def refused(message, *, w=None, x=None, specs=None, split=True, **options):
    x_specs = P("data") if split else P()
    options = {"route": experts.top_k(2), "axis": "data"} | options
    axis = options.pop("axis")
    run = on(
        *(
            mesh.make(data=4, devices=jax.devices()[:4]),
            lambda w, x: experts.moe(x, w, axis, **options)[0],
        ),
        *((specs or mixtures.layer_specs("data"), x_specs), x_specs),
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(run, w or layer_of(8), jnp.ones((8, TOKENS, D)) if x is None else x)


def test_refusals():
    refused(
        "experts.moe: the router has 8 experts, and each of the 4 devices of 'data' has 8, which "
        "is the first dim of gate, float64[8, 8, 6]. Give each array of the experts a first dim of "
        "8, split over 'data'; the number of experts must be a multiple of 4.",
        specs=mixtures.layer_specs(None),
    )
    fewer = eqx.tree_at(lambda w: w.router, layer_of(8), jnp.ones((D, 6)))
    refused(
        "experts.moe: the router has 6 experts, and each of the 4 devices of 'data' has 2, which "
        "is the first dim of gate",
        w=fewer,
    )
    refused(
        "experts.top_k: a token needs at least 1 expert and at most all 8 that the router knows; "
        "got k=9. Use another k",
        route=experts.top_k(9),
    )
    refused(
        "experts.top_k: a token needs at least 1 expert and at most all 8 that the router knows; "
        "got k=0",
        route=experts.top_k(0),
    )
    refused(
        "experts.moe: the experts are split over 'data', so the tokens must differ along 'data'. "
        "But x, float64[8, 6, 8], is the same along ['data']: the 4 devices would send the same "
        "tokens. Split the batch over that axis too",
        split=False,
    )
    refused(
        "experts.ragged needs an axis without an algorithm of its own; got ring('data'). Pass "
        "the axis by its name, 'data', or use experts.exchanged",
        axis=ring("data"),
        dispatch=experts.ragged(1.0),
    )
    refused(
        "experts.ragged needs an axis to move rows along, and the experts are not split over "
        "any axis. Use experts.gathered, or split",
        axis=(),
        specs=mixtures.layer_specs(None),
        dispatch=experts.ragged(1.0),
    )
    refused(
        "experts: an expert must return rows of the same shape and dtype as its input, "
        "float64[128, 8]; it returned float64[128, 6]. Make its",
        compute=experts.grouped(lambda w, rows: rows @ w.up),
    )
    for make, name in ((experts.exchanged, "exchanged"), (experts.ragged, "ragged")):
        for capacity in (0.0, -1.0, math.nan):
            with pytest.raises(
                ValueError,
                match=(
                    f"^experts.{name} needs a capacity above 0, as a multiple of the mean load; got"
                ),
            ):
                make(capacity)
    with pytest.raises(
        ValueError, match=r"^experts.grouped: a block needs 1 row or more; got size=0"
    ):
        experts.grouped(size=0)


COUNTED_ONCE_PER_DEVICE = {
    "experts' axis": (
        "experts.moe: the experts are split over 'data', and comms splits each expert's hidden "
        "width over 'data' too. The devices of 'data' would get the same results",
        {"data": 4},
        "data",
        lambda: sequence.comms("data"),
        mixtures.layer_specs("data"),
        P(None, "data"),
    ),
    "experts' axis, of a layout": (
        "experts.moe: the experts are split over ('data', 'tensor'), and comms splits each "
        "expert's hidden width over 'tensor' too.",
        {"data": 2, "tensor": 2},
        ("data", "tensor"),
        lambda: experts.comms("tensor", experts=("data", "tensor"), inner=sequence.comms),
        mixtures.layer_specs(("data", "tensor")),
        P("data", "tensor"),
    ),
    "whole experts": (
        "experts.moe: comms adds up results over 'tensor', but all arrays of the experts are the "
        "same along 'tensor': each result would be counted once per device. Split the experts'",
        {"data": 2, "tensor": 2},
        "data",
        lambda: tensor_joins("tensor"),
        mixtures.layer_specs("data"),
        P("data"),
    ),
    "whole experts, tokens split": (
        "experts.moe: comms adds up results over 'tensor', but all arrays of the experts are the",
        {"data": 2, "tensor": 2},
        "data",
        lambda: sequence.comms("tensor"),
        mixtures.layer_specs("data"),
        P("data", "tensor"),
    ),
    "shared axis": (
        "experts.moe: comms adds up results over 'stage', but all arrays of the experts are the",
        {"stage": 2, "tensor": 2},
        (),
        lambda: tensor_joins("tensor", shared="stage"),
        mixtures.layer_specs(None, "tensor"),
        P(),
    ),
}


@pytest.mark.parametrize("name", COUNTED_ONCE_PER_DEVICE)
def test_results_that_comms_would_count_once_per_device_are_refused(name):
    message, sizes, axis, comms, specs, batch = COUNTED_ONCE_PER_DEVICE[name]

    def run(w, x):
        return experts.moe(x, w, axis, route=experts.top_k(2), comms=comms())[0]

    world = mesh.make(**sizes, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(
            on(world, run, (specs, batch), batch), layer_of(8), jnp.ones((8, TOKENS + 2, D))
        )


def test_real_weights_of_complex_experts_have_the_gradient_of_the_weighted_sum():
    scale, x = (
        jax.lax.complex(mixtures.normal(i, 4, D), mixtures.normal(i + 1, 4, D)) for i in (1, 3)
    )
    weights, ids = jnp.arange(1.0, 5.0), jnp.array([0, 2, 3, 2])
    compute = experts.grouped(lambda scale, rows: rows * jnp.expand_dims(scale, 0), size=2)

    def loss(weights):
        return jnp.sum(jnp.abs(compute(scale, x, jnp.arange(4), ids, weights) - 1) ** 2)

    def plain(weights):
        return jnp.sum(jnp.abs(weights.astype(x.dtype)[:, None] * x * scale[ids] - 1) ** 2)

    assert_close(jax.grad(loss)(weights), jax.grad(plain)(weights), EXACT)


def no_choice(logits, bias):
    return jax.tree.map(lambda a: a[..., :0], experts.top_k(1)(logits, bias))


@pytest.mark.parametrize("name", DISPATCHES)
def test_no_tokens_and_no_choices_are_refused(name):
    dispatch, algorithm = DISPATCHES[name]
    axis, needed = algorithm("data"), "experts.moe needs 1 token or more, and 1 expert or more"
    refused(needed, x=jnp.ones((8, 0, D)), axis=axis, dispatch=dispatch)
    refused(needed, route=no_choice, axis=axis, dispatch=dispatch)
    if dispatch == experts.exchanged(ALL):
        assert dispatch.room(0, 2, 2, 4) == 0


@pytest.mark.sweep(2, "experts")
def test_experts_of_any_kind():
    """Stacked modules with biases, static leaves and integers among them, as `eqx.filter_vmap`
    makes them."""
    count, k = 4, 2
    make = lambda key: {
        "mlp": eqx.nn.MLP(D, D, 5, 1, jnp.tanh, dtype=mixtures.FLOAT64, key=key),
        "turn": jnp.arange(D)[::-1],
    }
    stacked = eqx.filter_jit(eqx.filter_vmap(make))(jax.random.split(jax.random.key(0), count))
    w = experts.Mixture(mixtures.normal(1, D, count), stacked)
    x = mixtures.normal(2, 8, TOKENS, D)
    one = lambda expert, rows: jax.vmap(expert["mlp"])(rows)[:, expert["turn"]]

    def loss(trained, rest, x):
        w = eqx.combine(trained, rest)
        y, _ = experts.moe(
            x, w, "data", route=experts.top_k(k), compute=experts.grouped(one, size=4)
        )
        return jnp.mean(jnp.sin(y))

    def whole(trained, rest, x):
        w = eqx.combine(trained, rest)
        scores = jax.nn.softmax(x @ w.router)
        mask = scores >= jnp.sort(scores, -1)[..., -k, None]
        made = jnp.stack(
            [one(expert_of(w.experts, i), x.reshape(-1, D)).reshape(x.shape) for i in range(count)],
            -1,
        )
        return jnp.mean(jnp.sin(jnp.einsum("btde,bte->btd", made, jnp.where(mask, scores, 0.0))))

    expert_of = lambda tree, i: jax.tree.map(
        lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, tree
    )
    trained, rest = eqx.partition(w, eqx.is_inexact_array)
    specs = lambda tree: jax.tree.map(
        lambda leaf: P("data") if leaf.shape[0] == count else P(), eqx.filter(tree, eqx.is_array)
    )
    grad = lambda trained, rest, x: grads.averaged(
        lambda t, b: jax.value_and_grad(loss)(t, *b), "data"
    )(trained, (rest, x))
    world = mesh.make(data=4, devices=jax.devices()[:4])
    split = on(world, grad, (specs(trained), specs(rest), P("data")), (P(), specs(trained)))
    found, expected = (
        split(trained, rest, x),
        eqx.filter_jit(jax.value_and_grad(whole))(trained, rest, x),
    )
    assert_close(found, expected, EXACT)


def sent_by(tokens, width, dispatch, **sizes):
    """Bytes of tokens, one way."""
    return dispatch.sent(tokens, width, **sizes).out


@pytest.mark.targets
def test_a_ragged_exchange_compiles_for_a_tpu():
    """With its backward pass, under the replication check: four exchanges of rows, and one of
    expert numbers."""
    w, specs = (
        jax.tree.map(lambda leaf: leaf.astype(jnp.float32), layer_of(8)),
        mixtures.layer_specs("data"),
    )
    with jax.enable_x64(False):
        there = targets.target("v5e:2x4")
        world = mesh.make(devices=there.devices, data=8)

        def loss(w, x):
            return jnp.mean(
                experts.moe(x, w, "data", route=experts.top_k(2), dispatch=experts.ragged(1.25))[0]
            )

        shapes = lambda tree, specs: jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=mesh.shardings(spec, world)
            ),
            tree,
            specs,
        )
        grad = mesh.spmd(
            *(grads.averaged(jax.value_and_grad(loss), "data"),),
            **{"mesh": world, "in_specs": (specs, P("data")), "out_specs": (P(), specs)},
        )
        arguments = shapes(w, specs), shapes(jnp.ones((8, 128, D), jnp.float32), P("data"))
        program = jax.jit(grad).lower(*arguments).compile()
        found = {entry.kind: entry.count for entry in certificate.read(program, world)}
    assert found["ragged-all-to-all"] in (4, 5)


if __name__ == "__main__":
    on_sixteen_devices()
