"""Runs a function, such as a train step, as if each cell (a logical device) were a device.

The function takes one cell's blocks of the arguments, as under `jax.shard_map`. `Walk` runs the
program of one cell for all cells of a device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from parallax import argument_checks, jaxprs
from parallax import mesh as meshes
from parallax._typing import PyTree
from parallax.same_bits.stacks import Cells, Stack, TwoForms
from parallax.same_bits.steps import opened_collectives
from parallax.same_bits.walk import Walk
from parallax.trees import AnyMesh, is_array


def spmd(
    f: Callable[..., Any],
    *,
    cells: Mapping[str, int],
    mesh: AnyMesh,
    in_specs: PyTree,
    out_specs: PyTree,
) -> Callable[..., Any]:
    """Returns a function like that of `mesh.spmd`; its results have the same bits on every mesh.

    A *cell* is a logical device. `f` runs as if each cell were a device, with a block of its own of
    each argument. A device of `mesh` has one cell or several. Call the returned function under
    `jax.jit`. Results are equal for two meshes if `f`, `cells`, the processor's model and the
    version of JAX are the same.

    Args:
        f: a function that takes one cell's block of each argument, for example a train step. A step
            with another number of microbatches is another function, and may give other bits.
        cells: the number of cells along each axis, a power of two.
        mesh: the mesh to run on, with the same axes as `cells`. The size of each axis divides the
            number of cells along the axis.
        in_specs: as in `mesh.spmd`.
        out_specs: as in `mesh.spmd`.

    Raises:
        ValueError: `mesh` is not of CPUs, has other axes than `cells`, or has an axis whose size
            does not divide the number of cells; a number of cells is no power of two; `f` prints
            or calls back to Python, or it calls something that has no rule here, such as a `while`
            loop with a collective in it.
    """
    _check(cells, mesh)
    of_cells = meshes.spmd(f, mesh=meshes.abstract(**cells), in_specs=in_specs, out_specs=out_specs)

    def mapped(*arguments):
        """Returns the result of `f`, as global arrays on the mesh."""
        arrays, static = eqx.partition(arguments, is_array)
        # A weakly typed number, such as a rate, must not widen a bfloat16 parameter.
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type),
            arrays,
        )
        program, result, static_result = eqx.filter_make_jaxpr(of_cells)(
            *eqx.combine(shapes, static)
        )
        (eqn,) = program.jaxpr.eqns  # a `shard_map`; its operands are the arguments and constants
        known = dict(zip(program.jaxpr.invars, jax.tree.leaves(arrays), strict=True))
        known |= zip(program.jaxpr.constvars, program.consts, strict=True)
        results = _mapped(eqn, [known[var] for var in eqn.invars], mesh, cells)
        known = dict(zip(eqn.outvars, results, strict=True))
        leaves = [known[var] for var in program.jaxpr.outvars]
        arrays = jax.tree.unflatten(jax.tree.structure(result), leaves)
        return eqx.combine(arrays, static_result)

    return mapped


def _check(cells: Mapping[str, int], mesh: AnyMesh) -> None:
    """Raises `ValueError` if the mesh is not of CPUs or has other axes than `cells`. Raises
    `ValueError` too if the number of cells along an axis is not a power of two, or is not a
    multiple of the number of devices along the axis."""
    sizes = dict(mesh.shape)
    if (platform := meshes.platform_of(mesh)) != "cpu":
        # Seen in programs that were compiled for TPU v5e: the compiler had inlined the function of
        # every cell, although `_apart` (in `walk`) asks for a computation of its own.
        raise ValueError(
            f"same_bits.spmd needs a mesh of CPUs; got a mesh of {platform} devices. There the "
            "compiler fuses the code of a cell with the code around it, so the bits may differ "
            "from mesh to mesh. Use mesh.spmd there."
        )
    argument_checks.whole_numbers("same_bits.spmd", **cells)
    odd = [f"{axis}={n}" for axis, n in cells.items() if n < 1 or n & (n - 1)]
    if odd:
        raise ValueError(
            "same_bits.spmd needs a number of cells that is a power of two along each axis; got "
            f"{', '.join(odd)}. Every sum is a binary tree over the cells, and each device "
            "computes a whole branch of the tree. Use 1, 2, 4, 8, ..."
        )
    if set(sizes) != set(cells) or any(cells[axis] % n for axis, n in sizes.items()):
        raise ValueError(
            "same_bits.spmd needs a mesh with the same axes as `cells`, and the size of each axis "
            f"must divide its number of cells; got the mesh {sizes} for the cells {dict(cells)}. "
            "Give the mesh exactly the axes of `cells`; an axis may have size 1. Along each axis, "
            "the number of devices must be a power of two, and at most the number of cells."
        )


def _mapped(eqn: JaxprEqn, operands: Sequence[Any], mesh: AnyMesh, cells) -> list[Any]:
    """Returns the results of `eqn`, a `shard_map` over the mesh of `cells` (logical devices). Here
    the `shard_map` runs on `mesh`, where a device has one cell or several."""
    (body,) = jaxprs.closed(eqn.params)
    # Along an axis with one cell there is nothing to sum and nothing to split.
    counts = {axis: n for axis, n in cells.items() if n > 1}
    # The program of each of this library's collectives in the body, by the `id` of its equation.
    # `Walk` runs these programs in place of the equations.
    collectives = opened_collectives(jaxprs.opened(body), eqn.params["mesh"])

    def layouts(specs, avals) -> list[TwoForms]:
        """Returns the `TwoForms` of each array: its shapes as a global array, and as a stack of the
        blocks of all cells (logical devices). `avals` are the types of the arrays, and `specs` say
        how the cells split the arrays."""
        return [TwoForms.of(*pair, counts) for pair in zip(specs, avals, strict=True)]

    ins = layouts(eqn.params["in_specs"], jaxprs.types(eqn.invars))
    outs = layouts(eqn.params["out_specs"], jaxprs.types(eqn.outvars))

    def on_device(*blocks):
        """Runs the program for all cells (logical devices) of this device. Each argument and each
        result is the array of a `Stack`: its first dims run over these cells."""
        cells_of_device = Cells(counts, dict(mesh.shape))
        stacks = [Stack(x, layout.axes) for x, layout in zip(blocks, ins, strict=True)]
        results = Walk(cells_of_device, collectives).run(body, stacks)
        # `over` adds dims with copies of the value for those axes of the layout that `x` lacks.
        pairs = zip(results, outs, strict=True)
        return [cells_of_device.over(x, layout.axes).array for x, layout in pairs]

    # The first dims of a stack are split over the mesh.
    in_specs = tuple(PartitionSpec(*layout.axes) for layout in ins)
    out_specs = [PartitionSpec(*layout.axes) for layout in outs]
    stacks = [layout.stacked(x) for layout, x in zip(ins, operands, strict=True)]
    results = jax.shard_map(
        on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )(*stacks)
    return [layout.whole(x) for layout, x in zip(outs, results, strict=True)]
