"""Declares replication types of arrays that JAX's public functions cannot declare.

Inside `shard_map` each value is typed along each mesh axis: *varying* (it may differ between
devices) or *invariant* (it is the same on all). An *unreduced* value stands for a sum over the
axis: each device has one term, and the terms are not added yet. A *reduced* value is the same on
all devices, and its cotangent is unreduced.
JAX keeps this type in the sets `varying`, `unreduced` and `reduced` of `aval.mat`.

`lax.pcast` never goes from varying to invariant (in its words "invarying"). So the result of a ring
of `ppermute`s could never leave the `shard_map` under `out_specs=P()`.

Three primitives declare these types and transposes. `replicated` declares a value invariant.
`terms_p` declares an unreduced value varying: the result on each device is that device's term.
`linear` pairs a linear function with its transpose, as `jax.custom_derivatives.linear_call` does,
and has a batching rule too. Without `linear`, JAX would transpose each `ppermute` of a ring.

This is the only file that uses undocumented parts of JAX: `aval.mat`, the equation that made a
tracer, and the state of `jax.distributed`.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import distributed
from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Shaped

from parallax._typing import PyTree

Tree = TypeVar("Tree", bound=PyTree)
AxisName = str | tuple[str, ...]  # one mesh axis, or several, or none: ()
OneArray = Callable[[Shaped[Array, "..."]], Shaped[Array, "..."]]

NO_MAT_MESSAGE = (
    "parallax.collectives needs the replication types of JAX 0.10.2 to 0.12 "
    f"(`jax.typeof(x).mat.varying`), and JAX {jax.__version__} has others. Install a JAX in that "
    "range, or a newer parallax-jax."
)


def axes(axis_name: AxisName) -> tuple[str, ...]:
    """Returns one axis name, or a tuple of them, as a tuple."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def varying_axes(x: Shaped[Array, "..."]) -> tuple[str, ...]:
    """Returns the mesh axes along which `x` may differ between devices, in a fixed order.

    The tuple is empty outside `shard_map`. Raises `TypeError` under a version of JAX whose types do
    not record these axes.
    """
    return axes_of_type(jax.typeof(x))


def axes_of_type(aval: Any) -> tuple[str, ...]:
    """Returns the mesh axes along which a value of this type may differ between devices, sorted.

    `aval` is an abstract type: `jax.typeof(value)`, or the `aval` of a variable in a jaxpr. Raises
    `TypeError` under a version of JAX whose types have no `mat`, which holds these axes.
    """
    try:
        return tuple(sorted(aval.mat.varying))
    except AttributeError as error:
        raise TypeError(NO_MAT_MESSAGE) from error


def varying(x: Tree, axis_name: AxisName) -> Tree:
    """Returns the tree `x` typed as varying along `axis_name`, with the same values.

    This is `lax.pcast(..., to="varying")` for Equinox trees; leaves that vary already are accepted.
    The transpose of `varying` is a `psum` over the axes that were added.

    Raises:
        ValueError: an axis of `axis_name` is no axis of a `shard_map` around the call.
        TypeError: the types of this version of JAX do not record the varying axes.
    """

    def leaf(x):
        """Returns one leaf, typed as varying along all axes in `axis_name`."""
        # Equinox trees hold functions and numbers too.
        if not isinstance(x, jax.Array):
            return x
        # `lax.pcast` refuses an axis along which the value varies already. `_check_bound` refuses
        # an axis of no `shard_map` around the call.
        missing = tuple(axis for axis in axes(axis_name) if axis not in varying_axes(x))
        _check_bound(missing)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(leaf, x)


def reduction_state(x: Shaped[Array, "..."]) -> dict[str, str]:
    """Returns a dict from axis to "unreduced" or "reduced", for axes along which `x` is either.

    The words are those of `lax.pcast`. An unreduced value stands for a sum over the axis: each
    device has one term, and the terms are not added yet. A reduced value is the same on all
    devices, and its cotangent is unreduced. Raises `TypeError` under a version of JAX whose types
    do not record these axes.
    """
    return reduction_state_of_type(jax.typeof(x))


