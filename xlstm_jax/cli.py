"""The command ``xlstm-jax``: arguments in, tables out. ``commands`` does the work; nothing else in the library prints.

stdout      the tables, or with --json the JSON and nothing else
stderr      what is being done, where it is a terminal; notes, bad news and errors, a line each
exit code   0: done, and all is well    1: done, and the news is bad    2: an error
"""

import argparse
import ast
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

BAD_NEWS, ERROR, INTERRUPTED = 1, 2, 130
WIDTH = 120  # of what goes to no terminal
MAX_ERROR = 1000  # characters
UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

EXIT_CODES = "Exit codes: 0 all is well, 1 {bad}, 2 an error."
FACTORY = "--factory docs.example_training:training"
EXAMPLES = {
    "plan": f"xlstm-jax plan {FACTORY} --mesh dp=4,fsdp=64",
    "forecast": f"xlstm-jax forecast {FACTORY} --topology v5e:16x16",
    "fit": f"xlstm-jax fit {FACTORY} --topology v5e:2x4 --budget 6GiB",
    "lint": f"xlstm-jax lint {FACTORY} --mesh dp=2,fsdp=4",
    "doctor": "xlstm-jax doctor",
}


# ----------------------------------------------------------------------------------------------------------- arguments


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help.")


def parse_mesh(text: str) -> dict[str, int]:
    """``dp=4,fsdp=64`` -> {"dp": 4, "fsdp": 64}; one size may be -1."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    good = all(axis.strip().isidentifier() and re.fullmatch(r"-1|[1-9]\d*", size.strip()) for axis, size in pairs)
    mesh = {axis.strip(): int(size) for axis, size in pairs} if good else {}
    if len(mesh) != len(pairs) or list(mesh.values()).count(-1) > 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not axis=size,axis=size with different axes and positive sizes, one of which may be -1; as "
            "dp=4,fsdp=64"
        )
    return mesh


def parse_bytes(text: str) -> int:
    """``14GiB`` -> 14 * 2**30; ``14GB`` -> 14 * 10**9; ``1024`` -> 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", text.strip(), re.IGNORECASE)
    if match is None or (match[3] and not match[2]) or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write 14GiB, 14GB or 15032385536")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** UNITS[match[2].upper()])


