"""Reads a step from a user's file, for the command line. The user names the step as
`path/to/file.py:function`, and `function(mesh)` returns the step and the shapes of its
arguments."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh

from parallax import mesh

FORM = (
    "path/to/file.py:function, where function(mesh) returns (step, shapes), as plan.trace takes "
    "them"
)


def read(program: str, world: AbstractMesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a user's step and the shapes of the step's arguments. `program` is a text such as
    "path/to/file.py:function": this file is run, and this function is called with the mesh `world`.

    Raises:
        ValueError: there is no such file, or the file has no such function, or the function does
            not return a pair (step, shapes).
    """
    path, _, name = program.rpartition(":")
    if not path or not Path(path).is_file():
        raise ValueError(f"plan needs {FORM}; there is no file {path or program!r}.")
    function = runpy.run_path(path).get(name)
    if not callable(function):
        raise ValueError(f"plan needs {FORM}; {path} has no function {name!r}.")
    returned = function(world)
    if not (
        isinstance(returned, tuple)
        and len(returned) == 2
        and callable(returned[0])
        and isinstance(returned[1], tuple)
    ):
        raise ValueError(
            f"plan needs {FORM}; {name} returned {type(returned).__name__}. Return a pair: the "
            "step, and a tuple of its arguments or their shapes."
        )
    return returned


def world(sizes: str) -> AbstractMesh:
    """Returns the abstract mesh that a text such as `data=256,tensor=8` describes. Raises
    `ValueError` if the text has another form, or names an axis twice."""
    try:
        pairs = [part.split("=") for part in sizes.split(",")]
        named = {name.strip(): int(size) for name, size in pairs}
        if len(named) < len(pairs):
            raise ValueError("an axis is named twice")
        return mesh.abstract(**named)
    except ValueError as error:
        raise ValueError(
            "--mesh needs axes, each named once, and sizes of 1 or more, such as "
            f"data=256,tensor=8; got {sizes!r}."
        ) from error
