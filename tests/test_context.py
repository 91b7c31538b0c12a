"""Attention over split tokens equals one device's, in value and gradients; each device computes and
sends what is foretold."""

import functools
import re

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import context, jaxprs, mesh
from parallax.collectives import ring
from parallax.compiled import certificate

CHUNK, HEADS, WIDTH = 3, 4, 2  # tokens of a zigzag chunk; heads; their width
SMALL = context.tiled(2)  # tiles that do not divide a chunk
SPEC = P(None, "context")


def dense(q, k, v, *, segments, causal=True):
    """What it all means: T x T weights, on one device."""
    (T, H), G = q.shape[1:3], k.shape[2]
    k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    seen = segments[:, :, None] == segments[:, None, :]
    seen = seen & jnp.tril(jnp.ones((T, T), bool))[None] if causal else seen
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum(
        "bhts,bshk->bthk", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1), v
    )


def by_heads(axis, order):
    return context.ulysses(functools.partial(context.blockwise, kernel=SMALL), axis, order=order)


def by_gathering(axis, order):
    return context.gathered(functools.partial(context.blockwise, kernel=SMALL), axis, order=order)


def round_the_ring(axis, order, **options):
    return functools.partial(context.attention, axis=axis, order=order, kernel=SMALL, **options)


def shuffled(n):
    """An order of nobody's: three chunks a device, by chance."""
    return np.random.default_rng(n).permutation(3 * n).reshape(n, 3).tolist()


WAYS = {  # (axis, order) to the attention function, the order, and whether it is causal
    "zigzag": (round_the_ring, context.zigzag, True),
    "contiguous": (round_the_ring, context.contiguous, True),
    "shuffled": (round_the_ring, shuffled, True),
    "not causal": (functools.partial(round_the_ring, causal=False), context.zigzag, False),
    "ulysses": (by_heads, context.zigzag, True),
    "ulysses, contiguous": (by_heads, context.contiguous, True),
    "gathered": (by_gathering, context.zigzag, True),
}


def world(n):
    return mesh.make(context=n, devices=jax.devices()[:n])


def heads(way, n):
    """Of queries, and of keys: other groups for each n."""
    H = HEADS * n if "ulysses" in way else HEADS
    return H, (1, 2, 4)[(n + list(WAYS).index(way)) % 3]


def value_and_gradients(attend):
    """(q, k, v, segments, ct) to the result and what `ct` becomes."""

    def f(q, k, v, segments, ct):
        out, transposed = jax.vjp(lambda *qkv: attend(*qkv, segments=segments), q, k, v)
        return out, transposed(ct)

    return f


@functools.cache
def split_and_whole(way, n):
    """The way on n devices, in and out as one device has them, and that device."""
    make, order, causal = WAYS[way]
    inside = value_and_gradients(make(ring("context"), order))
    over = mesh.spmd(inside, mesh=world(n), in_specs=SPEC, out_specs=SPEC)

    def split(*arrays):
        found = over(*[context.split(x, n, order=order) for x in arrays])
        return jax.tree.map(lambda x: context.unsplit(x, n, order=order), found)

    return jax.jit(split), jax.jit(value_and_gradients(functools.partial(dense, causal=causal)))


def documents(T):
    """Of which document each token is: cuts anywhere, none, at each chunk's border, at each token;
    or numbers in any order."""
    borders = [[], list(range(0, T, CHUNK)), list(range(T))]
    cuts = st.one_of(
        st.sampled_from(borders), st.lists(st.integers(0, T), max_size=6)
    )  # twice at one place: an empty one
    ids = cuts.map(lambda cuts: np.sum(np.arange(T) >= np.array(cuts)[:, None], axis=0))
    return st.one_of(ids, hnp.arrays(np.int32, T, elements=st.integers(0, 2))).map(np.int32)


