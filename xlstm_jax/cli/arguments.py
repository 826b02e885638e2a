"""The commands of ``xlstm-jax`` and their options."""

import argparse
import ast
import re
from typing import Any, NamedTuple, NoReturn

from xlstm_jax import __version__
from xlstm_jax.wording import shortened

MAX_SIZE, MAX_BYTES = 10**9, 2**63  # the largest size of an axis or number of minibatches; the largest budget
MAX_SHOWN = 80  # characters of a wrong argument in an error
UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

EXIT_CODES = "Exit codes: 0 all is well, 2 an error,\n1 {bad}."
FACTORY = "--factory docs.example_training:training"
EXAMPLES = {
    "plan": f"xlstm-jax plan {FACTORY} --mesh dp=4,fsdp=64",
    "forecast": f"xlstm-jax forecast {FACTORY} --topology v5e:16x16",
    "fit": f"xlstm-jax fit {FACTORY} --topology v5e:2x4 --budget 6GiB",
    "lint": f"xlstm-jax lint {FACTORY} --mesh dp=2,fsdp=4",
    "doctor": "xlstm-jax doctor",
}


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises its errors, so that they are printed like all others."""

    # argparse itself would print the usage and end the process.
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help.")


class Setting(argparse.Action):
    """Collects pairs of name and value; a name that is given twice is an error, as one value would be dropped."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        name, value = values
        before = getattr(namespace, self.dest)
        if name in dict(before):
            parser.error(f"{option} {name}={value!r}: {name} was given before, as {dict(before)[name]!r}; give it once")
        setattr(namespace, self.dest, [*before, values])


def parse_mesh(text: str) -> dict[str, int]:
    """``dp=4,fsdp=64`` -> {"dp": 4, "fsdp": 64}; one size may be -1."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    good = all(axis.strip().isidentifier() and re.fullmatch(r"-1|[1-9]\d{0,9}", size.strip()) for axis, size in pairs)
    mesh = {axis.strip(): int(size) for axis, size in pairs} if good else {}
    if len(mesh) != len(pairs) or list(mesh.values()).count(-1) > 1 or max(mesh.values()) > MAX_SIZE:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not axis=size,axis=size with different axes and positive sizes up to {MAX_SIZE:,}, one "
            "of which may be -1; as dp=4,fsdp=64"
        )
    return mesh


def parse_bytes(text: str) -> int:
    """``14GiB`` -> 14 * 2**30; ``14GB`` -> 14 * 10**9; ``1024`` -> 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", text.strip(), re.IGNORECASE)
    # "14iB" is no unit.
    good = match is not None and (match[2] or not match[3])
    size = float(match[1]) * (1024 if match[3] else 1000) ** UNITS[match[2].upper()] if match and good else 0.0
    if not 0 < size <= MAX_BYTES:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is no number of bytes up to 8 EiB; write 14GiB, 14GB or 15032385536"
        )
    return int(size)


def parse_fraction(text: str) -> float:
    """A number from 0 to 1."""
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:  # refuses NaN, too, which "fraction < 0 or fraction > 1" would let through
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no number from 0 to 1; write 0.02 for 2%")
    return fraction


def parse_setting(text: str) -> tuple[str, Any]:
    """``remat=True`` -> ("remat", True); the value is a Python literal."""
    name, _, value = text.partition("=")
    try:
        read = ast.literal_eval(value.strip())
        good = name.strip().isidentifier()
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: a literal that is nested too deep
        read, good = None, False
    if not good:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not name=value with a Python literal; as remat=True, layers=24, or \"kind='mlp'\" in "
            "quotes"
        )
    return name.strip(), read


def parse_count(text: str) -> int:
    """A positive number."""
    if not re.fullmatch(r"[1-9]\d{0,9}", text) or int(text) > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no positive number up to {MAX_SIZE:,}")
    return int(text)


def _shown(text: str) -> str:
    """An argument as an error shows it: in quotes, and shortened if it is long."""
    return shortened(repr(text), MAX_SHOWN)


