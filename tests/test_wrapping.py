"""Gradient functions put round one another, in drawn orders over drawn models: equal to one device,
or refused with a sentence."""

import functools
import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import EXACT, assert_close

from parallax import grads, mesh, pipeline, precision, rules, schedule, step, zero
from parallax.collectives import Axis, ErrorFeedback, halving, ring, xla
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import varying
from parallax.pipeline import ends

ROWS, WIDTH, HIDDEN = 32, 8, 16
MAX_NORM, SCALE = 0.05, 1024.0


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape) / 3


# Models: parameters, and a loss of them, of rows and of the axes along which the rows are split


def two_layers(params, batch, axis):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def layers_in_a_loop(params, batch, axis):
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params["layers"])
    return jnp.mean((x - batch["y"]) ** 2)


def embedding(params, batch, axis):
    return jnp.mean((params["table"][batch["ids"]] + params["bias"][None] - batch["y"]) ** 2)


def units_of_the_whole_batch(params, batch, axis):
    """The units less their mean over all devices' rows."""
    hidden = batch["x"] @ params["up"]
    centred = hidden - Axis.of(axis).all_mean(jnp.mean(hidden, axis=0, keepdims=True))
    return jnp.mean((jnp.tanh(centred) @ params["down"] - batch["y"]) ** 2)


def compared_with_all_rows(params, batch, axis):
    """As contrastive losses are: each row against the rows of all devices."""
    rows = batch["x"] @ params["up"]
    everyone = Axis.of(axis).all_gather(rows, axis=0, tiled=True)
    return jnp.mean(jnp.tanh(rows @ everyone.T)) + jnp.mean(params["down"] ** 2)


PARAMS = {
    "up": normal(0, WIDTH, HIDDEN),
    "down": normal(1, HIDDEN, WIDTH),
    "layers": normal(2, 8, WIDTH, WIDTH),
    "table": normal(3, HIDDEN, WIDTH),
    "bias": normal(4, WIDTH),
}
BATCH = {
    "x": normal(5, ROWS, WIDTH),
    "y": normal(6, ROWS, WIDTH),
    "ids": np.random.default_rng(7).integers(0, HIDDEN, ROWS),
}
MODELS = {
    two_layers: {"up": 1, "down": 0},  # the dims that shares split
    layers_in_a_loop: {"layers": 0},
    embedding: {"table": 0, "bias": 0},
    units_of_the_whole_batch: {"up": 1, "down": 0},
    compared_with_all_rows: {"up": 1, "down": 0},
}
LOOKS_AT_ALL_ROWS = (units_of_the_whole_batch, compared_with_all_rows)  # no mean of microbatches
MESHES = ({"data": 8}, {"dp": 4}, {"a": 4, "b": 2}, {"replica": 2, "batch": 2})


class Case(NamedTuple):
    """What is drawn.

    Attributes:
        model: the loss.
        sizes: the axes, all of which split the batch.
        specs: how the parameters live.
        gathered: the names of those that are gathered.
        chain: the grad_fns round the gradients of the loss, from the innermost.
        inner: likewise, of a step inside the loss (MAML); None without one.
        algorithm: who moves the data.
    """

    model: Any
    sizes: dict[str, int]
    specs: dict[str, P]
    gathered: tuple[str, ...]
    chain: tuple[str, ...]
    inner: tuple[str, ...] | None
    algorithm: Any

    @property
    def shares(self):
        return [name for name, spec in self.specs.items() if spec != P()]

    @property
    def right(self):
        """Whether nothing is put together in a wrong way."""
        last = all(
            chain.index("clipped") == len(chain) - 1
            for chain in (self.chain, self.inner or ())
            if "clipped" in chain
        )
        return last and set(self.shares) <= set(self.gathered) and not (self.inner and self.shares)


def drawn(seed) -> Case:
    draw = np.random.default_rng(seed)
    pick = lambda choices: choices[draw.integers(len(choices))]
    model, sizes = pick(list(MODELS)), pick(MESHES)
    names = tuple(sizes)
    specs = dict.fromkeys(MODELS[model], P())
    if draw.random() < 0.6:
        for name, dim in MODELS[model].items():
            over = pick([names[:1], names[-1:], names])
            if draw.random() < 0.8:
                specs[name] = P(*[None] * dim, over if len(over) > 1 else over[0])
    gathered = (
        tuple(specs)
        if draw.random() < 0.5
        else tuple(name for name in specs if draw.random() < 0.3)
    )
    inner = None
    if draw.random() < 0.3:
        inner = pick(
            [
                ("averaged",),
                ("averaged", "clipped"),
                ("clipped", "averaged"),
                ("accumulated", "averaged"),
            ]
        )
    chain = ["averaged" if len(names) == 1 or draw.random() < 0.5 else "averaged one by one"]
    chain += ["clipped"] * (draw.random() < 0.5) + ["unscaled"] * (draw.random() < 0.3)
    chain += ["accumulated"] * (
        draw.random() < 0.5 and model not in LOOKS_AT_ALL_ROWS and inner is None
    )
    if model in LOOKS_AT_ALL_ROWS and inner:
        inner = tuple(name for name in inner if name != "accumulated")
    return Case(
        model,
        sizes,
        specs,
        gathered,
        tuple(draw.permutation(chain)),
        inner,
        pick([xla, ring, halving]),
    )


def wrapped(grad, chain, axis, algorithm):
    """`grad` inside the grad_fns of `chain`; without axes, what it is on one device: clipped last
    of all."""
    one_by_one = lambda grad: functools.reduce(
        lambda grad, name: grads.averaged(grad, algorithm(name)), axis, grad
    )
    grad_fns = {
        "averaged": lambda grad: grads.averaged(grad, algorithm(axis)),
        "averaged one by one": one_by_one,
        "accumulated": functools.partial(grads.accumulated, microbatches=2),
        "unscaled": lambda grad: precision.unscaled(grad, jnp.asarray(SCALE)),
        "clipped": lambda grad: grads.clipped(grad, MAX_NORM),
    }
    if not axis:
        chain = [name for name in ("unscaled", "clipped") if name in chain]
    return functools.reduce(lambda grad, name: grad_fns[name](grad), chain, grad)


