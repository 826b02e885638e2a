"""Script of a process that trains the Transformer of ``models`` with PyTorch's FSDP2 on the CPU.

    python -m benchmarks.torch_fsdp FOLDER RANK PROCESSES LIMIT_S        started by ``torch_processes``

Parameters (with the names of the Flax model; matrices are transposed), batch and AdamW are equal to the other cases.
Each block and the model are passed to ``fully_shard``, in float32; processes communicate by gloo on this machine.

A process reads a line of JSON from standard input, {"case": ..., "steps": ...}, runs the steps and writes a line,
{"loss": ...}. Between lines it waits in ``read`` without using processor time. The process ends at the end of its
input, and at the latest after LIMIT_S seconds. The first output line is {"torch": version}.

This file does not import JAX, because the threads of JAX would interfere. It needs ``pip install -e .[torch]``.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

EPSILON = 1e-6  # default of Linen's norms
ROTARY_BASE = 10_000.0
# Options equivalent to optax.adamw(3e-4).
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4}
# Name of a case -> reshard_after_forward.
CASES = {"FSDP2": True, "FSDP2, weights kept": False}


# ---------------------------------------------------------------------------------------------------------------- model


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Applies rotary positions to ``x[..., t, d]``; the two halves of the features form the rotated pairs."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * ROTARY_BASE ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    """Pre-norm attention with rotary positions, then a gated MLP."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, EPSILON), nn.RMSNorm(dim, EPSILON)
        self.query_key_value, self.attention_out = linear(dim, 3 * dim), linear(dim, dim)
        self.up, self.down = linear(dim, 6 * dim), linear(3 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv)
        out = functional.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + self.attention_out(out.transpose(1, 2).flatten(2))
        gate, y = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * y)


class Transformer(nn.Module):
    """Transformer that returns next-token logits ``[b, t, vocab_size]`` for ``tokens[b, t]``."""

    def __init__(self, dim: int, layers: int, heads: int, vocab_size: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.final_norm = nn.RMSNorm(dim, EPSILON)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def state_dict(params: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Converts the parameters of the Flax model, path -> array with stacked layers, to a PyTorch state dict."""
    found = {}
    for path, value in params.items():
        *modules, kind = path.split("/")
        if modules[0] == "blocks":
            named = {f"blocks.{layer}.{modules[1]}": part for layer, part in enumerate(value)}
        else:
            named = {modules[0]: value}
        for name, part in named.items():
            found[f"{name}.weight"] = torch.tensor(part.T if kind == "kernel" else part)
    return found


def model_of(params: Mapping[str, np.ndarray], heads: int) -> Transformer:
    """Creates the model from parameters; the dims are taken from their shapes."""
    vocab_size, dim = params["embed/embedding"].shape
    model = Transformer(dim, len(params["blocks/up/kernel"]), heads, vocab_size)
    model.load_state_dict({name: value.contiguous() for name, value in state_dict(params).items()})
    return model


# ------------------------------------------------------------------------------------------------------------- training


def make_step(model: nn.Module, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a step on the local rows, which returns the mean loss over processes."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    labels = tokens[:, 1:].flatten()

    def step():
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    return step


def sharded(model: Transformer, mesh: Any, reshard_after_forward: bool) -> Transformer:
    """Applies ``fully_shard`` to each block and to the model."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)


def serve(folder: Path, rank: int, processes: int, answer: Callable[[dict[str, Any]], None]) -> None:
    """Runs the steps requested by lines of standard input, and passes results to ``answer``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes, timeout=timedelta(minutes=2)
    )
    mesh = init_device_mesh("cpu", (processes,))
    kept = dict(np.load(folder / "start.npz"))
    heads, tokens = int(kept.pop("heads")), torch.from_numpy(kept.pop("tokens")).long()
    mine = tokens.chunk(processes)[rank]
    steps = {case: make_step(sharded(model_of(kept, heads), mesh, flag), mine) for case, flag in CASES.items()}
    answer({"torch": torch.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        losses = [steps[asked["case"]]() for _ in range(asked["steps"])]
        answer({"loss": float(losses[-1])})
    dist.destroy_process_group()


def main() -> None:
    folder, rank, processes, limit_s = sys.argv[1:]
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    out = os.dup(1)  # only for answers; output of libraries is redirected to stderr
    os.dup2(2, 1)

    def answer(found):
        os.write(out, (json.dumps(found) + "\n").encode())

    serve(Path(folder), int(rank), int(processes), answer)


if __name__ == "__main__":
    main()
