"""The one exception for mistakes a user can mend, and what a command makes of it."""

import argparse
import sys
from collections.abc import Callable

EXIT_MISTAKE = 2


class UserError(Exception):
    """Bad input: printed as one line without a traceback, exit code not 0.

    The message names the thing, the value it had, and the remedy, for example
    "policy.budget=100 is not a multiple of engine.block_size=32. Use 96 or 128."
    """


def exit_code(command: Callable[[argparse.Namespace], int | None], options: argparse.Namespace) -> int:
    """Carry out a command: its own exit code, 0 for None; `EXIT_MISTAKE` after a mistake, which is printed."""
    try:
        return command(options) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_MISTAKE
