"""`python -m ottava` is the program `ottava`."""

import os
import sys

from ottava import find_binary

if __name__ == "__main__":
    binary = find_binary()
    os.execv(binary, [binary, *sys.argv[1:]])
