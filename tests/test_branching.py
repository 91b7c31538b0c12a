"""Each stage its own job in a tick: what one device computes, in the ticks and the slots of the table."""

import dataclasses

import pytest
import test_pipeline as lockstep
import test_pipeline_trees as trees

from parallax.schedule import as_soon_as_can_be, looped, one_f_one_b_in_turns, there_and_back, zero_bubble_in_turns


@pytest.mark.parametrize("make", [one_f_one_b_in_turns, zero_bubble_in_turns])
def test_small(make):
    lockstep.check(lockstep.pairs, make(4, 3), beside=(1, 2))
