"""Which experts a token goes to, and how even that is.

Legend: B sequences, T tokens in one, E experts, k choices of a token.

All that is measured is a mean over sequences of something that one sequence defines. So it is the
same however the batch is cut into microbatches and over devices, and means of means are right.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import entr
from jaxtyping import Array, Float, Int

from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import varying
from parallax.tensor import add_bias


class Routing(NamedTuple):
    """Which experts the tokens go to.

    Attributes:
        experts: of each token, the best first.
        weights: by which their results are multiplied.
        logits: what was chosen by.
        shares: how much of each expert the router wants: above 0, their sum is 1.
    """

    experts: Int[Array, "*tokens k"]
    weights: Float[Array, "*tokens k"]
    logits: Float[Array, "*tokens experts"]
    shares: Float[Array, "*tokens experts"]


Router: TypeAlias = Callable[
    [Float[Array, "*tokens experts"], Float[Array, " experts"] | None], Routing
]


def top_k(
    k: int, *, score: Callable[[Array], Array] = jax.nn.softmax, normalised: bool = False
) -> Router:
    """Each token goes to the k experts of the highest score; of equal ones, to the first.

    The scores are the weights.

    Where there is a bias it counts in the choice alone, and not in the weights: by it `rebalanced`
    evens out the load without an auxiliary loss (Wang et al., arXiv 2408.15664). It has no
    gradient.

    Args:
        k: 2 for Mixtral (arXiv 2401.04088), 1 for Switch (arXiv 2101.03961).
        score: from logits to scores of 0 or more: `jax.nn.softmax`, or `jax.nn.sigmoid`.
        normalised: divide a token's weights by their sum.

    Raises:
        ValueError: k is below 1, or above the number of experts.
    """

    def route(logits, bias):
        count = logits.shape[-1]
        if not 1 <= k <= count:
            raise ValueError(
                f"experts.top_k: a token needs at least 1 expert and at most all {count} that the "
                f"router knows; got k={k}. Take another k, or a router with more columns."
            )
        scores = score(logits)
        preferred = scores if bias is None else add_bias(scores, bias.astype(scores.dtype))
        _, chosen = lax.top_k(lax.stop_gradient(preferred), k)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if normalised:
            weights = _divided(weights)
        return Routing(chosen, weights, logits, _divided(scores))

    return route


def _divided(scores: Array) -> Array:
    """Scores by their sum, which may be too small for a number."""
    return scores / jnp.maximum(
        jnp.sum(scores, axis=-1, keepdims=True), jnp.finfo(scores.dtype).tiny
    )


class Statistics(NamedTuple):
    """How even the choices of one layer are.

    Each is a mean over sequences, so `grads` and `pipeline` join it by a mean.

    Attributes:
        balance: E times the sum over experts of load times mean share, within a sequence: 1 where
            all are the same. As an auxiliary loss (Fedus et al., arXiv 2101.03961, formula 4; a
            sequence at a time, as DeepSeek-AI, arXiv 2412.19437, formula 17) it moves the router
            towards an even load.
        z: the mean over tokens of logsumexp(logits)^2: an auxiliary loss that keeps logits small
            (Zoph et al., arXiv 2202.08906).
        entropy: of a token's shares, in nats; log(E) where the router has no preference. Not
            differentiated.
        load: the share of all choices that fall on each expert; times k and the tokens, its number
            of tokens.
        dropped: choices of a sequence that found no room; times the sequences, of all.
    """

    balance: Float[Array, ""]
    z: Float[Array, ""]
    entropy: Float[Array, ""]
    load: Float[Array, " experts"]
    dropped: Float[Array, ""]


def statistics(
    choice: Routing, dropped: Int[Array, ""], axis: AxisLike = (), *, counted: int = 1
) -> Statistics:
    """The statistics of choices `[B, T, ...]`, of which `dropped` in all found no room.

    Args:
        choice: of the tokens here.
        dropped: how many of those choices.
        axis: the axis that splits the tokens of a sequence, if one does.
        counted: how many devices of that axis have counted the same `dropped`.
    """
    axis, (sequences, _, count) = Axis.of(axis), choice.logits.shape
    chosen = jnp.mean(jax.nn.one_hot(choice.experts, count, dtype=choice.logits.dtype), axis=(1, 2))
    z = jnp.mean(jax.nn.logsumexp(choice.logits, axis=-1) ** 2)
    entropy = jnp.mean(jnp.sum(entr(lax.stop_gradient(choice.shares)), axis=-1))
    load, shares, z, entropy = axis.all_mean((chosen, jnp.mean(choice.shares, axis=1), z, entropy))
    return Statistics(
        balance=count * jnp.mean(jnp.sum(load * shares, axis=-1)),
        z=z,
        entropy=entropy,
        load=jnp.mean(load, axis=0),
        dropped=axis.all_reduce(varying(dropped.astype(load.dtype), axis.names))
        / (sequences * counted),
    )


def rebalanced(
    bias: Float[Array, "*layers experts"], load: Float[Array, "*layers experts"], rate: float
) -> Float[Array, "*layers experts"]:
    """The bias of the next step: up by `rate` for an expert below the mean load, down for one above
    it.

    A load that is the mean but for rounding counts as even, so that the bias is the same however
    the load was summed up. For `step.make(after_update=...)`, whose auxiliary values are joined
    already: once a step, from the load over the whole batch (Wang et al., arXiv 2408.15664,
    algorithm 1, with a rate of 0.001). Keep the bias out of `trainable`.
    """
    mean = jnp.mean(load, axis=-1, keepdims=True)
    even = (
        jnp.abs(mean - load) <= 64 * jnp.finfo(load.dtype).eps * mean
    )  # some roundings of one sum, and of its mean
    step = jnp.where(even, jnp.zeros((), load.dtype), jnp.sign(mean - load))
    return bias + jnp.asarray(rate, bias.dtype) * step.astype(bias.dtype)
