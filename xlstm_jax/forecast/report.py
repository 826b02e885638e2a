"""Reports of a forecast: tables for ``rich``, and a picture by matplotlib, which is optional.

The argument ``forecast`` is a ``Forecast`` throughout. Its annotation is ``Any``, because the module of ``Forecast``
imports this module.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from xlstm_jax.forecast.cost.collective_traffic import Collective, executions, sum_wire_bytes
from xlstm_jax.forecast.cost.memory import Moment
from xlstm_jax.forecast.hlo.text import split_outside
from xlstm_jax.formatting import TIMES, Bar, format_bytes, format_milliseconds, how_to_install, rich_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = 12  # rows per table; a last row sums up the rest
NAMED = 3  # leaves named for a collective of several leaves
NO_MODULE_LABEL = "outside of modules"
MAX_LABEL_CHARS = 75  # characters of module names that fit below the picture of memory
MIN_RUN_FRACTION = 1 / 15  # of the axis: a shorter run of a module gets no label
DOES_NOT_FIT = (
    "Traffic and time are those of the program that the compiler made nevertheless, which may recompute and gather "
    "again arrays that it could not keep."
)
HOW_NEAR = 'How near such times came to published runs: docs/forecast.md, "Published against predicted".'
COLORS = {"forward": "#4c78a8", "backward": "#e45756", "recompute": "#f2a541", "other": "#9d9da1"}


def tables(forecast: Any) -> RenderableType:
    """Returns all tables of a ``Forecast``, between headline and closing remarks, to print with ``rich``.

    Tables of temporaries and of waits are left out if the forecast has none.
    """
    parts: list[RenderableType] = [_memory_table(forecast)]
    parts += [_temporaries_table(forecast)] if forecast.memory.temporaries else []
    parts += [_axes_table(forecast), _collectives_table(forecast)]
    parts += [_waiting_table(forecast)] if forecast.roofline and forecast.collectives else []
    parts += [_time_table(forecast)]
    head, notes = Text(headline(forecast), style="bold"), [Text(note, style="italic") for note in closing(forecast)]
    return Group(head, Text(), *parts, *notes)


def headline(forecast: Any) -> str:
    """Returns the main results of a forecast (memory, traffic, time) as up to three sentences."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in forecast.axis_sizes.items())
    where = f"{forecast.topology or 'devices at hand'} ({forecast.device_kind}; mesh {mesh})"
    text, sent = f"{where}: {_fits(forecast)}. A step sends", format_bytes(forecast.wire_bytes)
    if forecast.on_gpus:
        text += (
            f" {sent} per GPU, of which {format_bytes(forecast.nic_bytes)} between hosts; "
            f"{forecast.hidden_fraction:.0%} of it is hidden, {format_milliseconds(forecast.wait_time.expected)} are "
            "waited for."
        )
    else:
        text += f" {sent} per device, {forecast.asynchronous_fraction:.0%} of it asynchronously."
    if forecast.step_seconds is None:
        return text
    waits = f"{forecast.wait_time.expected / forecast.step_seconds:.0%} of it waiting for collectives"
    if forecast.host:
        waits += f", {forecast.host.waited_s / forecast.step_seconds:.0%} for the host's memory"
    least, expected, most = map(format_milliseconds, forecast.step_time)
    overlapped = f"{format_milliseconds(forecast.roofline.seconds)} if all overlapped ({forecast.roofline.bound}-bound)"
    return (
        f"{text} It takes {least} by published rates alone, {expected} expected, {waits}, and {most} with every "
        f"latency exposed; at least {overlapped}."
    )


def _fits(forecast: Any) -> str:
    total = format_bytes(forecast.total_bytes)
    if forecast.fits is None:
        return f"arguments take {format_bytes(forecast.memory.argument_bytes)} of each device"
    available, left = format_bytes(forecast.available_bytes), forecast.available_bytes - forecast.total_bytes
    if forecast.fits:
        return f"fits: {total} of {available} per device, {format_bytes(left)} left"
    return f"DOES NOT FIT: {total} per device, {format_bytes(-left)} more than the {available} there are"


