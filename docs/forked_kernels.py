"""Sphinx extension that runs each page in a fork of the process that builds the site.

Jupyter starts a new interpreter for each page, which imports JAX, Flax and optax again. The build has imported these
libraries already, to read docstrings, and a fork inherits the imports. A fork does not inherit threads, so the build
must not request a JAX device, which would start threads.

Pages initialise the same small models and draw the same numbers, so pages share compiled programs in a folder.
Programs that communicate are excluded: loaded from a disk, simulated devices may deadlock (docs/architecture.md).
"""

import asyncio
import gc
import hashlib
import logging
import multiprocessing
import os
import re
import shutil
import signal
import sys
import warnings
from functools import wraps
from pathlib import Path

import flax.linen  # noqa: F401  imported once, before the forks
import jax
import matplotlib.pyplot  # noqa: F401
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
from ipykernel.kernelapp import IPKernelApp
from jax._src import compiler
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

import xlstm_jax.forecast  # noqa: F401
from tests.compiled_once import digest_of

PROGRAMS = Path(__file__).parent / "_build" / "programs"  # of this build
COMMUNICATES = re.compile(r"\b(all-|reduce-scatter|collective-)")


class ForkedProvisioner(LocalProvisioner):
    """Starts a kernel by a fork. Jupyter communicates through the sockets that a file names, as with any kernel."""

    async def launch_kernel(self, cmd, *, cwd, env, **kwargs):
        del kwargs
        assert not jax._src.xla_bridge.backends_are_initialized()
        gc.freeze()  # exempts existing objects: else collections of the fork scan them, and copy their pages
        self.process = _Process(target=_serve, args=(cmd[cmd.index("-f") + 1], cwd, env))
        self.process.start()
        self.pid, self.cwd = self.process.pid, cwd
        return self.connection_info

    async def send_signal(self, signum):
        """Sends the signal to the process group: the kernel and its child processes."""
        os.killpg(self.pid, signum)


class _Process(multiprocessing.get_context("fork").Process):
    """Process with the methods of ``subprocess.Popen`` that a provisioner calls."""

    stdin = stdout = stderr = None

    def poll(self):
        return self.exitcode

    def wait(self):
        self.join()
        return self.exitcode


def _serve(sockets, cwd, env):
    """Runs the kernel in the environment of a new interpreter."""
    # In Python 3.11 a fork keeps the parent's event loop, and the socket that wakes this loop: a page's SIGTERM would
    # end the build's connection to the page. Later releases reset both in a fork.
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(asyncio.new_event_loop())
    signal.set_wakeup_fd(-1)
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= env
    logging.root.handlers.clear()
    warnings.filterwarnings("ignore", "IProgress not found")  # else tqdm draws widgets
    sys.modules["debugpy"] = None  # the kernel imports the debugger otherwise, though no page is debugged
    jax._src.pretty_printer.CAN_USE_COLOR = True  # JAX detects a notebook only at import
    compiler.backend_compile_and_load = shared_by_pages(compiler.backend_compile_and_load)
    IPKernelApp.launch_instance(argv=["-f", sockets, f"--IPKernelApp.parent_handle={os.getppid()}"])


def shared_by_pages(compile_module):
    """Returns JAX's compile function with a lookup of programs compiled by this page and by other pages."""
    kept = {}

    @wraps(compile_module)
    def compiled(backend, module, devices, options, callbacks):
        if callbacks:
            return compile_module(backend, module, devices, options, callbacks)
        surroundings = os.environ["XLA_FLAGS"], backend.device_count(), [device.id for device in devices]
        name = hashlib.sha256(repr((digest_of(module, options), *surroundings)).encode()).hexdigest()
        if (backend, name) not in kept:
            kept[backend, name] = from_disk_or_compiled(PROGRAMS / name, backend, module, devices, options)
        return kept[backend, name]

    def from_disk_or_compiled(file, backend, module, devices, options):
        if file.exists():
            return backend.deserialize_executable(file.read_bytes(), devices, options)
        program = compile_module(backend, module, devices, options, [])
        if not COMMUNICATES.search(program.hlo_modules()[0].to_string()):
            unfinished = file.with_name(f"{os.getpid()}.unfinished")
            unfinished.write_bytes(program.serialize())
            unfinished.rename(file)
        return program

    return compiled


def forget_programs(app):
    """Deletes programs of earlier builds, which another compiler or processor may have made."""
    del app
    shutil.rmtree(PROGRAMS, ignore_errors=True)
    PROGRAMS.mkdir(parents=True)


class _EntryPoint:
    """Entry point of the provisioner, as Jupyter finds provisioners of installed packages."""

    load = staticmethod(lambda: ForkedProvisioner)


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", forget_programs)
    KernelProvisionerFactory.provisioners["forked"] = _EntryPoint()
    os.environ[KernelProvisionerFactory.default_provisioner_name_env] = "forked"
    return {"parallel_read_safe": True}
