"""Draws ``images/check_vma-*.svg``, a gradient in both modes of shard_map: ``python docs/draw_check_vma.py``."""

from svg import QUARTERS, arrow, line, rect, text, write

WIDTH = 480
LEFT, COLUMN, BOX, THICK = 150, 84, 62, 22
X = (1, 2, 3, 6)  # of each device
SUM, MEAN = sum(X), sum(X) // len(X)
END = LEFT + (len(X) - 1) * COLUMN + BOX

# Rows of (label, type, values: a number for all devices, or a list); strings in between are operations.
TRACKED = [
    ("w", "float32[]", 1),
    "pvary: one value becomes one for each device",
    ("x", "{V:fsdp}", X),
    ("own dw", "{V:fsdp}", X),
    "psum: the transpose of pvary",
    ("gradient", "float32[]", SUM),
    "pmean: a mean of equal values changes nothing",
    ("averaged", "float32[]", SUM),
]
UNTRACKED = [
    ("w", "no type", (1, 1, 1, 1)),
    "nothing",
    ("x", "no type", X),
    ("own dw", "no type", X),
    "nothing",
    ("gradient", "no type", X),
    "pmean",
    ("averaged", "no type", (MEAN,) * len(X)),
]


def values(y, held):
    """Yields a wide box for an invariant value, a box per device for a varying value."""
    if isinstance(held, int):
        yield rect(LEFT, y, END - LEFT, THICK, QUARTERS[0], 0.2, stroke=QUARTERS[0])
        yield text((LEFT + END) / 2, y + 15, str(held))
        return
    for device, value in enumerate(held):
        x = LEFT + device * COLUMN
        yield rect(x, y, BOX, THICK, QUARTERS[1], 0.2, stroke=QUARTERS[1])
        yield text(x + BOX / 2, y + 15, str(value))


def between(y, words):
    if words == "nothing":
        yield from (line((x, y - 2), (x, y + 20)) for x in middles())
    else:
        yield from (arrow((x, y - 2), (x, y + 20)) for x in middles())
    yield text(LEFT - 12, y + 14, words.split(":")[0], "end", "quiet" if words == "nothing" else "accent")


def middles():
    return [LEFT + device * COLUMN + BOX / 2 for device in range(len(X))]


def picture(title, rows, remark):
    yield text(8, 20, title, "start", "title")
    yield from (text(x, 44, f"device {device}", kind="quiet") for device, x in enumerate(middles()))
    y = 54
    for row in rows:
        if isinstance(row, str):
            yield from between(y, row)
        else:
            label, kind, held = row
            yield text(8, y + 15, label, "start")
            yield text(LEFT - 8, y + 15, "" if kind == "no type" else kind, "end", "quiet")
            yield from values(y, held)
        y += 30
    yield text(8, y + 18, remark, "start")


def main():
    height = 54 + 30 * len(TRACKED) + 30
    wrong = f"{SUM}: {len(X)} times the right gradient, {MEAN}, and no error"
    titles = ["check_vma=True: gradients arrive summed", "check_vma=False: each device has its own"]
    remarks = [wrong, f"{MEAN}: right. Without the pmean, devices would drift apart"]
    for number, (title, rows, remark) in enumerate(zip(titles, (TRACKED, UNTRACKED), remarks, strict=True), 1):
        write(f"check_vma-{number}", WIDTH, height, title, picture(title, rows, remark))


if __name__ == "__main__":
    main()