def closing(forecast: Any) -> list[str]:
    """Returns the remarks below the tables of a forecast, as texts; a remark that does not apply is left out.

    In order: tokens per device from which compute hides communication, too little memory, loops of unknown length, a
    pointer to the accuracy of the times, and the notes of the forecast.
    """
    lines = []
    ridge = forecast.roofline and forecast.roofline.ridge_tokens
    if ridge:
        tokens_per_device = forecast.tokens / forecast.devices
        lines.append(
            f"Were all overlapped, compute would take as long as communication from {ridge:,.0f} tokens per device on "
            f"(here {tokens_per_device:,.0f})."
        )
    if forecast.fits is False:
        lines.append(DOES_NOT_FIT)
    if forecast.unknown_loops:
        lines.append(f"Counted once, as their length is unknown: {', '.join(map(str, forecast.unknown_loops))}.")
    if forecast.step_time:
        lines.append(HOW_NEAR)
    return lines + list(forecast.notes)


def _memory_table(forecast: Any) -> RenderableType:
    """Returns the table of bytes per device: arguments, outputs, temporaries, constants, the sum; host memory, if used.

    On a CPU, where the rest is unknown, only arguments and outputs are listed. A column has the fraction of the
    device's memory.
    """
    memory, available = forecast.memory, forecast.available_bytes
    counts = {
        "arguments (parameters, optimizer, batch)": memory.argument_bytes,
        "outputs with a place of their own": memory.output_bytes,
        "temporaries (activations, gathered weights, gradients)": memory.temporary_bytes,
        "constants and the program": memory.constant_bytes + forecast.code_bytes,
    }
    if forecast.platform == "cpu":
        counts = dict(list(counts.items())[:2])  # the others are unknown
    counts["in all"] = sum(counts.values())
    rows = [[name, format_bytes(size), f"{size / available:.1%}" if available else ""] for name, size in counts.items()]
    if forecast.host:
        rows.append(["in the memory of the host", format_bytes(forecast.host.stored_bytes), ""])
    return rich_table("Memory at the peak", ["", "per device", "of the memory"], rows)


def _temporaries_table(forecast: Any) -> RenderableType:
    """Returns the table of the temporaries that are live at the peak of memory, largest sum of bytes first.

    Temporaries of equal module, direction and shape share a row; a last row sums up the rest.
    """
    alike: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for temporary in forecast.memory.temporaries:
        alike[temporary.path or "(no module)", temporary.direction, _array(temporary.shape)].append(temporary.bytes)
    # Equal layers share a row, so a report has as many rows as a model has kinds of layers.
    ordered = sorted(alike.items(), key=lambda item: -sum(item[1]))
    rows = [
        [path, direction, f"{len(sizes)} {TIMES} {shape}" if len(sizes) > 1 else shape, format_bytes(sum(sizes))]
        for (path, direction, shape), sizes in ordered[:ROWS]
    ]
    if rest := sum(sum(sizes) for _, sizes in ordered[ROWS:]):
        rows.append([f"{len(ordered) - ROWS} more", "", "", format_bytes(rest)])
    return rich_table("Largest temporaries at the peak", ["module", "direction", "array", "per device"], rows, left=3)


def _axes_table(forecast: Any) -> RenderableType:
    """Returns the table of bytes that a device sends, by set of mesh axes: of weights, of activations, and other.

    If times are known, two columns have the time of the collectives without overlap and the step's wait.
    """
    rows = []
    for traffic in forecast.axis_traffic:
        sent = (traffic.weights, traffic.activations, traffic.other)
        times = [] if traffic.seconds is None else [traffic.seconds, traffic.waited_s]
        cells = ["+".join(traffic.axes) if traffic.axes is not None else "?"]
        rows.append([*cells, *(format_bytes(size) if size else "" for size in sent), *map(format_milliseconds, times)])
    # Either every row has times or no row, depending on the device's figures.
    timed = bool(rows) and len(rows[0]) > 4
    columns = ["axes", "weights", "activations", "other", *["takes", "waited"] * timed]
    return rich_table("Bytes that a device sends along each mesh axis", columns, rows)


