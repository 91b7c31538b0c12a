"""A mesh of named axes, trees placed on the mesh, and the only wrapper of `jax.shard_map`.

All axes are Auto outside `spmd` and manual inside. `spmd` gives a function the local block of every
array, and the function names the axes along which it sends data. The check of replication types is
always on. A mesh of `jax.make_mesh`, whose axes are Explicit, may be used too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from parallax import argument_checks
from parallax._typing import Device, PyTree
from parallax.trees import (
    UNEVEN_AXES,
    AnyMesh,
    dotted,
    entry_axes,
    is_array,
    shardings,
)

Tree = TypeVar("Tree", bound=PyTree)


@overload
def make(*, devices: Sequence[Device] | None, **sizes: int) -> Mesh: ...
@overload
def make(**sizes: int) -> Mesh: ...
# The second form is for `make(**layout.axes)`: without it, a type checker would read each size as a
# possible value of `devices`.
def make(  # pyright: ignore[reportInconsistentOverload]
    *, devices: Sequence[Device] | None = None, **sizes: int
) -> Mesh:
    """Returns a mesh over `devices`, with the axes in the order given: `make(data=4, tensor=2)`.

    TPUs are arranged so that, if possible, each hop of a ring along an axis crosses one link of the
    torus. Devices of several slices are taken slice by slice, so that the first axes cross the
    network between slices; the last axes stay inside a slice or a machine.

    Args:
        devices: the devices to use; all of them by default.
        sizes: the size of each axis, at least 1. Their product is the number of devices.

    Raises:
        ValueError: the sizes do not multiply to the number of devices; there is no axis, or a size
            is below 1; or there are several CPU devices, and JAX's compilation cache is on: a
            program for several CPU devices that is loaded from the cache can return wrong numbers.
    """
    devices = jax.devices() if devices is None else list(devices)
    asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if not sizes or any(size < 1 for size in sizes.values()):
        raise ValueError(
            f"mesh.make needs axes of size 1 or more, as in make(data=4, tensor=2); got ({asked})."
        )
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(_wrong_product(sizes, asked, len(devices)))
    _check_not_cached(devices)
    types = (AxisType.Auto,) * len(sizes)
    from parallax import torus  # only a mesh of real devices needs it

    # The axes are Auto: with Explicit axes, `shard_map` refuses inputs that are not yet laid out as
    # its `in_specs` say.
    return Mesh(torus.device_array(devices, tuple(sizes.values())), tuple(sizes), axis_types=types)


def abstract(**sizes: int) -> AbstractMesh:
    """Returns a mesh without devices, over which a step can be traced: `abstract(data=256)`.

    `plan.trace` reads such a step.

    Raises:
        ValueError: there is no axis, or a size is below 1.
    """
    if not sizes or any(size < 1 for size in sizes.values()):
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh.abstract needs axes of size 1 or more, as in abstract(data=256); got ({asked})."
        )
    return AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def platform_of(mesh: AnyMesh) -> str:
    """Returns the kind of a mesh's devices: "cpu", "gpu" or "tpu".

    An abstract mesh, which serves only to trace, counts as CPUs, unless it has a
    `jax.sharding.AbstractDevice`.
    """
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return mesh.abstract_device.platform if mesh.abstract_device is not None else "cpu"


def _check_not_cached(devices: Sequence[Device]) -> None:
    """Raises `ValueError` for CPU devices whose programs may come from JAX's compilation cache.

    A CPU program that is loaded from the cache runs its collectives in an order that differs
    between devices. With JAX 0.10.2 and 0.12, ring attention over four devices then hung, or
    returned wrong numbers.
    """
    config: Any = jax.config
    cached = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
    if cached and len(devices) > 1 and devices[0].platform == "cpu":
        raise ValueError(
            f"mesh.make: JAX keeps compiled programs in {config.jax_compilation_cache_dir}. A "
            f"program for {len(devices)} CPU devices that is loaded from there can hang or return "
            "wrong numbers. Unset JAX_COMPILATION_CACHE_DIR, or call "
            "jax.config.update('jax_enable_compilation_cache', False) first."
        )


def _wrong_product(sizes: dict[str, int], asked: str, devices: int) -> str:
    """Returns the error for sizes that do not multiply to the number of devices, with cures.

    `asked` are the sizes as text, such as "data=4 x tensor=2".
    """
    product = math.prod(sizes.values())
    # Each entry is a new size of one axis with which the product is the number of devices.
    fitting = [
        f"{name}={devices // (product // size)}"
        for name, size in sizes.items()
        if devices % (product // size) == 0
    ]
    cures = [f"set {' or '.join(fitting)}"] if fitting else []
    cures += [f"pass devices=jax.devices()[:{product}]"] if product < devices else []
    noun = "devices" if product > 1 else "device"
    cures += [
        f"make {product} virtual CPU {noun} with jax.config.update('jax_num_cpu_devices', "
        f"{product})"
    ]
    choices = ", or ".join(cures)
    return (
        f"The mesh sizes {asked} multiply to {product}, and there are {devices} devices. "
        f"Either {choices}."
    )


def spmd(
    f: Callable[..., Any], *, mesh: AnyMesh, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """Returns a function that runs `f` on every device, on that device's block of each argument.

    It is `jax.shard_map` for Equinox trees, with `check_vma=True`. Leaves that are not arrays
    (activation functions, Python numbers) enter and leave `f` unchanged. Wrap the returned function
    in `eqx.filter_jit`. Use `jax.jit` only if all leaves are arrays, since `jax.jit` turns Python
    numbers into arrays. The returned function may also be called inside a jitted program. Each
    argument is first laid out as its spec says, whatever its layout was. Results lie on `mesh`;
    under `jax.set_mesh`, the mesh of the results has the axis types (Auto or Explicit) of the mesh
    that was set.

    Args:
        f: a function of local blocks; `f` names the axes along which it communicates.
        mesh: the mesh.
        in_specs: a tuple that has, for each argument, a tree prefix of `PartitionSpec`s.
            `rules.specs` returns such a tree.
        out_specs: a tree prefix of `PartitionSpec`s for the result of `f`.

    Raises:
        ValueError: a spec names an axis that the mesh lacks, or one axis twice; a spec is longer
            than its array's rank, or splits a dim that is no multiple of the number of devices; or
            an array has the spec None. In these cases the message names the leaf. The error is also
            raised if the call is inside another `spmd` or `shard_map`; if `jax.set_mesh` has set a
            mesh with other axes or sizes; or if some axes are Auto and others Explicit.
    """

    def mapped(*arguments):
        """Returns the result of `f`, as global arrays on the mesh."""
        typed_mesh = _in_context(mesh)  # with the axis types of `jax.set_mesh`
        arrays, static_in = eqx.partition(arguments, is_array)
        check_specs(arrays, in_specs, typed_mesh)
        arrays = _laid_out(arrays, in_specs, typed_mesh)
        # A function or a number cannot be a result of `shard_map`, so `body` puts such leaves here.
        static_out = []

        def body(*arrays):
            """Returns the arrays of the result of `f`; its other leaves go to `static_out`."""
            try:
                returned = f(*eqx.combine(arrays, static_in))
            except (AssertionError, NameError) as error:
                _note_axes(error, typed_mesh)
                raise
            result, static = eqx.partition(returned, is_array)
            static_out.append(static)
            return result

        # While `f` is traced, `grads` reads these axes. `grads` refuses a batch in which one spec
        # splits several leaves over such an axis, although the leaves have different numbers of
        # rows: one leaf may be a table, which is not to be split.
        with UNEVEN_AXES(_uneven_axes(arrays, in_specs)):
            result = jax.shard_map(
                body, mesh=typed_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
            )(*arrays)
        # The last trace counts, if JAX traced `body` more than once.
        return eqx.combine(result, static_out[-1])

    return mapped


def _note_axes(error: Exception, mesh: AnyMesh) -> None:
    """Adds the names of the mesh's axes to an error that JAX raises if a collective names another
    axis: an assertion without a text, or a `NameError` about an axis name."""
    if not str(error) or "axis name" in str(error):
        names = ", ".join(map(repr, mesh.axis_names))
        error.add_note(
            f"mesh.spmd runs this function over {names}. JAX raises this error if a collective, "
            "such as lax.psum, names another axis; then name one of those."
        )


def _uneven_axes(arrays: PyTree, specs: PyTree) -> frozenset[str]:
    """Returns the mesh axes over which one spec splits the rows of several arrays, although the
    arrays have different numbers of rows.

    `specs` is a tree prefix, so one spec may hold for several leaves. The rows of an array are its
    first dim. In a batch, one of these arrays may be a table, such as the weights of the classes,
    that was split by mistake. So `grads` refuses such a batch. Arrays that each have a spec of
    their own may have different numbers of rows.
    """

    def axes(spec, leaves):
        """Returns the mesh axes over which `spec` splits the first dim of the arrays `leaves`, if
        the first dims of these arrays differ in size; otherwise `()`."""
        rows = {leaf.shape[0] for leaf in jax.tree.leaves(leaves) if leaf.ndim}
        return entry_axes(spec[0]) if len(spec) and len(rows) > 1 else ()

    return frozenset(jax.tree.leaves(jax.tree.map(axes, specs, arrays)))


def _in_context(mesh: AnyMesh) -> AnyMesh:
    """Returns `mesh`; under `jax.set_mesh`, with the axis types of the mesh that was set.

    Raises `ValueError` if the call is inside an `spmd` or a `shard_map`; if `jax.set_mesh` has set
    a mesh with other axes or sizes; or if some axes are Auto and others Explicit.
    """
    context = jax.sharding.get_abstract_mesh()
    # Inside a map, JAX would map over the other axes only, and there are none.
    if context.manual_axes:
        names = ", ".join(map(repr, context.manual_axes))
        raise ValueError(
            "mesh.spmd maps over all axes of its mesh, but this call is inside a map already, "
            f"which runs over {names}. Inside that map, call the function itself with the local "
            "blocks; or call mesh.spmd outside the map, under jax.jit."
        )
    if not context.empty and list(context.shape.items()) != list(mesh.shape.items()):
        raise ValueError(
            f"mesh.spmd was given the mesh {dict(mesh.shape)}, but jax.set_mesh has set another, "
            f"{dict(context.shape)}. Pass that mesh as mesh=, or call outside of jax.set_mesh."
        )
    types = mesh.axis_types if context.empty else context.axis_types
    if len(set(types)) > 1:
        named = ", ".join(
            f"{name!r} {kind.name}" for name, kind in zip(mesh.axis_names, types, strict=True)
        )
        raise ValueError(
            "mesh.spmd needs a mesh whose axes are all Auto, as mesh.make's are, or all Explicit; "
            f"got {named}. Use mesh.make, or axis_types=(AxisType.Auto,) * {len(types)} in "
            "jax.make_mesh."
        )
    return mesh if types == mesh.axis_types else mesh.update(axis_types=types)


def _laid_out(arrays: Tree, specs: PyTree, mesh: AnyMesh) -> Tree:
    """Returns `arrays`; those that `shard_map` may refuse are first laid out as `specs` say.

    On a mesh of Auto axes, `shard_map` lays out the arrays itself. On Explicit axes `shard_map`
    refuses arrays with another layout. With JAX 0.12, a program on an Auto mesh that gets an array
    of an Explicit mesh cannot be lowered, so such arrays are laid out first too.
    """

    def leaf(array, spec):
        """Returns `array`. If `mesh` or the mesh of `array` has Explicit axes, the result is laid
        out as `spec` says; otherwise it is `array` unchanged."""
        if AxisType.Explicit in mesh.axis_types:
            return jax.reshard(array, NamedSharding(mesh, spec))
        # Here `mesh` has Auto axes, which `jax.reshard` refuses in a spec.
        if AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types:
            return jax.device_put(array, NamedSharding(mesh, spec))
        return array

    return jax.tree.map(leaf, arrays, jax.tree.broadcast(specs, arrays))


def place(tree: Tree, specs: PyTree, mesh: Mesh) -> Tree:
    """Returns `tree` with every array on the devices of `mesh`, split as `specs` says.

    `specs` is a tree prefix. Leaves that are no arrays stay as they are. While `jax_enable_x64` is
    off, NumPy arrays of 64-bit numbers become 32-bit, as in `jnp.asarray`.

    Raises:
        ValueError: a spec does not fit its array or the mesh, as in `spmd`.
    """
    arrays, static = eqx.partition(tree, is_array)
    check_specs(arrays, specs, mesh)
    return eqx.combine(jax.device_put(arrays, shardings(specs, mesh)), static)


class Moved(NamedTuple):
    """The result of `move`.

    Attributes:
        tree: the tree on the new devices.
        bytes: the number of bytes that the new devices did not have before, summed over devices.
    """

    tree: Any
    bytes: int


def move(tree: PyTree, specs: PyTree, mesh: Mesh) -> Moved:
    """Returns `(tree, bytes)`: `tree` on the devices of `mesh`, split as `specs` (a tree prefix)
    says, and the number of bytes that had to be moved, summed over devices.

    The arrays may be on any devices of this process. So no checkpoint is needed to use a model on
    another mesh: the two meshes may have different axes and different numbers of devices. All
    values stay the same, to the bit, and the given arrays remain valid. The part that a device has
    already is not counted among the moved bytes. A NumPy array is on no device, so all its bytes
    count. NumPy's 64-bit numbers become 32-bit while `jax_enable_x64` is off, if that changes no
    value. In this example, a model that was trained under `layout` moves to the mesh `wide`, to
    generate text there. `joined` joins the layers of the pipeline stages:

        whole = decoder.joined(gpt2.FAMILY, layout, state.model)
        model, moved = mesh.move(whole, rules.specs(whole, gpt2.rules("tensor"), wide), wide)

    Raises:
        ValueError: a spec does not fit its array or the mesh, as in `spmd`; or an array is deleted,
            is traced by `jax.jit`, or lies on devices of other processes; or a NumPy array has a
            value that a 32-bit type cannot represent, and `jax_enable_x64` is off.
    """
    arrays, static = eqx.partition(in_types_of_jax("mesh.move", tree), is_array)
    check_specs(arrays, specs, mesh)
    fitted = jax.tree.broadcast(shardings(specs, mesh), arrays)
    total = sum(jax.tree.leaves(jax.tree.map_with_path(_missing, arrays, fitted)))
    return Moved(eqx.combine(jax.device_put(arrays, fitted), static), total)


def in_types_of_jax(name: str, tree: PyTree) -> PyTree:
    """Returns `tree`, with its NumPy arrays in the types that JAX gives them: 32-bit types in place
    of 64-bit ones while `jax_enable_x64` is off. Other leaves stay as they are.

    Raises `ValueError`, which begins with `name`, if a value changes.
    """

    def leaf(path, leaf):
        """Returns one leaf, in the type that JAX gives it."""
        if not isinstance(leaf, np.ndarray | np.generic):
            return leaf
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if dtype == leaf.dtype:
            return leaf
        with np.errstate(all="ignore"):
            narrow = np.asarray(leaf).astype(dtype)
        if not np.array_equal(leaf, narrow, equal_nan=True):
            raise ValueError(
                f"{name} keeps all values; {dotted(path)} is {leaf.dtype}, and has a value that "
                f"{dtype} cannot represent. Set jax_enable_x64, or cast this array yourself."
            )
        return narrow

    return jax.tree.map_with_path(leaf, tree)


def _missing(path: Sequence, leaf: Any, sharding: NamedSharding) -> int:
    """Returns the number of bytes of `leaf` that must be moved, summed over devices.

    A device needs the part of `leaf` that `sharding` gives it. What the device already has of this
    part is not moved.
    """
    argument_checks.check_not_deleted(f"mesh.move: {dotted(path)}", leaf)
    if isinstance(leaf, Tracer) or not getattr(leaf, "is_fully_addressable", True):
        where = (
            "is traced by jax.jit"
            if isinstance(leaf, Tracer)
            else "lies on devices of other processes too"
        )
        raise ValueError(
            f"mesh.move takes arrays that live on devices of this process; {dotted(path)} {where}. "
            "Inside jax.jit, use mesh.spmd, whose in_specs lay out arrays; between processes, use "
            "a checkpoint."
        )
    # A NumPy array lies on no device, so all its bytes are sent.
    old_places = (
        leaf.sharding.devices_indices_map(leaf.shape) if isinstance(leaf, jax.Array) else {}
    )

    def volume(box):
        """Returns the number of elements in a box, a list of (start, stop) for each dim."""
        return math.prod(stop - start for start, stop in box)

    missing = 0
    for device, place in sharding.devices_indices_map(leaf.shape).items():
        needed = _box(place, leaf.shape)
        missing += volume(needed)
        if device in old_places:
            pairs = zip(needed, _box(old_places[device], leaf.shape), strict=True)
            # The overlap of the new block [a, b) and the old block [c, d), dim by dim. If they do
            # not overlap, the stop is moved up to the start, so that the size is 0.
            missing -= volume([(max(a, c), max(min(b, d), a, c)) for (a, b), (c, d) in pairs])
    return missing * leaf.dtype.itemsize


def _box(place: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns (start, stop) for each dim of a part of an array of the shape `shape`. `place` has a
    slice for each dim: the part that a device holds."""
    return [part.indices(size)[:2] for part, size in zip(place, shape, strict=True)]


