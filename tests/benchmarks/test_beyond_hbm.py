"""Tests in small of the benchmark of memory beyond HBM: cases, table, picture."""

import io
import json

import pytest
from rich.console import Console

from benchmarks import beyond_hbm
from benchmarks.cases import SIZES

FIGURES = {"arguments": 2**31, "temporaries": 2**30, "total": 3 * 2**30, "available": 2**34, "fits": True, "wire": 1e9}
FIGURES |= {"host": 0, "host_seconds": 0.0, "host_waited_seconds": 0.0, "step_seconds": 2.0}
FOUND = {
    "adamw": FIGURES | {"total": 2**35, "fits": False},
    "moments on the host": FIGURES | {"host": 2**32, "host_waited_seconds": 0.5},
    "gathers in int8": {"problem": "it does not compile"},
}


def test_beyond_hbm_table_shows_fit_wait_and_problem_and_redraw_writes_a_picture(tmp_path):
    console = Console(width=140, file=io.StringIO())
    console.print(beyond_hbm.table("v5e:2x4", FOUND))
    lines = {line.split("  ")[0].strip(): line for line in console.file.getvalue().splitlines()}
    assert " no " in lines["adamw"] and "32 GiB" in lines["adamw"]
    assert " yes " in lines["moments on the host"] and "500 of 2000 ms" in lines["moments on the host"]
    assert "it does not compile" in lines["gathers in int8"]
    (tmp_path / "7B.json").write_text(json.dumps({"v5e:2x4": FOUND}))
    assert beyond_hbm.main(["--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "7B.png").stat().st_size > 5_000


@pytest.mark.parametrize("case", ["an average, on the host", "LoRA on bfloat16"])
def test_beyond_hbm_cases_have_the_offload_and_dtype_of_the_case_name(case):
    options = {"devices": 8, "shard_axes": ("fsdp",), "remat": True, "chunked_head": True}
    workload = beyond_hbm.CASES[case](SIZES["small"], **options)
    assert workload.offload.optimizer_state == ("on the host" in case)
    assert workload.frozen_dtype == ("bfloat16" if "LoRA" in case else None)
    assert (workload.trainable is not None) == ("LoRA" in case)