def grad_fn(case, axis, algorithm=xla):
    """The gradient function of a case; without axes, on one device."""
    loss = functools.partial(case.model, axis=axis)
    local = zero.gathered(
        loss,
        axis,
        {name: case.specs[name] if name in case.gathered else P() for name in case.specs},
    )
    if case.inner is not None:
        inside, step_of = local, wrapped(jax.value_and_grad(local), case.inner, axis, algorithm)

        def local(params, batch):
            gradients = step_of(params, batch)[1]
            return inside(jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients), batch)

    if "unscaled" in case.chain:
        local = precision.scaled(local, jnp.asarray(SCALE))
    return wrapped(jax.value_and_grad(local), case.chain, axis, algorithm)


REFUSALS = (
    "so it counts as a share",
    "is inside another one over the same axis",
    "A norm is taken inside a function",
    "wraps grads.clipped",
    "is the same along",
)


def run(case):
    names = tuple(case.sizes)
    devices = mesh.make(
        devices=jax.devices()[: int(np.prod(list(case.sizes.values())))], **case.sizes
    )
    params = {name: PARAMS[name] for name in case.specs}
    split = mesh.spmd(
        grad_fn(case, names, case.algorithm),
        mesh=devices,
        in_specs=(case.specs, P(names)),
        out_specs=(P(), case.specs),
    )
    return jax.jit(split)(params, BATCH), jax.jit(grad_fn(case, ()))(params, BATCH)


def outcome(case):
    """What it gives beside one device, or the words of its refusal."""
    try:
        return run(case)
    except (TypeError, ValueError) as error:
        return str(error)


@pytest.mark.sweep(30)
@pytest.mark.parametrize("seed", range(300))
def test_any_order_is_one_device_or_refused(seed):
    """What is right is never refused; a share that is not gathered may also meet shapes that do not
    fit."""
    case = drawn(seed)
    found = outcome(case)
    if isinstance(found, str):
        assert not case.right, found
        ungathered = not set(case.shares) <= set(case.gathered)
        assert re.search("|".join(REFUSALS + ("shape",) * ungathered), found)
    else:
        assert_close(*found, EXACT)


def test_the_draws_have_right_and_wrong_cases():
    cases = [drawn(seed) for seed in range(300)]
    assert 90 <= sum(case.right for case in cases) <= 210
    for kind in (
        lambda case: case.inner,
        lambda case: case.shares,
        lambda case: "clipped" in case.chain,
    ):
        assert sum(case.right for case in filter(kind, cases)) >= 15


@pytest.mark.parametrize(("outer", "inner"), [("sum", "sum"), ("sum", "mean"), ("mean", "sum")])
def test_gradients_that_were_summed_are_not_summed_again(outer, inner):
    """Neither loss nor gradient would be wrong by its type: the gradient would be n times that of
    the loss. A mean of means is the mean."""
    devices = mesh.make(data=4, devices=jax.devices()[:4])
    wraps = {"sum": grads.summed, "mean": grads.averaged}
    grad = jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))
    w, x = jnp.arange(3.0), jnp.arange(24.0).reshape(8, 3)

    def run(grad):
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.jit(mesh.spmd(grad, mesh=devices, **specs))(w, x)

    with pytest.raises(ValueError, match="The gradients are the same along 'data', so they were"):
        run(wraps[outer](wraps[inner](grad, "data"), "data"))
    mean = grads.averaged(grads.averaged(grad, "data"), "data")
    assert_close(run(mean), grad(w, x), EXACT)


# What a gather is


def over(f, in_specs, out_specs, **sizes):
    count = int(np.prod(list(sizes.values())))
    return jax.jit(
        mesh.spmd(
            f,
            mesh=mesh.make(devices=jax.devices()[:count], **sizes),
            in_specs=in_specs,
            out_specs=out_specs,
        )
    )


def ring_by_hand(w, names):
    """Hop by hop: a device's own block goes nowhere."""
    n, me = lax.axis_size(names), lax.axis_index(names)
    whole = varying(jnp.zeros((n, *w.shape), w.dtype), names)
    for hop in range(n):
        whole = lax.dynamic_update_index_in_dim(whole, w, (me - hop) % n, 0)
        w = lax.ppermute(w, names, [(i, (i + 1) % n) for i in range(n)])
    return whole.reshape(-1, *w.shape[1:])


def placed_and_summed(w, names):
    n, me = lax.axis_size(names), lax.axis_index(names)
    return lax.psum(
        lax.dynamic_update_index_in_dim(varying(jnp.zeros((n, *w.shape)), names), w, me, 0), names
    ).reshape(-1, *w.shape[1:])