@pytest.mark.sweep(20, "context")
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12)
@given(data=st.data())
def test_equals_one_device(way, n, data):
    T, (H, G) = 2 * CHUNK * n, heads(way, n)
    draw = lambda heads: data.draw(
        hnp.arrays(np.float64, (2, T, heads, WIDTH), elements=st.floats(-4, 4))
    )
    q, k, v, ct = draw(H), draw(G), draw(G), draw(H)
    segments = np.stack([data.draw(documents(T)), data.draw(documents(T))])
    ours, plain = (f(q, k, v, segments, ct) for f in split_and_whole(way, n))
    # The terms of a sum are the measure: of values near 4, and for gradients products of three of
    # them, over T tokens.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=reference.EXACT, atol=64 * reference.EXACT
        ),
        ours,
        plain,
    )


@pytest.mark.sweep(20, "context")
@pytest.mark.parametrize("name", ["checkpoint", "scan", "vmap"])
def test_transformations(name):
    """Inside `checkpoint`, `scan` and `vmap`, over two axes that form one ring."""
    n, T = 4, 24
    over = mesh.make(a=2, b=2, devices=jax.devices()[:n])
    draw = np.random.default_rng(0).normal
    q, k, v = (draw(size=(2, 2, T, 2, WIDTH)) for _ in range(3))
    segments = np.zeros((2, T), np.int32)

    def loss(attend, q, k, v):
        attend = functools.partial(attend, segments=jnp.asarray(segments))
        f = lambda q, k, v: jnp.sum(jnp.cos(attend(q, k, v)))
        if name == "checkpoint":
            return jax.checkpoint(f)(q[0], k[0], v[0])
        if name == "vmap":
            return jnp.sum(jax.vmap(f)(q, k, v))
        body = lambda x, kv: (x + attend(x, *kv), None)
        return jnp.sum(jnp.cos(jax.lax.scan(body, q[0], (k, v))[0]))

    def inside(q, k, v):
        mine = functools.partial(context.local_tokens, axis=("a", "b"), dim=2)

        def attend(q, k, v, segments):
            segments = context.local_tokens(segments, ("a", "b"))
            return context.attention(q, k, v, ("a", "b"), segments=segments, kernel=SMALL)

        return jax.grad(functools.partial(loss, attend), argnums=(0, 1, 2))(*map(mine, (q, k, v)))

    split = jax.jit(mesh.spmd(inside, mesh=over, in_specs=P(), out_specs=P(None, None, ("a", "b"))))
    ours = jax.tree.map(lambda x: context.unsplit(x, n, dim=2), split(q, k, v))
    plain = jax.jit(jax.grad(functools.partial(loss, dense), argnums=(0, 1, 2)))(
        *map(jnp.asarray, (q, k, v))
    )
    reference.assert_close(ours, plain, reference.EXACT)


def products(jaxpr):
    """Multiplications in matrix products of a traced program, loops counted out; and the names of
    all its primitives."""
    total, names = 0, set()
    for eqn in jaxpr.eqns:
        names.add(eqn.primitive.name)
        if eqn.primitive.name == "dot_general":
            contracted = [
                eqn.invars[0].aval.shape[dim] for dim in eqn.params["dimension_numbers"][0][0]
            ]
            total += int(np.prod(eqn.outvars[0].aval.shape) * np.prod(contracted))
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                more, others = products(inner)
                total, names = total + eqn.params.get("length", 1) * more, names | others
    return total, names


def needed(order, n):
    """Blocks of scores that causal attention needs of each device, a diagonal one by half: by brute
    force."""
    held = context.chunk_table(order, n)
    return [sum((a > b) + (a == b) / 2 for a in mine for b in held.reshape(-1)) for mine in held]


@pytest.mark.parametrize("n", range(1, 9))
def test_the_table_counts_what_is_needed(n):
    zigzag, contiguous = (
        context.block_pairs(context.zigzag, n),
        context.block_pairs(context.contiguous, n),
    )
    assert zigzag.blocks == 2 * n + 1
    assert needed(context.zigzag, n) == [2 * n] * n
    assert 4 * contiguous.blocks == 4 * n
    assert sum(4 * each for each in needed(context.contiguous, n)) == 2 * n * n
    assert context.block_pairs(context.zigzag, n, causal=False).blocks == n