def _collectives_table(forecast: Any) -> RenderableType:
    """Returns the table of collectives, most bytes first; equal collectives share a row.

    A row has the texts of ``_alike`` (kind, leaf or module, direction, dtype, axes), executions in a step, bytes sent
    per device, and the fraction sent asynchronously. For GPUs the row also has networks and bytes through network
    adapters, and the hidden fraction instead. After the first ``ROWS`` rows, a row sums up the rest; the last row has
    the sum of all.
    """
    ordered = _alike(forecast.collectives)
    rows = [[*key, *_counts(members, forecast.on_gpus)] for key, members in ordered[:ROWS]]
    if rest := [collective for _, members in ordered[ROWS:] for collective in members]:
        rows.append([f"{len(ordered) - ROWS} more", "", "", "", "", *_counts(rest, forecast.on_gpus)])
    rows.append(["in all", "", "", "", "", *_counts(forecast.collectives, forecast.on_gpus)])
    columns = ["collective", "for", "direction", "dtype", "axes"]
    numbers = ["per step", "sent per device", "async"]
    if forecast.on_gpus:
        columns, numbers = [*columns, "over"], ["per step", "sent", "by NIC", "hidden"]
    return rich_table("Collectives of a step", columns + numbers, rows, left=len(columns))


def _alike(collectives: Sequence[Collective]) -> list[tuple[tuple[str, ...], list[Collective]]]:
    """Groups collectives whose texts in a table are equal; the group that sends most bytes in a step comes first.

    Returns pairs (texts, collectives of the group). The five texts are kind, leaf or module, direction, dtype and mesh
    axes: ("all-gather", "head/kernel", "forward", "bf16", "fsdp").
    """
    alike: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for collective in collectives:
        kind = collective.kind + (f" (for {collective.stands_for})" if collective.stands_for else "")
        kind += " (of rows)" if collective.looks_up_rows else ""
        axes = "+".join(collective.axes) if collective.axes is not None else "?"
        alike[kind, _served(collective), collective.direction, collective.dtype, axes].append(collective)
    return sorted(alike.items(), key=lambda item: -sum_wire_bytes(item[1]))


def bars(forecast: Any) -> list[Bar]:
    """Returns a bar for each row of the table of collectives: the row's texts, and the bytes sent in a step.

    A bar is marked as a warning (orange) if the step waits for one of its collectives.
    """
    return [
        Bar(
            ", ".join(key),
            sent := sum_wire_bytes(members),
            f"{format_bytes(sent)}, {executions(members)} per step",
            any(collective.exposed_s for collective in members),
        )
        for key, members in _alike(forecast.collectives)
    ]


def _waiting_table(forecast: Any) -> RenderableType:
    """Returns the table of the ``ROWS`` collectives with the longest waits, longest first, with times per step.

    A row has the collective, the modules whose work overlaps the collective, the collective's time without overlap, the
    time of the overlapped work, and the step's wait; for GPUs also the part of the overlapped work in matrix products.
    """
    ordered = sorted(forecast.collectives, key=lambda c: (-c.count * (c.exposed_s or 0.0), -c.wire_bytes_per_step))
    rows = []
    for collective in ordered[:ROWS]:
        overlap = collective.overlapped
        modules = ", ".join(dict.fromkeys(module or NO_MODULE_LABEL for module in overlap.modules))
        products = [overlap.product_seconds] if forecast.on_gpus else []
        each = (collective.alone_s, overlap.seconds, *products, collective.exposed_s)
        times = [format_milliseconds(collective.count * seconds) if seconds is not None else "" for seconds in each]
        rows.append([collective.kind, _served(collective), collective.direction, modules or "nothing", *times])
    columns = ["collective", "for", "direction", "overlapped by", "takes", "overlap"]
    columns += [*["products"] * forecast.on_gpus, "waited"]
    return rich_table("Waits for collectives, and the work that overlaps them", columns, rows, left=4)


