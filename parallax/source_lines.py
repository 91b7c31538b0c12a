"""Finds the source line, or the source file, from which an equation of a program was traced.

`frames(eqn)` are the stack frames of the Python calls that made an equation, the innermost first.
"""

import functools
import os
import sysconfig

import equinox as eqx
import jax
import jaxtyping
import optax
from jax.extend.core import Jaxpr, JaxprEqn

from parallax.jaxprs import frames

# Folders that tell whether a line belongs to this library, to another, to Python, or to the user.
_PACKAGE = os.path.dirname(__file__) + os.sep
_LINT, _COLLECTIVES = (os.path.join(_PACKAGE, name) + os.sep for name in ("lint", "collectives"))
_LIBRARIES = tuple(
    os.path.dirname(str(module.__file__)) + os.sep for module in (jax, eqx, optax, jaxtyping)
)
_STANDARD, _INSTALLED = (
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
)
UNKNOWN = "unknown line"


def source(eqn: JaxprEqn) -> str:
    """Returns the line that made an equation: the whole path of its file and its number, such as
    "/folder/file.py:12".

    The result is the innermost line of the user's code. If there is none, the result is the
    innermost line of this library outside `lint` and `collectives`, since the function that calls a
    collective says more than the collective's own lines. If there is no such line either, the
    result is `UNKNOWN`.
    """
    library_line = UNKNOWN
    for frame in frames(eqn):
        name = frame.file_name
        # The lint itself traced the program. The calls further out only lead to the lint.
        if name.startswith(_LINT):
            break
        line = f"{name}:{frame.line_num}"
        if _is_users_file(name):
            return line
        is_ours = name.startswith(_PACKAGE) and not name.startswith(_COLLECTIVES)
        if library_line == UNKNOWN and is_ours:
            library_line = line
    return library_line


def maker(eqn: JaxprEqn) -> str:
    """Returns the ".py" file of the innermost function that made an equation and that belongs
    neither to JAX nor to Python's standard library. Returns "" if there is no such file.
    """
    for frame in frames(eqn):
        name = frame.file_name
        # Installed packages lie inside the folder of the standard library. `_LIBRARIES[0]` is JAX's
        # folder. Names such as "<frozen ...>" or "<stdin>", without ".py", are no files.
        is_standard = name.startswith(_STANDARD) and not name.startswith(_INSTALLED)
        if name.endswith(".py") and not is_standard and not name.startswith(_LIBRARIES[0]):
            return name
    return ""


def is_of_optax(file_name: str) -> bool:
    """Returns whether a file belongs to optax."""
    # `_LIBRARIES` are the folders of JAX, Equinox, optax and jaxtyping.
    return file_name.startswith(_LIBRARIES[2])


def is_jax_function(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr was traced from a function of JAX, such as `jnp.where`.

    JAX keeps the trace of one of its own functions for later calls, so the lines in the trace may
    belong to an earlier call. The result is false for a function of Equinox. The function that
    `eqx.filter_jit` traces is Equinox's; it calls the user's function, so its trace has the user's
    lines.
    """
    # The first folder of `_LIBRARIES` is JAX's.
    return (jaxpr.debug_info.func_filename or "").startswith(_LIBRARIES[0])


@functools.cache
def _is_users_file(file_name: str) -> bool:
    """Returns whether a file is the user's: it is not in this package, in `_LIBRARIES` or in
    Python's standard library. Files of any other installed package count as the user's."""
    # Frozen modules and functions made by beartype have names such as "<frozen ...>". Lines typed
    # into a prompt ("<stdin>", "<ipython...") or a doctest are the user's. "<string>", the name of
    # code run by `python -c`, is also that of the methods that a dataclass gets.
    if file_name.startswith("<") and not file_name.startswith(("<stdin>", "<ipython", "<doctest")):
        return False
    # Installed packages lie inside the folder of the standard library.
    standard = file_name.startswith(_STANDARD) and not file_name.startswith(_INSTALLED)
    return bool(file_name) and not standard and not file_name.startswith((_PACKAGE, *_LIBRARIES))
