"""What each word of a layout does. They are read here, by `rows`, and are functions from then on: no other file asks for them.

    does = words.read(Layout(data=4, tensor=2, zero=3, remat="products"))
    grad = does.outside(does.grad(enter, stage, head, placed), placed)          # the grad arrow of any model in three functions

Legend: P stages, M microbatches, v chunks a stage.

Sources: Rajbhandari et al. (arXiv 1910.02054) for ZeRO's stages; Korthikanti et al. (arXiv 2205.05198) for `sequence` and
`attention`; Narayanan et al. (arXiv 2104.04473) for `one_f_one_b`; Qi et al. (arXiv 2401.10241) for `zero_bubble`.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from parallax import context, grads, pipeline, precision, remat, schedule, sequence
from parallax.collectives import Axis, AxisLike, Mover
from parallax.layout import ways
from parallax.layout.rows import (
    Again,
    Contexts,
    Copies,
    Functions,
    Kept,
    Need,
    Numbers,
    Order,
    Replicas,
    Rows,
    Sends,
    Sized,
    Stages,
    Tokens,
    alone,
    inputs,
    piped,
    products,
    share,
    short,
)

# zero: 0, 1, 2, 3

OVER_REPLICAS = (Need("data", "splits state over replicas", instead=0, why=", or more replicas", others=("context",)),)
ZERO = (
    Replicas("ZeRO-0: nothing", outside=ways.averaged),
    Replicas("ZeRO-1: optimizer state", outside=ways.scattered, optimizer=ways.sharded, state=share, needs=OVER_REPLICAS),
    Replicas(
        "ZeRO-2: optimizer state, gradients",
        each=ways.scattered_each,
        in_stages=ways.scattered_in_stages,
        outside=ways.scattered,
        optimizer=ways.sharded,
        state=share,
        sums=share,
        sums_of_ends=share,
        needs=OVER_REPLICAS,
    ),
    Replicas(
        "ZeRO-3: optimizer state, gradients, parameters",
        block=ways.gathered,
        unroll=2,
        ends=ways.gathered_ends,
        outside=ways.averaged,
        value=ways.gathered_value,
        state=share,
        sums=share,
        parameters=share,
        needs=OVER_REPLICAS,
    ),
)

# sequence: False, True

TOKENS = (
    Tokens(),
    Tokens(
        joins=sequence.joins,
        grad=grads.summed,
        of=share,
        says="; residual stream by tokens",
        needs=(Need("tensor", "splits tokens over the tensor axis", instead=False),),
    ),
)

# context: 1, or more

CONTEXTS = (
    Contexts(),
    Contexts(joins=ways.over_context, checked=context.checked, of=share, axis="context"),
)

# replica: 1, or more

COPIES = (Copies(), Copies(grad=grads.averaged, of=share))

# split_sends: False, True

SHARES_SENDS = "shares what goes from stage to stage among the tensor axis"
SENDS = (
    Sends(),
    Sends(
        exchange=pipeline.split_over,
        of=share,
        says="; sends split over tensor",
        needs=(Need("stage", SHARES_SENDS, instead=False), Need("tensor", SHARES_SENDS, instead=False)),
    ),
)

# precision

PRECISION = {
    "full": Numbers("full"),
    "bfloat16": Numbers("bfloat16", grad=ways.mixed(jnp.bfloat16), dtype=jnp.bfloat16, of=short),
    "float16": Numbers("float16", grad=ways.mixed(jnp.float16), dtype=jnp.float16, scale=precision.Scale, of=short),
}

# remat

ALL = Kept()
ALL_BUT_GATHERS = Kept(remat.gathers, gathered=share, gathers=2)
PRODUCTS = Kept(remat.products, of=products, scores=0, gathers=2, sums=1)
INPUTS = Kept(remat.block, of=inputs, scores=0, gathers=2, sums=1)

REMAT = {
    "none": Again("none", ALL, ALL_BUT_GATHERS),
    "gathers": Again("gathers", ALL_BUT_GATHERS, ALL_BUT_GATHERS, gathers_alone=True),
    # `remat.gathers` round the block keeps the scores, which `jax.checkpoint` round attention inside it would not.
    "attention": Again("attention", ALL._replace(scores=0), ALL_BUT_GATHERS, attend=jax.checkpoint, scores=1, passes=0.5),
    "products": Again("products", PRODUCTS, PRODUCTS, scores=1, passes=1.0),
    "block": Again("block", INPUTS, INPUTS, weights=1, scores=1, passes=1.0),
    "stage": Again(
        "stage",
        ALL,
        ALL_BUT_GATHERS,
        keep=pipeline.inputs,
        in_stages=True,
        weights=1,
        scores=1,
        passes=1.0,
        needs=(Need("stage", "is for pipelines", instead="block"),),
    ),
}

# schedule

SEVERAL = (Need("stage", "orders the jobs of several stages", instead="one_f_one_b"),)
ORDERS = {
    "one_f_one_b": Order(
        schedule.one_f_one_b, ways.ticks_of_one_f_one_b, ways.slots_of_one_f_one_b, lambda P, M, v: M * v + P - 1
    ),
    "gpipe": Order(
        ways.gpipe,
        ways.ticks_of_gpipe,
        ways.slots_of_gpipe,
        lambda P, M, v: M + P - 1,
        interleaves=False,
        needs=SEVERAL,
    ),
    "zero_bubble": Order(
        schedule.zero_bubble,
        ways.ticks_of_zero_bubble,
        ways.slots_of_one_f_one_b,
        lambda P, M, v: M * v,
        ways.handed_of_zero_bubble,
        needs=SEVERAL,
    ),
    "one_f_one_b_in_turns": ways.in_turns(ways.one_f_one_b_in_turns)._replace(interleaves=False, needs=SEVERAL),
    "zero_bubble_in_turns": ways.in_turns(schedule.zero_bubble_in_turns)._replace(needs=SEVERAL),
}

# stage: 1, or more

STAGES = (
    Stages(grad=ways.one_after_another, value=ways.composed, of=alone),
    Stages(
        grad=ways.one_behind_another,
        value=ways.pipelined,
        of=piped,
        cut=ways.in_chunks,
        joined=ways.in_layers,
        loops=2,
        axis="stage",
    ),
)


def rows(fields: Mapping[str, Any]) -> Rows:
    """A layout's fields, by name, as rows. This is the one place in which its words are read."""
    return Rows(
        stages=STAGES[fields["stage"] > 1],
        replicas=ZERO[fields["zero"]],
        tokens=TOKENS[fields["sequence"]],
        contexts=CONTEXTS[fields["context"] > 1],
        copies=COPIES[fields["replica"] > 1],
        sends=SENDS[fields["split_sends"]],
        numbers=PRECISION[fields["precision"]],
        again=REMAT[fields["remat"]],
        order=ORDERS[fields["schedule"]],
    )


