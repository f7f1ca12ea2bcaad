"""Timings of a request: the reports that return_timings and GET /debug/requests/{id} show."""

import dataclasses
from collections.abc import Callable
from itertools import count
from typing import Any

from engine.replicas.engine import Engine

Timings = Callable[[], list[dict[str, Any]]]  # called after the end of the answer


def find_timings(driver: Engine, tenant: str, response_id: str) -> list[dict[str, Any]]:
    """Reports on the engine's requests behind one answer, one per prompt; none for requests of other tenants."""
    reports = (driver.request_report(f"{response_id}-{i}", tenant) for i in count())
    found: list[dict[str, Any]] = []
    for report in reports:
        if report is None:
            return found
        found.append(dataclasses.asdict(report))
    return found
