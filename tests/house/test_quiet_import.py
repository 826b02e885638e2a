"""Tests of imports on a machine with CUDA's plugin and without a GPU: no message about a GPU."""

import subprocess
import sys

import jax
import pytest

from xlstm_jax.distributed.processes import devices
from xlstm_jax.quiet_import import NOISY_RELEASE

ON_CPUS = "from xlstm_jax.distributed import simulate_cpu_devices as s; s(2); import jax; print(jax.device_count())"


def run(code, *, to_stderr="2>&2"):
    command = ["sh", "-c", f'exec "$0" -c "$1" {to_stderr}', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout, done.stderr


def test_library_import_before_jax_writes_no_line_to_stderr():
    if not devices._has_only_cpus():
        pytest.skip("this machine may have an accelerator")
    assert run(ON_CPUS) == ("2\n", "")


@pytest.mark.cuda_plugin
@pytest.mark.skipif(not jax.__version__.startswith(NOISY_RELEASE), reason="later releases are silent")
def test_jax_import_without_the_library_prints_the_cuda_warning():
    _, errors = run("import jax")
    assert "Could not find cuda drivers" in errors


def test_library_import_works_with_a_closed_stderr():
    assert run(ON_CPUS, to_stderr="2>&-")[0] == "2\n"


WITHIN = """
import os, sys
from xlstm_jax.quiet_import import stderr_without
try:
    with stderr_without([b"noise"]):
        os.write(2, b"one\\nthe noise of C++\\n")
        print("two", file=sys.stderr)
        raise ImportError("three")
except ImportError as error:
    print(error, file=sys.stderr)
"""


def test_stderr_without_keeps_other_lines_in_order_and_passes_on_exceptions():
    assert run(WITHIN) == ("", "one\ntwo\nthree\n")
