"""Every error that the engine raises on purpose; server/errors.py maps each to one HTTP status.

PageserveError
├── ConfigError            a setting is wrong: refused at start-up, with the setting's name and the fix
├── ModelError             a checkpoint cannot be served: refused at start-up
├── InvalidRequestError    a mistake of the caller, names the field (400)
│   └── ContextLengthError the prompt, or prompt + max_tokens, does not fit (400, context_length_exceeded)
├── UnavailableError       the request was not accepted, it is safe to send it again (503)
│   └── QueueFullError     the queue is full (429)
├── DeadlineError          the request's own `timeout` is over (408)
└── EngineError            our mistake: the request was accepted and could not be finished (500)
"""

from dataclasses import dataclass


class PageserveError(Exception):
    """Base of all errors below; the message is fit to be shown to a user."""


class ConfigError(PageserveError):
    """A setting is unknown, has the wrong type, or promises what this version or machine cannot do."""


class ModelError(PageserveError):
    """A checkpoint is missing, damaged, unsafe to load, or of a family that is not served."""


class InvalidRequestError(PageserveError):
    """A request that can never be served unless it is changed. `param` names the field, `code` the kind of mistake."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True)
class PromptSize:
    """The sizes, in tokens, of a prompt that does not fit. `num_tokens` is a lower bound if only characters were
    counted; `longest` is the most that a prompt may have."""

    num_tokens: int
    longest: int
    context: int
    max_tokens: int | None = None


class ContextLengthError(InvalidRequestError):
    def __init__(self, message: str, param: str | None = None, size: PromptSize | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")  # clients read the message: it begins like OpenAI's
        self.size = size


STOPPED = "The server has stopped. Send the request again."


class UnavailableError(PageserveError):
    """The request was not started, so a client or a proxy may send it again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(UnavailableError):
    """The queue is full; `limit` says which: "requests" or "tokens"."""

    def __init__(self, message: str, retry_after: float = 1.0, limit: str = "requests") -> None:
        super().__init__(message, retry_after)
        self.limit = limit


class DeadlineError(PageserveError):
    """A request was not finished within its own timeout: it was dropped while it waited, or cut while it ran."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class EngineError(PageserveError):
    """An accepted request that the engine could not finish (a dead Worker, non-finite logits, a bug)."""


class RestartsSpentError(EngineError):
    """Workers have died more often than max_worker_restarts allows."""


class WorkerDiedError(EngineError):
    """The Worker process ended, hung, or broke the protocol: it must be replaced.

    `from_outside`: a signal from outside killed or stopped it, or it had not begun to compute. Then no request can have
    caused the death.
    """

    def __init__(self, message: str, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.from_outside = from_outside
