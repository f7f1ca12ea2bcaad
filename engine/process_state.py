"""What Linux tells about a process that died or stands still: was it somebody from outside?"""

from pathlib import Path


def count_oom_kills() -> int | None:
    """Processes that the kernel has killed for lack of memory since boot, in any cgroup; None where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) or a debugger has stopped the process: it does not hang by itself."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")  # after the name, which may hold anything
