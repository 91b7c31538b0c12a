"""Pipeline schedules as checked tables: their makers (GPipe, 1F1B, zero bubble), the table itself, and CSV files of it."""

from parallax.schedule.files import from_csv, to_csv
from parallax.schedule.makers import gpipe, one_f_one_b, zero_bubble
from parallax.schedule.table import LANES, CannotRun, Cost, Phase, Schedule, Span, job_name

__all__ = [
    "LANES",
    "CannotRun",
    "Cost",
    "Phase",
    "Schedule",
    "Span",
    "from_csv",
    "gpipe",
    "job_name",
    "one_f_one_b",
    "to_csv",
    "zero_bubble",
]
