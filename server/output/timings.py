"""Timings of a request: the reports that return_timings and GET /debug/requests/{id} show."""

import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from engine.driver import Driver
from server.protocol import GenerationRequest
from server.protocol.translated import SamplingExtras

Timings = Callable[[], list[dict[str, Any]]]  # called once the answer has ended


def find_timings(driver: Driver, tenant: str, response_id: str) -> list[dict[str, Any]]:
    """Reports on the engine's requests behind one answer, one per prompt; none for requests of other tenants."""
    reports = (driver.request_report(f"{response_id}-{i}", tenant) for i in count())
    found: list[dict[str, Any]] = []
    for report in reports:
        if report is None:
            return found
        found.append(dataclasses.asdict(report))
    return found


def asked_timings(
    driver: Driver, tenant: str, request: GenerationRequest | SamplingExtras, response_id: str
) -> Timings | None:
    """A function that finds the timings of an answer; None without return_timings."""
    return partial(find_timings, driver, tenant, response_id) if request.return_timings else None
