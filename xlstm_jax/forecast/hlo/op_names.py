"""Module and direction of an operation, parsed from JAX's name of the operation.

JAX names every operation by the scopes in which it was traced, Linen adds a scope per module, and compilers keep the
name as ``op_name``:

    jit(step)/shard_map/transpose(jvp(M))/while/body/closed_call/checkpoint/blocks/blocks.project/up/dot_general
                        |__ backward  |   |__ a scan's loop body       |   |                      |__ blocks/up
                                      |__ the root's class             |__ nn.remat

``module_path`` returns the module part of a parameter's path, "blocks/up", and the direction. The rest of the name
differs between releases: "closed_call" in one release is "eval_jaxpr" in the next. Operations that a loop adds around
its modules (storing activations, gathering weights) have no module in their names. ``module_paths`` reads the names of
the full program and assigns such operations to the common module of the loop.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable

from xlstm_jax.forecast.hlo.text import split_outside
from xlstm_jax.program_names import GATHER_SCOPE, LOOKUP_SCOPE, PACK_SCOPES, UNBALANCED_SCOPE

FORWARD, BACKWARD, RECOMPUTE, OTHER = "forward", "backward", "recompute", "other"

# Scopes that are no modules: JAX's scopes around the body of a call, and the library's scopes.
CALLS = {"shard_map", "call_exported", "closed_call", "eval_jaxpr", "core_call", "core_closed_call", "custom_jvp_call"}
CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "checkpoint", "rematted_computation"}
CALLS |= {GATHER_SCOPE, LOOKUP_SCOPE, "sync_gradients", UNBALANCED_SCOPE, *PACK_SCOPES}
LOOP_PARTS = re.compile(r"(body|cond)(_pred)?$")
BRANCH = re.compile(r"branch_\d+_fun$")
TRANSFORM = re.compile(r"(jvp|transpose|vmap)\((.*)\)$", re.DOTALL)
CALL_OF = re.compile(r"(jit|pjit)\(.*\)$", re.DOTALL)
METHOD = re.compile(r"(.+)\.([A-Za-z_]\w*)$")
CLASS = re.compile(r"(?!.*_\d+$)[A-Z]\w*$")
ARGUMENT = re.compile(r"\[\\?'")  # state.params['head']['kernel'], in HLO text with its quotes escaped


def in_shard_map(op_name: str) -> bool:
    """Returns whether an operation is inside of ``shard_map``, by JAX's name of the operation; shapes are local there.

    >>> in_shard_map("jit(step)/shard_map/jvp(GPT)/head/dot_general"), in_shard_map("jit(step)/vmap()/dot_general")
    (True, False)
    """
    return "shard_map" in op_name


def module_path(op_name: str) -> tuple[str, str]:
    """Returns (module path, direction) of an operation, parsed from JAX's name of the operation.

    >>> module_path("jit(step)/transpose(jvp(GPT))/while/body/closed_call/checkpoint/blocks/blocks.add/up/dot_general")
    ('blocks/up', 'backward')

    Args:
      op_name: name from ``metadata={op_name="..."}`` of HLO text, with the primitive at the end; or a jaxpr's name
        stack, "/" and the primitive. Several names may be joined by ";": the first counts.
    Returns:
      path: the modules below the root, as in a parameter's path; "" outside of modules. Left out are
        - the primitive (the last part), ``jit(f)``, ``shard_map``, loops and branches, remat and custom-derivative
          calls, formulas of einsum, and the library's scopes, such as ``gather_params`` and ``sync_gradients``;
        - transformations: ``jvp(X)``, ``transpose(X)`` and ``vmap(X)`` become X;
        - the root, and everything before the root, such as a scope around the loss. The root is the first scope with a
          class name (``GPT``, not ``Dense_0``). A root with a lower-case class name stays in the path;
        - methods: ``blocks.project`` becomes ``blocks`` and is merged with ``blocks`` around or inside of it.
        A scope opened by the model with ``jax.named_scope`` looks like a module and stays.
      direction:
        "recompute"  computed a second time by ``nn.remat``, in the backward pass;
        "backward"   other transposed operations, and the averaging of gradients by ``sync_gradients``;
        "forward"    differentiated operations, and in a program without differentiation, operations in a module;
        "other"      the rest: the optimizer, arguments, operations that the compiler added or whose names lack the
          beginning.
    """
    # A copy of an argument has the argument's name, which looks like a path but is in no module.
    if ARGUMENT.search(op_name):
        return "", OTHER
    scopes, transforms = _scopes(op_name.split(";")[0])
    names = _module_names(scopes)
    # Names of Linen's modules begin with a small letter, or end in a number: a class name without a number is the root.
    root = next((i for i, name in enumerate(names) if CLASS.match(name)), -1)
    path = "/".join(names[root + 1 :])
    if "rematted_computation" in scopes:
        return path, RECOMPUTE
    if "transpose" in transforms or "sync_gradients" in scopes:
        return path, BACKWARD
    in_module = bool(path) and op_name.startswith(("jit(", "pjit("))
    return path, FORWARD if "jvp" in transforms or in_module else OTHER


def module_paths(op_names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns {operation name: (module path, direction)} for the operation names of a program.

    The path is that of the module below the root, such as "blocks/up"; the direction "forward", "backward", "recompute"
    or "other": the result of ``module_path``. With one exception: an operation without a module, but in a loop, takes
    the common path of the loop's operations. An operation in the body of a loop (``nn.scan``) whose other operations
    are in "blocks" or below belongs to "blocks".
    """
    path_of = {name: module_path(name) for name in op_names}
    inside = defaultdict(list)
    for name, (path, _) in path_of.items():
        for loop in _loops(name) if path else ():
            inside[loop].append(path)
    # The common path of a loop's operations is the module around the loop, or the module of the loop's body.
    common = {loop: common_path(paths) for loop, paths in inside.items()}
    lent = {name: next((common[loop] for loop in _loops(name) if common.get(loop)), "") for name in path_of}
    return {name: (path or lent[name], direction) for name, (path, direction) in path_of.items()}


