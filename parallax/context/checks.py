"""The checks of attention over split tokens.

Some checks trace a function and read its *program*, a jaxpr: these checks look for operations that
send, or for masks that are made from counts. A *count* is an array with the values 0, 1, 2, ...
(`iota`) that the program makes itself. An operand of an equation is a variable or a literal number.
An equation may have inner jaxprs among its parameters: `jaxprs.called` returns the inner jaxpr of a
`jit` or `checkpoint`, and `jaxprs.closed` all inner jaxprs of one equation. `jaxprs.opened` returns
a jaxpr without the values of its constants.

Legend: B batch, T tokens, H heads of queries, G heads of keys and values, K head width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from parallax import jaxprs
from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import axes, axes_of_type, varying_axes
from parallax.context.orders import ChunkOrder, chunk_table, places
from parallax.trees import is_array

# The names of the primitives that send begin with one of these words.
_SENDS = (
    *("ppermute", "pbroadcast", "all_to_all", "ragged_all_to_all", "all_gather"),
    *("reduce_scatter", "psum", "pmax", "pmin"),
)

# While layers of `context.comms` attend: the axis over which they split their tokens, and the order
# of the tokens.
LAYERS: ContextVar[tuple[Axis, ChunkOrder] | None] = ContextVar("LAYERS", default=None)


def check_order(name: str, tokens: int, axis: Axis, order: ChunkOrder) -> None:
    """Raises `ValueError` if the layers that call an attention have the tokens of `axis` in another
    order than the attention, so that it would mask other tokens than it should. `tokens` is the
    number of tokens of a device, and `name` the attention's name."""
    if (layers := LAYERS.get()) is None or axes(layers[0].names) != axes(axis.names):
        return
    n = axis.size()
    own, other = (places(tokens * n, chunk_table(each, n)) for each in (order, layers[1]))
    if not np.array_equal(own, other):
        raise ValueError(
            f"{name}: the layers split their tokens over {axis.names!r} in another order than the "
            f"attention's order= ({getattr(order, '__name__', order)}). Pass the order of "
            "context.comms, which is context.zigzag by default, and always in models.decoder."
        )


def must_communicate(layers: Callable[..., Any], axis: AxisLike) -> Callable[..., Any]:
    """Returns `layers`, with a check at trace time that they send something along `axis`.

    Each device of `axis` has some of the tokens. Attention that sends nothing would see only the
    device's own tokens, so another model would be trained, without an error. The check traces
    `layers` once more.
    """
    names = set(axes(Axis.of(axis).names))

    def wrapped(*arguments):
        """Returns the result of `layers`, after the check of its traced program."""
        # Only arrays can be arguments of a jaxpr; models hold functions too.
        arrays, static = eqx.partition(arguments, is_array)
        program = jax.make_jaxpr(lambda arrays: layers(*eqx.combine(arrays, static)))(arrays)
        if not any(_moves_along(eqn, names) for eqn in _equations(jaxprs.opened(program))):
            raise ValueError(
                f"context: the layers send nothing along {sorted(names)}, which splits their "
                "tokens, so each token would see only the tokens of its own device. Attend by "
                "comms.wrap_attention(attend)(q, k, v), or use a layout without a context axis."
            )
        return layers(*arguments)

    return wrapped


def check_places(
    attend: Callable[..., Any], arrays: tuple[Any, ...], options: dict[str, Any], tokens: int
) -> None:
    """Raises `ValueError` if `attend` makes its mask or bias from *counts*, or from a constant, and
    not from `positions`. A count is an array with the values 0, 1, 2, ... that `attend` makes
    itself.

    `attend` is traced. If a result of its program depends on `positions`, `attend` passes. If no
    result does, `attend` is refused in two cases: its program compares two counts, or has a
    constant mask or bias. Attention without a mask and without a bias passes.

    Args:
        attend: the attention function.
        arrays: the arguments of `attend`, (q, k, v).
        options: the keyword arguments of `attend`: always `positions`, the pair (positions of the
            queries, positions of the keys), and `segments` if there are any.
        tokens: the number of tokens of a whole sequence.
    """
    positions = options["positions"]

    # The inputs (`invars`) of this program are only the positions; the arrays are constants of it.
    def of_positions(positions):
        return attend(*arrays, **options | {"positions": positions})

    program = jax.make_jaxpr(of_positions)(positions)
    opened = jaxprs.opened(program)
    uses_positions = _reached(opened, {*opened.invars}) & set(opened.outvars)
    if uses_positions:
        return
    queries, keys = arrays[0].shape[1], arrays[1].shape[1]
    if _compares_counts(opened, {})[0] or _has_constant_mask(program, (queries, keys)):
        raise ValueError(
            "context.gathered: attend ignores positions=, and counts queries and keys from 0 for "
            f"its mask or bias. But the {queries} queries of a device need not be the first "
            f"{queries} of the {tokens} tokens in the order of the sequence. Compare positions[0], "
            "of the queries, with positions[1], of the keys, as context.blockwise does."
        )


