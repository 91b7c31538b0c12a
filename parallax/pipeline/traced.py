"""A function traced once: its program, the arguments that its results depend on, and the parameters
that it reads by closure.

A pipeline differentiates its three functions (embed, stage, head) with respect to their arguments.
A parameter that they read by closure would have no gradient, so `refuse_closures` raises an error
that names the parameter. A program is a jaxpr with the values of its constants, and
`opened(program)` is the jaxpr without these values. `operands(x)` are the values from which JAX
computed a traced value `x`, as far as JAX remembers them. A value varies along a mesh axis if its
type says that the value may differ between the axis's devices. `Following`, a base class from
`parallax.jaxprs`, computes a property of each value in a program. Here the property is whether the
value depends on certain arguments. The method `run` reads the program. The method `met` returns the
property of an equation's result, from the properties of its operands.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from parallax import mesh
from parallax._typing import PyTree
from parallax.collectives.types import match_varying, operands, varying_axes
from parallax.jaxprs import Following, is_literal, opened, sent_over

Tree = TypeVar("Tree", bound=PyTree)


class Misused(ValueError):
    """The error for blocks or functions with which a pipeline would not train the model that the
    user wrote. The message names the leaf and the cure.

    Attributes:
        kind: a name for the mistake, as `lint.program` gives it.
        where: the dotted path of the leaf.
        harm: what is wrong.
        cure: what to do.
    """

    def __init__(self, kind: str, where: str, harm: str, cure: str):
        super().__init__(f"pipeline: {harm} {cure}")
        self.kind, self.where, self.harm, self.cure = kind, where, harm, cure


class Traced(NamedTuple):
    """A function as a program. A call runs the program, not the function's Python code.

    Attributes:
        program: the jaxpr, whose inputs are the arrays among the arguments.
        out: the tree of results, with a type (shape, dtype, varying axes) for each array.
        used: the tuple of arguments, with a bool in place of each array: whether the results depend
            on this array.
    """

    program: ClosedJaxpr
    out: PyTree
    used: PyTree

    def __call__(self, *arguments: PyTree) -> Any:
        """Returns the results. The arguments must have the structure and types with which the
        function was traced."""
        # The leaves that are not arrays are constants of the program.
        arrays = jax.tree.leaves(eqx.filter(arguments, mesh.is_array))
        # A result that is a constant may be a NumPy array.
        results = map(jnp.asarray, jaxpr_as_fun(self.program)(*arrays))
        return jax.tree.unflatten(jax.tree.structure(self.out), results)


def trace(f: Callable[..., Any], *arguments: PyTree) -> Traced:
    """Returns the program of `f`, traced with `arguments`, which are trees of arrays and other
    leaves. An array may be a `ShapeDtypeStruct`; a leaf that is not an array is a constant of the
    program."""
    arrays, static = eqx.partition(arguments, mesh.is_array)
    program, out = jax.make_jaxpr(
        lambda arrays: f(*eqx.combine(arrays, static)), return_shape=True
    )(arrays)
    jaxpr = opened(program)
    live = _live(jaxpr)
    # For each array among the arguments, whether the results depend on it. The inputs of the opened
    # jaxpr are first the constants, and then the arrays of the arguments.
    leaves, structure = jax.tree.flatten(arrays)
    used = [variable in live for variable in jaxpr.invars[len(jaxpr.invars) - len(leaves) :]]
    return Traced(program, out, jax.tree.unflatten(structure, used))


def settled(x: Tree, f: Callable[[Tree], PyTree]) -> Tree:
    """Returns `x` with varying axes added to its type, until `x` varies along each axis along which
    `f(x)` varies. A loop whose carry begins as `x` and becomes `f(x)` needs this, since the type of
    a carry must not change."""
    # Only the types of `f(x)` count, and `f` may return `ShapeDtypeStruct`s, so zeros, which keep
    # the types, stand for its values. Each round adds at least one varying axis to an array, and
    # the mesh has few, so this ends.
    while True:
        types = jax.tree.map(varying_axes, x)
        x = match_varying(x, jax.tree.map(jnp.zeros_like, f(x)))
        if types == jax.tree.map(varying_axes, x):
            return x


def _live(jaxpr: Jaxpr) -> set[Any]:
    """Returns the variables that the results of `jaxpr` depend on."""
    # From the last equation to the first: an equation is needed if a needed equation after it, or
    # the program, uses its result. One with an effect, such as a print, is needed in any case.
    live = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or live & set(eqn.outvars):
            live |= {atom for atom in eqn.invars if not is_literal(atom)}
    return live


def refuse_closures(name: str, outside: Iterable[Any], params: Iterable[PyTree]) -> None:
    """Raises `Misused` if a function's closure has a trained parameter, or a value computed from a
    trained parameter.

    `name` is the function's name, for the error. `outside` are the constants of the function's
    program, which are the arrays that the function reads by closure. `params` are the trees of
    trained parameters.
    """
    # A parameter's name by the id of its array. A pipeline casts its parameters to varying. A
    # function may close over the array from before the cast, so that array gets the same name.
    sources = {
        id(array): mesh.dotted(path)
        for tree in params
        for path, leaf in jax.tree.leaves_with_path(tree)
        for array in _earlier_forms(leaf)
    }
    # `_source` goes back from a value through the operations that computed it, to a parameter.
    for value in outside:
        source = _source(value, sources) if eqx.is_inexact_array(value) else None
        if source is None:
            continue
        parameter = f"the parameter {sources[source]}" if sources[source] else "the parameters"
        made_of = "" if source == id(value) else "a value made of "
        raise Misused(
            "parameter-by-closure",
            sources[source] or "the parameters",
            f"{name} uses {made_of}{parameter} by closure, so the gradient of {parameter} would "
            "miss this use.",
            f"Read {parameter} from {name}'s first argument, which has all parameters; to leave "
            f"{parameter} out of the gradient, use jax.lax.stop_gradient in {name}.",
        )


def _earlier_forms(leaf: Any) -> Iterator[Any]:
    """Yields a parameter and its earlier forms, the newest first: the value from which the
    parameter was cast or gathered, then that value's own source, and so on."""
    yield leaf
    # Any operation with one operand is followed, not only a cast: a function that reads by closure
    # the value from which a parameter was computed also goes around the first argument.
    while len(before := operands(leaf)) == 1:
        (leaf,) = before
        yield leaf