def check_specs(tree: PyTree, specs: PyTree, mesh: AnyMesh) -> None:
    """Raises `ValueError` if a spec does not fit its leaf of `tree` on `mesh`.

    `specs` is a tree prefix.
    """
    try:
        fitted = jax.tree.broadcast(specs, tree)
    except ValueError as error:
        # `_check_none` raises a clearer error for the most common mistake: `jax.jit` turned a
        # number into an array.
        _check_none(specs, tree)
        raise ValueError(
            "The specs must have the structure of the arguments, or of a prefix of it: one "
            f"PartitionSpec per argument, or a tree such as rules.specs returns. {error}"
        ) from error

    def check(path, leaf, spec):
        check_spec(dotted(path), leaf, spec, mesh)

    jax.tree.map_with_path(check, tree, fitted)


def _check_none(specs: PyTree, tree: PyTree) -> None:
    """Raises `ValueError` for an array whose spec is None. Only leaves that are no arrays may have
    this spec, and such leaves have been removed from `tree`."""
    # `specs` is a tree prefix: an array below the path of a None has the spec None.
    specs_and_none = jax.tree.leaves_with_path(specs, is_leaf=lambda x: x is None)
    static = [tuple(path) for path, spec in specs_and_none if spec is None]
    for path, leaf in jax.tree.leaves_with_path(tree):
        if any(tuple(path[: len(prefix)]) == prefix for prefix in static):
            raise ValueError(
                f"{dotted(path)}: the specs have None, as for a leaf that is no array (a Python "
                f"number, a function), but the leaf is an array, {leaf.dtype}{list(leaf.shape)}. "
                "jax.jit turns Python numbers into arrays: use eqx.filter_jit, which leaves them "
                "as they are. If the leaf was an array from the beginning, give it a "
                "PartitionSpec, as rules.specs does."
            )


