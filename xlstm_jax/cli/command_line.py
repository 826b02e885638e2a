"""Runner of the commands in ``commands.py``: parses arguments, runs a command and prints the report.

stdout      the tables, or with --json only the JSON
stderr      progress, on a terminal; notes, refusals and errors, a line for each
exit code   0: success    1: success with refusals (bad news)    2: an error    130: interrupted    143: SIGTERM

Without a command the program prints its help to stdout, with exit code 2: a script that loses an argument must fail.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from xlstm_jax.cli.arguments import make_parser

BAD_NEWS, ERROR, INTERRUPTED = 1, 2, 130
WIDTH = 120  # columns, if stdout is no terminal
MAX_ERROR = 1000  # characters

if TYPE_CHECKING:  # the module imports jax, which takes seconds; --help must not wait for the import
    from xlstm_jax.cli.commands import Report, ShowProgress


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code. ``--help`` and SIGTERM raise ``SystemExit``.

    An error is printed to stderr in a line, with exit code 2; an interruption has exit code 130. ``argv`` are the
    arguments after the program's name; None: those of the process.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        make_parser().print_help()
        return ERROR
    try:
        args = make_parser().parse_args(argv)
        with sigterm_raises():
            return run(args)
    # `Terminated` is a SystemExit and passes: the process ends with 143, as shells expect after SIGTERM.
    except KeyboardInterrupt:
        return INTERRUPTED
    # The library and the user's model may raise anything; the command prints a line instead of a traceback.
    except Exception as error:
        if "--traceback" in argv:
            traceback.print_exc()
        sys.stderr.write(f"xlstm-jax: error: {error_line(error)}\n")
        return ERROR


class Terminated(SystemExit):
    """SIGTERM as an exception: a subclass of ``SystemExit``, distinct from exits of the user's code."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within the context SIGTERM raises ``Terminated`` with exit code 143, so that ``finally`` blocks run.

    The blocks end child processes and remove folders. Only the main thread may enter the context.
    """

    def end(number: int, frame: object) -> NoReturn:
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(args: argparse.Namespace) -> int:
    """Runs the command of the parsed arguments, prints the report, and returns the exit code: 0, or 1 with refusals.

    Refusals are bad news, such as a step that does not fit. Errors pass as exceptions.
    """
    # Output of the user's code goes to stderr: stdout contains only the report, which a program may parse as JSON.
    with redirect_stdout(sys.stderr), progress() as say:
        say("starting")
        report = _report(args, say)
    if args.json:
        sys.stdout.write(report.json().rstrip("\n") + "\n")
    else:
        # Without a terminal rich assumes 80 columns, which would fold tables in logs.
        known = sys.stdout.isatty() or "COLUMNS" in os.environ
        out = console(width=None if known else WIDTH)
        for part in report.tables():
            out.print(part if hasattr(part, "__rich_console__") else str(part))
    for line in (*report.notes, *report.refusals):
        sys.stderr.write(f"xlstm-jax: {line}\n")
    return BAD_NEWS if report.refusals else 0


def _report(args: argparse.Namespace, say: "ShowProgress") -> "Report":
    """Runs the command ``args.command`` and returns its report; ``say`` shows the progress.

    Raises a ``ValueError`` if the user's code ends the process; other errors pass. The library is imported here, so
    that ``--help`` does not wait for jax. Sets the JAX platform to CPU, unless ``JAX_PLATFORMS`` is set.
    """
    import jax

    from xlstm_jax.cli.commands import COMMANDS
    from xlstm_jax.forecast.training.workload import described

    # Commands compute nothing, and would take the accelerator from a training on the same machine.
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    try:
        return COMMANDS[args.command](args, say)
    except Terminated:
        raise
    except SystemExit as error:  # from the user's code; exiting here would look like success
        raise ValueError(
            f"your code ended the process: {described(error)}. Importing the factory's module runs the module: put "
            "script code under `if __name__ == '__main__':`, and let the factory raise or return."
        ) from error


def error_line(error: Exception) -> str:
    """Returns the text of an error in a single line, shortened to about ``MAX_ERROR`` characters.

    For an error that the library did not raise, the line has the type of the error, the line of the user's code, and a
    hint at --traceback.
    """
    from xlstm_jax.forecast.training.workload import is_raised_by_library, one_line_text
    from xlstm_jax.formatting import shortened

    text = one_line_text(error) + ("" if is_raised_by_library(error) else "; --traceback shows the way there")
    return shortened(text, MAX_ERROR, " [... --traceback shows all of it ...] ")


def console(**options: Any) -> Console:
    """Returns a ``rich`` console that prints brackets unchanged; ``options`` are further arguments of ``Console``."""
    return Console(markup=False, highlight=False, **options)


@contextmanager
def progress() -> "Iterator[ShowProgress]":
    """Returns a context with a function ``show_progress(text, stays=False)`` that shows the current activity on stderr.

    On a terminal the text stands beside a timer, and disappears at the end. With ``stays`` the text is printed as a
    line, on a terminal or not. Otherwise nothing is shown without a terminal.
    """
    on_terminal = sys.stderr.isatty()
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console(stderr=True), transient=True, disable=not on_terminal) as bar:
        task = bar.add_task("")

        def show_progress(text: str, *, stays: bool = False) -> None:
            if not stays:
                bar.update(task, description=text)
            elif on_terminal:
                bar.console.print(text)
            else:
                sys.stderr.write(f"xlstm-jax: {text}\n")

        yield show_progress
