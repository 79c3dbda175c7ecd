"""Exceptions of the package. Each has the exit code, the message and the hints of the command line."""

from __future__ import annotations

from plimsoll import _native


class PlimsollError(Exception):
    """Base class. ``str()`` returns the text that the command line prints."""

    #: Exit code of the command line.
    exit_code = 1

    def __init__(self, message: str, hints: list[str] | None = None) -> None:
        super().__init__(message, hints or [])
        #: What failed, and where.
        self.message = message
        #: Suggestions for a fix.
        self.hints = hints or []

    def __str__(self) -> str:
        return _native.failure_text(self.message, self.hints)


class Bug(PlimsollError):
    """A bug in Plimsoll."""


class InputError(PlimsollError):
    """The run file, an argument, the model, the data or the machine is not as expected."""

    exit_code = 2


class DoesNotFit(PlimsollError):
    """The run does not fit under the load line. The hints name settings that fit."""

    exit_code = 3


class Stopped(PlimsollError):
    """A run ended early. ``plimsoll.train(resume=...)`` resumes it."""

    exit_code = 4


def from_exit_code(exit_code: int, message: str, hints: list[str]) -> PlimsollError:
    """Creates the exception for an exit code; an unknown code gives a :class:`Bug`."""
    kinds = {kind.exit_code: kind for kind in (Bug, InputError, DoesNotFit, Stopped)}
    return kinds.get(exit_code, Bug)(message, hints)