@functools.cache
def lowered(n, order, dtype, tokens=16, kernel=context.TILED):
    """The program of a value and its gradients, [2, T_X, 4, 8] with 2 heads of keys and `tokens` a
    device."""

    def body(q, k, v):
        out, transposed = jax.vjp(
            functools.partial(context.attention, axis="context", order=order, kernel=kernel),
            q,
            k,
            v,
        )
        return transposed(out)

    arrays = [jax.ShapeDtypeStruct((2, n * tokens, heads, 8), dtype) for heads in (4, 2, 2)]
    return jax.jit(mesh.spmd(body, mesh=world(n), in_specs=SPEC, out_specs=SPEC)).trace(
        *arrays
    ), arrays


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "order", [context.zigzag, context.contiguous], ids=lambda order: order.__name__
)
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_products_are_those_of_the_table(n, order):
    """Forward two products a block, backward five; one program for all devices, and nothing in it
    is conditional."""
    T, table = 16, context.block_pairs(order, n)
    found, names = products(lowered(n, order, jnp.float32)[0].jaxpr.jaxpr)
    block = 2 * 4 * (T // table.chunks) ** 2 * 8  # B H t s K
    assert found == 7 * table.blocks * block
    if order == context.zigzag:
        half = 7 * 2 * 4 * (n * T) ** 2 * 8 / 2  # what causal attention needs
        assert found * n / half == pytest.approx((2 * n + 1) / (2 * n), rel=1e-12)
    assert not names & {"cond", "switch"}


@functools.cache
def in_layers(n, documents):
    """Attention of bfloat16 in two layers, [2, 16, 4, 8] and two heads of keys on each device: its
    value and gradients."""

    def loss(q, keys, segments):
        layer = lambda q, kvs: (context.attention(q, *kvs[:2], "context", segments=kvs[2]), None)
        return jnp.sum(jax.lax.scan(layer, q, (*keys, segments))[0].astype(jnp.float32) ** 2)

    T, each = 16 * n, P(None, None, "context")
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)
    segments = shape(2, 2, T, dtype=jnp.int32) if documents else None
    gradients = mesh.spmd(
        lambda q, keys, segments: jax.grad(
            functools.partial(loss, segments=segments), argnums=(0, 1)
        )(q, keys),
        mesh=world(n),
        in_specs=(SPEC, each, each),
        out_specs=(SPEC, each),
    )
    return (
        jax.jit(gradients).lower(shape(2, T, 4, 8), (shape(2, 2, T, 2, 8),) * 2, segments).compile()
    )


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("n", "documents"), [(2, True), (3, False), (4, True), (8, False)])
def test_bytes_are_those_of_the_formula(n, documents):
    """Forward (n - 1) times a device's keys and values, and its segments; backward again, and as
    often their gradients."""
    compiled, layers, keys, marks = (
        in_layers(n, documents),
        2,
        2 * (2 * 16 * 2 * 8),
        documents * 2 * 16,
    )
    assert " conditional(" not in compiled.as_text()
    (entry,) = certificate.read(compiled, world(n))
    assert (entry.kind, entry.axes, entry.unbounded) == ("collective-permute", ("context",), False)
    assert entry.count == layers * (n - 1) * (2 * (2 + documents) + 2)
    sent = lambda narrow: layers * (n - 1) * (2 * (narrow * keys + 4 * marks) + 4 * keys)
    assert entry.bytes in (sent(2), sent(4))  # XLA's CPU backend may widen bfloat16


def largest(jaxpr):
    """The numbers of the largest array of a traced program."""
    own = max(int(np.prod(var.aval.shape)) for eqn in jaxpr.eqns for var in eqn.outvars)
    return max(
        [own, *(largest(jaxprs.opened(body)) for eqn in jaxpr.eqns for body in jaxprs.inner(eqn))]
    )


