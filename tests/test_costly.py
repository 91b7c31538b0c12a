"""The most expensive instructions of a saved program, with their lines."""

import dataclasses

import pytest
from test_targets import KINDS, machine, text

from parallax import hardware
from parallax.compiled import costly, hlo, links, timeline
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


def test_cycles_need_a_clock():
    """Of a TPU without a clock, and of another chip than the program's."""
    no_clock = dataclasses.replace(hardware.TPU_V5E, clock=0.0)
    for chip in (no_clock, hardware.H100):
        with pytest.raises(ValueError, match=rf"needs a chip with a clock; {chip.name} has none"):
            costly.instructions(text("tpu"), chip)
    here = machine("tpu")._replace(hardware=no_clock)
    with pytest.raises(ValueError, match="needs a chip with a clock"):
        timeline.of(text("tpu"), here, dict(Layout(data=4, tensor=2).axes))
