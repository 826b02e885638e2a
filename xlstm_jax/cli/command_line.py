"""The command ``xlstm-jax``: arguments in, tables out. ``commands`` does the work; nothing else in the library prints.

stdout      the tables, or with --json the JSON and nothing else
stderr      what is being done, where it is a terminal; notes, bad news and errors, a line each
exit code   0: done, and all is well    1: done, and the news is bad    2: an error
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

from xlstm_jax.cli.arguments import make_parser

BAD_NEWS, ERROR, INTERRUPTED = 1, 2, 130
WIDTH = 120  # of what goes to no terminal
MAX_ERROR = 1000  # characters


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
        sys.stderr.write(f"xlstm-jax: error: {error_line(error)}\n")
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

    from xlstm_jax.cli import commands

    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    return {
        "plan": commands.plan,
        "forecast": commands.show_forecast,
        "fit": commands.fit,
        "lint": commands.show_lint,
        "doctor": commands.examine,
    }[args.command]


def error_line(error: Exception) -> str:
    """An error as one line: the library's own as they are, others with their type and the user's line."""
    from xlstm_jax.distributed.forecast.workload import in_a_line, is_own
    from xlstm_jax.distributed.wording import shortened

    text = in_a_line(error) + ("" if is_own(error) else "; --traceback shows the way there")
    return shortened(text, MAX_ERROR, " [... --traceback shows all of it ...] ")


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