GATHERS = {
    "by lax": lambda w, names: lax.all_gather(w, names, axis=0, tiled=True),
    "by a ring": lambda w, names: ring.all_gather(w, names, axis=0, tiled=True),
    "by halving": lambda w, names: halving.all_gather(w, names, axis=0, tiled=True),
    "by hand": ring_by_hand,
    "placed and summed": placed_and_summed,
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("gather", GATHERS)
def test_any_gather_counts(gather):
    """Also of what was computed of the share, inside `jit`, a loop or `checkpoint`."""

    def loss(params, batch):
        whole = jax.jit(
            jax.checkpoint(lambda w: GATHERS[gather](2 * w.astype(jnp.float64), "dp") / 2)
        )(params["table"])
        return embedding({**params, "table": whole}, batch, ())

    specs = {"table": P("dp"), "bias": P()}
    params = {name: PARAMS[name] for name in specs}
    split = over(
        grads.averaged(jax.value_and_grad(loss), ring("dp")), (specs, P("dp")), (P(), specs), dp=8
    )
    assert_close(
        split(params, BATCH),
        jax.value_and_grad(lambda *given: embedding(*given, ()))(params, BATCH),
        EXACT,
    )


def all_experts(weights, x, penalty):
    """Row i of each four goes to expert i."""
    rows = x.reshape(-1, 4, x.shape[-1])
    return jnp.mean(jnp.tanh(jnp.einsum("red,edf->ref", rows, weights)) ** 2) + penalty * jnp.sum(
        weights**2
    )


def own_expert(weights, x, penalty, exchange):
    """The same: rows go to their expert and back. The penalty sees the share alone, and the mean is
    over four devices."""
    rows = jnp.moveaxis(x.reshape(-1, 4, x.shape[-1]), 1, 0)
    made = exchange(jnp.tanh(exchange(rows) @ weights[0]))
    return jnp.mean(made**2) + 4 * penalty * jnp.sum(weights**2)


def all_to_all_by_hand(rows):
    n, me = lax.axis_size("dp"), lax.axis_index("dp")
    out = jnp.zeros_like(rows)
    for hop in range(n):
        block = lax.dynamic_index_in_dim(rows, (me + hop) % n, 0, keepdims=False)
        block = lax.ppermute(block, "dp", [(i, (i + hop) % n) for i in range(n)]) if hop else block
        out = lax.dynamic_update_index_in_dim(out, block, (me - hop) % n, 0)
    return out


@pytest.mark.sweep(3)
@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("by", ["lax", "a ring", "hand"])
def test_rows_may_travel_to_a_share(by, penalty):
    """Experts; `accumulated` stacks the losses of microbatches, penalties and all."""
    exchange = {
        "lax": lambda rows: lax.all_to_all(rows, "dp", 0, 0),
        "a ring": lambda rows: ring.all_to_all(rows, "dp", 0, 0),
        "hand": all_to_all_by_hand,
    }[by]
    weights, x = normal(0, 4, WIDTH, WIDTH), normal(1, 64, WIDTH)
    split = jax.value_and_grad(functools.partial(own_expert, penalty=penalty, exchange=exchange))
    split = grads.averaged(grads.accumulated(split, microbatches=2), "dp")
    got = over(split, (P("dp"), P("dp")), (P(), P("dp")), dp=4)(weights, x)
    assert_close(
        got, jax.value_and_grad(functools.partial(all_experts, penalty=penalty))(weights, x), EXACT
    )


SIDE_BY_SIDE = {
    "a barrier": lax.optimization_barrier,
    "a sum of both": lambda pair: lax.psum(jax.tree.map(lambda leaf: leaf / 2, pair), "tensor"),
    "an order": lambda pair: (sequence_after(pair[0], pair[1]), pair[1]),
}


@pytest.mark.parametrize("how", SIDE_BY_SIDE)
def test_a_loss_beside_gradients_is_no_use_of_the_shares(how):
    """Gradients of experts come of the weights without a collective after them; the loss does not
    come of the gradients."""
    exchange = lambda rows: lax.all_to_all(rows, "dp", 0, 0)
    grad = jax.value_and_grad(functools.partial(own_expert, penalty=0.0, exchange=exchange))
    beside = lambda w, x: SIDE_BY_SIDE[how](grad(varying(w, "tensor"), x))
    sums = how == "a sum of both"
    grad_fn = (
        grads.averaged(beside, "dp")
        if sums
        else grads.averaged(grads.summed(beside, "tensor"), "dp")
    )
    weights, x = normal(0, 4, WIDTH, WIDTH), normal(1, 64, WIDTH)
    f = over(
        lambda *given: jax.tree.map(lambda leaf: leaf[None], grad_fn(*given)[1]),
        (P("dp"), P("dp")),
        P("tensor", "dp"),
        dp=4,
        tensor=2,
    )
    want = jax.grad(functools.partial(all_experts, penalty=0.0))(weights, x)
    assert_close(f(weights, x)[0], want * (1 if sums else 2), EXACT)


def test_a_share_that_is_gathered_for_one_use_of_two_is_refused():
    """A table that reads ids and is used whole by mistake behind it."""

    def loss(table, batch):
        x = GATHERS["by lax"](table, "dp")[batch["ids"]]
        return jnp.mean((x @ table.T) ** 2)

    with pytest.raises(
        ValueError,
        match=r"parameter itself, here of shape \(2, 8\), differs along 'dp', so it counts as",
    ):
        over(
            grads.averaged(jax.value_and_grad(loss), "dp"), (P("dp"), P("dp")), (P(), P("dp")), dp=8
        )(PARAMS["table"], BATCH)


def columns(weights, x):
    return jnp.mean(jnp.tanh(x @ weights) ** 2)


def gathered_products(weights, x, gather):
    """A column-parallel layer, as over an axis that does not split the rows of `x`."""
    return jnp.mean(jnp.tanh(gather(x @ weights)) ** 2)


@pytest.mark.parametrize("how", ["gathered", "gathered by a ring", "in a convolution", "hidden"])
def test_a_share_whose_product_with_own_rows_is_sent_is_refused(how):
    """The rows of a product by a share are this device's own, so its columns are of other rows."""
    gather = functools.partial(
        ring.all_gather if how == "gathered by a ring" else lax.all_gather,
        axis_name="dp",
        axis=1,
        tiled=True,
    )

    def loss(weights, x):
        if how == "in a convolution":
            convolved = lax.conv(x[..., None], weights[..., None], (1,), "VALID")
            return jnp.mean(jnp.tanh(gather(convolved[..., 0])) ** 2)
        if how == "hidden":
            x = x @ lax.all_gather(weights, "dp", axis=1, tiled=True)[:, : x.shape[1]]
        return gathered_products(weights, x, gather)

    is_convolution = how == "in a convolution"
    weights, specs = normal(0, 16, 16), P("dp") if is_convolution else P(None, "dp")
    with pytest.raises(ValueError, match="differs along 'dp', so it counts as a share"):
        over(grads.averaged(jax.value_and_grad(loss), "dp"), (specs, P("dp")), (P(), specs), dp=8)(
            weights, normal(1, 16, 16)
        )


def test_own_rows_may_meet_a_share_first_and_then_travel():
    """A ring of rows, written by hand: each device multiplies the rows of all devices by its
    columns, its own rows first, and one all-to-all brings the products home."""

    def loss(weights, x):
        n, products = lax.axis_size("dp"), []
        for _ in range(n):
            products.append(x @ weights)
            x = lax.ppermute(x, "dp", [(i, (i + 1) % n) for i in range(n)])
        # Product `hop` has the rows of device me - hop.
        by_owner = (lax.axis_index("dp") - np.arange(n, dtype=np.int32)) % n
        home = lax.all_to_all(jnp.stack(products)[by_owner], "dp", 0, 0)
        return jnp.mean(jnp.tanh(jnp.concatenate(home, axis=1)) ** 2)

    weights, x, specs = normal(0, 16, 16), normal(1, 16, 16), P(None, "dp")
    f = over(grads.averaged(jax.value_and_grad(loss), "dp"), (specs, P("dp")), (P(), specs), dp=4)
    assert_close(f(weights, x), jax.value_and_grad(columns)(weights, x), EXACT)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_share_that_is_read_by_closure_is_gathered_too(gathers):
    """A frozen copy beside the trained parameter: a loss may read the share of its caller, but not
    as the whole parameter."""
    w, x = normal(0, 16, 8), normal(1, 16, 8)
    product = lambda w, fixed, x: jnp.mean((x @ w.T) ** 2) + jnp.mean((x @ fixed.T) ** 2)

    def grad(share, x):
        fixed = lax.all_gather(share, "dp", tiled=True) if gathers else share
        loss = zero.gathered(lambda w, x: product(w, fixed, x), "dp", P("dp"))
        return grads.averaged(jax.value_and_grad(loss), "dp")(share, x)

    split = over(grad, (P("dp"), P("dp")), (P(), P("dp")), dp=8)
    if gathers:
        assert_close(split(w, x), jax.value_and_grad(product)(w, w, x), EXACT)
        return
    with pytest.raises(
        ValueError,
        match=r"parameter itself, here of shape \(2, 8\), differs along 'dp', so it counts as",
    ):
        split(w, x)


def test_a_share_whose_shape_does_not_fit_is_named():
    """JAX's words about shapes alone would not say that a share was meant to be gathered."""
    loss = lambda params, x: jnp.mean(x @ params["square"])
    params = {"square": normal(0, WIDTH, WIDTH)}
    f = over(
        grads.averaged(jax.value_and_grad(loss), "dp"),
        ({"square": P("dp")}, P("dp")),
        (P(), P("dp")),
        dp=8,
    )
    with pytest.raises(
        ValueError,
        match=(
            r"cannot be traced: dot_general.*\['square'\] are shares along "
            r"\['dp'\].*zero.gathered"
        ),
    ):
        f(params, BATCH["x"])


@pytest.mark.parametrize("axis", ["data", "dp", "batch"])
def test_a_rule_that_splits_weights_like_the_batch_is_refused_whatever_its_axis_is_called(axis):
    rule = rules.first(rules.match("up", P(None, axis)), rules.match("down", P(axis)))
    make = lambda: {name: jnp.asarray(PARAMS[name]) for name in ("up", "down")}
    local = functools.partial(two_layers, axis=())
    state, specs = step.init(make, optax.sgd(0.1), rule, mesh.make(**{axis: 8}))
    train = step.make(grads.averaged(jax.value_and_grad(local), axis), optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=f"down, here of shape .2, 8., differs along '{axis}', so it counts as a"
    ):
        over(train, (specs, P(axis)), (specs, P()), **{axis: 8})(state, BATCH)


# Steps inside a loss


def test_an_inner_mean_under_jit_knows_whether_it_is_inside():
    """One function, kept by `jax.jit`, of parameters that a grad_fn outside declared varying, and
    of shares."""
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ GATHERS["by lax"](w, "dp")))
    plain = lambda w, x: jnp.mean(jnp.tanh(x @ w))
    inner = jax.jit(grads.averaged(jax.value_and_grad(plain), "dp"))
    meta = grads.averaged(jax.value_and_grad(lambda w, x: plain(w - inner(w, x)[1], x)), "dp")
    w, x = normal(0, WIDTH), normal(1, ROWS, WIDTH)
    want = jax.value_and_grad(lambda w, x: plain(w - jax.grad(plain)(w, x), x))(w, x)
    assert_close(over(meta, (P(), P("dp")), P(), dp=8)(w, x), want, EXACT)
    with pytest.raises(ValueError, match="so it counts as a share"):
        over(lambda w, x: inner(varying(w, "dp"), x), (P(), P("dp")), P(), dp=8)(w, x)
    shares = over(
        grads.averaged(jax.value_and_grad(loss), "dp"), (P("dp"), P("dp")), (P(), P("dp")), dp=8
    )
    assert_close(shares(w, x), jax.value_and_grad(plain)(w, x), EXACT)