@pytest.mark.sweep(2)
@pytest.mark.parametrize("way", WAYS)
def test_no_array_grows_with_the_square_of_the_tokens(way):
    """Over layers in a scan, which share their documents: masks of all pairs would be computed
    before it, and kept."""
    n, (make, order, _), (H, G) = 2, WAYS[way], heads(way, 2)
    attend = make("context", order)

    def gradients(q, keys, segments):
        layer = lambda q, kv: (attend(q, *kv, segments=segments), None)
        return jax.grad(lambda q: jnp.sum(jax.lax.scan(layer, q, keys)[0] ** 2))(q)

    def of(T):
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        arrays = (
            shape(2, T, H, WIDTH),
            (shape(3, 2, T, G, WIDTH),) * 2,
            jax.ShapeDtypeStruct((2, T), jnp.int32),
        )
        specs = SPEC, P(None, None, "context"), SPEC
        return largest(
            jax.make_jaxpr(mesh.spmd(gradients, mesh=world(n), in_specs=specs, out_specs=SPEC))(
                *arrays
            ).jaxpr
        )

    assert of(96) == 2 * of(48)


@pytest.mark.long
def test_memory_is_linear_in_tokens_and_shared_out():
    """Temporary bytes of value and gradients: what further tokens add is the same for each of them,
    and 1 / n on n devices.

    A device of a ring holds beside its share the keys that came and those that go on, and the
    gradients that follow them, which together are less than what one device holds for as many
    tokens of its own.
    """
    kernel, lengths = context.tiled(64), (2048, 4096, 8192, 16384)
    added = {}
    for n in (1, 2, 4, 8):
        programs = [
            lowered(n, context.zigzag, jnp.float32, T // n, kernel)[0].lower().compile()
            for T in lengths
        ]
        sizes = [program.memory_analysis().temp_size_in_bytes for program in programs]
        print(
            f"{n} devices, temporary MB for T = 2k, 4k, 8k, 16k:",
            *(f"{size / 1e6:.2f}" for size in sizes),
        )
        added[n] = (sizes[3] - sizes[2]) / 8192
        assert (sizes[2] - sizes[1]) / 4096 == pytest.approx(
            added[n], rel=0.25
        )  # of a square it would be half
    one = added.pop(1)
    for n, bytes_a_token in added.items():
        assert one / n < bytes_a_token < 2.2 * one / n


@pytest.mark.long
def test_the_error_in_bfloat16_does_not_grow_with_devices():
    T, draw = 256, np.random.default_rng(0).normal
    arrays = [
        jnp.asarray(draw(size=(2, T, heads, 16))) for heads in (HEADS, 2, 2, HEADS)
    ]  # q, k, v and the cotangent
    whole, narrow = jnp.zeros((2, T), jnp.int32), [x.astype(jnp.bfloat16) for x in arrays]
    plain, errors = jax.tree.leaves(value_and_gradients(dense)(*arrays[:3], whole, arrays[3])), []
    for n in (1, 2, 4, 8):
        inside = value_and_gradients(functools.partial(context.attention, axis="context"))
        over = jax.jit(mesh.spmd(inside, mesh=world(n), in_specs=SPEC, out_specs=SPEC))
        found = jax.tree.leaves(
            over(*[context.split(x, n) for x in (*narrow[:3], whole, narrow[3])])
        )
        off = [
            context.unsplit(x, n).astype(jnp.float64) - y for x, y in zip(found, plain, strict=True)
        ]
        errors.append(
            [
                float(jnp.linalg.norm(x) / jnp.linalg.norm(y))
                for x, y in zip(off, plain, strict=True)
            ]
        )
    for name, each in zip(("result", "dq", "dk", "dv"), zip(*errors, strict=True), strict=True):
        print(
            f"relative error of {name} in bfloat16 for n = 1, 2, 4, 8:",
            *(f"{error:.2e}" for error in each),
        )
        assert (
            max(each) < 1.1 * each[0] < 0.02
        )  # a rounding to bfloat16 is 2^-9 = 0.002, and several lie in a row


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize(
    "order", [context.zigzag, context.contiguous, shuffled], ids=lambda order: order.__name__
)
def test_split_gives_each_device_its_chunks_and_is_undone(n, order):
    size = 2
    T = size * context.chunk_table(order, n).size
    x = np.arange(2 * T).reshape(2, T)
    split = context.split(x, n, order=order)
    np.testing.assert_array_equal(context.unsplit(split, n, order=order), x)
    for chunks, mine in zip(order(n), np.split(np.asarray(split[0]), n), strict=True):
        assert list(mine) == [
            place for chunk in chunks for place in range(chunk * size, (chunk + 1) * size)
        ]


def test_each_device_knows_its_tokens():
    def body(x):
        mine = context.local_tokens(x, "context", dim=1)
        return mine, context.positions(mine.shape[1], "context")

    x = np.arange(48).reshape(2, 24)
    mine, places = jax.jit(
        mesh.spmd(body, mesh=world(4), in_specs=P(), out_specs=(SPEC, P("context")))
    )(x)
    np.testing.assert_array_equal(mine, context.split(x, 4))
    np.testing.assert_array_equal(places, context.split(np.arange(24), 4, dim=0))


def attended(
    n=2,
    q=(2, 8, 4, 2),
    k=(2, 8, 2, 2),
    *,
    segments=None,
    attend=context.attention,
    dtypes=(jnp.float32,) * 2,
    heads=None,
    **options,
):
    if heads is not None:
        attend = context.with_heads(attend, heads)

    def body(q, k, segments):
        options_ = options if segments is None else {**options, "segments": segments}
        return attend(q, k, k, axis="context", **options_)

    arrays = jax.ShapeDtypeStruct(q, dtypes[0]), jax.ShapeDtypeStruct(k, dtypes[1]), segments
    return jax.eval_shape(mesh.spmd(body, mesh=world(n), in_specs=SPEC, out_specs=SPEC), *arrays)


def through(make):
    return lambda q, k, v, axis, **options: make(context.blockwise, axis)(q, k, v, **options)


ERRORS = {
    "the number of heads of q, 3, must be a multiple of that of k and v, 2.": {"q": (2, 8, 3, 2)},
    "needs q[B, T, H, K], k[B, T, G, K] and v[B, T, G, K] of one type: B sequences of T tokens, "
    "with H or G heads of width K; got float32[2, 4, 4, 2], bfloat16": {
        "dtypes": (jnp.float32, jnp.bfloat16)
    },
    "on an axis of 4 devices, a device has 2 of the 8 heads of queries, so it needs 1 of the 2 "
    "heads of keys; the number of heads of its k is 2. Select the": {
        "q": (2, 8, 2, 2),
        "heads": (8, 2),
    },
    "a device has 3 of the 12 heads of queries, so it splits the 2 heads of queries "
    "that share a head of keys into unequal parts: 3 is neither a multiple nor a divisor of 2. "
    "Use another number of devices on the axis: a divisor or a multiple of the 6 heads of keys.": {
        **{"q": (2, 8, 3, 2), "k": (2, 8, 1, 2), "heads": (12, 6)}
    },
    "needs heads=(heads of queries, heads of keys) of the whole model": {"heads": (6, 4)},
    "the number of tokens of a device, 3 (6 over 2 devices), must be a multiple of 2, the number "
    "of chunks of a device. Use sequences of 8": {**{"q": (2, 6, 4, 2), "k": (2, 6, 4, 2)}},
    "needs keys of the same tokens as the queries; got 4 keys and 2 queries": {"q": (2, 4, 4, 2)},
    "context.ulysses needs keys of the same tokens as the queries; got 4 keys and 2 queries": {
        **{"q": (2, 4, 4, 2), "attend": through(context.ulysses)}
    },
    "context.gathered needs keys of the same tokens as the queries; got 4 keys and 6 queries on": {
        **{"q": (2, 12, 4, 2), "attend": through(context.gathered)}
    },
    "context.attention needs segments that are whole numbers of the shape [2, 4]": {
        "segments": jax.ShapeDtypeStruct((2, 4), jnp.int32)
    },
    "for each of this device's tokens; got float32[2, 4].": {
        "segments": jax.ShapeDtypeStruct((2, 8), jnp.float32)
    },
    "context.ulysses: the number of heads of q, 4, must be a multiple of the number of devices of "
    "'context', 3.": {
        **{"n": 3, "q": (2, 12, 4, 2), "k": (2, 12, 2, 2), "attend": through(context.ulysses)}
    },
    "context: the number of tokens, 6, must be a multiple of 4: 2 chunks for each of 2 devices. "
    "Use sequences of 8": {
        **{"q": (2, 6, 4, 2), "k": (2, 6, 4, 2), "attend": through(context.gathered)}
    },
    "An order must have each chunk once, and the same number of chunks on each of 2 devices; got "
    "[[0], ": {"order": lambda n: [[0]] * n},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        attended(**ERRORS[message])


def test_keys_that_nobody_picked_are_refused():
    """Heads of queries are split over an axis, and all keys are on each device of it."""
    over = mesh.make(tensor=2, context=2, devices=jax.devices()[:4])
    f = lambda q, k: context.attention(q, k, k, "context")
    specs = P(None, "context", "tensor"), P(None, "context")
    q, k = (
        jax.ShapeDtypeStruct((2, 8, 4, 2), jnp.float32),
        jax.ShapeDtypeStruct((2, 8, 2, 2), jnp.float32),
    )
    with pytest.raises(
        ValueError,
        match=re.escape(
            "q, of 2 heads, varies along ['tensor'], and k, of 2 heads, does not. If ['tensor']"
        ),
    ):
        jax.eval_shape(mesh.spmd(f, mesh=over, in_specs=specs, out_specs=specs[0]), q, k)


def test_a_kernel_of_no_block_is_refused():
    with pytest.raises(ValueError, match="needs a block of 1 token or more; got 0"):
        context.tiled(0)
    q = jnp.ones((1, 4, 2, 2))
    with pytest.raises(ValueError, match="needs as many keys as queries; got 2 and 4"):
        context.blockwise(q, q[:, :2], q[:, :2])
    four, two = jnp.arange(4), jnp.arange(2)
    for name, positions in (("keys", (four, two)), ("queries", (two, four))):
        with pytest.raises(
            ValueError, match=rf"positions of the {name} that .* \[4\]; got .*\[2\]"
        ):
            context.blockwise(q, q, q, positions=positions)


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (4, 0), (0, 4)])
def test_attention_without_tokens_is_refused(queries, keys):
    q, k = jnp.ones((1, queries, 2, 2)), jnp.ones((1, keys, 2, 2))
    positions = jnp.arange(queries), jnp.arange(keys)
    said = f"context.blockwise needs 1 query and 1 key or more; got {queries} and {keys}."
    with pytest.raises(ValueError, match=said):
        context.blockwise(q, k, k, positions=positions)


