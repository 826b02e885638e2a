"""Two processes with four devices each train, replay and publish under ``jax.set_mesh`` as one device does."""

import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from tests.ports import reserved_port
from tests.processes.test_processes import ROOT, finished
from tests.set_mesh_process import SEED, TX, Net, errors, loss_fn, rows
from tests.support import FLOAT32_ROUNDING
from xlstm_jax.distributed import import_safetensors
from xlstm_jax.distributed.checkpoint import apply_publication
from xlstm_jax.distributed.data_parallel.trees import path_string


def run(kind, folder, count=2):
    port = reserved_port()
    started = []
    for rank in range(count):
        command = [sys.executable, "-m", "tests.set_mesh_process", kind, str(folder), str(rank), str(count), str(port)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), **pipes))
    return finished(started)


def of_one_device(batch):
    """Returns the losses of four steps, the standard deviation of the rows' errors after two, and the parameters."""
    model = Net()
    params = jax.jit(model.init)(jax.random.key(SEED), batch["x"])["params"]
    opt_state, losses, deviation = TX.init(params), [], None
    for step in range(4):
        if step == 2:
            deviation = np.std(np.float64(errors(params, model.apply, batch)["values"]))
        loss, grads = jax.value_and_grad(loss_fn)(params, model.apply, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, deviation, params


@pytest.mark.parametrize("kind", ["explicit", "mixed"])
def test_two_processes_train_evaluate_resume_and_publish_under_a_set_mesh_as_one_device(kind, tmp_path):
    processes = run(kind, tmp_path)
    losses, deviation, params = of_one_device(rows())
    for process in processes:
        assert process["devices"] == 8
        np.testing.assert_allclose(process["losses"], losses, rtol=FLOAT32_ROUNDING)
        np.testing.assert_allclose(process["deviation"], deviation, rtol=1e-5)
        assert process["type"] == "float32[8,16@fsdp]" and process["resharded"] == "float32[8,16]"
        assert process["product"] == "float32[2,16@fsdp]"
        assert (process["replays"], process["published"]) == (2, [1, 2])
    _, arrays = apply_publication({}, tmp_path / "published")
    for path, value in jax.tree.leaves_with_path(import_safetensors(tmp_path / "exported", params)):
        want = params[path[0].key][path[1].key]
        np.testing.assert_allclose(value, want, rtol=FLOAT32_ROUNDING, atol=1e-6)
        np.testing.assert_array_equal(arrays[path_string(path)], np.asarray(value) / 2)
    half = {name: array[:8] for name, array in rows().items()}
    assert not np.allclose(of_one_device(half)[0], losses, rtol=0.1)  # guard: the processes' rows differ
