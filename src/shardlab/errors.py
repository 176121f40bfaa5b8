"""How a run ends that cannot go on, and any error as one line."""


class ConfigError(ValueError):
    """A mistake in the config.

    The message is one line that names the key, the value found and the way out; the process exits with code 2.
    """


class TrainingError(RuntimeError):
    """Training cannot go on; the message says since when, and what to try. The process exits with code 1."""


class Interrupted(RuntimeError):
    """A signal asked the run to end."""


class RunEnded(RuntimeError):
    """A run did not complete; its summary and the display have told why.

    Attributes:
        exit_code: what the process should exit with.
        interrupted: whether a signal ended it.
    """

    def __init__(self, status: str, exit_code: int):
        super().__init__(status)
        self.exit_code = exit_code
        self.interrupted = status == "interrupted"


def describe(error: BaseException) -> str:
    """An error as one line: its class and the first line of its message; of ours, the message alone."""
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught ") and "DataLoader worker" in lines[0]:
        # What a worker raised comes with its traceback as text, whose last line is like those below.
        return lines[-1].removeprefix(f"{ConfigError.__module__}.{ConfigError.__name__}: ")
    if isinstance(error, (ConfigError, TrainingError)):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")


def shorten(error: BaseException, limit: int = 300) -> str:
    """An error's whole message on one line of at most `limit` characters, or its type where it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
