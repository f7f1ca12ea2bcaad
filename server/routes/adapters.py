"""vLLM's POST /v1/load_lora_adapter and unload_lora_adapter, for administrators; 404 unless --allow-runtime-lora."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from engine.errors import InvalidRequestError
from server.context import Served
from server.errors import ApiError, invalid
from server.protocol.strict import Strict


class UnloadAdapterRequest(Strict):
    """`model` names the base model where the server has several; default: the first."""

    lora_name: str = Field(min_length=1, max_length=128)
    model: str | None = None


class LoadAdapterRequest(UnloadAdapterRequest):
    """`lora_path` is a folder inside --lora-root, absolute or relative to it."""

    lora_path: str = Field(min_length=1, max_length=4096)


Asked = TypeVar("Asked", bound=UnloadAdapterRequest)


def may_change_adapters(served: Served) -> bool:
    """True if a model of the server loads adapters at run time."""
    return any(one.driver.config.allow_runtime_lora for one in served.models)


async def load_adapter(http: HttpRequest, served: Served) -> Response:
    """Load a LoRA adapter; answers once requests may name it."""
    request, served = await _read(http, served, LoadAdapterRequest)
    name = request.lora_name
    if name in served.models.names:
        raise invalid(f"lora_name: a model is called {name!r} already.", "lora_name")
    if any(name in other.adapters for other in served.models if other is not served):
        raise invalid(f"lora_name: an adapter of another model is called {name!r} already.", "lora_name")
    await load_everywhere(served.driver.replicas, name, request.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(http: HttpRequest, served: Served) -> Response:
    """Forget a LoRA adapter. Its live streams go on; later requests get 404."""
    request, served = await _read(http, served, UnloadAdapterRequest)
    try:
        unload_everywhere(served.driver.replicas, request.lora_name)
    except InvalidRequestError as error:
        raise ApiError(404, str(error), param=error.param, code=error.code) from None
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


class HasAdapters(Protocol):
    """The part of a replica that loads adapters."""

    def health(self) -> str | None: ...
    async def load_adapter(self, name: str, path: str) -> object: ...
    def unload_adapter(self, name: str) -> object: ...


async def load_everywhere(replicas: Sequence[HasAdapters], name: str, path: str) -> None:
    """Load an adapter on every replica that lives, or on none. Raises the error of the first that refuses."""
    done = []
    try:
        for replica in _living(replicas):
            await replica.load_adapter(name, path)
            done.append(replica)
    except BaseException:
        unload_everywhere(done, name)
        raise


def unload_everywhere(replicas: Sequence[HasAdapters], name: str) -> None:
    """Unload an adapter from every replica that lives. InvalidRequestError where no replica has it."""
    missing = []
    living = _living(replicas)
    for replica in living:
        try:
            replica.unload_adapter(name)
        except InvalidRequestError as error:
            missing.append(error)
    if missing and len(missing) == len(living):
        raise missing[0]


def _living(replicas: Sequence[HasAdapters]) -> Sequence[HasAdapters]:
    """The replicas that have not ended; all of them where none lives, so that one can tell why."""
    return [replica for replica in replicas if replica.health() is None] or replicas


async def _read(http: HttpRequest, served: Served, kind: type[Asked]) -> tuple[Asked, Served]:
    """The request and the model whose adapters it changes. Raises 404 where no model may change them, ApiError 403 for
    a key that is no administrator's."""
    if not may_change_adapters(served):
        raise HTTPException(404)
    http.state.caller.check_admin()
    request, served = await served.read(http, kind)
    if not served.driver.config.allow_runtime_lora:
        raise ApiError(404, "This model was started without --allow-runtime-lora.", param="model")
    return request, served
