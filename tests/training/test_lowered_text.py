"""Tests that training steps lower to the recorded text: a refactoring of the library changes no program.

A digest of each text is recorded per set of package releases; on other releases the comparison is skipped. To find a
change, write the texts on two commits and compare; for an intended change record new digests, on the oldest and the
newest JAX:

    python -m tests.training.test_lowered_text runs/before
    python -m tests.training.test_lowered_text runs/after
    diff -r runs/before runs/after
"""

import hashlib
import json
import sys
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import jax
import optax
import pytest

from tests.support import AXES, Model, data, fsdp, mean_loss, mesh_of, weighted_loss
from xlstm_jax.distributed import Replicas, abstract_train_state, make_train_step
from xlstm_jax.distributed.metrics import WeightedMean

KEPT = Path(__file__).parents[1] / "lowered_texts.json"
RELEASES = ", ".join(f"{package} {metadata.version(package)}" for package in ("jax", "flax", "optax"))


def observed_loss(params, apply_fn, batch, rng):
    total, weight = weighted_loss(params, apply_fn, batch, rng)
    return total / weight, {"values": total / weight, "weight": weight}


CASES = {
    # every wrapper over two axes in stages, gathers and scatters in bfloat16, the scan's layers gathered again
    "scan": (
        partial(Model, fsdp(axis_name=AXES, gather_dtype="bfloat16", grad_scatter_dtype="bfloat16"), remat=True),
        mean_loss,
        {},
    ),
    # copies of the shards, padding, the library's remat policy; minibatches that gather and scatter once; weights
    "replicas": (
        partial(Model, fsdp(replicas=Replicas("dp"), uneven="pad", reshard_after_forward=True), scan=False),
        weighted_loss,
        {"num_minibatches": 2, "accumulation": "reduce_once", "weighted": True, "check_vma": False},
    ),
    "metric": (partial(Model, fsdp()), observed_loss, {"metric": WeightedMean()}),
}


@cache
def lowered(case):
    """Returns the StableHLO text of the step, which names no file and no function of the library."""
    make_model, loss_fn, options = CASES[case]
    mesh, batch = mesh_of(2, 4), data()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-3))
    state = abstract_train_state(make_model(), tx, mesh, jax.random.key(0), batch["x"], batch_axes=AXES)
    step = make_train_step(loss_fn, mesh, batch_axes=AXES, **options)
    last = [options["metric"].empty(AXES, mesh)] if "metric" in options else []
    return step.lower(state, batch, jax.random.key(1), *last).as_text()


def digest(case):
    return hashlib.sha256(lowered(case).encode()).hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_train_step_lowers_to_text_with_the_recorded_digest(case):
    kept = json.loads(KEPT.read_text())
    if RELEASES not in kept:
        pytest.skip(f"digests are recorded for {'; '.join(kept)}, and this is {RELEASES}")
    assert digest(case) == kept[RELEASES][case], (
        "the lowered program changed; this file's docstring explains how to find the difference"
    )


def test_guard_digests_of_lowered_text_differ_between_cases():
    """Guard: each case has a different digest."""
    assert len({digest(case) for case in CASES}) == len(CASES)


if __name__ == "__main__":
    import conftest  # simulates the devices

    del conftest
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        (folder / f"{name}.mlir").write_text(lowered(name))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    KEPT.write_text(json.dumps(kept | {RELEASES: {name: digest(name) for name in CASES}}, indent=2) + "\n")
