"""Ordinary Equinox models as users write them, each with its loss, how it is split, and what of it
is trained."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from reference import EXACT, FLOAT64, assert_close

from parallax import grads, mesh, rules, step, tensor, zero

WIDTH, HIDDEN, WORDS, ROWS = 8, 16, 16, 32
OPTIMIZER = optax.adamw(1e-2, eps=1e-6)  # reference.OPTIMIZER says why not 1e-8


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 3


def linear(seed, inputs, outputs):
    return eqx.nn.Linear(inputs, outputs, dtype=FLOAT64, key=jax.random.key(seed))


def pair(x, up, down, axis):
    """Two layers, split by columns and by rows."""
    return tensor.row(jnp.tanh(tensor.column(x, up, None, axis)), down, None, axis)


def squared(y, batch):
    return jnp.mean((y - batch["y"]) ** 2)


class Kind(NamedTuple):
    """A user's model, its loss function, and how it is split over `tensor`.

    Attributes:
        make: the model.
        loss: `(model, batch, axis) -> loss`, or `(loss, aux)`; `axis` is `()` where nothing is
            split.
        split: the spec of each glob of paths over `tensor`; all else is whole.
        trainable: as `step.init` takes it.
        grad: from the loss function to the gradient function.
        after: as `step.make` takes it.
        keep: globs of what ZeRO does not split.
    """

    make: Callable[[], Any]
    loss: Callable[..., Any]
    split: dict[str, P]
    trainable: Any = rules.is_inexact
    grad: Callable[..., Any] = eqx.filter_value_and_grad
    after: Callable[..., Any] = step.unchanged
    keep: tuple[str, ...] = ()


# a. eqx.nn.MLP, whose activation is a leaf


def mlp():
    return eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, dtype=FLOAT64, key=jax.random.key(0))


def mlp_loss(model, batch, axis):
    if not axis:
        return squared(jax.vmap(model)(batch["x"]), batch)
    up, down = model.layers
    hidden = model.activation(tensor.column(batch["x"], up.weight.T, up.bias, axis))
    return squared(tensor.row(hidden, down.weight.T, down.bias, axis), batch)


# b. one weight in two layers, by eqx.nn.Shared


class Tied(eqx.Module):
    layers: eqx.nn.Shared
    squash: Callable = eqx.field(static=True)

    def __init__(self):
        layers = linear(0, WIDTH, HIDDEN), linear(1, HIDDEN, WIDTH)
        self.layers = eqx.nn.Shared(
            layers, lambda pair: pair[1].weight, lambda pair: pair[0].weight.T
        )
        self.squash = functools.partial(
            jnp.tanh
        )  # equal to none but itself: two models have two structures


def shared_loss(model, batch, axis):
    up, down = model.layers()
    hidden = model.squash(tensor.column(batch["x"], up.weight.T, up.bias, axis))
    return squared(tensor.row(hidden, down.weight.T, down.bias, axis), batch)


# c. LoRA: frozen weights and trained low-rank factors


def lora():
    base = {"up": normal(0, WIDTH, HIDDEN), "down": normal(1, HIDDEN, WIDTH)}
    factors = {
        "up": (normal(2, WIDTH, 2), normal(3, 2, HIDDEN)),
        "down": (normal(4, HIDDEN, 2), normal(5, 2, WIDTH)),
    }
    return {"base": base, "factors": factors}


def lora_loss(model, batch, axis):
    base, factors, x = model["base"], model["factors"], batch["x"]
    low = tensor.column(x @ factors["up"][0], factors["up"][1], None, axis)
    hidden = jnp.tanh(tensor.column(x, base["up"], None, axis) + low)
    y = (
        tensor.row(hidden, base["down"], None, axis)
        + tensor.row(hidden, factors["down"][0], None, axis) @ factors["down"][1]
    )
    return squared(y, batch)


def of(trainable):
    """The gradient function of a loss for these leaves alone: `eqx.partition` inside it."""

    def grad_fn(loss):
        def grad(model, batch):
            trained, frozen = eqx.partition(model, trainable)
            of_trained = lambda trained, batch: loss(eqx.combine(trained, frozen), batch)
            return eqx.filter_value_and_grad(of_trained)(trained, batch)

        return grad

    return grad_fn


FACTORS = {"base": False, "factors": True}


# d. batch statistics: state that `after` moves, and no gradient


class Normed(eqx.Module):
    first: eqx.nn.Linear
    mean: Array
    variance: Array
    up: Array
    down: Array
    momentum: float


def normed():
    ends = normal(1, WIDTH, HIDDEN), normal(2, HIDDEN, WIDTH)
    return Normed(linear(0, WIDTH, WIDTH), jnp.zeros(WIDTH), jnp.ones(WIDTH), *ends, 0.9)


def normed_loss(model, batch, axis):
    h = jax.vmap(model.first)(batch["x"])
    aux = {"mean": jnp.mean(h, 0), "square": jnp.mean(h**2, 0)}
    h = (h - model.mean[None]) / jnp.sqrt(model.variance + 1e-3)[None]
    return squared(pair(h, model.up, model.down, axis), batch), aux


def moving(model, aux):
    """Running statistics, from means that may be taken in parts."""
    mix = lambda old, new: model.momentum * old + (1 - model.momentum) * new
    new = mix(model.mean, aux["mean"]), mix(model.variance, aux["square"] - aux["mean"] ** 2)
    return eqx.tree_at(lambda m: (m.mean, m.variance), model, new)


def statistics_frozen():
    running = lambda m: (m.mean, m.variance)
    return eqx.tree_at(
        running, jax.tree.map(lambda _: True, eqx.filter_eval_shape(normed)), (False, False)
    )


def of_normed(loss):
    def grad(model, batch):
        trained, frozen = eqx.partition(eqx.filter(model, statistics_frozen()), rules.is_inexact)
        rest = eqx.combine(frozen, eqx.filter(model, statistics_frozen(), inverse=True))
        of_trained = lambda trained, batch: loss(eqx.combine(trained, rest), batch)
        return eqx.filter_value_and_grad(of_trained, has_aux=True)(trained, batch)

    return grad


# e. a mixture: a gate and four experts, all of them on every token


def mixture():
    return {
        "gate": normal(0, WIDTH, 4),
        "up": normal(1, 4, WIDTH, HIDDEN),
        "down": normal(2, 4, HIDDEN, WIDTH),
    }


def mixture_loss(model, batch, axis):
    gate = tensor.copy_to(jax.nn.softmax(batch["x"] @ model["gate"]), axis)
    hidden = jnp.tanh(jnp.einsum("bi,eij->bej", tensor.copy_to(batch["x"], axis), model["up"]))
    return squared(
        tensor.reduce_from(jnp.einsum("be,bej,ejk->bk", gate, hidden, model["down"]), axis), batch
    )


# f. a decoder whose embedding is also its last layer


def decoder():
    """Its blocks are [chunks, layers, ...], as a pipeline takes them, with an integer and a
    function among their leaves."""
    blocks = {"up": normal(0, 1, 4, WIDTH, HIDDEN), "down": normal(1, 1, 4, HIDDEN, WIDTH)}
    blocks |= {"number": jnp.arange(4, dtype=jnp.int32)[None], "squash": jnp.sin}
    return {
        "table": normal(2, WORDS, WIDTH),
        "norm": eqx.nn.LayerNorm(WIDTH, dtype=FLOAT64),
        "blocks": blocks,
    }


def enter(model, batch, axis=()):
    return tensor.embed(model["table"], batch["ids"][:, :-1], axis)


def stage(model, x, batch, position, axis=()):
    arrays, static = eqx.partition(model["blocks"], eqx.is_array)

    def layer(x, w):
        w = eqx.combine(w, static)
        return x + pair(
            w["squash"](x * w["number"].astype(x.dtype)), w["up"], w["down"], axis
        ), None

    return lax.scan(layer, x, arrays)[0]


def head(model, x, batch, axis=()):
    logits = tensor.copy_to(jax.vmap(jax.vmap(model["norm"]))(x), axis) @ model["table"].T
    return jnp.mean(tensor.cross_entropy(logits, batch["ids"][:, 1:], axis))


def decoder_loss(model, batch, axis):
    blocks = jax.tree.map(lambda w: w[0] if eqx.is_array(w) else w, model["blocks"])
    return head(
        model,
        stage(model | {"blocks": blocks}, enter(model, batch, axis), batch, 0, axis),
        batch,
        axis,
    )


ADAPTED = {
    "table": False,
    "norm": True,
    "blocks": {"up": False, "down": True, "number": False, "squash": False},
}


# g. complex weights


def complex_model():
    return {
        "up": lax.complex(normal(0, WIDTH, HIDDEN), normal(1, WIDTH, HIDDEN)),
        "down": normal(2, HIDDEN, WIDTH),
    }


def complex_loss(model, batch, axis):
    wave = tensor.copy_to(batch["x"], axis).astype(model["up"].dtype) @ model["up"]
    power = jnp.real(wave * jnp.conj(wave)) + jnp.imag(wave)
    return squared(tensor.reduce_from(power @ model["down"], axis), batch)


def conjugated(loss):
    """JAX's gradient of a real loss is the conjugate of the direction of steepest ascent."""

    def grad(model, batch):
        value, gradients = jax.value_and_grad(loss)(model, batch)
        return value, jax.tree.map(jnp.conj, gradients)

    return grad