def tril_of_shapes(q, k, v, *, positions):
    places = jnp.arange(k.shape[1])
    seen = places[None] <= places[: q.shape[1], None]
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])


def of_jax(q, k, v, *, positions):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def window_by_difference(q, k, v, *, positions):
    apart = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
    return jax.nn.dot_product_attention(q, k, v, mask=((apart >= 0) & (apart < 3))[None, None])


def counts_of_a_function(q, k, v, *, positions):
    """The counts are made by functions under `jit`."""
    counted = jax.jit(jnp.arange, static_argnums=0)
    seen = counted(k.shape[1])[None] <= counted(q.shape[1])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])


def table_of_numpy(q, k, v, *, positions):
    seen = np.tril(np.ones((q.shape[1], k.shape[1]), bool))
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])


def bias_in_a_function(q, k, v, *, positions):
    """The bias is a constant of a function under `jit`."""
    apart = np.abs(np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])[None])
    bias = -0.5 * apart[None, None].astype(np.float32)
    return jax.jit(functools.partial(jax.nn.dot_product_attention, bias=bias))(q, k, v)


def first_keys(q, k, v, *, positions):
    """A constant mask of keys alone. Each device has all keys, in the order of the sequence."""
    seen = np.broadcast_to(np.arange(k.shape[1]) < 5, (q.shape[1], k.shape[1]))
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])