def _has_constant_mask(program: Any, scores: tuple[int, int]) -> bool:
    """Returns whether a program has a constant [..., queries, keys], such as a mask or a bias, that
    is not the same for all queries.

    A constant is the same on all devices, but their queries have different positions. `scores` is
    (queries, keys).
    """
    for constant in getattr(program, "consts", ()):
        # q, k and v may be constants of the program too, as tracers, which have no numbers here.
        if isinstance(constant, Tracer) or np.shape(constant)[-2:] != scores:
            continue
        numbers = np.asarray(constant)
        if np.any(numbers != numbers[..., :1, :]):
            return True
    bodies = [body for eqn in jaxprs.opened(program).eqns for body in jaxprs.closed(eqn.params)]
    return any(_has_constant_mask(body, scores) for body in bodies)


def _reached(program: Any, start: set[Any]) -> set[Any]:
    """Returns the variables of `start`, and the variables of a program that depend on them."""
    reached = set(start)
    # Each equation comes after the equations that make its operands, so one pass is enough.
    for eqn in program.eqns:
        if any(not jaxprs.is_literal(atom) and atom in reached for atom in eqn.invars):
            reached |= set(eqn.outvars)
    return reached


def _compares_counts(
    program: Any, counts: dict[Any, frozenset[int]]
) -> tuple[bool, list[frozenset[int]]]:
    """Returns whether a comparison in a program depends on two counts; and a list that has, for
    each result of the program, the ids of the counts on which the result depends.

    A count is an array with the values 0, 1, 2, ... that the program makes itself. A causal mask
    compares a count of the queries with a count of the keys. Comparisons whose result has fewer
    than two dims are skipped. If a comparison depends on two counts, the list is empty. The id of a
    count is Python's `id` of the equation that makes the array. `counts` maps each argument of the
    program to the ids of the counts on which the argument depends.
    """
    counts = dict(counts)

    def read(atom):
        """Returns the ids of the counts on which `atom`, an operand or a result, depends. A count
        is an array with the values 0, 1, 2, ...; a literal number depends on no count."""
        return frozenset() if jaxprs.is_literal(atom) else counts.get(atom, frozenset())

    for eqn in program.eqns:
        operands = list(map(read, eqn.invars))
        joined = frozenset().union(*operands)
        inner = jaxprs.called(eqn)
        name = eqn.primitive.name
        if name in ("lt", "le", "gt", "ge"):
            # The operands depend on two counts: on the queries' and on the keys'. In a comparison
            # with one dim, both counts are along this dim.
            if len(joined) > 1 and eqn.outvars[0].aval.ndim > 1:
                return True, []
            # The result is no count. Otherwise scores that are masked by one count, as the count of
            # the tokens that fill up a tile, could not be compared with a number.
            joined = frozenset()
        # A mask often lays one count along the dim of queries and the same count along the dim of
        # keys. So a count along another dim counts as a new one, with the id of this equation.
        if name == "iota" or (joined and name in ("broadcast_in_dim", "reshape")):
            joined = frozenset({id(eqn)})
        results = [joined] * len(eqn.outvars)
        if inner is not None:
            is_found, results = _compares_counts(
                inner, dict(zip(inner.invars, operands, strict=True))
            )
            if is_found:
                return True, []
        counts |= zip(eqn.outvars, results, strict=True)
    return False, list(map(read, program.outvars))


# The most tokens for which `check_kernel` computes a table [tokens, tokens], unless a chunk is
# longer.
MOST_TOKENS = 4096


