"""Attention by a kernel: the plain one's values and gradients, under the check of replication
types, in Pallas's interpreter."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas.ops.tpu import flash_attention as kernels
from jax.sharding import PartitionSpec as P

from parallax import mesh, tensor
from parallax.layout import Layout
from parallax.models import flash, gpt2, llama
from parallax.models.attention import grouped
from parallax.models.recipe import Compute, Setup, attention_of, comms_of, unroll_of

# Of the largest number. float32: sums of some hundred terms in another order; bfloat16: its
# rounding, 2^-8, of the scores and of what they weigh, forward and backward.
BOUNDS = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Pallas's kernels on a CPU."""
    here = vars(kernels.pl) | {
        "pallas_call": functools.partial(kernels.pl.pallas_call, interpret=True)
    }
    monkeypatch.setattr(kernels, "pl", SimpleNamespace(**here))


def numbers(tokens, heads, groups, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (heads, groups, groups, heads)
    return [
        jax.random.normal(key, (2, tokens, n, 16), dtype)
        for key, n in zip(keys, sizes, strict=True)
    ]


def value_and_gradients(attend, specs, arguments):
    """The output, and the gradients of its sum over devices, each number weighed by another."""

    def loss(q, k, v, w):
        out = attend(q, k, v)
        return lax.psum(jnp.sum((out * w).astype(jnp.float32)), ("data", "tensor")), out

    def both(q, k, v, w):
        gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v, w)
        return out, *gradients

    world = mesh.make(data=2, tensor=2, devices=jax.devices()[:4])
    return jax.jit(mesh.spmd(both, mesh=world, in_specs=specs, out_specs=(specs[0], *specs[:3])))(
        *arguments
    )


def check(tokens, heads, groups, dtype, specs):
    arguments = numbers(tokens, heads, groups, dtype)
    mine, plain = (
        value_and_gradients(attend, specs, arguments) for attend in (flash.attention, grouped)
    )
    for a, b in zip(mine, plain, strict=True):
        assert a.dtype == b.dtype
        apart, largest = np.abs(np.float64(a) - np.float64(b)).max(), np.abs(np.float64(b)).max()
        assert apart <= BOUNDS[dtype] * largest


HEADS = P("data", None, "tensor")


@pytest.mark.sweep(3, "wholes")
@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "dtype"),
    [(384, 4, 2, jnp.float32), (256, 2, 2, jnp.bfloat16)],  # three blocks of 128, and one of 256
)
def test_the_kernel_is_the_plain_attention(tokens, heads, groups, dtype):
    check(tokens, heads, groups, dtype, (HEADS, HEADS, HEADS, HEADS))


def test_the_kernel_has_the_precision_of_the_context():
    q, k, v, _ = numbers(128, 2, 2, jnp.float32)
    with jax.default_matmul_precision("highest"):
        program = jax.make_jaxpr(flash.attention)(q, k, v)
    assert "HIGHEST" in str(program)
    assert "HIGHEST" not in str(jax.make_jaxpr(flash.attention)(q, k, v))


def test_keys_that_are_the_same_on_several_devices():
    """Their gradient is the sum over the devices that used them, once."""
    shared = P("data")
    check(128, 2, 1, jnp.float32, (HEADS, shared, shared, HEADS))


@pytest.mark.parametrize(("tokens", "dtype"), [(100, jnp.float32), (128, jnp.float64)])
def test_what_the_kernel_cannot_is_computed_plainly(tokens, dtype):
    q, k, v, _ = numbers(tokens, 2, 2, dtype)
    np.testing.assert_array_equal(flash.attention(q, k, v), grouped(q, k, v))


