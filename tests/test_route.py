"""A table is right or refused, and a right one runs to the sum: judged by a simulator of its own,
which sends real blocks.

A table that joins `collectives.tables` is tested for free, here and in test_collectives.py and
test_cost.py.
"""

import csv
import functools
import inspect
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallax import draw, mesh
from parallax.collectives import Algorithm, Route, algorithm, by_hand, cost, execute, ring, tables
from parallax.collectives.route import from_csv, to_csv
from parallax.collectives.types import varying

ARGUMENTS = {"by": 4, "g": 2}  # what makers of algorithms are called with
ALGORITHMS = [each for each in vars(tables).values() if isinstance(each, Algorithm)]
MAKERS = [
    each
    for each in vars(tables).values()
    if getattr(each, "__module__", "") == tables.__name__ and callable(each)
]
ALGORITHMS += [
    maker(
        *(
            ARGUMENTS[name]
            for name, given in inspect.signature(maker).parameters.items()
            if given.default is given.empty
        )
    )
    for maker in MAKERS
    if inspect.signature(maker).return_annotation is Algorithm
]
ALGORITHMS.append(tables.machines(2, tables.halving))
every_algorithm = pytest.mark.parametrize("of", ALGORITHMS, ids=str)


def made(of, n):
    """The tables for n devices; none where the collective is not for so many."""
    try:
        found = of.table(n)
    except ValueError:
        return ()
    return found if isinstance(found, tuple) else (found,)


def judged(shape, rounds):
    """Whether a table is right: all devices send real blocks, scattered with their terms, gathered
    as copies."""
    inside = lambda o: (
        len(o) == len(shape) and all(0 <= x < length for x, length in zip(o, shape, strict=True))
    )
    points = all(inside(o) for sends in rounds for offsets in sends.values() for o in offsets)
    return points and scatters(shape, rounds) and gathers(shape, rounds)


def moved(shape, point, step):
    return tuple((x + y) % length for x, y, length in zip(point, step, shape, strict=True))


def scatters(shape, rounds):
    """Whether every device sends what it has to where it is awaited, and ends with its own block
    alone, with all terms."""
    devices = list(itertools.product(*map(range, shape)))
    sums = {
        d: {owner: [d] for owner in devices} for d in devices
    }  # whose terms each device's block for an owner holds
    for sends in rounds:
        mail = []
        for (step, offsets), d in itertools.product(sends.items(), devices):
            for o in offsets:
                owner = moved(shape, d, o)
                if owner not in sums[d]:
                    return False
                mail.append((moved(shape, d, step), owner, sums[d][owner], d))
        if len({(d, owner) for _, owner, _, d in mail}) != len(mail):
            return False
        for _, owner, _, d in mail:
            del sums[d][owner]
        for to, owner, terms, _ in mail:
            if owner not in sums[to]:
                return False
            sums[to][owner] = sums[to][owner] + terms
    return all(list(held) == [d] and sorted(held[d]) == devices for d, held in sums.items())


def gathers(shape, rounds):
    """Whether, backwards, every device sends copies of what it has, gets each block once, and ends
    with all."""
    devices = list(itertools.product(*map(range, shape)))
    copies = {d: {d} for d in devices}
    for sends in reversed(rounds):
        mail = []
        for (step, offsets), d in itertools.product(sends.items(), devices):
            for o in offsets:
                owner, back = moved(shape, d, o), moved(shape, d, step)
                if owner not in copies[back]:
                    return False
                mail.append((d, owner))
        for d, owner in mail:
            if owner in copies[d]:
                return False
            copies[d].add(owner)
    return all(len(held) == len(devices) for held in copies.values())


SHAPES = [(2,), (3,), (5,), (8,), (2, 2), (2, 4), (3, 2), (2, 2, 2)]


