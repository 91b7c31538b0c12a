"""Pipeline schedules as checked tables: functions that make a table (GPipe, 1F1B, zero bubble), the
table itself, and CSV files of tables."""

from parallax.schedule.files import from_csv, to_csv
from parallax.schedule.jobs import LANES, Cost, Job
from parallax.schedule.makers import gpipe, one_f_one_b_lockstep, zero_bubble_lockstep
from parallax.schedule.orders import from_orders, greedy, one_f_one_b, zero_bubble
from parallax.schedule.places import looped_placement, v_placement
from parallax.schedule.table import CannotRun, Phase, Schedule, Span, job_name

__all__ = [
    "LANES",
    "CannotRun",
    "Cost",
    "Job",
    "Phase",
    "Schedule",
    "Span",
    "from_csv",
    "from_orders",
    "gpipe",
    "greedy",
    "job_name",
    "looped_placement",
    "one_f_one_b",
    "one_f_one_b_lockstep",
    "to_csv",
    "v_placement",
    "zero_bubble",
    "zero_bubble_lockstep",
]