OPTIONS: dict[str, dict[str, Any]] = {
    "--json": {"action": "store_true", "help": "JSON to stdout, and nothing else"},
    "--traceback": {"action": "store_true", "help": "where an error came from"},
    "--factory": {
        "required": True, "metavar": "module:function", "help": "your function that returns a Workload",
    },
    "--set": {
        "action": Setting, "default": [], "type": parse_setting, "metavar": "name=value",
        "help": "an argument of the factory, as remat=True; may be given several times",
    },
    "--topology": {
        "metavar": "chip:shape",
        "help": "the devices, as v5e:16x16 or h100:32x8. Without it plan takes what --mesh says; forecast and lint "
        "take simulated CPU devices, whose collectives are the same and whose schedule is another",
    },
    "--mesh": {
        "type": parse_mesh, "metavar": "axis=size,...",
        "help": "axes and sizes, outermost first, as dp=4,fsdp=64; one may be -1. Parameters are split over the axes "
        "whose names begin with fsdp (others: --set \"shard_axes=('data',)\"). By default one axis for each dim of the "
        "torus (of GPUs: across hosts, and within), or one flat fsdp, if the factory has no argument shard_axes",
    },
    "--model-axes": {
        "type": parse_mesh, "metavar": "axis=size,...",
        "help": "in place of --mesh: axes that the model names itself, those that send most first, and the most "
        "devices for each, as tp=8,cp=4; FSDP gets the rest. The Workload's batch_spec says how its batch is split",
    },
    "--minibatches": {
        "type": parse_count, "default": 1, "metavar": "N", "help": "parts of each device's batch; 1 by default",
    },
    "--offload": {
        "action": "store_true", "help": "the optimizer's state in the memory of the host, as offload=Offload()",
    },
    "--compiler-options": {
        "choices": ("auto",), "metavar": "auto",
        "help": "compile with the options that hide collectives on the topology's chip; by default without any",
    },
    "--no-cache": {
        "action": "store_true",
        "help": "compile anew, and keep nothing. Without it what was compiled for a topology is kept, in "
        "$XLSTM_JAX_CACHE_DIR or ~/.cache/xlstm_jax, and read from there",
    },
    "--explain": {"metavar": "leaf", "help": "one leaf in one sentence, as blocks/up/kernel"},
    "--diff": {"metavar": "old.json", "help": "what differs from a plan that --json wrote"},
    "--max-replicated-fraction": {
        "type": parse_fraction, "metavar": "x",
        "help": "of the parameters' bytes, what may stay whole, from 0 to 1, as 0.02",
    },
    "--max-bytes-per-device": {"type": parse_bytes, "metavar": "size", "help": "what a device may keep, as 14GiB"},
    "--out": {"metavar": "picture.png", "help": "draw memory and time"},
    "--budget": {
        "type": parse_bytes, "metavar": "size", "help": "of each device, as 14GiB; by default all that there is",
    },
    "--jobs": {
        "type": parse_count, "metavar": "N",
        "help": "compilations at once; by default one for every 2 cores, as memory allows",
    },
    "--rules": {
        "type": lambda text: text.split(","), "metavar": "name,...", "help": "those that count; by default all",
    },
}  # fmt: skip
TRAINING = ("--factory", "--set", "--topology", "--mesh")
STEP = (*TRAINING, "--minibatches", "--offload", "--compiler-options", "--no-cache")


class Command(NamedTuple):
    """The help of a command: what it shows, what exit code 1 means, and its options."""

    text: str
    bad: str
    options: tuple[str, ...] = ()


COMMANDS = {
    "plan": Command(
        "what is split, why not where it is not, and what each device keeps",
        "a check is not met, or --diff finds something",
        (*TRAINING, "--offload", "--explain", "--diff", "--max-replicated-fraction", "--max-bytes-per-device"),
    ),
    "forecast": Command("memory, traffic and time of a compiled step", "it does not fit", (*STEP, "--out")),
    "fit": Command(
        "options of the step that fit, the fastest first; compiles several times",
        "nothing fits",
        (*TRAINING, "--model-axes", "--budget", "--jobs", "--no-cache"),
    ),
    "lint": Command("what in a compiled step costs more than it need", "there are findings", (*STEP, "--rules")),
    "doctor": Command("versions, devices, extras, and self-tests: 17 s of processor time", "something failed"),
}


def make_parser() -> Parser:
    """All commands and their options."""
    parser = Parser(
        prog="xlstm-jax",
        description="What a sharded training will cost, before it runs: on devices that need not be\nthere.",
        epilog=_example("forecast"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"xlstm-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, said in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=said.text,
            description=f"{said.text[0].upper()}{said.text[1:]}.",
            epilog=f"{EXIT_CODES.format(bad=said.bad)}\n\n{_example(name)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # Scripts that abbreviate an option would break with the next option that begins alike.
            allow_abbrev=False,
        )
        for option in ("--json", "--traceback", *said.options):
            # Only a search needs devices that it can fit into.
            needed: dict[str, Any] = {"required": True} if (name, option) == ("fit", "--topology") else {}
            command.add_argument(option, **OPTIONS[option], **needed)
    return parser


def _example(name: str) -> str:
    """The example in two lines, for terminals of 80 columns."""
    return "Example, in a checkout:\n  " + EXAMPLES[name].replace(f"{FACTORY} ", f"{FACTORY} \\\n    ")
