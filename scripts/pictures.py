"""What scripts that draw pictures share."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write(picture, path, check):
    """Writes `picture` to `path`; to check, fails if another one is there."""
    if not check:
        path.write_text(picture, "utf-8")
    elif not path.exists() or path.read_text("utf-8") != picture:
        sys.exit(f"{path.relative_to(ROOT)} is not what scripts/{Path(sys.argv[0]).name} draws; run it")
