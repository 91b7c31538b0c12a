"""Causal attention by a kernel that holds no scores: JAX's own for TPUs, with the types that
`check_vma=True` asks for.

    compute = Compute(attention=flash.attention)  # the default on a mesh of TPUs
"""

import functools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Float, Int

from parallax.collectives.types import varying, varying_axes
from parallax.models.attention import grouped

# Tokens that a kernel takes at once: the largest that divides T; 128 is the least.
BLOCKS = (512, 256, 128)


def attention(
    q: Float[Array, "batch tokens heads head_width"],
    k: Float[Array, "batch tokens groups head_width"],
    v: Float[Array, "batch tokens groups head_width"],
    *,
    segments: Int[Array, "batch tokens"] | None = None,
) -> Float[Array, "batch tokens heads head_width"]:
    """Returns `grouped(q, k, v)` by JAX's Pallas kernel for TPUs; `grouped` itself where 128 does
    not divide the tokens, for float64, and for documents packed into a window (`segments`).

    It keeps the logarithms of sums, B H T numbers, and computes the scores again backward. It
    multiplies in the type of `q` and adds up in float32, so it equals `grouped` within the rounding
    of that type.

    Source: Dao et al., FlashAttention (arXiv 2205.14135).
    """
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    sizes = [block for block in BLOCKS if T % block == 0]
    if not sizes or H % G or q.dtype.itemsize > 4 or segments is not None:
        return grouped(q, k, v, segments=segments)
    k, v = (jnp.repeat(array, H // G, axis=2) for array in (k, v))
    q, k, v = (jnp.swapaxes(array, 1, 2) for array in (q, k, v))
    return jnp.swapaxes(typed(functools.partial(_kernel, block=sizes[0]))(q, k, v), 1, 2)


def _kernel(q: Any, k: Any, v: Any, *, block: int) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention as kernels

    sizes = dict.fromkeys(kernels.BlockSizes.__dataclass_fields__, block) | {"block_b": 1}
    # For the gradient of q the kernel's caller writes sums of rows out so many times.
    sizes = kernels.BlockSizes(**sizes | {"block_k_major_dq": BLOCKS[-1], "block_k_dq": BLOCKS[-1]})
    return kernels.flash_attention(
        q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5, block_sizes=sizes
    )


def typed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `f`, a function of arrays with a derivative of its own, that may be called where
    `check_vma=True`.

    Pallas's kernels are refused there unless they say along which axes their results vary. Here
    they vary along all axes along which an argument does. `f` must send nothing to other devices.
    It is traced where JAX checks no types, in a thread of its own, as what JAX checks belongs to a
    thread.
    """

    @jax.custom_vjp
    def g(*arguments):
        return _run(_untyped(f, *arguments), arguments)[0]

    def forward(*arguments):
        structures = []

        def out_and_residuals(*arguments):
            out, pull = jax.vjp(f, *arguments)
            leaves, structure = jax.tree.flatten(pull)
            structures.append(structure)
            return out, *leaves

        program = _untyped(out_and_residuals, *arguments)
        out, *leaves = _run(program, arguments)
        return out, (leaves, _Pull(structures[0]))

    def backward(residuals, ct):
        leaves, pull = residuals

        def cotangents(ct, *leaves):
            return jax.tree.unflatten(pull.tree, leaves)(ct)

        return tuple(_run(_untyped(cotangents, ct, *leaves), (ct, *leaves)))

    g.defvjp(forward, backward)

    def along_all(*arguments):
        return g(*_varying_alike(arguments, arguments))

    return along_all


@jax.tree_util.register_static
class _Pull:
    """The structure of a derivative."""

    def __init__(self, tree: Any):
        self.tree = tree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pull) and self.tree == other.tree

    def __hash__(self) -> int:
        return hash(self.tree)


def _untyped(f: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the jaxpr of `f`, traced in a thread of its own."""
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments]

    def trace():
        # The kernels of JAX 0.10 to 0.12 mix types, and count in 32 bits alone.
        with (
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            return jax.make_jaxpr(f)(*shapes)

    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(trace).result()


def _run(program: Any, arguments: tuple[Any, ...]) -> list[Any]:
    return _varying_alike(jaxpr_as_fun(program)(*arguments), arguments)


def _varying_alike(arrays: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Returns `arrays`, typed as varying along all axes along which an argument varies."""
    names = tuple(dict.fromkeys(name for array in arguments for name in varying_axes(array)))
    return [varying(array, names) for array in arrays]
