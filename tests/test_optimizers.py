"""Every optimizer of optax trains on shards what it trains on one device, or is refused and cured
by a wrapper."""

import functools
import inspect
import warnings

import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from optax import contrib
from optimizers_steps import (
    EXTRA,
    WAYS,
    as_optax_computes,  # noqa: F401 (an autouse fixture)
    assert_names_leaf_axis_and_cure,
    assert_trains_something_else,
    equal,
    on_one_device,
    on_shards,
    refusal,
    whole,
)
from optimizers_table import BARE, ELEMENTWISE, MIXING, TABLE, UNUSABLE, WRAPPED, downhill
from reference import EXACT, assert_close


def exported():
    """All that optax exports whose call gives a gradient transformation, by name."""

    def makes_one(each):
        if inspect.isclass(each):
            return "gradient_transformation" in dir(each)  # MultiSteps
        if not (inspect.isfunction(each) or isinstance(each, functools.partial)):
            return False
        returned = inspect.signature(each).return_annotation
        said = inspect.getsource(each) if returned is inspect.Signature.empty else str(returned)
        return "GradientTransformation" in said

    with warnings.catch_warnings(action="ignore"):  # of deprecated names
        found = {
            name: getattr(module, name)
            for module in (optax, contrib)
            for name in dir(module)
            if not name.startswith("_")
        }
    return {name for name, each in found.items() if makes_one(each)}


def test_the_table_has_all_that_optax_exports():
    known = {*TABLE, *UNUSABLE}
    unknown = sorted(exported() - known)
    assert not unknown, (
        f"optax exports {unknown}: give each a line in BARE or WRAPPED, or a reason in UNUSABLE"
    )
    gone = sorted(
        known - exported() - {"skip_large_updates", "skip_not_finite"}
    )  # arguments of MultiSteps
    assert not gone, f"optax no longer exports {gone}: drop their lines"
    assert not set(TABLE) & set(UNUSABLE)
    assert not set(BARE) & set(WRAPPED)


# Five steps, on one device and on shards

PARTS = 12


def part_of_table(part):
    return {name: TABLE[name] for name in sorted(TABLE)[part::PARTS]}


@functools.cache
def part_on_one_device(part):
    return on_one_device(part_of_table(part))


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("way", WAYS)
def test_five_steps_are_those_of_one_device(way, part):
    """Bare, with the optimizer's state too; or refused bare, and right inside `whole`."""
    plain, table, way = part_on_one_device(part), part_of_table(part), WAYS[way]
    for name in table.keys() & WRAPPED:
        assert_names_leaf_axis_and_cure(refusal(way, {name: way.bare(table[name])}), way.axis)
    wrapped = {
        name: way.bare(each) if name in BARE else whole(way, each) for name, each in table.items()
    }
    for name, (params, state) in on_shards(way, wrapped).items():
        assert_close(params, plain[name][0], EXACT)
        if name in BARE:
            assert_close(state, plain[name][1], EXACT)


# Each shard trained alone: what is refused would train something else

# These act together where a gradient is not finite; then `step.make` skips the step, before or
# after them.
OF_WHAT_IS_NOT_FINITE = ("apply_if_finite", "skip_not_finite", "zero_nans")


@pytest.mark.sweep(12)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_refused_would_train_something_else(part):
    table = {
        name: each
        for name, each in part_of_table(part).items()
        if name in WRAPPED and name not in OF_WHAT_IS_NOT_FINITE
    }
    table = {name: each for name, each in table.items() if name not in EXTRA}
    assert_trains_something_else(table, part_on_one_device(part))


# Chains, and the loss that step.make passes

chains = st.lists(st.sampled_from([*ELEMENTWISE]), min_size=2, max_size=4) | st.lists(
    st.sampled_from([*ELEMENTWISE, *MIXING]), min_size=2, max_size=4
)


@pytest.mark.sweep(3, "wholes")
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(drawn=st.lists(chains, min_size=5, max_size=5))
def test_a_chain_is_refused_exactly_if_one_of_it_mixes(drawn):
    pieces = ELEMENTWISE | MIXING
    table = {" ".join(names): downhill(optax.chain(*map(pieces.get, names))) for names in drawn}
    passing = {name: each for name, each in table.items() if not set(name.split()) & MIXING.keys()}
    for name in table.keys() - passing.keys():
        assert_names_leaf_axis_and_cure(refusal(WAYS["tensor"], {name: table[name]}), "tensor")
    if passing:
        plain = on_one_device(passing)
        for name, (params, _) in on_shards(WAYS["tensor"], passing).items():
            assert_close(params, plain[name][0], EXACT)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["polyak_sgd", "reduce_on_plateau"])
def test_the_loss_reaches_the_optimizer_as_value(name):
    """As it is, the run is that of one device; with another value it is another."""
    way, optimizer = WAYS["tensor"], TABLE[name]
    table = {name: optimizer if name in BARE else whole(way, optimizer)}
    plain = on_one_device({name: optimizer})[name][0]
    assert_close(on_shards(way, table)[name][0], plain, EXACT)
    other = on_shards(way, table, extra=lambda info: {"value": -info.loss})[name][0]
    assert not equal(other, plain)