def keys_by_two_counts(q, k, v, *, positions):
    """A mask of keys alone that compares two counts of them."""
    keys = jnp.arange(k.shape[1]) <= jnp.arange(k.shape[1])[::-1]
    seen = jnp.broadcast_to(keys[None], (q.shape[1], k.shape[1]))
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])


def all_of_them(q, k, v, *, positions):
    return jax.nn.dot_product_attention(q, k, v)


def window_by_positions(q, k, v, *, positions):
    apart = positions[0][:, None] - positions[1][None]
    return jax.nn.dot_product_attention(q, k, v, mask=((apart >= 0) & (apart < 3))[None, None])


def gathered_shape(attend, n=4, order=context.zigzag):
    x = jax.ShapeDtypeStruct((2, 8 * n, 4, 2), jnp.float32)
    f = context.gathered(attend, ring("context"), order=order)
    return jax.eval_shape(mesh.spmd(f, mesh=world(n), in_specs=SPEC, out_specs=SPEC), x, x, x).shape


@pytest.mark.parametrize(
    "attend",
    [
        tril_of_shapes,
        of_jax,
        window_by_difference,
        counts_of_a_function,
        table_of_numpy,
        bias_in_a_function,
    ],
)
def test_a_mask_by_its_own_count_is_refused(attend):
    said = (
        "context.gathered: attend ignores positions=, and counts queries and keys from 0 for its "
        "mask or bias. But the 8 queries of a"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        gathered_shape(attend)
    assert gathered_shape(attend, n=1) == (
        2,
        8,
        4,
        2,
    )  # one device's own count is that of the sequence
    # Unless its order puts the tokens elsewhere.
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        gathered_shape(attend, n=1, order=lambda n: [[1, 0]])


@pytest.mark.parametrize(
    "attend",
    [
        all_of_them,
        first_keys,
        keys_by_two_counts,
        window_by_positions,
        functools.partial(context.blockwise, kernel=SMALL),
    ],
)
def test_attention_that_needs_no_count_is_not_refused(attend):
    assert gathered_shape(attend) == (2, 32, 4, 2)


def test_tiles_that_are_filled_up_compare_no_counts():
    everything = functools.partial(context.blockwise, causal=False, kernel=context.tiled(3))
    assert gathered_shape(everything) == (2, 32, 4, 2)


# Layers that must send


@pytest.mark.parametrize("collective", [lax.pmax, lax.pmin, lax.psum])
def test_layers_that_send_a_maximum_or_a_sum_pass_the_check(collective):
    def layers(x):
        return x + collective(x, "context")

    f = mesh.spmd(
        context.must_communicate(layers, "context"), mesh=world(2), in_specs=SPEC, out_specs=SPEC
    )
    assert jax.eval_shape(f, jax.ShapeDtypeStruct((2, 8), jnp.float32)).shape == (2, 8)


# Kernels, which see one chunk and are not told which


def table_kernel(mask, bias=lambda tokens: 0.0, wrap=lambda f: f):
    """A kernel by whole tables of scores, with a mask and a bias of the number of tokens."""

    def masked(products):
        tokens = products.shape[-1]
        return jnp.where(mask(tokens), products + bias(tokens), -jnp.inf)

    return kernel_by(masked, wrap)


def kernel_by(masked, wrap=lambda f: f):
    """A kernel that makes its scores from products by `masked`."""

    def scores(q, k, causal):
        products = jnp.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        return masked(products) if causal else products

    def forward(q, k, v, *, causal, segments=None, positions=None):
        logits = scores(q, k, causal)
        lse = jax.nn.logsumexp(logits, axis=-1)
        out = jnp.einsum("bhts,bshk->bthk", jnp.exp(logits - lse[..., None]), v)
        return out, jnp.swapaxes(lse, 1, 2)

    return context.Kernel(wrap(forward), context.TILED.backward)


def distances(tokens):
    return jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None]


