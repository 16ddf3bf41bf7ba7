"""Where the program is."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def find_binary() -> str:
    """The path of the program: the variable OTTAVA_BINARY, else the program beside this Python, else the program on PATH.

    Errors with FileNotFoundError if there is none.
    """
    named = os.environ.get("OTTAVA_BINARY")
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"OTTAVA_BINARY is {named}, which is no file")
        return named
    user = sysconfig.get_path("scripts", f"{os.name}_user")
    for folder in (sysconfig.get_path("scripts"), str(Path(sys.executable).parent), user):
        path = Path(folder) / "ottava"
        if path.is_file():
            return str(path)
    found = shutil.which("ottava")
    if found is None:
        raise FileNotFoundError("the program `ottava` is neither beside this Python nor on PATH; set OTTAVA_BINARY to its path")
    return found
