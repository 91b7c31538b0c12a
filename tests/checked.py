"""Checks the package's annotations at run time, as jaxtyping's import hook does, at a third of its cost.

The wrapper that the hook puts round each function binds the signature at every call and runs beartype twice: half of the time
of a test that traces. Here beartype runs once, and only what has an array's shape in its annotations opens a context for the
sizes of its dims. What is checked is the same.
"""

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping

jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Takes the place of jaxtyping's wrapper in modules that the hook loads from now on."""
    jaxtyping.jaxtyped = decorator


def decorator(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of a function or a class, as the import hook writes it over each."""
    return functools.partial(checked, typechecker=typechecker)


def checked(function: Any, *, typechecker: Callable[[Any], Any]) -> Any:
    """The function, which refuses arguments and results that its annotations rule out."""
    if inspect.isclass(function):
        return jaxtyped(function, typechecker=typechecker)
    if not function.__annotations__:
        return function
    with_types = typechecker(function)
    if any(map(has_dims, function.__annotations__.values())):
        return sizes()(with_types)
    return with_types


@contextlib.contextmanager
def sizes():
    """Sizes of dims of one call. (As a decorator it adds no frame of ours to a traceback, which would count as the caller's.)"""
    with jaxtyped("context"):
        yield


def has_dims(annotation: Any) -> bool:
    """Whether an annotation names the dims of an array; so it may if it is a string."""
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    parts = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    return isinstance(annotation, str) or any(map(has_dims, parts))
