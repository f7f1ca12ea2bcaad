"""`pageserve serve` as the child of a replica: the process ends when its replica is killed."""

import ctypes
import os
import signal
import sys

from server.cli import main

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ.pop("PAGESERVE_RAY_PARENT"):
        sys.exit(1)  # the parent died before prctl
    sys.exit(main(["serve", *sys.argv[1:]]))
