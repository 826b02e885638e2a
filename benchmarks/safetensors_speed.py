"""Speed of ``import_safetensors`` and ``export_safetensors``, compared with a file copy and the safetensors library.

    python -m benchmarks.safetensors_speed                 a minute
    python -m benchmarks.safetensors_speed --mebibytes 64

The model has square float32 matrices on simulated devices, half of the matrices split along rows and half along
columns. Rates and processor seconds are medians over repeats in turn; processor seconds are more reliable on a busy
machine. The file is in the page cache.

The safetensors library writes unsharded NumPy arrays, and does not wait for the disk. So its export is measured a
second time with a gather and ``fsync``, as in ``export_safetensors``.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from benchmarks.forecasts import installed_versions
from xlstm_jax.distributed import DeviceMeshManager, export_safetensors, import_safetensors, simulate_cpu_devices
from xlstm_jax.formatting import rich_table

DEVICES = 8
LEAVES = 16
READS = "a plain copy of the file", "import_safetensors", "load_file of safetensors"
OUT = "out.safetensors"
FILE = Path(__file__).parent / "results" / "safetensors" / "safetensors.json"
WRITES = "save_file of safetensors", "the same, gathered and synced", "export_safetensors"


def params_of(mebibytes: int) -> dict[str, jax.Array]:
    """Creates matrices with a total of ``mebibytes``, on a mesh."""
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": DEVICES})
    width = DEVICES * round(math.sqrt(mebibytes * 2**20 / 4 / LEAVES) / DEVICES)
    specs = [P("fsdp") if i % 2 else P(None, "fsdp") for i in range(LEAVES)]
    values = [np.random.default_rng(i).standard_normal((width, width), np.float32) for i in range(LEAVES)]
    places = [NamedSharding(mesh, spec) for spec in specs]
    return {f"w{i}": jax.device_put(*both) for i, both in enumerate(zip(values, places, strict=True))}


def synced(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def measures(params: dict[str, jax.Array], folder: Path) -> dict[str, Callable[[], object]]:
    """Returns the timed functions by name."""
    from safetensors.numpy import load_file, save_file

    export_safetensors(params, folder / "model")
    model, out = folder / "model" / "model.safetensors", folder / OUT
    host = {name: np.array(leaf) for name, leaf in params.items()}

    def gathered_and_synced() -> None:
        save_file({name: np.array(leaf) for name, leaf in params.items()}, out)
        synced(out)

    return {
        "a plain copy of the file": lambda: shutil.copyfile(model, out),
        "import_safetensors": lambda: jax.block_until_ready(import_safetensors(model, params)),
        "load_file of safetensors": lambda: load_file(model),
        "save_file of safetensors": lambda: save_file(host, out),
        "the same, gathered and synced": gathered_and_synced,
        "export_safetensors": lambda: export_safetensors(params, out),
    }


def medians(mebibytes: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Measures medians by name: GB/s, and processor seconds per GB."""
    params = params_of(mebibytes)
    size = sum(leaf.nbytes for leaf in params.values()) / 1e9
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in (*READS, *WRITES)}
    with tempfile.TemporaryDirectory() as folder:
        works = measures(params, Path(folder))
        for _ in range(repeats):
            for name, work in works.items():
                if (out := Path(folder, OUT)).exists():
                    synced(out)  # so that the disk is idle before the next measurement
                    out.unlink()
                begun = time.perf_counter(), time.process_time()
                work()
                seconds[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    wall, processor = (
        {name: statistics.median(both[i] for both in of) for name, of in seconds.items()} for i in (0, 1)
    )
    return {name: (size / wall[name], processor[name] / size) for name in seconds}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024, help="of the file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FILE, help="the JSON file")
    options = parser.parse_args(arguments)
    simulate_cpu_devices(DEVICES)
    found = medians(options.mebibytes, options.repeats)
    result = {
        "mebibytes": options.mebibytes,
        "repeats": options.repeats,
        "GB/s, processor s / GB": found,
        "versions": installed_versions("safetensors"),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result) + "\n")
    for title, names in (("reading", READS), ("writing", WRITES)):
        first = found[names[0]][0]
        rows = [[name, f"{found[name][0] / first:.2f}", *(f"{number:.2f}" for number in found[name])] for name in names]
        Console(width=100).print(rich_table(title, ["", "ratio", "GB/s", "processor s / GB"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
