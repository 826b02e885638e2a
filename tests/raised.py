"""Texts of the errors and warnings of the library, extracted from the source, with ``…`` for variable parts.

Also the first words of the messages listed in docs/troubleshooting.md.
"""

import ast
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "xlstm_jax"
HOLE = "…"
WARN = {"warnings.warn", "warn_user", "_warn"}
PAGE = PACKAGE.parent / "docs" / "troubleshooting.md"
ROW = re.compile(r"\*\*`([^`]+)`\*\*")
PASSED_ON = {"distributed/optimizers/elementwise.py:check": "_verdict"}  # the function whose text a thread passes on


class Message(NamedTuple):
    """Text of a ``raise`` in the lines ``line`` to ``end``; ``where`` is ``file.py:function``."""

    where: str
    line: int
    kind: str
    text: str
    end: int


@cache
def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def functions() -> dict[str, list[tuple[Path, ast.FunctionDef]]]:
    """Returns the functions and methods of the package by name."""
    found: dict[str, list[tuple[Path, ast.FunctionDef]]] = {}
    for path, tree in modules().items():
        waiting = deque([tree])
        while waiting:
            node = waiting.popleft()
            waiting.extend(_statements(node))
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append((path, node))
    return found


def _statements(node: ast.AST) -> list[ast.AST]:
    """Returns the statements directly within a module or a statement: most nodes are expressions, which are left out.

    Also the handlers of ``try`` and the cases of ``match``, which are no statements, and contain statements.
    """
    blocks = ("body", "handlers", "orelse", "finalbody", "cases")
    return [inner for block in blocks for inner in getattr(node, block, ())]


@cache
def constants(path: Path) -> dict[str, str]:
    """Returns the module-level and imported string constants of a file, by name."""
    found = {}
    for node in modules()[path].body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {target.id: str(node.value.value) for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
            there = PACKAGE.parent / f"{node.module.replace('.', '/')}.py"
            theirs = constants(there) if there in modules() else {}
            found |= {name.name: theirs[name.name] for name in node.names if name.name in theirs}
    return found


def texts(node: ast.AST, path: Path, around: ast.AST, depth: int = 0) -> list[str]:
    """Returns the possible texts of an expression; HOLE if the source does not determine the text."""
    if depth > 6:
        return [HOLE]
    deeper = (path, around, depth + 1)
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.JoinedStr(values=values):
            text = "".join(_part(value, path) for value in values)
            if is_read(text):
                return [text]
            inside = [[_part(v, path)] if isinstance(v, ast.Constant) else texts(v.value, *deeper) for v in values]
            return ["".join(parts) for parts in itertools.product(*inside)]  # what it says, others say
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in texts(left, *deeper) for b in texts(right, *deeper)]
        case ast.IfExp(body=body, orelse=orelse):
            return texts(body, *deeper) + texts(orelse, *deeper)
        case ast.Name(id=name):
            values = [n.value for n in ast.walk(around) if _assigns(n, name)]
            return [text for value in values for text in texts(value, *deeper)] or [constants(path).get(name, HOLE)]
        case ast.Call(func=function, args=args):
            name = ast.unparse(function).rsplit(".", 1)[-1]
            if args and (name[:1].isupper() or name == "next"):  # an exception, or the first that a function yields
                return texts(args[0], *deeper)
            return [text for where, made in _called(name, path) for text in _returned(made, where, depth)] or [HOLE]
    return [HOLE]


def _part(value: ast.AST, path: Path) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    inside = value.value if isinstance(value, ast.FormattedValue) else value
    return constants(path).get(inside.id, HOLE) if isinstance(inside, ast.Name) else HOLE


def _assigns(node: ast.AST, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return hasattr(node, "value") and any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _called(name: str, path: Path) -> list[tuple[Path, ast.FunctionDef]]:
    """Returns the functions called ``name``, preferably the function in the same file."""
    found = functions().get(name, [])
    return [one for one in found if one[0] == path] or found


def _returned(function: ast.FunctionDef, path: Path, depth: int) -> list[str]:
    returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return | ast.Yield) and node.value]
    return [text for value in returns for text in texts(value, path, function, depth + 1)]


@cache
def messages() -> tuple[Message, ...]:
    """Returns the messages of every ``raise`` and warning; HOLE for a text that the source does not determine."""
    return tuple(_messages())


def _messages() -> Iterator[Message]:
    for path, tree in modules().items():
        # A warning may be in an expression.
        inner = ast.iter_child_nodes if "warn" in path.read_text() else _statements
        for function, node in _raises(tree, tree, inner):
            where = f"{path.relative_to(PACKAGE)}:{getattr(function, 'name', '')}"
            if where in PASSED_ON:
                sayers = _called(PASSED_ON[where], path)
                kind, said = "raise", [text for there, sayer in sayers for text in _returned(sayer, there, 0)]
            elif isinstance(node, ast.Call):
                kind, said = "warning", texts(node.args[0], path, function)
            elif node.exc is None:
                kind, said = "raise", [HOLE]
            elif isinstance(node.exc, ast.Call):
                kind = ast.unparse(node.exc.func)
                made_by = kind.rsplit(".", 1)[-1] in functions()
                first = node.exc if made_by else (node.exc.args or [ast.Constant(HOLE)])[0]
                said = texts(first, path, function)
            else:
                kind, said = ast.unparse(node.exc), texts(node.exc, path, function)
            for text in dict.fromkeys([text for text in said if is_read(text)] or [HOLE]):
                yield Message(where, node.lineno, kind, text, node.end_lineno or node.lineno)


