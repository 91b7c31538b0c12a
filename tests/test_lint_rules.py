"""Rule sets: all mistakes at once; each suggestion, taken as it is written, does what it says;
random rule sets end valid."""

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import lint, mesh, rules
from parallax.models import gpt2


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


TREE = {"a": {"w": leaf(6, 8), "v": leaf(8, 16)}, "b": leaf(8), "s": leaf()}
PATHS = [path for path, _ in rules.paths(TREE)]
LEAVES = dict(rules.paths(TREE))


@pytest.fixture(scope="module")
def devices():
    return mesh.make(data=4, tensor=2)


def kinds(findings):
    return [found.kind for found in findings]


# All at once


def test_all_refusals_at_once_and_the_first_is_the_error(devices):
    rule = rules.first(
        rules.match("a.w", P("tensor", "tensor")),
        rules.match("a.x", P()),
        rules.match("a.v", P("data", "tensr")),
        rules.match("b", P(None, "tensor")),
    )
    found = lint.rules(TREE, rule, devices)
    assert [(each.kind, each.where) for each in found] == [
        ("idle-rule", "match('a.x', P())"),
        ("no-rule", "s"),
        ("split-like-the-batch", "a.v"),
        ("axis-twice", "a.w"),
        ("too-many-entries", "b"),
    ]
    with pytest.raises(ValueError, match="rule match") as refusal:
        rules.specs(TREE, rule, devices)
    assert str(refusal.value).startswith(found[0].harm.removesuffix("."))
    assert "matches none of the 4 leaves (the nearest is a.w)" in found[0].harm
    assert found[-1].cure == "Drop entries, or replicate this leaf with P(). P() would fit."


def test_a_valid_rule_set_is_silent(devices):
    rule = rules.first(
        rules.match("a.*", P(None, "tensor")), rules.fsdp("data", size=4, min_size=8)
    )
    assert lint.rules(TREE, rule, devices) == []
    assert lint.rules(TREE, rule, devices.abstract_mesh) == []


def test_gpt2_is_silent(devices):
    model = jax.eval_shape(lambda: gpt2.GPT2(gpt2.SMALL, key=jax.random.key(0)))
    assert lint.rules(model, gpt2.rules(), devices, limit=300 * 10**6) == []


# What is no error, and yet a mistake: each with its cure


def test_a_large_leaf_left_whole(devices):
    tree = {"w": leaf(1024, 4096), "small": leaf(8, 8), "odd": leaf(1023, 4097)}
    whole = rules.first(rules.match("small", P("tensor")), rules.match("**", P()))
    (found,) = lint.rules(tree, whole, devices)
    assert (found.kind, found.where) == ("large-leaf-whole", "w")
    assert (
        "all 16,777,216 bytes of this leaf of shape (1024, 4096); split over 'tensor', it would "
        "hold 8,388,608" in found.harm
    )
    assert lint.rules(tree, rules.first(suggested(found), whole), devices) == []
    assert lint.rules(tree, whole, devices, large=2**25) == []


def test_a_large_leaf_that_only_the_replicas_can_share():
    devices = mesh.make(data=8)
    tree = {"w": leaf(4096, 1024), "b": leaf(8)}
    (found,) = lint.rules(tree, rules.match("**", P()), devices)
    assert "fsdp('data', size=8, inside=match('w', P()))" in found.cure
    assert lint.rules(tree, rules.first(suggested(found), rules.match("**", P())), devices) == []


def suggested(found):
    return evaluated(r"Put the rule (.*) before the others\.$", found.cure)


def test_an_axis_that_splits_nothing(devices):
    (found,) = lint.rules(TREE, rules.match("**", P()), devices)
    assert (found.kind, found.where) == ("idle-axis", "mesh axis 'tensor'")
    assert "so its 2 devices do the same work" in found.harm
    assert found.cure.endswith(
        "give its devices to the other axes: data=4, one of them 2 times as large."
    )
    assert (
        lint.rules(TREE, rules.match("**", P()), devices, batch=(P("data"), P("data", "tensor")))
        == []
    )
    assert lint.rules(TREE, rules.match("**", P()), mesh.make(data=8)) == []


