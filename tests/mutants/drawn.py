"""Random mutations, drawn from all small changes of these kinds in the library.

    compare    < becomes <=, == becomes !=, is becomes is not, in becomes not in, and back
    bound      an integer is larger or smaller by one
    axis       axis=0 becomes axis=-1, axis=1 becomes axis=0; a name of an axis becomes another name
    dtype      float32 becomes bfloat16, int32 becomes int16, ...
    call       a statement that calls is left out; f(x, ...) and x.f(...) become x
    logic      and becomes or, not x becomes x, the condition of an if is negated
    swap       two neighbouring arguments that are both names, or both attributes, change places
    none       a returned value becomes None

``python -m tests.mutants`` draws the same number of each kind, with the commit as seed, and runs each mutation against
tests that enter the changed function (``tests/cover/matrix.txt``), the shortest first.

Changes without effect, or of a text for people alone, are not drawn: docstrings, strings and f-strings, annotations,
decorators, defaults of arguments; statements that raise, assert, warn, log or print; ``__repr__`` and functions that
return a table of rich; ``xlstm_jax/cli``, and the files of reports and tables (``SKIPPED``); code that runs at import;
conversions such as ``tuple(x)`` are not left out. Functions that no test enters in the test's process are counted, and
not drawn.

A survivor without visible effect goes into ``judged.txt``, with the reason, and is not drawn again:

    # distributed/optimizers/norms.py: global_norm     file and function, as in the list of survivors
    - if size > 1:                                     the changed lines, without indentation
    + if size >= 1:
    = of one device the sum is the value               why the change is invisible
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.commit import commit_hash
from tests.mutants.catalogue import JUDGED, ROOT

KINDS = ("compare", "bound", "axis", "dtype", "call", "logic", "swap", "none")
# Files of texts for people, below xlstm_jax/; and code that runs before tests.
SKIPPED = (
    "cli/",
    "formatting.py",
    "equations.py",
    "quiet_import.py",
    "private_names.py",
    "forecast/report.py",
    "forecast/compiling/side_by_side.py",
    "distributed/plan/table.py",
    "distributed/training/step_check/report.py",
)
TEXT_FUNCTIONS = re.compile(r"__repr__|__str__|__rich\w*|_repr_\w*|\w*_message|\w*_table|_?described?\w*|_cure")
TEXT_RESULTS = re.compile(r"\b(RenderableType|RenderResult|Table|Text|Group|Console)\b")
TELLS = re.compile(r"(^|\.)(_?warn\w*|print|log|debug|info|warning|error|add_note)$")
# Calls that fail at once, or change nothing relevant, if replaced by their first argument.
CONVERSIONS = set(
    "str repr tuple list dict set frozenset int float bool len isinstance issubclass hasattr getattr setattr callable "
    "type iter next range enumerate zip map filter cast open partial vars id hash super min max sum any all".split()
)
COMPARED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
DTYPES = {
    "float64": "float32",
    "float32": "bfloat16",
    "bfloat16": "float32",
    "float16": "bfloat16",
    "int64": "int32",
    "int32": "int16",
    "int16": "int32",
    "int8": "int16",
    "uint64": "uint32",
    "uint32": "uint16",
    "uint8": "int8",
}
AXIS_KEYWORDS = {"axis", "dim", "dimension", "scatter_dimension", "split_axis", "concat_axis", "in_axes", "out_axes"}
AXIS_NAMES = re.compile(r"^(axis|axes|\w+_axis|\w+_axes)$")
NO_BOUNDS = {"stacklevel", "indent", "maxsize", "timeout", "timeout_s", "digits", "width"}  # keywords


@dataclass(frozen=True)
class Drawn:
    """Mutation that replaces the bytes ``start`` to ``end`` of the file at ``path`` by ``text``."""

    path: str
    function: str
    kind: str
    line: int
    start: int
    end: int
    text: str
    before: str  # the changed lines, without indentation
    after: str

    stays = ""  # as in a mutation of the catalogue

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.kind} in {self.function}"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The identity of the mutation across commits."""
        return self.path.removeprefix("xlstm_jax/"), self.function, self.before, self.after

    def mutated(self, source: str) -> str:
        code = source.encode()
        return (code[: self.start] + self.text.encode() + code[self.end :]).decode()

    def __str__(self) -> str:
        path, function, before, after = self.key
        lines = [f"- {line}" for line in before.split("\n")] + [f"+ {line}" for line in after.split("\n")]
        return "\n".join([f"# {path}: {function}", *lines])


