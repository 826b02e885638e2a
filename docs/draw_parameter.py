"""Draws ``images/parameter-*.svg``, the life of a parameter on 4 devices: ``python docs/draw_parameter.py``."""

from svg import QUARTERS, arrow, line, rect, text, write

DEVICES, WIDTH, HEIGHT = 4, 480, 286
SHAPE = (1024, 1024)
MIB = 2**20
LEFT, COLUMN, STRIPE, THICK = 112, 92, 20, 15
WHOLE = range(DEVICES)

# Arrays on a device: (bytes of an entry, y). "m, v" are two arrays.
ROWS = {
    "m, v  float32": (8, 58),
    "W  float32": (4, 82),
    "W  bfloat16": (2, 138),
    "dW  bfloat16": (2, 162),
    "mean  float32": (4, 218),
}
MOMENTS, SHARD, GATHERED, OWN, MEAN = ROWS
REST = {MOMENTS: 1, SHARD: 1}  # quarters per device, by row

# (title, contents of each device, rows of the transfer, remark)
STEPS = [
    ("1. Init: each device computes its quarter", REST, None, "jit with out_shardings; no device ever holds all of W"),
    (
        "2. Gather, before the module runs",
        REST | {GATHERED: 4},
        (SHARD, GATHERED),
        "all-gather in bfloat16: each device sends {moved}",
    ),
    ("3. Use, and drop", REST, None, "y = x W on the device's own rows; then W is freed"),
    (
        "4. Backward: gather again, and differentiate",
        REST | {GATHERED: 4, OWN: 4},
        (SHARD, GATHERED),
        "all-gather: {moved}; dW is that of the device's own rows",
    ),
    (
        "5. Scatter: the transpose of the gather",
        REST | {OWN: 4, MEAN: 1},
        (OWN, MEAN),
        "reduce-scatter: {moved}; device i keeps quarter i of the mean",
    ),
    (
        "6. Update: each device its quarter",
        REST | {MEAN: 1},
        None,
        "tx.update on global arrays; AdamW sends nothing",
    ),
]


def size(row, quarters):
    """Returns the bytes of this number of quarters of a row."""
    return SHAPE[0] * SHAPE[1] * ROWS[row][0] * quarters // DEVICES


def mib(size):
    return f"{size / MIB:g} MiB"


def moved():
    """Returns the bytes that a device sends in a bfloat16 all-gather or reduce-scatter over a ring: three quarters."""
    return mib(SHAPE[0] * SHAPE[1] * 2 * (DEVICES - 1) // DEVICES)


def left(device, quarter=0):
    return LEFT + device * COLUMN + quarter * STRIPE


def cells(row, held):
    """Yields the quarters of a row on all devices: filled if present, an empty frame if absent."""
    y, gradient = ROWS[row][1], row in (OWN, MEAN)
    for device in WHOLE:
        for quarter in WHOLE:
            here = held == DEVICES or (held == 1 and quarter == device)
            color = QUARTERS[quarter]
            if here:
                opacity = 0.15 if gradient else 1
                yield rect(left(device, quarter), y, STRIPE - 2, THICK, color, opacity, stroke=color)
            else:
                yield rect(left(device, quarter), y, STRIPE - 2, THICK, kind="frame")


def collective(above, below):
    """Yields arrows from the cells of a row to the cells of another row, over a line that joins the devices."""
    top, bottom = ROWS[above][1] + THICK + 3, ROWS[below][1] - 3
    bus = bottom - 14
    gather = below == GATHERED
    middles = [left(device, 2) - 1 for device in WHOLE]
    starts = [left(device, device) + STRIPE / 2 - 1 for device in WHOLE] if gather else middles
    ends = middles if gather else [left(device, device) + STRIPE / 2 - 1 for device in WHOLE]
    yield line((min(starts + ends), bus), (max(starts + ends), bus), kind="sent")
    for start, end in zip(starts, ends, strict=True):
        yield line((start, top), (start, bus), kind="sent")
        yield arrow((end, bus), (end, bottom))


def picture(title, held, sent, remark):
    yield text(8, 20, title, "start", "title")
    for device in WHOLE:
        yield text(left(device, 2) - 1, 46, f"device {device}", kind="quiet")
    for row, (_, y) in ROWS.items():
        yield text(8, y + 12, row, "start", "" if row in held else "quiet")
        yield from cells(row, held.get(row, 0))
    if sent:
        yield from collective(*sent)
    total = mib(sum(size(row, quarters) for row, quarters in held.items()))
    yield text(8, 256, "holds", "start")
    for device in WHOLE:
        yield text(left(device, 2) - 1, 256, total)
    yield text(8, 277, remark.format(moved=moved()), "start", "accent" if sent else "quiet")


def main():
    for number, (title, held, sent, remark) in enumerate(STEPS, 1):
        write(f"parameter-{number}", WIDTH, HEIGHT, title, picture(title, held, sent, remark))


if __name__ == "__main__":
    main()
