"""Engine: what the server uses of a model that runs, on one Worker (Driver) or on several (Replicas)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.config import EngineConfig
from engine.errors import PageserveError
from engine.grammars.checker import GrammarChecker
from engine.request import Request
from engine.requests.model_info import ModelInfo
from engine.requests.stream import RequestStream
from engine.telemetry.request_log import RequestReport
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.checkpoint.sampling_defaults import SamplingDefaults
    from engine.driver import Driver
    from engine.structured_output import StructuredOutput


class Grammars(Protocol):
    """Prepares structured outputs: see GrammarService."""

    @property
    def checker(self) -> GrammarChecker: ...

    async def prepare(self, output: "StructuredOutput", tenant: str = "") -> None: ...


class Engine(Protocol):
    """The methods and attributes are those of Driver, which describes them."""

    @property
    def replicas(self) -> "Sequence[Driver]":
        """The Drivers, each with a Worker of its own; a Driver is its own only replica."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def phase(self) -> str: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def grammars(self) -> Grammars: ...

    @property
    def eos_token_ids(self) -> list[int]: ...

    @property
    def sampling_defaults(self) -> "SamplingDefaults": ...

    @property
    def adapters(self) -> dict[str, str]: ...

    @property
    def sleep_level(self) -> int: ...

    async def start(self) -> None: ...

    async def wait_ready(self) -> None: ...

    async def wait_failed(self) -> PageserveError: ...

    async def drain(self, timeout: float) -> bool: ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    async def sleep(self, level: int = 2) -> None: ...

    async def wake(self) -> None: ...

    def generate(self, request: Request) -> RequestStream: ...

    def abort(self, request_id: str) -> None: ...

    def health(self) -> str | None: ...

    def request_report(self, request_id: str, tenant: str = "") -> RequestReport | None: ...
