"""Digits that are drawn by a program, for examples that need images and no download."""

import numpy as np

GLYPHS = """
.###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... #.... ....# #...# #...#
#..## ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ....#
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .###.
"""
SIZE, NOISE = 12, 0.35


def draw(number: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """`number` images [number, 12, 12] of digits at random places with noise, and their
    labels."""
    rows = [line.split() for line in GLYPHS.split("\n") if line]
    glyphs = np.array(
        [[[dot == "#" for dot in row[digit]] for row in rows] for digit in range(10)]
    )
    _, height, width = glyphs.shape

    random = np.random.default_rng(seed)
    labels = random.integers(10, size=number)
    images = NOISE * random.standard_normal((number, SIZE, SIZE))
    tops = random.integers(SIZE - height + 1, size=number)
    lefts = random.integers(SIZE - width + 1, size=number)
    for image, label, top, left in zip(images, labels, tops, lefts, strict=True):
        image[top : top + height, left : left + width] += glyphs[label]
    return images.astype(np.float32), labels.astype(np.int32)
