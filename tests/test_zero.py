"""What the replicas split instead of copying: the same steps, each byte on the wire, and each byte
on the devices."""

import functools
import itertools
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from reference import EXACT, assert_close, assert_same_run, gpt2_on, gpt2_on_one_device

from parallax import grads, mesh, rules, sequence, step, zero
from parallax.collectives import matmul, ring, xla
from parallax.collectives.types import varying
from parallax.layout import Layout
from parallax.models import decoder, gpt2

# Its blocks' norms and biases have fewer than the 1,024 elements from which `fsdp` splits: some
# leaves are split, some are not.
CONFIG = gpt2.Config(
    layers=4,
    heads=4,
    width=32,
    context=8,
    vocabulary=30,
    vocabulary_multiple=32,
    dropout=0.1,
    attention_dropout=0.1,
)
STEPS, BATCH = 5, 16


def trains_as_one_device(layout, algorithm=ring):
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    run = gpt2_on(layout, mesh_, CONFIG, 0, STEPS, BATCH, algorithm=algorithm)
    assert_same_run(run, gpt2_on_one_device(CONFIG, 0, STEPS, BATCH))


@pytest.mark.parametrize(
    ("layout", "algorithm"),
    [
        pytest.param(
            Layout(data=2, zero=1, microbatches=2), ring, marks=pytest.mark.sweep(30, "steps")
        ),
        pytest.param(
            Layout(data=2, zero=3, tensor=2, sequence=True, remat="products"),
            xla,
            marks=pytest.mark.long,
        ),
        pytest.param(
            Layout(data=2, stage=2, tensor=2, zero=2, sequence=True, microbatches=2),
            ring,
            marks=pytest.mark.long,
        ),
        pytest.param(
            Layout(data=2, stage=2, tensor=2, zero=3, microbatches=4, chunks=2, remat="block"),
            ring,
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_five_steps_are_those_of_one_device(layout, algorithm):
    trains_as_one_device(layout, algorithm)


@pytest.mark.long
def test_products_that_overlap_with_their_collectives_compute_the_same():
    model = gpt2.GPT2(WIRE, key=jax.random.key(0), dtype=jnp.dtype("float64"))
    windows = jnp.arange(4 * 9, dtype=jnp.int32).reshape(4, 9) % WIRE.vocabulary
    overlapped = functools.partial(
        sequence.comms,
        all_gather_matmul=matmul.all_gather_matmul,
        matmul_reduce_scatter=matmul.matmul_reduce_scatter,
    )
    loss = functools.partial(gpt2.loss, axis=ring("tensor"), comms=overlapped)
    grad = grads.summed(jax.value_and_grad(loss), ring("tensor"))
    mesh_ = mesh.make(tensor=4, devices=jax.devices()[:4])
    specs = rules.specs(model, gpt2.rules(), mesh_)
    split = mesh.spmd(grad, mesh=mesh_, in_specs=(specs, P()), out_specs=(P(), specs))
    ours = jax.jit(split)(model, (windows, None))
    assert_close(ours, jax.jit(jax.value_and_grad(gpt2.loss))(model, (windows, None)), EXACT)


@pytest.mark.sweep(5)
@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=4, zero=2, microbatches=2, tensor=2),
        Layout(tensor=4, sequence=True, remat="gathers"),
        Layout(data=8, zero=3),
        Layout(stage=2, tensor=2, sequence=True, remat="stage", microbatches=2),
        Layout(data=2, stage=4, zero=1, microbatches=4, remat="attention"),
    ],
    ids=str,
)
def test_five_steps_are_those_of_one_device_here_too(layout):
    trains_as_one_device(layout)


def admitted():
    """Every combination that Layout admits, over up to eight devices, one shape of microbatches
    each."""
    sizes = [
        (d, s, t)
        for d, s, t in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4))
        if d * s * t in (2, 4, 8)
    ]
    for (d, s, t), zero_, by_tokens, remat in itertools.product(
        sizes,
        range(4),
        (False, True),
        ("none", "gathers", "attention", "products", "block", "stage"),
    ):
        for microbatches, chunks in ((1, 1), (2, 1), (4, 2)):
            if (chunks == 1 or s == 2) and BATCH % (d * microbatches) == 0:
                try:
                    yield Layout(
                        d, s, t, microbatches, chunks, zero=zero_, sequence=by_tokens, remat=remat
                    )
                except ValueError:
                    continue  # refused, as `test_layout` has it


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(layout=st.sampled_from(list(admitted())), algorithm=st.sampled_from([ring, xla]))
def test_five_steps_are_those_of_one_device_whatever_is_combined(layout, algorithm):
    trains_as_one_device(layout, algorithm)