def check_spec(path: str, leaf: Any, spec: PartitionSpec, mesh: AnyMesh, rule: str = "") -> None:
    """Raises `ValueError` if `spec` does not fit the array `leaf`.

    The message names `path`, and also the rule that gave the spec, if it is given as `rule`.
    """
    where = f"{path}: {spec}" + (f" from rule {rule}" if rule else "")
    # JAX refuses such specs too, but its message does not name the leaf. An entry of a spec, for
    # one dim, names no axis, one, or several.
    names = [name for entry in spec for name in entry_axes(entry)]
    for name in names:
        if name not in mesh.shape:
            raise ValueError(
                f"{where} names the mesh axis {name!r}, and the mesh has {dict(mesh.shape)}. "
                "Use one of those."
            )
        if names.count(name) > 1:
            raise ValueError(
                f"{where} uses the mesh axis {name!r} {names.count(name)} times. An array can "
                "be split over an axis only once."
            )
    if len(spec) > leaf.ndim:
        raise ValueError(
            f"{where} has {len(spec)} entries, and the array has {leaf.ndim} dims (shape "
            f"{leaf.shape}). Drop entries, so that at most one for each dim is left."
        )
    for dim, entry in enumerate(spec):
        size = math.prod(mesh.shape[name] for name in entry_axes(entry))
        if leaf.shape[dim] % size:
            raise ValueError(
                f"{where}: dim {dim} of shape {leaf.shape} must be a multiple of {size}, the size "
                f"of mesh axis {' x '.join(map(repr, entry_axes(entry)))}. Choose another dim, or "
                "replicate this leaf with P()."
            )
