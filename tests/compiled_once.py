"""In-memory cache of the programs compiled by this process, for the test suite and the pages of the site.

Tests and pages create new functions of the same steps and models, and JAX compiles each function again. Programs are
not cached on disk, because programs for simulated devices are unsafe to load (docs/architecture.md).
"""

import hashlib
import re
from collections import OrderedDict
from functools import wraps

from jax._src import compiler

KEPT_PROGRAMS = 128
NAMED = re.compile(r'loc\("([^"]*/[^"]*"\(|[^"]*"\))')  # operations and arguments, not functions and lines


def keep_compiled_programs():
    """Installs the cache in JAX's compiler."""
    compiler.backend_compile_and_load = compiled_once(compiler.backend_compile_and_load)


def compiled_once(compile_module):
    """Wraps JAX's compile function with a cache of recent programs, which saves a seventh of a test worker's time."""
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
