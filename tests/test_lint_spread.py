"""Layers that a device computes of its share alone are found on their lines; the right layers
beside them are silent."""

import copy
import functools
import inspect
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from test_user_models import CASES, OPTIMIZER, WAYS
from user_models import KINDS, batch_of

from parallax import context, grads, lint, mesh, rules, step, tensor
from parallax.collectives import ring

REDUCED, PARTS = "reduced-over-a-split-dim", "parts-of-a-split-dim"
KEY, ADDED, COUNTED = "one-key-for-split-units", "added-before-the-sum", "counted-on-a-device"
SOUGHT = {REDUCED, PARTS, KEY, ADDED, COUNTED}
WIDTH, HIDDEN, SIZES = 8, 16, {"data": 2, "tensor": 4}
key = jax.random.key
column, row = (
    functools.partial(tensor.column, bias=None, axis="tensor"),
    functools.partial(tensor.row, bias=None, axis="tensor"),
)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


NET = {
    "up": shape(WIDTH, HIDDEN),
    "down": shape(HIDDEN, WIDTH),
    "bias": shape(WIDTH),
    "scale": shape(HIDDEN),
}
SPLIT = {"up": P(None, "tensor"), "down": P("tensor"), "bias": P(), "scale": P("tensor")}
BATCH = (shape(4, 3, WIDTH), shape(4, 3, WIDTH))


def findings(layer, net=NET, split=SPLIT, sizes=SIZES):
    """What of these kinds the lint finds in a train step by AdamW of a model whose output is
    `layer(net, x)`.

    Not all layers use all leaves of the net: it finds a sum of zeros too.
    """

    def loss(net, batch):
        return jnp.mean((layer(net, batch[0]) - batch[1]) ** 2)

    optimizer = optax.adamw(1e-2)
    train = step.make(grads.averaged(eqx.filter_value_and_grad(loss), ring("data")), optimizer)
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # optax and Equinox need them
        make = lambda: jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), net)
        rule = lambda path, leaf: split[path]
        world = mesh.make(**sizes)
        planned = eqx.filter_eval_shape(lambda: step.init(make, optimizer, rule, world)[0])
        specs = step.init(make, optimizer, rule, world)[1]
        mapped = mesh.spmd(train, mesh=world, in_specs=(specs, P("data")), out_specs=(specs, P()))
        return [each for each in lint.program(mapped, planned, BATCH) if each.kind in SOUGHT]


def line_of_the_mistake(f) -> str:
    lines, first = inspect.getsourcelines(f)
    (at,) = (first + i for i, line in enumerate(lines) if line.rstrip().endswith("# wrong"))
    return f"{inspect.getsourcefile(f)}:{at}"


class Pair(NamedTuple):
    """A layer with a mistake on the line that says so, and one without."""

    kind: str
    wrong: object
    right: object
    says: tuple


# A norm, a softmax, groups


def norm_of_the_shard(net, x):
    h = column(x, net["up"])
    h = h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)  # wrong
    return row(h * net["scale"], net["down"])


def norm_of_the_whole(net, x):
    h = column(x, net["up"])
    h = h * lax.rsqrt(lax.pmean(jnp.mean(h**2, -1, keepdims=True), "tensor") + 1e-6)
    return row(h * net["scale"], net["down"])


def centred_by_the_shard(net, x):
    def one(h):
        return (h - jnp.mean(h)) * net["scale"]  # wrong

    return row(jax.vmap(jax.vmap(one))(column(x, net["up"])), net["down"])


def centred_by_the_whole(net, x):
    def one(h):
        return (h - ring.all_mean(jnp.mean(h), "tensor")) * net["scale"]

    return row(jax.vmap(jax.vmap(one))(column(x, net["up"])), net["down"])


def softmax_of_the_shard(net, x):
    return row(jax.nn.softmax(column(x, net["up"])), net["down"])  # wrong


def softmax_of_the_whole(net, x):
    h = column(x, net["up"])
    h = jnp.exp(h - lax.pmax(lax.stop_gradient(jnp.max(h, -1, keepdims=True)), "tensor"))
    return row(h / lax.psum(jnp.sum(h, -1, keepdims=True), "tensor"), net["down"])


