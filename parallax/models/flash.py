"""Causal attention by kernels that do not store the scores: JAX's flash kernel for TPUs, with the
types that `shard_map(check_vma=True)` needs, and cuDNN's kernel for NVIDIA's GPUs.

    compute = Compute(attention=flash.attention)  # the default on a mesh of TPUs
    compute = Compute(attention=flash.cudnn_attention)  # the default on a mesh of GPUs

Under `check_vma`, the type of an array includes the axes along which the array varies. JAX refuses
the kernel for TPUs, since the kernel does not state these axes. So `_untyped` traces the kernel to
a jaxpr whose types lack the axes. `_run` evaluates the jaxpr, and adds the axes to its results.

Legend: B batch, T tokens, H heads of queries, G heads of keys and values, K head width.
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

# Numbers of tokens that the kernel may take at once, in order of preference; each must divide T.
BLOCKS = (512, 256, 128)


def attention(
    q: Float[Array, "batch tokens heads head_width"],
    k: Float[Array, "batch tokens groups head_width"],
    v: Float[Array, "batch tokens groups head_width"],
    *,
    segments: Int[Array, "batch tokens"] | None = None,
) -> Float[Array, "batch tokens heads head_width"]:
    """Returns `grouped(q, k, v)`, computed by JAX's Pallas kernel for TPUs.

    The kernel cannot do all that `grouped` can. `grouped` itself runs in each of these cases: 128
    does not divide the number of tokens; the arrays are of float64; or `segments` are given, for
    documents packed into a window. `grouped` also runs if the number of heads of keys does not
    divide the number of heads of queries, and then raises an error.

    For the backward pass the kernel keeps one number for each sequence, head and token: the
    logarithm of the sum of exponentials over a row of the scores. The backward pass computes the
    scores again. The kernel multiplies in the type of `q` and adds up in float32, so its result
    equals that of `grouped` within the rounding of the type of `q`.

    Source: Dao et al., FlashAttention (arXiv 2205.14135).
    """
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    fitting_blocks = [block for block in BLOCKS if T % block == 0]
    if not fitting_blocks or H % G or q.dtype.itemsize > 4 or segments is not None:
        return grouped(q, k, v, segments=segments)
    # The kernel has no groups: it needs as many heads of keys and values as of queries.
    k, v = (jnp.repeat(array, H // G, axis=2) for array in (k, v))
    # The kernel takes and returns [B, H, T, K].
    q, k, v = (jnp.swapaxes(array, 1, 2) for array in (q, k, v))
    kernel = typed(functools.partial(_kernel, block=fitting_blocks[0]))
    return jnp.swapaxes(kernel(q, k, v), 1, 2)


def cudnn_attention(
    q: Float[Array, "batch tokens heads head_width"],
    k: Float[Array, "batch tokens groups head_width"],
    v: Float[Array, "batch tokens groups head_width"],
    *,
    segments: Int[Array, "batch tokens"] | None = None,
) -> Float[Array, "batch tokens heads head_width"]:
    """Returns `grouped(q, k, v)`, computed by cuDNN's fused attention, through
    `jax.nn.dot_product_attention`.

    The kernel cannot do all that `grouped` can. `grouped` itself runs in each of these cases: the
    arrays are not of bfloat16 or float16; 8 does not divide the width of a head, or a head is wider
    than 128; the number of tokens is odd; `segments` are given, for documents packed into a window;
    or this process has no NVIDIA GPU of the generation Ampere or newer, as when it compiles a step
    for GPUs on a machine without a GPU. `grouped` also runs if the number of heads of keys does not
    divide the number of heads of queries, and then raises an error. The result of the kernel equals
    that of `grouped` within the rounding of the type of `q`.

    Source: Dao et al., FlashAttention (arXiv 2205.14135).
    """
    T, H, K, G = *q.shape[1:], k.shape[2]
    in_16_bits = q.dtype in (jnp.bfloat16, jnp.float16)
    fits = in_16_bits and fits_cudnn(T, K) and H % G == 0
    if not fits or segments is not None or not _has_cudnn():
        return grouped(q, k, v, segments=segments)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def fits_cudnn(tokens: int, head_width: int) -> bool:
    """Returns whether cuDNN's attention supports sequences of `tokens` tokens, with heads that are
    `head_width` wide.
    """
    return tokens % 2 == 0 and head_width % 8 == 0 and head_width <= 128


def _has_cudnn() -> bool:
    """Returns whether this process has a GPU for which cuDNN has the kernel."""
    device = jax.devices()[0]
    # AMD's GPUs are of the platform "gpu" too. Ampere has the compute capability 8.0.
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    return is_cuda and float(device.compute_capability) >= 8.0


def _kernel(q: Any, k: Any, v: Any, *, block: int) -> Any:
    """Returns causal attention, [B, H, T, K], of arrays [B, H, T, K], by JAX's flash kernel, which
    takes `block` tokens at a time.
    """
    from jax.experimental.pallas.ops.tpu import flash_attention as kernels

    # `block_b` counts sequences; all other sizes count tokens.
    sizes = dict.fromkeys(kernels.BlockSizes.__dataclass_fields__, block) | {"block_b": 1}
    # For the gradient of q, JAX stores one number per row of scores, the sum of output times
    # cotangent, `block_k_major_dq` times. So the smallest block needs the least memory.
    # `block_k_dq` may not be larger than `block_k_major_dq`.
    sizes = kernels.BlockSizes(**sizes | {"block_k_major_dq": BLOCKS[-1], "block_k_dq": BLOCKS[-1]})
    return kernels.flash_attention(
        q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5, block_sizes=sizes
    )


def typed(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a wrapper of `f` that, unlike `f`, passes the checks of a `shard_map` with
    `check_vma=True`.

    `f` is a function from arrays to one array, such as a kernel with its own derivative, and must
    not communicate. `f` and its derivative are traced to jaxprs whose types do not say along which
    axes a value varies. The results of the jaxprs are then typed as varying along each axis along
    which an argument varies.
    """

    @jax.custom_vjp
    def g(*arguments):
        """Returns `f(*arguments)`."""
        (out,) = _run(_untyped(f, *arguments), arguments)
        return out

    def forward(*arguments):
        """Returns `f(*arguments)`, and the residuals: the leaves and the tree of the pullback of
        `f`. The pullback is the function from the cotangent of the result to the cotangents of the
        arguments.
        """
        structures = []

        def out_and_leaves(*arguments):
            """Returns `f(*arguments)` and the leaves (arrays) of the pullback of `f`."""
            out, pullback = jax.vjp(f, *arguments)
            leaves, structure = jax.tree.flatten(pullback)
            # A jaxpr returns arrays only, so the pullback's tree structure is handed out of the
            # trace in this list.
            structures.append(structure)
            return out, *leaves

        # `_untyped` traces without the checks, which would refuse `f` in a call of `jax.vjp` here.
        # The trace also fills `structures`.
        program = _untyped(out_and_leaves, *arguments)
        out, *leaves = _run(program, arguments)
        # Residuals are arrays and static values, so the tree is wrapped as a static value.
        return out, (leaves, _PullbackTree(structures[0]))

    def backward(residuals, cotangent):
        """Returns the cotangents of the arguments. The pullback is traced without the types of
        `check_vma`: with these types, JAX would refuse the kernels in the pullback.
        """
        leaves, pullback = residuals

        def cotangents(cotangent, *leaves):
            """Rebuilds the pullback from its leaves, and returns its result for `cotangent`."""
            return jax.tree.unflatten(pullback.tree, leaves)(cotangent)

        return tuple(_run(_untyped(cotangents, cotangent, *leaves), (cotangent, *leaves)))

    g.defvjp(forward, backward)

    def along_all(*arguments):
        """Returns `g(*arguments)`, with each argument first typed as varying along all axes along
        which any argument varies.
        """
        # `_varying_alike` types the first tuple by the axes of the second. The call is outside `g`,
        # so that JAX differentiates the typing too: the derivative sums an argument's cotangent
        # over the axes along which the argument did not vary.
        return g(*_varying_alike(arguments, arguments))

    return along_all