@pytest.mark.parametrize("batch", [P(("data", "tensor")), {"x": P("data"), "y": P(None, "tensor")}])
def test_batch_and_weights_over_one_axis(devices, batch):
    rule = rules.first(rules.match("a.v", P("tensor")), rules.match("**", P()))
    (found,) = lint.rules(TREE, rule, devices, batch=batch)
    assert (found.kind, found.where) == ("split-like-the-batch", "a.v")
    assert "split over mesh axis 'tensor', which splits the batch" in found.harm
    assert lint.rules(TREE, rule, devices, batch=P("data")) == []


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_with_a_fixed_number_of_heads(stacked, dtype):
    """On a shard it has as many heads as the whole, each narrower."""

    def make():
        attention = eqx.nn.MultiheadAttention(4, 8, dtype=dtype, key=jax.random.key(0))
        return {"attention": attention, "out": jnp.ones(8)} if stacked else attention

    model, devices = eqx.filter_eval_shape(make), mesh.make(data=2, tensor=4)
    prefix = "attention." if stacked else ""
    by_heads = rules.first(
        *(
            rules.match(f"{prefix}{name}_proj.weight", P("tensor"))
            for name in ("query", "key", "value")
        ),
        rules.match(f"{prefix}output_proj.weight", P(None, "tensor")),
        rules.match("**", P()),
    )
    (finding,) = lint.rules(model, by_heads, devices)
    assert finding.kind == "fixed-number-of-heads"
    assert finding.where == ("attention" if stacked else "the model")
    assert "split over ['tensor'], and it has 4 heads on every device" in finding.harm
    shares = rules.fsdp("data", size=2, min_size=1)  # gathered before they are used
    assert lint.rules(model, shares, mesh.abstract(data=2)) == []


LAYERED = (  # the specs of the projections of stacked attentions, and what is found
    (P("stage"), []),
    (P(None, "tensor"), ["fixed-number-of-heads"]),
    (P(None, None, "tensor"), []),
)


@pytest.mark.parametrize(("spec", "found"), LAYERED)
def test_attentions_in_a_stack_are_split_by_their_outputs(spec, found):
    def make():
        one = lambda key: eqx.nn.MultiheadAttention(4, 8, dtype=jnp.float32, key=key)
        return eqx.filter_vmap(one)(jax.random.split(jax.random.key(0), 4))

    def rule(path, leaf):
        return spec if "output" not in path else P("stage")

    devices = mesh.abstract(data=2, stage=4, tensor=4)
    assert kinds(lint.rules(eqx.filter_eval_shape(make), rule, devices))[: len(found)] == found
    one = mesh.abstract(data=2, stage=4, tensor=1)  # one device splits nothing
    assert lint.rules(eqx.filter_eval_shape(make), rule, one) == []


@pytest.mark.parametrize("cell", [eqx.nn.LSTMCell, eqx.nn.GRUCell])
@pytest.mark.parametrize("layers", [0, 3])
def test_cells_of_stacked_gates_are_not_split_by_rows(cell, layers):
    def make():
        made = lambda key: {"cell": cell(8, 4, key=key)}
        return (
            eqx.filter_vmap(made)(jax.random.split(jax.random.key(0), layers))
            if layers
            else made(jax.random.key(0))
        )

    model, devices = eqx.filter_eval_shape(make), mesh.make(data=2, tensor=4)
    dims = [None] * bool(layers)
    split = rules.match("cell.weight_*", P(*dims, "tensor"))
    whole = rules.match("**", P())
    (finding,) = lint.rules(model, rules.first(split, whole), devices)
    assert (finding.kind, finding.where) == ("parts-of-a-split-dim", "cell")
    assert f"the rows of this eqx.nn.{cell.__name__} are split over ['tensor']" in finding.harm
    one = mesh.abstract(data=2, tensor=1)  # one device splits nothing
    assert lint.rules(model, rules.first(split, whole), one) == []
    columns = rules.match("cell.weight_*", P(*dims, None, "tensor"))
    assert lint.rules(model, rules.first(columns, whole), devices) == []
    shares = rules.fsdp("data", size=2, min_size=1)  # gathered before they are used
    assert lint.rules(model, shares, mesh.abstract(data=2)) == []