def _source(value: Any, sources: dict[int, str]) -> int | None:
    """Returns the id of a parameter in `sources` that is the traced value itself, or from which the
    value was computed. Returns None if the search finds no such parameter. The search may miss one,
    since JAX does not record the operands of every value."""
    # A search backwards: the operands, their operands, and so on.
    seen, waiting = set(), [value]
    while waiting:
        # Each tracer is kept alive by the value that was computed from it, so no other object gets
        # its id.
        tracer = waiting.pop()
        if id(tracer) in sources:
            return id(tracer)
        seen.add(id(tracer))
        waiting += [operand for operand in operands(tracer) if id(operand) not in seen]
    return None


def refuse_reading(name: str, used: PyTree, axis_name: Any) -> None:
    """Raises `Misused` if the results of embed or head depend on the blocks.

    `name` is the function's name. `used` is a tree like the blocks: True for each leaf that the
    function's results depend on. `axis_name` is the axis of the stages.
    """
    for path, read in jax.tree.leaves_with_path(used):
        if read:
            raise Misused(
                "blocks-outside-the-stage",
                mesh.dotted(path) or "the blocks",
                f"{name} reads {mesh.dotted(path) or 'the blocks'}, which is split over "
                f"{axis_name!r}. In {name} each device would read only the blocks of its own "
                f"stage, and the blocks would get no gradient from {name}.",
                "Read the blocks in the stage instead. A stage may add a term to the loss: let it "
                "return pipeline.Output(x, loss=...). A weight that embed, head and all stages use "
                "does not belong in the blocks.",
            )


def moves_early(traced: Traced) -> bool:
    """Returns whether the function has a collective that depends on no argument but the first, the
    parameters. That collective could run before the previous tick has ended."""
    # All arguments but the parameters, argument 0, are ready only in their tick.
    return any(map(sent_over, _uses(traced, range(1, len(traced.used)))[False]))


def first_sent(
    traced: Traced, arguments: Collection[int], axes: Collection[str]
) -> JaxprEqn | None:
    """Returns the first collective over one of the mesh axes `axes` that sends a value computed
    from one of the arguments with the indices `arguments`; None if there is none."""
    uses = _uses(traced, arguments)[True]
    return next((eqn for eqn in uses if sent_over(eqn) & set(axes)), None)


def _uses(traced: Traced, arguments: Collection[int]) -> dict[bool, list[JaxprEqn]]:
    """Returns two lists of the equations that have no inner program. Under True are those whose
    operands depend on one of the arguments with the indices `arguments`, and under False the
    others. An equation in a loop may be in both lists."""
    # `used` is a tree like the arguments; here only the number of its leaves counts.
    marks = [
        i in arguments for i, argument in enumerate(traced.used) for _ in jax.tree.leaves(argument)
    ]
    uses = _Uses()
    uses.run(traced.program, marks)
    return uses.equations


class _Uses(Following):
    """Sorts the equations without inner programs by whether an operand depends on a marked
    argument."""

    unknown = False

    def __init__(self):
        self.equations: dict[bool, list[JaxprEqn]] = {False: [], True: []}

    def plain(self, eqn: JaxprEqn, operands: list[bool], aval: Any) -> bool:
        is_marked = self.met(operands)
        self.equations[is_marked].append(eqn)
        return is_marked
