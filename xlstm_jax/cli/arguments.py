"""Commands of ``xlstm-jax`` and their options.

Each ``parse_...`` function converts the text of an argument, and raises an ``argparse.ArgumentTypeError`` for any other
text.
"""

import argparse
import ast
import re
from typing import Any, NamedTuple, NoReturn

from xlstm_jax import __version__
from xlstm_jax.formatting import shortened

MAX_SIZE, MAX_BYTES = 10**9, 2**63  # largest axis size and number of minibatches; largest budget
MAX_SHOWN = 80  # characters of a wrong argument in an error
UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

EXIT_CODES = "Exit codes: 0 success, 1 {bad}, 2 error."
FACTORY = "--factory xlstm_jax.cli.example:training"  # in the package, so that examples run in any folder
EXAMPLES = {
    "plan": f"xlstm-jax plan {FACTORY} --mesh dp=4,fsdp=64",
    "forecast": f"xlstm-jax forecast {FACTORY} --topology v5e:16x16",
    "fit": f"xlstm-jax fit {FACTORY} --topology v5e:2x4 --budget 6GiB",
    "lint": f"xlstm-jax lint {FACTORY} --mesh dp=2,fsdp=4",
    "doctor": "xlstm-jax doctor",
}


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises errors, so that the command prints them like other errors."""

    # The method of argparse prints the usage and ends the process.
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help.")


class Setting(argparse.Action):
    """Action that collects pairs of name and value; a repeated name is an error, since a value would be dropped."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        name, value = values
        before = getattr(namespace, self.dest)
        if name in dict(before):
            parser.error(f"{option} {name}={value!r}: {name} was given before, as {dict(before)[name]!r}; give it once")
        setattr(namespace, self.dest, [*before, values])


