# On the back of the envelope: 4 mixer layers of 17 k weights are 8 MFLOP a digit and 1 GFLOP a step of 128 digits, 2 ms at the
# 450 GFLOP/s of two cores. But 5 ticks of 2 layers with 4 sums over 2 devices each are some 100 messages of a few kB, so on
# virtual devices a step takes 60 ms. 180 steps: 11 s, and 20 s more to compile.
"""A model and a loop of your own, every axis on: data x stage x tensor, ZeRO-1, microbatches, bfloat16, checkpoint and resume.

Run: python examples/custom_training.py. An MLP-Mixer (arXiv 2105.01601) learns handwritten digits, is stopped, and goes on.
"""

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import digits
from parallax import lint, mesh, pipeline, precision, rules, run, schedule, step, tensor, zero
from parallax.collectives import AxisLike, ring

DATA, STAGE, TENSOR = (
    ring("data"),
    ring("stage"),
    ring("tensor"),
)  # each axis, with who moves data along it
LAYERS, PATCHES, WIDTH, STEPS, BATCH, M = (
    4,
    16,
    64,
    120,
    128,
    4,
)  # M microbatches in a replica's part of the batch


class Mixer(eqx.Module):
    """In each layer two pairs of matrices, an `up` and a `down`: one mixes patches, the other channels."""

    embed: jax.Array  # [pixels of a patch, width]
    blocks: dict[
        str, dict[str, jax.Array]
    ]  # [chunk, layers, inputs, outputs]: the pipeline splits the second dim
    out: jax.Array  # [width, classes]

    def __init__(self, key):
        keys = iter(jax.random.split(key, 6))
        normal = lambda *shape: jax.random.normal(next(keys), shape) / shape[-2] ** 0.5
        pair = lambda size: {
            "up": normal(1, LAYERS, size, 2 * size),
            "down": normal(1, LAYERS, 2 * size, size) / LAYERS,
        }
        self.embed, self.out = normal(4, WIDTH), normal(WIDTH, 10)
        self.blocks = {"patches": pair(PATCHES), "channels": pair(WIDTH)}


def embed(model, part):  # an image of 8 x 8 pixels: 16 patches of 4
    return (
        part[0]
        .reshape(-1, 4, 2, 4, 2)
        .swapaxes(2, 3)
        .reshape(-1, PATCHES, 4)
        .astype(model.embed.dtype)
        @ model.embed
    )


def stage(model, x, part, position, *, axis: AxisLike = TENSOR):  # one stage's layers
    def mixed(x, w):  # columns, then rows: one sum over the tensor axis forward, one backward
        hidden = jax.nn.gelu(tensor.column(x, w["up"], None, axis))
        return tensor.row(hidden, w["down"], None, axis)

    def layer(x, w):
        x = x + mixed(jax.nn.standardize(x).swapaxes(1, 2), w["patches"]).swapaxes(1, 2)
        return x + mixed(jax.nn.standardize(x), w["channels"]), None

    return jax.lax.scan(layer, x, model.blocks)[0]


logits = lambda model, x: (jnp.mean(jax.nn.standardize(x), axis=1) @ model.out).astype(jnp.float32)


def head(model, x, part):  # the loss, on the last stage
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(model, x), part[1]))


@jax.jit
def right(
    model, images, labels
):  # the share of digits told right: the same functions on one device
    share = lambda model, x, part: jnp.mean(jnp.argmax(logits(model, x), axis=1) == labels)
    return pipeline.unpipelined(embed, lambda *of: stage(*of, axis=()), share)(model, (images,))


def session(folder, fresh, train, learn, held_out):
    """From the newest checkpoint, if there is one, to the last step; half-way, a checkpoint is saved."""
    with run.checkpoint.Checkpoints(
        folder, settings={"layers": LAYERS, "batch": BATCH, "seed": 0}
    ) as checkpoints:
        start, state = (checkpoints.restore(fresh) or (0, fresh))[:2]
        for i in range(start + 1, STEPS + 1):
            state, info = jax.block_until_ready(
                train(state, learn.batch(0, i, BATCH))
            )  # virtual devices share threads
            if i % 30 == 0:
                share = right(jax.device_put(state.model, jax.devices()[0]), *held_out)
                print(f"step {i:3d}  loss {info.loss:.4f}  held-out digits told right {share:.1%}")
            if i == STEPS // 2:
                checkpoints.save(i, state)
        return state


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    devices, optimizer, make_model = (
        mesh.make(data=2, stage=2, tensor=2),
        optax.adamw(3e-3),
        lambda: Mixer(jax.random.key(0)),
    )
    split = {
        "**.up": P(None, "stage", None, "tensor"),
        "**.down": P(None, "stage", "tensor"),
        "**": P(),
    }
    rule = rules.first(*(rules.match(pattern, spec) for pattern, spec in split.items()))
    shared = rules.fsdp(
        "data", size=2, keep={"blocks.**": (0, 1)}, inside=rule
    )  # what ZeRO-1 splits over the replicas
    shares = rules.specs(eqx.filter_eval_shape(make_model), shared, devices)
    grad = pipeline.value_and_grad(embed, stage, head, schedule.one_f_one_b_lockstep(2, M), STAGE)
    grad = zero.reduce_scattered(precision.mixed(grad, jnp.bfloat16), DATA, shares)
    fresh, specs = step.init(make_model, optimizer, rule, devices, optimizer_rule=shared)
    train = step.make(grad, zero.sharded(optimizer, DATA, shares), max_norm=1.0)
    train = jax.jit(
        mesh.spmd(train, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P()))
    )
    print(
        f"{STEPS} steps on data 2 x stage 2 x tensor 2; then once more, as if the run had died on its last step:"
    )
    with tempfile.TemporaryDirectory() as folder:  # a run of yours has a folder that stays
        first, again = (session(folder, fresh, train, *digits.load()) for _ in range(2))
    end = (
        "the same bits"
        if jax.tree.all(jax.tree.map(jnp.array_equal, first, again))
        else "DIFFERENT BITS"
    )
    print(
        f"Both end with {end} in all weights and moments; of the copies on other devices {len(lint.arrays(again))} differ."
    )
