"""Lints whatever an example maps over devices, and runs nothing of it: python lint_example.py
EXAMPLE."""

import os
import runpy
import sys

import equinox as eqx
import jax
import jax.numpy as jnp

from parallax import lint, mesh

spmd, found, count = mesh.spmd, [], 0


def linted(f, **options):
    """`mesh.spmd`, which lints the program when it is first traced and gives zeros in its stead."""
    mapped = spmd(f, **options)

    def zeros(*arguments):
        global count  # noqa: PLW0603
        shapes = jax.tree.map(
            lambda leaf: (
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if mesh.is_array(leaf) else leaf
            ),
            arguments,
        )
        found.extend(lint.program(mapped, *shapes))
        count += 1
        zero = lambda leaf: (
            jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        )
        results = jax.tree.map(zero, eqx.filter_eval_shape(mapped, *arguments))
        # On the mesh, as the program's own results are.
        return mesh.place(results, options["out_specs"], options["mesh"])

    return zeros


if __name__ == "__main__":
    mesh.spmd = linted
    example, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, os.path.dirname(example))  # as Python does for a script
    try:
        runpy.run_path(example, run_name="__main__")
    except (
        AssertionError,
        ZeroDivisionError,
        FloatingPointError,
    ) as error:  # zeros are no numbers to learn from
        print(f"stopped: {error!r}")
    print(lint.report(found))
    print(f"programs: {count}")
    sys.exit(bool(found) or not count)