def _served(collective: Collective) -> str:
    """Returns a text for what a collective serves: the gathered leaf, else the module; "(no module)" without either.

    Several leaves, or several modules without a common parent, are given by their number; of the leaves the first few
    are named.
    """
    leaves, modules = (tuple(dict.fromkeys(names)) for names in (collective.leaves, collective.modules))
    if len(leaves) > 1:
        return f"{len(leaves)} leaves together: {', '.join(leaves[:NAMED])}{', ...' * (len(leaves) > NAMED)}"
    if leaves or collective.module or len(modules) < 2:
        return "".join(leaves) or collective.module or "(no module)"
    return f"{len(modules)} modules together"


def _array(shape: str) -> str:
    """Abbreviates a shape in HLO's notation: a tuple, such as a loop carry, becomes "tuple of 3 arrays".

    The shape of a single array is returned unchanged.
    """
    if not shape.startswith("("):
        return shape
    return f"tuple of {len(split_outside(shape[1:-1], ','))} arrays"


def _counts(members: Sequence[Collective], on_gpus: bool) -> list[str]:
    """Returns the numeric cells of a table row about several collectives, formatted as texts.

    In order: executions in a step, bytes sent, fraction of the bytes sent asynchronously. For GPUs: networks,
    executions, bytes sent, bytes through network adapters, hidden fraction of the bytes. "" where nothing is sent.
    """
    sent = sum_wire_bytes(members)
    hidden = sum_wire_bytes(c for c in members if (c.is_hidden if on_gpus else c.asynchronous))
    cells = [f"{executions(members):,}", format_bytes(sent), f"{hidden / sent:.0%}" if sent else ""]
    if not on_gpus:
        return cells
    timings = [(c.count, c.timing) for c in members if c.timing]
    networks = sorted({network for _, timing in timings for network in timing.networks})
    carried = sum(count * timing.nic_bytes for count, timing in timings)
    over = "".join(networks) if len(networks) < 2 else "both"
    return [over, *cells[:2], format_bytes(carried) if carried else "", cells[2]]


def _time_table(forecast: Any) -> RenderableType:
    """Returns the table of times: bounds at published rates, estimates, waits, and the step (least, expected, most).

    For a device without published figures the table has only the FLOP of matrix products.
    """
    flops, roofline, host = forecast.flops.total, forecast.roofline, forecast.host
    if roofline is None:
        return rich_table("Time", ["", "amount"], [["matrix products", f"{flops:.3g} FLOP"]])
    cycles = f"{forecast.cycles:,} cycles" if forecast.cycles else ""
    times: list[tuple[str, str, float | None]] = [
        ("matrix products at the peak rate", f"{flops:.3g} FLOP", roofline.compute_s),
        ("memory at its full bandwidth", format_bytes(roofline.hbm_bytes), roofline.memory_s),
        ("links at their full bandwidth", format_bytes(roofline.wire_bytes), roofline.wire_s),
        ("the compiler's estimate, without collectives", cycles, forecast.cycle_seconds),
        ("of it kernels of Pallas, at their roofline", "", forecast.pallas_seconds),
        ("each kernel at its roofline, one by one", "", forecast.kernel_seconds),
        ("the same by the rates that kernels reach", "", forecast.expected_kernel_seconds),
    ]
    if forecast.fill_excess_seconds:
        zeros = format_bytes(forecast.fills.written)
        times.append(("of it not expected: zero-fills slower than HBM", zeros, forecast.fill_excess_seconds))
    waits, count = forecast.wait_time, f"{executions(forecast.collectives):,} collectives"
    times += [
        ("waiting for collectives, by published rates alone", "", waits.least),
        ("waiting for collectives, expected", count, waits.expected),
        ("waiting for collectives, with every latency exposed", "", waits.most),
    ]
    if host:
        times += [
            ("to the host's memory and back, one by one", format_bytes(host.moved_bytes), host.seconds),
            ("waiting for it", f"{host.hidden_fraction:.0%} of it hidden", host.waited_s),
        ]
    least, expected, most = forecast.step_time
    times += [("a step, by published rates alone", "", least), ("a step, expected", "", expected)]
    times += [("a step, with every latency exposed", "", most)]
    rows = [[label, amount, format_milliseconds(seconds)] for label, amount, seconds in times if seconds is not None]
    return rich_table("Time of a step", ["", "amount", "time"], rows)


