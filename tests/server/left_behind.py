"""Measures what requests leave behind in a server process: sequences, blocks, tasks, file descriptors, memory."""

import asyncio
import os
import re
from pathlib import Path


def metrics(client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {m[1]: float(m[2]) for line in lines if (m := re.match(r"([a-z:_]+(?:\{[^}]*\})?) ([0-9.e+-]+)$", line))}


def gauge(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


def left_behind(client, process) -> dict[str, float]:
    found = metrics(client)
    return {
        "running": gauge(found, "vllm:num_requests_running"),
        "waiting": gauge(found, "vllm:num_requests_waiting"),
        "blocks": gauge(found, "vllm:kv_cache_usage_perc"),
        "tasks": gauge(found, "pageserve:asyncio_tasks"),
        "file descriptors": len(os.listdir(f"/proc/{process.pid}/fd")),
    }


def memory_mib(pid: int) -> float:
    """MiB of anonymous memory of a process, without mapped files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1024


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def settled(client, process, baseline: dict[str, float]) -> dict[str, float]:
    """What is left behind, read after connections had time to close."""
    for _ in range(100):
        found = left_behind(client, process)
        if all(found[name] <= baseline[name] for name in found):
            break
        asyncio.run(asyncio.sleep(0.05))
    return found
