"""Rules: what they give, what they refuse and in which words, and that the specs place real
trees."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import rules


class Linear(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    activation: object = jax.nn.relu  # a leaf that is no array


class Model(eqx.Module):
    blocks: Linear  # stacked: dim 0 is the layer
    head: dict
    name: str = eqx.field(static=True, default="model")


def model(seed=0):
    draw = np.random.default_rng(seed).normal

    def array(*shape):
        return jnp.asarray(draw(size=shape))

    return Model(
        Linear(array(4, 8, 16), array(4, 16)),
        {"norms": [array(16), array(6)], "weight": array(16, 8)},
    )


RULE = rules.first(
    rules.match("blocks.weight", P(None, None, "tensor")),
    rules.match("blocks.bias", P(None, "tensor")),
    rules.match("head.weight", P("tensor")),
    rules.match("head.norms.*", P()),
)
ZERO_RULE = rules.fsdp("data", size=4, min_size=17, keep={"blocks.**": (0,)}, inside=RULE)
SPECS = [P(None, None, "tensor"), P(None, "tensor"), None, P(), P(), P("tensor")]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


def place(tree, specs, mesh):
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(
        jax.tree.map(
            lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), arrays, specs
        ),
        rest,
    )


# Globs


def oracle(pattern, path):
    """A regular expression on the path with a dot after each part."""
    inner = {"*": "[^.]*", "?": "[^.]"}
    parts = ["".join(inner.get(c, re.escape(c)) for c in part) for part in pattern.split(".")]
    expression = "".join(
        r"(?:[^.]+\.)*" if part == "[^.]*[^.]*" else part + r"\." for part in parts
    )
    return re.fullmatch(expression, path + ".") is not None


@given(
    pattern=st.lists(
        st.one_of(st.just("**"), st.text("ab*?", min_size=1, max_size=3)), min_size=1, max_size=5
    ).map(".".join),
    path=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=5).map(".".join),
)
def test_globs_are_regular_expressions(pattern, path):
    assert (rules.match(pattern, P("x"))(path, None) is not None) == oracle(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("**", "", True),
        ("*", "", False),
        ("**.w", "w", True),
        ("a.**", "a", True),
        ("a.*", "a.b.c", False),
        ("a.**.c", "a.c", True),
        ("a.w*", "a.weight", True),
        ("a.[0-9]", "a.3", True),
        ("A", "a", False),
    ],
)
def test_globs_by_example(pattern, path, fits):
    assert (rules.match(pattern, P())(path, None) == P()) is fits


# What comes back


def test_paths_are_attributes_keys_and_indices():
    assert [path for path, _ in rules.paths(model())] == [
        "blocks.weight",
        "blocks.bias",
        "blocks.activation",
        "head.norms.0",
        "head.norms.1",
        "head.weight",
    ]
    assert rules.paths(3.0) == [("", 3.0)]


@pytest.mark.parametrize(
    "make",
    [
        model,
        lambda: eqx.filter_eval_shape(model),
        lambda: jax.tree.map(
            lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, model()
        ),
    ],
    ids=["arrays", "shapes", "numpy"],
)
def test_specs_of_arrays_shapes_and_numpy(make, mesh):
    tree = make()
    for specs in (
        rules.specs(tree, RULE),
        rules.specs(tree, RULE, mesh),
        rules.specs(tree, RULE, mesh.abstract_mesh),
    ):
        assert type(specs) is Model
        assert leaves(specs) == SPECS


def test_specs_equal_the_rule_asked_leaf_by_leaf():
    rule = rules.first(
        rules.match("blocks.bias", P()),
        rules.fsdp(
            "data",
            size=4,
            min_size=1,
            inside=rules.first(
                rules.match("head.**", P()), lambda path, leaf: P(None, None, "tensor")
            ),
        ),
    )
    tree = eqx.filter(model(), eqx.is_array)
    assert [spec for _, spec in rules.paths(rules.specs(tree, rule))] == [
        rule(path, leaf) for path, leaf in rules.paths(tree)
    ]


def test_a_tree_without_arrays_needs_no_rule():
    assert rules.specs({"f": jax.nn.relu, "n": 3}, rules.first()) == {"f": None, "n": None}


def test_a_rule_and_a_tree_in_each_other_s_place_are_refused():
    model = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    for call in (rules.specs, rules.audit, rules.explain):
        with pytest.raises(
            ValueError, match=r"a tree without arrays .* Exchange the two arguments"
        ):
            call(rules.match("**", P()), model)


def test_rules_are_values():
    assert rules.match("a", P("x")) == rules.match("a", P("x"))
    assert (
        len(
            {
                rules.fsdp("data", size=4),
                rules.fsdp("data", size=4),
                rules.first(),
                rules.match("a", P()),
            }
        )
        == 3
    )


# fsdp


@pytest.mark.parametrize(
    ("shape", "inside", "keep", "spec"),
    [
        ((8, 16), P(), {}, P(None, "data")),  # the largest
        ((16, 16), P(), {}, P("data")),  # of equals, the first
        ((8, 18), P(), {}, P("data")),  # that divides
        ((6, 18), P(), {}, P()),  # none does
        ((), P(), {}, P()),
        ((8, 16), P(None, "tensor"), {}, P("data", "tensor")),
        ((8, 16), P("tensor"), {}, P("tensor", "data")),
        ((16, 8), P("tensor"), {"**": (1,)}, P("tensor")),
        ((16, 8), P(), {"w": (0,)}, P(None, "data")),
        ((16, 8), P(), {"w": (-1,), "*": (0,)}, P()),
        ((16, 8), P(), {"w": (2,)}, P("data")),  # a dim that is not there is not split anyway
    ],
)
def test_fsdp_splits_the_largest_free_dim(shape, inside, keep, spec):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    rule = rules.fsdp("data", size=4, min_size=0, keep=keep, inside=rules.match("**", inside))
    assert rules.specs({"w": leaf}, rule) == {"w": spec}


@given(
    shape=st.lists(st.integers(1, 12), max_size=4),
    size=st.integers(1, 6),
    min_size=st.integers(0, 100),
)
def test_fsdp_splits_whenever_it_can(shape, size, min_size):
    leaf = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    spec = rules.fsdp("data", size=size, min_size=min_size)("w", leaf)
    fit = [n for n in shape if n % size == 0] if leaf.size >= min_size else []
    assert [shape[dim] for dim, axis in enumerate(spec) if axis == "data"] == (
        [max(fit)] if fit else []
    )


def test_layers_that_do_not_divide_are_never_advised_to_be_whole(mesh):
    """Each stage of a pipeline would run all of them: as many layers as stages divide are."""
    tree = {
        "blocks": {"w": jnp.zeros((6, 8, 8)), "b": jnp.zeros((6, 8))},
        "head": jnp.zeros((8, 4)),
    }
    rule = rules.first(rules.match("blocks.**", P("data")), rules.match("**", P()))
    with pytest.raises(
        ValueError,
        match=r"dim 0 of shape \(6, 8\) must be a multiple of 4.*make it 8, a multiple of 4",
    ) as refusal:
        rules.specs(tree, rule, mesh, batch_axes=())
    assert "P()" not in str(refusal.value).partition(";")[2]
    assert rules.specs(
        {**tree, "blocks": {"w": jnp.zeros((8, 8, 8)), "b": jnp.zeros((8, 8))}},
        rule,
        mesh,
        batch_axes=(),
    )


def test_fsdp_over_two_axes(mesh):
    specs = rules.specs(
        {"w": jnp.zeros((3, 16))}, rules.fsdp(("data", "tensor"), size=8, min_size=1), mesh
    )
    assert specs == {"w": P(None, ("data", "tensor"))}


def test_fsdp_inside_fsdp_is_split_first():
    rule = rules.fsdp("replica", size=2, min_size=0, inside=rules.fsdp("data", size=4, min_size=0))
    tree = {"w": jnp.zeros((8, 16))}
    assert rules.specs(tree, rule) == {"w": rule("w", tree["w"])} == {"w": P("replica", "data")}


def test_explain_says_what_stays_whole_and_why():
    rule = rules.first(
        rules.match("blocks.bias", P()),
        rules.fsdp("data", size=4, min_size=10, keep={"blocks.**": (0, 1, 2), "**.norms.0": (0,)}),
    )
    whole = rules.match("**", P())
    assert rules.explain(model(), rule) == {
        "blocks.weight": f"P(): {whole}; fsdp('data', size=4) adds no split: "
        "no free dim of shape (4, 8, 16) is a multiple of 4 (keep spares [0, 1, 2])",
        "blocks.bias": "P(): match('blocks.bias', P())",
        "head.norms.0": f"P(): {whole}; fsdp('data', size=4) adds no split: "
        "no free dim of shape (16,) is a multiple of 4 (keep spares [0])",
        "head.norms.1": (
            f"P(): {whole}; fsdp('data', size=4) adds no split: 6 elements are fewer than "
            "min_size=10"
        ),
        "head.weight": f"{P('data')}: {whole}; fsdp('data', size=4) splits dim 0 of shape (16, 8)",
    }


# Refusals. Each is read: who, by which rule, along which axis, of what size, and what to do.


def a_plain_rule(path, leaf):
    return P("data")


W = {
    "a": {"w": jax.ShapeDtypeStruct((6, 8), jnp.float32)},
    "b": jax.ShapeDtypeStruct((8,), jnp.float32),
}
B = rules.match("b", P())


@pytest.mark.parametrize("batch_axes", ["data", ("data",)])
def test_one_axis_of_the_batch_may_be_given_by_its_name(batch_axes):
    with pytest.raises(ValueError, match="which splits the batch"):
        rules.specs({"w": W["b"]}, rules.match("w", P("data")), batch_axes=batch_axes)


@pytest.mark.parametrize(
    "batch_axes", [P("data"), P(None, ("tensor", "data")), (("tensor", "data"),), (None, "data")]
)
def test_the_axes_of_the_batch_may_be_given_as_its_spec(mesh, batch_axes):
    with pytest.raises(ValueError, match="which splits the batch"):
        rules.specs({"w": W["b"]}, rules.match("w", P("data")), mesh, batch_axes=batch_axes)


def test_an_axis_of_the_batch_that_the_mesh_lacks_is_refused(mesh):
    with pytest.raises(ValueError, match="batch_axes: there is no axis 'dta' in the mesh"):
        rules.specs({"w": W["b"]}, rules.match("w", P("data")), mesh, batch_axes="dta")


def test_the_rule_that_keeps_the_rest_whole_may_find_no_rest():
    every_leaf = rules.first(rules.match("a.**", P()), B)
    assert rules.specs(W, rules.first(every_leaf, rules.match("**", P()))) == rules.specs(
        W, every_leaf
    )
    shared = rules.fsdp("data", size=2, min_size=1, inside=every_leaf)
    with_rest = rules.fsdp(
        "data", size=2, min_size=1, inside=rules.first(every_leaf, rules.match("**", P()))
    )
    assert rules.specs(W, with_rest) == rules.specs(W, shared)
    for idle in (rules.match("**", P("tensor")), rules.fsdp("data", size=4)):
        with pytest.raises(ValueError, match="places no leaf"):
            rules.specs(W, rules.first(every_leaf, idle))


def without_spec(pattern):
    """A `match` whose spec is None, as a program without type checks may make it."""
    rule = rules.match(pattern, P())
    object.__setattr__(rule, "spec", None)
    return rule


REFUSALS = {
    "uncovered": (
        rules.match("a.**", P()),
        "b: each leaf needs a rule, but none of the 1 rules (the nearest is match('a.**', P())) "
        "covers this leaf of shape (8,); add one, such as match('b', P()) to keep it whole.",
    ),
    "no rules": (
        rules.first(),
        "a.w: each leaf needs a rule, but none of the 0 rules covers this leaf of shape (6, 8)",
    ),
    "no match": (
        rules.first(
            B,
            rules.fsdp(
                "data",
                size=4,
                inside=rules.first(rules.match("a.v.w", P()), rules.match("**", P())),
            ),
        ),
        "rule match('a.v.w', P()) inside fsdp('data', size=4) matches none of the 2 leaves (the "
        "nearest is a.w); correct the pattern, or remove the rule.",
    ),
    "no match in keep": (
        rules.fsdp("data", size=4, keep={"block.**": (0,)}),
        "keep pattern 'block.**' of rule fsdp('data', size=4) matches none of the 2 leaves (the "
        "nearest is b); correct the pattern.",
    ),
    "shadowed": (
        rules.first(rules.match("**", P()), rules.first(rules.match("a.w", P("tensor")))),
        f"rule match('a.w', {P('tensor')}) places no leaf: all that it matches (1 of 2) are taken "
        "by earlier rules (a.w by match('**', P())); put it before them, or remove it.",
    ),
    "no spec in a match": (
        rules.first(without_spec("a.w"), rules.match("**", P())),
        "rule match('a.w', None) gives None for a.w, which it matches; give it a PartitionSpec, or "
        "remove it.",
    ),
    "idle function": (
        rules.first(rules.match("**.w", P()), lambda path, leaf: None, rules.match("b", P())),
        "<lambda> gives None for all leaves that earlier rules leave (1 of 2); change or remove "
        "it.",
    ),
    "no spec": (
        lambda path, leaf: ("tensor",),
        "<lambda> gave ('tensor',); return P(...).",
    ),
    "too long": (
        rules.match("**", P(None, "tensor")),
        f"b: a spec has at most one entry for each dim, but {P(None, 'tensor')} (rule match('**', "
        f"{P(None, 'tensor')})) has 2 for shape (8,), which has 1; drop entries, or replicate "
        "this leaf with P().",
    ),
    "too long inside fsdp": (
        rules.fsdp("data", size=4, min_size=0, inside=rules.match("**", P(None, "tensor"))),
        "b: a spec has at most one entry for each dim",
        "inside fsdp('data', size=4)) has 2 for shape (8,)",
    ),
    "axis twice": (
        rules.match("**", P(("tensor", "stage"), "tensor")),
        "a.w: a mesh axis can split only one dim of a leaf, but",
        "uses 'tensor' 2 times for shape (6, 8); keep it in one entry only.",
    ),
    "axis twice by fsdp": (
        rules.fsdp(
            "tensor", size=2, min_size=0, inside=rules.first(B, rules.match("a.w", P("tensor")))
        ),
        f"(rule match('a.w', {P('tensor')}) inside fsdp('tensor', size=2)) uses 'tensor' 2 times",
    ),
    "data": (
        rules.first(B, rules.match("**", P(None, ("tensor", "data")))),
        "a.w: dim 1 of shape (6, 8) is split over mesh axis 'data', which splits the batch, by "
        "rule match('**', ",
        "so each replica would train a different model; split it with fsdp('data', size=...) "
        "instead, or with rules.experts if tokens travel to it, or over another axis, or leave "
        "'data' out of batch_axes=('data',) if it does not split the batch.",
    ),
    "data inside fsdp": (
        rules.fsdp("stage", size=2, inside=a_plain_rule),
        "over mesh axis 'data', which",
        "by rule a_plain_rule",
    ),
}
REFUSALS_WITH_A_MESH = {
    "no such axis": (
        rules.first(B, rules.match("a.*", P("tensr"))),
        f"a.w: dim 0 of shape (6, 8) (rule match('a.*', {P('tensr')})): there is no axis 'tensr' "
        "in the mesh, whose axes are 'data' of size 4, 'tensor' of size 2; use one of these.",
    ),
    "no such axis in fsdp": (
        rules.fsdp("dta", size=4),
        "rule fsdp('dta', size=4): there is no axis 'dta' in the mesh, whose axes are 'data' of "
        "size 4",
    ),
    "fsdp of another size": (
        rules.fsdp("data", size=2),
        "rule fsdp('data', size=2): the mesh has 4 devices along 'data', not 2; pass size=4.",
    ),
    "does not divide": (
        rules.first(B, lambda path, leaf: P(("tensor", "data"))),
        "a.w: dim 0 of shape (6, 8) must be a multiple of 8, the size of its mesh axes ('tensor' "
        "of size 2 x 'data' of size 4; rule ",
        "); split dim 1, which is a multiple of 8, or replicate this leaf with P().",
    ),
    "nothing divides": (
        rules.first(rules.match("a.w", P("data", "tensor")), B),
        "a.w: dim 0 of shape (6, 8) must be a multiple of 4, the size of its mesh axes ('data' of "
        "size 4; rule match('a.w', ",
        "no other free dim is a multiple of 4, so replicate this leaf with P().",
    ),
    "data, with its size": (
        a_plain_rule,
        "a.w: dim 0 of shape (6, 8) is split over",
        "fsdp('data', size=4)",
    ),
}
DATA_IS_FREE = {"does not divide", "nothing divides"}


@pytest.mark.parametrize("name", [*REFUSALS, *REFUSALS_WITH_A_MESH])
def test_refusals(name, mesh):
    rule, *says = {**REFUSALS, **REFUSALS_WITH_A_MESH}[name]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the whole message is read below
        rules.specs(
            W,
            rule,
            mesh if name in REFUSALS_WITH_A_MESH else None,
            batch_axes=() if name in DATA_IS_FREE else ("data",),
        )
    for part in says:
        assert part in str(refusal.value)


@pytest.mark.parametrize("name", sorted(REFUSALS_WITH_A_MESH.keys() - {"data, with its size"}))
def test_sizes_are_checked_with_a_mesh_only(name):
    rules.specs(W, REFUSALS_WITH_A_MESH[name][0], batch_axes=())


def test_batch_axes_may_be_named():
    rule = rules.match("**", P("data"))
    assert rules.specs(W, rule, batch_axes=()) == {"a": {"w": P("data")}, "b": P("data")}
    with pytest.raises(ValueError, match="over mesh axis 'replica'"):
        rules.specs(W, rules.match("**", P("replica")), batch_axes=("data", "replica"))


# Placement


def test_specs_place_a_model_and_serve_as_in_specs(mesh):
    tree = model()
    specs = rules.specs(tree, ZERO_RULE, mesh)
    assert leaves(specs) == [
        P(None, "data", "tensor"),
        P(None, "tensor"),
        None,
        P(),
        P(),
        P("tensor", "data"),
    ]
    placed = place(tree, specs, mesh)
    assert placed.blocks.weight.addressable_shards[0].data.shape == (4, 2, 8)
    params = eqx.filter(placed, eqx.is_array)
    shapes = []

    def double(params):
        shapes.extend(leaf.shape for leaf in jax.tree.leaves(params))
        return jax.tree.map(lambda leaf: leaf + leaf, params)

    doubled = jax.jit(jax.shard_map(double, mesh=mesh, in_specs=(specs,), out_specs=specs))(params)
    assert shapes == [(4, 2, 8), (4, 8), (16,), (6,), (8, 2)]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, 2 * b),
        doubled,
        eqx.filter(tree, eqx.is_array),
    )


# Optimizer state


def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: "adam" if "weight" in str(path) else "sgd", params
    )


def masked_weights(params):
    return jax.tree.map(lambda label: label == "adam", labels(params))


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "masked": optax.masked(optax.adam(1e-2), masked_weights),
    "multi_transform": optax.multi_transform(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2, momentum=0.9)}, labels
    ),
    "every two steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
}
ELEMENTWISE = OPTIMIZERS.keys() - {"adafactor", "chain"}


@jax.numpy_dtype_promotion("standard")  # optax raises Python floats to integer counts
def steps(optimizer, params, state):
    for _ in range(2):
        updates, state = optimizer.update(jax.tree.map(jnp.sin, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_follows_its_parameter(name, mesh):
    optimizer = OPTIMIZERS[name]
    params = eqx.filter(model(), eqx.is_array)
    specs = rules.specs(params, ZERO_RULE, mesh)
    state_specs = rules.optimizer_specs(
        optimizer, model(), specs
    )  # of the model, with its leaves that are no arrays
    assert state_specs == rules.optimizer_specs(optimizer, eqx.filter_eval_shape(model), specs)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs)
    state = jax.jit(optimizer.init, out_shardings=shardings)(place(params, specs, mesh))
    assert jax.tree.structure(state) == jax.tree.structure(state_specs)

    # one device, jit on global arrays, and (elementwise optimizers) shards: the same two steps
    expected = jax.jit(lambda params: steps(optimizer, params, optimizer.init(params)))(params)
    runs = [jax.jit(lambda params, state: steps(optimizer, params, state))]
    if name in ELEMENTWISE:
        both = (specs, state_specs)
        runs += [
            jax.jit(
                jax.shard_map(
                    lambda p, s: steps(optimizer, p, s), mesh=mesh, in_specs=both, out_specs=both
                )
            )
        ]
    for run in runs:
        got = run(place(params, specs, mesh), state)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), got, expected
        )


class Named(eqx.Module):
    w: object
    nu: object


def test_a_parameter_may_be_named_like_a_field_of_the_state():
    """`0.nu.w` is the moment of `w`, though `nu.w` is a parameter too."""
    array, spec = jnp.zeros((8, 8)), P("data")
    for params, specs in [
        (Named(array, Named(array, None)), Named(spec, Named(P(), None))),
        (Named(array, Named(array, array)), Named(P(), Named(spec, P()))),
    ]:
        adam, *_ = rules.optimizer_specs(optax.adam(1e-2), params, specs)
        assert jax.tree.leaves([adam.mu, adam.nu]) == 2 * jax.tree.leaves(specs)


def test_moments_of_adam_have_the_specs_of_the_parameters():
    specs = rules.specs(model(), RULE)
    adam, *_ = rules.optimizer_specs(optax.adamw(1e-2), model(), specs)
    assert leaves(adam.mu) == leaves(adam.nu) == SPECS
    assert adam.count == P()


@pytest.mark.parametrize(
    ("shape", "spec", "row", "column"),
    [
        ((8, 16), P("tensor", "data"), P("tensor"), P("data")),  # row: mean over the larger dim
        ((16, 8), P("tensor", "data"), P("data"), P("tensor")),
        ((4, 8, 16), P("stage", None, "tensor"), P("stage"), P("stage", "tensor")),
        (
            (4, 8, 8),
            P("stage", None, "tensor"),
            P("stage"),
            P("stage"),
        ),  # which 8 is left? only "stage" is sure
        ((8, 8), P("tensor"), P(), P()),
        ((8, 8), P(), P(), P()),
    ],
)
def test_factored_moments_keep_the_splits_of_their_dims(shape, spec, row, column):
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    factored, *_ = rules.optimizer_specs(
        optax.adafactor(1e-2, min_dim_size_to_factor=8), params, {"w": spec}
    )
    assert (factored.v_row, factored.v_col, factored.v) == ({"w": row}, {"w": column}, {"w": P()})


def outer_products():
    """A preconditioner as in Shampoo: [width, width] for a leaf [width, ...]."""

    def init(params):
        return jax.tree.map(lambda leaf: jnp.zeros((leaf.shape[0],) * 2), params)

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def test_state_of_a_foreign_shape_is_refused_unless_its_parameter_is_whole():
    params = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    optimizer = outer_products()
    assert rules.optimizer_specs(optimizer, params, {"w": P(None)}) == {"w": P()}
    with pytest.raises(
        ValueError,
        match=(
            r"^w: the optimizer keeps an array of shape \(8, 8\) for this leaf of shape \(8, 16\)"
        ),
    ):
        rules.optimizer_specs(optimizer, params, {"w": P("tensor")})


def test_optimizer_specs_need_the_specs_of_this_tree():
    with pytest.raises(
        ValueError,
        match=r"one PartitionSpec for each of the 5 trainable .*\. Pass the result of rules\.specs",
    ):
        rules.optimizer_specs(optax.adam(1e-2), model(), P())
