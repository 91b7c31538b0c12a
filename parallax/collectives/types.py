"""What JAX's replication types cannot say: that a result is the same on all devices, and what its transpose is.

Inside `shard_map` each value is typed as varying or invariant along each mesh axis. `lax.pcast` goes from invariant to
varying, so a ring that is written out of `ppermute` could never leave the map under `out_specs=P()`, and its transpose
would be derived hop by hop. Three primitives mend that: `replicated` declares a value invariant at no cost, `cast` hands out
the terms of an unreduced one, and `linear` pairs a linear function with its transpose (like
`jax.custom_derivatives.linear_call`, and it batches too).

This is the one file that touches types which JAX does not document.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Shaped

from parallax._typing import PyTree

Tree = TypeVar("Tree", bound=PyTree)
AxisName = str | tuple[str, ...]  # one mesh axis, or several, or none: ()

type_error = (
    "parallax.collectives needs the replication types of JAX 0.10.2 to 0.12 (`jax.typeof(x).mat.varying`), and JAX "
    f"{jax.__version__} has others. Install a JAX in that range, or a newer parallax-jax."
)


def axes(axis_name: AxisName) -> tuple[str, ...]:
    """One axis name or a tuple of them, as a tuple."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def varying_axes(x: Shaped[Array, "..."]) -> tuple[str, ...]:
    """The mesh axes along which `x` may differ between devices, in a fixed order. `()` outside `shard_map`.

    Raises `TypeError` under a JAX whose replication types are not the ones known here.
    """
    return axes_of_type(jax.typeof(x))


def axes_of_type(aval: Any) -> tuple[str, ...]:
    """`varying_axes` of all arrays of the type `aval`, as traced programs hold it. Raises as it does."""
    try:
        return tuple(sorted(aval.mat.varying))
    except AttributeError as error:
        raise TypeError(type_error) from error


def varying(x: Tree, axis_name: AxisName) -> Tree:
    """Let every array of the tree `x` differ along `axis_name`: its values stay, only its type changes.

    It is `lax.pcast(..., to="varying")` for Equinox trees, and takes leaves that vary there already. Its transpose is a
    `psum` over the axes that were added.

    Raises:
        ValueError: the code does not run over an axis of `axis_name`.
        TypeError: as `varying_axes` does.
    """

    def leaf(x):
        if not isinstance(x, jax.Array):
            return x
        missing = tuple(axis for axis in axes(axis_name) if axis not in varying_axes(x))
        _check_bound(missing)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(leaf, x)


def reduction_state(x: Shaped[Array, "..."]) -> dict[str, str]:
    """The mesh axes along which `x` is "unreduced" or "reduced", `lax.pcast`'s words, and which of the two.

    An unreduced value is a sum over the axis that was not taken: each device has a term. A reduced one is the same on all
    devices, and its cotangent is unreduced. Raises `TypeError` as `varying_axes` does.
    """
    return reduction_state_of_type(jax.typeof(x))


def reduction_state_of_type(aval: Any) -> dict[str, str]:
    """`pending` of all arrays of the type `aval`."""
    try:
        return dict.fromkeys(sorted(aval.mat.unreduced), "unreduced") | dict.fromkeys(
            sorted(aval.mat.reduced), "reduced"
        )
    except AttributeError as error:
        raise TypeError(type_error) from error


def cast_unchecked(x: Shaped[Array, "*dims"], states: Mapping[str, str]) -> Shaped[Array, "*dims"]:
    """`x`, declared "varying", "invarying", "unreduced" or "reduced" along each axis of `states`: free, and unchecked.

    As honest as `replicated`, and differentiable as little: wrap what uses it in `linear`.
    """
    for axis, was in reduction_state(x).items():
        if axis in states:
            x = (
                terms_p.bind(x, axis=axis)
                if was == "unreduced"
                else lax.pcast(x, axis, to="varying")
            )
    x = varying(x, tuple(states))
    same = tuple(axis for axis, state in states.items() if state in ("invarying", "reduced"))
    x = replicated(x, same) if same else x
    for axis, state in states.items():
        x = lax.pcast(x, axis, to=state) if state in ("unreduced", "reduced") else x
    return x


def _terms_type(x, *, axis):
    kind = x.mat
    others = {"unreduced": kind.unreduced - {axis}, "reduced": kind.reduced}
    return x.update(manual_axis_type=type(kind)(varying=kind.varying | {axis}, **others))


terms_p = Primitive(
    "terms"
)  # unreduced -> varying, the one cast that `lax.pcast` lacks: each device's own term
terms_p.def_abstract_eval(_terms_type)
mlir.register_lowering(terms_p, lambda context, x, *, axis: [x])


