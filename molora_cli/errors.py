"""What a user can be told. Every error says what is wrong, where, why, and what to do about it."""

from __future__ import annotations


class MoloraError(Exception):
    """An error with a remedy, shown without a traceback by the one boundary in `molora_cli.app`.

    message: what, where and why, in one or two lines. remedy: the next step, a command where there is one.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\nRemedy: {self.remedy}" if self.remedy else self.message


class InputError(MoloraError):
    """The user changes something: a flag, a path, a file (exit code 2)."""

    exit_code = 2


class ThresholdError(MoloraError):
    """A threshold that was asked for was not met (exit code 3)."""

    exit_code = 3
