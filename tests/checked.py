"""Checks the package's annotations at run time, as jaxtyping's import hook does, at a third of its
cost.

The wrapper that the hook puts round each function binds the signature at every call and runs
beartype twice: half of the time of a test that traces. Here beartype runs once, and only what has
an array's shape in its annotations opens a context for the sizes of its dims. What is checked is
the same.
"""

import dataclasses
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
        if dataclasses.is_dataclass(function) and not hasattr(function.__init__, "__wrapped__"):
            function.__init__ = checked(function.__init__, typechecker=typechecker)
        return function
    if not function.__annotations__:
        return function
    with_types = typechecker(function)
    if with_types is function:  # no annotation rules anything out
        return function
    hide(with_types)
    if not any(map(has_dims, function.__annotations__.values())):
        return with_types

    @functools.wraps(function)
    def with_sizes(*args, **kwargs):
        with jaxtyped("context"):
            return with_types(*args, **kwargs)

    hide(with_sizes)
    return with_sizes


def hide(wrapper: Any) -> None:
    """Counts a wrapper's frames as jaxtyping's own, which all who look for the caller's line in a
    traceback leave out."""
    wrapper.__code__ = wrapper.__code__.replace(co_filename=jaxtyped.__code__.co_filename)


def has_dims(annotation: Any) -> bool:
    """Whether an annotation names the dims of an array; so it may if it is a string."""
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    parts = annotation if isinstance(annotation, list) else typing.get_args(annotation)
    return isinstance(annotation, str) or any(map(has_dims, parts))
