"""What a pipeline's functions may not do is refused in a sentence that names the leaf and the cure;
the lint tells of it too."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from reference import EXACT, FLOAT64, assert_close

from parallax import grads, lint, mesh, pipeline
from parallax.schedule import gpipe, one_f_one_b_lockstep, zero_bubble_lockstep

STAGES, WIDTH = 2, 4
TABLE = one_f_one_b_lockstep(STAGES, 4)
SPECS = {"scale": P(), "blocks": {"w": P(None, "stage")}}


def params():
    w = jax.random.normal(jax.random.key(0), (1, 4, WIDTH, WIDTH), FLOAT64) / 3
    return {"scale": jnp.linspace(0.5, 1, WIDTH), "blocks": {"w": w}}


def batch(rows=8):
    return jax.random.normal(jax.random.key(1), (rows, WIDTH), FLOAT64)


def embed(params, part):
    return part * params["scale"][None]


def stage(params, x, part, position):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["blocks"]["w"])[0]


def head(params, x, part):
    return jnp.mean((x - part) ** 2)


def grad_fn(
    embed=embed, stage=stage, head=head, grad_fn=pipeline.value_and_grad, table=TABLE, **options
):
    """The mapped grad_fn of `params()`; gradients are those of all."""
    f = grad_fn(
        embed, stage, head, table, "stage", blocks=lambda params: params["blocks"], **options
    )
    return mapped(f, P() if grad_fn is pipeline.value else (P(), SPECS))


OUT = (P(), SPECS)


def mapped(f, out_specs=OUT):
    return mesh.spmd(
        f,
        mesh=mesh.make(stage=STAGES, devices=jax.devices()[:STAGES]),
        in_specs=(SPECS, P()),
        out_specs=out_specs,
    )


@pytest.mark.parametrize("grad_fn", [pipeline.value_and_grad, pipeline.value])
def test_parameters_without_blocks_need_where(grad_fn):
    with pytest.raises(ValueError, match=r"a dict, have no attribute `blocks`.* blocks="):
        mapped(grad_fn(embed, stage, head, TABLE, "stage"))(params(), batch())
    with pytest.raises(ValueError, match="a dict, have no attribute `blocks`"):
        pipeline.unpipelined(embed, stage, head)(params(), batch())


def closing(of):
    """A gradient function whose stage reads, by closure, what `of` makes of its parameters."""

    def grad(params, batch):
        scale = of(params)
        own = lambda params, x, part, position: stage(params, x, part, position) * scale[None]
        return pipeline.value_and_grad(
            embed, own, head, TABLE, "stage", blocks=lambda params: params["blocks"]
        )(params, batch)

    return grad


penalty = lambda params: jnp.sum(params["blocks"]["w"] ** 2)
CURE = (
    "Read the parameter scale from stage's first argument, which has all parameters; to leave the "
    "parameter scale out of the gradient, use jax.lax.stop_gradient in stage."
)
ELSEWHERE = (
    "{0} reads blocks.w, which is split over 'stage'. In {0} each device would read only the "
    "blocks of its own stage, and the blocks would get no gradient from {0}. Read the blocks "
    "in the stage instead. A stage may add a term to the loss: let it return "
    "pipeline.Output(x, loss=...). A weight that embed, head and all stages use does not belong in "
    "the blocks."
)
MISUSES = {
    "head": (
        grad_fn(head=lambda params, x, part: head(params, x, part) + penalty(params)),
        ("blocks-outside-the-stage", "blocks.w", ELSEWHERE.format("head")),
    ),
    "embed": (
        grad_fn(embed=lambda params, part: embed(params, part) * penalty(params)),
        ("blocks-outside-the-stage", "blocks.w", ELSEWHERE.format("embed")),
    ),
    "closure": (
        mapped(closing(lambda params: params["scale"])),
        (
            "parameter-by-closure",
            "scale",
            "stage uses the parameter scale by closure, so the gradient of the parameter scale "
            "would miss this use. " + CURE,
        ),
    ),
    "whole on every stage": (
        mesh.spmd(
            pipeline.value_and_grad(
                embed, stage, head, TABLE, "stage", blocks=lambda params: params["blocks"]
            ),
            mesh=mesh.make(stage=STAGES, devices=jax.devices()[:STAGES]),
            in_specs=(P(), P()),
            out_specs=P(),
        ),
        (
            "blocks-on-every-stage",
            "w",
            "the blocks' array ['w'], of shape (1, 4, 4, 4) on a stage, is the same along "
            "'stage', so each of the 2 stages would run all layers. Shape the array as [1, "
            "L / 1, ...] for L layers, and split its dim 1 by the spec P(None, 'stage'); L must be "
            "a multiple of 2, the number of chunks of all stages.",
        ),
    ),
    "closure, computed": (
        mapped(closing(lambda params: jnp.exp(params["scale"]))),
        (
            "parameter-by-closure",
            "scale",
            "stage uses a value made of the parameter scale by closure, so the gradient of the "
            "parameter scale would miss this use. " + CURE,
        ),
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_gradient_that_would_be_missing(name):
    """Refused by name; and in the lint a finding, not an error."""
    run, (kind, leaf, message) = MISUSES[name]
    with pytest.raises(pipeline.Misused) as refusal:
        jax.eval_shape(run, params(), batch())
    assert str(refusal.value) == f"pipeline: {message}"
    (finding,) = lint.program(run, params(), batch())
    assert (finding.kind, finding.where) == (kind, leaf)
    assert f"{finding.harm} {finding.cure}" == message


def test_a_parameter_from_before_a_cast_is_the_same_parameter():
    """The mean over replicas declares the parameters varying first; a stage may not close over what
    they were before."""

    def grad(params, batch):
        own = lambda params_, x, part, position: (
            stage(params_, x, part, position) * params["scale"][None]
        )
        inner = pipeline.value_and_grad(
            embed, own, head, TABLE, "stage", blocks=lambda params: params["blocks"]
        )
        return grads.averaged(inner, "data")(params, batch)

    world = mesh.make(data=2, stage=STAGES, devices=jax.devices()[: 2 * STAGES])
    run = mesh.spmd(grad, mesh=world, in_specs=(SPECS, P("data")), out_specs=(P(), SPECS))
    with pytest.raises(pipeline.Misused, match="stage uses the parameter scale by closure"):
        jax.eval_shape(run, params(), batch())


def test_what_is_not_trained_may_come_by_closure():
    """A table, and a frozen parameter: neither has a gradient to lose."""
    turn = jnp.cos(jnp.arange(WIDTH, dtype=FLOAT64))
    where = lambda params: params["blocks"]

    def turned(params, x, scale):
        return jax.lax.scan(
            lambda x, w: (x + jnp.tanh(x @ w) * (turn + scale)[None], None),
            x,
            params["blocks"]["w"],
        )[0]

    def grad(params, batch):
        own = lambda own, x, part, position: turned(own, x, params["scale"])
        options = {"blocks": where, "trainable": {"scale": False, "blocks": True}}
        return pipeline.value_and_grad(embed, own, head, TABLE, "stage", **options)(params, batch)

    loss, gradients = jax.jit(mapped(grad, (P(), SPECS | {"scale": None})))(params(), batch())
    assert gradients["scale"] is None
    own = lambda params, x, part, position: turned(params, x, params["scale"])
    expected = jax.value_and_grad(pipeline.unpipelined(embed, own, head, blocks=where))(
        params(), batch()
    )
    np.testing.assert_allclose(loss, expected[0], rtol=EXACT)
    assert_close(gradients["blocks"], expected[1]["blocks"], EXACT)


def test_the_loss_alone_may_close_over_parameters():
    """Nothing is differentiated there."""

    def value(params, batch):
        own = lambda _, x, part: head(params, x, part) * jnp.sum(params["scale"])
        return pipeline.value(
            embed, stage, own, TABLE, "stage", blocks=lambda params: params["blocks"]
        )(params, batch)

    own = lambda params, x, part: head(params, x, part) * jnp.sum(params["scale"])
    plain = pipeline.unpipelined(embed, stage, own, blocks=lambda params: params["blocks"])(
        params(), batch()
    )
    np.testing.assert_allclose(jax.jit(mapped(value, P()))(params(), batch()), plain, rtol=EXACT)


@pytest.mark.sweep(3, "wholes")
def test_a_penalty_on_the_blocks_is_a_term_of_the_stage():
    """The cure: each stage adds its own part; it equals the sum in the head of one device."""
    own = lambda params, x, part, position: pipeline.Output(
        stage(params, x, part, position), loss=penalty(params)
    )
    found = jax.jit(grad_fn(stage=own))(params(), batch())
    whole = pipeline.unpipelined(embed, stage, head, blocks=lambda params: params["blocks"])
    expected = jax.value_and_grad(lambda params, batch: whole(params, batch) + penalty(params))(
        params(), batch()
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=EXACT)
    assert_close(found[1], expected[1], EXACT)
    value = jax.jit(grad_fn(stage=own, grad_fn=pipeline.value))(params(), batch())
    np.testing.assert_allclose(value, expected[0], rtol=EXACT)
    plain = pipeline.unpipelined(embed, own, head, blocks=lambda params: params["blocks"])(
        params(), batch()
    )
    np.testing.assert_allclose(plain, expected[0], rtol=EXACT)


def test_blocks_that_are_read_without_an_effect_are_none_of_it():
    """A cast of all parameters, as mixed precision makes, of which the head uses the ends."""
    cast = lambda f: (
        lambda params, *others: f(jax.tree.map(lambda w: w.astype(jnp.float32), params), *others)
    )
    single = lambda f: lambda params, *others: cast(f)(params, *others).astype(FLOAT64)
    own = lambda params, x, part: head(params, x.astype(jnp.float32), part.astype(jnp.float32))
    first = lambda params, part: embed(params, part.astype(jnp.float32))
    jax.eval_shape(grad_fn(embed=single(first), head=single(own)), params(), batch())


def output(**fields):
    return lambda params, x, part, position: pipeline.Output(
        stage(params, x, part, position), **fields
    )


NOT_A_SCALAR = (
    "pipeline: {} must be a scalar, one real floating-point number for a microbatch; got {}. Take "
    "its mean or its sum."
)
NO_NUMBER = (
    "pipeline: {} is no array of numbers, so it cannot be added up over the stages. Leave it out."
)
REFUSALS = {
    "another tree": (
        {"stage": lambda params, x, part, position: {"y": x}},
        "pipeline: a stage must return a tree of the same structure as its input, float64[2, 4], "
        "since its output is the next stage's input; it returned y: float64[2, 4]. To return a "
        "loss or auxiliary values as well, return pipeline.Output(output, loss=..., aux=...).",
    ),
    "another leaf": (
        {
            "embed": lambda params, part: {"x": embed(params, part), "skip": part},
            "stage": lambda params, x, part, position: x | {"skip": x["skip"][:, :2]},
        },
        "pipeline: a stage must return what it takes, skip: float64[2, 4], since its output is "
        "the next stage's input; it returned skip: float64[2, 2]. Change the shape or "
        "the dtype only in embed or head.",
    ),
    "auxiliary value": (
        {
            "stage": lambda params, x, part, position: pipeline.Output(
                x, aux={"key": jax.random.key(0)}
            )
        },
        NO_NUMBER.format("the stage's auxiliary value key: key<fry>[]"),
    ),
    "auxiliary value of the head": (
        {
            "head": lambda params, x, part: (
                head(params, x, part),
                {"keys": jax.random.split(jax.random.key(0), 2)},
            )
        },
        NO_NUMBER.format("the head's auxiliary value keys: key<fry>[2]"),
    ),
    "stage's loss": (
        {"stage": output(loss=jnp.ones(2))},
        NOT_A_SCALAR.format("the stage's loss", "float64[2]"),
    ),
    "head's loss": (
        {"head": lambda params, x, part: x},
        NOT_A_SCALAR.format("the head's loss", "float64[2, 4]"),
    ),
    "integers": (
        {"embed": lambda params, part: {"ids": jnp.ones((2, 3), jnp.int32)}},
        "pipeline: embed returned ids: int32[2, 3], and at least one array of floating-point "
        "numbers must go through the stages: other arrays have no cotangent, so embed would get "
        "no gradient. Let embed return the arrays that it looks up, such as embeddings; the "
        "batch itself reaches every stage, as `microbatch`.",
    ),
    "keys": (
        {"embed": lambda params, part: {"key": jax.random.key(0), "x": part}},
        "pipeline: embed returned key: key<fry>[], and random keys do not travel between stages. "
        "Put them into the batch, one for each row: every stage gets the microbatch "
        "that it works on, as the argument `microbatch`.",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused(name):
    functions, message = REFUSALS[name]
    for each in (pipeline.value_and_grad, pipeline.value):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            jax.eval_shape(grad_fn(**functions, grad_fn=each), params(), batch())


@pytest.mark.parametrize(
    ("change", "rows", "message"),
    [
        (
            lambda params: params,
            0,
            "pipeline: the batch's leaf itself has shape (0, 4) on each device: it is empty, and "
            "has no mean. Use at least one row for each microbatch on each device.",
        ),
        (
            lambda params: params | {"blocks": {"w": params["blocks"]["w"][:, :0]}},
            8,
            "pipeline: the blocks' array ['w'] has shape (1, 0, 4, 4) on a stage, so each of the "
            "2 stages is without a layer. Use at least 2 layers, one for each chunk of each "
            "stage, or fewer stages or chunks.",
        ),
    ],
)
def test_nothing_to_compute_on_is_refused(change, rows, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(grad_fn(), change(params()), batch(rows))


def test_a_scalar_in_the_batch_is_refused():
    with pytest.raises(
        ValueError, match="is a scalar, but the first dim of every leaf must run over the"
    ):
        jax.eval_shape(grad_fn(), params(), jnp.ones(()))


def test_a_head_that_some_stages_share_is_refused():
    table, axis = one_f_one_b_lockstep(4, 4), ("a", "b")
    summed = lambda params, x, part: jax.lax.psum(head(params, x, part), "a")
    grad = pipeline.value_and_grad(
        embed, stage, summed, table, axis, blocks=lambda params: params["blocks"]
    )
    specs = SPECS | {"blocks": {"w": P(None, axis)}}
    run = mesh.spmd(
        grad,
        mesh=mesh.make(a=2, b=2, devices=jax.devices()[:4]),
        in_specs=(specs, P()),
        out_specs=(P(), specs),
    )
    message = (
        "pipeline: the head's value differs along ['b'], and is the same along the other axes of "
        "('a', 'b')."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(run, params(), batch())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: pipeline.layers_per_stage(3, 4),
            "pipeline.layers_per_stage: 3 layers on 4 stages of 1 chunks leave a chunk without a "
            "layer. Use at least 4 layers, or fewer stages or chunks.",
        ),
        (
            lambda: pipeline.pad_layers(jnp.ones((3, 2)), np.array([[2, 0, 1]])),
            "A table of layers has 0 for chunk 0 of stage 1, and each chunk needs at least one "
            "layer, since padding repeats the chunk's last layer. Give this chunk a layer of "
            "another chunk, or use fewer stages.",
        ),
        (
            lambda: pipeline.pad_layers(jnp.ones((3, 2)), np.array([[2.0, 1.0]])),
            "A table of layers must be an array [chunks, stages] of whole numbers, such as "
            "[[3, 3, 2, 2]]; got float64 of shape (1, 2).",
        ),
        (
            lambda: pipeline.pad_layers(jnp.ones((4, 2)), np.array([[2, 1]])),
            "pipeline.pad_layers needs arrays [3, ...] in the blocks, since the table has 3 layers "
            "in all; got shape (4, 2). Put the layers into the first dim.",
        ),
        (
            lambda: pipeline.unpad_layers(jnp.ones((1, 3, 2)), np.array([[2, 1]])),
            "pipeline.unpad_layers: the table is for blocks [1, 4, ...], and an array of the "
            "blocks has shape (1, 3, 2). Pass the whole model, outside of mesh.spmd, and the "
            "table that padded it.",
        ),
    ],
)
def test_tables_of_layers_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


CURE_OF_SUMS = (
    "Leave 'stage' out of its axes. To gather a parameter, gather it in embed, and let x bring it "
    "to the stages."
)


def of_stages(params, x, part, position):
    """A stage that centres its x by a mean over all devices."""
    return x - jax.lax.pmean(jnp.mean(x, axis=0), "stage")[None]


def of_parameters(params, x, part, position):
    """A stage that reads the scales of all stages."""
    return x * jnp.mean(jax.lax.all_gather(params["scale"], "stage"), axis=0)[None]


@pytest.mark.parametrize("make", [one_f_one_b_lockstep, gpipe, zero_bubble_lockstep])
def test_a_stage_in_lockstep_communicates_with_no_other_stage(make):
    """In a tick the stages have different microbatches, and some have none."""
    own = functools.partial(grad_fn, table=make(STAGES, 4))
    place = r"pipeline: stage has a collective over 'stage' \(.*_refusals.py:\d+\)\. "
    mixed = "In a tick each stage has a microbatch of its own or none, so the collective would mix "
    mixed += f"numbers of several microbatches. {CURE_OF_SUMS}"
    dropped = "A stage that has no job in a tick drops its gradients, and with them the parts that "
    dropped += f"such a collective brings from other stages. {CURE_OF_SUMS}"
    for each in (pipeline.value_and_grad, pipeline.value):
        with pytest.raises(ValueError, match=f"^{place}{re.escape(mixed)}"):
            jax.eval_shape(own(stage=of_stages, grad_fn=each), params(), batch())
    with pytest.raises(ValueError, match=f"^{place}{re.escape(dropped)}"):
        jax.eval_shape(own(stage=of_parameters), params(), batch())


def test_a_stage_in_lockstep_may_gather_what_is_not_trained():
    """It is the same in all ticks, and has no gradient to lose."""
    value = jax.jit(grad_fn(stage=of_parameters, grad_fn=pipeline.value))(params(), batch())
    own = lambda params, x, part, position: x * params["scale"][None]
    plain = pipeline.unpipelined(embed, own, head, blocks=lambda params: params["blocks"])
    two_chunks = params() | {"blocks": {"w": params()["blocks"]["w"].reshape(2, 2, WIDTH, WIDTH)}}
    np.testing.assert_allclose(value, plain(two_chunks, batch()), rtol=EXACT)