def reduction_state_of_type(aval: Any) -> dict[str, str]:
    """Returns the dict of `reduction_state` for a value of the abstract type `aval`.

    The dict has an entry for each axis along which the value is unreduced or reduced. The key is
    the axis, and the value is "unreduced" or "reduced". Raises `TypeError` under a version of JAX
    whose types do not record these axes.
    """
    try:
        unreduced, reduced = sorted(aval.mat.unreduced), sorted(aval.mat.reduced)
    except AttributeError as error:
        raise TypeError(NO_MAT_MESSAGE) from error
    return dict.fromkeys(unreduced, "unreduced") | dict.fromkeys(reduced, "reduced")


def cast_unchecked(x: Shaped[Array, "*dims"], states: Mapping[str, str]) -> Shaped[Array, "*dims"]:
    """Returns `x` with the replication types in `states`. Nothing is computed or checked.

    `states` maps an axis to "varying", "invarying" (invariant), "unreduced" or "reduced". Along
    other axes the type stays. The declaration must be true. `cast_unchecked` has no derivative:
    call it where JAX does not differentiate, such as in the functions that are passed to `linear`.
    """
    # All axes become varying first, so that one path serves all states: `lax.pcast` has a direct
    # way between few of the other states, such as from invariant to reduced.
    for axis, state in reduction_state(x).items():
        if axis in states and state == "unreduced":
            x = terms_p.bind(x, axis=axis)
        elif axis in states:
            x = lax.pcast(x, axis, to="varying")
    x = varying(x, tuple(states))
    # `lax.pcast` takes only an invariant value to a reduced one, and only a varying value to an
    # unreduced one.
    same = tuple(axis for axis, state in states.items() if state in ("invarying", "reduced"))
    x = replicated(x, same) if same else x
    for axis, state in states.items():
        x = lax.pcast(x, axis, to=state) if state in ("unreduced", "reduced") else x
    return x


def _terms_type(x, *, axis):
    """Returns the abstract type `x` with `axis` moved from the unreduced to the varying axes."""
    # JAX has no public function that makes a `mat`, so the class of this `mat` makes the new one.
    mat = x.mat
    unreduced = mat.unreduced - {axis}
    terms = type(mat)(varying=mat.varying | {axis}, unreduced=unreduced, reduced=mat.reduced)
    return x.update(manual_axis_type=terms)


# From unreduced to varying, each device's own term: the one cast that `lax.pcast` lacks.
terms_p = Primitive("terms")
terms_p.def_abstract_eval(_terms_type)
mlir.register_lowering(terms_p, lambda context, x, *, axis: [x])


def axis_size(axis_name: AxisName) -> int:
    """Returns the number of devices on the axis, or on several axes together.

    Raises:
        ValueError: an axis of `axis_name` is no axis of a `shard_map` around the call.
    """
    _check_bound(axes(axis_name))
    return lax.axis_size(axis_name)


def _check_bound(names: tuple[str, ...]) -> None:
    """Raises `ValueError` for the first of `names` that is no axis of a `shard_map`, `pmap` or
    `vmap` in which the caller runs.

    The name may be misspelt, for example. Inside a `shard_map`, `lax.pcast` and JAX's collectives
    would fail for this axis with an assertion that has no text.
    """
    # The axes of the `shard_map`s around this code.
    bound = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
    for name in names:
        try:
            lax.axis_size(name)
        except NameError as error:
            where = "here, since no shard_map is around this call"
            cure = "Call it inside mesh.spmd, over a mesh with that axis"
            if bound:
                where = (
                    "of the shard_map around this call, which has the axes "
                    f"{', '.join(map(repr, bound))}"
                )
                cure = "Name one of those"
            raise ValueError(f"{name!r} is not an axis {where}. {cure}.") from error


