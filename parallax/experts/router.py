"""Chooses the experts of each token, and measures how even the load is.

Legend: B sequences, T tokens in a sequence, E experts, k choices of a token.

Each statistic is computed for each sequence, and then averaged over the sequences. So it does not
depend on how the batch is split into microbatches and devices: the mean of the means of equal parts
is the mean over the batch. The *load* of an expert is the number of choices that fall on the
expert; `Statistics` has the load as a fraction of all choices. The *shares* of a token are its
scores of all experts, divided by their sum.
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
    """The experts that are chosen for each token.

    Attributes:
        experts: the indices of each token's experts, the best expert first. Each index must be
            from 0 to E - 1: with any other, `exchanged` and `ragged` may give wrong results for
            other tokens too. For a choice of no expert, use any expert with the weight 0. If a
            token chooses an expert twice, the factor of the expert's result is the sum of the
            weights of both choices. The dispatches `exchanged` and `ragged` may then drop choices
            even with a capacity of `math.inf`; they count these choices as dropped.
        weights: the factors of the results of these experts.
        logits: the router's logits.
        shares: for each token, the router's preference for each expert: 0 or more, with the sum 1.
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
    """Returns a router, a function `(logits, bias) -> Routing`, that sends each token to the k
    experts with the highest scores.

    If two scores are equal, the first expert is preferred. The scores of the k experts are their
    weights. A bias is added to the scores only for the choice, and has no gradient: `rebalanced`
    changes it to even out the load without an auxiliary loss (Wang et al., arXiv 2408.15664).

    Args:
        k: the number of experts of a token: 2 for Mixtral (arXiv 2401.04088), 1 for Switch (arXiv
            2101.03961).
        score: computes scores of 0 or more from logits: `jax.nn.softmax`, or `jax.nn.sigmoid`.
        normalised: whether to divide a token's weights by their sum.

    Raises:
        ValueError: k is below 1, or above the number of experts.
    """

    def route(logits, bias):
        """Returns the `Routing` of the tokens. `logits` is [..., E], and `bias` is [E] or None."""
        count = logits.shape[-1]
        if not 1 <= k <= count:
            raise ValueError(
                f"experts.top_k: a token needs at least 1 expert and at most all {count} that the "
                f"router knows; got k={k}. Use another k, or a router with more columns."
            )
        scores = score(logits)
        preferred = scores if bias is None else add_bias(scores, bias.astype(scores.dtype))
        # The choice has no gradient. The weights are read from the scores without the bias, and
        # have a gradient.
        _, chosen = lax.top_k(lax.stop_gradient(preferred), k)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if normalised:
            weights = _divided(weights)
        # The last field, `shares`, is for the statistics: it has all experts and the sum 1.
        return Routing(chosen, weights, logits, _divided(scores))

    return route


def _divided(scores: Array) -> Array:
    """Returns scores [..., E] divided by their sum over the experts."""
    # The sum of sigmoids may underflow to 0: the bound prevents a division by 0.
    total = jnp.sum(scores, axis=-1, keepdims=True)
    return scores / jnp.maximum(total, jnp.finfo(scores.dtype).tiny)


class Statistics(NamedTuple):
    """Statistics of the choices of one layer.

    Each statistic is a mean over sequences, so `grads` and `pipeline` average it over devices and
    microbatches.

    Attributes:
        balance: for each sequence, the sum of E * load * share over the E experts; then the mean
            over the sequences. Here `load` is the fraction of the sequence's choices that fall on
            the expert, and `share` is the mean of the expert's `Routing.shares` over the sequence's
            tokens. The balance is 1 if all experts have the same load. As an auxiliary loss it
            moves the router towards an even load. Sources: Fedus et al., arXiv 2101.03961, formula
            4; for one sequence at a time, DeepSeek-AI, arXiv 2412.19437, formula 17.
        z: the mean over tokens of logsumexp(logits)^2. It is an auxiliary loss that keeps logits
            small (Zoph et al., arXiv 2202.08906).
        entropy: the mean over tokens of the entropy of a token's shares, in nats. The entropy is
            log(E), for E experts, if the router prefers no expert. It has no gradient.
        load: for each expert, the fraction of all choices that fall on the expert. A choice is a
            token and one of its experts. Choices that are dropped later count too.
        dropped: the dropped choices per sequence. This number times the number of sequences is the
            number of all dropped choices.
    """

    balance: Float[Array, ""]
    z: Float[Array, ""]
    entropy: Float[Array, ""]
    load: Float[Array, " experts"]
    dropped: Float[Array, ""]