def test_frozen_modules_have_no_weights_to_split(devices):
    make = jax.random.key(0)
    modules = [eqx.nn.GRUCell(8, 4, key=make), eqx.nn.MultiheadAttention(4, 8, key=make)]
    frozen = [eqx.filter(module, lambda _: False) for module in modules]
    rule = rules.match("**", P("tensor"))
    assert kinds(lint.rules([frozen, leaf(8)], rule, devices)) == []


def test_random_keys_have_the_bytes_of_their_numbers(devices):
    tree = {"key": jax.random.key(0), "w": leaf(8, 8)}
    specs = rules.specs(tree, rules.match("**", P()), devices)
    held = jax.random.key_data(tree["key"]).nbytes + 8 * 8 * 4
    assert lint.device_bytes(tree, specs, devices) == held


def test_too_many_bytes(devices):
    rule = rules.first(rules.match("a.*", P(None, "tensor")), rules.match("**", P()))
    held = 6 * 8 * 4 // 2 + 8 * 16 * 4 // 2 + 8 * 4 + 4
    assert lint.device_bytes(TREE, rules.specs(TREE, rule, devices), devices) == held
    assert lint.rules(TREE, rule, devices, limit=held) == []
    (found,) = lint.rules(TREE, rule, devices, limit=held - 1)
    assert f"each of 8 devices holds {held} bytes, more than the limit of {held - 1}" in found.harm
    assert (
        found.cure
        == "Split the largest leaves further. Their bytes per device: a.v (256), a.w (96), b (32)."
    )


def test_device_bytes_are_those_of_the_devices(devices):
    arrays = {name: jnp.zeros(shape.shape) for name, shape in LEAVES.items()}
    specs = rules.specs(arrays, rules.fsdp("data", size=4, min_size=1), devices)
    placed = mesh.place(arrays, specs, devices)
    for device in devices.devices.flat:
        on = [
            shard.data.nbytes
            for x in placed.values()
            for shard in x.addressable_shards
            if shard.device == device
        ]
        assert sum(on) == lint.device_bytes(arrays, specs, devices)


# Random rule sets: ours, and nobody else's, refusals; each with a suggestion that does. Here it is
# taken as a reader would.

AXES = st.sampled_from(
    ["data", "tensor", "tensor", "tensr", ("tensor", "data"), ("tensor", "tensr"), (), None, None]
)
SPECS = st.lists(AXES, max_size=4).map(lambda entries: P(*entries))
PATTERNS = st.sampled_from(["a.w", "a.v", "b", "s", "a.*", "**", "a.x", "*", "w", ""])


def no_spec(path, leaf):
    return "tensor" if path.startswith("a") else None


MATCHES = st.one_of(*[st.builds(rules.match, PATTERNS, SPECS)] * 4, st.just(no_spec))
FSDPS = st.tuples(
    st.sampled_from(["data", "tensor", "dta", ("data", "tensor")]),
    st.sampled_from([1, 2, 4, 8]),
    st.dictionaries(PATTERNS, st.just((0,)), max_size=1),
    st.lists(MATCHES, min_size=1, max_size=2, unique_by=repr),
)
RULES = st.lists(st.one_of(MATCHES, MATCHES, FSDPS), max_size=4, unique_by=repr)


def made(drawn):
    """The rules drawn: an fsdp is made here, since to check its types takes random numbers, which a
    strategy may not."""
    if not isinstance(drawn, tuple):
        return drawn
    axis, size, keep, inside = drawn
    return rules.fsdp(axis, size=size, min_size=1, keep=keep, inside=rules.first(*inside))


