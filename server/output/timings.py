"""Timings of a request: what return_timings and GET /debug/requests/{id} say."""

import dataclasses
from itertools import count
from typing import Any

from starlette.types import Scope

from engine.driver import Driver
from server.http.api_keys import tenant_of
from server.protocol import GenerationRequest
from server.protocol.translated import SamplingExtras


def timings(driver: Driver, scope: Scope, response_id: str) -> list[dict[str, Any]]:
    """Reports on the engine requests behind one answer, one per prompt; those of other tenants do not exist."""
    reports = (driver.request_report(f"{response_id}-{i}", tenant_of(scope)) for i in count())
    found: list[dict[str, Any]] = []
    for report in reports:
        if report is None:
            return found
        found.append(dataclasses.asdict(report))
    return found


def asked_timings(
    driver: Driver, scope: Scope, request: GenerationRequest | SamplingExtras, response_id: str
) -> list[dict[str, Any]] | None:
    """`timings` for a request that has return_timings set, else None."""
    return timings(driver, scope, response_id) if request.return_timings else None
