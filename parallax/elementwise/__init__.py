"""Whether an optimizer acts element by element, so that its update of a shard is the shard of its update."""

from parallax.elementwise.kinds import ELEMENTWISE, LAID_OUT
from parallax.elementwise.marks import COMPARES, right, with_extra
from parallax.elementwise.shards import Mixes, check, wholes

__all__ = ["COMPARES", "ELEMENTWISE", "LAID_OUT", "Mixes", "check", "right", "wholes", "with_extra"]
