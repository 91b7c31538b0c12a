"""The most expensive instructions of a saved program, with their lines."""

import dataclasses

import pytest
from test_targets import KINDS, machine, text

from parallax import hardware
from parallax.compiled import costly, hlo, links, seconds, timeline
from parallax.layout import Layout


@pytest.mark.parametrize("kind", KINDS)
def test_they_add_up_to_the_compute_of_the_replay(kind):
    """But for what the replay runs beside others: at most a tenth."""
    here = machine(kind)
    found = costly.instructions(text(kind), here.hardware)
    assert [each.seconds for each in found] == sorted(
        (each.seconds for each in found), reverse=True
    )
    total = sum(each.seconds for each in found)
    replayed = timeline.of(text(kind), here, dict(Layout(data=4, tensor=2).axes)).compute
    assert replayed <= total * (1 + 1e-9)
    assert total <= 1.5 * replayed
    assert {1, 2} <= {each.times for each in found}  # in no loop, and in one over two layers
    assert sum(".py:" in each.line for each in found) > len(found) / 2
    told = costly.table(found, rows=3).splitlines()
    assert len(told) == 4
    assert found[0].line in told[1]


def test_a_broadcast_goes_from_the_first_device_of_each_group():
    groups = "replica_groups={{0,1,2},{3,4,5}}"
    broadcast = hlo.Instruction("b", "f32[8]{0}", "collective-broadcast", ["x"], groups)
    expected = {(0, 1): 32.0, (0, 2): 32.0, (3, 4): 32.0, (3, 5): 32.0}
    assert links.flows(broadcast, 6) == (expected, 1)


def test_the_table_marks_the_result_that_is_a_tuple():
    program = """ENTRY %e (x: f32[8]) -> f32[8] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %one = f32[8,128]{1,0:T(8,128)} negate(%x)
  ROOT %two = (f32[8]{0}, s32[8]{0}) fusion(%one), kind=kLoop, calls=%c
}
"""
    lines = costly.table(costly.instructions(program, hardware.H100)).splitlines()[1:]
    assert ["f32[8], ..." in line for line in lines] == ["fusion" in line for line in lines]
    assert any(" f32[8,128]  " in line for line in lines)


CUDNN = """HloModule m, is_scheduled=true
ENTRY %e (q: bf16[2,8,3,4]) -> bf16[2,3,8,4] {
  %q = bf16[2,8,3,4]{3,2,1,0} parameter(0)
  %a = (bf16[2,3,8,4]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="TARGET", \
backend_config={"cudnn_fmha_backend_config": {"fmha_scale": 0.5, "intermediate_tensor_shape": \
{"element_type": "BF16", "dimensions": ["2", "3", "8", "8"]}, "mask_type": "MASK", \
"bmm1_dot_dimension_numbers": {"lhs_contracting_dimensions": ["3"]}}}
  ROOT %o = bf16[2,3,8,4]{3,1,2,0} get-tuple-element(%a), index=0
}
"""


@pytest.mark.parametrize(
    ("target", "mask", "products"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 2),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 1),
        ("__cudnn$fmhaSoftmaxBackward", "PADDING_CAUSAL", 2.5),
        ("another", "CAUSAL", 0),
    ],
)
def test_operations_of_cudnns_attention(target, mask, products):
    """Of 2 sequences, 3 heads of width 4 and 8 tokens: a product of all scores takes 2 x 4
    operations for each, and under a causal mask half of the scores count."""
    program = hlo.module(CUDNN.replace("TARGET", target).replace("MASK", mask))
    call = next(line for line in program[program.entry] if line.opcode == "custom-call")
    assert seconds.Costs(program, hardware.H100, 1).operations(call) == products * 8 * 2 * 3 * 8 * 8


def test_cycles_need_a_clock():
    """Of a TPU without a clock, and of another chip than the program's."""
    no_clock = dataclasses.replace(hardware.TPU_V5E, clock=0.0)
    for chip in (no_clock, hardware.H100):
        with pytest.raises(ValueError, match=rf"of the chip; the record of {chip.name} has none"):
            costly.instructions(text("tpu"), chip)
    here = machine("tpu")._replace(hardware=no_clock)
    with pytest.raises(ValueError, match="needs the clock rate of the chip"):
        timeline.of(text("tpu"), here, dict(Layout(data=4, tensor=2).axes))