def window(tokens):
    return (distances(tokens) >= 0) & (distances(tokens) < CHUNK + 1)


def window_by_numpy(tokens):
    return (np.tri(tokens) * (1 - np.tri(tokens, k=-CHUNK - 1))) > 0


def window_by_two_comparisons(tokens):
    query, key = jnp.arange(tokens)[:, None], jnp.arange(tokens)[None]
    return (key <= query) & (key > query - CHUNK - 1)


def all_earlier(tokens):
    return distances(tokens) >= 0


def additive_mask(tokens):
    return jnp.where(distances(tokens) >= 0, 0.0, -1e9)[None, None]


def places_passed_to(wrap, width):
    """A kernel whose places are made outside of a function that masks by them."""

    def by_places(products, places, width):
        apart = places[:, None] - places[None]
        return jnp.where((apart >= 0) & (apart < width), products, -jnp.inf)

    return kernel_by(
        lambda products: wrap(by_places)(products, jnp.arange(products.shape[-1]), width)
    )


@jax.jit
def masked_by_distances(products, apart):
    return jnp.where(apart >= 0, products, -jnp.inf)


jitted = functools.partial(jax.jit, static_argnames=("causal",))
OF_DISTANCES = {
    "window": table_kernel(window),
    "window by NumPy": table_kernel(window_by_numpy),
    "window by two comparisons": table_kernel(window_by_two_comparisons),
    "jitted window": table_kernel(window, wrap=jitted),
    "window of places passed to a jit": places_passed_to(jax.jit, CHUNK + 1),
    "window of places passed to a checkpoint": places_passed_to(jax.checkpoint, CHUNK + 1),
    "ALiBi": table_kernel(
        all_earlier, lambda tokens: -0.5 * distances(tokens)[None, None].astype(float)
    ),
}
CAUSAL = {
    "counts": table_kernel(all_earlier),
    "tril": table_kernel(lambda tokens: jnp.tril(jnp.ones((tokens, tokens), bool))),
    "NumPy": table_kernel(lambda tokens: np.tri(tokens) > 0),
    "added": table_kernel(lambda tokens: np.ones((tokens, tokens), bool), additive_mask),
    "jitted": table_kernel(all_earlier, wrap=jitted),
    "places passed to a jit": places_passed_to(jax.jit, 10**6),
    "places passed to a checkpoint": places_passed_to(jax.checkpoint, 10**6),
    "distances passed to a jit": kernel_by(
        lambda products: masked_by_distances(products, distances(products.shape[-1]))
    ),
    "one size": table_kernel(lambda tokens: np.tri(CHUNK) > 0),
}