def axis_size(axis_name: AxisName) -> int:
    """The number of devices on the axis, or on several together.

    Raises:
        ValueError: it is not an axis of the code that asks.
    """
    _check_bound(axes(axis_name))
    return lax.axis_size(axis_name)


def _check_bound(names: tuple[str, ...]) -> None:
    """Refuse with a `ValueError` an axis that the code does not run over: inside the map JAX would fail without a word."""
    bound = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
    for name in names:
        try:
            lax.axis_size(name)
        except NameError as error:
            over, cure = "outside a map", "Call it inside mesh.spmd, over a mesh with that axis"
            if bound:
                over, cure = f"over {', '.join(map(repr, bound))}", "Name one of those"
            raise ValueError(
                f"{name!r} is not an axis of this code, which runs {over}. {cure}."
            ) from error


def check_typed() -> None:
    """Refuse a map in which types do not tell what differs between devices: an axis index has the same type everywhere there.

    Raises:
        ValueError: it is a `jax.shard_map(check_vma=False)`, or a `pmap`, over an axis of more than one device.
    """
    for name in jax.sharding.get_abstract_mesh().manual_axes:
        index_type = jax.make_jaxpr(lambda name=name: lax.axis_index(name))().out_avals[0]
        if lax.axis_size(name) > 1 and name not in axes_of_type(index_type):
            raise ValueError(
                f"This map does not tell what differs between devices along {name!r}, so that nothing would be summed over it. "
                "Take mesh.spmd, or jax.shard_map(..., check_vma=True), instead of check_vma=False or pmap."
            )


def axis_index(axis_name: AxisName) -> jax.Array:
    """The device's place on the axis, or on several in row-major order: an int32 scalar."""
    return lax.axis_index(axis_name) if axes(axis_name) else jnp.zeros((), jnp.int32)


def match_varying(x: Tree, reference: PyTree) -> Tree:
    """The tree `x` with each leaf varying at least where the same leaf of `reference` varies (for a loop's first carry)."""
    return jax.tree.map(lambda leaf, other: varying(leaf, varying_axes(other)), x, reference)


def replicated(x: Shaped[Array, "*dims"], axis_name: AxisName) -> Shaped[Array, "*dims"]:
    """Declare that `x` has the same bits on all devices along `axis_name`: varying -> invariant, at no cost.

    Nobody checks it: it is honest after a gather, or after a sum in which each block was added up on one device. It is not
    differentiable; wrap what uses it in `linear`, which states the transpose.
    """
    return replicated_p.bind(x, axes=axes(axis_name))


def _replicated_type(x, *, axes):
    try:
        return x.update(manual_axis_type=x.mat.update(varying=x.mat.varying - frozenset(axes)))
    except AttributeError as error:
        raise TypeError(type_error) from error


replicated_p = Primitive("replicated")
replicated_p.def_impl(lambda x, *, axes: x)
replicated_p.def_abstract_eval(_replicated_type)
mlir.register_lowering(replicated_p, lambda context, x, *, axes: [x])
batching.defvectorized(replicated_p)


def linear(
    x: Shaped[Array, "..."],
    *,
    forward: Callable[[Shaped[Array, "..."]], Shaped[Array, "..."]],
    backward: Callable[[Shaped[Array, "..."]], Shaped[Array, "..."]],
    name: str = "",
) -> Shaped[Array, "..."]:
    """`forward(x)`, a linear function whose transpose is `backward`. Policies of `jax.checkpoint` can know it by its `name`.

    Forward and reverse derivatives of any order, `vmap`, `scan`, `checkpoint` and `jit` all apply, in and around
    `shard_map`. `backward` must take and return the replication types that belong to a transpose: a result that is
    invariant along an axis has an invariant cotangent.
    """
    return linear_p.bind(x, forward=forward, backward=backward, name=name)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The type to add up values of `dtype` in: itself where it has 32 bits or more, else float32."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def linear_jaxpr(eqn: JaxprEqn, mesh: Mesh | AbstractMesh | None, *, check_vma: bool) -> Jaxpr:
    """What the `forward` of a `linear` in a traced program binds: JAX sees in its equation two functions and no jaxpr.

    Args:
        eqn: the equation.
        mesh: of the `shard_map` around it; None outside.
        check_vma: as in that `shard_map`.
    """
    x: Any = eqn.invars[0].aval
    found = []

    def body():
        zeros = varying(jnp.zeros(x.shape, x.dtype), axes_of_type(x))
        zeros = cast_unchecked(zeros, reduction_state_of_type(x))
        found.append(jax.make_jaxpr(eqn.params["forward"])(zeros).jaxpr)
        return ()

    inside = (
        body
        if mesh is None
        else jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=(), check_vma=check_vma)
    )
    jax.eval_shape(inside)
    return found[0]