def norm_by_a_product(net, x):
    h = column(x, net["up"])
    length = jnp.einsum("bti,bti->bt", h, h)  # wrong
    return row(h / jnp.sqrt(length)[..., None], net["down"])


def norm_of_each_head(net, x):
    """Heads are split whole, one a device, so that the norm is over a dim that nothing splits."""
    h = column(x, net["up"]).reshape(*x.shape[:2], -1, HIDDEN // 4)
    h = h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
    return row(h.reshape(*x.shape[:2], -1), net["down"])


def groups_of_the_whole(net, x):
    norm = eqx.nn.GroupNorm(4, HIDDEN, channelwise_affine=False)
    h = jax.vmap(jax.vmap(norm))(column(x, net["up"]))  # wrong
    return row(h, net["down"])


def groups_of_a_device(net, x):
    norm = eqx.nn.GroupNorm(1, HIDDEN // 4, channelwise_affine=False)
    h = jax.vmap(jax.vmap(norm))(column(x, net["up"]))
    return row(h, net["down"])


def softmax_of_the_shard_without_a_dim_of_size_1(net, x):
    h = column(x[:, :1], net["up"]).reshape(len(x), -1)
    h = h / jnp.sum(jnp.exp(h), -1, keepdims=True)  # wrong
    return x + row(h, net["down"])[:, None]


def softmax_of_the_whole_without_a_dim_of_size_1(net, x):
    h = column(x[:, :1], net["up"]).reshape(len(x), -1)
    h = h / lax.psum(jnp.sum(jnp.exp(h), -1, keepdims=True), "tensor")
    return x + row(h, net["down"])[:, None]


def norm_in_a_loop(net, x):
    def layer(x, _):
        h = column(x, net["up"])
        h = h / jnp.linalg.norm(h, axis=-1, keepdims=True)  # wrong
        return x + row(h, net["down"]), None

    return lax.scan(jax.checkpoint(layer), x, length=3)[0]


def norm_of_the_stream_in_a_loop(net, x):
    def layer(x, _):
        y = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x + row(jnp.tanh(column(y, net["up"])), net["down"]), None

    return lax.scan(jax.checkpoint(layer), x, length=3)[0]


# Fused matrices


def gate_and_value(net, x):
    gate, value = jnp.split(column(x, net["up"]), 2, axis=-1)
    return row(jax.nn.silu(gate) * value, net["down"][:2])  # wrong


def gate_and_value_by_hand(net, x):
    h = column(x, net["up"])
    half = h.shape[-1] // 2
    return row(h[..., :half] * h[..., half:], net["down"][:2])  # wrong


def every_second_is_a_gate(net, x):
    """A device's block holds whole pairs."""
    h = column(x, net["up"])
    return row(h[..., ::2] * h[..., 1::2], net["down"][:2])


def chunks_of_hidden_units(net, x):
    """Each chunk is used alone, and their terms add up."""
    h = column(x, net["up"])
    chunks = zip(jnp.split(jnp.tanh(h), 2, axis=-1), jnp.split(net["down"], 2), strict=True)
    return sum(row(part, weight) for part, weight in chunks)


def queries_and_keys(net, x):
    parts = jnp.split(column(x, net["up"]), 4, axis=-1)
    q, k, v, _ = (part.reshape(*part.shape[:2], -1, 1) for part in parts)
    out = jax.nn.dot_product_attention(q, k, v)  # wrong
    return row(out.reshape(*x.shape[:2], -1), net["down"][:1])


def queries_and_keys_apart(net, x):
    q, k, v = (column(x, weight * net["up"]).reshape(*x.shape[:2], -1, 2) for weight in (1, 2, 3))
    out = jax.nn.dot_product_attention(q, k, v)
    return row(out.reshape(*x.shape[:2], -1), net["down"])


def gates_of_the_weight(net, x):
    gate, value = jnp.split(net["up"], 2, axis=1)
    return row(jnp.tanh(column(x, gate)) * column(x, value), net["down"][:2])  # wrong


# Dropout


def one_mask(net, x):
    h = jnp.tanh(column(x, net["up"]))
    mask = jax.random.bernoulli(key(0), 0.5, h.shape)
    return row(jnp.where(mask, h, 0), net["down"])  # wrong


def a_mask_for_each_device(net, x):
    h = jnp.tanh(column(x, net["up"]))
    mask = jax.random.bernoulli(jax.random.fold_in(key(0), lax.axis_index("tensor")), 0.5, h.shape)
    return row(jnp.where(mask, h, 0), net["down"])


def equinox_dropout(net, x):
    h = jnp.tanh(column(x, net["up"]))
    return row(eqx.nn.Dropout(0.5)(h, key=key(0)), net["down"])  # wrong


def a_slice_of_the_whole_mask(net, x):
    h = jnp.tanh(column(x, net["up"]))
    mask = jax.random.bernoulli(key(0), 0.5, (*h.shape[:-1], HIDDEN))
    mask = lax.dynamic_slice_in_dim(mask, lax.axis_index("tensor") * h.shape[-1], h.shape[-1], 2)
    return row(jnp.where(mask, h, 0), net["down"])


# A bias


def bias_before_the_sum(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    return tensor.reduce_from(h @ net["down"] + net["bias"], "tensor")  # wrong


def bias_after_the_sum(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    return tensor.reduce_from(h @ net["down"], "tensor") + net["bias"]


def a_share_of_the_bias(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    return tensor.reduce_from(h @ net["down"] + net["bias"] / lax.axis_size("tensor"), "tensor")


def bias_in_the_second_of_two_terms(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    with_bias = jnp.tanh(h) @ net["down"] + net["bias"]  # wrong
    return tensor.reduce_from(h @ net["down"] + with_bias, "tensor")


def a_share_of_the_bias_times_a_number(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    share = net["bias"] / lax.axis_size("tensor") * jnp.tanh(net["bias"])
    return tensor.reduce_from(h @ net["down"] + share, "tensor")


def a_number_through_a_share(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    large = jnp.tanh(net["bias"]) / (net["bias"] / lax.axis_size("tensor"))
    return tensor.reduce_from(h @ net["down"] + large, "tensor")  # wrong


def a_function_of_a_share(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    large = jnp.tanh(net["bias"] / lax.axis_size("tensor"))
    return tensor.reduce_from(h @ net["down"] + large, "tensor")  # wrong


def a_share_of_a_function(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    share = jnp.maximum(jnp.tanh(net["bias"]) / lax.axis_size("tensor"), 0)
    return tensor.reduce_from(h @ net["down"] + share, "tensor")


def a_share_through_a_number(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    share = net["bias"] / lax.axis_size("tensor") / jnp.exp(net["bias"])
    return tensor.reduce_from(h @ net["down"] + share, "tensor")


def a_product_before_the_sum(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    return tensor.reduce_from(
        h @ net["down"] + x @ jnp.outer(net["bias"], net["bias"]),  # wrong
        "tensor",
    )


def a_product_of_a_share(net, x):
    share = tensor.copy_to(x, "tensor") / lax.axis_size("tensor")
    return of_shares(net, x, share @ jnp.outer(net["bias"], net["bias"]))


def a_product_by_a_share(net, x):
    share = jnp.outer(net["bias"], net["bias"]) / lax.axis_size("tensor")
    return of_shares(net, x, tensor.copy_to(x, "tensor") @ share)


def rows_of_a_share(net, x):
    share = jnp.outer(net["bias"], net["bias"]) / lax.axis_size("tensor")
    return of_shares(net, x, share[jnp.zeros(x.shape[:2], jnp.int32)])


def shares_side_by_side(net, x):
    first, second = jnp.split(tensor.copy_to(x, "tensor"), 2, axis=-1)
    n = lax.axis_size("tensor")
    return of_shares(net, x, jnp.concatenate([first / n, second / n], axis=-1))


def a_share_beside_a_whole(net, x):
    first, second = jnp.split(tensor.copy_to(x, "tensor"), 2, axis=-1)
    half = jnp.concatenate([first / lax.axis_size("tensor"), second], axis=-1)
    h = tensor.copy_to(x, "tensor") @ net["up"]
    return tensor.reduce_from(h @ net["down"] + half, "tensor")  # wrong


def of_shares(net, x, share):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    return tensor.reduce_from(h @ net["down"] + share, "tensor")


def residual_before_the_sum(net, x):
    x = tensor.copy_to(x, "tensor")
    return tensor.reduce_from(x - jnp.tanh(x @ net["up"]) @ net["down"], ring("tensor"))  # wrong


def the_bias_of_the_first(net, x):
    h = tensor.copy_to(x, "tensor") @ net["up"]
    return tensor.reduce_from(
        h @ net["down"] + jnp.where(lax.axis_index("tensor") == 0, net["bias"], 0), "tensor"
    )


PAIRS = [
    Pair(
        REDUCED,
        norm_of_the_shard,
        norm_of_the_whole,
        ("reduce_sum", "along 'tensor'", "each of 4 devices"),
    ),
    Pair(REDUCED, centred_by_the_shard, centred_by_the_whole, ("float32[2,3,4]",)),
    Pair(REDUCED, softmax_of_the_shard, softmax_of_the_whole, ("reduce_sum",)),
    Pair(REDUCED, norm_by_a_product, norm_of_each_head, ("dot_general",)),
    Pair(REDUCED, groups_of_the_whole, groups_of_a_device, ("groups that are cut",)),
    Pair(
        REDUCED,
        softmax_of_the_shard_without_a_dim_of_size_1,
        softmax_of_the_whole_without_a_dim_of_size_1,
        ("float32[2,4]",),
    ),
    Pair(REDUCED, norm_in_a_loop, norm_of_the_stream_in_a_loop, ("reduce_sum",)),
    Pair(
        PARTS,
        gate_and_value,
        every_second_is_a_gate,
        ("dim 2 of float32[2,3,4]", "along 'tensor'", "each of 4"),
    ),
    Pair(PARTS, gate_and_value_by_hand, chunks_of_hidden_units, ("was cut into parts",)),
    Pair(PARTS, queries_and_keys, queries_and_keys_apart, ("fused matrix",)),
    Pair(PARTS, gates_of_the_weight, chunks_of_hidden_units, ("dim 1 of float32[8,4]",)),
    Pair(
        KEY,
        one_mask,
        a_mask_for_each_device,
        ("same along 'tensor' meet float32[2,3,4]", "all 4 devices"),
    ),
    Pair(KEY, equinox_dropout, a_slice_of_the_whole_mask, ("the same mask",)),
    Pair(
        ADDED,
        bias_before_the_sum,
        bias_after_the_sum,
        ("this adds float32[2,3,8]", "counts it 4 times"),
    ),
    Pair(ADDED, residual_before_the_sum, a_share_of_the_bias, ("counts it 4 times",)),
    Pair(ADDED, bias_before_the_sum, the_bias_of_the_first, ()),
    Pair(
        ADDED,
        bias_in_the_second_of_two_terms,
        a_share_of_the_bias_times_a_number,
        ("this adds float32[2,3,8]", "counts it 4 times"),
    ),
    Pair(ADDED, a_number_through_a_share, a_share_through_a_number, ("this adds float32[2,3,8]",)),
    Pair(ADDED, a_function_of_a_share, a_share_of_a_function, ("this adds float32[2,3,8]",)),
    Pair(ADDED, a_product_before_the_sum, a_product_of_a_share, ("counts it 4 times",)),
    Pair(ADDED, a_product_before_the_sum, a_product_by_a_share, ()),
    Pair(ADDED, a_product_before_the_sum, rows_of_a_share, ()),
    Pair(ADDED, a_share_beside_a_whole, shares_side_by_side, ("this adds float32[2,3,8]",)),
]
every_pair = pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: f"{pair.wrong.__name__}-{pair.right.__name__}"
)


@pytest.mark.sweep(3)
@every_pair
def test_the_mistake_is_found_on_its_line(pair):
    found = findings(pair.wrong)
    assert [(each.kind, each.where) for each in found] == [
        (pair.kind, line_of_the_mistake(pair.wrong))
    ]
    for part in pair.says:
        assert part in found[0].harm
    assert found[0].cure.endswith(".")


@pytest.mark.sweep(3)
@every_pair
def test_the_right_layer_is_silent(pair):
    assert findings(pair.right) == []


@pytest.mark.parametrize("act", [jnp.tanh, jax.nn.gelu])
def test_the_half_of_an_activation_is_no_share_of_two_devices(act):
    def layer(net, x):
        x = tensor.copy_to(x, "tensor")
        return tensor.reduce_from(act(x) + jnp.tanh(x @ net["up"]) @ net["down"], "tensor")

    found = findings(layer, sizes={"data": 4, "tensor": 2})
    assert [each.kind for each in found] == [ADDED]


def gradients_in(loss, in_specs, shapes, **sizes):
    """The kinds of mistakes in the gradients of a loss with regard to its first two arguments."""
    mapped = jax.shard_map(
        jax.grad(loss, (0, 1)),
        mesh=mesh.make(**sizes),
        in_specs=in_specs,
        out_specs=in_specs[:2],
        check_vma=False,
    )
    with jax.numpy_rank_promotion("allow"):
        return [each.kind for each in lint.program(mapped, *shapes)]


@pytest.mark.parametrize("spec", [P(), P("data"), P(("data", "tensor"))])
def test_random_keys_for_each_device_are_no_batch(spec):
    def loss(up, down, x, keys):
        h = x @ up
        h = h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        noise = jax.random.normal(keys[0], (), x.dtype)
        return jnp.mean(lax.psum(h @ down, "tensor")) + noise

    in_specs = P(None, "tensor"), P("tensor"), P("data"), spec
    shapes = NET["up"], NET["down"], BATCH[0], jax.eval_shape(lambda: jax.random.split(key(0), 8))
    assert gradients_in(loss, in_specs, shapes, data=2, tensor=4) == [REDUCED]


def test_an_exchange_along_an_axis_of_one_device_too():
    def loss(up, down, x):
        h = (x @ up).reshape(*x.shape[:2], 4, -1)
        h = lax.all_to_all(h, ("one", "tensor"), 2, 3, tiled=True)
        h = h * lax.rsqrt(jnp.mean(h**2, 2, keepdims=True) + 1e-6)
        return jnp.mean(h) + jnp.sum(down)

    shapes = NET["up"], NET["down"], BATCH[0]
    assert gradients_in(loss, (P(), P(), P()), shapes, data=2, one=1, tensor=4) == [REDUCED]


# Tokens, split over an axis of their own

HEADS, TOKENS = 4, 8
TABLES = {
    "qkv": shape(WIDTH, 3, HEADS, 2),
    "out": shape(HEADS, 2, WIDTH),
    "positions": shape(4 * TOKENS, WIDTH),
}


def attended(attend, positions):
    """A layer of attention, and a table of learned positions."""

    def loss(net, batch):
        x = batch + net["positions"][positions(batch.shape[1])]
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", x, net["qkv"]), 2, 0)
        return jnp.mean((x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), net["out"])) ** 2)

    return loss


def of_tokens(loss):
    """What the lint finds in the gradients of a loss of split tokens."""
    world = mesh.make(data=2, context=4)
    grad = grads.averaged(jax.value_and_grad(loss), ring(("data", "context")))
    mapped = mesh.spmd(grad, mesh=world, in_specs=(P(), P("data", "context")), out_specs=P())
    with jax.numpy_rank_promotion("allow"):
        return lint.program(mapped, TABLES, shape(4, 4 * TOKENS, WIDTH))


def with_slopes(q, k, v, *, first=0, positions=None):
    """Causal attention that looks at near tokens more: ALiBi."""
    queries, keys = positions or (jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))
    slopes = 2.0 ** -(1 + first + jnp.arange(q.shape[2], dtype=jnp.int32)).astype(jnp.float32)
    distance = queries[:, None] - keys[None]
    scores = jnp.einsum("bthk,bshk->bhts", q, k) - slopes[:, None, None] * distance.astype(
        jnp.float32
    )
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(distance >= 0, scores, -1e30)), v)


def slopes_of_its_own_heads(q, k, v):
    return with_slopes(q, k, v, first=lax.axis_index("context") * q.shape[2])


AXIS = ring("context")
IN_PLACE = functools.partial(context.positions, axis=AXIS)
ROUND = functools.partial(
    context.attention, axis=AXIS, kernel=context.tiled(3)
)  # tiles that are filled up
PLAIN = functools.partial(jax.nn.dot_product_attention, is_causal=True)
OF_TOKENS = {
    "the ring": (ROUND, IN_PLACE, set()),
    "the ring, not causal": (functools.partial(ROUND, causal=False), IN_PLACE, set()),
    "positions forgotten": (ROUND, jnp.arange, {COUNTED}),
    "one device's tokens": (PLAIN, IN_PLACE, {REDUCED}),
    "one device's tokens and positions": (PLAIN, jnp.arange, {REDUCED, COUNTED}),
    "by heads": (context.ulysses(PLAIN, AXIS), IN_PLACE, set()),
    "by heads, with slopes": (context.ulysses(with_slopes, AXIS), IN_PLACE, {COUNTED}),
    "by heads, along a plain axis": (context.ulysses(with_slopes, "context"), IN_PLACE, {COUNTED}),
    "by heads, with their slopes": (
        context.ulysses(slopes_of_its_own_heads, AXIS),
        IN_PLACE,
        set(),
    ),
    "gathered": (context.gathered(with_slopes, AXIS), IN_PLACE, set()),
    "gathered in tiles": (
        context.gathered(functools.partial(context.blockwise, kernel=context.tiled(3)), AXIS),
        IN_PLACE,
        set(),
    ),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", OF_TOKENS)
def test_attention_and_positions_of_split_tokens(name):
    attend, positions, kinds = OF_TOKENS[name]
    assert {each.kind for each in of_tokens(attended(attend, positions))} == kinds


def with_positions(tables, x, first=0):
    """Tokens whose width is split too, with learned positions whose width is split."""
    y = x + tables["positions"][first + jnp.arange(x.shape[1], dtype=jnp.int32)]
    return lax.pmean(jnp.mean(y**2), "tensor")


def with_positions_of_its_own(tables, x):
    return with_positions(tables, x, lax.axis_index("context") * x.shape[1])


@pytest.mark.parametrize(
    ("loss", "kinds"), [(with_positions, {COUNTED}), (with_positions_of_its_own, set())]
)
def test_positions_in_a_table_that_is_split_by_its_width(loss, kinds):
    specs = {"positions": P(None, "tensor")}
    mapped = mesh.spmd(
        grads.averaged(jax.value_and_grad(loss), ring(("data", "context"))),
        mesh=mesh.make(data=2, context=2, tensor=2),
        in_specs=(specs, P("data", "context", "tensor")),
        out_specs=(P(), specs),
    )
    with jax.numpy_rank_promotion("allow"):
        found = lint.program(mapped, {"positions": shape(16, WIDTH)}, shape(4, 16, WIDTH))
    assert {each.kind for each in found} == kinds


def merged(net, x):
    """The log of a sum of exponentials over all units, from that over each device's own."""
    local = jax.nn.logsumexp(column(x, net["up"]), axis=-1, keepdims=True)
    peak = lax.pmax(lax.stop_gradient(local), "tensor")
    return x + jnp.log(lax.psum(jnp.exp(local - peak), "tensor")) + peak


def merged_in_a_loop(net, x):
    return lax.scan(lambda x, _: (merged(net, x), None), x, length=2)[0]


@pytest.mark.parametrize("layer", [merged, merged_in_a_loop])
def test_terms_that_are_merged_are_no_mistake(layer):
    """Backward, each device's weights meet its own units: right, since what joined them came
    after."""
    assert findings(layer) == []


def cell_over_tokens(cell, step_of):
    """The findings in a net of `cell`, split by rows: a device's rows are of some of the stacked
    gates."""
    make = lambda: {"cell": cell(WIDTH, 8, key=key(0)), "out": jnp.ones((8, WIDTH))}
    gather = lambda h: lax.all_gather(h, "tensor", tiled=True)

    def layer(net, x):
        def one(xs):
            zeros = lax.pcast(jnp.zeros(2), ("data", "tensor"), to="varying")
            return lax.scan(
                lambda carry, x: step_of(net["cell"], gather, carry, x), (zeros, zeros), xs
            )[1]

        return row(jax.vmap(one)(tensor.copy_to(x, "tensor")), net["out"])

    split = {
        f"cell.{name}": P("tensor") for name in ("weight_ih", "weight_hh", "bias", "bias_n")
    } | {"out": P("tensor")}
    return findings(layer, eqx.filter_eval_shape(make), split)


def lstm(cell, gather, carry, x):
    h, c = cell(x, (gather(carry[0]), carry[1]))
    return (h, c), h


def gru(cell, gather, carry, x):
    """As Equinox's own cell, with the hidden units that a device keeps."""
    x_gates, h_gates = (
        jnp.split(cell.weight_ih @ x + cell.bias, 3),
        jnp.split(cell.weight_hh @ gather(carry[0]), 3),
    )
    reset, update = jax.nn.sigmoid(x_gates[0] + h_gates[0]), jax.nn.sigmoid(x_gates[1] + h_gates[1])
    new = jnp.tanh(x_gates[2] + reset * (h_gates[2] + cell.bias_n))
    h = new + update * (carry[0] - new)
    return (h, h), h


@pytest.mark.parametrize(("cell", "step_of"), [(eqx.nn.LSTMCell, lstm), (eqx.nn.GRUCell, gru)])
def test_recurrent_cells_by_rows_are_found(cell, step_of):
    assert {each.kind for each in cell_over_tokens(cell, step_of)} == {PARTS}


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize("bias", [False, True])
def test_a_cell_by_rows_whose_shapes_do_not_fit_is_named(bias):
    """JAX's own words name two shapes, and not what was split."""
    world = mesh.make(**SIZES)
    make = lambda: {"cell": eqx.nn.LSTMCell(WIDTH, 8, key=key(0)), "scale": jnp.ones(8)}
    names = ("weight_ih", "weight_hh", "bias")[: 2 + bias]
    rule = rules.first(
        *(rules.match(f"cell.{name}", P("tensor")) for name in names), rules.match("**", P())
    )

    def loss(model, x):
        zeros = jnp.zeros_like(x[0], shape=8)
        return jnp.mean(
            jax.vmap(lambda row: model["cell"](row, (zeros, zeros))[0] * model["scale"])(x)
        )

    def found(rule):
        state, specs = step.init(make, OPTIMIZER, rule, world)
        train = step.make(grads.averaged(eqx.filter_value_and_grad(loss), "data"), OPTIMIZER)
        mapped = mesh.spmd(train, mesh=world, in_specs=(specs, P("data")), out_specs=(specs, P()))
        with jax.numpy_dtype_promotion("standard"):
            return lint.program(mapped, state, jnp.ones((8, WIDTH)))

    (finding,) = found(rule)
    assert (finding.kind, finding.where) == (PARTS, "0.model.cell")
    assert "the rows of this eqx.nn.LSTMCell are split over ['tensor']" in finding.harm
    assert found(rules.match("**", P())) == []


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_models_of_users_are_silent(name, way):
    kind = KINDS[name]
    sizes, rule, optimizer_rule, made = WAYS[way](kind)
    world = mesh.make(**sizes)
    with jax.numpy_dtype_promotion("standard"):
        state, specs = step.init(
            kind.make,
            OPTIMIZER,
            rule,
            world,
            optimizer_rule=optimizer_rule,
            trainable=kind.trainable,
        )
        grad, optimizer = made(
            rules.specs(eqx.filter_eval_shape(kind.make), optimizer_rule or rule, world)
        )
        train = step.make(grad, optimizer, after_update=kind.after)
        mapped = mesh.spmd(train, mesh=world, in_specs=(specs, P("data")), out_specs=(specs, P()))
        assert lint.program(mapped, state, batch_of(0)) == []


# Attention whose number of heads is static


class Attending(NamedTuple):
    """An attention of 4 heads, 16 outputs, over 4 devices; and how its heads are counted."""

    qk_size: int
    stacked: bool
    of_device: bool
    gathered: bool
    way: object


def attending(case):
    """The findings in a step of an `eqx.nn.MultiheadAttention` whose projections are split."""

    def make():
        def one(key):
            return eqx.nn.MultiheadAttention(
                4, WIDTH, qk_size=case.qk_size, vo_size=4, dtype=jnp.float32, key=key
            )

        if case.stacked:
            return eqx.filter_vmap(one)(jax.random.split(key(0), 1))
        return one(key(0))

    def rule(path, leaf):
        first = (None,) * case.stacked
        if path.startswith("output"):
            return P(*first, None, "tensor")
        return P(*first, "tensor")

    def attend(net, x):
        if case.stacked:
            net = jax.tree.map(lambda leaf: leaf[0] if eqx.is_array(leaf) else leaf, net)
        if case.gathered:
            gather = lambda name, leaf: lax.all_gather(
                leaf, "tensor", axis=int(name == "output"), tiled=True
            )
            for name in ("query", "key", "value", "output"):
                weight = lambda net, name=name: getattr(net, f"{name}_proj").weight
                net = eqx.tree_at(weight, net, gather(name, weight(net)))
            return lax.pmean(jax.vmap(lambda x: net(x, x, x))(x), "tensor")
        if case.of_device:
            net = copy.copy(net)
            object.__setattr__(net, "num_heads", net.num_heads // lax.axis_size("tensor"))
        x = tensor.copy_to(x, "tensor")
        return tensor.reduce_from(jax.vmap(lambda x: net(x, x, x))(x), "tensor")  # wrong

    def loss(net, batch):
        return jnp.mean((attend(net, batch[0]) - batch[1]) ** 2)

    optimizer, world = optax.sgd(1e-2), mesh.make(**SIZES)
    train = step.make(grads.averaged(eqx.filter_value_and_grad(loss), ring("data")), optimizer)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state, specs = step.init(make, optimizer, rule, world)
        mapped = mesh.spmd(train, mesh=world, in_specs=(specs, P("data")), out_specs=(specs, P()))
        found = lint.program(case.way(mapped), state, BATCH)
    return [each for each in found if each.kind == "fixed-number-of-heads"], attend


ATTENTIONS = [
    Attending(4, False, False, False, eqx.filter_jit),
    Attending(8, False, False, False, lambda f: f),
    Attending(8, True, False, False, eqx.filter_jit),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_that_makes_all_heads_of_a_shard_is_found(case):
    (finding,), attend = attending(case)
    assert finding.where == line_of_the_mistake(attend)
    assert "Each of 4 devices still makes all 4 heads, so each head is narrower" in finding.harm


@pytest.mark.sweep(3)
@pytest.mark.parametrize("qk_size", [4, 8, 16])  # 16: a share is as wide as the whole values
@pytest.mark.parametrize("change", [{"of_device": True}, {"gathered": True}])
def test_attention_with_the_heads_of_a_device_is_silent(qk_size, change):
    case = Attending(qk_size, False, False, False, eqx.filter_jit)._replace(**change)
    assert attending(case)[0] == []


def test_a_reshape_of_an_array_without_elements_is_read():
    """Products of its sizes are all 0, so nothing is said of its dims."""

    def layer(net, x):
        hidden = column(x, net["up"])
        nothing = hidden[:, :0].reshape(0, 7).reshape(len(x), 0, hidden.shape[-1])
        return row(jnp.concatenate([hidden, nothing], 1), net["down"])

    assert findings(layer) == []


@pytest.mark.parametrize("frozen", [None, optax.MaskedNode()])
def test_frozen_attention_is_silent(frozen):
    """Its arrays are elsewhere, in another argument or nowhere."""
    make = lambda key: eqx.nn.MultiheadAttention(4, WIDTH, dtype=jnp.float32, key=key)
    trained, rest = eqx.partition(make(key(0)), eqx.is_array)
    rest = jax.tree.map(lambda _: frozen, trained)

    def attend(rest, trained, x):
        trained = eqx.combine(trained, make(key(0)))
        return jax.vmap(lambda x: trained(x, x, x))(x)

    assert lint.program(attend, rest, trained, BATCH[0]) == []
