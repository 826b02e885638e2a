"""What an older version wrote is read: ``kept/forecast-0.1.json`` is the forecast of a step with an unknown loop."""

import json
from pathlib import Path

from xlstm_jax.distributed.forecast import Forecast

KEPT = Path(__file__).parents[1] / "kept"


def test_a_kept_forecast_is_read_with_all_that_it_says():
    text = (KEPT / "forecast-0.1.json").read_text()
    found, data = Forecast.from_json(text), json.loads(text)
    assert found.unknown_loops == ("jit(step)/shard_map/jvp()/while",)
    assert [c.kind for c in found.collectives] == [c["kind"] for c in data["collectives"]] != []
    assert found.memory.argument_bytes == data["memory"]["argument_bytes"] > 0
    not_in_0_1 = {"expected_kernel_seconds", "host", "kernel_seconds", "packed", "pallas_seconds", "shared_flops"}
    not_in_0_1 |= {"step_time"}
    assert json.loads(found.to_json()).keys() - data.keys() == not_in_0_1
    assert json.loads(found.to_json()).keys() > data.keys() and found.kernel_seconds is None
    assert found.wire_bytes == sum(found.wire_bytes_by("kind", "direction").values()) > 0
