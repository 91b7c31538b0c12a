"""A small decoder with a mixture of experts in each layer, as a user writes it, and the same on one
device by other means.

Legend: B sequences, T tokens in one, D width, F hidden width, E experts, k choices of a token, L
layers.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import FLOAT64
from user_models import normal

from parallax import experts, pipeline, rules

VOCABULARY, TOKENS, D, F = 13, 6, 8, 6
BALANCE, Z = 0.3, 0.05  # far above what one takes, so that their gradients show


def gathered_ragged(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What `lax.ragged_all_to_all` does, by a gather of everything and one sender after another:
    for CPUs."""
    operands, begins, sizes, places = (
        lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    me, row = lax.axis_index(axis_name), jnp.arange(len(output), dtype=jnp.int32)
    for sender in range(sizes.shape[0]):
        within = row - places[sender, me]
        arrives = (within >= 0) & (within < sizes[sender, me])
        sent = (
            operands[sender]
            .at[jnp.where(arrives, begins[sender, me] + within, len(operand))]
            .get(mode="fill", fill_value=0)
        )
        output = jnp.where(arrives.reshape(-1, *[1] * (output.ndim - 1)), sent, output)
    return output


# One layer


def layer_of(count, seed=0):
    """A router and experts, [E, ...]."""
    gated = experts.Gated(count, D, F, dtype=FLOAT64, key=jax.random.key(seed))
    return experts.Mixture(normal(seed + 1, D, count), gated, jnp.zeros(count))


def layer_specs(axis, tensor=None):
    """The experts over `axis`, their hidden width over `tensor`."""
    whole = jax.tree.map(lambda _: P(), layer_of(1))
    split = P(axis, None, tensor), P(axis, None, tensor), P(axis, tensor)
    of = lambda w: (w.experts.gate, w.experts.up, w.experts.down)
    return eqx.tree_at(of, whole, split)


class Plain(NamedTuple):
    """How the plain mixture chooses."""

    k: int
    score: Any = jax.nn.softmax
    normalised: bool = False

    @property
    def route(self):
        return experts.top_k(self.k, score=self.score, normalised=self.normalised)


def dense(x, w, plain, kept=None):
    """All experts on all tokens [B, T, D], times a mask; with auxiliary values. `kept`: which
    choices count, [B, T, k]."""
    logits = x @ w.router
    scores = plain.score(logits)
    chosen = jnp.argsort(
        -lax.stop_gradient(scores) - jnp.expand_dims(w.bias, (0, 1)), axis=-1, stable=True
    )[..., : plain.k]
    hot = jax.nn.one_hot(chosen, logits.shape[-1], dtype=x.dtype)
    weights = jnp.sum(hot, axis=2) * scores
    weights = weights / jnp.sum(weights, -1, keepdims=True) if plain.normalised else weights
    counts = jnp.sum(hot if kept is None else hot * kept[..., None].astype(x.dtype), axis=2)
    gate, up = (jnp.einsum("btd,edf->btef", x, matrix) for matrix in (w.experts.gate, w.experts.up))
    y = jnp.einsum(
        "btef,efd,bte->btd", gate * jax.nn.sigmoid(gate) * up, w.experts.down, weights * counts
    )
    shares = scores / jnp.sum(scores, -1, keepdims=True)
    load = jnp.mean(jnp.sum(hot, axis=2), axis=1) / plain.k
    return y, experts.Statistics(
        balance=jnp.mean(jnp.sum(load * jnp.mean(shares, axis=1), axis=-1)) * logits.shape[-1],
        z=jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), -1)) ** 2),
        entropy=jnp.mean(jnp.sum(-shares * jnp.log(shares), -1)),
        load=jnp.mean(load, axis=0),
        dropped=jnp.zeros((), x.dtype) if kept is None else jnp.sum(~kept).astype(x.dtype) / len(x),
    )


def dropping(ids, devices, held, room, *, shared):
    """Which choices [B, T, k] find room, one after another: sequences are split over the devices.

    Each device fills `room` rows to each other one, or, `shared`, all of them together fill `room`
    rows of each, in order.
    """
    kept, filled = np.ones(ids.shape, bool), np.zeros((devices, devices), int)
    each = len(ids) // devices
    for sender in range(devices):
        for choice in range(ids.shape[2]):
            for b in range(sender * each, (sender + 1) * each):
                for t in range(ids.shape[1]):
                    to = ids[b, t, choice] // held
                    kept[b, t, choice] = (
                        filled[:, to].sum() if shared else filled[sender, to]
                    ) < room
                    filled[sender, to] += kept[b, t, choice]
    return kept


# The decoder


def decoder(count, layers):
    """Its blocks are [chunks, layers, ...], as a pipeline takes them."""
    stacked = jax.tree.map(
        lambda *each: jnp.stack(each)[None], *(layer_of(count, 10 * i) for i in range(layers))
    )
    return {
        "table": normal(7, VOCABULARY, D),
        "blocks": {"mixture": stacked, "attention": normal(8, 1, layers, 4, D, D)},
    }


def trained(model):
    """All but the bias."""
    return eqx.tree_at(
        lambda m: m["blocks"]["mixture"].bias, jax.tree.map(lambda _: True, model), False
    )


def standardised(x):
    return (x - jnp.mean(x, -1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-3)


def attended(x, w):
    """One head, causal."""
    q, k, v = (standardised(x) @ w[i] for i in range(3))
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / D**0.5
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))[None]
    return x + jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v @ w[3]


def enter(model, part):
    return model["table"][part[:, :-1]]


def head(model, x, part):
    logits = standardised(x) @ model["table"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), part[:, 1:, None], axis=-1))


def stage(model, x, part, position, *, mixed):
    """`mixed`: `(x, Mixture) -> (y, statistics)`."""

    def layer(x, w):
        x = attended(x, w["attention"])
        y, told = mixed(standardised(x), w["mixture"])
        return x + y, told

    x, told = lax.scan(layer, x, model["blocks"])
    return pipeline.Output(x, loss=jnp.sum(BALANCE * told.balance + Z * told.z), aux=told)


def loss_of(mixed):
    """The loss function, with `pipeline.Aux` of all layers as one chunk beside it."""
    own = functools.partial(stage, mixed=mixed)
    return pipeline.unpipelined(enter, own, head, blocks=lambda model: model["blocks"])


def grad_of(loss):
    """Of all but the bias."""

    def grad(model, part):
        moved, rest = eqx.partition(model, trained(model))
        return jax.value_and_grad(
            lambda moved, part: loss(eqx.combine(moved, rest), part), has_aux=True
        )(moved, part)

    return grad


ONE_STAGE = np.zeros((1, 1), int)


def after(model, aux, *, axis=(), placement=ONE_STAGE):
    """The bias moves once a step."""
    bias = lambda m: m["blocks"]["mixture"].bias
    load = pipeline.local_chunks(aux.stages.load, axis, placement)
    return eqx.tree_at(bias, model, experts.rebalanced(bias(model), load, 0.01))


def windows(number, sequences):
    return (
        np.random.default_rng(number)
        .integers(0, VOCABULARY, (sequences, TOKENS + 1))
        .astype(np.int32)
    )


def rule_of(axis, stage=None, tensor=None):
    """The experts over `axis`, their hidden width over `tensor`, layers over `stage`."""
    wide = P(None, stage, axis, None, tensor)
    specs = {"gate": wide, "up": wide, "down": P(None, stage, axis, tensor)}
    of_experts = (rules.experts(f"**.experts.{name}", spec) for name, spec in specs.items())
    return rules.first(
        *of_experts, rules.match("blocks.**", P(None, stage)), rules.match("table", P())
    )
