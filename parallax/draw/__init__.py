"""Pictures of schedules, collectives, meshes, attention, estimated times, and a device's bytes in
memory and in messages.

All functions but `timeline`, `page` and `replay_trace` return text; if they get a path, they also
write a picture to it, in the format of the path's suffix (PNG, SVG, PDF). Pictures need matplotlib,
which the extra `draw` installs.
"""

from parallax.draw.attended import attention
from parallax.draw.bars import bytes_by_kind, traffic
from parallax.draw.html_page import page
from parallax.draw.in_flight_counts import in_flight
from parallax.draw.meshes import mesh
from parallax.draw.replays import replay, replay_trace
from parallax.draw.routes import route
from parallax.draw.schedules import summary, text, timeline

__all__ = [
    "attention",
    "bytes_by_kind",
    "in_flight",
    "mesh",
    "page",
    "replay",
    "replay_trace",
    "route",
    "summary",
    "text",
    "timeline",
    "traffic",
]