# A loss that is reduced already


def squared(w, x):
    return jnp.mean((jnp.sin(x @ w) - 1) ** 2)


PLAIN = jax.value_and_grad(squared)


def mean_over(*names):
    return jax.value_and_grad(lambda w, x: lax.pmean(squared(w, x), names))


REDUCED = {
    "averaged": lambda axis, names: grads.averaged(mean_over(*names), axis),
    "by a ring": lambda axis, names: grads.averaged(
        jax.value_and_grad(lambda w, x: ring.all_mean(squared(w, x), names)), axis
    ),
    "accumulated": lambda axis, names: grads.averaged(
        grads.accumulated(mean_over(*names), microbatches=2), axis
    ),
    "with aux": lambda axis, names: grads.averaged(
        jax.value_and_grad(lambda w, x: (lax.pmean(squared(w, x), names), w), has_aux=True), axis
    ),
    "scattered": lambda axis, names: zero.reduce_scattered(mean_over(*names), axis, P()),
    "summed": lambda axis, names: grads.summed(mean_over(*names), axis, loss=True),
}


@pytest.mark.parametrize("sizes", [{"data": 8}, {"a": 4, "b": 2}], ids=str)
@pytest.mark.parametrize("name", REDUCED)
def test_a_loss_that_is_reduced_already_is_refused(name, sizes):
    reduced = tuple(sizes)[-1:]
    with pytest.raises(ValueError, match=f"loss is the same along '{reduced[0]}'.*grads.summed"):
        over(REDUCED[name](ring(tuple(sizes)), reduced), (P(), P(tuple(sizes))), P(), **sizes)(
            normal(0, 4), normal(1, 64, 4)
        )