def drawn(random):
    """A right table: each block goes, after all that it gains has come, to any offset that is sent
    later or is home."""
    shape = SHAPES[random.integers(len(SHAPES))]
    points = list(itertools.product(*map(range, shape)))
    order = [points[0], *(points[i] for i in 1 + random.permutation(len(points) - 1))]
    when, rounds = {order[0]: math.inf}, {}
    for k, o in enumerate(order[1:], start=1):  # from the one that is sent last
        target = order[random.integers(k)]
        latest = min(when[target], 2 * len(points))
        when[o] = latest - 1 - random.integers(2)
        step = tuple((x - y) % length for x, y, length in zip(o, target, shape, strict=True))
        rounds.setdefault(when[o], {}).setdefault(step, []).append(o)
    return shape, [rounds.get(r, {}) for r in range(min(rounds), max(rounds) + 1)]


def spoilt(shape, rounds, random):
    """The table with one thing changed: a block gone, moved, doubled, sent elsewhere or to nowhere,
    or two rounds exchanged."""
    rounds = [{step: list(offsets) for step, offsets in sends.items()} for sends in rounds]
    blocks = [
        (r, step, o)
        for r, sends in enumerate(rounds)
        for step, offsets in sends.items()
        for o in offsets
    ]
    r, step, o = blocks[random.integers(len(blocks))]
    other = tuple(int(random.integers(length)) for length in shape)
    later = int(random.integers(len(rounds)))
    change = random.integers(6)
    if change in (0, 1, 2, 4):
        rounds[r][step].remove(o)
    if change == 1:
        rounds[r].setdefault(other, []).append(o)
    elif change == 2:
        rounds[later].setdefault(step, []).append(o)
    elif change == 3:
        rounds[later].setdefault(other, []).append(o)
    elif change == 4:
        rounds[r][step].append(
            tuple(x + length for x, length in zip(o, shape, strict=True))
            if random.integers(2)
            else other
        )
    elif change == 5:
        rounds[r], rounds[later] = rounds[later], rounds[r]
    return shape, [
        {step: offsets for step, offsets in sends.items() if offsets} for sends in rounds
    ]


def test_wrong_tables_are_refused_and_right_ones_are_not():
    random, refused = np.random.default_rng(0), 0
    while refused < 400:
        shape, rounds = table = drawn(random)
        assert judged(*table)
        Route(shape, rounds)
        table = spoilt(shape, rounds, random)
        if judged(*table):
            Route(*table)
            continue
        refused += 1
        with pytest.raises(ValueError, match=r"^Route: .*(block|offset)") as raised:
            Route(*table)
        assert re.search(r"round|rounds", str(raised.value)), raised.value


@every_algorithm
def test_tables_are_right(of):
    for n in range(1, 17):
        found = made(of, n)
        assert found or n not in (4, 8, 16)
        for table in found:
            assert table.n == n
            assert judged(table.shape, table.rounds)
            assert (
                sum(len(offsets) for sends in table.rounds for offsets in sends.values()) == n - 1
            )
        assert len({len(table.rounds) for table in found}) <= 1


REFUSED = {
    "Route: round 1 sends block 2 a second time: it was sent away in round 0.": (
        (3,),
        [{1: [2]}, {1: [2]}, {1: [1]}],
    ),
    "Route: round 0 sends block 2 twice, so that its terms would be counted twice.": (
        (3,),
        [{1: [2], 2: [2]}, {1: [1]}],
    ),
    "Route: in round 1 block 2 of the sender arrives as block 1 of the receiver. But the receiver "
    "already sent its block 1 in round 0, so the partial sum that arrives would not reach the "
    "block's owner. Send block 2 in an earlier round": (
        (3,),
        [{1: [1]}, {1: [2]}],
    ),
    "Route: in round 0 block 2 of the sender arrives as block 1 of the receiver. But the receiver "
    "already sent its block 1 in round 0, so": (
        (3,),
        [{1: [1, 2]}],
    ),
    "Route: for shape (4,), no round sends the blocks at offsets 2, 3, so these blocks never": (
        (4,),
        [{1: [1]}],
    ),
    "Route: for shape (2, 2), no round sends the blocks at offsets (0, 1), (1, 0), (1, 1), so": (
        (2, 2),
        [],
    ),
    "Route: round 0 sends block 3, which is no point of the box (3,).": ((3,), [{1: [3]}]),
    "Route: round 0 sends block 1, which is no point of the box (2, 2).": ((2, 2), [{(0, 1): [1]}]),
    "Route: round 0 has the step 3, which is outside the box (3,).": ((3,), [{3: [1]}]),
    "Route: round 0 has the step (1,), which is outside": ((2, 2), [{1: [(0, 1)]}]),
    "Route: round 0 sends block 0, which is at home already": ((3,), [{1: [0]}]),
    "Route needs a shape with at least one dim, and at least 1 device along each dim; "
    "got shape (0,).": ((0,), []),
    "pairs: the number of devices must be a power of two; got 6. Use `halving`": (
        lambda: tables.pairs.table(6)
    ),
    "machines(4) needs a multiple of 4 devices; got 6.": lambda: tables.machines(4).table(6),
    "machines needs an algorithm with one table between machines; two_rings has 2, which": (
        lambda: tables.machines(2, tables.two_rings).table(6)
    ),
}