def check_kernel(
    forward: Callable[..., Any], q: Any, k: Any, chunks: int, devices: int, *, causal: bool
) -> None:
    """Raises `ValueError` if a kernel's scores depend on distances between tokens.

    With a sliding window or ALiBi, scores depend on these distances. `attention` does not tell a
    kernel the places of its chunks in the sequence, so such scores would be wrong. The kernel is
    traced on one head, or on all heads if it fails on one. The *tables* in its program, arrays
    [tokens, tokens] that do not depend on q, k and v, are evaluated. A table that is not constant
    on each side of its diagonal is taken to depend on distances. Tables made in a loop or inside a
    Pallas kernel are not found, nor is a window of more than `MOST_TOKENS` tokens and more than a
    chunk.

    Args:
        forward: the kernel's forward function: `(q, k, v, *, causal, segments) -> (out, lse)`.
        q: the queries of a device, [B, T, H, K].
        k: the keys of a device, [B, T, G, K].
        chunks: the number of chunks into which the tokens of a device are cut.
        devices: the number of devices along the context axis.
        causal: whether the attention is causal.
    """
    chunk, width = q.shape[1] // chunks, q.shape[-1]
    # All chunks of a sequence, so that distances beyond one chunk show too; but not many more than
    # `MOST_TOKENS` tokens, since a table has tokens^2 numbers.
    tokens = chunk * max(1, min(chunks * devices, MOST_TOKENS // chunk))
    # Dims of tokens are recognised by their size, so it must differ from the head width.
    tokens *= 2 if tokens == width else 1

    def scores(q, k, v):
        return forward(q, k, v, causal=causal, segments=None)

    def traced(*heads):
        """Returns the kernel's program for these numbers of heads of q, k and v; None if it allows
        fixed sizes only. An error of the kernel itself is raised when the step is traced."""
        shapes = [jax.ShapeDtypeStruct((1, tokens, h, width), q.dtype) for h in heads]
        try:
            return jax.make_jaxpr(scores)(*shapes)
        except (TypeError, ValueError):
            return None

    groups = k.shape[2]
    program = traced(1, 1, 1) or traced(q.shape[2], groups, groups)
    if program is None:
        return
    # One token has no distance to another, and a dim of size 1 need not be a dim of tokens.
    for table in _constant_tables(program, tokens, [None] * 3) if tokens > 1 else ():
        if not _is_causal(table):
            raise ValueError(
                "context.attention: the scores of kernel= depend on distances between tokens, as "
                "in a window or ALiBi, and a kernel is called on one chunk of the tokens and not "
                "told which. Use context.gathered with an attention function that masks by its "
                "argument positions=, or context.ulysses."
            )


def _constant_tables(
    program: ClosedJaxpr, tokens: int, arguments: Sequence[Any | None]
) -> list[np.ndarray]:
    """Returns the constant tables of a program, such as masks: tables that do not depend on q, k
    and v, but are combined with values that depend on them.

    Tables are arrays with two dims of size `tokens`; each is returned as [tokens, tokens, other],
    where `other` joins all remaining dims. `arguments` has the value of each argument of the
    program that does not depend on q, k and v, and None for each other argument.
    """
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.invars, arguments, strict=True))
    unknown = {var for var, value in values.items() if value is None}
    # A constant that is traced has no numbers here. A value that varies along a mesh axis depends
    # on the device. So `reached` has both, like the values that depend on q, k and v.
    consts = zip(jaxpr.constvars, program.consts, strict=True)
    unknown |= {var for var, constant in consts if isinstance(constant, Tracer)}
    unknown |= {var for eqn in jaxpr.eqns for var in eqn.outvars if axes_of_type(var.aval)}
    reached = _reached(jaxpr, unknown)
    tables, passed, bodies = [], [], []
    for eqn in jaxpr.eqns:
        # An equation whose results do not depend on q, k and v combines nothing with them.
        if reached.isdisjoint(eqn.outvars):
            continue
        atoms = (atom for atom in eqn.invars if not jaxprs.is_literal(atom))
        constants = [atom for atom in atoms if atom not in reached]
        body = _body(eqn)
        # The body of a loop takes other arrays than the loop: slices, and carries that change.
        if body is not None and eqn.primitive.name not in ("scan", "shard_map"):
            passed += constants
            bodies.append((body, eqn.invars))
            continue
        tables += [atom for atom in constants if atom.aval.shape.count(tokens) == 2]
        if body is not None:
            bodies.append((body, ()))
    # The equations that do not depend on q, k and v are enough to compute the constants.
    constant_eqns = [eqn for eqn in jaxpr.eqns if reached.isdisjoint(eqn.outvars)]
    needed = list(dict.fromkeys([*tables, *passed]))
    values |= _computed(program, constant_eqns, needed, arguments)
    found = [_by_tokens(np.asarray(values[table]), tokens) for table in tables]
    for body, atoms in bodies:
        known = [atom.val if jaxprs.is_literal(atom) else values.get(atom) for atom in atoms]
        found += _constant_tables(body, tokens, known or [None] * len(body.in_avals))
    return found


