"""Errors that are the user's to solve: a command prints them as one paragraph, without a traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable


class UserError(Exception):
    """What was expected, what was found, what to do. Subclasses say of which kind."""


def command(main: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command's main function: a UserError ends it with that text on stderr and exit code 1."""

    @functools.wraps(main)
    def wrapped(*args, **kwargs) -> None:
        try:
            main(*args, **kwargs)
        except UserError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit("interrupted")

    return wrapped
