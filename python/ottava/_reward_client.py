"""The command of a reward that a function of a script computes: passes each line on to the process of the script, and its answer back.

usage: _reward_client.py NAME      (the variable OTTAVA_PYTHON_REWARDS has the path of the socket)
"""

import os
import socket
import sys


def main() -> None:
    path = os.environ.get("OTTAVA_PYTHON_REWARDS")
    if path is None:
        sys.exit("this reward is a function of a script: resume the run by its script")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        # Bytes, because the locale of the program may not be UTF-8.
        stream = connection.makefile("rwb")
        stream.write(os.fsencode(sys.argv[1]) + b"\n")
        for line in sys.stdin.buffer:
            stream.write(line)
            stream.flush()
            answer = stream.readline()
            if not answer:
                sys.exit("the script of the reward has ended")
            sys.stdout.buffer.write(answer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