def test_a_step_without_offsets_is_left_out():
    """As a file of the table leaves it out."""
    assert Route((2,), [{1: [1], -1: []}]) == Route((2,), [{1: [1]}])


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_round_and_block(message):
    case = REFUSED[message]
    message = message.replace("step (1,)", "step 1")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        case() if callable(case) else Route(*case)


def sums(n, body):
    """`body` of each device's own block; every device's result comes back."""
    world = mesh.make(x=n, devices=jax.devices()[:n])
    local = lambda x: jax.tree.map(lambda y: varying(y, "x")[None], body(x[0]))
    return jax.jit(mesh.spmd(local, mesh=world, in_specs=(P("x"),), out_specs=P("x")))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(6))
def test_right_tables_run_to_the_sum(seed, monkeypatch):
    """With the blocks of a message joined, and each sent by itself."""
    monkeypatch.setattr(execute, "JOINED", 0 if seed % 2 else execute.JOINED)
    random = np.random.default_rng(seed)
    routes = [Route(*drawn(random)) for _ in range(8)]
    n = max(table.n for table in routes)
    routes = [table for table in routes if table.n == n]

    def body(x):
        each = [algorithm(lambda _, table=table: table, name="drawn") for table in routes]
        scattered = [of.reduce_scatter(x, "x", tiled=True) for of in each]
        gathered = [of.all_gather(x[:2], "x", tiled=True) for of in each]
        return list(zip([of.all_reduce(x, "x") for of in each], scattered, gathered, strict=True))

    x = random.integers(-9, 9, (n, 3 * n, 2, 5)).astype(np.float32)
    for total, parts, whole in sums(n, body)(x):
        np.testing.assert_array_equal(total, [x.sum(0)] * n)
        np.testing.assert_array_equal(np.concatenate(parts), x.sum(0))
        np.testing.assert_array_equal(whole, [np.concatenate(x[:, :2])] * n)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_by_hand_is_the_ring_bit_for_bit(n):
    blocks = np.random.default_rng(0).standard_normal((n, n, 5)).astype(np.float32)
    names = ("all_reduce", "reduce_scatter", "all_gather")
    found = sums(
        n,
        lambda x: [(getattr(by_hand, name)(x, "x"), getattr(ring, name)(x, "x")) for name in names],
    )(blocks)
    for ours, table in found:
        np.testing.assert_array_equal(ours, table, strict=True)
    np.testing.assert_allclose(
        found[0][0][0], blocks.sum(0), rtol=1e-5, atol=1e-5
    )  # n additions of numbers near 1 in float32


@pytest.mark.parametrize("rows", [2, 6])
def test_by_hand_needs_a_block_for_each_device(rows):
    with pytest.raises(
        ValueError, match=f"x must have 4 blocks, one for each device; it has {rows}"
    ):
        sums(4, lambda x: by_hand.all_reduce(x, "x"))(np.ones((4, rows), np.float32))


def test_by_hand_fits_a_blackboard():
    assert len(inspect.getsource(by_hand).splitlines()) <= 40


@every_algorithm
def test_makers_are_short(of):
    maker = getattr(of.table, "func", of.table)
    code = inspect.getsource(maker).replace(f'"""{maker.__doc__}"""', "")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def lowered(of, n, shape, unrolled, monkeypatch):
    monkeypatch.setattr(execute, "UNROLLED", unrolled)
    world = mesh.make(x=n, devices=jax.devices()[:n])
    program = jax.jit(
        mesh.spmd(lambda x: of.all_reduce(x, "x"), mesh=world, in_specs=(P(),), out_specs=P())
    )
    return program.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).as_text().splitlines()