def common_path(paths: Iterable[str]) -> str:
    """Returns the longest common beginning of several module paths, in full components; "" if there is none.

    "blocks/up" and "blocks/unit" have "blocks" in common.
    """
    steps = zip(*(path.split("/") for path in paths), strict=False)
    return "/".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, steps))


def _loops(op_name: str) -> list[str]:
    """Returns a name for each loop around an operation, innermost loop first; [] for an operation outside of loops.

    The name of a loop is the part of ``op_name`` up to the loop's "while", without calls such as "jit(f)". For
    "jit(f)/while/body/closed_call/while/body/add" the result is ["while/body/while", "while"]. If ``op_name`` is the
    name of a loop itself, this loop is included.
    """
    parts = split_outside(op_name.split(";")[0], "/", "()")
    remaining = [part for part in parts if part not in CALLS and not CALL_OF.match(part)]
    ends = [i + 1 for i, part in enumerate(remaining) if part == "while"]
    return ["/".join(remaining[:end]) for end in reversed(ends)]


def _scopes(op_name: str) -> tuple[list[str], set[str]]:
    """Splits JAX's name of an operation into scopes, and returns (scopes, names of the transformations around scopes).

    Transformations are unwrapped, and the primitive at the end is left out: "jit(f)/transpose(jvp(M))/up/dot_general"
    becomes (["jit(f)", "M", "up"], {"transpose", "jvp"}). A last part such as "jit(g)" or "vmap(a)" is no primitive and
    is kept as a scope.
    """
    parts, transforms = split_outside(op_name, "/", "()"), set()
    if not (TRANSFORM.match(parts[-1]) or CALL_OF.match(parts[-1])):
        parts = parts[:-1]
    scopes = []
    for part in parts:
        inner = [part]
        # Transformations nest, transpose(jvp(M)), and may hold a whole path: vmap(a/b).
        while len(inner) == 1 and (match := TRANSFORM.match(inner[0])):
            transforms.add(match[1])
            inner = split_outside(match[2], "/", "()")
        scopes += inner
    return [scope for scope in scopes if scope], transforms


def _module_names(scopes: list[str]) -> list[str]:
    """Returns the names of modules among the scopes of an operation, outermost first; a method counts as its module.

    Left out are calls, loops, branches, scopes of the library, and the second copy of a path that JAX writes twice.
    Example: ["jit(f)", "M", "blocks", "blocks.project", "up"] is ["M", "blocks", "up"].
    """
    path: list[str] = []
    for before, scope, after in zip(["", *scopes], scopes, [*scopes[1:], ""], strict=False):
        if scope == "checkpoint":
            # In a backward pass JAX writes the path of an `nn.remat` twice: the repeated end is dropped.
            lengths = range(len(path) // 2, 0, -1)
            repeated = next((n for n in lengths if path[-n:] == path[-2 * n : -n]), 0)
            path = path[: len(path) - repeated]
        if scope in CALLS or CALL_OF.match(scope) or "->" in scope or _is_control_flow(before, scope, after):
            continue
        method = METHOD.match(scope)
        # For a method of a module that is already in the path (blocks.project within blocks), the scopes below the
        # method belong to the module.
        if method and method[1] in path:
            path = path[: len(path) - path[::-1].index(method[1])]
        elif not before.startswith(f"{scope}."):
            path.append(method[1] if method else scope)
    return path


def _is_control_flow(before: str, scope: str, after: str) -> bool:
    """Returns whether ``scope``, a part of an operation name, is part of JAX's control flow instead of a module.

    Control flow is ``while/body``, ``while/cond`` and ``cond/branch_0_fun``. ``before`` and ``after`` are the
    neighbouring scopes, "" at the ends. Beside other neighbours "while", "body" and "cond" are names of modules, and
    the result is False.
    """
    if scope == "while":
        return bool(LOOP_PARTS.match(after))
    if before == "while" and LOOP_PARTS.match(scope):
        return True
    return bool(BRANCH.match(scope)) if before == "cond" else scope == "cond" and bool(BRANCH.match(after))
