"""Draws ``images/torus.svg``: a single axis over all chips, and an axis per dim: ``python docs/draw_torus.py``."""

from svg import QUARTERS, rect, text, write

SIDE, STEP, CHIP = 4, 44, 20
WIDTH, HEIGHT, TOP = 480, 300, 62
LEFTS = (34, 284)  # of the two grids
HALF, REACH = CHIP / 2, 13  # how far a link around the torus is drawn


def middle(grid, column, row):
    return LEFTS[grid] + column * STEP + HALF, TOP + row * STEP + HALF


def stroke(points, color, width=2.4):
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}" stroke-linejoin="round"/>'


def links(grid):
    """Yields the links of the torus, faintly; wrap-around links as stubs."""
    for k in range(SIDE):
        (x0, y), (x1, _) = middle(grid, 0, k), middle(grid, SIDE - 1, k)
        yield stroke([(x0 - HALF - REACH, y), (x1 + HALF + REACH, y)], "var(--faint)", 1)
        (x, y0), (_, y1) = middle(grid, k, 0), middle(grid, k, SIDE - 1)
        yield stroke([(x, y0 - HALF - REACH), (x, y1 + HALF + REACH)], "var(--faint)", 1)


def chips(grid):
    for row in range(SIDE):
        for column in range(SIDE):
            x, y = middle(grid, column, row)
            yield rect(x - HALF, y - HALF, CHIP, CHIP, "var(--faint)")
            yield text(x, y + 4, str(SIDE * row + column))


def flat():
    """Returns a ring through all chips, row by row and back, closed around the torus."""
    order = [(c if row % 2 == 0 else SIDE - 1 - c, row) for row in range(SIDE) for c in range(SIDE)]
    points = [middle(0, *place) for place in order]
    x, y = points[0]
    last = points[-1][1] + HALF + REACH
    return stroke([(x, y - HALF - REACH), *points, (x, last)], QUARTERS[1])


def staged():
    for k in range(SIDE):
        (x0, y), (x1, _) = middle(1, 0, k), middle(1, SIDE - 1, k)
        yield stroke([(x0 - HALF - REACH, y - 4), (x1 + HALF + REACH, y - 4)], QUARTERS[0])
        (x, y0), (_, y1) = middle(1, k, 0), middle(1, k, SIDE - 1)
        yield stroke([(x + 4, y0 - HALF - REACH), (x + 4, y1 + HALF + REACH)], QUARTERS[2])


def picture():
    yield text(8, 20, "One flat axis of 16", "start", "title")
    yield text(258, 20, "One axis for each dim", "start", "title")
    yield from [*links(0), flat(), *chips(0), *links(1), *staged(), *chips(1)]
    below = TOP + SIDE * STEP + 22
    yield text(8, below, "one ring of 16 chips, 15 hops;", "start")
    yield text(8, below + 18, "XLA replaces its reduce-scatters", "start")
    yield text(258, below, "two stages of 3 hops each:", "start")
    yield text(258, below + 18, "rings along x, then along y", "start")


def main():
    write("torus", WIDTH, HEIGHT, "A torus of 4 x 4 chips: one ring over all, or rings along each dim", picture())


if __name__ == "__main__":
    main()