def test_a_fault_in_the_kernel_is_told():
    with pytest.raises(ZeroDivisionError):
        flash.typed(lambda x: x / (1 // 0))(jnp.ones(2, jnp.float32))


@pytest.fixture
def cudnn_calls(monkeypatch):
    """A process that seems to have cuDNN's kernel, for which `grouped` stands. Returns a list, to
    which each call adds its options."""
    calls = []

    def stand_in(q, k, v, **options):
        calls.append(options)
        return grouped(q, k, v)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(flash, "_has_cudnn", lambda: True)
    return calls


@pytest.mark.parametrize("groups", [4, 2])
def test_cudnn_is_asked_for_causal_attention_of_these_heads(cudnn_calls, groups):
    """cuDNN itself was compared on an H100: in bfloat16 its values and gradients are within 3.1e-3
    of float32's, in the norm, and those of `grouped` within 4.3e-3."""
    q, k, v, _ = numbers(64, 4, groups, jnp.bfloat16)
    np.testing.assert_array_equal(flash.cudnn_attention(q, k, v), grouped(q, k, v))
    assert cudnn_calls == [{"is_causal": True, "implementation": "cudnn"}]


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (*(x.astype(jnp.float32) for x in (q, k, v)), None),
        lambda q, k, v: (*(x[:, :63] for x in (q, k, v)), None),
        lambda q, k, v: (*(x[..., :12] for x in (q, k, v)), None),
        lambda q, k, v: (*(jnp.tile(x, 9) for x in (q, k, v)), None),
        lambda q, k, v: (q, k, v, jnp.zeros((2, 64), jnp.int32).at[:, 9:].set(1)),
    ],
    ids=["float32", "odd tokens", "heads of 12", "heads of 144", "documents"],
)
def test_what_cudnn_cannot_is_computed_plainly(cudnn_calls, change):
    *arrays, segments = change(*numbers(64, 2, 2, jnp.bfloat16)[:3])
    result = flash.cudnn_attention(*arrays, segments=segments)
    np.testing.assert_array_equal(result, grouped(*arrays, segments=segments))
    assert not cudnn_calls


def test_a_process_without_a_gpu_has_no_cudnn():
    q, k, v, _ = numbers(64, 2, 2, jnp.bfloat16)
    np.testing.assert_array_equal(flash.cudnn_attention(q, k, v), grouped(q, k, v))


@pytest.mark.parametrize("family", [gpt2.FAMILY, llama.FAMILY])
def test_a_mesh_of_accelerators_takes_the_kernel(family):
    own = lambda q, k, v: q
    assert attention_of(family, Compute(), "tpu") is flash.attention
    assert attention_of(family, Compute(), "gpu") is flash.cudnn_attention
    assert attention_of(family, Compute(), "cpu") is family.attention
    assert attention_of(family, Compute(attention=own), "tpu") is own


@pytest.mark.parametrize(
    ("platform", "layout", "unroll"),
    [
        ("cpu", "data=2", 1),
        ("gpu", "data=2", 12),
        ("gpu", "data=2,zero=3", 2),
        ("gpu", "stage=2,microbatches=2", 1),
        ("tpu", "data=2", 1),
        ("tpu", "data=2,zero=3", 1),
    ],
)
def test_layers_in_the_body_of_the_loop(monkeypatch, platform, layout, unroll):
    monkeypatch.setattr(Setup, "platform", platform)
    layout = Layout.parse(layout)
    setup = Setup(gpt2.FAMILY, gpt2.SMALL, layout, mesh.abstract(**layout.axes), None)
    assert unroll_of(setup) == unroll
    assert unroll_of(dataclasses.replace(setup, compute=Compute(unroll=3))) == 3
    long = dataclasses.replace(setup, config=gpt2.Config(layers=96))
    assert unroll_of(long) == (unroll if unroll < 12 else 1)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize(
    "layout", ["data=2", "tensor=2", "tensor=2,sequence=True", "stage=2,microbatches=2"]
)
def test_only_tpus_without_stages_have_three_products(monkeypatch, platform, layout):
    """Of queries, keys and values; a user's own `comms` is used as it is."""
    monkeypatch.setattr(Setup, "platform", platform)
    layout = Layout.parse(layout)
    setup = Setup(gpt2.FAMILY, gpt2.SMALL, layout, mesh.abstract(**layout.axes), None)
    three = platform == "tpu" and not layout.pipelined
    made = comms_of(setup)(())
    assert [made.column.keywords["on_tpu"], made.row.keywords["on_tpu"]] == [three, three]
    own = dataclasses.replace(setup, compute=Compute(comms=tensor.comms))
    assert comms_of(own) is tensor.comms