@jax.tree_util.register_static
class _PullbackTree:
    """The tree of a pullback, registered as static: JAX then takes it as a part of the structure of
    the residuals, which may have only arrays as leaves.
    """

    def __init__(self, tree: Any):
        self.tree = tree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PullbackTree) and self.tree == other.tree

    def __hash__(self) -> int:
        return hash(self.tree)


def _untyped(f: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the jaxpr of `f`, traced without the types of `check_vma=True`.

    JAX stores the surrounding `shard_map` and its checks in thread-local variables. So a trace in a
    new thread is outside of the `shard_map`, and is not checked.
    """
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arguments]
    config: Any = jax.config  # its type does not list this setting
    precision = config.jax_default_matmul_precision

    def trace():
        """Returns the jaxpr of `f`, traced with the JAX settings that the kernels need."""
        # The kernels of JAX 0.10 to 0.12 mix types, and count in 32 bits only.
        with (
            jax.default_matmul_precision(precision),  # the calling thread's own setting
            jax.enable_x64(False),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            return jax.make_jaxpr(f)(*shapes)

    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(trace).result()


def _run(program: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """Returns the results of a jaxpr, typed as varying along each axis along which an argument
    varies.
    """
    return _varying_alike(jaxpr_as_fun(program)(*arguments), arguments)


def _varying_alike(arrays: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Returns `arrays`, typed as varying along all axes along which any of `arguments` varies."""
    names = tuple(dict.fromkeys(name for array in arguments for name in varying_axes(array)))
    return [varying(array, names) for array in arrays]
