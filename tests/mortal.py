"""`python -m tests.mortal COMMAND...` becomes COMMAND, which the kernel kills when whoever started it ends (Linux).

So a test run that is killed leaves no server behind. A process that a thread started ends with that thread.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # it stays through exec
MORTAL = [sys.executable, "-m", "tests.mortal"]  # to be put before a command, from the root of the repository


def main() -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        sys.exit(1)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
