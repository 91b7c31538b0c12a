"""The lines and files of functions from which the equations of a program were traced."""

import functools
import os
import sysconfig

import equinox as eqx
import jax
import jaxtyping
import optax
from jax.extend.core import Jaxpr, JaxprEqn

from parallax.jaxprs import frames

_HOUSE = os.path.dirname(__file__) + os.sep
_ROOMS = tuple(os.path.join(_HOUSE, room) + os.sep for room in ("lint", "collectives"))
_LIBRARIES = tuple(
    os.path.dirname(str(module.__file__)) + os.sep for module in (jax, eqx, optax, jaxtyping)
)
_STANDARD, _INSTALLED = (
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
)
UNKNOWN = "unknown line"


def source(eqn: JaxprEqn) -> str:
    """Returns the caller's innermost line that made an equation, "file.py:12"; else this
    library's."""
    ours = UNKNOWN
    for frame in frames(eqn):
        name = frame.file_name
        if name.startswith(_ROOMS[0]):  # from here on, the callers of the lint
            break
        line = f"{name}:{frame.line_num}"
        if _is_callers(name):
            return line
        if ours == UNKNOWN and name.startswith(_HOUSE) and not name.startswith(_ROOMS):
            ours = line
    return ours


def maker(eqn: JaxprEqn) -> str:
    """Returns the file of the innermost function outside JAX that made an equation; "" if
    unknown."""
    for frame in frames(eqn):
        name = frame.file_name
        is_standard = name.startswith(_STANDARD) and not name.startswith(_INSTALLED)
        if name.endswith(".py") and not is_standard and not name.startswith(_LIBRARIES[0]):
            return name
    return ""


def is_of_optax(file_name: str) -> bool:
    """Returns whether a file is one of optax."""
    return file_name.startswith(_LIBRARIES[2])


def is_jax_function(jaxpr: Jaxpr) -> bool:
    """Returns whether it was traced from a function of JAX's, as `jnp.where`: its lines may be of
    an earlier call. Those of `eqx.filter_jit` are the caller's."""
    return (jaxpr.debug_info.func_filename or "").startswith(_LIBRARIES[0])


@functools.cache
def _is_callers(file_name: str) -> bool:
    if file_name.startswith("<") and not file_name.startswith(
        ("<stdin>", "<ipython")
    ):  # frozen, or made by beartype
        return False
    standard = file_name.startswith(_STANDARD) and not file_name.startswith(_INSTALLED)
    return bool(file_name) and not standard and not file_name.startswith((_HOUSE, *_LIBRARIES))