def check_typed() -> None:
    """Raises `ValueError` inside a `pmap` or a `jax.shard_map(check_vma=False)`, since these do not
    record in JAX's types which values vary over devices.

    An axis index differs between devices by definition, so the type of an axis index shows whether
    the map records varying axes. Axes of one device are not checked: no value varies along them.
    """
    for name in jax.sharding.get_abstract_mesh().manual_axes:
        # Traced apart, so that the caller's program gets no equation for the index.
        index_type = jax.make_jaxpr(lambda name=name: lax.axis_index(name))().out_avals[0]
        if lax.axis_size(name) > 1 and name not in axes_of_type(index_type):
            raise ValueError(
                "The shard_map or pmap around this call does not track which values differ between "
                f"devices along {name!r}, so nothing would be summed over it. Use mesh.spmd, or "
                "jax.shard_map(..., check_vma=True), instead of check_vma=False or pmap."
            )


def axis_index(axis_name: AxisName) -> jax.Array:
    """Returns the device's place on the axis (row-major on several axes), as an int32 scalar."""
    return lax.axis_index(axis_name) if axes(axis_name) else jnp.zeros((), jnp.int32)


def match_varying(x: Tree, reference: PyTree) -> Tree:
    """Returns the tree `x`, typed as varying also along the mesh axes along which `reference`
    varies.

    A leaf of the result is typed as varying along each mesh axis along which this leaf of `x`, or
    the same leaf of `reference`, varies. A loop needs this for its first carry, whose type must be
    the type of the later carries.
    """
    return jax.tree.map(lambda leaf, like: varying(leaf, varying_axes(like)), x, reference)


def replicated(x: Shaped[Array, "*dims"], axis_name: AxisName) -> Shaped[Array, "*dims"]:
    """Returns `x` declared the same on all devices along `axis_name`, at no cost.

    Nothing checks that the value really is the same on all devices. A value is the same after a
    gather, which gives each device a copy of all blocks, and after a sum in which each block is
    added up on one device and then copied to all devices. `replicated` has no derivative: call it
    where JAX does not differentiate, such as in the functions that are passed to `linear`.
    """
    return replicated_p.bind(x, axes=axes(axis_name))


def _replicated_type(x, *, axes):
    """Returns the type of the result of `replicated_p` on an operand of the type `x`: the same type
    without `axes` among its varying axes."""
    # `mat`, the "manual axis type", has the sets of varying, unreduced and reduced axes.
    try:
        return x.update(manual_axis_type=x.mat.update(varying=x.mat.varying - frozenset(axes)))
    except AttributeError as error:  # a JAX whose types have no `mat`
        raise TypeError(NO_MAT_MESSAGE) from error


# A declaration and no operation: its lowering returns its operand, so no compiled program has it.
replicated_p = Primitive("replicated")
replicated_p.def_impl(lambda x, *, axes: x)
replicated_p.def_abstract_eval(_replicated_type)
mlir.register_lowering(replicated_p, lambda context, x, *, axes: [x])
batching.defvectorized(replicated_p)


def linear(
    x: Shaped[Array, "..."], *, forward: OneArray, backward: OneArray, name: str = ""
) -> Shaped[Array, "..."]:
    """Returns `forward(x)`, for a linear function whose transpose is `backward`.

    Policies of `jax.checkpoint` can recognise the result by `name`. `linear` can be differentiated
    to any order, forward and reverse, and used under `vmap`, `scan`, `checkpoint` and `jit`, inside
    and outside `shard_map`. `backward` must take the cotangent type of the result and return the
    cotangent type of `x`: for example, a result that is invariant along an axis has an invariant
    cotangent.
    """
    return linear_p.bind(x, forward=forward, backward=backward, name=name)


def accumulation_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the type in which to add: float32, or `dtype` itself if it has 32 bits or more."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def linear_jaxpr(eqn: JaxprEqn, mesh: Mesh | AbstractMesh | None, *, check_vma: bool) -> Jaxpr:
    """Returns the jaxpr of `forward`, for an equation of `linear` in a traced program.

    The equation holds two functions and no jaxpr, so `forward` is traced again. `forward` may use
    the axes of the `shard_map` around the equation, so it is traced inside a `shard_map` with the
    same axes.

    Args:
        eqn: the equation of `linear`.
        mesh: the mesh of the `shard_map` around the equation; None if there is no `shard_map`.
        check_vma: the option of that `shard_map`.
    """
    x: Any = eqn.invars[0].aval
    # `eval_shape` gives no jaxpr of the inside of a map, so `body` itself puts it into this list.
    programs = []

    def body():
        """Traces `forward` on zeros of the type of the equation's operand, and appends the jaxpr to
        the enclosing function's list `programs`."""
        zeros = varying(jnp.zeros(x.shape, x.dtype), axes_of_type(x))
        zeros = cast_unchecked(zeros, reduction_state_of_type(x))
        programs.append(jax.make_jaxpr(eqn.params["forward"])(zeros).jaxpr)
        return ()

    mapped = body
    if mesh is not None:
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=(), check_vma=check_vma)
    jax.eval_shape(mapped)
    return programs[0]