def parse_mesh(text: str) -> dict[str, int]:
    """Parses ``dp=4,fsdp=64`` to {"dp": 4, "fsdp": 64}; sizes are 1 to ``MAX_SIZE``, and a single size may be -1.

    Raises:
      argparse.ArgumentTypeError: the text has another form, a size is out of range, or an axis repeats.
    """
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
    """Parses ``14GiB`` to 14 * 2**30 bytes, ``14GB`` to 14 * 10**9, and ``1024`` to 1024; at most ``MAX_BYTES``.

    Raises:
      argparse.ArgumentTypeError: the text is no such number, or is 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", text.strip(), re.IGNORECASE)
    # "14iB" has no valid unit.
    good = match is not None and (match[2] or not match[3])
    size = float(match[1]) * (1024 if match[3] else 1000) ** UNITS[match[2].upper()] if match and good else 0.0
    if not 0 < size <= MAX_BYTES:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is no number of bytes up to 8 EiB; write 14GiB, 14GB or 15032385536"
        )
    return int(size)


def parse_fraction(text: str) -> float:
    """Parses a number from 0 to 1, as 0.02.

    Raises:
      argparse.ArgumentTypeError: the text is no number, or is out of range or NaN.
    """
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:  # also refuses NaN, unlike "fraction < 0 or fraction > 1"
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no number from 0 to 1; write 0.02 for 2%")
    return fraction


def parse_setting(text: str) -> tuple[str, Any]:
    """Parses ``remat=True`` to ("remat", True); the value is a Python literal.

    Raises:
      argparse.ArgumentTypeError: there is no "=", the name is no identifier, or the value is no literal.
    """
    name, _, value = text.partition("=")
    try:
        literal = ast.literal_eval(value.strip())
        good = name.strip().isidentifier()
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: a literal nested too deep
        literal, good = None, False
    if not good:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not name=value with a Python literal; as remat=True, layers=24, or \"kind='mlp'\" in "
            "quotes"
        )
    return name.strip(), literal


def parse_count(text: str) -> int:
    """Parses an integer from 1 to ``MAX_SIZE``.

    Raises:
      argparse.ArgumentTypeError: the text is no integer, or is out of range.
    """
    if not re.fullmatch(r"[1-9]\d{0,9}", text) or int(text) > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no positive number up to {MAX_SIZE:,}")
    return int(text)


def _shown(text: str) -> str:
    """Formats a wrong argument for an error: in quotes, and shortened if longer than ``MAX_SHOWN`` characters."""
    return shortened(repr(text), MAX_SHOWN)


OPTIONS: dict[str, dict[str, Any]] = {
    "--json": {"action": "store_true", "help": "print JSON to stdout (default: tables)"},
    "--traceback": {"action": "store_true", "help": "print the traceback of an error (default: one line)"},
    "--factory": {
        "required": True, "metavar": "module:function",
        "help": "import your function that returns a Workload (required)",
    },
    "--set": {
        "action": Setting, "default": [], "type": parse_setting, "metavar": "name=value",
        "help": "pass an argument to the factory, as remat=True; may be repeated (default: the factory's defaults)",
    },
    "--topology": {
        "metavar": "chip:shape",
        "help": "compile for these devices, as v5e:16x16 or h100:32x8 (default: simulated CPU devices)",
    },
    "--mesh": {
        "type": parse_mesh, "metavar": "axis=size,...",
        "help": "set the axes and sizes of the mesh, as dp=4,fsdp=64 (default: the topology's)",
    },
    "--model-axes": {
        "type": parse_mesh, "metavar": "axis=size,...",
        "help": "search over sizes of the model's axes up to these, as tp=8,cp=4 (default: FSDP alone)",
    },
    "--minibatches": {
        "type": parse_count, "default": 1, "metavar": "N",
        "help": "accumulate gradients over N minibatches per device and step (default: 1)",
    },
    "--offload": {
        "action": "store_true", "help": "keep optimizer state in host memory (default: the Workload's choice)",
    },
    "--compiler-options": {
        "choices": ("auto", "forecast"), "metavar": "auto",
        "help": "compile with the options that hide collectives on this chip, or by 'forecast' on GPUs with further "
        "options, which no card has confirmed (default: XLA's defaults)",
    },
    "--no-cache": {
        "action": "store_true",
        "help": "compile anew and store nothing (default: reuse programs of ~/.cache/xlstm_jax)",
    },
    "--explain": {"metavar": "leaf", "help": "explain the split of a leaf, as blocks/up/kernel (default: the table)"},
    "--diff": {"metavar": "old.json", "help": "print differences from a plan written with --json (default: the table)"},
    "--max-replicated-fraction": {
        "type": parse_fraction, "metavar": "x",
        "help": "fail if more than this fraction of parameter bytes is replicated (default: 1)",
    },
    "--max-bytes-per-device": {
        "type": parse_bytes, "metavar": "size",
        "help": "fail if a device keeps more bytes, as 14GiB (default: no limit)",
    },
    "--out": {"metavar": "picture.png", "help": "draw memory and time to a PNG file (default: no picture)"},
    "--budget": {
        "type": parse_bytes, "metavar": "size",
        "help": "limit the memory of each device, as 14GiB (default: all memory that programs get)",
    },
    "--jobs": {
        "type": parse_count, "metavar": "N",
        "help": "compile up to N variants at once (default: one for every 2 cores, as memory allows)",
    },
    "--rules": {
        "type": lambda text: text.split(","), "metavar": "name,...",
        "help": "report findings of these rules (default: every rule)",
    },
}  # fmt: skip
# Options that differ between commands. Only `fit` requires a topology, whose memory is the budget.
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {
    ("plan", "--topology"): {"help": "take the mesh of these devices, as v5e:16x16 or h100:32x8 (default: --mesh)"},
    ("fit", "--topology"): {"required": True, "help": "compile for these devices, as v5e:2x4 or h100:1x8 (required)"},
    ("fit", "--mesh"): {"help": "search on this mesh, as dp=4,fsdp=64 (default: try several meshes)"},
}
TRAINING = ("--factory", "--set", "--topology", "--mesh")
STEP = (*TRAINING, "--minibatches", "--offload", "--compiler-options", "--no-cache")


class Command(NamedTuple):
    """Help of a command: summary, meaning of exit code 1, and options."""

    text: str
    bad: str
    options: tuple[str, ...] = ()


COMMANDS = {
    "plan": Command(
        "Show how each leaf is split, and its bytes per device",
        "a check fails or --diff finds a difference",
        (*TRAINING, "--offload", "--explain", "--diff", "--max-replicated-fraction", "--max-bytes-per-device"),
    ),
    "forecast": Command(
        "Predict memory, traffic and time of a training step", "the step does not fit", (*STEP, "--out")
    ),
    "fit": Command(
        "Search for the fastest options with which a step fits",
        "nothing fits",
        (*TRAINING, "--model-axes", "--budget", "--jobs", "--no-cache"),
    ),
    "lint": Command("Find needless costs of a compiled step", "there are findings", (*STEP, "--rules")),
    "doctor": Command("Show versions, devices and extras, and run self-tests", "a self-test fails"),
}


def make_parser() -> Parser:
    """Builds the parser of the command line, with every command and its options."""
    parser = Parser(
        prog="xlstm-jax",
        description="Predict the cost of a sharded training before it runs, on devices that\nneed not be there.",
        epilog=f"xlstm-jax COMMAND --help lists the options of a command.\n\n{_example('plan')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"xlstm-jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, spec in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=spec.text,
            description=f"{spec.text}.",
            epilog=f"{EXIT_CODES.format(bad=spec.bad)}\n\n{_example(name)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # Scripts with an abbreviated option would break when a new option has the same prefix.
            allow_abbrev=False,
        )
        for option in ("--json", "--traceback", *spec.options):
            command.add_argument(option, **OPTIONS[option] | VARIANTS.get((name, option), {}))
    return parser


def _example(name: str) -> str:
    """Returns the help text with an example of the command ``name``, folded for terminals of 80 columns."""
    return "Example:\n  " + EXAMPLES[name].replace(f"{FACTORY} ", f"{FACTORY} \\\n    ")
