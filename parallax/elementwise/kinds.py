"""What is known of a value in an optimizer's program: of which leaf it is, element for element, if of one."""

from collections.abc import Sequence
from dataclasses import dataclass

# fmt: off
ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
        "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p",
        "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
        "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul",
        "ne", "neg", "nextafter", "not", "optimization_barrier", "or", "pbroadcast", "pcast", "polygamma",
        "population_count", "pow", "pvary", "real", "reduce_precision", "rem", "reshard", "round", "rsqrt",
        "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub",
        "tan", "tanh", "xor",
    }
)
# fmt: on
LAID_OUT = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})  # of equal numbers: equal numbers
RIGHT = "right on shards"


@dataclass(frozen=True)
class Kind:
    """What is known of a value.

    Attributes:
        name: as in the module's docstring.
        leaf: of what is `own`: the number of the leaf.
        why: of what is `mixed`.
    """

    name: str
    leaf: int = -1
    why: str = ""


UNIFORM, SAME, DONE = Kind("uniform"), Kind("same"), Kind("right")
GATHERED = Kind("right", leaf=-2)  # and whole on every device, as the updates of `zero.sharded`


def own(leaf: int) -> Kind:
    """Element for element that of the leaf."""
    return Kind("own", leaf)


def mixed(why: str) -> Kind:
    """What is not right on a shard."""
    return Kind("mixed", why=why)


def joined(kinds: Sequence[Kind], operation: str) -> Kind:
    """Of an elementwise operation on these."""
    bad = next((kind for kind in kinds if kind.name == "mixed"), None)
    if bad is not None:
        return bad
    arrays = {kind for kind in kinds if kind != UNIFORM}
    if len(arrays) < 2 or arrays == {GATHERED, SAME}:
        return min(arrays, key=lambda kind: kind == SAME, default=UNIFORM)
    if arrays & {DONE, GATHERED} and SAME not in arrays:
        return DONE
    if SAME in arrays:
        return mixed(f"{operation} combines it with an array that is not split like it")
    return mixed(f"{operation} combines two leaves")


def either(a: Kind, b: Kind) -> Kind:
    """Of a value that is the one or the other."""
    bad = next((kind for kind in (a, b) if kind.name == "mixed"), None)
    if bad is not None or a == b:
        return bad or a
    known = {a, b} - {UNIFORM}
    return known.pop() if len(known) == 1 else mixed("it is that of one leaf or another")
