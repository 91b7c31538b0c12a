"""Pipeline schedules as checked tables: their makers (GPipe, 1F1B, zero bubble), the table itself, and CSV files of it."""

from parallax.schedule.choice import Time, compared
from parallax.schedule.files import from_csv, to_csv
from parallax.schedule.makers import gpipe, one_f_one_b, zero_bubble
from parallax.schedule.orders import (
    Job,
    as_soon_as_can_be,
    in_order,
    one_f_one_b_in_turns,
    zero_bubble_in_turns,
)
from parallax.schedule.places import looped, there_and_back
from parallax.schedule.table import LANES, CannotRun, Cost, Phase, Schedule, Span, job_name

__all__ = [
    "LANES",
    "CannotRun",
    "Cost",
    "Job",
    "Phase",
    "Schedule",
    "Span",
    "Time",
    "as_soon_as_can_be",
    "compared",
    "from_csv",
    "gpipe",
    "in_order",
    "job_name",
    "looped",
    "one_f_one_b",
    "one_f_one_b_in_turns",
    "there_and_back",
    "to_csv",
    "zero_bubble",
    "zero_bubble_in_turns",
]
