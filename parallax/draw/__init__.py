"""Look at it: schedules, collectives, meshes, what each device holds and sends, and its memory over time; all on one page.

All but the pictures of schedules give text; with a path they write the picture too, in the format that its suffix says (PNG, SVG,
PDF). Pictures need matplotlib, which comes with the extra `draw`; text needs nothing.
"""

from parallax.draw.attended import attention
from parallax.draw.bars import balance, bytes_by_kind, traffic
from parallax.draw.devices import mesh, model, sharding
from parallax.draw.held import in_flight
from parallax.draw.html_page import page
from parallax.draw.over_time import memory, sampled
from parallax.draw.replays import replay, replay_trace
from parallax.draw.routes import route
from parallax.draw.schedules import summary, text, timeline, trace

__all__ = [
    "attention",
    "balance",
    "bytes_by_kind",
    "in_flight",
    "memory",
    "mesh",
    "model",
    "page",
    "replay",
    "replay_trace",
    "route",
    "sampled",
    "sharding",
    "summary",
    "text",
    "timeline",
    "trace",
    "traffic",
]