# Bytes on the wire

WIRE = gpt2.Config(layers=4, heads=8, width=32, context=8, vocabulary=32, vocabulary_multiple=32)


def sent(layout, config=WIRE, batch=8):
    """Bytes that each device hands on in a step of rings, from the compiled program."""
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    with jax.numpy_dtype_promotion("standard"):
        prepared = decoder.train_step(
            gpt2.FAMILY,
            config,
            optax.adamw(1e-3),
            layout,
            mesh_,
            batch=batch,
            key=jax.random.key(0),
            compute=decoder.Compute(axes={name: ring(name) for name in layout.axes}),
        )
        windows = jax.ShapeDtypeStruct((batch, config.context + 1), jnp.int32)
        ops = hlo.collectives(prepared.train, prepared.shapes, windows)
    return sum(op.bytes for op in ops if op.kind == "collective-permute")


def sizes(config, n):
    """Elements of the leaves that are split over n replicas: of the blocks and of the rest; and of
    each leaf that is not."""
    shapes = jax.eval_shape(functools.partial(gpt2.GPT2, config, key=jax.random.key(0)))
    rule = rules.fsdp("data", size=n, keep={"blocks.**": (0,)}, inside=gpt2.rules())
    specs = dict(rules.paths(rules.specs(shapes, rule)))
    split = {path: leaf.size for path, leaf in rules.paths(shapes) if "data" in tuple(specs[path])}
    whole = [leaf.size for path, leaf in rules.paths(shapes) if path not in split]
    blocks = sum(size for path, size in split.items() if path.startswith("blocks"))
    return blocks, sum(split.values()) - blocks, whole


