"""Errors that a user can do something about; shown as one line, without a traceback."""


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
    """

    def __init__(self, status: str, exit_code: int):
        super().__init__(status)
        self.exit_code = exit_code
