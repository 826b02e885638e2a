"""Helpers of the gallery programs: figure style, number of steps, synthetic digits.

With GALLERY_STEPS=20 in the environment each program trains for 20 steps.
"""

import io
import os
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D
from PIL import Image

matplotlib.rc_file(Path(__file__).parents[1] / "matplotlibrc")  # for light and for dark
FONTS = [
    FontProperties(family=f"DejaVu {family}", weight=weight, style=style, size=17)
    for family, style in (("Sans", "normal"), ("Sans", "oblique"), ("Serif", "normal"))
    for weight in ("normal", "bold")
]
GLYPHS = {(d, f): TextPath((0, 0), str(d), prop=f) for d in range(10) for f in FONTS}


def steps(number):
    """Return the range of training steps."""
    return range(int(os.environ.get("GALLERY_STEPS", number)))


def panels(columns=1, rows=1, **options):
    """Return a figure of the gallery's size and the axes of the figure."""
    return plt.subplots(
        rows, columns, figsize=(4.8, 3), layout="constrained", **options
    )


def save(fig, name):
    """Write the picture with 64 colours, so that the file is small."""
    fig.savefig(drawn := io.BytesIO(), format="png")
    plt.close(fig)
    small = Image.open(drawn).quantize(
        64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
    )
    small.save(f"{name}.png", optimize=True)


def inside(shape, points):
    """Test whether points [n, 2] are inside a shape and not in a hole: bool[n]."""
    outlines = [Outline(outline) for outline in shape.to_polygons()]
    return sum(outline.contains_points(points) for outline in outlines) % 2 == 1


def digits(seed, rows, size=16):
    """Return rotated, noisy digits: float32[rows, size, size], and labels int[rows]."""
    rng = np.random.default_rng(seed)
    label, pixel = rng.integers(0, 10, rows), np.arange(size) + 0.5
    points = np.stack(np.meshgrid(pixel, pixel[::-1]), -1).reshape(-1, 2)
    images = np.zeros((rows, size, size), np.float32)
    for image, digit in zip(images, label, strict=True):
        glyph = GLYPHS[digit, FONTS[rng.integers(len(FONTS))]]
        middle = (glyph.vertices.max(0) + glyph.vertices.min(0)) / 2
        place = Affine2D().translate(*-middle).rotate_deg(rng.normal(0, 8))
        place = place.scale(rng.uniform(0.8, 1.1)).translate(
            *rng.normal(size / 2, 0.7, 2)
        )
        image[:] = inside(glyph.transformed(place), points).reshape(size, size)
    return images + rng.normal(0, 0.2, images.shape).astype(np.float32), label
