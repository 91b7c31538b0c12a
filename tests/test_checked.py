"""The annotations of the package are checked in each test: types, dims of one call against one
another, and results."""

import dataclasses

import beartype
import equinox as eqx
import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintViolation
from checked import checked
from jaxtyping import Array, Float

from parallax import tensor


def test_the_package_is_checked():
    with pytest.raises(BeartypeCallHintViolation):
        tensor.copy_to("no array", "tensor")


def test_dims_are_those_of_one_call():
    def product(a: Float[Array, "i j"], b: Float[Array, "j k"]) -> Float[Array, "i k"]:
        return jnp.zeros((a.shape[0], 3))

    refusing = checked(product, typechecker=beartype.beartype)
    assert refusing(jnp.zeros((2, 4)), jnp.zeros((4, 3))).shape == (2, 3)
    assert refusing(jnp.zeros((5, 1)), jnp.zeros((1, 3))).shape == (
        5,
        3,
    )  # the sizes of the call before are forgotten
    with pytest.raises(BeartypeCallHintViolation):
        refusing(jnp.zeros((2, 4)), jnp.zeros((5, 3)))
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        refusing(jnp.zeros((2, 4)), jnp.zeros((4, 6)))


def test_dims_are_found_wherever_an_annotation_has_them():
    def first(arrays: list[Float[Array, " i"] | None], one: Float[Array, " i"]) -> int:
        return len(arrays)

    refusing = checked(first, typechecker=beartype.beartype)
    assert refusing([jnp.zeros(2)], jnp.zeros(2)) == 1
    with pytest.raises(BeartypeCallHintViolation):
        refusing([jnp.zeros(2)], jnp.zeros(3))
    refusing([jnp.zeros(3)], jnp.zeros(3))


def test_fields_are_checked():
    @dataclasses.dataclass
    class Pair:
        first: Float[Array, " i"]
        second: Float[Array, " i"]

    class Layer(eqx.Module):
        weight: Float[Array, "i i"]
        name: str = "a"

    for kind, right, wrong in [
        (Pair, (jnp.zeros(2), jnp.zeros(2)), (jnp.zeros(2), jnp.zeros(3))),
        (Layer, (jnp.zeros((2, 2)),), (jnp.zeros((2, 3)),)),
        (Layer, (jnp.zeros((2, 2)), "b"), (jnp.zeros((2, 2)), 3)),
    ]:
        refusing = checked(kind, typechecker=beartype.beartype)
        refusing(*right)
        with pytest.raises(BeartypeCallHintViolation):
            refusing(*wrong)