def _body(eqn: Any) -> ClosedJaxpr | None:
    """Returns the program inside an equation, such as that of a `jit` or `checkpoint`; None if
    there is none, or if the values of the program's constants are not known."""
    if jaxprs.called(eqn) is None:
        return None
    (body,) = jaxprs.closed(eqn.params)
    if isinstance(body, ClosedJaxpr):
        return body
    return None if body.constvars else ClosedJaxpr(body, ())


def _computed(
    program: ClosedJaxpr, eqns: list[Any], variables: list[Any], arguments: Sequence[Any | None]
) -> dict[Any, Any]:
    """Returns the values of `variables`, some variables of a program. `eqns` are the equations that
    compute these variables. The equations need no argument whose value in `arguments` is None.
    """
    if not variables:
        return {}
    # `effects` would list the effects of the whole program, which these equations do not have.
    jaxpr = program.jaxpr.replace(outvars=variables, eqns=eqns, effects=frozenset())
    # The variables do not depend on the unknown arguments, so any values will do for these.
    values = [
        np.zeros(var.aval.shape, var.aval.dtype) if value is None else value
        for var, value in zip(jaxpr.invars, arguments, strict=True)
    ]
    # Computed at once, although the caller may be traced.
    with jax.ensure_compile_time_eval():
        computed = jax.jit(jaxpr_as_fun(ClosedJaxpr(jaxpr, program.consts)))(*values)
    return dict(zip(variables, computed, strict=True))


def _by_tokens(array: np.ndarray, tokens: int) -> np.ndarray:
    """Returns a table with its two dims of tokens moved to the front, and all other dims joined:
    [tokens, tokens, other]."""
    dims = [dim for dim, size in enumerate(array.shape) if size == tokens]
    return np.moveaxis(array, dims, (0, 1)).reshape(tokens, tokens, -1)


def _is_causal(table: np.ndarray) -> bool:
    """Returns whether a table [tokens, tokens, other] is constant on each side of the diagonal of
    its first two dims.

    A causal mask is such a table. The diagonal itself may belong to either side. The dim `other`
    joins all dims that are not of tokens, such as heads. The constants may differ between the
    entries of `other`.
    """

    # `pairs` is [pairs of tokens, other]: all its rows must equal the first.
    def is_constant(pairs):
        return bool((pairs == pairs[:1]).all())

    lower = np.tri(len(table), dtype=bool)
    return any(is_constant(table[side]) and is_constant(table[~side]) for side in (lower, lower.T))


def _equations(program: Any) -> Iterator[Any]:
    """Yields each equation of a program, also those inside its inner jaxprs and inside this
    library's collectives."""
    for eqn in jaxprs.every(program):
        yield eqn
        # This primitive of `collectives.types` holds functions and no jaxpr, so one is traced.
        if eqn.primitive.name == "linear_collective":
            forward = jax.make_jaxpr(eqn.params["forward"])(*jaxprs.types(eqn.invars))
            yield from _equations(jaxprs.opened(forward))


def _moves_along(eqn: Any, names: set[str]) -> bool:
    """Returns whether an equation sends data along some of the axes `names`, and along no other.

    A gather of weights (ZeRO-3) may go over the axes `names` and the data axis together. Such a
    gather does not count, since it is not part of the attention.
    """
    if not eqn.primitive.name.startswith(_SENDS):
        return False
    # Most collectives of JAX name their axes as `axis_name`, and `psum` as `axes`.
    along = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    sent_along = set(along) if isinstance(along, tuple) else {along}
    return bool(sent_along) and sent_along <= names