class _Finder(ast.NodeVisitor):
    """Collects the mutations of one file."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.code = path, source.encode()
        self.found: list[Drawn] = []
        self.modules = {"self", "cls"}
        self.scope: list[str] = []
        self.functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self.starts = [0]  # of each line, in bytes
        for line in self.code.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    # Places and texts

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.code[start:end].decode()

    def _add(self, kind: str, start: int, end: int, text: str) -> None:
        if not self.functions or self.code[start:end].decode() == text:
            return
        line = next(number for number in range(len(self.starts) - 1, 0, -1) if self.starts[number - 1] <= start)
        first = self.starts[line - 1]
        last = next(begun for begun in [*self.starts, len(self.code)] if begun >= end)

        def stripped(code: bytes) -> str:
            return "\n".join(part.strip() for part in code.decode().rstrip("\n").split("\n"))

        before = stripped(self.code[first:last])
        after = stripped(self.code[first:start] + text.encode() + self.code[end:last])
        self.found.append(Drawn(self.path, ".".join(self.scope), kind, line, start, end, text, before, after))

    # Visited nodes

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        for part in node.body:
            self.visit(part)
        self.scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        result = ast.unparse(node.returns) if node.returns else ""
        if TEXT_FUNCTIONS.fullmatch(node.name) or TEXT_RESULTS.search(result):
            return
        self.scope.append(node.name)
        self.functions.append(node)
        for part in node.body:
            self.visit(part)
        self.functions.pop()
        self.scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def _skip(self, node: ast.AST) -> None:
        """Skips texts for people, and invariants."""

    visit_Raise = visit_Assert = visit_JoinedStr = _skip  # noqa: N815

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.modules |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not self._tells(node.value):
            self._add("call", *self._span(node), "pass")
            self._swaps(node.value)
            self.generic_visit(node.value)

    def _tells(self, node: ast.Call) -> bool:
        return bool(TELLS.search(ast.unparse(node.func)))

    # The kinds

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            start, end = self._span(left)[1], self._span(right)[0]
            before, after = COMPARED[type(operator)]
            between = self.code[start:end].decode()
            self._add("compare", start, end, between.replace(before, after, 1))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int and abs(node.value) < 1000:
            for other in (node.value + 1, node.value - 1):
                self._add("bound", *self._span(node), f"({other})" if other < 0 else str(other))

    def visit_keyword(self, node: ast.keyword) -> None:
        axis = _integer(node.value)
        if node.arg in AXIS_KEYWORDS and axis is not None:
            self._add("axis", *self._span(node.value), str(-1 if axis == 0 else 0))
            if axis == 0:
                self._add("axis", *self._span(node.value), "1")
        elif node.arg not in NO_BOUNDS:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and AXIS_NAMES.match(node.id) and self.functions:
            for other in sorted(
                name for name in _bound(self.functions[-1]) if AXIS_NAMES.match(name) and name != node.id
            ):
                self._add("axis", *self._span(node), other)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in DTYPES:
            end = self._span(node)[1]
            self._add("dtype", end - len(node.attr), end, DTYPES[node.attr])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._tells(node):
            return
        if inner := self._wrapped(node):
            self._add("call", *self._span(node), f"({self._text(inner)})")
        self._swaps(node)
        self.generic_visit(node)

    def _wrapped(self, node: ast.Call) -> ast.expr | None:
        """Returns the argument or object that replaces the call.

        ``x`` of ``f(x, ...)``, ``module.f(x)`` and ``self.f(x)``, and of ``x.f(...)``.
        """
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in CONVERSIONS or name.lstrip("_")[:1].isupper():  # a class
            return None
        if isinstance(node.func, ast.Attribute):
            root: ast.expr = node.func
            while isinstance(root, ast.Attribute):
                root = root.value
            if not (isinstance(root, ast.Name) and root.id in self.modules):
                return node.func.value
        first = node.args[0] if node.args else None
        return None if isinstance(first, ast.Starred | ast.GeneratorExp) else first

    def _swaps(self, node: ast.Call) -> None:
        for one, other in zip(node.args, node.args[1:], strict=False):
            is_known = ast.unparse(node.func) in CONVERSIONS
            if type(one) is type(other) and isinstance(one, ast.Name | ast.Attribute) and not is_known:
                start, end = self._span(one)[0], self._span(other)[1]
                between = self.code[self._span(one)[1] : self._span(other)[0]].decode()
                self._add("swap", start, end, self._text(other) + between + self._text(one))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for one, other in zip(node.values, node.values[1:], strict=False):
            start, end = self._span(one)[1], self._span(other)[0]
            self._add("logic", start, end, self.code[start:end].decode().replace(before, after, 1))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("logic", *self._span(node), f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        if not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)):
            self._add("logic", *self._span(node.test), f"not ({self._text(node.test)})")
        self.generic_visit(node)

    visit_IfExp = visit_If  # noqa: N815

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add("none", *self._span(node.value), "None")
        self.generic_visit(node)


def _bound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Returns the names of a function's arguments and assigned variables, without variables of comprehensions."""
    nodes = list(ast.walk(function))
    inner = {
        name
        for node in nodes
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name)
    }
    names = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in inner
    }
    arguments = function.args
    return names | {arg.arg for arg in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}


