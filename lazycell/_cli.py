"""``python -m lazycell``: arguments and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        arguments: The arguments without the program's name; by default those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m lazycell", description="Lazy parameters for MindSpore.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="one gradient step of a model with dead layers, eager and lazy")
    parser.parse_args(arguments)
    from lazycell._demo import demo

    try:
        return demo()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
