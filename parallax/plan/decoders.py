"""Traces the train step of a decoder of any family under a layout."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractDevice

from parallax import context, mesh
from parallax.hardware import Hardware
from parallax.layout import Layout
from parallax.models import decoder, flash, recipe
from parallax.models.family import Family
from parallax.plan.tracing import Trace, trace

ADAMW = optax.adamw(3e-4)
BEFORE_AMPERE = ("V100",)  # GPUs of `hardware` for which cuDNN has no attention kernel


def traced(
    family: Family,
    config: Any,
    layout: Layout,
    hardware: Hardware,
    *,
    batch: int,
    optimizer: optax.GradientTransformation = ADAMW,
    **options: Any,
) -> Trace:
    """Returns the `Trace` of `decoder.train_step`: the memory, messages and work of one device in a
    step. The counts hold for each device, since all run the same program. No device is needed.

    For a GPU, the trace counts attention as cuDNN's kernel, which keeps no scores, if the kernel
    supports the GPU, the shapes and the precision. By default the trace has a loop over the layers,
    even where the step on GPUs has none (`recipe.unroll_of`).

    Args:
        family: the kind of decoder, such as `llama.FAMILY`.
        config: the model's sizes; a window of the batch has `config.context + 1` tokens.
        layout: how the model and the batch are split over devices.
        hardware: the figures of one device, such as `hardware.H100`.
        batch: sequences in the global batch.
        optimizer: an optimizer that acts element by element, or one of `parallax.optimizers`.
        options: only `compute`, a `recipe.Compute` with the choices that the layout does not make.

    Raises:
        ValueError: the layout does not fit the model or the batch; or `compute` does not fit the
            layout.
    """
    world = mesh.abstract(**layout.axes)
    # With a device on the mesh, the recipe chooses its TPU kernel for attention. The kernel for
    # GPUs is traced only in a process that has a GPU. So for other hardware the mesh names no
    # device, and the recipe chooses as for a CPU, but for the attention below.
    if hardware.platform == "tpu":
        world = world.update(
            abstract_device=AbstractDevice(hardware.name, num_cores=1, platform=hardware.platform)
        )
    compute = options.get("compute", recipe.PLAIN)
    # The function of `_like_cudnn` itself checks the shapes and the dtype, which it gets in a call.
    if compute.attention is None and _has_cudnn(family, layout, hardware):
        options["compute"] = dataclasses.replace(compute, attention=_like_cudnn(family))
    windows = jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32)
    found: list[Trace] = []

    def of_key(key) -> None:
        """Traces the step with the random key `key`, and appends the trace to `found`."""
        prepared = decoder.train_step(
            family, config, optimizer, layout, world, batch=batch, key=key, **options
        )
        found.append(trace(prepared.train, (prepared.shapes, windows), world, hardware=hardware))

    # The step needs a random key, and a real key needs a backend. Inside `eval_shape` the key is a
    # tracer, so a plan works without a backend. `eval_shape` returns only shapes, hence `found`.
    jax.eval_shape(of_key, jax.eval_shape(jax.random.key, 0))
    return found[0]


def _has_cudnn(family: Family, layout: Layout, hardware: Hardware) -> bool:
    """Returns whether the step uses cuDNN's attention kernel where the kernel supports the shapes
    and the dtype. Shapes and dtype are not checked here (`_like_cudnn` checks them). With a context
    axis, the step uses the family's context attention instead."""
    is_recent = hardware.platform == "cuda" and hardware.name not in BEFORE_AMPERE
    return is_recent and family.gpu_attention is flash.cudnn_attention and layout.context == 1


def _like_cudnn(family: Family) -> Callable[..., Any]:
    """Returns an attention function that stands for cuDNN's kernel in a trace. The function traces
    JAX's kernel for TPUs, since both kernels need about the same memory and about the same number
    of passes over memory. That kernel takes whole blocks of tokens; for another number of tokens,
    `context.blockwise`, which keeps no scores either, stands for cuDNN's kernel. For shapes or a
    dtype that cuDNN's kernel does not support, the function traces the family's own attention."""

    def attention(q, k, v, *, segments=None):
        """Returns causal attention of arrays [batch, tokens, heads, head width]."""
        fits = q.dtype.itemsize == 2 and flash.fits_cudnn(q.shape[1], q.shape[3])
        in_blocks = q.shape[1] % flash.BLOCKS[-1] == 0
        attend = flash.attention if fits else family.attention
        if fits and not in_blocks and segments is None:  # with segments no kernel runs
            attend = context.blockwise
        return attend(q, k, v, segments=segments)

    return attention