def is_read(text: str) -> bool:
    """Whether a text contains letters, and so is determined at least in part by the source."""
    return any(letter.isalpha() for letter in text)


def _raises(
    node: ast.AST, function: ast.AST, inner: Callable[[ast.AST], Iterable[ast.AST]]
) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yields each ``raise`` and each call of ``WARN`` within ``node``, with the innermost function around.

    ``inner`` returns the nodes directly within a node.
    """
    for child in inner(node):
        inside = child if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.Raise) or (isinstance(child, ast.Call) and ast.unparse(child.func) in WARN):
            yield inside, child
        yield from _raises(child, inside, inner)


# ------------------------------------------------------------------------------------------------------------ the page

# Where the source alone does not say the text, by ``file:function``, and why the page needs none.
EXCUSED = {
    "cli/command_line.py:_report": "goes on as it came: SIGTERM",
    "cli/command_line.py:end": "SIGTERM as an exception, which has no text",
    "distributed/checkpoint/errors.py:read": "caught by its caller, which says what was read",
    "distributed/checkpoint/writer.py:_open_lock_file": "goes on as it came: an error of the system",
    "distributed/checkpoint/orbax_backend.py:patient": "goes on as it came: orbax's own",
    "distributed/data_parallel/leaf.py:as_sharded": "an interface; subclasses have it",
    "distributed/data_parallel/leaf.py:replace": "an interface; subclasses have it",
    "distributed/data_parallel/leaf.py:replace_boxed": "an interface; subclasses have it",
    "distributed/data_parallel/extensions/pieces.py:from_shards": "an interface; modules have it",
    "distributed/data_parallel/wire/wire.py:wire": "an interface; formats have it",
    "distributed/data_parallel/wire/wire.py:itemsize": "an interface; formats have it",
    "distributed/data_parallel/wire/wire.py:nbytes": "an interface; formats have it",
    "distributed/data_parallel/wire/wire.py:mean_of_terms": "an interface; formats have it",
    "distributed/data_parallel/wire/wire.py:mean_error": "an interface; formats have it",
    "distributed/data_parallel/modules/linen_module.py:inside_unit": "goes on as it came: Flax's own",
    "forecast/compiling/child.py:make_mesh": "goes on as it came: the compiler's own",
    "forecast/compiling/compile.py:_export": "goes on as it came: JAX's own",
    "forecast/compiling/report_cache.py:_unusable": "becomes a part of one warning, or of ``problem``",
    "forecast/compiling/report_cache.py:_write_whole": "goes on as it came: an error of the system",
    "forecast/training/workload.py:explaining_init": "goes on as it came: the user's code's own",
    "forecast/training/linting/lint.py:raise_if": "its text is the findings, which docs/lint.md has by rule",
    "distributed/plan/planning.py:_planned_init": "goes on as it came: the model's own",
    "distributed/plan/section.py:entries": "an interface; sections have it",
    "distributed/plan/section.py:table": "an interface; sections have it",
    "distributed/plan/section.py:from_json": "an interface; sections have it",
    "distributed/processes/store.py:read": "goes on as it came: the coordination service's own",
    "distributed/processes/collective_errors.py:interruptions_go_on": "goes on as it came: Ctrl-C, or the work's error",
    "distributed/processes/collective_errors.py:raise_on_all": "goes on as it came: the texts of all processes, joined",
    "distributed/resilience/loop_guard.py:__exit__": "goes on as it came: the loop's own",
    "distributed/training/batch_axes.py:__getattr__": "the protocol of attributes",
    "distributed/training/moments.py:__getattr__": "the protocol of attributes",
    "distributed/training/moments.py:_run": "goes on as it came: JAX's own",
    "distributed/training/moments.py:called": "goes on as it came: JAX's own",
    "distributed/training/single_axes.py:called": "goes on as it came: JAX's own",
    "distributed/training/state.py:init_sharded": "goes on as it came: JAX's own",
    "distributed/training/carries/carry.py:from_inputs": "an interface; carries have it",
    "distributed/training/carries/carry.py:start": "an interface; carries have it",
    "distributed/training/carries/carry.py:next": "an interface; carries have it",
    "distributed/training/carries/carry.py:finish": "an interface; carries have it",
    "distributed/training/replay/replayed_step.py:__getattr__": "the protocol of attributes",
    "distributed/training/step_check/recording.py:__getattr__": "the protocol of attributes",
    "distributed/training/mistakes.py:_warn": "its callers have the text",
    "introspection.py:warn_user": "its callers have the text",
    "distributed/training/nan_inputs.py:naming_nans": "goes on as it came: JAX's own",
    "distributed/training/gradients.py:explained": "goes on as it came: the loss function's own",
    "distributed/training/state.py:updated_state": "goes on as it came: the optimizer's own",
}


@cache
def heads() -> list[str]:
    """Returns the first words of the messages listed on the page."""
    return [" ".join(row.split()) for row in ROW.findall(PAGE.read_text())]


def begins(text: str, head: str) -> bool:
    """Whether a message starts with ``head``; a head of at most 3 letters must be the full message."""
    text = _on_one_line(text)
    return text.startswith(head) if _letters(head) > 3 else text.rstrip(".") == head


@cache
def _on_one_line(text: str) -> str:
    return " ".join(text.split())


@cache
def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def excused(said: Message) -> bool:
    """Whether the source does not determine the text of a message, with a reason in EXCUSED."""
    return said.where in EXCUSED and not is_read(said.text)