def by_kernel(kernel, n, order, width):
    chunks = len(order(n)[0])
    sizes = 1, chunks * CHUNK * n, 2, width
    q, k, v = (np.random.default_rng(i).normal(size=sizes) for i in range(3))
    attend = lambda q, k, v: context.attention(q, k, v, "context", order=order, kernel=kernel)
    mapped = mesh.spmd(attend, mesh=world(n), in_specs=(SPEC, SPEC, SPEC), out_specs=SPEC)
    split = functools.partial(context.split, devices=n, order=order)
    return context.unsplit(jax.jit(mapped)(*map(split, (q, k, v))), n, order=order), (q, k, v)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("width", [2, CHUNK])
@pytest.mark.parametrize("kernel", OF_DISTANCES)
def test_a_kernel_of_distances_is_refused(kernel, width):
    for n, order in ((1, context.zigzag), (2, context.zigzag), (3, context.contiguous)):
        with pytest.raises(ValueError, match=r"depend on distances .*context\.gathered"):
            by_kernel(OF_DISTANCES[kernel], n, order, width)


def test_a_kernel_of_distances_for_a_fixed_number_of_heads_is_refused():
    """It cannot be traced on one head."""

    def with_slopes(products):
        tokens = products.shape[-1]
        slopes = -jnp.asarray([0.5, 0.25])[:, None, None]  # of two heads
        bias = slopes * distances(tokens)[None].astype(float)
        products = products.reshape(products.shape[0], 2, tokens, tokens)
        return jnp.where(all_earlier(tokens), products + bias[None], -jnp.inf)

    with pytest.raises(ValueError, match=r"depend on distances .*context\.gathered"):
        by_kernel(kernel_by(with_slopes), 2, context.zigzag, 2)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kernel", CAUSAL)
def test_a_causal_kernel_of_tables_is_let_through(kernel):
    found, arrays = by_kernel(CAUSAL[kernel], 2, context.zigzag, 2)
    segments = jnp.zeros(arrays[0].shape[:2], jnp.int32)
    reference.assert_close(found, dense(*arrays, segments=segments), reference.EXACT)
