"""What a program sends is read right in every notation and on both JAX versions, and told apart
from what was predicted."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import grads, hardware, mesh
from parallax.collectives import cost, doubling, ring
from parallax.collectives.types import varying
from parallax.compiled import certificate, hlo, links
from parallax.compiled.certificate import Entry

SIZES = {"a": 2, "b": 4}
TEXT = jax.ShapeDtypeStruct((8 * 16,), jnp.float32)


def compiled(body, sizes=SIZES):
    """`body` of 16 numbers on each device, over all axes; its result summed, so that nothing is
    left out."""
    world = mesh.make(**sizes)
    total = lambda x: lax.psum(
        varying(sum(map(jnp.sum, jax.tree.leaves(body(x)))), tuple(sizes)), tuple(sizes)
    )
    return jax.jit(mesh.spmd(total, mesh=world, in_specs=(P(tuple(sizes)),), out_specs=P())).lower(
        TEXT
    ).compile(), world


def entries(body, sizes=SIZES):
    """What is read, but for the sum of the results at the end."""
    found = certificate.read(*compiled(body, sizes))
    axes = tuple(name for name in sizes if sizes[name] > 1)
    last = lambda entry: entry[:4] == ("all-reduce", axes, 1, 4) and not entry.unbounded
    return [entry for entry in found if not last(entry)]


BODIES = {  # what each does, along which axes, and what is read
    "psum": (lambda x: lax.psum(x, "a"), [Entry("all-reduce", ("a",), 1, 64, 1)]),
    "psum over both": (
        lambda x: lax.psum(x, ("a", "b")),
        [
            Entry("all-reduce", ("a", "b"), 2, 68, 2)
        ],  # and the sum of the results, which waits for it
    ),
    "all_gather, axes in another order": (
        lambda x: lax.all_gather(x, ("b", "a")),
        [Entry("all-gather", ("a", "b"), 1, 512, 1)],
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "b", tiled=True),
        [Entry("reduce-scatter", ("b",), 1, 16, 1)],
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x.reshape(4, 4), "b", 0, 0),
        [Entry("all-to-all", ("b",), 1, 64, 1)],
    ),
    "ring": (
        lambda x: ring.all_reduce(x, "b"),
        [Entry("collective-permute", ("b",), 6, 6 * 16, 6)],
    ),
    "ring through both": (
        lambda x: ring.all_reduce(x, ("b", "a")),
        [Entry("collective-permute", ("a", "b"), 14, 14 * 8, 14)],
    ),
    "two rings of which none waits": (
        lambda x: (
            ring.reduce_scatter(x, "b", tiled=True),
            ring.reduce_scatter(x[::-1], "b", tiled=True),
        ),
        [Entry("collective-permute", ("b",), 6, 6 * 16, 3)],
    ),
    "two rings one after the other": (
        lambda x: ring.all_reduce(ring.all_reduce(x, "b") ** 2, "b"),
        [Entry("collective-permute", ("b",), 12, 12 * 16, 12)],
    ),
    "in a loop": (
        lambda x: lax.scan(
            lambda y, _: (varying(lax.psum(y * x, "a"), "a"), None), x * 0, length=5
        )[0],
        [Entry("all-reduce", ("a",), 5, 5 * 64, 5)],
    ),
    "in a loop of no known length": (
        lambda x: lax.while_loop(
            lambda y: y < 9, lambda y: 2 + lax.pmax(y + x[0], ("a", "b")), jnp.zeros((), x.dtype)
        ),
        [Entry("all-reduce", ("a", "b"), 1, 4, 2, unbounded=True)],
    ),
    "in a branch": (
        lambda x: lax.cond(
            lax.psum(x[0], "b") > 0,
            lambda x: lax.psum(x[:2], "b"),
            lambda x: 2 * lax.psum(x[::-1][:2], "b"),
            x,
        ),
        [
            Entry("all-reduce", ("b",), 1, 4, 2),
            Entry("all-reduce", ("b",), 2, 16, 2, conditional=True),
        ],
    ),
    "nothing": (lambda x: x, []),
}


@pytest.mark.parametrize("name", BODIES)
def test_reads(name):
    body, expected = BODIES[name]
    assert entries(body) == expected


def test_axes_of_size_one_move_nothing():
    found = entries(lambda x: ring.all_reduce(lax.psum(x, "a"), "b"), {"a": 8, "b": 1})
    assert found == [Entry("all-reduce", ("a",), 2, 68, 2)]  # the psum, and the sum of the results


def test_a_permute_without_pairs_moves_along_no_axis():
    world = mesh.make(**SIZES)
    body = mesh.spmd(lambda x: lax.ppermute(x, "b", []), mesh=world, in_specs=P(), out_specs=P("b"))
    text = jax.jit(body).lower(np.ones(16, np.float32)).compile().as_text()
    assert "source_target_pairs={}" in text
    assert certificate.read(text, world) == [Entry("collective-permute", (), 1, 64, 1)]
    assert links.by_kind(text, links.switch(hardware.H100, 8)) == {}


GROUPS = {  # of eight devices, numbered along (a, b, c) of sizes 2 x 2 x 2
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}": ("a",),
    "replica_groups={{0,1,2,3,4,5,6,7}}": ("a", "b", "c"),
    "replica_groups={}": ("a", "b", "c"),
    "replica_groups=[2,4]<=[8]": ("b", "c"),
    "replica_groups=[4,2]<=[8]": ("c",),
    "replica_groups=[4,2]<=[2,4]T(1,0)": ("a",),
    "replica_groups=[4,2]<=[2,2,2]T(0,2,1)": ("b",),
    "replica_groups=mesh['x'=2,'y'=4] {'x'}": ("a",),
    "replica_groups=mesh['x'=2,'y'=4] {'y'}": ("b", "c"),
    "replica_groups=mesh['x'=2,'y'=4] {'y','x'}": ("a", "b", "c"),
    "replica_groups=mesh['x'=8] {'x':(1)2}": ("a",),
    "replica_groups=mesh['x'=8] {'x':(2)2}": ("b",),
    "replica_groups=mesh['x'=8] {'x':(1)2,'x':(4)2}": ("a", "c"),
    "replica_groups=mesh['x'=8] {'x':(4)2,'x':(1)2}": ("a", "c"),
    "replica_groups=mesh['x'=4,'y'=1,'z'=2], device_ids=([2,4]T(1,0)) {'x'}": ("b", "c"),
    "replica_groups=mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}": ("a",),
    "replica_groups=mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7) {'x'}": ("c",),
    "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}": ("c",),
    "source_target_pairs={{0,0},{1,4}}": ("a", "c"),
    "source_target_pairs={{0,0},{1,1}}": (),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_finds_the_axes(groups):
    kind = "collective-permute" if "pairs" in groups else "all-gather"
    line = f"  ROOT %y = f32[8]{{0}} {kind}(%x), channel_id=1, {groups}, use_global_device_ids=true"
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{line}\n}}"
    assert certificate.read(text, mesh.make(a=2, b=2, c=2)) == [
        Entry(kind, GROUPS[groups], 1, 32, 1)
    ]


# Of a program whose collectives are started in one line and done in another, as on accelerators.
STARTED = {
    "(f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), "
    "source_target_pairs={{0,1},{1,0}}": 16,
    "(f32[2]{0}, f32[4]{0}) all-gather-start(%x), replica_groups={{0,1}}": 16,
    "((f32[2]{0}, s8[2]{0:T(8,128)(2,1)}), (f32[4]{0}, s8[4]{0})) all-gather-start(%x, %z), "
    "replica_groups={{0,1}}": 20,
    "f32[4]{0} all-reduce-start(%x), replica_groups={{0,1}}": 16,
    "(f32[4]{0}, bf16[4]{0}) all-reduce-start(%x, %z), replica_groups={{0,1}}": 24,
    "((f32[8]{0}), f32[4]{0}, u32[]) reduce-scatter-start(%x), replica_groups={{0,1}}": 16,
}


@pytest.mark.parametrize("start", STARTED)
def test_counts_what_is_started_once(start):
    kind = start.split("(%")[0].split()[-1].removesuffix("-start")
    text = textwrap.dedent(
        f"""
        ENTRY %main (x: f32[8]) -> f32[8] {{
          %s = {start}, metadata={{op_name="all-reduce(%x"}}
          ROOT %d = f32[4]{{0}} {kind}-done(%s)
        }}
        """
    )
    assert certificate.read(text, mesh.make(x=2, devices=jax.devices()[:2])) == [
        Entry(kind, ("x",), 1, STARTED[start], 1)
    ]


def test_counts_what_is_wrapped_once():
    text = textwrap.dedent(
        """
        %wrapped (x: f32[8]) -> f32[4] {
          ROOT %r = f32[4]{0} reduce-scatter(%x), replica_groups={{0,1}}, dimensions={0}
        }

        ENTRY %main (x: f32[8]) -> f32[4] {
          %s = ((f32[8]{0}), f32[4]{0}) async-start(%x), calls=%wrapped
          %u = ((f32[8]{0}), f32[4]{0}) async-update(%s), calls=%wrapped
          ROOT %d = f32[4]{0} async-done(%u), calls=%wrapped
        }
        """
    )
    assert certificate.read(text, mesh.make(x=2, devices=jax.devices()[:2])) == [
        Entry("reduce-scatter", ("x",), 1, 16, 1)
    ]


def test_a_loops_condition_runs_once_more_than_its_body():
    attributes = 'condition=%until, body=%trip, backend_config={"known_trip_count":{"n":"3"}}'
    loop = hlo.Instruction("while", "(s32[])", "while", ["carry"], attributes)
    assert dict(loop.called) == {"until": 4, "trip": 3}
    assert dict(loop._replace(attributes="condition=%until, body=%trip").called) == {
        "until": 0,
        "trip": 0,
    }


def test_waits_without_data_count_as_hops():
    permute = "f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}"
    text = (
        "ENTRY %main (x: f32[4]) -> f32[4] "
        f"{{\n  %p = {permute}\n  %q = {permute}, control-predecessors={{%p}}\n}}"
    )
    assert certificate.read(text, mesh.make(x=2, devices=jax.devices()[:2])) == [
        Entry("collective-permute", ("x",), 2, 32, 2)
    ]


def test_reads_what_xla_partitions():
    world = mesh.make(**SIZES)
    split = NamedSharding(world, P("b"))
    program = jax.jit(
        lambda x: jnp.sum(x, 0), in_shardings=split, out_shardings=NamedSharding(world, P())
    )
    found = certificate.read(
        program.lower(jax.ShapeDtypeStruct((16, 3), jnp.float32)).compile(), world
    )
    assert found == [Entry("all-reduce", ("b",), 1, 12, 1)]


def test_refuses_another_mesh():
    program, _ = compiled(lambda x: lax.psum(x, "a"))
    with pytest.raises(ValueError, match=r"names device 7, and the mesh \{'x': 4\} has 4 devices"):
        certificate.read(program, mesh.make(x=4, devices=jax.devices()[:4]))


def test_table():
    found = [
        Entry("all-gather", ("a", "b"), 1, 512, 1),
        Entry("collective-permute", (), 1200, 64, 6, conditional=True),
    ]
    assert certificate.table(found) == textwrap.dedent(
        """\
        axes     kind                count  bytes  hops
        a x b    all-gather              1    512     1
        no axis  collective-permute  1,200     64     6  conditional"""
    )


RIGHT = cost.of(ring.all_reduce, 64, 4)
PREDICTED = {  # of a ring of 64 bytes along b, and two numbers summed along a
    "right in bytes": ({"b": 96, "a": 8}, []),
    "right as a cost": ({"b": RIGHT, ("a",): 8}, []),
    "right, and nothing where nothing is": ({"b": 96, "a": 8, ("b", "a"): 0}, []),
    "right as entries": (
        [Entry("collective-permute", ("b",), 6, 96, 6), Entry("all-reduce", ("a",), 1, 8, 1)],
        [],
    ),
    "too few bytes": (
        {"b": 48, "a": 8},
        [
            "along b: 48 bytes were predicted, and the program has 96 (6 collective-permute): "
            "exactly 2 times as many; is it in a loop, or done 2 times?"
        ],
    ),
    "too many bytes": (
        {"b": 100, "a": 8},
        ["along b: 100 bytes were predicted, and the program has 96 (6 collective-permute)."],
    ),
    "another algorithm": (
        {"b": cost.Cost(chain=4, messages=12, sent=96), "a": 8},
        [
            "along b: 12 collectives were predicted, and the program has 6 (6 collective-permute).",
            "along b: 4 hops in a row were predicted, and the program has 6 (6 "
            "collective-permute).",
        ],
    ),
    "fewer hops than one after another is no fault": ({"b": RIGHT._replace(chain=7), "a": 8}, []),
    "an axis forgotten": (
        {"b": RIGHT},
        ["along a: nothing was predicted, and the program moves 8 bytes (1 all-reduce)."],
    ),
    "an axis that is silent": (
        {"b": RIGHT, "a": 8, ("a", "b"): 12},
        ["along a x b: 12 bytes were predicted, and the program moves none."],
    ),
    "another kind": (
        [Entry("all-reduce", ("b",), 1, 64, 1), Entry("all-reduce", ("a",), 1, 8, 1)],
        [
            "all-reduce along b: 64 bytes were predicted, and the program moves none.",
            "collective-permute along b: nothing was predicted, and the program moves 96 bytes "
            "(6 collective-permute).",
        ],
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PREDICTED)
def test_says_where_a_prediction_is_wrong(name):
    predicted, expected = PREDICTED[name]
    found = entries(lambda x: (ring.all_reduce(x, "b"), lax.psum(x[:2], "a")))
    assert certificate.differences(found, predicted) == expected


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 4}, {"a": 8, "b": 1}])
@pytest.mark.parametrize("algorithm", [doubling, ring])
def test_a_collective_over_two_axes_may_move_data_along_one_of_them(algorithm, sizes):
    found = entries(lambda x: algorithm.all_reduce(x, ("a", "b")), sizes)
    predicted = cost.of(algorithm.all_reduce, 64, tuple(sizes.values()))
    assert certificate.differences(found, {("a", "b"): predicted}) == []
    twice = predicted._replace(sent=2 * predicted.sent)
    assert certificate.differences(found, {("a", "b"): twice})
    # Entries along an axis with a key of its own are compared with this key only.
    if len(found) == 2:
        assert len(certificate.differences(found, {("a", "b"): predicted, "b": 2 * 64})) == 2


def test_predicted_entries_of_one_kind_and_axes_are_added_up():
    found = [Entry("all-reduce", ("a",), 2, 12, 2)]
    weights, loss = Entry("all-reduce", ("a",), 1, 8, 1), Entry("all-reduce", ("a",), 1, 4, 1)
    assert certificate.differences(found, [weights, loss]) == []
    (sentence,) = certificate.differences(found, [weights, weights])
    assert "16 bytes were predicted, and the program has 12" in sentence


def test_finds_a_reduction_in_the_loop_over_microbatches():
    """The mistake that the order of wrapping makes: averaging inside the accumulation reduces once
    a microbatch."""
    world = mesh.make(data=8)
    grad = jax.value_and_grad(lambda w, batch: jnp.mean((batch @ w) ** 2))
    averaged = lambda grad: grads.averaged(grad, ring("data"))
    accumulated = lambda grad: grads.accumulated(grad, microbatches=4)
    w, batch = np.ones((16, 3), np.float32), np.ones((64, 16), np.float32)
    loss, weights = cost.of(ring.all_reduce, 4, 8), cost.of(ring.all_reduce, w.nbytes, 8)
    both = cost.Cost(*map(sum, zip(loss, weights, strict=True)))._replace(
        chain=weights.chain
    )  # side by side
    predicted = {"data": both}
    for wrapped, told in (
        (averaged(accumulated(grad)), 0),
        (accumulated(averaged(grad)), 3),
    ):  # bytes, count and hops
        program = jax.jit(mesh.spmd(wrapped, mesh=world, in_specs=(P(), P("data")), out_specs=P()))
        found = certificate.read(program.lower(w, batch).compile(), world)
        sentences = certificate.differences(found, predicted)
        assert len(sentences) == told
        assert all(
            sentence.endswith("exactly 4 times as many; is it in a loop, or done 4 times?")
            for sentence in sentences
        )


@pytest.mark.parametrize(
    ("uncertain", "words"),
    [
        (
            {"conditional": True},
            "stands in a conditional, and is counted as if all its branches ran. If devices take",
        ),
        (
            {"unbounded": True},
            "stands in a loop whose number of trips XLA does not know, and is counted for one "
            "trip.",
        ),
    ],
)
def test_what_cannot_be_counted_is_told(uncertain, words):
    entry = Entry("collective-permute", ("a",), 1, 8, 1, **uncertain)
    (sentence,) = certificate.differences([entry], [entry])
    assert sentence.startswith(f"collective-permute along a: {words}")


def test_one_chain_through_a_conditional_counts_once():
    hop = Entry("collective-permute", ("a",), 1, 8, 2)
    entries = [hop, hop._replace(conditional=True)]
    (uncertain,) = certificate.differences(entries, {"a": cost.Cost(sent=16, messages=2, chain=2)})
    assert "stands in a conditional" in uncertain


def test_parse_refuses_a_loop_of_unknown_length():
    program, _ = compiled(BODIES["in a loop of no known length"][0])
    with pytest.raises(
        ValueError,
        match=(
            r"hlo\.parse needs to know how often .* number of trips XLA does not know\. Use "
            r"hlo\.runs"
        ),
    ):
        hlo.parse(program.as_text())