def parse_setting(text: str) -> tuple[str, Any]:
    """``remat=True`` -> ("remat", True); the value is a Python literal."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not name=value with a Python literal; as remat=True, layers=24, or \"kind='mlp'\" in quotes"
        ) from None


def parse_count(text: str) -> int:
    """A positive number."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def make_parser() -> Parser:
    """All commands and their options."""
    parser = Parser(
        prog="xlstm-jax",
        description="What a sharded training will cost, before it runs: on devices that need not be there.",
        epilog=f"Example, in a checkout:\n  {EXAMPLES['forecast']}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_plan(commands)
    _add_forecast(commands)
    _add_fit(commands)
    _add_lint(commands)
    _add(commands, "doctor", "versions, devices, extras, and a self-test of half a minute", "something failed")
    return parser


def _add(commands: Any, name: str, text: str, bad: str) -> Parser:
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"{EXIT_CODES.format(bad=bad)}\n\nExample, in a checkout:\n  {EXAMPLES[name]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="JSON to stdout, and nothing else")
    command.add_argument("--traceback", action="store_true", help="where an error came from")
    return command


def _add_training(command: Parser, *, topology: str, required: bool = False) -> None:
    command.add_argument(
        "--factory", required=True, metavar="module:function", help="your function that returns a Workload"
    )
    command.add_argument(
        "--set", action="append", default=[], type=parse_setting, metavar="name=value",
        help="an argument of the factory, as remat=True; may be given several times",
    )  # fmt: skip
    command.add_argument("--topology", required=required, metavar="chip:shape", help=f"as v5e:16x16; {topology}")
    command.add_argument(
        "--mesh", type=parse_mesh, metavar="axis=size,...",
        help="axes and sizes, outermost first, as dp=4,fsdp=64; one may be -1. Parameters are split over the axes "
        "whose names begin with fsdp (others: --set \"shard_axes=('data',)\"). By default one axis for each dim of the "
        "torus, or one flat fsdp, if the factory has no argument shard_axes",
    )  # fmt: skip


def _add_minibatches(command: Parser) -> None:
    command.add_argument(
        "--minibatches", type=parse_count, default=1, metavar="N", help="parts of each device's batch; 1 by default"
    )


def _add_plan(commands: Any) -> None:
    text = "what is split, why not where it is not, and what each device keeps"
    command = _add(commands, "plan", text, "a check is not met, or --diff finds something")
    _add_training(command, topology="not needed with --mesh")
    command.add_argument("--explain", metavar="leaf", help="one leaf in one sentence, as blocks/up/kernel")
    command.add_argument("--diff", metavar="old.json", help="what differs from a plan that --json wrote")
    command.add_argument(
        "--max-replicated-fraction", type=float, metavar="x", help="of the parameters' bytes, what may stay whole; 0.02"
    )
    command.add_argument(
        "--max-bytes-per-device", type=parse_bytes, metavar="size", help="what a device may keep, as 14GiB"
    )


def _add_forecast(commands: Any) -> None:
    text = "memory, traffic and time of a compiled step"
    command = _add(commands, "forecast", text, "it does not fit")
    _add_training(command, topology="without it, simulated CPU devices: collectives alone")
    _add_minibatches(command)
    command.add_argument("--out", metavar="picture.png", help="draw memory and time")


def _add_fit(commands: Any) -> None:
    text = "options of the step that fit, the fastest first; compiles several times"
    command = _add(commands, "fit", text, "nothing fits")
    _add_training(command, topology="the devices to fit into", required=True)
    command.add_argument(
        "--budget", type=parse_bytes, metavar="size", help="of each device, as 14GiB; by default all that there is"
    )


def _add_lint(commands: Any) -> None:
    text = "what in a compiled step costs more than it need"
    command = _add(commands, "lint", text, "there are findings")
    _add_training(command, topology="without it, simulated CPU devices, whose schedule is not that of TPUs")
    _add_minibatches(command)
    command.add_argument(
        "--rules", type=lambda text: text.split(","), metavar="name,...", help="those that count; by default all"
    )


# ------------------------------------------------------------------------------------------------------------- running


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; ``--help`` exits by itself."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        with sigterm_raises():
            return run(make_parser().parse_args(argv))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # a user's model may raise anything
        if "--traceback" in argv:
            traceback.print_exc()
        sys.stderr.write(f"xlstm-jax: error: {one_line(error)}\n")
        return ERROR


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the command as an exception does, so that no compiling child outlives it."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(args: argparse.Namespace) -> int:
    """Runs the command and shows its report."""
    with redirect_stdout(sys.stderr), progress() as say:  # the user's code may print
        say("starting")
        run_command = _command(args)
        report = run_command(args, say)
    if args.json:
        sys.stdout.write(report.json().rstrip("\n") + "\n")
    else:
        show(report.tables())
    for line in (*report.notes, *report.refusals):
        sys.stderr.write(f"xlstm-jax: {line}\n")
    return BAD_NEWS if report.refusals else 0


def _command(args: argparse.Namespace) -> Callable[..., Any]:
    """The function of a command. The library is imported here, seconds that --help and a misspelt option do not take.

    Nothing is computed, so no accelerator is started, nor waited for, unless the user names a platform.
    """
    import jax

    from xlstm_jax import commands

    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    return {
        "plan": commands.plan,
        "forecast": commands.show_forecast,
        "fit": commands.fit,
        "lint": commands.show_lint,
        "doctor": commands.examine,
    }[args.command]


def one_line(error: Exception) -> str:
    """An error as one line: the library's own as they are, others with their type and the user's line."""
    from xlstm_jax.distributed.forecast.workload import in_a_line, is_own

    text = in_a_line(error) + ("" if is_own(error) else "; --traceback shows the way there")
    if len(text) > MAX_ERROR:
        half = MAX_ERROR // 2
        return f"{text[:half]} [... --traceback shows all of it ...] {text[-half:]}"
    return text


def console(**options: Any) -> Any:
    """A ``rich`` console that takes brackets for what they are.

    Raises:
      ImportError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("tables are drawn with rich: pip install xlstm_jax[forecast]; or pass --json.") from error
    return Console(markup=False, highlight=False, **options)


def show(parts: Sequence[Any]) -> None:
    """Prints to stdout."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    out = console(width=None if known else WIDTH)
    for part in parts:
        out.print(part if hasattr(part, "__rich_console__") else str(part))


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows what is being done, and for how long, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    err = console(stderr=True)
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=err,
                  transient=True) as bar:  # fmt: skip
        task = bar.add_task("")
        yield lambda text: bar.update(task, description=text)


if __name__ == "__main__":
    sys.exit(main())
