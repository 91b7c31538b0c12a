"""What is to outlive a power cut."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return when the bytes of a file, or the names in a folder, have reached the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