def _integer(node: ast.expr) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _integer(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def mutations_of(path: str, source: str) -> list[Drawn]:
    """Returns the mutations of a file that compile."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return [drawn for drawn in finder.found if _compiles(drawn.mutated(source))]


def _compiles(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def files() -> list[str]:
    """Returns the paths of the library's files that mutations are drawn from."""
    paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "xlstm_jax").rglob("*.py"))
    return [path for path in paths if not path.removeprefix("xlstm_jax/").startswith(SKIPPED)]


def draw(
    count: int, seed: int, functions: Collection[tuple[str, str]], only: str = ""
) -> tuple[list[Drawn], dict[str, int]]:
    """Returns a set of mutations, the same number of each kind, and the counts of functions that tests enter or miss.

    Args:
      count: how many mutations; fewer if the library has fewer.
      seed: reproduces a draw on the same library.
      functions: file below xlstm_jax/ and name of the functions that tests enter.
      only: a text in the paths of the files.
    """
    chance = random.Random(seed)
    judged_keys = {key for key, _ in judged()}
    # Each function has the same chance, whatever its length.
    by_kind: dict[str, dict[tuple[str, str], list[Drawn]]] = {kind: defaultdict(list) for kind in KINDS}
    entered, not_entered = set(), set()
    for path in files():
        if only not in path:
            continue
        source = (ROOT / path).read_text()
        finder = _Finder(path, source)
        finder.visit(ast.parse(source))
        for drawn in finder.found:
            function = path.removeprefix("xlstm_jax/"), drawn.function
            (entered if function in functions else not_entered).add(function)
            if function in functions and drawn.key not in judged_keys:
                by_kind[drawn.kind][function].append(drawn)
    chosen: list[Drawn] = []
    kinds = [kind for kind in KINDS if by_kind[kind]]
    while kinds and len(chosen) < count:
        for kind in list(kinds):
            function = chance.choice(sorted(by_kind[kind]))
            some = by_kind[kind][function]
            drawn = some.pop(chance.randrange(len(some)))
            if not some:
                del by_kind[kind][function]
            if not by_kind[kind]:
                kinds.remove(kind)
            if len(chosen) < count and _compiles(drawn.mutated((ROOT / drawn.path).read_text())):
                chosen.append(drawn)
    return chosen, {"entered": len(entered), "not entered": len(not_entered)}


def seed_of_commit() -> int:
    """Returns a number derived from the commit; 0 outside of a repository."""
    return int(commit_hash()[:8] or "0", 16)


@cache
def judged() -> list[tuple[tuple[str, str, str, str], str]]:
    """Returns the survivors without effect, by ``Drawn.key``, each with the reason."""
    found = []
    path = function = ""
    before: list[str] = []
    after: list[str] = []
    for line in _lines(JUDGED):
        sign, _, rest = line.partition(" ")
        if sign == "#":
            path, _, function = rest.partition(": ")
        elif sign == "-":
            before.append(rest)
        elif sign == "+":
            after.append(rest)
        elif sign == "=":
            found.append(((path, function, "\n".join(before), "\n".join(after)), rest))
            before, after = [], []
        elif line:
            raise ValueError(f"{JUDGED}: {line!r} begins with none of # - + =.")
    return found


def stale(entries: Sequence[tuple[tuple[str, str, str, str], str]]) -> Iterator[str]:
    """Yields the judged survivors that are no mutations of the current library."""
    by_path = defaultdict(set)
    for path in {key[0] for key, _ in entries}:
        file = ROOT / "xlstm_jax" / path
        if file.exists():
            by_path[path] = {drawn.key for drawn in mutations_of(f"xlstm_jax/{path}", file.read_text())}
    for key, _ in entries:
        if key not in by_path[key[0]]:
            yield f"{key[0]}: {key[1]}: {key[2]}"


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
