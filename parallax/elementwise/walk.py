"""An optimizer's program on shards and the one on wholes, walked through side by side."""

import dataclasses
import functools
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from parallax import trees
from parallax.collectives.types import axes_of_type, varying_axes
from parallax.elementwise.kinds import DONE, ELEMENTWISE, GATHERED, LAID_OUT, RIGHT, SAME, UNIFORM, Kind, either, joined, mixed
from parallax.jaxprs import called, closed, inner, is_literal, origin, types


class Differs(Exception):
    """Two programs are not the same up to sizes."""


PLACES = ("sharding", "out_sharding", "mesh")  # parameters that say where an array lies
Pair = tuple[Any, Any]  # of the program on shards, and of that on wholes


class Walk:
    """Both programs, equation by equation; `outer` is the line of the call that is being walked through."""

    def __init__(self, outer: str = "an unknown line"):
        self.outer = outer

    def origin(self, eqn: JaxprEqn) -> str:
        """The line of an equation, or of the call that it is part of."""
        return origin(eqn) or self.outer

    def run(self, jaxprs: Pair, consts: Pair, kinds: Sequence[Kind]) -> list[Kind]:
        """The kinds of the results, from those of the arguments."""
        small, large = jaxprs
        if len(small.eqns) != len(large.eqns) or len(small.outvars) != len(large.outvars):
            raise Differs(f"it has {len(large.eqns)} operations where the shard's has {len(small.eqns)}")
        known: dict[Any, tuple[Kind, Any]] = {}  # for each variable its kind, and its twin
        for a, b, value in zip(small.constvars, large.constvars, zip(*consts, strict=True) if consts[0] else (), strict=True):
            known[a] = self.constant(*value), b
        for a, b, kind in zip(small.invars, large.invars, kinds, strict=True):
            known[a] = kind, b
        for eqn, twin in zip(small.eqns, large.eqns, strict=True):
            if eqn.primitive != twin.primitive:
                raise Differs(f"{twin.primitive} at {self.origin(twin)}, where the shard's has {eqn.primitive}")
            arguments = [self.kind(known, *atoms, eqn) for atoms in zip(eqn.invars, twin.invars, strict=True)]
            for a, b, kind in zip(eqn.outvars, twin.outvars, self.results(eqn, twin, arguments), strict=True):
                known[a] = kind, b
        return [self.kind(known, a, b, None) for a, b in zip(small.outvars, large.outvars, strict=True)]

    def kind(self, known: dict[Any, tuple[Kind, Any]], a: Any, b: Any, eqn: JaxprEqn | None) -> Kind:
        """Of an operand, which must be the same in both programs."""
        if is_literal(a) != is_literal(b):
            raise Differs(f"other operands of {eqn.primitive if eqn else 'the result'}")
        if is_literal(a):
            return self.constant(a.val, b.val)
        kind, twin = known[a]
        if twin is not b:
            raise Differs(f"other operands of {eqn.primitive if eqn else 'the result'}")
        return kind

    def constant(self, a: Any, b: Any) -> Kind:
        """Of numbers that are written into the programs."""
        if isinstance(a, Tracer):
            if split_over(a):
                return mixed("it uses a value from outside that differs between devices")
            return SAME if np.size(a) > 1 else UNIFORM
        if np.shape(a) != np.shape(b):
            return mixed("it uses an array of numbers that has a shard's size")
        a, b = _numbers(a), _numbers(b)
        if not np.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact)):
            raise Differs(f"it has the number {b} where the shard's has {a}")
        return UNIFORM if np.size(a) <= 1 else SAME

    def results(self, eqn: JaxprEqn, twin: JaxprEqn, arguments: Sequence[Kind]) -> list[Kind]:
        """The kinds of an equation's results."""
        name, sizes = eqn.primitive.name, _sizes(eqn, twin)
        if eqn.params.get("name") == RIGHT:
            return [DONE if differ(types(eqn.outvars)) else GATHERED]
        if name == "cond":
            return self.branches(eqn, twin, arguments)
        if (body := called(eqn)) is not None and (of_twin := called(twin)) is not None and name not in ("while", "scan"):
            return Walk(self.origin(eqn)).run((body, of_twin), _constants(eqn, twin)[0], arguments)
        if name in ELEMENTWISE:
            self.compare(eqn, twin)
            kind = joined(arguments, f"{name} at {self.origin(eqn)}")
            return [kind] if len(eqn.outvars) == 1 else list(arguments)
        if name in LAID_OUT and (arguments[0] == UNIFORM or (_keeps_shape(eqn) and _keeps_shape(twin))):
            return [arguments[0]]
        bad = next((kind for kind in arguments if kind.name == "mixed"), None)
        if bad is None and any(kind.name in ("own", "right") for kind in arguments):
            bad = mixed(f"{name} at {self.origin(eqn)} uses more than one element")
        if bad is None and sizes:
            bad = mixed(f"{name} at {self.origin(eqn)} depends on the shard's size")
        if bad is None and differ(types(eqn.outvars)) and not differ(types(eqn.invars)):
            bad = mixed(f"{name} at {self.origin(eqn)} differs between devices")
        if bad is None and eqn.outvars:  # a print returns nothing, so its function does not matter
            self.compare(eqn, twin)
            bad = self.inside(eqn, twin)
        return [bad or _same(aval) for aval in types(eqn.outvars)]

    def inside(self, eqn: JaxprEqn, twin: JaxprEqn) -> Kind | None:
        """What is mixed in the programs inside an equation, such as a loop's, whose operands are the same on all devices."""
        walk, found = Walk(self.origin(eqn)), []
        for a, b, consts in zip(inner(eqn), inner(twin), _constants(eqn, twin), strict=True):
            found += walk.run((a, b), consts, [_same(aval) for aval in types(a.invars)])
        return next((kind for kind in found if kind.name == "mixed"), None)

    def branches(self, eqn: JaxprEqn, twin: JaxprEqn, arguments: Sequence[Kind]) -> list[Kind]:
        """Of a conditional: each result is what it is in all branches."""
        choice, *rest = arguments
        if choice not in (UNIFORM, SAME):
            return [mixed(f"cond at {self.origin(eqn)} depends on the elements")] * len(eqn.outvars)
        every_branch = [
            self.run((a, b), consts, rest) for a, b, consts in zip(inner(eqn), inner(twin), _constants(eqn, twin), strict=True)
        ]
        return [functools.reduce(either, kinds) for kinds in zip(*every_branch, strict=True)]

    def compare(self, eqn: JaxprEqn, twin: JaxprEqn) -> None:
        """Refuse parameters that differ, such as an exponent, the bounds of a slice or a loop's trips."""
        for name, value in eqn.params.items():
            if name not in PLACES and not closed({name: value}) and not _alike(value, twin.params[name]):
                of = f"{eqn.primitive} at {self.origin(eqn)}"
                raise Differs(f"{of} has {name}={twin.params[name]} where the shard's has {value}")