# h. a dict of dicts


def dicts():
    of = lambda seed: {
        "up": {"w": normal(seed, WIDTH, HIDDEN)},
        "down": {"w": normal(seed + 1, HIDDEN, WIDTH)},
    }
    return {"a": of(0), "b": of(2), "bias": {"b": normal(4, WIDTH)}}


def dicts_loss(model, batch, axis):
    x = batch["x"]
    for name in ("a", "b"):
        x = x + pair(x, model[name]["up"]["w"], model[name]["down"]["w"], axis)
    return squared(x + model["bias"]["b"][None], batch)


# i. leaves of every other kind


class Mixed(eqx.Module):
    up: Array
    down: Array
    numpy: np.ndarray | Array
    words: Array
    mask: Array
    key: Array
    codes: np.ndarray | Array
    scale: float
    count: int
    square: bool
    name: str
    squash: Callable
    nothing: None = None


def mixed():
    words, mask = jnp.arange(WORDS, dtype=jnp.int32)[::-1], jnp.arange(WIDTH) % 3 > 0
    weights = (
        normal(0, WIDTH, HIDDEN),
        normal(1, HIDDEN, WIDTH),
        np.linspace(-1, 1, WORDS * WIDTH).reshape(WORDS, WIDTH),
    )
    return Mixed(
        *weights,
        words,
        mask,
        jax.random.key(3),
        np.arange(WORDS) % 2,
        2.0,
        3,
        True,
        "mixed",
        jnp.tanh,
    )


