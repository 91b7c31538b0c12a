"""A model and a training loop of your own, over data x stage x tensor, with ZeRO-1,
microbatches, bfloat16 and checkpoints.

Run: python examples/custom_training.py. An MLP-Mixer (arXiv 2105.01601) learns
handwritten digits. Then the training resumes from its checkpoint.
"""

# Estimate: 4 mixer layers of 17 k weights are 8 MFLOP a digit and 1 GFLOP a step of 128
# digits, 2 ms at the 450 GFLOP/s of two cores. But 5 ticks of 2 layers with 4 sums over
# 2 devices each are some 100 messages of a few kB, so on virtual devices a step takes
# 60 ms. 180 steps: 11 s, and 20 s more to compile.

import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import digits
from parallax import (
    mesh,
    pipeline,
    precision,
    rules,
    run,
    schedule,
    step,
    tensor,
    zero,
)
from parallax.collectives import AxisLike, ring

# Each axis, with the algorithm that moves data along it.
DATA, STAGE, TENSOR = ring("data"), ring("stage"), ring("tensor")
LAYERS, PATCHES, WIDTH = 4, 16, 64
STEPS, BATCH = 120, 128
MICROBATCHES = 4  # in a replica's part of the batch


class Mixer(eqx.Module):
    """An MLP-Mixer. Each layer has two pairs of matrices (`up`, `down`): the first pair
    mixes the patches, and the second pair mixes the channels."""

    embed: jax.Array  # [pixels of a patch, width]
    # [chunk, layers, inputs, outputs]: the pipeline splits the second dim.
    blocks: dict[str, dict[str, jax.Array]]
    out: jax.Array  # [width, classes]

    def __init__(self, key):
        keys = iter(jax.random.split(key, 6))

        def normal(*shape):
            return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

        def pair(size):
            up = normal(1, LAYERS, size, 2 * size)
            return {"up": up, "down": normal(1, LAYERS, 2 * size, size) / LAYERS}

        self.embed, self.out = normal(4, WIDTH), normal(WIDTH, 10)
        self.blocks = {"patches": pair(PATCHES), "channels": pair(WIDTH)}


def embed(model, part):
    """Cuts each image of 8 x 8 pixels into 16 patches of 2 x 2, and embeds them."""
    images, _ = part
    patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, PATCHES, 4)
    return patches.astype(model.embed.dtype) @ model.embed


def stage(model, x, part, position, *, axis: AxisLike = TENSOR):
    """Returns `x` after the layers of one stage."""

    def mixed(x, weights):
        # Columns, then rows: one sum over the tensor axis forward, one backward.
        hidden = jax.nn.gelu(tensor.column(x, weights["up"], None, axis))
        return tensor.row(hidden, weights["down"], None, axis)

    def layer(x, weights):
        patches = jax.nn.standardize(x).swapaxes(1, 2)
        x = x + mixed(patches, weights["patches"]).swapaxes(1, 2)
        return x + mixed(jax.nn.standardize(x), weights["channels"]), None

    return jax.lax.scan(layer, x, model.blocks)[0]


def logits(model, x):
    return (jnp.mean(jax.nn.standardize(x), axis=1) @ model.out).astype(jnp.float32)


def head(model, x, part):
    """The loss, on the last stage."""
    _, labels = part
    nats = optax.softmax_cross_entropy_with_integer_labels(logits(model, x), labels)
    return jnp.mean(nats)


@jax.jit
def accuracy(model, images, labels):
    """The test accuracy, computed on one device by the functions of the training:
    `embed`, `stage` and `logits`."""

    def whole_stage(*arguments):
        return stage(*arguments, axis=())

    def share(model, x, part):
        return jnp.mean(jnp.argmax(logits(model, x), axis=1) == part[1])

    return pipeline.unpipelined(embed, whole_stage, share)(model, (images, labels))


def session(folder, fresh, train, learn, held_out):
    """Train from the newest checkpoint, if there is one, to the last step; save a
    checkpoint half-way."""
    settings = {"layers": LAYERS, "batch": BATCH, "seed": 0}
    with run.checkpoint.Checkpoints(folder, settings=settings) as checkpoints:
        start, state = (checkpoints.restore(fresh) or (0, fresh))[:2]
        for i in range(start + 1, STEPS + 1):
            # Virtual devices share threads, so a step ends before the next one begins.
            batch = learn.batch(0, i, BATCH)
            state, info = jax.block_until_ready(train(state, batch))
            if i % 30 == 0:
                model = jax.device_put(state.model, jax.devices()[0])
                share = accuracy(model, *held_out)
                print(f"step {i:3d}  loss {info.loss:.4f}  test accuracy {share:.1%}")
            if i == STEPS // 2:
                checkpoints.save(i, state)
        return state


def make_model():
    return Mixer(jax.random.key(0))


def prepared(devices):
    """The first state, and the compiled step."""
    optimizer = optax.adamw(3e-3)
    rule = rules.first(
        rules.match("**.up", P(None, "stage", None, "tensor")),
        rules.match("**.down", P(None, "stage", "tensor")),
        rules.match("**", P()),
    )
    # ZeRO-1 splits the optimizer's state over the replicas.
    split = rules.fsdp("data", size=2, keep={"blocks.**": (0, 1)}, inside=rule)
    shards = rules.specs(eqx.filter_eval_shape(make_model), split, devices)

    plan = schedule.one_f_one_b_lockstep(2, MICROBATCHES)
    grad = pipeline.value_and_grad(embed, stage, head, plan, STAGE)
    grad = precision.mixed(grad, jnp.bfloat16)
    grad = zero.reduce_scattered(grad, DATA, shards)

    state, specs = step.init(make_model, optimizer, rule, devices, optimizer_rule=split)
    train = step.make(grad, zero.sharded(optimizer, DATA, shards), max_norm=1.0)
    train = mesh.spmd(
        train, mesh=devices, in_specs=(specs, P("data")), out_specs=(specs, P())
    )
    return state, jax.jit(train)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    fresh, train = prepared(mesh.make(data=2, stage=2, tensor=2))
    learn, held_out = digits.load()

    print(
        f"{STEPS} steps on data 2 x stage 2 x tensor 2; then once more, as if the run "
        "had died on its last step:"
    )
    with tempfile.TemporaryDirectory() as folder:  # use a folder that stays
        first = session(folder, fresh, train, learn, held_out)
        again = session(folder, fresh, train, learn, held_out)

    same = jax.tree.all(jax.tree.map(jnp.array_equal, first, again))
    end = "the same bits" if same else "DIFFERENT BITS"
    print(
        f"Both end with {end} in all weights and moments; of the copies on other "
        f"devices {len(run.fingerprint.differing(again))} differ."
    )
