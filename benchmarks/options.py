"""Command-line options shared by several programs."""

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

from xlstm_jax.forecast import parse_topology

GPU_TOPOLOGIES = ("h100:32x8", "h200:16x8", "b200:8x8")


def positive(text: str) -> int:
    """Parses a positive integer.

    Raises:
      argparse.ArgumentTypeError: the text is not a positive integer.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer.")
    return int(text)


def not_negative(text: str) -> int:
    """Parses a positive integer or 0.

    Raises:
      argparse.ArgumentTypeError: the text is neither a positive integer nor 0.
    """
    return 0 if text.isdecimal() and int(text) == 0 else positive(text)


def add_forecast_options(
    parser: argparse.ArgumentParser,
    *,
    sizes: Collection[str],
    models: Sequence[str],
    topologies: Sequence[str],
    cases: Collection[str],
    out: Path,
    kept: Path,
) -> None:
    """Adds the options of benchmarks that compare steps compiled for TPUs or GPUs.

    Args:
      sizes, cases: the available sizes and cases.
      models, topologies: the default sizes and topologies.
      out: the default folder of results.
      kept: the default folder of stored forecasts.
    """
    default = f"default: {' '.join(models)}"
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=list(models), help=f"models ({default})")
    parser.add_argument("--topologies", nargs="+", default=list(topologies), help="as v5e:16x16, h100:32x8")
    parser.add_argument("--cases", nargs="+", choices=cases, help="see benchmarks/cases.py")
    parser.add_argument("--out", type=Path, default=out, help="folder of the JSON files and pictures")
    parser.add_argument("--kept", type=Path, default=kept, help="folder in which forecasts are kept and looked up")
    parser.add_argument("--redraw", action="store_true", help="compile nothing; tables and pictures of what is kept")


def complete(options: argparse.Namespace, on_tpus: Sequence[str], on_gpus: Sequence[str]) -> argparse.Namespace:
    """Fills in the default cases of the platform, and ``suffix`` for the names of result files.

    Raises:
      ValueError: a topology is unknown, or the topologies mix TPUs and GPUs.
    """
    platforms = {parse_topology(topology).platform for topology in options.topologies}
    if len(platforms) > 1:
        raise ValueError("--topologies names TPUs and GPUs, whose cases differ; run the one, then the other.")
    gpus = platforms == {"cuda"}
    chosen = {"cases": options.cases or list(on_gpus if gpus else on_tpus), "suffix": "_gpus" if gpus else ""}
    return argparse.Namespace(**vars(options) | chosen)
