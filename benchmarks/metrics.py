"""What metrics add to a training step, in microseconds and collectives: ``python -m benchmarks.metrics``.

One small training step over all devices, with and without metrics, compiled once each and timed in turns in one
process, so that what else the machine does meets all of them alike:

  bare              a linear model, one all-reduce of its gradient
  update            + a Compose of 20 WeightedMeans, updated
  sync              + ... and reduced over devices and computed, in every step
  mixed ...         the same with means, sums, counts, maxima and minima: four (operation, dtype) in place of one
  pmeans            + 20 times jax.lax.pmean(mean of the values): what one writes without a library
  clu, local        + a clu.metrics.Collection of 20 Averages, merged on each device
  clu, gathered     + ... by gather_from_model_output, in every step: how clu.metrics is used on several devices

All see the same values, columns of the model's error. What a variant adds is the median over rounds of the difference
to the bare step of the same round.

Besides, each reduction is called alone and waited for. ``naive`` in this file is one ``pmean`` of one scalar; the aim
is that a sync of 20 metrics costs no more than two of them.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.hlo import count_collectives
from benchmarks.report import ACCENT, QUIET, STRONG
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.distributed.metrics import Compose, Max, Min, PureMetric, Sum, WeightedMean, make_log_step
