"""Reading traced programs: the jaxprs inside an equation, the parts of a loop, and the caller's line."""

import functools
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

_HOUSE = os.path.dirname(__file__) + os.sep
_ROOMS = tuple(os.path.join(_HOUSE, room) + os.sep for room in ("lint", "collectives"))
_LIBRARIES = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, eqx, optax, jaxtyping))
_STANDARD, _INSTALLED = sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("purelib") + os.sep


UNKNOWN = "unknown line"
COUNTED = re.compile(r"/(\w+)\.(\d+)_of_(\d+)/while\"")  # how a compiled program names a loop in a `counted_scope`


def opened(jaxpr: Any) -> Jaxpr:
    """A jaxpr without its constants' values; JAX 0.12 knows one kind only."""
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """All jaxprs among an equation's parameters."""
    return [opened(jaxpr) for jaxpr in jaxprs_in_params(eqn.params)]


def called(eqn: JaxprEqn) -> Jaxpr | None:
    """The one jaxpr that takes an equation's operands and gives its results, as `jit`'s or `checkpoint`'s; else None."""
    found = inner(eqn)
    fits = len(found) == 1 and len(found[0].invars) == len(eqn.invars) and len(found[0].outvars) == len(eqn.outvars)
    return found[0] if fits else None


def every(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Each equation of a jaxpr and of those inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for each in inner(eqn):
            yield from every(each)


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants and carries; the rest it slices, one dim off each.

    The names of these numbers differ between JAX 0.10 and 0.12; the ranks say it in both.
    """
    body = inner(eqn)[0]
    thinner = lambda outside, inside: sum(a.ndim != b.ndim for a, b in zip(types(outside), types(inside), strict=True))
    sliced, stacked = thinner(eqn.invars, body.invars), thinner(eqn.outvars, body.outvars)
    carries = len(eqn.outvars) - stacked
    return len(eqn.invars) - sliced - carries, carries


def types(atoms: Sequence[Any]) -> list[Any]:
    """The types of operands or results: each has a `dtype`, a `shape` and a `size`."""
    return [atom.aval for atom in atoms]


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number written into the program."""
    return isinstance(atom, Literal)


def source(eqn: JaxprEqn) -> str:
    """The line that an equation is from, "file.py:12": the caller's innermost, or else the one of this library that made it."""
    ours = UNKNOWN
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.file_name.startswith(_ROOMS[0]):  # from here on, who called the lint
            break
        line = f"{frame.file_name}:{frame.line_num}"
        if _is_callers(frame.file_name):
            return line
        if ours == UNKNOWN and frame.file_name.startswith(_HOUSE) and not frame.file_name.startswith(_ROOMS):
            ours = line
    return ours


def origin(eqn: JaxprEqn) -> str:
    """The line that made an equation, wherever it is but in JAX: "clipping.py:77"; "" where that is unknown."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.file_name.endswith(".py") and not frame.file_name.startswith((_LIBRARIES[0], _STANDARD)):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def maker(eqn: JaxprEqn) -> str:
    """The file of the innermost function round an equation that is not of JAX; "" where that is unknown."""
    traceback = eqn.source_info.traceback
    names = [frame.file_name for frame in (traceback.frames if traceback else ()) if frame.file_name.endswith(".py")]
    others = (name for name in names if name.startswith(_INSTALLED) or not name.startswith(_STANDARD))
    return next((name for name in others if not name.startswith(_LIBRARIES[0])), "")


def is_of_optax(file_name: str) -> bool:
    """Whether a file is one of optax."""
    return file_name.startswith(_LIBRARIES[2])


def is_jax_function(jaxpr: Jaxpr) -> bool:
    """Whether it was traced from a function of JAX's, as `jnp.where`: its lines may be of an earlier call."""
    return (jaxpr.debug_info.func_filename or "").startswith(_LIBRARIES)


@functools.cache
def _is_callers(file_name: str) -> bool:
    if file_name.startswith("<") and not file_name.startswith(("<stdin>", "<ipython")):  # frozen, or made by beartype
        return False
    standard = file_name.startswith(_STANDARD) and not file_name.startswith(_INSTALLED)
    return bool(file_name) and not standard and not file_name.startswith((_HOUSE, *_LIBRARIES))


def is_float(aval: Any) -> bool:
    """Whether an array of this type holds real or complex floating-point numbers."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def counted_scope(name: str, *, runs: int, of: int) -> str:
    """A name for the `jax.named_scope` of a loop of one trip or of none: so many trips in so many rounds of the loop around it.

    A table says in which rounds, so the compiler does not know the number. Readers of the compiled program find it in this name.
    """
    return f"{name}.{runs}_of_{of}"