def test_the_program_of_a_ring_does_not_grow_and_that_of_direct_does(monkeypatch):
    """Chains of more than UNROLLED hops; 8 devices stand for many."""
    for of, grows in ((tables.ring, 1), (tables.two_rings, 1), (tables.direct, 2)):
        few, many = (len(lowered(of, n, (840, 2, 2), 2, monkeypatch)) for n in (4, 7))
        assert (few < many) == (grows == 2), (of, few, many)
    assert "grows with n" in inspect.getdoc(tables.straight)


@pytest.mark.sweep(3)
@every_algorithm
@pytest.mark.parametrize("bundled", [0, execute.JOINED])
def test_chains_are_loops_wherever_they_begin(of, bundled, monkeypatch):
    """All runs of more than one hop as loops: the same sums, and the all-gather is the
    reduce-scatter's transpose."""
    monkeypatch.setattr(execute, "JOINED", bundled)
    monkeypatch.setattr(execute, "UNROLLED", 1)
    x = np.random.default_rng(0).integers(-9, 9, (8, 16, 2, 3)).astype(np.float32)

    def body(x):
        scatter = functools.partial(of.reduce_scatter, axis_name="x", tiled=True)
        part, transpose = jax.vjp(scatter, x)
        return of.all_reduce(x, "x"), part, of.all_gather(part, "x", tiled=True), *transpose(part)

    total, part, whole, ct = sums(8, body)(x)
    for found in (total, part.reshape(1, *x.shape[1:]), whole, ct):
        np.testing.assert_array_equal(found, np.broadcast_to(x.sum(0), found.shape))


def test_a_chain_that_changes_its_step_is_no_loop(monkeypatch):
    """Each round forwards just what has come, but the last twice as far: a loop would send it no
    further than before."""
    monkeypatch.setattr(execute, "UNROLLED", 1)
    jumps = algorithm(lambda n: Route((n,), [{1: [1]}, {1: [3]}, {2: [2]}]), name="jumps")
    x = np.random.default_rng(0).integers(-9, 9, (4, 16, 2)).astype(np.float32)
    total, whole = sums(4, lambda x: (jumps.all_reduce(x, "x"), jumps.all_gather(x, "x")))(x)
    for found, meant in ((total, x.sum(0)), (whole, x)):
        np.testing.assert_array_equal(found, np.broadcast_to(meant, found.shape))


@pytest.mark.bits
@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
def test_message_and_local_copy_are_one_instruction(name):
    """What a device sends and what it keeps are both read from the result of one loop, which
    nothing computes again."""
    world, spec = mesh.make(x=4, devices=jax.devices()[:4]), P("x") if name == "all_gather" else P()
    of = functools.partial(getattr(ring, name), **({"tiled": True} if name == "all_gather" else {}))
    program = jax.jit(
        mesh.spmd(lambda x: of(x * 1.5 + 1, "x"), mesh=world, in_specs=(P("x"),), out_specs=spec)
    )
    text = program.lower(jnp.ones((64, 8))).compile().as_text()
    entry = re.search(r"\nENTRY .*?\n}", text, re.DOTALL).group()
    sent = re.findall(r" collective-permute\([^%)]*%([\w.\-]+)\)", entry)[
        -3
    ]  # the first of the gather
    (maker,) = re.findall(rf"%{re.escape(sent)} = \S+ ([\w\-]+)\(", entry)
    users = re.findall(rf"%([\w.\-]+) = \S+ [\w\-]+\([^)\n]*%{re.escape(sent)}[,)]", entry)
    assert maker == "get-tuple-element"
    assert len(users) == 2, users
    assert sorted("update" in user or "fusion" in user for user in users) == [False, True], users
    if name == "all_gather":  # and the whole comes out of a loop, before anything is computed of it
        assert re.search(r"ROOT %\S+ = \S+ get-tuple-element\(", entry)


