"""flush: the last plan of a server, which leaves the prefix cache to the disk tier for the next one."""

import asyncio
import contextlib

from engine.executor.executor import Executor, WorkerDiedError
from engine.executor.step import StepPlan, StepResult
from engine.executor.timeouts import within

FLUSH_SECONDS = 5.0  # a slow disk gets no more


async def flush(executor: Executor, plan: StepPlan, num_in_flight: int) -> None:
    """Send `plan` and wait until it is done, behind `num_in_flight` others; gives up after FLUSH_SECONDS."""
    executor.send(plan)
    num_results = num_in_flight + 1
    loop = asyncio.get_running_loop()
    deadline = loop.time() + FLUSH_SECONDS
    with contextlib.suppress(asyncio.TimeoutError, WorkerDiedError):
        while num_results:
            message = await within(deadline - loop.time(), executor.receive())
            num_results -= isinstance(message, StepResult)
