"""Measures of size and coupling of the library: ``python -m tests.measures`` prints a table.

Two rows measure size. The remaining rows measure coupling: the files entered by the smallest training (two ``Dense``
layers over one axis), the number of files that refer to a feature (``tests/deletion/features.py``), the lines to read
to understand a step, the files that read frames and closures of other libraries, and the features that can be deleted.
``python -m benchmarks.compile_time`` measures the cost of tracing and dispatch of a step compared with ``jit``.
"""

import ast
import dataclasses
import itertools
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[1] / "xlstm_jax"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def module_of(path: Path, root: Path = PACKAGE.parent) -> str:
    """Returns the dotted name of a module of the library in a tree with root ``root``."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def sources() -> dict[Path, str]:
    """Reads the source text of each file of the library."""
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def code_lines(text: str) -> int:
    """Counts the lines without blank lines, comment lines, docstrings and imports."""
    other: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            other |= set(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node) is not None:
            other |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in other for n, line in lines)


def cycles_of_entries(package: Path = PACKAGE) -> list[list[str]]:
    """Returns the import cycles between entries (files or folders) of a folder, for every folder of the package.

    Imports may be indirect. Imports of an ``__init__.py`` do not count as imports between entries of its folder.
    """
    files = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in package.rglob("*.py")}
    arrows = {
        (path, files[module])
        for path in files.values()
        for name in names_imported(path.read_text())
        for module in (name, name.rpartition(".")[0])
        if module in files
    }
    found = []
    folders = {parent for path in files.values() for parent in path.parents if package in (parent, *parent.parents)}
    for folder in folders:
        graph: dict[str, set[str]] = {}
        for ends in arrows:
            if all(folder in end.parents for end in ends):
                here, there = (end.relative_to(folder).parts[0] for end in ends)
                if here != there and "__init__.py" not in (here, there):
                    graph.setdefault(here, set()).add(there)
        reached = {entry: _reached(graph, entry) for entry in graph}
        circles = {frozenset(o for o in reached[e] if e in reached.get(o, ())) for e in graph if e in reached[e]}
        found += [[str(folder.relative_to(package.parent)), *sorted(circle)] for circle in circles]
    return sorted(found)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = graph.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


@cache
def parsed(source: str) -> ast.Module:
    """Returns the syntax tree of a source text, parsed once."""
    return ast.parse(source)


def names_imported(source: str) -> Iterator[str]:
    """Yields the full name of every import in a source text, also inside functions."""
    nodes: list[ast.AST] = [parsed(source)]
    for node in nodes:  # grows
        nodes += [inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.expr)]
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from [f"{module}{alias.name}" for alias in node.names]


def calls(run: Callable[[], Any], values: tuple[Any, ...] = ()) -> list[CodeType]:
    """Returns the library functions that ``run`` calls, in call order.

    With ``values``, returns only functions that receive a value of ``values``: as an argument, in a tuple, or in an
    attribute of an object.
    """
    seen: list[CodeType] = []

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if not values or any(_has(frame.f_locals.get(name), values) for name in names):
                seen.append(code)

    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def _has(argument: Any, values: tuple[Any, ...], depth: int = 2) -> bool:
    """Whether an argument is, or contains, a value of ``values``; for example a ``StepCall`` contains a tuple."""
    if any(argument is value for value in values):
        return True
    is_object = dataclasses.is_dataclass(argument) and not isinstance(argument, type)
    inner = argument if isinstance(argument, tuple) else getattr(argument, "__dict__", {}).values() if is_object else ()
    return depth > 0 and any(_has(one, values, depth - 1) for one in inner)


def climbs(run: Callable[[], Any], *values: Any) -> int:
    """Counts how often ``values`` are passed back to a file that received them before, via a different file."""
    files = [file for file, _ in itertools.groupby(code.co_filename for code in calls(run, values=values))]
    return len(files) - len(set(files))


# The files that a reader needs for a step, in reading order.
WAY = (
    "wire/wire",
    "wire/communication",
    "store",
    "leaf",
    "modules/unit",
    "modules/linen_module",
    "../training/gradients",
    "../training/step",
)
FOREIGN = re.compile(r"_getframe|f_locals|__closure__|getclosurevars|cell_contents|parent_trace")


def lines_on_the_way() -> int:
    """Counts the lines of code in the files that lead a parameter through a step (``WAY``)."""
    core = PACKAGE / "distributed" / "data_parallel"
    return sum(code_lines((core / f"{name}.py").resolve().read_text()) for name in WAY)


def of_the_source() -> dict[str, float]:
    """Returns the rows that are computed from the source."""
    from tests.deletion.features import FEATURES, NOT_YET, WITHOUT_ROW

    texts = sources()
    knowing = {feature.name: feature.known_in(feature.without_own(texts)) for feature in FEATURES}
    most = max(knowing, key=lambda name: knowing[name])
    return {
        "files": len(texts),
        "lines of code": sum(map(code_lines, texts.values())),
        f"files beside a feature's own that name the feature, the most: {most}": knowing[most],
        "files beside a feature's own that name the feature, median": statistics.median(knowing.values()),
        f"lines of code on the way, in {len(WAY)} files": lines_on_the_way(),
        "files that read frames, closures, traces of others": sum(
            bool(FOREIGN.search(text)) for text in texts.values()
        ),
        "calls of `leaf_of`": sum(text.count("leaf_of(") for text in texts.values()),
        "features that can be deleted": len([feature for feature in FEATURES if feature.name not in NOT_YET]),
        "features that cannot": len(NOT_YET) + len(WITHOUT_ROW),
        "cycles between entries of a folder": len(cycles_of_entries()),
        "context variables": sum(len(re.findall(r"= (?:contextvars\.)?ContextVar\b", text)) for text in texts.values()),
    }


class Smallest(NamedTuple):
    """The smallest training: functions to make its state, to trace it, and to make a step with arguments; the model."""

    make_state: Callable[[], Any]
    training: Callable[[], Any]
    model: Any
    step_and_arguments: Callable[[], tuple[Any, tuple[Any, ...]]]


def smallest() -> Smallest:
    """Returns the smallest training: two ``Dense`` layers, an axis, AdamW, on eight simulated devices."""
    from xlstm_jax.distributed import simulate_cpu_devices

    simulate_cpu_devices(8)
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn

    from xlstm_jax.distributed import DeviceMeshManager, create_train_state, make_train_step, shard_modules

    mesh = DeviceMeshManager.create_device_mesh({"fsdp": jax.device_count()})
    model = shard_modules(nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(64)]), nn.Dense, "fsdp", min_weight_size=0)
    batch = jnp.ones((8, 64))

    def loss(params: Any, apply_fn: Any, batch: Any, rng: Any) -> Any:
        del rng
        return jnp.mean(apply_fn({"params": params}, batch) ** 2)

    def make_state() -> Any:
        return create_train_state(model, optax.adamw(1e-3), mesh, jax.random.key(0), batch, batch_axes=("fsdp",))

    def step_and_arguments() -> tuple[Any, tuple[Any, ...]]:
        step = make_train_step(loss, mesh, batch_axes=("fsdp",))
        return step, (make_state(), batch, jax.random.key(1))

    def training() -> None:
        make_train_step(loss, mesh, batch_axes=("fsdp",)).lower(make_state(), batch, jax.random.key(1))

    return Smallest(make_state, training, model, step_and_arguments)


def of_what_runs() -> dict[str, float]:
    """Returns the rows that are measured by tracing the smallest training on eight simulated devices."""
    from xlstm_jax.distributed.training import moments
    from xlstm_jax.forecast import forecast

    make_state, training, model, step_and_arguments = smallest()
    entered = calls(training)
    checks, moments.CHECKS[:] = list(moments.CHECKS), []
    unchecked = calls(training)
    moments.CHECKS[:] = checks
    up = climbs(make_state, model)
    step, arguments = step_and_arguments()
    return {
        "files that the smallest training enters": len({code.co_filename for code in entered}),
        "functions that it enters": len(set(entered)),
        "calls": len(entered),
        "files without the table of checks": len({code.co_filename for code in unchecked}),
        "functions without the table of checks": len(set(unchecked)),
        "calls without the table of checks": len(unchecked),
        "climbs of `model` through `create_train_state`": up,
        "climbs of a step and its arguments through `forecast`": climbs(
            lambda: forecast(step, *arguments), step, *arguments
        ),
    }


def main() -> None:
    print("| measure | today |\n| --- | ---: |")
    for name, value in (of_the_source() | of_what_runs()).items():
        print(f"| {name} | {value:,} |")


if __name__ == "__main__":
    main()
