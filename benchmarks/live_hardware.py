"""The devices of a live mesh as a record of `parallax.hardware`, for `plan.py --times`."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import mesh as meshes
from parallax.collectives import tuning
from parallax.collectives.cost import Link
from parallax.hardware import Hardware


def measured(
    mesh: Mesh, *, axis_name: str | None = None, size: int | None = None, rounds: int = 5
) -> Hardware:
    """Returns the devices of `mesh`, all at work at once: their rate of products, their bandwidth,
    what new memory takes, and a hop.

    Virtual CPU devices share the cores, so each has its share of the rates. Their memory is not
    known, and no limit here. Takes some seconds.

    Args:
        mesh: the mesh; all processes must call this together.
        axis_name: whose links to measure; by default the largest axis.
        size: of the square matrices; by default 512 on CPUs, 8192 elsewhere.
        rounds: the best of so many counts.
    """
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    axis_name = axis_name or str(max(mesh.shape, key=lambda name: mesh.shape[name]))
    link = tuning.fit(mesh, axis_name) if mesh.shape[axis_name] > 1 else Link(0.0, 0.0)
    size = size or (512 if on_cpu else 8192)
    full = _rate(mesh, size, jnp.float32, rounds)
    bandwidth, fresh = _memory(mesh, size, rounds)
    return Hardware(
        name=f"{device.device_kind} (measured)",
        platform="cuda" if device.platform == "gpu" else device.platform,
        memory=float((device.memory_stats() or {}).get("bytes_limit", math.inf)),
        rate=full if on_cpu else _rate(mesh, size, jnp.bfloat16, rounds),
        full_rate=full,
        bandwidth=bandwidth,
        domain=mesh.size,
        fast=link,
        slow=link,
        efficiency=1.0,
        fresh=fresh,
        short=4 if on_cpu else 2,
    )


def _rate(mesh: Mesh, size: int, dtype: Any, rounds: int, times: int = 8) -> float:
    """Returns the operations a second of each device's products, all devices at work."""

    def chain(blocks):
        matrix = blocks[0]
        return jax.lax.fori_loop(0, times, lambda _, y: y @ matrix, matrix)[None]

    product = _on_all(mesh, chain)
    x = _blocks(mesh, (size, size), 1 / size, dtype)
    return 2 * times * size**3 / _best(lambda: product(x), rounds)


def _memory(mesh: Mesh, size: int, rounds: int) -> tuple[float, float]:
    """Returns the bytes a second that each device reads and writes, all devices at work; and
    seconds a byte more where memory is new."""
    nbytes = max(2**16, 64 * 4 * size**2)  # more than the C library keeps
    x = _blocks(mesh, (nbytes // 4,), 1.0, jnp.float32)
    into = _on_all(mesh, lambda x, _: x + 1, donate_argnums=1, keep_unused=True)
    new = _on_all(mesh, lambda x: x + 1)
    result = new(x)

    def in_place():
        nonlocal result
        result = into(x, result)
        return result

    reused, fresh = _best(in_place, rounds), _best(lambda: new(x), rounds)
    return 2 * nbytes / reused, max(0.0, fresh - reused) / nbytes


def _blocks(mesh: Mesh, shape: tuple[int, ...], value: float, dtype: Any) -> jax.Array:
    """Returns one array of `shape` on each device."""
    block = np.full((1, *shape), value, dtype)
    return jax.make_array_from_callback(
        (mesh.size, *shape), NamedSharding(mesh, P(mesh.axis_names)), lambda _: block
    )


def _on_all(mesh: Mesh, f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    every = P(mesh.axis_names)
    count = 2 if "donate_argnums" in options else 1
    return jax.jit(meshes.spmd(f, mesh=mesh, in_specs=(every,) * count, out_specs=every), **options)


def _best(call: Callable[[], jax.Array], rounds: int) -> float:
    """Returns the seconds of the quickest of some calls."""
    jax.block_until_ready(call())
    best = math.inf
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        best = min(best, time.perf_counter() - start)
    return best