def statistics(
    choice: Routing, dropped: Int[Array, ""], axis: AxisLike = (), *, counted: int = 1
) -> Statistics:
    """Returns the `Statistics` of the experts that were chosen for the tokens of some sequences.

    Args:
        choice: the routing of this device's tokens, in arrays [sequences, tokens, ...].
        dropped: the number of dropped choices.
        axis: the axis that splits the tokens of a sequence; `()` if no axis does.
        counted: how many devices of `axis` have the same tokens, and so counted the same dropped
            choices.
    """
    axis, (sequences, _, count) = Axis.of(axis), choice.logits.shape  # [B, T, E]
    # The mean over tokens and choices: the share of a sequence's choices for each expert, [B, E].
    chosen = jnp.mean(jax.nn.one_hot(choice.experts, count, dtype=choice.logits.dtype), axis=(1, 2))
    z = jnp.mean(jax.nn.logsumexp(choice.logits, axis=-1) ** 2)
    # The entropy is only watched and is no loss, so it has no gradient.
    entropy = jnp.mean(jnp.sum(entr(lax.stop_gradient(choice.shares)), axis=-1))
    # The balance multiplies two means over a sequence. If `axis` splits the sequence, each device
    # has the mean of its part, so the mean over devices is taken before the product.
    load, shares, z, entropy = axis.all_mean((chosen, jnp.mean(choice.shares, axis=1), z, entropy))
    # `counted` devices counted the same dropped choices: the division below corrects for that.
    # `varying` changes only the type, since `dropped` may be a constant 0, the same on all devices.
    all_dropped = axis.all_reduce(varying(dropped.astype(load.dtype), axis.names))
    return Statistics(
        balance=count * jnp.mean(jnp.sum(load * shares, axis=-1)),
        z=z,
        entropy=entropy,
        load=jnp.mean(load, axis=0),
        dropped=all_dropped / (sequences * counted),
    )


def rebalanced(
    bias: Float[Array, "*layers experts"], load: Float[Array, "*layers experts"], rate: float
) -> Float[Array, "*layers experts"]:
    """Returns the experts' bias for the next step, which makes the load more even.

    `load` is each expert's load in this step. The bias of an expert rises by `rate` if the expert's
    load is below the mean, and falls by `rate` if the load is above it. A load that differs from
    the mean only by rounding counts as even, so the bias does not depend on the order in which the
    loads are added.

    Use it in `step.make(after_update=...)`, once per step: there `load` is the load of the whole
    batch. Keep the bias out of `trainable`, and in float32: in 16 bits, a bias that has grown large
    no longer changes, since adding a small `rate` is rounded away. Wang et al. (arXiv 2408.15664,
    algorithm 1) use a `rate` of 0.001.
    """
    mean = jnp.mean(load, axis=-1, keepdims=True)
    # 64 units of rounding: a bound on the rounding of the sums in `load`, and of their mean.
    even = jnp.abs(mean - load) <= 64 * jnp.finfo(load.dtype).eps * mean
    step = jnp.where(even, jnp.zeros((), load.dtype), jnp.sign(mean - load))
    return bias + jnp.asarray(rate, bias.dtype) * step.astype(bias.dtype)