def mixed_loss(model, batch, axis):
    words = model.words[batch["ids"][:, 0]]
    x = batch["x"] + model.numpy[words] * model.codes[words][:, None].astype(FLOAT64)
    x = jnp.where(model.mask[None], x, jax.random.normal(model.key, (WIDTH,))[None])
    y = model.scale * pair(model.squash(x), model.up, model.down, axis) / model.count
    assert isinstance(model.scale, float)
    return squared(y, batch) if model.square else None


# j. a frozen encoder before a trained head


def encoded():
    return {
        "encoder": mlp(),
        "head": {"up": normal(1, WIDTH, HIDDEN), "down": normal(2, HIDDEN, WIDTH)},
    }


def encoded_loss(model, batch, axis):
    x = lax.stop_gradient(jax.vmap(model["encoder"])(batch["x"]))
    return squared(pair(x, model["head"]["up"], model["head"]["down"], axis), batch)


HEAD = {"encoder": False, "head": True}
UP, DOWN = P(None, "tensor"), P("tensor")
LINEARS = {"**.0.weight": P("tensor"), "**.0.bias": P("tensor"), "**.1.weight": P(None, "tensor")}
KINDS = {
    "mlp": Kind(mlp, mlp_loss, LINEARS),
    "shared": Kind(
        Tied, shared_loss, {name: LINEARS[name] for name in ("**.0.weight", "**.0.bias")}
    ),
    "lora": Kind(
        lora,
        lora_loss,
        {"base.up": UP, "base.down": DOWN, "factors.up.1": UP, "factors.down.0": DOWN},
        FACTORS,
        of(FACTORS),
    ),
    "statistics": Kind(
        *(
            normed,
            normed_loss,
            {"up": UP, "down": DOWN},
            statistics_frozen(),
            of_normed,
            moving,
            ("mean", "variance"),
        )
    ),
    "mixture": Kind(
        mixture, mixture_loss, {"up": P(None, None, "tensor"), "down": P(None, "tensor")}
    ),
    "tied decoder": Kind(
        decoder,
        decoder_loss,
        {
            "table": P("tensor"),
            "blocks.up": P(None, None, None, "tensor"),
            "blocks.down": P(None, None, "tensor"),
        },
    ),
    "adapted decoder": Kind(decoder, decoder_loss, {}, ADAPTED, of(ADAPTED)),
    "complex": Kind(complex_model, complex_loss, {"up": UP, "down": DOWN}, grad=conjugated),
    "dicts": Kind(dicts, dicts_loss, {"*.up.w": UP, "*.down.w": DOWN}),
    "mixed leaves": Kind(mixed, mixed_loss, {"up": UP, "down": DOWN}),
    "frozen encoder": Kind(
        encoded, encoded_loss, {"head.up": UP, "head.down": DOWN}, HEAD, of(HEAD)
    ),
}