def read(layout: Sized, axes: Mapping[str, AxisLike] | None = None) -> Functions:
    """A `Layout` as functions.

    Args:
        layout: the layout.
        axes: who moves data along which axis; rings along those that are left out, or, where stages take turns, `jax.lax`.

    Raises:
        ValueError: an axis that no layout has, or one that is bound to another name.
    """
    does = rows(vars(layout))
    return Functions(
        axes=_bound(layout, axes or {}, does.order.mover),
        stages=does.stages,
        replicas=does.replicas,
        tokens=does.tokens,
        contexts=does.contexts,
        copies=does.copies,
        sends=does.sends,
        numbers=does.numbers,
        again=does.again,
        kept=does.replicas.parameters(whole=does.again.kept, share=does.again.gathering),
        order=does.order,
        table=functools.partial(does.order.table, layout.stage, layout.microbatches, layout.chunks),
        microbatches=layout.microbatches,
        chunks=layout.chunks,
    )


def _bound(layout: Sized, axes: Mapping[str, AxisLike], mover: Mover) -> dict[str, Axis]:
    """Each axis of `layout` with who moves data along it: what `axes` say, and `mover` along the rest."""
    found = {name: mover(name) for name in layout.axes}
    for name, axis in axes.items():
        if name not in found or Axis.of(axis).names != name:
            raise ValueError(
                f"axes needs movers along {', '.join(found)}, such as axes={{'data': ring('data')}}; got {name!r}: {axis!r}."
            )
        found[name] = Axis.of(axis)
    return found