# -------------------------------------------------------------------------------------------------------------- picture


def plot(forecast: Any, path: str | Path) -> None:
    """Draws memory over the schedule, and the bounds of the time, to the image file ``path``.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures are drawn with matplotlib: {how_to_install('forecast')}.") from error
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    memory, time = figure.subplots(1, 2, width_ratios=(3, 2))
    _plot_memory(memory, forecast)
    _plot_time(time, forecast)
    figure.suptitle(f"{forecast.topology or forecast.device_kind}, mesh {forecast.axis_sizes}", fontsize=10)
    figure.savefig(path, dpi=130)


def _plot_memory(axes: "Axes", forecast: Any) -> None:
    """Draws the bytes in use over the schedule, coloured by direction, with module names below the axis.

    Without a timeline in the forecast, two bars: arguments, outputs and program; temporaries.
    """
    gib, memory = 2**30, forecast.memory
    base = (forecast.total_bytes - memory.temporary_bytes) / gib
    axes.set(ylabel="GiB per device", title="Memory", xticks=[])
    axes.set_xlabel("the schedule, by module", labelpad=16)
    if not memory.timeline:
        axes.bar(["arguments, outputs, program", "temporaries"], [base, memory.temporary_bytes / gib])
        return
    # Arguments and outputs are live all the time; temporaries are stacked on top, each moment up to the next.
    points = [moment.point for moment in memory.timeline]
    end, widths = points[-1], [after - point for point, after in pairwise([*points, points[-1] + 1])]
    axes.bar(0, base, end, align="edge", color="#d3d3d8", label="arguments, outputs, program")
    live = [moment.live_bytes / gib for moment in memory.timeline]
    owners = owners_of(memory.timeline)
    axes.bar(points, live, widths, base, align="edge", color=[COLORS[direction] for _, direction in owners])
    for direction in dict.fromkeys(direction for _, direction in owners):
        axes.bar(0, 0, color=COLORS[direction], label=direction)  # for the legend
    for name, middle in labels_below_axis(owners, points):
        axes.annotate(name, (middle, 0), fontsize=7, ha="center", textcoords="offset points", xytext=(0, -10))
    # A device may have far more memory than the step uses: the title names the limit, even if its line is out of view.
    axes.set_ylim(0, 1.25 * (base + memory.peak_live_bytes / gib))
    if available := forecast.available_bytes:
        axes.set_title(f"Memory, of {available / gib:.4g} GiB")
        axes.axhline(available / gib, color="black", linewidth=1, linestyle="--")
    axes.legend(fontsize=7, loc="upper right")


def owners_of(timeline: Sequence[Moment]) -> list[tuple[str, str]]:
    """Returns (top-level module, direction) of each moment of ``Memory.timeline``, in order.

    A moment without a module and with the direction "other" takes the pair of the moment before. But after the last
    moment in the forward or backward pass of a module the optimizer runs: there the pair stays ("", "other").
    """
    last = max((i for i, moment in enumerate(timeline) if moment.path and moment.direction != "other"), default=0)
    owners: list[tuple[str, str]] = []
    for i, moment in enumerate(timeline):
        owner = (moment.path.split("/")[0], moment.direction)
        owners.append(owners[-1] if owners and owner == ("", "other") and i < last else owner)
    return owners


def labels_below_axis(
    modules_and_directions: Sequence[tuple[str, str]], positions: Sequence[int]
) -> list[tuple[str, float]]:
    """Returns labels (module name, position), each at the middle of a run of the module, without overlaps.

    A run is a stretch of the axis with the same module and direction; recomputation counts as backward. Each pair of
    module and direction gets at most one label, so a name can appear twice, forward and backward. The label is at the
    longest run where the label overlaps no other; runs shorter than ``MIN_RUN_FRACTION`` of the axis get none.

    Args:
      modules_and_directions: (top-level module, direction) of each moment, as ``owners_of`` returns them.
      positions: ``positions[i]`` is the position of moment i in the schedule, ascending; the last is the axis's width.
    """
    # Recomputation alternates with the backward pass of the same module, so both share a name.
    labels_of_moments = [
        (module, "backward" if direction == "recompute" else direction) for module, direction in modules_and_directions
    ]
    starts = [i for i in range(len(labels_of_moments)) if i == 0 or labels_of_moments[i] != labels_of_moments[i - 1]]
    width = positions[-1]
    runs = [
        (positions[end] - positions[start], start, end)
        for start, end in pairwise([*starts, len(labels_of_moments) - 1])
    ]
    placed: dict[tuple[str, str], tuple[str, float]] = {}
    # The longest runs choose first.
    for length, start, end in sorted(runs, reverse=True):
        label = labels_of_moments[start]
        name, middle = label[0] or NO_MODULE_LABEL, (positions[start] + positions[end]) / 2
        # Labels overlap if their middles are closer than half the width of both and of two spaces between them.
        overlapping = [
            other_name
            for other_name, other_middle in placed.values()
            if abs(other_middle - middle) < width * (len(name) + len(other_name) + 2) / 2 / MAX_LABEL_CHARS
        ]
        if length > width * MIN_RUN_FRACTION and label not in placed and not overlapping:
            placed[label] = (name, middle)
    return list(placed.values())


def _plot_time(axes: "Axes", forecast: Any) -> None:
    """Draws bars for the times of a step: products, memory, links, kernels or cycles, and the step from least to most.

    For a device without published figures, a text instead.
    """
    roofline = forecast.roofline
    axes.set(title="Time of a step", xlabel="ms")
    if roofline is None:
        axes.text(0.5, 0.5, f"no figures are known for {forecast.device_kind}", ha="center", transform=axes.transAxes)
        return
    bars = {"matrix products": roofline.compute_s, "memory": roofline.memory_s, "links": roofline.wire_s}
    runs = "each kernel" if forecast.on_gpus else "compiler's cycles"
    least, expected, most = (seconds * 1e3 for seconds in forecast.step_time)
    bars |= {runs: forecast.expected_kernel_seconds or forecast.cycle_seconds or 0}
    colors = ["#4c78a8", "#72b7b2", "#e45756", "#9d9da1"]
    drawn = axes.barh(list(bars), [seconds * 1e3 for seconds in bars.values()], color=colors)
    axes.bar_label(drawn, fmt="%.3g", fontsize=8, padding=3)
    # The step is a range: a bar from the least to the largest time, with a line at the expected time.
    axes.barh("a step", most - least, left=least, color="#88d27a")
    axes.plot([expected, expected], [len(bars) - 0.4, len(bars) + 0.4], color="#1b5e20", linewidth=2)
    text = f"{least:.3g} to {most:.3g}, expected {expected:.3g}"
    axes.annotate(text, (0, len(bars)), (3, 0), textcoords="offset points", fontsize=8, va="center")
    axes.invert_yaxis()
    axes.margins(x=0.15)