def batch_of(number):
    draw = np.random.default_rng(number)
    ids = draw.integers(0, WORDS, (ROWS, 5)).astype(np.int32)
    return {"x": draw.normal(size=(ROWS, WIDTH)), "y": draw.normal(size=(ROWS, WIDTH)), "ids": ids}


def on(world, f, in_specs, out_specs, **options):
    """`f` on every device, compiled."""
    return eqx.filter_jit(
        mesh.spmd(f, mesh=world, in_specs=in_specs, out_specs=out_specs), **options
    )


def same(tree, plain, tolerance=EXACT):
    """Arrays are close, all else is equal and of the same type."""
    for (path, leaf), (other_path, other) in zip(
        rules.paths(tree), rules.paths(plain), strict=True
    ):
        assert path == other_path
        if eqx.is_array(other):
            assert_close(data_of(leaf), data_of(other), tolerance)
        else:
            assert type(leaf) is type(other)
            assert leaf == other or not isinstance(other, bool | int | float | complex | str)


def data_of(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


# A model of which few leaves are trained

BASE, LOW = (64, 64), 2  # a frozen matrix, and the rank of what is trained beside it
FEW = {"base": False, "low": True, "table": False, "squash": False, "bias": True}


def adapted():
    low, table = (normal(1, 64, LOW), normal(2, LOW, 64)), jnp.arange(64, dtype=jnp.int32)[::-1]
    return {
        "base": normal(0, *BASE),
        "low": low,
        "table": table,
        "squash": jnp.tanh,
        "bias": normal(3, 64),
    }


def adapted_loss(model, batch):
    x = (
        model["squash"](batch["wide"] @ model["base"])[:, model["table"]]
        + batch["wide"] @ model["low"][0] @ model["low"][1]
    )
    return jnp.mean((x + model["bias"][None]) ** 2)


def wide_batch(rows=32):
    return {"wide": np.random.default_rng(0).normal(size=(rows, 64))}


KEPT = rules.first(
    rules.match("base", P()), rules.match("table", P()), rules.fsdp("data", size=8, min_size=1)
)
SPLIT = rules.fsdp("data", size=8, min_size=1)
PLAIN = of(FEW)(adapted_loss)
ONE = jnp.ones(())


def step_of(optimizer=OPTIMIZER, *, sharded=False, trainable=FEW, grad=None, **options):
    """The state, and the compiled step on eight replicas with the arrays that it takes."""
    world = mesh.make(data=8)
    with jax.numpy_dtype_promotion("standard"):
        rule = rules.match("**", P())
        state, specs = step.init(
            adapted,
            optimizer,
            rule,
            world,
            optimizer_rule=SPLIT if sharded else None,
            trainable=trainable,
        )
        if sharded:
            shares = rules.specs(eqx.filter_eval_shape(adapted), SPLIT, world)
            grad, optimizer = (
                zero.reduce_scattered(PLAIN, "data", shares),
                zero.sharded(optimizer, "data", shares),
            )
        train = step.make(grad or grads.averaged(PLAIN, "data"), optimizer, **options)
        train = mesh.spmd(train, mesh=world, in_specs=(specs, P("data")), out_specs=(specs, P()))
        arrays, static = eqx.partition(state, eqx.is_array)
        of_arrays = lambda arrays, batch: eqx.filter(
            train(eqx.combine(arrays, static), batch), eqx.is_array
        )
        return state, jax.jit(of_arrays).lower(arrays, wide_batch()).compile(), arrays
