"""Numbers to read."""

import math

Number = float | int


def quantity(number: Number, unit: str) -> str:
    """Returns a number to three digits with the prefix that suits it."""
    if math.isinf(number):
        return f"no limit ({unit})"
    power = min(6, int(math.log10(float(f"{number:.2e}")) // 3)) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}{unit}"
