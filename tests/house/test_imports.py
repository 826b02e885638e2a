"""Tests of what an import of the library loads: counted in modules, since seconds depend on the machine."""

import json
import subprocess
import sys
import types
from functools import cache

import pytest

import xlstm_jax.distributed
from xlstm_jax import deferred
from xlstm_jax.distributed import data_parallel, device_mesh, metrics, training

# A new process, in which each part imports more than the one before, and prints what the tests read.
PROCESS = """
import json, sys
import xlstm_jax
found = {"names": dir(xlstm_jax), "before": sorted(sys.modules)}

import jax, flax, optax, flax.linen
before = set(sys.modules)
import xlstm_jax.distributed
found["new"] = sorted(set(sys.modules) - before)

import jax.numpy as jnp
from flax import linen as nn
from xlstm_jax.distributed import (
    check_step, create_fsdp_mesh, create_train_state, gather_params, make_eval_step, make_train_step, plan_sharding,
    shard_module_params, shard_modules, shard_params, simulate_cpu_devices, sync_gradients,
)
from xlstm_jax.distributed.data_parallel import gather_array_with_mean_grads
from xlstm_jax.distributed.metrics import WeightedMean

simulate_cpu_devices(2)
mesh, key = create_fsdp_mesh(), jax.random.key(0)
model = shard_modules(nn.Sequential([nn.Embed(16, 8), nn.Dense(8)]), (nn.Embed, nn.Dense), min_weight_size=0)
x = jnp.ones((4, 2), jnp.int32)

def loss_fn(params, apply_fn, batch, rng):
    return jnp.mean(apply_fn({"params": params}, batch) ** 2)

state = create_train_state(model, optax.sgd(1e-3), mesh, key, x)
plan_sharding(model, dict(mesh.shape), x)
step = make_train_step(loss_fn, mesh)
state, metrics = step(state, x, key)
assert check_step(step, state, x, key).ok
found |= {"trained": bool(metrics["loss"] > 0), "nnx": "flax.nnx" in sys.modules}

assert callable(xlstm_jax.forecast.forecast)
try:
    xlstm_jax.hardware
except AttributeError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""

# Packages that take long to import, and are needed by a part of the programs: ``flax.nnx`` imports treescope, and
# treescope IPython where it is installed.
HEAVY = "IPython asyncio chex etils flax.nnx matplotlib orbax safetensors tensorstore treescope".split()
# What the library may load beside itself, jax, flax, optax, and Python's standard library.
FURTHER = {"flax", "jax", "pygments", "rich", "xlstm_jax"}
MOST_MODULES = 200  # 183 in JAX 0.12 and Flax 0.12.12; with ``flax.nnx`` and all of the library 426
# Parts of the library that many programs do without.
LATER = "checkpoint model_parallel.nnx_splitting resilience training.replay training.step_check".split()


@cache
def in_a_new_process():
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def within(module, package):
    return module == package or module.startswith(f"{package}.")


def test_import_of_distributed_loads_few_modules_and_no_heavy_package():
    new = in_a_new_process()["new"]
    assert not [module for module in new for package in HEAVY if within(module, package)]
    others = {module.partition(".")[0] for module in new} - FURTHER
    assert not others - sys.stdlib_module_names, "add the package to FURTHER if each training needs it"
    assert not [module for module in new for part in LATER if within(module, f"xlstm_jax.distributed.{part}")]
    assert len(new) <= MOST_MODULES
    assert "xlstm_jax.distributed.training.step" in new  # guard: the names of a training are there


def test_training_with_linen_never_imports_nnx():
    found = in_a_new_process()
    assert found["trained"] and not found["nnx"]


def test_dir_lists_subpackages_before_import():
    found = in_a_new_process()
    assert found["names"] == ["__version__", "cli", "distributed", "forecast"]
    assert "xlstm_jax" in found["before"] and not [name for name in found["before"] if name.startswith("xlstm_jax.d")]
    assert "no attribute 'hardware'" in found["error"]


@pytest.mark.parametrize(
    ("face", "name"),
    [
        (xlstm_jax.distributed, "Checkpointer"),
        (xlstm_jax.distributed, "LoopGuard"),
        (xlstm_jax.distributed, "check_step"),
        (xlstm_jax.distributed, "create_nnx_module"),
        (xlstm_jax.distributed, "nnx_model"),
        (xlstm_jax.distributed, "nnx_value_and_grad"),
        (data_parallel, "NnxModel"),
        (device_mesh, "DataParallel"),
        (metrics, "DistributedMetrics"),
        (training, "StepCheck"),
        (training, "nnx_value_and_grad"),
        (training, "replayed"),
    ],
    ids=lambda part: part if isinstance(part, str) else part.__name__.rpartition(".")[2],
)
def test_face_imports_a_name_when_it_is_read(face, name):
    vars(face).pop(name, None)
    assert getattr(face, name).__name__ == name
    assert name in vars(face)  # kept: the second read calls no Python
    with pytest.raises(AttributeError, match=f"module '{face.__name__}' has no attribute '{name}s'"):
        getattr(face, f"{name}s")


def test_face_has_its_subpackages_before_they_are_imported():
    for name in ("checkpoint", "resilience"):
        vars(xlstm_jax.distributed).pop(name, None)
        assert getattr(xlstm_jax.distributed, name) is sys.modules[f"xlstm_jax.distributed.{name}"]


def test_modules_of_nnx_are_imported_once_nnx_is_used(monkeypatch):
    loaded = []
    monkeypatch.setattr(deferred, "importlib", types.SimpleNamespace(import_module=loaded.append))
    monkeypatch.setattr(deferred, "_waiting", [])
    monkeypatch.setattr(deferred, "_nnx_is_used", False)
    deferred.import_with_nnx("first")
    assert loaded == []
    deferred.import_for_nnx()
    deferred.import_with_nnx("second")
    assert loaded == ["first", "second"]
    deferred.import_for_nnx()
    assert loaded == ["first", "second"]  # each once