def pair_of_means(w, x):
    """Loss and gradients, both reduced by hand after differentiation: the same on all devices, and
    their mean is too."""
    return jax.tree.map(lambda leaf: lax.pmean(leaf, "data"), jax.value_and_grad(squared)(w, x))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "grad",
    [
        grads.summed(mean_over("data"), ring("data")),
        grads.averaged(pair_of_means, ring("data")),
        grads.averaged(grads.averaged(jax.value_and_grad(squared), "data"), ring("data")),
        grads.accumulated(grads.averaged(jax.value_and_grad(squared), "data"), microbatches=2),
    ],
    ids=["summed", "reduced by hand", "averaged twice", "accumulated outside"],
)
def test_what_is_reduced_together_stays_right(grad):
    w, x = normal(0, 4), normal(1, 64, 4)
    assert_close(
        over(grad, (P(), P("data")), P(), data=8)(w, x), jax.value_and_grad(squared)(w, x), EXACT
    )


def head(params, x, part):
    return jnp.mean((x @ params["out"] - part["y"]) ** 2)


def masked(x):
    """The last stage's x on all, in a user's own words."""
    return lax.psum(
        x * (lax.axis_index("stage") == lax.axis_size("stage") - 1).astype(x.dtype), "stage"
    )


def index():
    return lax.axis_index("stage").astype(np.float64)


def if_last(value, otherwise):
    return jnp.where(lax.axis_index("stage") == lax.axis_size("stage") - 1, value, otherwise)


def by_branch(last, otherwise):
    """A number of a conditional on the stage's index."""
    return lax.cond(index() == 1, lambda: last, lambda: otherwise)


def in_a_while(times):
    """As many ones as a loop of unknown length adds up."""
    return lax.fori_loop(0, times, lambda i, x: x + 1.0, varying(jnp.zeros(()), "stage"))


def by_stage(*weights):
    return jnp.asarray(weights)[lax.axis_index("stage")]


def in_a_loop(params, x, part, weights):
    """The loss, as a weighted sum of a half and a half; each trip has its own number of the
    table."""
    table = jnp.asarray([[0.0] * 2, weights])
    zero = varying(jnp.zeros(()), ("data", "stage"))
    add = lambda total, row: (total + row[lax.axis_index("stage")] * head(params, x, part), None)
    return lax.scan(add, zero, table)[0]