def operands(x: Any) -> tuple[Any, ...]:
    """Returns the traced values from which `x` was computed; `()` if no equation was recorded.

    If JAX records a program, the `parent` of a tracer is the equation that made it. The
    `in_tracers` of the equation are its operands.
    """
    return tuple(getattr(getattr(x, "parent", None), "in_tracers", ()))


def _linear_impl(x, *, forward, backward, name):
    return forward(x)


def _linear_type(x, *, forward, backward, name):
    """Returns the abstract type of `forward(x)`."""
    # `forward` is traced: the shape, dtype and replication type of its result follow from its
    # operations.
    return jax.make_jaxpr(forward)(x).out_avals[0]


def _linear_transpose(cotangent, x, *, forward, backward, name):
    """Returns a list with one element: the cotangent of `x`, `backward(cotangent)`.

    The transpose of `backward` is `forward` again. The value of `x` is not read, since the function
    is linear.
    """
    # Without a name: policies of `jax.checkpoint` look only for the forward result.
    return [linear_p.bind(cotangent, forward=backward, backward=forward, name="")]


def _batched(arguments, dims, *, forward, backward, name):
    """Returns the result of `linear` for a batched operand, and the batch dim of the result, 0.

    This is the rule of `linear` for `vmap`. `arguments` is `(x,)`, the batched operand, and `dims`
    is `(dim,)`, its batch dim.
    """
    (x,), (dim,) = arguments, dims
    # The result has its batch dim in front, and so has its cotangent. The operand's cotangent must
    # have its batch dim at `dim`, as the operand has.
    forward, backward = jax.vmap(forward, in_axes=dim), jax.vmap(backward, out_axes=dim)
    return linear_p.bind(x, forward=forward, backward=backward, name=name), 0


linear_p = Primitive("linear_collective")
linear_p.def_impl(_linear_impl)
linear_p.def_abstract_eval(_linear_type)
mlir.register_lowering(linear_p, mlir.lower_fun(_linear_impl, multiple_results=False))
ad.deflinear2(linear_p, _linear_transpose)
batching.primitive_batchers[linear_p] = _batched


def linear_collective(
    x: Shaped[Array, "..."],
    axis_name: AxisName,
    *,
    forward: OneArray,
    backward: OneArray,
    to: str = "varying",
) -> Shaped[Array, "..."]:
    """Returns `forward(x)`, with `backward` as its transpose, and declares the type of the result.

    `forward` and `backward` take and return arrays that vary along `axis_name`. `x` may be varying
    or unreduced along that axis, but not reduced. An unreduced `x` is cast to varying before
    `forward`, so `forward` gets this device's term. The result is declared to have the state `to`
    along the axis: "varying", "invarying" or "reduced". The result of the transpose is declared
    "reduced" if `x` is unreduced, and "varying" if not. Along other axes the types stay as they
    are.
    """

    def on_varying(function, state):
        """Returns a function that casts its `x` to varying, applies `function`, and declares the
        result to have the `state` along `axis_name`.
        """

        def typed(x):
            """Casts `x` to varying, and returns the result of `function` on it.

            The result is declared to have `state` along `axis_name`. Along other axes it has the
            states of `x`, such as "unreduced", since `function` is linear and sends nothing along
            those axes. So if the devices hold terms of a sum, the results are terms of a sum, and
            if they hold equal values, the results are equal.
            """
            # A dict of the axes along which `x` is unreduced or reduced; it lacks all other axes.
            states = reduction_state(x)
            other_states = {name: states[name] for name in states if name not in axes(axis_name)}
            # JAX does not index arrays that are unreduced or reduced along any axis.
            varying_everywhere = dict.fromkeys((*axes(axis_name), *other_states), "varying")
            result_states = {**other_states, **dict.fromkeys(axes(axis_name), state)}
            # `lax.pcast` lacks some of these casts, such as from varying to invariant.
            return cast_unchecked(function(cast_unchecked(x, varying_everywhere)), result_states)

        return typed

    # JAX's types demand this pair: the cotangent of an unreduced value is reduced. The dict
    # `reduction_state(x)` has only the axes along which `x` is unreduced or reduced. Along
    # `axis_name` it is not reduced (`check_summand` and `check_block` refuse that), so an entry for
    # such an axis says "unreduced".
    unreduced = any(axis in axes(axis_name) for axis in reduction_state(x))
    transposed_state = "reduced" if unreduced else "varying"
    return linear(
        x, forward=on_varying(forward, to), backward=on_varying(backward, transposed_state)
    )


