"""What the recipe of `decoder` takes beside a layout, and what it hands back: a step, and how its state is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from parallax import experts, mesh, rules, tensor
from parallax.models.documents import Documents
from parallax.schedule import Schedule
from parallax.step import Info, InfoWithAux, State
from parallax.typed import PyTree


@dataclass(frozen=True)
class Compute:
    """How a step computes, beside what its layout says.

    Args:
        attend: the attention function, instead of the family's, which on a mesh of TPUs is a kernel (`models.flash`).
        around: where a context axis splits the tokens, `(attend, axis)` to the function that attends over it, such as
            `context.ulysses`, instead of the family's.
        documents: from windows to the number of each token's document, such as `documents.ended_by(token)`: tokens see those of
            their own, and the loss leaves out a target that follows a cut. By default a window is one document.
        dispatch: how tokens come to the experts that a layout splits, such as `experts.exchanged(1.25)`.
        remat: wraps each block, instead of what `layout.remat` says; one of `parallax.remat`, or a policy of your own.
        dtype: of the weights.
        schedule: the pipeline's, where it is another than the layout's.
        max_norm: clip the gradients to this global norm.
        trainable: what is trained, as `step.init` takes it.
        sums: `(block, axis)`: wraps each block so that its gradients are summed over the replicas where they are made, while the
            backward pass runs: `grads.reduced_in_backward`. None: they are summed at the end of the step.
        joins: how blocks join whose tokens are split over the tensor axis: `sequence.overlapping` multiplies while they travel.
            None: `sequence.joins`, which gathers them first.
    """

    attend: Callable[..., Any] | None = None
    remat: Callable[..., Any] | None = None
    dtype: DTypeLike = jnp.float32
    schedule: Schedule | None = None
    max_norm: float | None = None
    trainable: PyTree = rules.is_inexact
    around: Callable[..., Any] | None = None
    documents: Documents | None = None
    dispatch: experts.Dispatch = experts.gathered
    sums: Callable[..., Any] | None = None
    joins: Callable[..., tensor.Joins] | None = None


PLAIN = Compute()


@runtime_checkable
class Train(Protocol):
    """A compiled step, as `jax.jit` makes it: it donates the state."""

    def __call__(
        self,
        state: State,
        windows: Int[ArrayLike, "batch window"],
        weights: Float[ArrayLike, "batch tokens"] | None = None,
        limit: Float[ArrayLike, ""] | None = None,
        /,
    ) -> tuple[State, Info | InfoWithAux]:
        """The state after the step, and what the step measured."""
        ...

    def lower(self, state: PyTree, windows: Any, weights: Any = None, limit: Any = None, /) -> Any:
        """The program for these arrays, or shapes with shardings, to `compile()`: a `jax.stages.Lowered`."""
        ...


class Prepared(NamedTuple):
    """A train step that is checked and ready to compile, and the state that it will need: nothing is computed yet.

    Attributes:
        init: makes the state in its place: no device ever holds the whole. `init(model)` starts from the weights of that model,
            whole, in the host's memory or on one device, such as one that `gpt2.load` gives; each process has it.
        shapes: its `jax.ShapeDtypeStruct`s, with their shardings, to compile for and to plan with.
        train: the step `(state, windows, weights=None, limit=None) -> (state, info)`, under `jit`; it donates the state. With
            weights, [batch, T], the loss is the mean over the tokens that they weigh: 0 leaves one out. A loss above `limit`, a
            scalar, changes nothing.
    """

    init: Callable[..., State]
    shapes: State
    train: Train


class Partly(NamedTuple):
    """A `Train` of a state that holds other things than arrays: they stay as they are."""

    train: Train
    static: Any

    def __call__(self, state: Any, windows: Any, *options: Any) -> tuple[Any, Info | InfoWithAux]:
        """The state after the step, and what the step measured."""
        new, info = self.train(eqx.filter(state, mesh.is_array), windows, *options)
        return eqx.combine(new, self.static), info

    def lower(self, state: PyTree, windows: Any, *options: Any) -> Any:
        """The program, of the state's arrays alone."""
        return self.train.lower(eqx.filter(state, mesh.is_array), windows, *options)