HEADS = {  # and whether they are right
    "the last stage's": (head, True),
    "shared": (
        lambda p, x, part: lax.pmean(head(p, pipeline.from_last(x, ring("stage")), part), "stage"),
        True,
    ),
    "shared, by hops": (
        lambda p, x, part: lax.pmean(head(p, ends.copy_from_last(x, "stage"), part), "stage"),
        True,
    ),
    "shared, by hand": (lambda p, x, part: ring.all_mean(head(p, masked(x), part), "stage"), True),
    "gathered": (
        lambda p, x, part: lax.pmean(head(p, lax.all_gather(x, "stage")[-1], part), "stage"),
        True,
    ),
    "a mean of what was gathered": (
        lambda p, x, part: lax.pmean(
            head(p, jnp.mean(jnp.tanh(lax.all_gather(x, "stage")), axis=0), part), "stage"
        ),
        False,
    ),
    "a sum of losses that were gathered": (
        lambda p, x, part: jnp.sum(lax.all_gather(head(p, x, part), "stage")),
        False,
    ),
    "a product with what was gathered": (
        lambda p, x, part: lax.pmean(
            head(p, jnp.einsum("s,sbw->bw", np.ones(2), lax.all_gather(x, "stage")), part), "stage"
        ),
        False,
    ),
    "a sum of what was gathered, with weights": (
        lambda p, x, part: lax.pmean(
            head(p, jnp.sum(lax.all_gather(x, "stage") * np.eye(2)[1][:, None, None], 0), part),
            "stage",
        ),
        True,
    ),
    "the last of what was gathered, later": (
        lambda p, x, part: lax.pmean(
            head(p, jnp.moveaxis(lax.all_gather(x, "stage", axis=1), 1, 0)[-1], part), "stage"
        ),
        True,
    ),
    "lax.pmean": (lambda p, x, part: lax.pmean(head(p, x, part), "stage"), False),
    "lax.psum": (lambda p, x, part: lax.psum(head(p, x, part), "stage"), False),
    "a ring's mean": (lambda p, x, part: ring.all_mean(head(p, x, part), "stage"), False),
    "a mean of x": (lambda p, x, part: head(p, lax.pmean(x, "stage"), part), False),
    "over data": (lambda p, x, part: lax.pmean(head(p, x, part), "data"), False),
    "the last by a choice of losses": (
        lambda p, x, part: lax.psum(if_last(head(p, x, part), 0.0), "stage"),
        True,
    ),
    "the last by leaving others out": (
        lambda p, x, part: lax.psum(
            jnp.where(index() < lax.axis_size("stage") - 1, 0.0, head(p, x, part)), "stage"
        ),
        True,
    ),
    "the last by a table": (
        lambda p, x, part: lax.psum(head(p, x, part) * by_stage(0.0, 1.0), "stage"),
        True,
    ),
    "weights by a table": (
        lambda p, x, part: lax.psum(head(p, x, part) * by_stage(0.5, 1.0), "stage"),
        False,
    ),
    "the last by a conditional factor": (
        lambda p, x, part: lax.psum(head(p, x, part) * by_branch(1.0, 0.0), "stage"),
        True,
    ),
    "the last by a conditional": (
        lambda p, x, part: lax.psum(
            lax.cond(
                index() == 1,
                lambda: head(p, x, part),
                lambda: varying(jnp.zeros(()), ("data", "stage")),
            ),
            "stage",
        ),
        True,
    ),
    "the last by a factor of its rows": (
        lambda p, x, part: lax.psum(
            jnp.mean((x @ p["out"] - part["y"]) ** 2, 1)
            @ jnp.full(x.shape[0], if_last(1 / x.shape[0], 0.0)),
            "stage",
        ),
        True,
    ),
    "the last by a loop": (
        lambda p, x, part: lax.psum(
            head(p, x, part) * in_a_while(lax.axis_index("stage")), "stage"
        ),
        True,
    ),
    "weights by a conditional": (
        lambda p, x, part: lax.psum(head(p, x, part) * by_branch(1.0, 0.5), "stage"),
        False,
    ),
    "another conditional": (
        lambda p, x, part: lax.psum(
            lax.cond(index() == 1, lambda: 2 * head(p, x, part), lambda: head(p, x, part)), "stage"
        ),
        False,
    ),
    "a conditional by x": (
        lambda p, x, part: lax.psum(
            head(p, x, part) * lax.cond(jnp.sum(x) > 0, lambda: 1.0, lambda: 0.0), "stage"
        ),
        False,
    ),
    "weights of losses": (
        lambda p, x, part: lax.psum(head(p, x, part) * (index() + 1.0), "stage"),
        False,
    ),
    "weights of x": (
        lambda p, x, part: lax.pmean(
            head(p, lax.psum(x * (index() + 1.0), "stage"), part), "stage"
        ),
        False,
    ),
    "the first stage's": (
        lambda p, x, part: lax.psum(head(p, x, part) * (1.0 - index()), "stage"),
        False,
    ),
    "another choice": (
        lambda p, x, part: lax.psum(if_last(head(p, x, part), 2 * head(p, x, part)), "stage"),
        False,
    ),
    "the last in a loop": (
        lambda p, x, part: lax.psum(in_a_loop(p, x, part, [0.0, 1.0]), "stage"),
        True,
    ),
    "divided by the index": (
        lambda p, x, part: lax.psum(head(p, x, part) / (index() + 1.0), "stage"),
        False,
    ),
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("table", [schedule.one_f_one_b_lockstep, schedule.one_f_one_b])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_sums_over_stages_after_it_took_the_last_ones(name, table):
    """What other stages have in the place of x is not the model's."""
    given, right = HEADS[name]
    enter = lambda params, batch: batch["x"]
    stage = lambda params, x, part, position: x + jnp.tanh(x @ params["blocks"][0])
    grad_fn = pipeline.value_and_grad(
        enter, stage, given, table(2, 4), "stage", blocks=lambda params: params["blocks"]
    )
    params = {"blocks": normal(0, 1, 2, WIDTH, WIDTH), "out": normal(1, WIDTH, WIDTH)}
    specs = {"blocks": P(None, "stage"), "out": P()}
    batch = {name: BATCH[name] for name in ("x", "y")}
    split = over(grads.averaged(grad_fn, "data"), (specs, P("data")), (P(), specs), data=2, stage=2)
    if not right:
        with pytest.raises(
            ValueError, match=r"sum over 'stage' includes values|loss is the same along 'data'"
        ):
            split(params, batch)
        return

    def one_device(params):
        x = batch["x"]
        for w in params["blocks"][0]:
            x = x + jnp.tanh(x @ w)
        return head(params, x, batch)

    assert_close(split(params, batch), jax.value_and_grad(one_device)(params), EXACT)


def test_a_constant_loss_is_no_reduced_one():
    """Gradients by hand, and no loss."""
    grad = lambda w, x: (jnp.zeros(()), w * jnp.sum(x))
    loss, gradients = over(grads.averaged(grad, "data"), (P(), P("data")), P(), data=8)(
        np.ones(2), np.arange(8.0)
    )
    assert (loss, gradients.tolist()) == (0, [3.5, 3.5])


CLIPS_INSIDE = {
    "averaged": grads.averaged(grads.clipped(PLAIN, MAX_NORM), "data"),
    "summed": grads.summed(grads.clipped(PLAIN, MAX_NORM), "data", loss=True),
    "scattered": zero.reduce_scattered(grads.clipped(PLAIN, MAX_NORM), "data", P()),
    "accumulated": grads.accumulated(
        grads.clipped(grads.averaged(PLAIN, "data"), MAX_NORM), microbatches=2
    ),
    "unscaled": precision.unscaled(
        grads.clipped(grads.averaged(PLAIN, "data"), MAX_NORM), jnp.asarray(SCALE)
    ),
    "accumulated, mixed": grads.accumulated(
        precision.mixed(grads.clipped(grads.averaged(PLAIN, "data"), MAX_NORM), jnp.bfloat16),
        microbatches=2,
    ),
    "unscaled, mixed": precision.unscaled(
        precision.mixed(grads.clipped(grads.averaged(PLAIN, "data"), MAX_NORM), jnp.float16),
        jnp.asarray(SCALE),
    ),
}


@pytest.mark.parametrize("outside", CLIPS_INSIDE)
def test_a_gradient_function_that_clips_inside_is_refused(outside):
    with pytest.raises(ValueError, match=r"grads\.clipped"):
        over(CLIPS_INSIDE[outside], (P(), P("data")), P(), data=8)(normal(0, 4), normal(1, 64, 4))


# Maps whose types say nothing

UNTYPED = {
    "check_vma=False": lambda f, devices: jax.shard_map(
        f, mesh=devices, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    ),
    "partly automatic": lambda f, devices: jax.jit(
        jax.shard_map(
            f,
            mesh=devices,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=False,
            axis_names=frozenset({"data"}),
        )
    ),
    "pmap": lambda f, devices: (
        lambda w, x: jax.pmap(
            f, axis_name="data", in_axes=(None, 0), devices=list(devices.devices[:, 0])
        )(w, x.reshape(4, -1, *x.shape[1:]))
    ),
}
NEED_TYPES = {
    "averaged": grads.averaged(PLAIN, ring("data")),
    "summed": grads.summed(PLAIN, "data"),
    "scattered": zero.reduce_scattered(PLAIN, "data", P()),
    "norm": lambda w, x: (x, grads.norm(x)[None]),
    "clipped": grads.clipped(PLAIN, 1.0),
    "step": lambda w, x: step.make(PLAIN, optax.sgd(0.1))(
        step.State(w, (), jnp.zeros((), jnp.int32)), x
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("how", UNTYPED)
@pytest.mark.parametrize("name", NEED_TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_map_that_does_not_tell_what_differs_is_refused(name, how):
    devices = mesh.make(devices=jax.devices(), data=4, model=2)
    with pytest.raises(
        ValueError,
        match=r"does not track which values differ between devices along 'data'.*check_vma=True",
    ):
        UNTYPED[how](
            lambda *given: jax.tree.map(jnp.atleast_1d, NEED_TYPES[name](*given)), devices
        )(normal(0, 4), normal(1, 64, 4))


def test_a_partly_automatic_map_with_types_is_right():
    devices, w, x = mesh.make(data=4, model=2), normal(0, 4), normal(1, 64, 4)
    grad_fn = grads.clipped(grads.averaged(PLAIN, "data"), 1e9)
    split = jax.shard_map(
        grad_fn,
        mesh=devices,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names=frozenset({"data"}),
    )
    assert_close(jax.jit(split)(w, x), PLAIN(w, x), EXACT)


# Sums of 16 bits


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("algorithm", [xla, ring, halving], ids=str)
@pytest.mark.parametrize("grad_fn", [grads.summed, grads.averaged])
def test_sums_of_16_bits_are_taken_in_32_and_rounded_once(grad_fn, algorithm, dtype):
    terms = (
        np.asarray([2048, *[1] * 6, 3], dtype)
        if dtype == "float16"
        else np.asarray([256, *[1] * 7], dtype)
    )
    grad = lambda w, x: (x[0], w * x[0])
    options = {"loss": True} if grad_fn is grads.summed else {}
    loss, gradients = over(
        grad_fn(grad, algorithm("data"), **options), (P(), P("data")), P(), data=8
    )(np.ones(3, dtype), terms)
    exact = terms.astype(np.float64).sum() / (8 if grad_fn is grads.averaged else 1)
    assert loss.dtype == gradients.dtype == dtype
    np.testing.assert_array_equal(np.asarray(gradients), np.full(3, exact).astype(dtype))
    assert np.asarray(loss) == np.asarray(exact).astype(dtype)


# What was forgotten


def test_leaves_with_other_numbers_of_rows_are_no_batch():
    """Weights of classes beside rows: each microbatch would have some of the classes."""
    message = r"leaf \['c'\] has 8 rows on each device and its leaf \['x'\] has 32"
    batch = {"x": BATCH["x"], "c": np.ones(8)}
    with pytest.raises(ValueError, match=message):
        grads.accumulated(
            jax.value_and_grad(lambda w, b: jnp.mean(b["x"] @ w) * b["c"].sum()), microbatches=4
        )(normal(0, WIDTH), batch)
    ends = lambda params, batch: batch["x"]
    stage = lambda params, x, part, position: jnp.tanh(x @ params["blocks"][0])
    head = lambda params, x, part: jnp.mean(x) * part["c"].sum()
    grad_fn = pipeline.value_and_grad(
        ends,
        stage,
        head,
        schedule.one_f_one_b_lockstep(2, 4),
        "stage",
        blocks=lambda p: p["blocks"],
    )
    specs = {"blocks": P(None, "stage")}
    with pytest.raises(ValueError, match=message):
        over(grad_fn, (specs, P()), (P(), specs), stage=2)(
            {"blocks": normal(0, 1, 2, WIDTH, WIDTH)}, batch
        )


NET_LOSS = functools.partial(two_layers, axis=())


def weighted_by_class(params, batch):
    errors = (batch["x"] @ params - batch["y"]) ** 2
    return jnp.mean(batch["weights"][batch["label"]][:, None] * errors)


def weighted_batch(classes):
    return {
        "x": BATCH["x"],
        "y": BATCH["y"],
        "label": BATCH["ids"] % classes,
        "weights": np.linspace(0.5, 2.0, classes),
    }


REDUCERS = {
    "averaged": lambda grad: grads.averaged(grad, "dp"),
    "summed": lambda grad: grads.summed(grad, ring("dp"), loss=True),
    "scattered": lambda grad: zero.reduce_scattered(grad, "dp", P()),
    "averaged, jitted": lambda grad: grads.averaged(jax.jit(grad), "dp"),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("reduced", REDUCERS)
@pytest.mark.parametrize("sizes", [{"dp": 8}, {"dp": 4, "tensor": 2}])
def test_one_spec_for_rows_and_a_table_is_refused(reduced, sizes):
    """Each device would have some of the classes, and JAX clamps the other labels to them."""
    grad_fn, params = REDUCERS[reduced](jax.value_and_grad(weighted_by_class)), normal(0, WIDTH, 8)
    batch = weighted_batch(8)
    message = r"leaf \['weights'\] has \d rows.*One spec splits both leaves over \['dp'\].*P\(\)"
    for specs in ((P(), P("dp")), (P(), P(("dp",)))):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            over(grad_fn, specs, P(), **sizes)(params, batch)
    right = dict.fromkeys(batch, P("dp")) | {"weights": P()}
    loss, gradients = over(grad_fn, (P(), right), P(), **sizes)(params, batch)
    whole = jax.value_and_grad(weighted_by_class)(params, batch)
    devices = sizes["dp"] if reduced == "summed" else 1
    assert_close((loss, gradients), jax.tree.map(lambda x: x * devices, whole), EXACT)


@pytest.mark.sweep(3, "wholes")
def test_unequal_rows_that_are_meant_are_let_through():
    """A graph on each device has nodes and edges, by specs of their own; a device may have a key;
    and the parameters of one spec may have any sizes."""

    def loss(params, batch):
        noise = jax.random.normal(batch["key"][0], ())
        ends = batch["nodes"][batch["edges"]] @ params["w"]
        return jnp.mean((ends[:, 0] - ends[:, 1]) ** 2) * (1 + noise) + jnp.mean(params["b"] ** 2)

    edges = np.random.default_rng(0).integers(0, 4, (16, 2))  # numbered on each device
    batch = {
        "nodes": normal(0, 32, WIDTH),
        "edges": edges,
        "key": jax.random.split(jax.random.key(0), 8),
    }
    params = {"w": normal(1, WIDTH, WIDTH), "b": normal(2, 3)}
    parts = [jax.tree.map(lambda x, i=i: jnp.split(x, 8)[i], batch) for i in range(8)]
    alone = [jax.value_and_grad(loss)(params, part) for part in parts]
    mean = jax.tree.map(lambda *terms: sum(terms) / 8, *alone)
    grad_fn = grads.averaged(jax.value_and_grad(loss), "data")
    specs = dict.fromkeys(batch, P("data"))
    assert_close(over(grad_fn, (P(), specs), P(), data=8)(params, batch), mean, EXACT)

    rows_and_keys = {"x": BATCH["x"], "key": batch["key"]}
    drawn_loss = lambda w, b: jnp.mean(b["x"] @ w) * jax.random.normal(b["key"][0], ())
    over(grads.averaged(jax.value_and_grad(drawn_loss), "data"), (P(), P("data")), P(), data=8)(
        params["w"], rows_and_keys
    )

    shares = {"up": PARAMS["up"], "down": PARAMS["down"], "bias": PARAMS["bias"]}
    gathered_loss = zero.gathered(
        lambda params, batch: two_layers(params, batch, ()) + jnp.mean(params["bias"]),
        "data",
        dict.fromkeys(shares, P("data")),
    )
    over(
        grads.averaged(jax.value_and_grad(gathered_loss), "data"),
        (P("data"), P("data")),
        (P(), P("data")),
        data=8,
    )(shares, BATCH)


@pytest.mark.parametrize("wrong", ["more", "fewer", "keyword"])
def test_a_loss_of_other_arguments_is_told_in_pythons_words(wrong):
    """And not that its parameters are shares, which has nothing to do with it."""
    loss = {
        "more": lambda params, batch, rate: jnp.mean(batch @ params) * rate,
        "fewer": lambda params: jnp.mean(params @ params.T),
        "keyword": lambda params, batch: jnp.mean(jnp.sum(batch @ params.T, axes=0)),
    }[wrong]
    grad = grads.averaged(jax.value_and_grad(loss), "dp")
    with pytest.raises(TypeError, match="argument") as refusal:
        over(grad, (P("dp"), P("dp")), (P(), P("dp")), dp=8)(PARAMS["table"], BATCH["x"])
    assert "share" not in str(refusal.value)


NO_GRADIENT_FUNCTIONS = {"the loss": NET_LOSS, "jax.grad": jax.grad(NET_LOSS)}
WRAPPERS = {
    "accumulated": lambda grad: grads.accumulated(grad, microbatches=2),
    "averaged": lambda grad: grads.averaged(grad, "data"),
    "clipped": lambda grad: grads.clipped(grad, MAX_NORM),
    "scattered": lambda grad: zero.reduce_scattered(grad, "data", P()),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("name", "message"), [("the loss", "one array"), ("jax.grad", "dict")])
def test_what_is_no_gradient_function_is_told(name, message, wrapper):
    grad_fn = WRAPPERS[wrapper](NO_GRADIENT_FUNCTIONS[name])
    params = {key: PARAMS[key] for key in ("up", "down")}
    with pytest.raises(ValueError, match=f"returned no pair, but .*{message}.*instead of the loss"):
        over(grad_fn, (P(), P("data")), P(), data=8)(params, BATCH)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_nothing_can_have_is_refused(max_norm):
    clipped, make = grads.clipped, step.make
    for name, wrapped in (
        ("grads.clipped", lambda: clipped(PLAIN, max_norm)),
        ("step.make", lambda: make(PLAIN, optax.sgd(0.1), max_norm=max_norm)),
    ):
        with pytest.raises(ValueError, match=f"{name}: max_norm must be above 0"):
            wrapped()
    # A user's arguments are not checked by their types, so the norm may also be an array.
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        inspect.unwrap(clipped)(PLAIN, jnp.asarray(max_norm))
    clipped(PLAIN, float("inf"))


@pytest.mark.parametrize("microbatches", [0, -1, 2.0, "2", None])
def test_a_number_of_microbatches_is_a_whole_number(microbatches):
    with pytest.raises(ValueError, match=f"a whole number of 1 or more; got {microbatches!r}"):
        inspect.unwrap(grads.accumulated)(PLAIN, microbatches=microbatches)


NET = NET_LOSS
PLAIN_NET = jax.value_and_grad(NET)
FORGOTTEN = {
    "averaged": (
        lambda s: PLAIN_NET,
        optax.adam(1e-3),
        "the loss differs along .'data'.*grads.averaged",
    ),
    "averaged, of shares": (
        *(lambda s: jax.value_and_grad(zero.gathered(NET, "data", s)), optax.adam(1e-3)),
        "the loss differs along .'data'.*grads.averaged",
    ),
    "averaged, of shares, with an optimizer without state": (
        *(lambda s: jax.value_and_grad(zero.gathered(NET, "data", s)), optax.sgd(1e-3)),
        "the loss differs along .'data'.*grads.averaged",
    ),
    "sharded": (
        *(lambda s: zero.reduce_scattered(PLAIN_NET, "data", s), optax.adam(1e-3)),
        "gradient of down has shape .2, 8., a share of the whole shape .16, 8..*zero.sharded.*rule",
    ),
    "sharded, by momentum": (
        *(lambda s: zero.reduce_scattered(PLAIN_NET, "data", s), optax.sgd(1e-3)),
        "gradient of down has shape .2, 8., a share of the whole shape .16, 8..*zero.sharded.*rule",
    ),
    "optimizer_rule": (
        *(
            lambda s: zero.reduce_scattered(PLAIN_NET, "data", s),
            lambda s: zero.sharded(optax.adamw(1e-3), "data", s),
        ),
        "optimizer's state has an array of shape .16, 8. for down, but each device updates only a "
        "shard of this leaf, of shape .2, 8.*pass to step.init an optimizer_rule",
    ),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_step_says_what_was_forgotten(what):
    grad, optimizer, message = FORGOTTEN[what]
    world, make = (
        mesh.make(data=8),
        lambda: {name: jnp.asarray(PARAMS[name]) for name in ("up", "down")},
    )
    shares = rules.specs(make(), rules.fsdp("data", size=8, min_size=0))
    optimizer = optimizer(shares) if callable(optimizer) else optimizer
    rule = (
        rules.fsdp("data", size=8, min_size=0)
        if what.startswith("averaged, of shares")
        else rules.match("**", P())
    )
    whole = optax.adamw(1e-3) if what == "optimizer_rule" else optimizer
    state, specs = step.init(make, whole, rule, world)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        over(step.make(grad(shares), optimizer), (specs, P("data")), (specs, P()), data=8)(
            state, BATCH
        )


@pytest.mark.parametrize(
    "axis", [ErrorFeedback("data"), ring, None], ids=["error feedback", "no name", "nothing"]
)
def test_what_is_no_axis_is_refused(axis):
    with pytest.raises(ValueError, match=f"An axis must be a name.*got {re.escape(repr(axis))}"):
        inspect.unwrap(Axis.of)(axis)  # without the tests' own check of types
