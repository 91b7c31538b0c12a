"""Traces the train step of a decoder of any family under a layout."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractDevice

from parallax import mesh
from parallax.hardware import Hardware
from parallax.layout import Layout
from parallax.models import decoder
from parallax.models.family import Family
from parallax.plan.tracing import Trace, trace

ADAMW = optax.adamw(3e-4)


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
    """Returns the trace of `decoder.train_step` on each device. The devices need not exist.

    Args:
        family: the kind of decoder, such as `llama.FAMILY`.
        config: the model's sizes; a window of the batch has `config.context + 1` tokens.
        layout: how the model and the batch are split over devices.
        hardware: a device, such as `hardware.H100`.
        batch: sequences in the global batch.
        optimizer: an optimizer that acts element by element, or one of `parallax.optimizers`.
        options: only `compute`, a `recipe.Compute` with the choices that the layout does not make.

    Raises:
        ValueError: the layout does not fit the model or the batch; or `compute` does not fit the
            layout.
    """
    world = mesh.abstract(**layout.axes)
    # With a device on the mesh, the recipe chooses its TPU kernel for attention. The kernel for
    # GPUs runs only in a process that has a GPU. So for other hardware the mesh names no device,
    # and the recipe chooses as for a CPU.
    if hardware.platform == "tpu":
        world = world.update(
            abstract_device=AbstractDevice(hardware.name, num_cores=1, platform=hardware.platform)
        )
    windows = jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32)
    found: list[Trace] = []

    def of_key(key) -> None:
        """Traces the step inside `eval_shape`, and appends the trace to `found`, since `eval_shape`
        returns only arrays."""
        prepared = decoder.train_step(
            family, config, optimizer, layout, world, batch=batch, key=key, **options
        )
        found.append(trace(prepared.train, (prepared.shapes, windows), world, hardware=hardware))

    # The key is abstract too, so that a plan works even if JAX has no backend.
    jax.eval_shape(of_key, jax.eval_shape(jax.random.key, 0))
    return found[0]