def _same(aval: Any) -> Kind:
    """Of a value of this type that is the same on all devices."""
    return UNIFORM if aval.size <= 1 else SAME


def _alike(a: Any, b: Any) -> bool:
    """Whether two parameters are the same; functions, which each trace may make anew, if their parts are."""
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return isinstance(a, Tracer) and isinstance(b, Tracer) and np.shape(a) == np.shape(b)
    if trees.is_array(a) and trees.is_array(b):
        return np.array_equal(_numbers(a), _numbers(b))
    parts, others = _parts(a), _parts(b)
    if parts is None or others is None or type(a) is not type(b):
        return a is b or str(a) == str(b)
    return len(parts) == len(others) and all(x is a or _alike(x, y) for x, y in zip(parts, others, strict=True))


def _parts(x: Any) -> tuple[Any, ...] | None:
    """What a parameter is made of: a function, of its code and of what it takes from where it was made. Of others None."""
    match x:
        case FunctionType():
            defaults = (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
            return x.__code__, *(cell.cell_contents for cell in x.__closure__ or ()), *defaults
        case functools.partial():
            return x.func, *x.args, *x.keywords.items()
        case tuple():
            return x
        case _ if dataclasses.is_dataclass(x):  # as JAX's record of a callback
            return tuple(getattr(x, field.name) for field in dataclasses.fields(x))
    return None


def _keeps_shape(eqn: JaxprEqn) -> bool:
    """Whether an equation that only rearranges an array leaves each element in its place."""
    return types(eqn.invars)[0].shape == types(eqn.outvars)[0].shape and eqn.params.get("dimensions") is None


def _sizes(eqn: JaxprEqn, twin: JaxprEqn) -> bool:
    """Whether a shape of this equation is one of a shard."""
    ours, theirs = (types([*each.invars, *each.outvars]) for each in (eqn, twin))
    return any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True))


def _constants(eqn: JaxprEqn, twin: JaxprEqn) -> list[Pair]:
    """For each jaxpr among the parameters its constants, in both programs."""
    both = ([getattr(jaxpr, "consts", ()) for jaxpr in closed(each.params)] for each in (eqn, twin))
    return list(zip(*both, strict=True))


def split_over(x: Any) -> frozenset[str]:
    """The axes of more than one device along which an array differs."""
    return frozenset(name for name in varying_axes(x) if lax.axis_size(name) > 1)


def dtype(x: Any) -> Any:
    """Of an array, or of a key of random numbers."""
    return jax.typeof(x).dtype


def _numbers(x: Any) -> np.ndarray:
    """Those of an array, or of a key of random numbers."""
    if not jnp.issubdtype(dtype(x), jax.dtypes.prng_key):
        return np.asarray(x)
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.random.key_data(x))


def differ(types_: Sequence[Any]) -> bool:
    """Whether values of these types may differ between devices."""
    return any(lax.axis_size(name) > 1 for each in types_ for name in axes_of_type(each))
