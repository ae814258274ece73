"""From an exception to the one sentence a person reads."""

import signal

from milepost.storage.redaction import masked_text

GONE = (
    "whoever started this process is gone, and nobody reads what it says: go on with the deployment `resume`, or "
    "`milepost resume`"
)
TERMINATED = 128 + signal.SIGTERM  # the exit code of a command that ended in good order because it was told to


class RunFailed(RuntimeError):
    """A run that had started did not finish; its folder says how far it came."""


def first_cause(error: BaseException) -> BaseException:
    """The first failure inside groups of failures that happened side by side."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def sentence(error: BaseException) -> str:
    """The message of an error on one line, or its type where it has none."""
    cause = first_cause(error)
    if isinstance(cause, OSError) and cause.strerror:
        where = f": {cause.filename}" if cause.filename else ""
        return f"{cause.strerror.lower()}{where}"
    if isinstance(cause, KeyError):
        return f"key {cause} is missing"
    text = " ".join(str(cause).split())
    return masked_text(text) or type(cause).__name__
