"""The rules of the library: `match`, `first`, `fsdp` and `experts`.

`match` gives one spec to all paths that match a glob. `first` returns the spec of the first rule
that gives one. `fsdp` takes the spec of another rule, and splits one more dim. `experts` is a
`match` for the weights of experts.

A rule is a function (path, leaf) -> `PartitionSpec`. It returns None to leave the leaf to another
rule. Any function of this form that you write is a rule too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, SupportsIndex

from jax.sharding import PartitionSpec
from jax.sharding import PartitionSpec as P

from parallax._typing import Rule
from parallax.rules.placement import free, padded, spec_of

# The rules are classes in lower case, as `functools.partial` is: they are called like functions.
# `specs` reads their fields to name the wrong rule in an error.


@dataclass(frozen=True)
class match:
    """The rule that gives `spec` to paths that match the glob `pattern`, and None to other paths.

    Dots separate the parts of a pattern and of a path. `**` matches any number of parts, also none.
    Any other part of the pattern is a file-name glob for one part of the path: `*` matches any
    part, `w*` a part that begins with w.
    """

    pattern: str
    spec: PartitionSpec

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | None:
        """Returns `spec`, or None if the pattern does not match."""
        return self.spec if matches_glob(self.pattern, path) else None

    def __repr__(self) -> str:
        return f"match({self.pattern!r}, {self.spec})"


@dataclass(frozen=True)
class experts(match):
    """A `match` for the weights of experts, to which `parallax.experts.moe` sends tokens.

    Tokens of all replicas reach each expert, so `spec` may name an axis that splits the batch. An
    `fsdp` over the same axis does not change `spec`. If a `match` split any other leaf over such an
    axis, the replicas would train different models.
    """

    def __repr__(self) -> str:
        return f"experts({self.pattern!r}, {self.spec})"


@dataclass(frozen=True, init=False)
class first:
    """The rule that asks `rules` in order, and returns the first spec that one of them gives."""

    rules: tuple[Rule, ...]

    def __init__(self, *rules: Rule):
        object.__setattr__(self, "rules", rules)

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | None:
        """Returns the spec of the first rule that gives one, or None."""
        given = (rule(path, leaf) for rule in self.rules)
        return next((spec for spec in given if spec is not None), None)


@dataclass(frozen=True)
class fsdp:
    """The rule of ZeRO-3: it takes the spec of another rule, `inside`, and splits one more dim over
    `axis_name`.

    The split dim is the largest that no axis splits yet and that is a multiple of `size`; of
    equally large dims, the first. Two kinds of leaf keep the spec of `inside`: leaves of fewer than
    `min_size` elements, counted before any split, and leaves in which no dim can be split.
    `explain` says which leaves these are. To keep some leaves whole, put another rule before this
    one: `first(match("**.bias", P()), fsdp("data", size=8))`.

    `keep` maps globs to dims that are not split: `keep={"blocks.**": (0,)}` keeps dim 0 of the
    blocks whole. This is the dim of layers, over which a scan runs. If this dim were split, each
    replica would have only some of the layers, so `zero.gathered` would raise an error. A dim that
    a leaf does not have keeps nothing in that leaf.

    `size` is the size of the mesh axis, or the product of the sizes for a tuple of axes. `size` is
    given here so that a rule needs no mesh; `specs` compares `size` with the mesh.

    Raises:
        ValueError: `size` is below 1; or `axis_name` is a list; or a value of `keep` is no sequence
            of whole numbers.
    """

    axis_name: str | tuple[str, ...]
    # The size is given, and not read from a mesh, so that a rule can be made before the mesh.
    size: int = field(kw_only=True)
    min_size: int = field(default=2**10, kw_only=True)
    # A dict has no hash, and a frozen dataclass needs one to be part of a `jax.jit` key.
    keep: Mapping[str, Sequence[int]] = field(default_factory=dict, kw_only=True, hash=False)
    inside: Rule = field(default=match("**", P()), kw_only=True)

    def __post_init__(self):
        """Raises `ValueError` if `size` is below 1, if `axis_name` is a list, or if a value of
        `keep` is no sequence of whole numbers."""
        if isinstance(self.axis_name, list):
            raise ValueError(
                f"fsdp needs the name of a mesh axis, or a tuple of names; got {self.axis_name!r}."
            )
        if self.size < 1:
            raise ValueError(
                f"fsdp({self.axis_name!r}) needs the size of its mesh axis, 1 or more; got "
                f"{self.size}. Pass the number of devices along that axis."
            )
        for pattern, dims in self.keep.items():
            if not isinstance(dims, Iterable) or any(
                isinstance(dim, bool) or not isinstance(dim, SupportsIndex) for dim in dims
            ):
                raise ValueError(
                    f"fsdp({self.axis_name!r}) needs a tuple of dims, such as (0,), in `keep`; got "
                    f"{dims!r} for {pattern!r}."
                )

    def __call__(self, path: str, leaf: Any) -> PartitionSpec | None:
        """Returns the spec that `inside` gives, with one more dim split if a dim can be split."""
        spec = self.inside(path, leaf)
        # A leaf to which `inside` gives no spec is left to another rule. `split` returns the spec
        # and the reason.
        return None if spec is None else self.split(path, leaf, spec)[0]

    def __repr__(self) -> str:
        return f"fsdp({self.axis_name!r}, size={self.size})"

    def split(self, path: str, leaf: Any, spec: PartitionSpec) -> tuple[PartitionSpec, str]:
        """Returns `spec`, with one more dim split if a dim can be split, and a text that says what
        was split, or why nothing was split."""
        entries = padded(spec, leaf.ndim)  # one for each dim
        # `keep` maps globs of paths to dims that stay unsplit.
        dims = [
            dim
            for pattern in self.keep
            if matches_glob(pattern, path)
            for dim in self.keep[pattern]
        ]
        # `keep` may count dims from the end, as in NumPy.
        spared = {dim + leaf.ndim if dim < 0 else dim for dim in dims}
        fit = [dim for dim in free(leaf, entries, self.size) if dim not in spared]
        if leaf.size < self.min_size:
            return (
                spec,
                f"adds no split: {leaf.size} elements are fewer than min_size={self.min_size}",
            )
        if not fit:
            note = f" (keep spares {sorted(spared)})" if spared else ""
            return (
                spec,
                f"adds no split: no free dim of shape {leaf.shape} is a multiple of "
                f"{self.size}{note}",
            )
        # The largest dim is still large after the split, so that no shard is a thin slice. Of equal
        # dims `max` takes the first, so all processes choose alike.
        dim = max(fit, key=lambda dim: leaf.shape[dim])
        entries[dim] = self.axis_name
        return spec_of(entries), f"splits dim {dim} of shape {leaf.shape}"


def matches_glob(pattern: str, path: str) -> bool:
    """Returns whether the glob `pattern` matches the whole of `path`. In both, dots separate the
    parts."""

    def fits(globs: list[str], parts: list[str]) -> bool:
        """Returns whether `globs`, the parts of a pattern, match `parts`, all parts of a path."""
        if not globs:
            return not parts
        # `**` stands for no part, or for the first part and any number of later ones.
        if globs[0] == "**":
            return fits(globs[1:], parts) or (bool(parts) and fits(globs, parts[1:]))
        return bool(parts) and fnmatchcase(parts[0], globs[0]) and fits(globs[1:], parts[1:])

    # `"".split(".")` would be one empty part.
    return fits(*(text.split(".") if text else [] for text in (pattern, path)))
