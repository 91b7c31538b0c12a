"""A layer that is a mixture of experts: a router, experts of any kind, and how the two come
together.

Legend: B sequences, T tokens in one, D width, F hidden width of an expert, E experts, n devices of
the axis.
"""

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from parallax import mesh, tensor
from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import accumulation_dtype, axes, varying_axes
from parallax.experts.dispatch import Dispatch, gathered
from parallax.experts.router import Router, Statistics, statistics
from parallax.experts.rows import ExpertCompute, grouped
from parallax.tensor import Comms


class Gated(eqx.Module):
    """Experts of three matrices, `(silu(x gate) * (x up)) down` (Shazeer, arXiv 2002.05202); whole,
    or shards of F.
    """

    gate: Float[Array, "... width hidden"]
    up: Float[Array, "... width hidden"]
    down: Float[Array, "... hidden width"]

    def __init__(
        self, experts: int, width: int, hidden: int, *, dtype: Any = jnp.float32, key: PRNGKeyArray
    ):
        keys = jax.random.split(key, 3)
        normal = lambda key, *shape: (
            jax.random.normal(key, shape, dtype) / jnp.asarray(shape[-2] ** 0.5, dtype)
        )
        self.gate, self.up = (normal(key, experts, width, hidden) for key in keys[:2])
        self.down = normal(keys[2], experts, hidden, width)

    def __call__(self, x: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
        """One expert, its matrices without the dim of experts."""
        return (jax.nn.silu(x @ self.gate) * (x @ self.up)) @ self.down


class Mixture(eqx.Module):
    """The parameters of a layer.

    Attributes:
        router: from a token to logits; a stack of layers has a first dim of them in each array.
        experts: a tree of any kind whose arrays have a first dim of experts, split over the axis.
        bias: added to the scores for the choice alone; `rebalanced` moves it, and no gradient does.
            None or `()`: there is none.
    """

    router: Float[Array, "*layers width experts"]
    experts: Any
    bias: Float[Array, "*layers experts"] | tuple[()] | None = None


def moe(
    x: Float[Array, "batch tokens width"],
    params: Mixture,
    axis: AxisLike,
    *,
    route: Router,
    dispatch: Dispatch = gathered,
    compute: ExpertCompute = grouped(),  # noqa: B008, a frozen choice
    comms: Comms = tensor.comms(()),  # noqa: B008, likewise
) -> tuple[Float[Array, "batch tokens width"], Statistics]:
    """For each token the weighted sum of its experts' results, experts split over `axis`: `x[B_X,
    T, D] -> y[B_X, T, D]`.

    It equals all experts on all tokens, times weights that are 0 where an expert was not chosen.
    Add it to the residual stream.

    The axis splits the batch too: it may be that of the data, one of its own inside the data (name
    both in `grads.averaged`), or several. An expert's gradient is then the sum over all tokens that
    came, and `grads.averaged` and `zero.reduce_scattered`, which sum a gradient where its parameter
    is the same, only divide it.

    Args:
        x: this device's tokens.
        params: the router whole, and this device's experts.
        axis: the axis that the experts are split over; `()` where each device has all.
        route: which experts a token goes to: `top_k(k)`.
        dispatch: `gathered`, `exchanged(capacity)` or `ragged(capacity)`.
        compute: what runs the experts that are here: `grouped(expert)`.
        comms: of the axis that each expert's hidden width is split over, so that its results are
            partial sums: `tensor.comms("tensor")`, or `sequence.comms` where `x` has a device's
            share of the tokens. With `context.comms` the statistics are those of whole sequences.

    Raises:
        ValueError: the experts here times the devices are not the router's; `x` is the same on the
            devices of `axis`; or as `route`, `dispatch` and `compute` do.
    """
    axis = Axis.of(axis)
    held = _held(params, axis)
    _check_varies(x, axis)
    logits = x.astype(accumulation_dtype(x.dtype)) @ params.router.astype(
        accumulation_dtype(x.dtype)
    )
    choice = route(logits, None if isinstance(params.bias, tuple) else params.bias)
    rows = lambda a: a.reshape(-1, a.shape[-1])
    local = functools.partial(compute, params.experts)
    tokens, weights = comms.all_tokens(x), comms.all_tokens(choice.weights.astype(x.dtype))
    y, dropped = dispatch(
        rows(tokens), rows(comms.gathered(choice.experts)), rows(weights), local, axis, held
    )
    told = statistics(
        choice, dropped, comms.over_tokens, counted=comms.token_shards // comms.context_shards
    )
    return comms.sum_partials(y.reshape(tokens.shape)), told


def _held(params: Mixture, axis: Axis) -> int:
    """The number of experts here."""
    count, n = params.router.shape[-1], axis.size()
    for path, leaf in jax.tree.leaves_with_path(eqx.filter(params.experts, eqx.is_array)):
        held = leaf.shape[0] if leaf.ndim else 0
        if held * n != count:
            raise ValueError(
                f"experts.moe: the router knows {count} experts, and the {n} devices of "
                f"{axis.names!r} hold {held} each by the first dim of "
                f"{mesh.dotted(path) or 'the experts'}, {leaf.dtype}{list(leaf.shape)}. Give each "
                f"array of the experts a first dim of {count}, split over {axis.names!r}; it must "
                f"divide by {n}."
            )
    return count // n


def _check_varies(x: Array, axis: Axis) -> None:
    same = [
        name for name in axes(axis.names) if name not in varying_axes(x) and Axis(name).size() > 1
    ]
    if same:
        raise ValueError(
            f"experts.moe: the tokens must differ along {axis.names!r}, over which the experts are "
            f"split, and x, {x.dtype}{list(x.shape)}, is the same along {same}: the "
            f"{math.prod(Axis(name).size() for name in same)} devices would send the same tokens. "
            "Split the batch over that axis too, as in_specs=P(('data', 'expert')) does; or, where "
            "devices are to share each expert, split its hidden width: "
            "comms=tensor.comms('tensor')."
        )
