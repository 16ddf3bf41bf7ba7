"""Asks the program to stop if the Python that has started both ends without an answer to this process.

usage: _watch.py PID      (PID is the process of the program; the Python writes a byte to the standard input of this process after the end of the program)
"""

import os
import signal
import sys


def main() -> None:
    # A signal to all processes of a job leaves this process alive, as long as Python stops the run.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1) == b"":
        try:
            os.kill(int(sys.argv[1]), signal.SIGTERM)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    main()
