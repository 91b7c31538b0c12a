"""A mixture of experts: a layer in which a router chooses the experts of each token. The experts
may be of any kind.

Legend: B sequences, T tokens in a sequence, D width, F hidden width of an expert, E experts, n
devices of the axis.
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
from parallax.experts.grouped_rows import ExpertCompute, grouped
from parallax.experts.router import Router, Statistics, statistics
from parallax.tensor import Comms


class Gated(eqx.Module):
    """Experts that compute `(silu(x gate) * (x up)) down` with three matrices each. A device may
    hold only a part of each expert's hidden width.

    Source: Shazeer, arXiv 2002.05202.
    """

    gate: Float[Array, "... width hidden"]
    up: Float[Array, "... width hidden"]
    down: Float[Array, "... hidden width"]

    def __init__(
        self, experts: int, width: int, hidden: int, *, dtype: Any = jnp.float32, key: PRNGKeyArray
    ):
        """Draws the matrices of all experts: `gate` and `up`, [experts, width, hidden width], and
        `down`, [experts, hidden width, width]."""
        keys = jax.random.split(key, 3)

        def normal(key, *shape):
            """Returns matrices of normal random numbers, divided by the square root of the number
            of a matrix's rows. Each row of a matrix multiplies one input of the matrix."""
            scale = jnp.asarray(shape[-2] ** 0.5, dtype)
            return jax.random.normal(key, shape, dtype) / scale

        self.gate, self.up = (normal(key, experts, width, hidden) for key in keys[:2])
        self.down = normal(keys[2], experts, hidden, width)

    def __call__(self, x: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
        """Returns the result of one expert; here the matrices have no dim of experts."""
        return (jax.nn.silu(x @ self.gate) * (x @ self.up)) @ self.down


class Mixture(eqx.Module):
    """The parameters of a layer of experts. If layers are stacked, each array gets one more dim in
    front, for the layers.

    Attributes:
        router: the matrix from a token to logits.
        experts: a tree of any kind whose arrays have a first dim of experts. In `moe` a device has
            only its own experts.
        bias: numbers added to the experts' scores, only to choose the experts. The bias has no
            gradient; `rebalanced` changes it. None or `()` means no bias.
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
    comms: Comms = tensor.comms(()),  # noqa: B008, a frozen choice
) -> tuple[Float[Array, "batch tokens width"], Statistics]:
    """Returns each token's weighted sum of its experts' results, `x[B_X, T, D] -> y[B_X, T, D]`,
    and the router's `Statistics` of this device's sequences. X stands for the axes that split the
    batch. `axis` names one or more of these axes, or none (`()`).

    The experts are split over `axis`. For each token, the result equals the weighted sum of the
    results of all experts, where experts that were not chosen have the weight 0. Add the result to
    the residual stream.

    The axis that splits the experts also splits the batch: it may be the data axis, another axis,
    or several axes. Pass all axes that split the batch to `grads.averaged`. An expert receives its
    tokens from all devices of `axis`, so its gradient is already a sum over these devices. Along
    `axis`, `grads.averaged` and `zero.reduce_scattered` therefore only divide this gradient: they
    sum only over axes along which a parameter is the same.

    Args:
        x: this device's tokens.
        params: the whole router, and this device's experts.
        axis: the axis that the experts are split over; `()` if each device has all of them.
        route: the function that chooses the experts of each token; for example, `top_k(k)`.
        dispatch: `gathered`, `exchanged(capacity)` or `ragged(capacity)`.
        compute: the function that runs this device's experts; for example, `grouped(expert)`.
        comms: the communication along the axis that splits each expert's hidden width. If there is
            such an axis, the experts' results are partial sums. Use `tensor.comms("tensor")`, or
            `sequence.comms` if `x` has a device's share of the tokens. With `context.comms`, the
            statistics are of whole sequences, not of a device's share of them.

    Raises:
        ValueError: the devices together do not have as many experts as the router; `x` is the same
            on the devices of `axis`; `comms` would sum results that are equal on all devices, since
            its axis is also in `axis`, or splits no array of the experts; there are no tokens; or
            `route` chooses no experts for the tokens. The errors of `route`, `dispatch` and
            `compute` are raised too.
    """
    axis = Axis.of(axis)
    local_experts = _local_experts(params, axis)
    _check_varies(x, axis)
    _check_partial(params, axis, comms)
    # A bias of `()` is no bias. Logits are float32 or wider: rounded logits would change the choice
    # between close scores.
    kind = accumulation_dtype(x.dtype)
    logits = x.astype(kind) @ params.router.astype(kind)
    routing = route(logits, None if isinstance(params.bias, tuple) else params.bias)
    if not routing.experts.size:
        raise ValueError(
            "experts.moe needs 1 token or more, and 1 expert or more for each; got x of shape "
            f"{x.shape}, and `route` chose experts of shape {routing.experts.shape}. Pass a batch "
            "with tokens, and a router that chooses an expert for each token."
        )
    # If `comms` splits the tokens, they are gathered here, so that each device computes all tokens
    # with its share of the hidden width. Backward, `all_tokens` sums the devices' gradients; the
    # experts' numbers, `ids`, have none.
    tokens, weights = comms.all_tokens(x), comms.all_tokens(routing.weights.astype(x.dtype))
    ids = comms.gathered(routing.experts)
    # Each [B, T, ...] becomes [B T, ...].
    rows, row_ids, row_weights = (a.reshape(-1, a.shape[-1]) for a in (tokens, ids, weights))
    compute_local = functools.partial(compute, params.experts)
    y, dropped = dispatch(rows, row_ids, row_weights, compute_local, axis, local_experts)
    # `token_shards` devices, those of the axes `over_tokens`, split a sequence. After the gather,
    # tokens differ only along the context axis, of `context_shards` devices. The `counted` devices
    # at each place of that axis have the same tokens, and count the same dropped choices.
    # `statistics` sums the choices over `over_tokens`, and so divides by `counted`.
    counted = comms.token_shards // comms.context_shards
    stats = statistics(routing, dropped, comms.over_tokens, counted=counted)
    # Summed over the devices that split the hidden width. With `sequence.comms` each device keeps
    # its own tokens.
    return comms.sum_partials(y.reshape(tokens.shape)), stats


def _local_experts(params: Mixture, axis: Axis) -> int:
    """Returns the number of experts on this device: the number of all experts divided by the number
    of devices.

    Raises `ValueError` if the first dim of an array of the experts, times the number of devices of
    the axis, is not the number of the router's columns.
    """
    count, n = params.router.shape[-1], axis.size()
    for path, leaf in jax.tree.leaves_with_path(eqx.filter(params.experts, eqx.is_array)):
        local_experts = leaf.shape[0] if leaf.ndim else 0
        if local_experts * n != count:
            raise ValueError(
                f"experts.moe: the router has {count} experts, and each of the {n} devices of "
                f"{axis.names!r} has {local_experts}, which is the first dim of "
                f"{mesh.dotted(path) or 'the experts'}, {leaf.dtype}{list(leaf.shape)}. Give each "
                f"array of the experts a first dim of {count}, split over {axis.names!r}; the "
                f"number of experts must be a multiple of {n}."
            )
    return count // n


def _check_varies(x: Array, axis: Axis) -> None:
    """Raises `ValueError` if the tokens are the same on several devices of the experts' axis.

    The type of `x` says along which axes it varies. An axis of one device need not be among these
    axes.
    """
    same = [
        name for name in axes(axis.names) if name not in varying_axes(x) and Axis(name).size() > 1
    ]
    if same:
        raise ValueError(
            f"experts.moe: the experts are split over {axis.names!r}, so the tokens must differ "
            f"along {axis.names!r}. But x, {x.dtype}{list(x.shape)}, is the same along {same}: the "
            f"{math.prod(Axis(name).size() for name in same)} devices would send the same tokens. "
            "Split the batch over that axis too, as in_specs=P(('data', 'expert')) does. If the "
            "devices should share each expert, split its hidden width instead: "
            "comms=tensor.comms('tensor')."
        )


def _check_partial(params: Mixture, axis: Axis, comms: Comms) -> None:
    """Raises `ValueError` if the devices along an axis of `comms.everywhere` would all have the
    same results, which `comms.sum_partials` would add up.

    The results themselves do not show it, since `comms.all_tokens` types the tokens as varying.
    """
    leaves = jax.tree.leaves(eqx.filter(params.experts, eqx.is_array))
    split = {name for leaf in leaves for name in varying_axes(leaf)}
    for name in axes(comms.everywhere.names):
        if Axis(name).size() == 1:
            continue
        if name in axes(axis.names):
            raise ValueError(
                f"experts.moe: the experts are split over {axis.names!r}, and comms splits each "
                f"expert's hidden width over {name!r} too. The devices of {name!r} would get the "
                "same results, and comms would add these up. Split the experts over an axis that "
                "splits the batch, or pass axis=() and split only the hidden width."
            )
        # Experts without arrays, which `compute` may have by closure, show nothing.
        if leaves and name not in split:
            raise ValueError(
                f"experts.moe: comms adds up results over {name!r}, but all arrays of the experts "
                f"are the same along {name!r}: each result would be counted once per device. Split "
                f"the experts' hidden width over {name!r}, or pass a comms without this axis."
            )
