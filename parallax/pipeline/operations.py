"""How much work the parts of a pipeline are: the operations of all products of F, I, W and the head, counted in what JAX traces.

Legend: F a chunk's forward pass, I the input's cotangent, W the gradients of its weights.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh

from parallax import mesh as meshes
from parallax import rules
from parallax._typing import PyTree
from parallax.collectives import Axis, AxisLike
from parallax.jaxprs import inner, opened, types
from parallax.pipeline.exchange import whole
from parallax.pipeline.jobs import Functions, Jobs
from parallax.pipeline.save import Save, residuals
from parallax.schedule import Schedule


class Work(NamedTuple):
    """Operations in products, of one microbatch on one device: 2 for each term of each sum.

    Attributes:
        forward: of F, of one chunk.
        backward: of I, of one chunk; with `save=inputs`, what is computed again is in it.
        weight: of W, of one chunk.
        head: of the head and its gradient.
    """

    forward: int
    backward: int
    weight: int
    head: int

    def costs(self, chunks: int = 1) -> tuple[int, int, int]:
        """F, I and W of a whole stage, as `Schedule.makespan` takes them."""
        return self.forward * chunks, self.backward * chunks, self.weight * chunks


def counted(
    embed: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    schedule: Schedule,
    axis: AxisLike,
    *,
    blocks: Callable[[PyTree], PyTree] = lambda params: params.blocks,
    trainable: PyTree = rules.is_inexact,
    save: Save = residuals,
) -> Callable[..., Work]:
    """The function `(params, batch, *, mesh, in_specs) -> Work` of a pipeline; arrays may be shapes, since nothing runs.

    The arguments are those of `value_and_grad`, and `in_specs` those of its `mesh.spmd`. F + I + W is what F and the whole
    backward pass have: no product is computed twice.
    """
    axis = Axis.of(axis)

    functions = Functions(embed, stage, head, blocks, trainable)

    def counts(params: PyTree, batch: PyTree, *, mesh: Mesh, in_specs: Any) -> Work:
        counts_of_trace: list[Work] = []

        def traced(params, batch):
            jobs = Jobs(
                functions, schedule, axis, params, batch, save=save, send=whole, in_halves=True
            )
            names = "forward", "backward_input", "backward_weight", "head"
            counts_of_trace.append(
                Work(*(_products(opened(jobs.programs[name].program)) for name in names))
            )
            return ()

        arrays, static = eqx.partition(
            params, lambda leaf: eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
        )
        mapped = meshes.spmd(
            lambda params, batch: traced(eqx.combine(params, static), batch),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=(),
        )
        jax.eval_shape(mapped, arrays, batch)
        return counts_of_trace[-1]

    return counts


def _products(jaxpr: Jaxpr) -> int:
    """The operations in a program's products, in all trips of its loops; of a loop of unknown length in one trip."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left, out = types(eqn.invars)[0].shape, types(eqn.outvars)[0]
            total += 2 * out.size * math.prod(left[i] for i in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel, numbers = types(eqn.invars)[1].shape, eqn.params["dimension_numbers"]
            total += (
                2 * types(eqn.outvars)[0].size * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
            )
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += trips * sum(map(_products, inner(eqn)))
    return total
