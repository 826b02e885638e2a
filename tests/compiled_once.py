"""Keeps compiled programs of this process, for the test suite and for the pages of the site.

Tests and pages make new functions of the same steps and models, and JAX compiles each of them. Nothing is read from a
disk, where programs for simulated devices are not safe (docs/architecture.md).
"""

import hashlib
import re
from collections import OrderedDict
from functools import wraps

from jax._src import compiler

KEPT_PROGRAMS = 128
NAMED = re.compile(r'loc\("([^"]*/[^"]*"\(|[^"]*"\))')  # operations and arguments, not functions and lines


def keep_compiled_programs():
    """Has JAX keep the last programs that this process has compiled."""
    compiler.backend_compile_and_load = compiled_once(compiler.backend_compile_and_load)


def compiled_once(compile_module):
    """Returns JAX's function that compiles, with the last programs kept: a seventh of a test worker's time."""
    kept = OrderedDict()

    @wraps(compile_module)
    def compiled(backend, module, devices, options, callbacks):
        key = backend, devices, digest_of(module, options)
        if callbacks or key not in kept:
            program = compile_module(backend, module, devices, options, callbacks)
            if callbacks:
                return program
            kept[key] = program
        kept.move_to_end(key)
        while len(kept) > KEPT_PROGRAMS:
            kept.popitem(last=False)
        return kept[key]

    return compiled


def digest_of(module, options):
    """Returns a name that two programs share if they compute the same, with the same names of operations."""
    names = NAMED.findall(module.operation.get_asm(enable_debug_info=True))
    return hashlib.sha256("\n".join([str(module), *names]).encode() + options.SerializeAsString()).hexdigest()