def taken(parts: list, found: lint.Finding) -> list:
    """The rules, after the suggestion of a finding."""
    if found.kind == "no-rule":
        return [*parts, evaluated(r"such as (match\(.*\)) to keep", found.cure)]
    if found.kind == "idle-rule":
        assert "remove" in found.cure
        of, _, around = found.where.partition(" inside ")
        if not around:
            return without(parts, of)
        return [
            shrunk(part, of) if name(part) == around and has_idle(part, of) else part
            for part in parts
        ]
    where = next(
        (i for i, part in enumerate(parts) if name(part) == found.where and is_meant(part, found)),
        None,
    )
    if (
        "all leaves are split alike in this dim" in found.cure
    ):  # other sizes are advised, which this tree does not take
        return [rules.match(found.where, P()), *parts]
    if where is None:
        return [
            rules.match(
                found.where, evaluated(r"(P(?:artitionSpec)?\([^.]*\)) would fit\.$", found.cure)
            ),
            *parts,
        ]
    return taken_by_fsdp(parts, where, found)


def taken_by_fsdp(parts: list, where: int, found: lint.Finding) -> list:
    if found.kind == "idle-keep":
        assert "drop it" in found.cure
        pattern = re.match(r"keep pattern '(.*?)'", found.harm)[1]
        return replaced(
            parts, where, keep={k: v for k, v in parts[where].keep.items() if k != pattern}
        )
    if found.kind == "wrong-size":
        return replaced(parts, where, size=int(re.match(r"Pass size=(\d+)\.$", found.cure)[1]))
    assert "replace the fsdp by the rules inside it" in found.cure
    return [*parts[:where], *parts[where].inside.rules, *parts[where + 1 :]]


def evaluated(pattern, text):
    (code,) = re.findall(pattern, text)
    return eval(code, {"match": rules.match, "fsdp": rules.fsdp, "P": P, "PartitionSpec": P})


def without(parts, of):
    at = max(
        i for i, part in enumerate(parts) if name(part) == of
    )  # of equal rules the last is idle
    return parts[:at] + parts[at + 1 :]


def name(rule):
    return getattr(rule, "__qualname__", repr(rule))


def has_idle(part, of):
    return any(name(rule) == of for rule in part.inside.rules)


def shrunk(part, of):
    return changed(part, inside=rules.first(*without(list(part.inside.rules), of)))


def is_meant(part, found):
    if found.kind == "idle-keep":
        return re.match(r"keep pattern '(.*?)'", found.harm)[1] in part.keep
    return True


def changed(part, **fields):
    return rules.fsdp(
        part.axis_name,
        **({"size": part.size, "min_size": 1, "keep": part.keep, "inside": part.inside} | fields),
    )


def replaced(parts, where, **fields):
    return [*parts[:where], changed(parts[where], **fields), *parts[where + 1 :]]


@pytest.mark.sweep
@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(drawn=RULES)
def test_random_rule_sets(drawn):
    take_every_suggestion(drawn)


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=200, phases=[Phase.explicit, Phase.generate])
@given(drawn=RULES)
def test_more_random_rule_sets(drawn):
    take_every_suggestion(drawn)


def take_every_suggestion(drawn):
    parts, devices = [made(part) for part in drawn], mesh.make(data=4, tensor=2)
    refusals = lambda: [
        each for each in lint.rules(TREE, rules.first(*parts), devices) if each.kind != "idle-axis"
    ]
    found = refusals()
    if found:
        with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the whole message is compared
            rules.specs(TREE, rules.first(*parts), devices)
        assert str(refusal.value).startswith(found[0].harm.removesuffix("."))
    while found:
        taken_up, before = found[0], found
        parts = [
            part
            for part in taken(parts, taken_up)
            if not isinstance(part, rules.fsdp) or part.inside.rules
        ]
        found = refusals()
        assert found.count(taken_up) < before.count(taken_up)
    specs = rules.specs(TREE, rules.first(*parts), devices)
    for path, spec in rules.paths(specs):  # and JAX has nothing to say either
        shape = LEAVES[path].shape
        assert math.prod(shape) % math.prod(NamedSharding(devices, spec).shard_shape(shape)) == 0
