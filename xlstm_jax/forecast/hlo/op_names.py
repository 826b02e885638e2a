"""The module that an operation serves, read from the name that JAX gave it.

JAX names every operation by the scopes it was traced in, Linen adds one scope per module, and compilers keep it as
``op_name``:

    jit(step)/shard_map/transpose(jvp(M))/while/body/closed_call/checkpoint/blocks/blocks.project/up/dot_general
                        |__ backward  |   |__ a scan's loop body       |   |                      |__ blocks/up
                                      |__ the root's class             |__ nn.remat

``module_path`` gives what a parameter's path would show, "blocks/up", and the direction. The rest of the name differs
between releases: one writes "closed_call" where the next writes "eval_jaxpr". What a loop does around its modules
(storing activations, gathering weights) has no module in its name; ``module_paths`` sees the names of the whole
program, and assigns such an operation to the module that all of the loop belongs to.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable

from xlstm_jax.forecast.hlo.text import split_outside
from xlstm_jax.program_names import GATHER_SCOPE, LOOKUP_SCOPE, PACK_SCOPES, UNBALANCED_SCOPE

FORWARD, BACKWARD, RECOMPUTE, OTHER = "forward", "backward", "recompute", "other"

# Scopes that JAX puts around the body of a call, and those of this library: no modules.
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
    """Whether an operation stands inside of ``shard_map``, where it is one device's.

    >>> in_shard_map("jit(step)/shard_map/jvp(GPT)/head/dot_general"), in_shard_map("jit(step)/vmap()/dot_general")
    (True, False)
    """
    return "shard_map" in op_name


def module_path(op_name: str) -> tuple[str, str]:
    """(path, direction) of an operation.

    >>> module_path("jit(step)/transpose(jvp(GPT))/while/body/closed_call/checkpoint/blocks/blocks.add/up/dot_general")
    ('blocks/up', 'backward')

    Args:
      op_name: as in ``metadata={op_name="..."}`` of HLO text, the primitive at its end; or a jaxpr's name stack with
        "/" and the primitive behind it. Of several names joined by ";" the first counts.
    Returns:
      path: the modules below the root, as in a parameter's path; "" outside of all. Left out are
        - the primitive (the last part), ``jit(f)``, ``shard_map``, loops and branches, remat and custom-derivative
          calls, einsum's formulas, and the library's own scopes, as ``gather_params`` and ``sync_gradients``;
        - transformations: ``jvp(X)``, ``transpose(X)`` and ``vmap(X)`` stand for X;
        - the root, and all before it, such as a scope around the loss. The root is the first scope with the name of a
          class (``GPT``, not ``Dense_0``). A root whose class starts with a small letter stays in the path;
        - methods: ``blocks.project`` inside of ``blocks`` is ``blocks``, and so is ``blocks`` inside of it.
        A scope that the model opens itself with ``jax.named_scope`` looks like a module and stays.
      direction:
        "recompute"  what ``nn.remat`` computes a second time, in the backward pass;
        "backward"   the rest of what is transposed, and the averaging of gradients by ``sync_gradients``;
        "forward"    what is differentiated, and in a program that differentiates nothing, what lies in a module;
        "other"      the rest: the optimizer, arguments, what the compiler made up or left the beginning of the name
                     out of.
    """
    # Instructions that copy an argument bear its name, which looks like a path and is in no module.
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
    """``module_path`` of all names of a program; operations in a loop may take the module of the loop.

    An operation without a module, in the body of a loop (``nn.scan``) whose other operations all lie in "blocks" or
    below, serves "blocks".
    """
    own = {name: module_path(name) for name in op_names}
    inside = defaultdict(list)
    for name, (path, _) in own.items():
        for loop in _loops(name) if path else ():
            inside[loop].append(path)
    # What all operations of a loop have in common is the module around the loop, or that of its body.
    common = {loop: common_path(paths) for loop, paths in inside.items()}
    lent = {name: next((common[loop] for loop in _loops(name) if common.get(loop)), "") for name in own}
    return {name: (path or lent[name], direction) for name, (path, direction) in own.items()}


def common_path(paths: Iterable[str]) -> str:
    """The longest path that all of ``paths`` begin with."""
    steps = zip(*(path.split("/") for path in paths), strict=False)
    return "/".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, steps))


def _loops(op_name: str) -> list[str]:
    """The names, without calls, of the loops that an operation is in, innermost first; a loop is in itself.

    "jit(f)/while/body/closed_call/while/body/add" is in "while/body/while" and in "while".
    """
    parts = split_outside(op_name.split(";")[0], "/", "()")
    kept = [part for part in parts if part not in CALLS and not CALL_OF.match(part)]
    ends = [i + 1 for i, part in enumerate(kept) if part == "while"]
    return ["/".join(kept[:end]) for end in reversed(ends)]


def _scopes(op_name: str) -> tuple[list[str], set[str]]:
    """All scopes but the primitive, without transformations; and the transformations."""
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
    """The scopes that are modules; a method counts as its module."""
    path: list[str] = []
    for before, scope, after in zip(["", *scopes], scopes, [*scopes[1:], ""], strict=False):
        if scope == "checkpoint":
            # In a backward pass JAX writes the path of a `nn.remat` twice: the repeated end goes.
            lengths = range(len(path) // 2, 0, -1)
            repeated = next((n for n in lengths if path[-n:] == path[-2 * n : -n]), 0)
            path = path[: len(path) - repeated]
        if scope in CALLS or CALL_OF.match(scope) or "->" in scope or _is_control_flow(before, scope, after):
            continue
        method = METHOD.match(scope)
        # A method of a module that is already in the path, blocks.project within blocks: what lies below belongs to the
        # module.
        if method and method[1] in path:
            path = path[: len(path) - path[::-1].index(method[1])]
        elif not before.startswith(f"{scope}."):
            path.append(method[1] if method else scope)
    return path


def _is_control_flow(before: str, scope: str, after: str) -> bool:
    """Whether a scope belongs to ``while/body``, ``while/cond`` or ``cond/branch_0_fun``, and is no module."""
    if scope == "while":
        return bool(LOOP_PARTS.match(after))
    if before == "while" and LOOP_PARTS.match(scope):
        return True
    return bool(BRANCH.match(scope)) if before == "cond" else scope == "cond" and bool(BRANCH.match(after))
