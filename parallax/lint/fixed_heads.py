"""Finds attention whose shard on a device has as many heads as the whole model.

The number of heads of an `eqx.nn.MultiheadAttention` is static. If its projections are split, a
device has only some of their outputs. The attention still cuts these outputs into as many heads as
the whole model has, so each head is narrower than in the whole model.
"""

import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from parallax import jaxprs, source_lines
from parallax.lint import mistakes
from parallax.lint.finding import Finding
from parallax.lint.values import GATHERS, LINEAR
from parallax.trees import entry_axes


def narrower_heads(program: ClosedJaxpr, args: tuple[Any, ...]) -> Iterator[Finding]:
    """Yields, for each attention in `args`, a finding for each source line at which a device
    reshapes its part of the attention's outputs into as many heads as the whole model has.

    `program` was traced for the arguments `args`, which are whole arrays, not shards.
    """
    modules = filter(_is_attention, jax.tree.leaves(args, is_leaf=_is_attention))
    maps = [eqn for eqn in jaxprs.every(program.jaxpr) if eqn.primitive.name == "shard_map"]
    for module in modules:
        # The queries stand for all projections, which have the same number of heads. A frozen or
        # masked attention, or one of replaced projections, may have no such array.
        heads, weight = module.num_heads, getattr(module.query_proj, "weight", None)
        shape = getattr(weight, "shape", ())  # [..., outputs, inputs]
        if len(shape) < 2:
            continue
        for eqn in maps:
            # An argument of this shape is taken for a weight of this attention. The reshape into
            # `heads` heads, which is looked for below, confirms it.
            for axes, size in _splits(eqn, shape):
                outputs = shape[-2] // size  # those of one device
                if _is_gathered(eqn, (outputs, shape[-1]), shape[-2:]):
                    continue
                for line in _lines_that_cut(eqn, outputs, (heads, outputs // heads)):
                    yield mistakes.fixed_number_of_heads(heads, frozenset(axes), size, line)


def _is_attention(node: Any) -> bool:
    """Returns whether a node of a model is an attention with a static number of heads."""
    return isinstance(node, eqx.nn.MultiheadAttention)


def _splits(shard_map: JaxprEqn, shape: tuple[int, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields a pair `(axes, devices)` for each argument of the `shard_map` that may be a split
    weight of a projection: it has the shape `shape`, [..., outputs, inputs], and its dim of outputs
    is split over `axes`. `devices` is the number of devices along these axes.
    """
    sizes = shard_map.params["mesh"].shape
    avals = jaxprs.types(shard_map.invars)
    # A set: the projections have the same spec and type, which would give equal findings.
    for spec, aval in {*zip(shard_map.params["in_specs"], avals, strict=True)}:
        # A shorter spec has no entry for the dim of the outputs, the last but one.
        if aval.shape == shape and len(spec) >= aval.ndim - 1:
            axes = entry_axes(spec[aval.ndim - 2])
            size = math.prod(sizes[axis] for axis in axes)
            if size > 1:
                yield axes, size


def _is_gathered(shard_map: JaxprEqn, part: tuple[int, int], whole: tuple[int, int]) -> bool:
    """Returns whether the body of a `shard_map` gathers matrices of the shape `part` to `whole`, as
    ZeRO-3 does before it uses a weight. The devices then make all outputs of the projections."""
    return any(
        jaxprs.types(eqn.invars)[0].shape[-2:] == part
        and jaxprs.types(eqn.outvars)[0].shape[-2:] == whole
        for body in jaxprs.inner(shard_map)
        for eqn in jaxprs.every(body)
        if eqn.primitive.name in GATHERS | {LINEAR}
    )


def _lines_that_cut(shard_map: JaxprEqn, outputs: int, parts: tuple[int, int]) -> list[str]:
    """Returns the source lines of the operations in a `shard_map` that reshape a last dim of size
    `outputs` into two dims of the sizes `parts`: the number of heads and the width of a head.
    """
    lines = {}  # a dict, as a set would not keep their order
    for body in jaxprs.inner(shard_map):
        for eqn in jaxprs.every(body):
            if eqn.primitive.name == "reshape":
                before, after = (
                    jaxprs.types(atoms)[0].shape for atoms in (eqn.invars, eqn.outvars)
                )
                # Slices, and not indices, since a shape may be empty.
                if before[-1:] == (outputs,) and after[-2:] == parts:
                    lines[source_lines.source(eqn)] = None
    return list(lines)
