"""Finds the collectives between a wrong value and the values reported before it in a program.

A *tap* is an equation that reports a value. The tap's `mark` has a `path`, which names the value in
the model. The tap's `way` says whether the value belongs to the forward or the backward pass.
`_SliceReader` goes backward from one value, through the equations that made it, to the nearest
taps.

A *body* is a record of a jaxpr and its place in the program. It has the body around the jaxpr
(`parent`), the equation of `parent` that runs the jaxpr (`eqn`), the ids of all equations around
the jaxpr (`calls`, which tell apart several calls of one jaxpr), and the equation that makes each
variable of the jaxpr (`makers`). `jaxprs.inner(eqn)` returns the jaxprs in an equation.
`jaxprs.called(eqn)` returns the jaxpr of the function that an equation calls, or None if it calls
none. `jaxprs.every(jaxpr)` yields the equations of a jaxpr and of all jaxprs in it.
"""

import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from parallax.collectives import types
from parallax.jaxprs import (
    COLLECTIVES,
    called,
    every,
    inner,
    is_literal,
    opened,
    scan_parts,
)
from parallax.source_lines import is_jax_function
from parallax.taps import LINEAR

# The folders of this package and of its collectives.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_COLLECTIVES = os.path.join(_PACKAGE, "collectives") + os.sep
# Stack frames in these files and in libraries are left out: a user does not look for a mistake
# there.
_SKIPPED_FILES = (
    os.path.join(_PACKAGE, "bisect") + os.sep,
    *(os.path.join(_PACKAGE, name) for name in ("taps.py", "recording.py")),
)
_LIBRARIES = (
    *(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages")),
    *("<frozen", f"{os.sep}lib{os.sep}python"),
)
_NAMED_COLLECTIVES = frozenset(
    {
        *("all_reduce", "all_mean", "all_gather", "reduce_scatter", "all_to_all", "all_max"),
        *("permute", "send_next"),
    }
)


class ProgramSlice(NamedTuple):
    """The part of a program that computes a value from the values reported just before it. A *tap*
    is an equation that reports a value.

    Attributes:
        taps: the taps at which this part of the program begins, each as `(path, way)`. `path` is
            the name of the reported value. `way` is the pass that the value belongs to: "forward",
            "backward", or "after" the backward pass.
        collectives: a description of each collective in this part. The collective nearest to the
            computed value comes first.
        functions: the Python functions that made the equations of this part, as `file.py:function`.
            The function nearest to the computed value comes first.
        callers: the functions that called the `functions`, in no order.
    """

    taps: tuple[tuple[str, str], ...]
    collectives: tuple[str, ...]
    functions: tuple[str, ...]
    callers: frozenset[str]


class _Body(NamedTuple):
    """A jaxpr and its place in the program.

    Attributes:
        jaxpr: the jaxpr.
        parent: the body that contains the jaxpr; None for the whole program.
        eqn: the equation of the parent that runs the jaxpr; None for the whole program.
        calls: the ids of the equations around the jaxpr, the outermost first. JAX may use one jaxpr
            for several calls; these ids tell the bodies of the calls apart.
        makers: the equation that makes each variable of the jaxpr.
    """

    jaxpr: Jaxpr
    parent: "_Body | None"
    eqn: JaxprEqn | None
    calls: tuple[int, ...]
    makers: dict[Any, JaxprEqn]


def before_tap(program: Jaxpr, path: str, way: str, *, numbers: bool = False) -> ProgramSlice:
    """Returns the part of a program that computes a reported value from the values reported just
    before it.

    A *tap* is an equation that reports a value. The part has the taps of the earlier values, and
    the collectives and functions between these taps and the computed value. `path` is the name of
    the computed value, and `way` is its pass: "forward", "backward", or "after" the backward pass.
    A tap also reports the number of the microbatch and the number of the layer. If `numbers` is
    true, the part also has the code that computes these two numbers, since a right value may be
    reported under a wrong number.
    """
    # `follow` goes back from an operand to the nearest taps, and collects what is on the way.
    reader = _SliceReader()
    for body in _bodies(program, None, None):
        for eqn in body.jaxpr.eqns:
            if eqn.primitive.name != "tap" or eqn.params["way"] != way:
                continue
            if eqn.params["mark"].path == path:
                # The operands of a tap are the value, the device's index along each mesh axis of
                # `sizes`, the number of the microbatch, and the number of the layer.
                first = 1 + len(eqn.params["mark"].sizes)
                reader.follow(eqn.invars[0], body)
                for atom in eqn.invars[first : first + 2] if numbers else ():  # microbatch, layer
                    reader.follow(atom, body)
    return reader.program_slice()


def before_result(program: Jaxpr, place: int) -> ProgramSlice:
    """Returns the part of a program that computes its result number `place` from the values
    reported just before it. The part has the taps (equations that report a value) of these values,
    and the collectives and functions between the taps and the result."""
    reader = _SliceReader()
    reader.follow(program.outvars[place], _body(program, None, None))
    return reader.program_slice()


def _body(jaxpr: Jaxpr, parent: _Body | None, eqn: JaxprEqn | None) -> _Body:
    """Returns a jaxpr as a `_Body`. `parent` is the body around the jaxpr, and `eqn` is the
    equation of `parent` that runs the jaxpr. Both are None for the whole program."""
    calls = () if parent is None else (*parent.calls, id(eqn))
    makers = {var: maker for maker in jaxpr.eqns for var in maker.outvars}
    return _Body(jaxpr, parent, eqn, calls, makers)


def _bodies(jaxpr: Jaxpr, parent: _Body | None, eqn: JaxprEqn | None) -> Iterator[_Body]:
    """Yields a jaxpr and all jaxprs inside it, as bodies, the outer ones first. `parent` is the
    body around the jaxpr, and `eqn` is the equation of `parent` that runs it."""
    body = _body(jaxpr, parent, eqn)
    yield body
    for inner_eqn in jaxpr.eqns:
        for inner_jaxpr in inner(inner_eqn):
            yield from _bodies(inner_jaxpr, body, inner_eqn)


class _SliceReader:
    """Goes back from a value to the nearest taps (equations that report a value). Collects these
    taps, and the collectives and functions between them and the value."""

    def __init__(self):
        """Begins with nothing collected; `program_slice` returns what was collected."""
        # The variables that were followed, each with the `calls` of its body.
        self.seen: set[tuple[tuple[int, ...], Any]] = set()
        # The bodies of opened calls, by the id of the called jaxpr and the body's own `calls`.
        self.bodies: dict[tuple[int, tuple[int, ...]], _Body] = {}
        # What was collected: the fields of `ProgramSlice`. Dicts without values are sets that keep
        # their order.
        self.taps: dict[tuple[str, str], None] = {}
        self.collectives: dict[str, None] = {}
        self.functions: dict[str, None] = {}
        self.callers: set[str] = set()

    def program_slice(self) -> ProgramSlice:
        """Returns the collected taps, collectives, functions and callers as a `ProgramSlice`."""
        return ProgramSlice(
            tuple(self.taps),
            tuple(self.collectives),
            tuple(self.functions),
            frozenset(self.callers),
        )

    def follow(self, atom: Any, body: _Body) -> None:
        """Goes back from `atom` to the nearest taps (equations that report a value). `atom` is an
        operand of an equation of `body`, or a result of `body`.

        On the way, `_inputs` collects the taps, the collectives, and the Python functions that made
        the equations. In each of these three collections, the item nearest to `atom` comes first.
        """
        waiting = [(atom, body)]
        while waiting:
            atom, body = waiting.pop(0)
            # JAX may use one jaxpr, with the same variables, for several calls: `body.calls`, the
            # calls around the body, tell them apart.
            if is_literal(atom) or (body.calls, atom) in self.seen:
                continue
            self.seen.add((body.calls, atom))
            eqn = body.makers.get(atom)  # None for an input of the body
            waiting += self._outside(atom, body) if eqn is None else self._inputs(eqn, atom, body)

    def _inputs(self, eqn: JaxprEqn, atom: Any, body: _Body) -> list[tuple[Any, _Body]]:
        """Returns the variables from which `follow` goes on after `eqn`, the equation of `body`
        that computes `atom`. Each variable is returned with the body whose jaxpr it belongs to.

        There are three kinds of equations:

        - A tap, an equation that reports a value, is collected. The search ends at a tap, so no
          variable is returned.
        - A call of a function, or a `scan`, is opened, and nothing is collected. The result of its
          jaxpr that becomes `atom` is returned, so `follow` goes on inside this jaxpr.
        - Any other equation, such as a `while` or a `cond`, is noted: `_note` collects the
          collectives that the equation runs, and the Python functions that made the equation. All
          equations inside its jaxprs are noted too. The operands of the equation are returned.

        A tap whose `way` is LINEAR belongs to a derivative and reports no value. So a LINEAR tap is
        of the third kind. A call of one of JAX's own functions is also of the third kind, but its
        jaxpr is left out (see `_is_cached`).
        """
        is_tap = eqn.primitive.name == "tap"
        # A LINEAR tap is in the derivative of a forward pass, and reports no values.
        if is_tap and eqn.params["way"] != LINEAR:
            self.taps[eqn.params["mark"].path, eqn.params["way"]] = None
            return []
        is_scan = eqn.primitive.name == "scan"
        called_jaxpr = inner(eqn)[0] if is_scan else called(eqn)
        # JAX caches the jaxprs of its own functions, such as jnp.where, with the source lines of
        # their first call in the process. Only the equation that calls the function has the source
        # lines of this call. So the equation is noted, and the jaxpr is not opened.
        is_cached = not is_scan and _is_cached(called_jaxpr)
        if called_jaxpr is not None and not is_cached:
            inside = self._inside(called_jaxpr, body, eqn)
            # An equation has the results of the jaxpr that it calls, in the same order.
            return [(called_jaxpr.outvars[eqn.outvars.index(atom)], inside)]
        self._note(eqn, body)
        if not is_cached:
            # A `while` and a `cond` are not opened: all their code counts, even code that does not
            # compute `atom`, and a tap in them does not end the search. `inside` is the body that
            # holds `inner_eqn`: `_note` looks for the mesh from there outward, since a branch may
            # itself hold the `shard_map`.
            for jaxpr in inner(eqn):
                for inside in _bodies(jaxpr, body, eqn):
                    for inner_eqn in inside.jaxpr.eqns:
                        self._note(inner_eqn, inside)
        # Only the first operand of a tap is its value. The others are the numbers of its report.
        operands = eqn.invars[:1] if is_tap else eqn.invars
        return [(operand, body) for operand in operands]

    def _note(self, eqn: JaxprEqn, body: _Body) -> None:
        """Collects the functions that made an equation, and the collectives that the equation runs.
        The innermost function of the equation's Python stack goes to `functions`, the others go to
        `callers`.
        """
        frames = _frames(eqn)
        names = [f"{_short(frame.file_name)}:{frame.function_name}" for frame in frames]
        self.functions |= dict.fromkeys(names[:1])
        self.callers.update(names[1:])
        # `_caller` adds the source lines that called the collective: " in A for B".
        for name, axes in _collectives(eqn, _mesh(body)):
            self.collectives[f"{name} over {axes}{_caller(eqn)}"] = None

    def _outside(self, atom: Any, body: _Body) -> list[tuple[Any, _Body]]:
        """Returns the variables on which `atom`, an input of `body`, directly depends. Each
        variable is returned with the body whose jaxpr it belongs to.

        The returned list has the operand that the equation around `body` passes as `atom`. If
        `atom` is the carry of a loop, the list also has the carry that the previous iteration
        returned. The list is empty for an argument of the whole program and for a constant.
        """
        if body.eqn is None or body.parent is None or atom not in body.jaxpr.invars:
            return []
        place = body.jaxpr.invars.index(atom)
        # In a call, a `shard_map` or a `scan`, the equation's operands stand in the order of the
        # jaxpr's inputs. A Pallas kernel has more inputs than its equation has operands, so the
        # slice below may be empty.
        operands, params = body.eqn.invars, body.eqn.params
        # The body of the loop, and the places of the carry among the inputs of `body.jaxpr`.
        step, carry = body.jaxpr, range(0)
        match body.eqn.primitive.name:
            case "cond":
                operands = operands[1:]  # the first one chooses the branch
            case "scan":
                consts, carries = scan_parts(body.eqn)
                carry = range(consts, consts + carries)
            case "while":
                # The operands are constants of the condition, constants of the body, and the carry.
                # `body.jaxpr` is either the condition or the body.
                step = opened(params["body_jaxpr"])
                first, second = params["cond_nconsts"], params["body_nconsts"]
                of_step = body.jaxpr is step
                own = operands[first : first + second] if of_step else operands[:first]
                operands = [*own, *operands[first + second :]]
                carry = range(len(own), len(operands))
        outside = [(operand, body.parent) for operand in operands[place : place + 1]]
        if place in carry:
            after = step.outvars[place - carry.start]
            outside.append((after, self._inside(step, body.parent, body.eqn)))
        return outside

    def _inside(self, jaxpr: Jaxpr, body: _Body, eqn: JaxprEqn) -> _Body:
        """Returns the body of a called jaxpr.

        JAX may use one jaxpr for several calls. Each call has its own body, so that the operands of
        each call are followed.
        """
        key = id(jaxpr), (*body.calls, id(eqn))
        if key not in self.bodies:
            self.bodies[key] = _body(jaxpr, body, eqn)
        return self.bodies[key]


def _is_cached(jaxpr: Jaxpr | None) -> bool:
    """Returns whether a jaxpr belongs to a function of JAX itself, such as jnp.where, and has no
    tap (an equation that reports a value). JAX caches such jaxprs, so the source lines in them may
    be those of another call. A jaxpr with a tap also has code of the model, so the search must go
    on inside it, to find the tap."""
    if jaxpr is None or not is_jax_function(jaxpr):
        return False
    return not any(eqn.primitive.name == "tap" for eqn in every(jaxpr))


def _frames(eqn: JaxprEqn) -> list[Any]:
    """Returns the stack frames that made an equation, the innermost first. Frames in libraries and
    in this package's code for taps and for `bisect` are left out.
    """
    traceback = eqn.source_info.traceback
    return [
        frame
        for frame in (traceback.frames if traceback else ())
        if not frame.file_name.startswith(_SKIPPED_FILES)
        and not any(part in frame.file_name for part in _LIBRARIES)
    ]


def _collectives(eqn: JaxprEqn, mesh: Any) -> list[tuple[str, str]]:
    """Returns a pair (name, axes) for each collective that an equation itself runs. For a loop or a
    call the list is empty, since only the equations inside it run collectives. The name is that of
    the function of `parallax.collectives` that was called. If none was called, the name is that of
    the primitive. `mesh` is the mesh of the `shard_map` around the equation."""
    name = _collective_function(eqn)
    # The equation of a collective of this library has a function as its parameter, and no jaxpr:
    # the function is traced to see what it sends. `mesh.spmd` sets check_vma=True too.
    if eqn.primitive is types.linear_p:
        inside = every(types.linear_jaxpr(eqn, mesh, check_vma=True))
        sent = [pair for inner_eqn in inside for pair in _collectives(inner_eqn, mesh)]
        return [(name or primitive, axes) for primitive, axes in sent]
    if eqn.primitive.name not in COLLECTIVES:
        return []
    axes = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
    axes_text = axes if isinstance(axes, str) else ", ".join(map(str, axes))
    return [(name or eqn.primitive.name, axes_text)]


def _mesh(body: _Body | None) -> Any:
    """Returns the mesh of the `shard_map` around a body, or None if there is none."""
    while body is not None and body.eqn is not None:
        if body.eqn.primitive.name == "shard_map":
            return body.eqn.params["mesh"]
        body = body.parent
    return None


def _collective_function(eqn: JaxprEqn) -> str:
    """Returns the name of the function of `parallax.collectives` that made an equation, or "" if
    none did. If such functions called each other, it is the name of the outermost one, which the
    user called.
    """

    def is_inside(frame):
        """Returns whether the file of a stack frame is in the folder `parallax/collectives`."""
        return frame.file_name.startswith(_COLLECTIVES)

    innermost = itertools.takewhile(is_inside, _frames(eqn))
    # A frame has the qualified name of its function, such as "_from_tables.<locals>.all_reduce",
    # which contains the names of the functions around it.
    parts = [frame.function_name.split(".") for frame in innermost]
    # The known names among all parts, from the innermost function outward.
    names = [name for name in itertools.chain(*map(reversed, parts)) if name in _NAMED_COLLECTIVES]
    return names[-1] if names else ""


def _caller(eqn: JaxprEqn) -> str:
    """Returns the text " in A for B": A is the source line that called a collective, and B is the
    source line of the model that led to this call. A may be in the package itself, for
    example in `tensor.py`. If B is unknown or is the same line as A, the text is " in A". If A is
    unknown too, the text is "".
    """
    frames = [frame for frame in _frames(eqn) if not frame.file_name.startswith(_COLLECTIVES)]
    # Files directly in the package's folder, such as tensor.py, are no models. All other files
    # count as models: those of the user, and those in the package's folders, such as `models` or
    # `context`, but not `collectives`, which was left out above.
    is_model = [os.path.dirname(frame.file_name) + os.sep != _PACKAGE for frame in frames]
    model_frames = list(itertools.compress(frames, is_model))
    lines = [
        f"{_short(frame.file_name)}:{frame.line_num} ({frame.function_name})"
        for frame in (*frames[:1], *model_frames[:1])
    ]
    # The dict removes the second line if it equals the first.
    pairs = zip(("in", "for"), dict.fromkeys(lines), strict=False)
    return "".join(f" {word} {line}" for word, line in pairs)


def _short(file_name: str) -> str:
    """Returns a file's name without its folders. For a file of this package, the name includes the
    package's folders: "parallax/zero.py", for example."""
    if file_name.startswith(_PACKAGE):
        return os.path.relpath(file_name, os.path.dirname(_PACKAGE[:-1]))
    return os.path.basename(file_name)