def check_summand(name: str, x: Shaped[Array, "..."], axis_name: AxisName) -> Shaped[Array, "..."]:
    """Returns `x` with a type that can be summed along all axes of `axis_name`.

    An `x` that is unreduced along all these axes stays unreduced; any other `x` is typed as varying
    along all of them. `name` is the name of the collective in the errors.

    Raises:
        ValueError: `x` is reduced along one of the axes, or unreduced along some of them only.
            `lax` refuses such arrays too.
    """
    # Only the axes along which `x` is unreduced or reduced.
    states = _states_along(x, axis_name)
    # Unreduced along all axes: each device has one term, and these terms are summed.
    if set(states.values()) == {"unreduced"} and len(states) == len(axes(axis_name)):
        return x
    if "unreduced" in states.values():
        raise ValueError(
            f"{name} along {axis_name!r} needs an x that is unreduced along all of these axes or "
            f"along none; this one, of shape {x.shape}, is {_describe(states)}. Sum it over its "
            "unreduced axes first, then over the others."
        )
    # Refuses an `x` that is reduced along one of the axes.
    return check_block(name, x, axis_name)


def check_block(name: str, x: Shaped[Array, "..."], axis_name: AxisName) -> Shaped[Array, "..."]:
    """Returns `x` typed as varying along `axis_name`.

    Raises `ValueError` if the type of `x` is unreduced or reduced, and so neither varying nor
    invariant, along an axis of `axis_name`. `lax` refuses such an `x` too. `name` is the name of
    the collective in the error.
    """
    # Only the axes along which `x` is unreduced or reduced: if there are none, it is varying or
    # invariant along each.
    states = _states_along(x, axis_name)
    if not states:
        return varying(x, axis_name)
    reduced = [axis for axis, state in states.items() if state == "reduced"]
    cure = "Sum it first, by all_reduce or reduce_scatter"
    if reduced:
        cure = f'Cast it first: lax.pcast(x, {reduced[0]!r}, to="varying")'
    raise ValueError(
        f"{name} along {axis_name!r} does not take an x that is {_describe(states)}; this x has "
        f"the shape {x.shape}. {cure}."
    )


def _states_along(x, axis_name: AxisName) -> dict[str, str]:
    """Returns the entries of the dict `reduction_state(x)` whose axis is in `axis_name`."""
    states = reduction_state(x)
    return {axis: states[axis] for axis in states if axis in axes(axis_name)}


def _describe(states: dict[str, str]) -> str:
    return " and ".join(f"{state} along {axis!r}" for axis, state in states.items())


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service, whose key-value store all processes share.

    The client is `None` before `jax.distributed.initialize`. JAX has no public name for it.
    """
    return distributed.global_state.client


def rank_and_processes() -> tuple[int, int]:
    """Returns this process's rank and the number of processes, without initialising JAX's backend.

    `jax.process_index` would initialise the backend, and then the number of virtual CPU devices
    could no longer be set.
    """
    return distributed.global_state.process_id, distributed.global_state.num_processes
