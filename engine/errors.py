"""Every error that the engine raises on purpose; server/errors.py maps each to one HTTP status.

PageserveError
├── ConfigError            a setting is wrong: refused at start-up, with the setting's name and the fix
├── ModelError             a checkpoint cannot be served: refused at start-up
├── InvalidRequestError    the caller's fault, names the field (400)
│   └── ContextLengthError the prompt, or prompt + max_tokens, does not fit (400, context_length_exceeded)
├── UnavailableError       not accepted, safe to send again (503)
│   └── QueueFullError     too much waits (429)
├── DeadlineError          the request's own `timeout` is over (408)
└── EngineError            ours: the request was accepted and could not be finished (500)
"""

from dataclasses import dataclass


class PageserveError(Exception):
    """Base of all errors below; the message is fit to be shown to a user."""


class ConfigError(PageserveError):
    """A setting is unknown, has the wrong type, or promises what this version or machine cannot do."""


class ModelError(PageserveError):
    """A checkpoint is missing, damaged, unsafe to load, or of a family that is not served."""


class InvalidRequestError(PageserveError):
    """A request that can never be served as it stands."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class PromptSize:
    """Why a prompt does not fit, in tokens. `num_tokens` is a lower bound where only characters were counted;
    `longest` is the most that a prompt may have."""

    num_tokens: int
    longest: int
    context: int
    max_tokens: int | None = None


class ContextLengthError(InvalidRequestError):
    def __init__(self, message: str, param: str | None = None, size: PromptSize | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")  # messages begin as OpenAI's: clients read them
        self.size = size


class UnavailableError(PageserveError):
    """Nothing was started for this request, so a client or a proxy may send it again."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(UnavailableError):
    """More waits than the queue may hold; `retry_after` is in seconds, `limit` says what is full."""

    def __init__(self, message: str, retry_after: float = 1.0, limit: str = "requests") -> None:
        super().__init__(message, retry_after)
        self.limit = limit


class DeadlineError(PageserveError):
    """A request was not finished in the time that it gave itself: dropped while it waited, or cut while it ran."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class EngineError(PageserveError):
    """An accepted request that the engine could not finish (a dead Worker, non-finite logits, a bug)."""


class WorkerDiedError(EngineError):
    """The Worker process ended, hung, or broke the protocol: it is of no use any more.

    `from_outside`: somebody killed or stopped it, or it had not begun to compute. No request can be guilty of that.
    """

    def __init__(self, message: str, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.from_outside = from_outside
