"""Wall time and host memory of ``publish`` with 1, 2 and 4 processes on this machine.

    python -m benchmarks.publications                           1 GiB in leaves of 4 MiB; two minutes
    python -m benchmarks.publications --mebibytes 256 --processes 2
    python -m benchmarks.publications --padded                  leaves that are padded to be split
    python -m benchmarks.publications --delta                   bytes of a delta, of weights of which 2 % change

The leaves are split over four simulated devices, which the processes share. All processes write to one disk here, which
would hide that each host has its own: so each process waits after a file until a disk of ``--disk`` MB/s would have
written the file. The table has the slowest process, and the process with the highest peak. Peaks are memory in addition
to the parameters: of NumPy's arrays (tracemalloc), and of the process (Linux), in which the simulated devices hold what
is on its way as well.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.forecasts import installed_versions
from xlstm_jax.distributed import DeviceMeshManager, initialize_distributed, simulate_cpu_devices
from xlstm_jax.distributed.checkpoint import publish
from xlstm_jax.distributed.checkpoint.publication import publish as publishing
from xlstm_jax.distributed.data_parallel.extensions.padding import ZeroPadding
from xlstm_jax.distributed.data_parallel.leaf import Sharded

DEVICES = 4
LEAF_SIDE = 1024  # leaves of float32, of 4 MiB
FILE = Path(__file__).parent / "results" / "safetensors" / "publications.json"
TIMEOUT_S = 600
COLUMNS = {
    "s": "s",
    "cpu s": "processor seconds of each",
    "MB written": "MB written by each",
    "MB of arrays": "peak of NumPy's arrays, MB",
    "MB of process": "peak of the process, MB",
}


def params_of(mebibytes: int, padded: bool) -> dict[str, object]:
    """Creates leaves with a total of ``mebibytes``, split over the devices of all processes."""
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": DEVICES})
    split = NamedSharding(mesh, P("fsdp"))
    shape = (LEAF_SIDE, LEAF_SIDE)
    make = jax.jit(lambda i: jnp.full(shape, i, jnp.float32), out_shardings=split)
    params = {f"w{i:04}": make(i) for i in range(mebibytes // 4)}
    jax.block_until_ready(params)
    if not padded:
        return params
    store = ZeroPadding((LEAF_SIDE - 1, None))
    return {name: Sharded(leaf, ("fsdp", None), store=store) for name, leaf in params.items()}


def peak_of_process_mb() -> float:
    """Returns the highest resident memory since ``reset_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def published(folder: Path, mebibytes: int, disk_mb_per_s: float, padded: bool) -> dict[str, float]:
    """Publishes once, in this process of several; returns what it took here."""
    params = params_of(mebibytes, padded)
    publish({"warm": params["w0000"]}, folder / "warm")
    write, written = publishing.write_tensors, [0]

    def as_on_a_disk(path: Path, tensors: dict[str, np.ndarray], digests: dict[str, str]) -> str:
        begun, nbytes = time.monotonic(), sum(x.nbytes for x in tensors.values())
        sha256 = write(path, tensors, digests)
        written[0] += nbytes
        if disk_mb_per_s:
            time.sleep(max(0, nbytes / (1e6 * disk_mb_per_s) - (time.monotonic() - begun)))
        return sha256

    publishing.write_tensors = as_on_a_disk
    reset_peak()
    resident = peak_of_process_mb()
    tracemalloc.start()
    begun, processor = time.monotonic(), time.process_time()
    publish(params, folder / "published")
    return {
        "s": round(time.monotonic() - begun, 1),
        "cpu s": round(time.process_time() - processor, 2),
        "MB written": round(written[0] / 1e6),
        "MB of arrays": round(tracemalloc.get_traced_memory()[1] / 1e6, 1),
        "MB of process": round(peak_of_process_mb() - resident, 1),
    }


def measured(processes: int, mebibytes: int, disk_mb_per_s: float, padded: bool) -> list[dict[str, float]]:
    """Returns what each of ``processes`` processes took.

    Raises:
      RuntimeError: a process has failed; with the last lines of its stderr.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--mebibytes", str(mebibytes), "--disk", str(disk_mb_per_s), *["--padded"] * padded]
        command = [sys.executable, "-m", "benchmarks.publications", *options, "--as-process", folder, str(port)]
        started = [
            subprocess.Popen(
                [*command, str(processes), str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S) for process in started]
        finally:
            for process in started:
                process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError("\n".join(errors.splitlines()[-5:]))
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def table(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """Returns the lines of a table in Markdown: the largest value of all processes in each column."""
    lines = ["| processes | " + " | ".join(COLUMNS.values()) + " |", "| ---: " * (1 + len(COLUMNS)) + "|"]
    for processes, ranks in results.items():
        cells = [f"{max(rank[name] for rank in ranks):g}" for name in COLUMNS]
        lines.append(f"| {processes} | " + " | ".join(cells) + " |")
    return lines


def bytes_of_delta(mebibytes: int, share: float) -> int:
    """Returns the bytes of a delta of bfloat16 weights, of which a ``share`` of the entries change at random places."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal(2**19, np.float32).astype(jnp.bfloat16) for i in range(mebibytes)}
    with tempfile.TemporaryDirectory() as folder:
        publish(weights, folder)
        for name, values in weights.items():
            bits = values.view(np.uint16).copy()
            bits[rng.random(bits.size) < share] ^= 1
            weights[name] = bits.view(values.dtype)
        publish(weights, folder, since=1)
        return sum(file.stat().st_size for file in Path(folder).glob("*00000002*"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4], choices=[1, 2, 4])
    parser.add_argument("--mebibytes", type=int, default=1024, help="of all leaves")
    parser.add_argument("--disk", type=float, default=25, help="MB/s of the disk of each process; 0: do not wait")
    parser.add_argument("--padded", action="store_true", help="leaves of 1023 rows, stored in 1024")
    parser.add_argument("--delta", action="store_true", help="print the bytes of a delta")
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--as-process", nargs=4, metavar=("FOLDER", "PORT", "COUNT", "RANK"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.as_process:
        folder, port, count, rank = args.as_process
        simulate_cpu_devices(DEVICES // int(count))
        if int(count) > 1:
            initialize_distributed(f"127.0.0.1:{port}", int(count), int(rank))
        print(json.dumps(published(Path(folder), args.mebibytes, args.disk, args.padded)), flush=True)
        return 0
    if args.delta:
        print(f"{bytes_of_delta(122, 0.02) / 1e6:.2f} MB")
        return 0
    results = {str(n): measured(n, args.mebibytes, args.disk, args.padded) for n in args.processes}
    print("\n".join(table(results)))
    setting = {"mebibytes": args.mebibytes, "MB/s of a disk": args.disk, "padded": args.padded}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(installed_versions() | setting | {"processes": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
