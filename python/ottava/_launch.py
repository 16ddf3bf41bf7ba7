"""Becomes the program, which Linux then asks to stop when the Python that has started it ends.

usage: _launch.py PID PROGRAM [ARGUMENT]...      (PID is the process that starts this file)
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        # Without the library, the program goes on when Python is killed.
        pass
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this run has ended")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