@pytest.mark.parametrize(
    ("n", "zero_", "microbatches"),
    [
        pytest.param(2, 3, 2, marks=pytest.mark.sweep(30, "steps")),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(8, 0, 1), (8, 1, 1), (4, 1, 2), (4, 2, 2), (8, 3, 1)]
        ),
    ],
)
def test_the_bytes_on_the_wire_are_those_of_theory(n, zero_, microbatches):
    blocks, rest, whole = sizes(WIRE, n)
    M, ring_of = microbatches, lambda elements: 2 * (n - 1) * -(-elements // n)
    split = {
        0: ring_of(blocks) + ring_of(rest),
        1: 2 * (blocks + rest) * (n - 1) // n,  # one reduce-scatter, one all-gather
        2: (M + 1) * (blocks + rest) * (n - 1) // n,  # scattered once a microbatch
        3: (3 * M * blocks + 2 * rest)
        * (n - 1)
        // n,  # blocks gathered forward and backward; the rest gathered once and kept
    }[zero_]
    scalars = (
        [1] if zero_ == 0 else [1, 1, 1]
    )  # the loss; the squared norm of what is split, and whether the update is finite
    others = sum(map(ring_of, [*whole, *scalars]))
    assert sent(Layout(data=n, zero=zero_, microbatches=M)) == 4 * (split + others)


@pytest.mark.parametrize(
    ("sequence", "remat", "times"),
    [
        pytest.param(False, "none", 8, marks=pytest.mark.long),
        pytest.param(True, "none", 8, marks=pytest.mark.long),
        pytest.param(True, "gathers", 10, marks=pytest.mark.long),
    ],
)
def test_tensor_and_sequence_parallelism_move_the_same(sequence, remat, times):
    """8 b s h (t - 1)/t elements a layer: the difference of two depths. Gathering again costs 2
    more."""
    t, batch = 4, 8
    deep, shallow = (
        sent(
            Layout(tensor=t, sequence=sequence, remat=remat),
            gpt2.Config(
                layers=layers, heads=8, width=32, context=8, vocabulary=32, vocabulary_multiple=32
            ),
            batch,
        )
        for layers in (6, 4)
    )
    norms_and_biases = (
        2 * (t - 1) * 2 * 6 * 32 // t if sequence else 0
    )  # two layers' gradients, summed over t once a step
    per_layer = times * batch * WIRE.context * WIRE.width * (t - 1) // t
    assert deep - shallow == 4 * (2 * per_layer + norms_and_biases)


# Bytes on the devices


def memory(layout, config, batch=8, **options):
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    with jax.numpy_dtype_promotion("standard"):
        prepared = decoder.train_step(
            gpt2.FAMILY,
            config,
            optax.adamw(1e-3),
            layout,
            mesh_,
            batch=batch,
            key=jax.random.key(0),
            **options,
        )
        windows = jax.ShapeDtypeStruct(
            (batch, config.context + 1), jnp.int32, sharding=jax.NamedSharding(mesh_, P("data"))
        )
        return prepared, prepared.train.lower(prepared.shapes, windows).compile().memory_analysis()


@pytest.mark.sweep(4)
@pytest.mark.long
@pytest.mark.parametrize(("zero_", "held"), [(0, 3.0), (1, 1 + 2 / 8), (2, 1 + 2 / 8), (3, 3 / 8)])
def test_parameters_and_optimizer_state_are_held_once(zero_, held):
    """Parameters and AdamW's two moments on each device, in parameters: 3, 1 + 2/n, 3/n, and what
    stays whole."""
    n, config = (
        8,
        gpt2.Config(layers=4, heads=8, width=64, context=16, vocabulary=64, vocabulary_multiple=64),
    )
    blocks, rest, whole = sizes(config, n)
    expected = 4 * (held * (blocks + rest) + 3 * sum(whole))
    batch_and_counts = config.context * 4 + 4 + 3 * 4  # a window, and three counters
    assert (
        abs(
            memory(Layout(data=n, zero=zero_), config)[1].argument_size_in_bytes
            - expected
            - batch_and_counts
        )
        <= 64
    )


def temporary(layout, layers, **sizes):
    """Temporary bytes of a step on a device, beside parameters and optimizer state."""
    sizes = {
        "heads": 8,
        "width": 32,
        "context": 128,
        "vocabulary": 32,
        "vocabulary_multiple": 32,
    } | sizes
    return memory(layout, gpt2.Config(layers=layers, **sizes))[1].temp_size_in_bytes


@pytest.mark.long
def test_sequence_parallelism_keeps_its_share_of_the_activations():
    """What a layer adds to a step's memory, as the difference of two depths: 1/t of one
    device's."""
    growth = lambda layout: temporary(layout, 8) - temporary(layout, 4)
    t, one = 4, growth(Layout())
    share = one / growth(Layout(tensor=t, sequence=True, remat="gathers"))
    assert (
        t * 0.98 < share <= t
    )  # each device has all of the norms and biases, and of their gradients
    assert one / growth(Layout(tensor=t)) < t * 0.9  # residual stream and norms are on every device


@pytest.mark.long
def test_zero_3_holds_two_layers_beside_its_shares():
    """Of sixteen layers over eight devices: two gathered, one layer's gradient, and four shares.

    Those are the gradients, and what becomes of the weights and of both moments: it is held beside
    them until all of it is known to be finite.
    """
    n, layers, width = 8, 16, 256
    layer = 4 * 12 * width**2
    held = temporary(Layout(data=n, zero=3, remat="block"), layers, width=width, context=8)
    assert held < (2 + 1 + 4 * layers / n) * layer


# The functions alone


def quadratic(params, batch):
    return jnp.mean((batch @ params["matrix"] + params["bias"][None]) ** 2)


PARAMS = {"matrix": jnp.arange(32.0 * 64).reshape(32, 64) / 777, "bias": jnp.linspace(-1, 1, 64)}
INPUTS = jnp.sin(jnp.arange(16 * 32.0)).reshape(16, 32)
SHARES = {"matrix": P(None, "data"), "bias": P()}


def plain_steps(optimizer, count):
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(count):
        updates, state = optimizer.update(jax.grad(quadratic)(params, INPUTS), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.sweep(6)
@pytest.mark.parametrize("arrive", ["scattered", "local", "averaged"])
@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(1e-2, eps=1e-6), optax.sgd(0.1, momentum=0.9), optax.lion(1e-3)],
    ids=["adam", "momentum", "lion"],
)
def test_a_sharded_optimizer_is_the_optimizer(optimizer, arrive):
    """However the gradients arrive: as shares, local, or averaged; the state is made inside the
    map."""
    with jax.numpy_dtype_promotion("standard"):
        expected = plain_steps(optimizer, 3)
        sharded = zero.sharded(optimizer, "data", SHARES)
        grad = jax.value_and_grad(quadratic)
        local = lambda params, batch: grad(varying(params, "data"), batch)
        grad_fn = {
            "scattered": zero.reduce_scattered(grad, "data", SHARES),
            "local": local,
            "averaged": grads.averaged(grad, "data"),
        }[arrive]

        def train(params, batch):
            state = sharded.init(params)
            moments = [leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim]
            assert set(moments) == {32 * 64 // 8, 64}
            for _ in range(3):
                updates, state = sharded.update(grad_fn(params, batch)[1], state, params)
                params = optax.apply_updates(params, updates)
            return params

        spmd = mesh.spmd(train, mesh=mesh.make(data=8), in_specs=(P(), P("data")), out_specs=P())
        assert_close(jax.jit(spmd)(PARAMS, INPUTS), expected, EXACT)


def test_gradients_of_other_shapes_than_the_specs_are_not_scattered():
    """In a pipeline, the gradients of blocks have a first dim of chunks."""
    scatter = lambda gradients: zero.reduce_scatter(gradients, "data", {"w": P(None, "data")})
    run = mesh.spmd(scatter, mesh=mesh.make(data=8), in_specs=(P(),), out_specs=P())
    for shape in ((1, 3, 8), (8,)):
        message = rf"splits dim 1 over the 8 devices of data, .* shape \({shape[0]}"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(run, {"w": jnp.zeros(shape)})


@pytest.mark.sweep(3, "wholes")
def test_a_split_inside_a_group_with_copies_across_groups():
    """Hybrid: shares over 4 devices, copies over 2 groups of them, the batch over all 8."""
    optimizer = optax.adam(1e-2, eps=1e-6)
    mesh_ = mesh.make(copy=2, shard=4)
    specs = rules.specs(PARAMS, rules.fsdp("shard", size=4), mesh_)
    sharded = zero.sharded(optimizer, "shard", specs)
    grad = grads.averaged(
        zero.reduce_scattered(jax.value_and_grad(quadratic), "shard", specs), ring("copy")
    )
    train = step.make(grad, sharded)
    state = step.State(PARAMS, optimizer.init(PARAMS), jnp.zeros((), jnp.int32))
    whole = step.State(
        jax.tree.map(lambda _: P(), PARAMS), rules.optimizer_specs(optimizer, PARAMS, specs), P()
    )
    with jax.numpy_dtype_promotion("standard"):
        run = jax.jit(
            mesh.spmd(
                train, mesh=mesh_, in_specs=(whole, P(("copy", "shard"))), out_specs=(whole, P())
            )
        )
        for _ in range(3):
            state, _ = run(state, INPUTS)
        assert_close(state.model, plain_steps(optimizer, 3), EXACT)


def test_sums_over_replicas_are_wide():
    """One replica has a gradient of 256 and seven have 1: in bfloat16 their sum of 263 would be 256
    or 264."""
    params = {"split": jnp.zeros(8, jnp.bfloat16), "whole": jnp.zeros(8, jnp.bfloat16)}
    specs = {"split": P("data"), "whole": P()}
    grad = lambda params, batch: (batch[0], jax.tree.map(lambda w: w + batch, params))
    reduced = zero.reduce_scattered(grad, "data", specs)
    run = mesh.spmd(
        lambda *given: reduced(*given)[1],
        mesh=mesh.make(data=8),
        in_specs=(P(), P("data")),
        out_specs=specs,
    )
    means = jax.jit(run)(params, jnp.ones(8, jnp.bfloat16).at[0].set(256))
    for leaf in means.values():
        np.testing.assert_array_equal(leaf, np.full(8, 263 / 8, np.float32), strict=True)


def test_clipping_sees_the_whole_gradient():
    optimizer, max_norm = optax.sgd(0.1), 0.01
    clipped = optax.chain(optax.clip_by_global_norm(max_norm), optimizer)
    grad = zero.reduce_scattered(jax.value_and_grad(quadratic), "data", SHARES)
    sharded = zero.sharded(optimizer, "data", SHARES)
    train = step.make(grad, sharded, max_norm=max_norm)
    with jax.numpy_dtype_promotion("standard"):
        state = step.State(PARAMS, optimizer.init(PARAMS), jnp.zeros((), jnp.int32))
        run = mesh.spmd(
            train, mesh=mesh.make(data=8), in_specs=(P(), P("data")), out_specs=(P(), P())
        )
        state, info = jax.jit(run)(state, INPUTS)
        assert_close(state.model, plain_steps(clipped, 1), EXACT)
        np.testing.assert_allclose(
            info.gradient_norm, optax.tree.norm(jax.grad(quadratic)(PARAMS, INPUTS)), rtol=EXACT
        )


def refused(message, f, *arguments):
    with pytest.raises(ValueError, match=re.escape(message)):
        f(*arguments)


def test_gradients_that_nobody_reduced_are_refused():
    optimizer = optax.sgd(0.1)
    local = lambda params, batch: jax.value_and_grad(quadratic)(varying(params, "data"), batch)
    state = step.State(PARAMS, optimizer.init(PARAMS), jnp.zeros((), jnp.int32))
    run = mesh.spmd(
        step.make(local, optimizer),
        mesh=mesh.make(data=8),
        in_specs=(P(), P("data")),
        out_specs=(P(), P()),
    )
    refused(
        "step.make needs gradients that are reduced; the gradient of bias differs along ['data'], "
        "where the parameter is the same. Wrap the gradient function in grads.averaged, "
        "zero.reduce_scattered or ZeRO.grad.",
        jax.jit(run),
        state,
        INPUTS,
    )


def test_an_update_without_parameters_is_refused():
    sharded = zero.sharded(optax.sgd(0.1), "data", SHARES)
    refused(
        "zero.sharded: update needs the parameters, whose shapes show which gradients are shares "
        "and which are whole.",
        sharded.update,
        PARAMS,
        (),
    )


@pytest.mark.parametrize("axis", ["data", ring("data")], ids=str)
def test_zero_3_takes_a_model_that_holds_random_keys(axis):
    """Keys that live as shares are gathered with the weights, by any algorithm."""
    world = mesh.make(data=4, devices=jax.devices()[:4])
    model = {"w": jnp.ones((8, 4)), "keys": jax.random.split(jax.random.key(1), 8)}
    specs, batch = {"w": P("data"), "keys": P("data")}, jnp.ones((8, 8))

    def loss(model, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(model["keys"])
        return jnp.mean((batch @ model["w"] + jnp.sum(noise, 0)[None]) ** 2)

    gathered = zero.gathered(loss, axis, specs)
    run = mesh.spmd(
        lambda model, batch: jax.lax.pmean(gathered(model, batch), "data"),
        mesh=world,
        in_specs=(specs, P("data")),
        out_specs=P(),
    )
    assert_close(jax.jit(run)(model, batch), loss(model, batch), EXACT)


@pytest.mark.parametrize("wraps", ["the loss", "the gradients"])
def test_specs_of_another_tree_are_refused(wraps):
    """Nothing would be gathered, and each device would use its share as the whole parameter."""
    specs, other = {"w": P("data")}, {"block": {"w": P("data")}, "bias": P()}
    loss = lambda model, batch: jnp.mean(batch) * jnp.sum(model["w"])
    if wraps == "the loss":
        function = zero.gathered(loss, "data", other)
    else:
        grad = zero.gathered_once(jax.value_and_grad(loss), "data", other)
        function = lambda model, batch: grad(model, batch)[0]
    run = mesh.spmd(
        lambda model, batch: jax.lax.pmean(function(model, batch), "data"),
        mesh=mesh.make(data=8),
        in_specs=(specs, P("data")),
        out_specs=P(),
    )
    refused(
        "the specs split 'block.w' over ('data',), and the tree has no leaf that they split. Its "
        "leaves are ['w'].",
        jax.jit(run),
        {"w": jnp.ones(8)},
        jnp.ones(8),
    )


@pytest.mark.parametrize(
    "error", [ValueError("mine: another shape is needed"), TypeError("mine: a number is needed")]
)
def test_an_optimizers_own_error_is_raised_as_it_is(error):
    """Only JAX's errors about shapes lead to the advice for gradients that are shares."""

    def update(gradients, state, params=None):
        raise error

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    world, make = mesh.make(data=8), lambda: {"w": jnp.ones((16, 8))}
    shares = rules.specs(make(), rules.fsdp("data", size=8, min_size=0))
    loss = lambda model, batch: jnp.mean((batch @ model["w"]) ** 2)
    grad = zero.reduce_scattered(jax.value_and_grad(loss), "data", shares)
    state, specs = step.init(make, optimizer, rules.match("**", P()), world)
    train = mesh.spmd(
        step.make(grad, optimizer),
        mesh=world,
        in_specs=(specs, P("data")),
        out_specs=(specs, P()),
    )
    with pytest.raises(type(error), match=r"^mine"):
        jax.jit(train)(state, jnp.ones((16, 16)))
