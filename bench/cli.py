"""Every command, thin: parse, call, print, exit code. Logic lives in host, fleet and report."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer
from rich.console import Console

import bench

app = typer.Typer(
    name="bench",
    help="How fast does a node really save a checkpoint, and is what it saves correct?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"bench {bench.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Checkpoint throughput benchmark for GPU nodes."""


def _fail(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"bench: {message}", markup=False)
    sys.exit(1)


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 1, never a traceback."""
    if sys.flags.optimize:
        # DeepSpeed's writers do their I/O inside assert statements, which -O removes.
        _fail("refusing to run under python -O or PYTHONOPTIMIZE: DeepSpeed's I/O calls are inside asserts")
    try:
        app()
    except (ValueError, FileNotFoundError, PermissionError) as error:
        _fail(str(error))


if __name__ == "__main__":
    main()
