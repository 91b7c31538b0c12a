"""Finds tokens that are in another order than the program expects.

A program with split tokens has a constant table, of shape [devices, tokens of a device], with the
places of the tokens in the text. `context.positions` makes this table. The values of a batch show
the order of its tokens, since each target is the next token of the text.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from parallax import jaxprs
from parallax.lint import mistakes
from parallax.lint.finding import Finding
from parallax.trees import entry_axes, is_array


def tokens_out_of_order(program: ClosedJaxpr, args: tuple[Any, ...]) -> Iterator[Finding]:
    """Yields a finding for inputs and targets whose tokens are not in the order that the program's
    table gives. The table has the place of each token in the text.

    `args` are the arguments of the program; without their values nothing is found.
    """
    leaves = filter(is_array, jax.tree.leaves(args))
    # A program that was traced before comes without `args`: its arguments are not known (None).
    arguments = [_whole_numbers(leaf) for leaf in leaves] or [None] * len(program.in_avals)
    for eqn, values in _shard_maps(program, arguments):
        sizes = eqn.params["mesh"].shape
        known_operands = [
            (value, spec)
            for value, spec in zip(values, eqn.params["in_specs"], strict=True)
            if value is not None
        ]
        # A table of places is whole on all devices: no axis is in its spec.
        tables = [value for value, spec in known_operands if _is_table(value) and not any(spec)]
        # Any two arrays of one shape and spec may be inputs and targets.
        for (first, spec), (second, second_spec) in itertools.permutations(known_operands, 2):
            if first.shape == second.shape and spec == second_spec:
                yield from _differently_ordered(first, second, spec, sizes, tables)


def _differently_ordered(
    tokens: np.ndarray,
    targets: np.ndarray,
    spec: PartitionSpec,
    sizes: Mapping[str, int],
    tables: Sequence[np.ndarray],
) -> Iterator[Finding]:
    """Yields a finding for each of `tables` that contradicts the order of the tokens in the batch.
    A table, [devices, tokens of a device], has the place of each token in the text. `sizes` gives
    the number of devices on each axis."""
    for dim, entry in enumerate(spec):
        axes = entry_axes(entry)
        devices = math.prod(sizes[axis] for axis in axes)
        for table in tables:
            # The table must have as many devices and tokens as this dim.
            if len(table) != devices or table.size != tokens.shape[dim]:
                continue
            # The tokens in the order of the text, if they are split as the table says.
            in_order = np.argsort(table.reshape(-1))
            placed, placed_targets = tokens.take(in_order, dim), targets.take(in_order, dim)
            # It is a mistake if each target is the next token in the given order, and not in that
            # of the table. If all tokens are equal, both orders pass.
            if _are_successive(tokens, targets, dim) and not _are_successive(
                placed, placed_targets, dim
            ):
                yield mistakes.tokens_not_split(tokens, dim, frozenset(axes), devices)


def _are_successive(tokens: np.ndarray, targets: np.ndarray, dim: int) -> bool:
    """Returns whether each target along `dim` is the token at the next place in `tokens`. The last
    target is not compared, since `tokens` has no next place for this target."""
    later, targets = np.moveaxis(tokens, dim, 0)[1:], np.moveaxis(targets, dim, 0)[:-1]
    return bool((later == targets).all())


def _is_table(value: np.ndarray) -> bool:
    """Returns whether an array is a table [devices, tokens of a device] that has each place in the
    text once."""
    return value.ndim == 2 and bool((np.sort(value, axis=None) == np.arange(value.size)).all())


def _whole_numbers(value: Any) -> np.ndarray | None:
    """Returns a value as a NumPy array if it is an array of whole numbers whose elements are all on
    this machine. Returns None for any other value.
    """
    if isinstance(value, jax.Array):  # a tracer and a deleted (donated) array have no values
        if isinstance(value, Tracer) or value.is_deleted():
            return None
        if not value.is_fully_addressable:
            return None
    dtype = None if isinstance(value, jax.ShapeDtypeStruct) else getattr(value, "dtype", None)
    return np.asarray(value) if dtype and jnp.issubdtype(dtype, jnp.integer) else None


def _shard_maps(
    program: Jaxpr | ClosedJaxpr, arguments: Sequence[np.ndarray | None]
) -> Iterator[tuple[JaxprEqn, list[np.ndarray | None]]]:
    """Yields each `shard_map` of a program, with the value of each operand. The value is None if it
    is not known. It is known only of arrays that reach the `shard_map` unchanged: constants of
    whole numbers, and arguments of the program that are not None in `arguments`.

    A `shard_map` inside a call, such as a call of `jit`, is found too. In the body of a `scan`, a
    carry has its initial value. An array that the `scan` slices has its slice 0 there, even if the
    `scan` begins with the last slice.
    """
    jaxpr = jaxprs.opened(program)  # without the values of its constants
    # Not strict: only a `ClosedJaxpr` has the values of its constants (`consts`).
    constants = map(_whole_numbers, getattr(program, "consts", ()))
    known: dict[Any, np.ndarray | None] = dict(zip(jaxpr.constvars, constants, strict=False))
    known |= dict(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        values = [None if jaxprs.is_literal(atom) else known.get(atom) for atom in eqn.invars]
        bodies = jaxprs.closed(eqn.params)  # the jaxprs among the parameters
        if eqn.primitive.name == "shard_map":
            yield eqn, values
        # A call passes its operands on to its only body.
        elif len(bodies) == 1 and len(jaxprs.opened(bodies[0]).invars) == len(values):
            if eqn.primitive.name == "scan":
                # A scan's operands are constants, carries, and then arrays of which each iteration
                # gets a slice. One iteration is enough, so only the first slices are read.
                constants_and_carries = sum(jaxprs.scan_parts(eqn))
                firsts = map(_first, values[constants_and_carries:])
                values = [*values[:constants_and_carries], *firsts]
            yield from _shard_maps(bodies[0], values)


def _first(value: np.ndarray | None) -> np.ndarray | None:
    """Returns the first slice of an array, or None if there is none or the array is not known."""
    return None if value is None or not len(value) else value[0]
