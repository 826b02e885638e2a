"""A Sphinx extension: each page runs in a fork of the process that builds the site.

Jupyter starts a new interpreter for each page, which imports JAX, Flax and optax again. The build has imported them
already, to read docstrings, and a fork has what its parent imported. A fork does not have its parent's threads, so the
build itself must not ask JAX for a device: that would start them.

Pages initialise the same small models and draw the same numbers, so a page reads from a folder what another has
compiled. Programs that communicate are not kept there: read from a disk, simulated devices may wait for each other in
them (docs/architecture.md).
"""

import gc
import hashlib
import logging
import multiprocessing
import os
import re
import shutil
import warnings
from functools import wraps
from pathlib import Path

import flax.linen  # noqa: F401  what pages import is imported here, once
import jax
import matplotlib.pyplot  # noqa: F401
import optax  # noqa: F401
from ipykernel.kernelapp import IPKernelApp
from jax._src import compiler
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

import xlstm_jax.forecast  # noqa: F401
from tests.compiled_once import digest_of, keep_compiled_programs

PROGRAMS = Path(__file__).parent / "_build" / "programs"  # of this build
COMMUNICATES = re.compile(r"\b(all-|reduce-scatter|collective-)")


class ForkedProvisioner(LocalProvisioner):
    """Starts a kernel by a fork. Jupyter talks to it as to any other, through the sockets that a file names."""

    async def launch_kernel(self, cmd, *, cwd, env, **kwargs):
        del kwargs
        assert not jax._src.xla_bridge.backends_are_initialized()
        gc.freeze()  # what is there already: else each collection of the fork looks at all of it, and copies its pages
        self.process = _Process(target=_serve, args=(cmd[cmd.index("-f") + 1], cwd, env))
        self.process.start()
        self.pid, self.cwd = self.process.pid, cwd
        return self.connection_info

    async def send_signal(self, signum):
        """To the kernel and to the processes that it has started, as these are its group."""
        os.killpg(self.pid, signum)


class _Process(multiprocessing.get_context("fork").Process):
    """With what a provisioner asks of a ``subprocess.Popen``."""

    stdin = stdout = stderr = None

    def poll(self):
        return self.exitcode

    def wait(self):
        self.join()
        return self.exitcode


def _serve(sockets, cwd, env):
    """The kernel's life, with the surroundings that a new interpreter would have."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= env
    logging.root.handlers.clear()
    warnings.filterwarnings("ignore", "IProgress not found")  # tqdm would draw its bars by widgets
    jax._src.pretty_printer.CAN_USE_COLOR = True  # JAX looks for a notebook only while it is imported
    compiler.backend_compile_and_load = shared_by_pages(compiler.backend_compile_and_load)
    keep_compiled_programs()
    IPKernelApp.launch_instance(argv=["-f", sockets, f"--IPKernelApp.parent_handle={os.getppid()}"])


def shared_by_pages(compile_module):
    """Returns JAX's function that compiles, which first looks for what another page has compiled."""

    @wraps(compile_module)
    def compiled(backend, module, devices, options, callbacks):
        if callbacks:
            return compile_module(backend, module, devices, options, callbacks)
        surroundings = os.environ["XLA_FLAGS"], backend.device_count(), [device.id for device in devices]
        file = PROGRAMS / hashlib.sha256(repr((digest_of(module, options), *surroundings)).encode()).hexdigest()
        if file.exists():
            return backend.deserialize_executable(file.read_bytes(), devices, options)
        program = compile_module(backend, module, devices, options, callbacks)
        if not COMMUNICATES.search(program.hlo_modules()[0].to_string()):
            unfinished = file.with_name(f"{os.getpid()}.unfinished")
            unfinished.write_bytes(program.serialize())
            unfinished.rename(file)
        return program

    return compiled


def forget_programs(app):
    """Another compiler, or another processor, may have made those of an earlier build."""
    del app
    shutil.rmtree(PROGRAMS, ignore_errors=True)
    PROGRAMS.mkdir(parents=True)


class _EntryPoint:
    """Jupyter finds provisioners as entry points of installed packages."""

    load = staticmethod(lambda: ForkedProvisioner)


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", forget_programs)
    KernelProvisionerFactory.provisioners["forked"] = _EntryPoint()
    os.environ[KernelProvisionerFactory.default_provisioner_name_env] = "forked"
    return {"parallel_read_safe": True}