def operands(x: Any) -> tuple[Any, ...]:
    """The traced values that the traced value `x` was computed from, as far as JAX remembers: inside one trace."""
    return tuple(getattr(getattr(x, "parent", None), "in_tracers", ()))


def _batched(arguments, dims, *, forward, backward, name):
    (x,), (dim,) = arguments, dims
    over = {"forward": jax.vmap(forward, in_axes=dim), "backward": jax.vmap(backward, out_axes=dim)}
    return linear_p.bind(x, **over, name=name), 0


linear_p = Primitive("linear_collective")
linear_p.def_impl(lambda x, *, forward, backward, name: forward(x))
linear_p.def_abstract_eval(
    lambda x, *, forward, backward, name: jax.make_jaxpr(forward)(x).out_avals[0]
)
mlir.register_lowering(
    linear_p,
    mlir.lower_fun(lambda x, *, forward, backward, name: forward(x), multiple_results=False),
)
ad.deflinear2(
    linear_p,
    lambda ct, x, *, forward, backward, name: [
        linear_p.bind(ct, forward=backward, backward=forward, name="")
    ],
)
batching.primitive_batchers[linear_p] = _batched


def linear_collective(
    x: Shaped[Array, "..."],
    axis_name: AxisName,
    *,
    forward: Callable[[Shaped[Array, "..."]], Shaped[Array, "..."]],
    backward: Callable[[Shaped[Array, "..."]], Shaped[Array, "..."]],
    to: str = "varying",
) -> Shaped[Array, "..."]:
    """`linear` of two functions of varying arrays, for an `x` that varies or is unreduced along all of `axis_name`.

    The result is declared `to`, "varying", "invarying" or "reduced" there, and the transpose's result what belongs to `x`:
    reduced for unreduced. Along other axes both stay as they are.
    """

    def on_terms(f, state):
        def g(x):
            other = {
                axis: was for axis, was in reduction_state(x).items() if axis not in axes(axis_name)
            }
            inside = dict.fromkeys((*axes(axis_name), *other), "varying")
            after: dict[str, Any] = other | dict.fromkeys(axes(axis_name), state)
            return cast_unchecked(f(cast_unchecked(x, inside)), after)

        return g

    unreduced = any(axis in axes(axis_name) for axis in reduction_state(x))
    return linear(
        x,
        forward=on_terms(forward, to),
        backward=on_terms(backward, "reduced" if unreduced else "varying"),
    )


def check_summand(name: str, x: Shaped[Array, "..."], axis_name: AxisName) -> Shaped[Array, "..."]:
    """`x` for a sum over `axis_name`, as varying or as unreduced along all of it.

    Raises:
        ValueError: it is reduced along one of the axes, or unreduced along some of them only; `lax` refuses those too.
    """
    states = {axis: was for axis, was in reduction_state(x).items() if axis in axes(axis_name)}
    if set(states.values()) == {"unreduced"} and len(states) == len(axes(axis_name)):
        return x
    if "unreduced" in states.values():
        raise ValueError(
            f"{name} along {axis_name!r} needs an x that is unreduced along all of these axes or along none; this one, of shape "
            f"{x.shape}, is {_spelt(states)}. Sum it over its unreduced axes first, and over the others then."
        )
    return check_block(name, x, axis_name)


def check_block(name: str, x: Shaped[Array, "..."], axis_name: AxisName) -> Shaped[Array, "..."]:
    """`x` as varying along `axis_name`. Raises `ValueError` where it is unreduced or reduced there, as `lax` does."""
    states = {axis: was for axis, was in reduction_state(x).items() if axis in axes(axis_name)}
    if states:
        cure = "Sum it first, by all_reduce or reduce_scatter"
        if "reduced" in states.values():
            cure = f'Cast it first: lax.pcast(x, {next(a for a in states if states[a] == "reduced")!r}, to="varying")'
        raise ValueError(
            f"{name} along {axis_name!r} needs an x that varies or is the same there; this one, of shape {x.shape}, is "
            f"{_spelt(states)}. {cure}."
        )
    return varying(x, axis_name)


def _spelt(states: dict[str, str]) -> str:
    return " and ".join(f"{was} along {axis!r}" for axis, was in states.items())