def check_attention(q: Any, k: Any, v: Any, segments: Any, axis: Axis, chunks: int) -> None:
    """Raises `ValueError` if `attention` cannot take these heads, tokens or segments.

    `chunks` is the number of chunks into which the tokens of a device are cut.
    """
    check_heads("context.attention", q, k, v)
    check_as_many_keys("context.attention", q, k, axis)
    n, tokens = axis.size(), q.shape[1]
    if tokens % chunks or not tokens:
        next_multiple = max(1, -(-tokens // chunks)) * chunks
        raise ValueError(
            f"context.attention: the number of tokens of a device, {tokens} ({tokens * n} over {n} "
            f"devices), must be a multiple of {chunks}, the number of chunks of a device. Use "
            f"sequences of {next_multiple * n} tokens, or order=context.contiguous."
        )
    if segments is not None:
        check_segments("context.attention", segments, q.shape[:2])


def check_as_many_keys(name: str, q: Any, k: Any, axis: Axis) -> None:
    """Raises `ValueError` if a device has another number of keys than of queries. `name` is the
    name of the calling function, for the message."""
    tokens, keys = q.shape[1], k.shape[1]
    if keys != tokens:
        raise ValueError(
            f"{name} needs keys of the same tokens as the queries; got {keys} keys and {tokens} "
            f"queries on each device of {axis.names!r}. Split both by context.split or "
            "context.local_tokens."
        )


def check_segments(name: str, segments: Any, shape: tuple[int, ...]) -> None:
    """Raises `ValueError` if `segments` are not integers of this shape, [B, T], one per token.
    `name` is the name of the calling function, for the message."""
    if segments.shape != shape or not jnp.issubdtype(segments.dtype, jnp.integer):
        raise ValueError(
            f"{name} needs segments that are whole numbers of the shape {list(shape)}, one for "
            f"each of this device's tokens; got {segments.dtype}{list(segments.shape)}. Split the "
            "segments in the same way as the tokens."
        )


def check_heads(name: str, q: Any, k: Any, v: Any) -> None:
    """Raises `ValueError` if the shapes, types or heads of q, k and v do not fit each other.

    If q varies along an axis and k does not, the axis may split the heads of q. Then attention
    would give some heads of q the wrong heads of k, unless k has only one head. So k must have one
    head in this case. The callers check that q and k have the same number of tokens, if they must.
    `name` is the caller's name, for the message.
    """
    H, G = q.shape[2], k.shape[2]
    if (
        k.shape != v.shape
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
        or not q.dtype == k.dtype == v.dtype
    ):
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (q, k, v))
        raise ValueError(
            f"{name} needs q[B, T, H, K], k[B, T, G, K] and v[B, T, G, K] of one type: B sequences "
            f"of T tokens, with H or G heads of width K; got {got}."
        )
    if not G or H % G:
        raise ValueError(
            f"{name}: the number of heads of q, {H}, must be a multiple of that of k and v, {G}. "
            "If the heads of q are split over devices, pass only the heads of k and v that the "
            "device's heads of q use."
        )
    q_axes = sorted(set(varying_axes(q)) - set(varying_axes(k)))
    if q_axes and G > 1:
        raise ValueError(
            f"{name}: q, of {H} heads, varies along {q_axes}, and k, of {G} heads, does not. If "
            f"{q_axes} splits the heads of q, pass only the heads of k and v that the device's "
            "heads of q use. If not, pass k and v through lax.pcast(..., to='varying')."
        )


def with_heads(attend: Callable[..., Any], heads: tuple[int, int]) -> Callable[..., Any]:
    """Returns `attend`, wrapped in a check that a device has the key heads that its queries use.

    If the query heads are split over a tensor axis, each device must select the key heads that its
    query heads use.

    Args:
        attend: `attention`, `ulysses` or `gathered` over an axis.
        heads: the number of query heads and of key heads of the whole model.

    The returned function raises `ValueError` if a device has another number of key heads than its
    query heads need.
    """

    def wrapped(q, k, v, **options):
        _check_heads_of_model("context.with_heads", q.shape[2], k.shape[2], heads)
        return attend(q, k, v, **options)

    return wrapped


def _check_heads_of_model(name: str, H: int, G: int, heads: tuple[int, int]) -> None:
    """Raises `ValueError` unless the H query heads of a device need exactly G key heads.

    `heads` are the numbers of query heads and of key heads of the whole model. The first must be a
    multiple of the second, and of H, the number of query heads on a device. `name` is the name of
    the calling function, for the message.
    """
    all_queries, all_keys = heads
    if all_queries % all_keys or all_queries % H:
        raise ValueError(
            f"{name} needs heads=(heads of queries, heads of keys) of the whole model. The first "
            f"must be a multiple of the second, and of the {H} heads of queries on a device; got "
            f"({all_queries}, {all_keys})."
        )
    group = all_queries // all_keys  # the number of query heads that share a key head
    # A device's query heads must be whole groups, or lie inside one group.
    needed = max(1, H // group)
    cuts_a_group = H % group and group % H
    if needed != G or cuts_a_group:
        fault = (
            f"splits the {group} heads of queries that share a head of keys into unequal parts: "
            f"{H} is neither a multiple nor a divisor of {group}. Use another number of devices on "
            f"the axis: a divisor or a multiple of the {all_keys} heads of keys."
            if cuts_a_group
            else f"needs {needed} of the {all_keys} heads of keys; the number of heads of its k is "
            f"{G}. Select the heads of keys that the device's queries use."
        )
        raise ValueError(
            f"{name}: on an axis of {all_queries // H} devices, a device has {H} of the "
            f"{all_queries} heads of queries, so it {fault}"
        )