def test_more_numbers_than_int32_counts_are_rows():
    """Traced only: sums of 2^31 numbers and more, of which no dim divides, are cut along rows."""
    world = mesh.make(x=8)
    both = lambda x: (ring.all_reduce(x, "x"), ring.reduce_scatter(x[: 2**31], "x", tiled=True))
    shapes = jax.eval_shape(
        mesh.spmd(both, mesh=world, in_specs=(P(),), out_specs=(P(), P("x"))),
        jax.ShapeDtypeStruct((2**31 + 5,), jnp.int8),
    )
    assert [each.shape for each in shapes] == [(2**31 + 5,), (2**31,)]
    odd = lambda x: ring.all_gather(x, "x", tiled=True)
    gathered = mesh.spmd(odd, mesh=world, in_specs=(P("x"),), out_specs=P("x"))
    for more in (8, 128):  # a multiple of 128 is too few: each device has an eighth
        with pytest.raises(
            ValueError,
            match=rf"^An array of {2**31 + more} numbers needs a dim whose size is a multiple of "
            r"1024\. Pad",
        ):
            jax.eval_shape(gathered, jax.ShapeDtypeStruct((2**31 + more,), jnp.int8))
    # What the message asks for is enough.
    jax.eval_shape(gathered, jax.ShapeDtypeStruct((2**31 + 1024,), jnp.int8))


UNEQUAL = {
    "unequal: all tables that run side by side need 4 devices and 3 rounds, like the first table; "
    "one has 4 devices and 2": (lambda n: (ring.table(n), tables.halving.table(n))),
    "unequal: all tables that run side by side need 4 devices and 7 rounds, like the first table; "
    "one has 8 devices": (lambda n: ring.table(8)),
}


@pytest.mark.parametrize("message", UNEQUAL)
def test_tables_side_by_side_are_alike(message):
    of = algorithm(UNEQUAL[message], name="unequal")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        cost.of(of.all_reduce, 64, 4)


@every_algorithm
def test_files_hold_tables(of, tmp_path):
    for n in (1, 4, 8):
        for table in made(of, n):
            to_csv(table, tmp_path / "table.csv")
            assert from_csv(tmp_path / "table.csv") == table


def test_a_round_that_is_no_round_of_the_table_is_refused(tmp_path):
    """-1 is not the last one."""
    path = tmp_path / "table.csv"
    to_csv(made(ring, 3)[0], path)
    text = path.read_text()
    assert "\n1," in text
    path.write_text(text.replace("\n1,", "\n-1,"))
    with pytest.raises(ValueError, match=r"^from_csv: .*table\.csv is no table\."):
        from_csv(path)


def test_files_that_are_no_tables(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("round,step,offset\n0,1,1\n")
    with pytest.raises(
        ValueError,
        match=r"^from_csv: .*table\.csv is no table\. It needs the lines 'box,SHAPE,ROUNDS'",
    ):
        from_csv(path)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["box", "3", 1], ["round", "step", "offset"], [0, 1, 1]])
    with pytest.raises(
        ValueError, match=r"^Route: for shape \(3,\), no round sends the blocks at offsets 2, so"
    ):
        from_csv(path)
    lines = ["box,2,1", "round,step,offset", "0,1,1"]
    for first_lines in (["ring,2,1", lines[1]], [lines[0], "round,offset,step"]):
        path.write_text("\n".join([*first_lines, lines[2]]))
        with pytest.raises(ValueError, match=r"^from_csv: .*table\.csv is no table\."):
            from_csv(path)
    path.write_text("\n".join(lines))
    assert from_csv(path).rounds


@every_algorithm
def test_pictures_show_which_block_is_where(of):
    """After the last round a device holds its own block alone, with the terms of all."""
    for table in made(of, 4):
        text = draw.route(table)
        assert len(re.findall(r"^round", text, re.MULTILINE)) == len(table.rounds)
        assert text.splitlines()[-1].endswith("0: 0 1 2 3")


def test_a_route_without_a_message_has_a_text_and_no_picture(tmp_path):
    alone = ring.table(1)
    assert draw.route(alone).splitlines()[-1] == "  holds  0: 0"
    with pytest.raises(ValueError, match=r"needs a route with a message; a route of one"):
        draw.route(alone, tmp_path / "route.svg")
    with pytest.raises(ValueError, match="needs a route with a message"):
        draw.route([], tmp_path / "route.svg")
