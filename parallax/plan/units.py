"""Numbers with units, as text."""

import math

Number = float | int


def quantity(number: Number, unit: str) -> str:
    """Returns a number as text, with a decimal prefix and the unit. The number is rounded to three
    significant digits, and zeros at its end are dropped: 1,504,000,000 bytes are "1.5 GB". Infinity
    is "no limit (B)"."""
    if math.isinf(number):
        return f"no limit ({unit})"
    # The power of 1,000 in the number after rounding: 999.9 is "1 k". E is the largest prefix.
    power = min(6, int(math.log10(float(f"{number:.2e}")) // 3)) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}{unit}"
