"""Started as a program of its own: puts limits on itself, then becomes the program it is to run.

    python -I guard.py LIMITS.json PROGRAM.py

Standard library alone. It is a program, and not a function between fork and exec, because a fork of a process
with threads may run nothing that takes a lock.
"""

import json
import os
import resource
import sys
from pathlib import Path


def main() -> None:
    """Set limits, drop to another user where told to, start the program in isolated mode."""
    limits = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.chdir(limits["folder"])
    os.umask(0o077)
    if limits["user"] is not None:
        os.setgroups([])
        os.setgid(limits["user"])
        os.setuid(limits["user"])
    for name, value in limits["limits"].items():
        number = getattr(resource, name, None)
        if number is not None:  # not every system knows every limit
            _, hard = resource.getrlimit(number)
            top = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (top, top))
    os.execve(sys.executable, [sys.executable, "-I", "-B", sys.argv[2]], {"PATH": "/usr/bin:/bin"})


if __name__ == "__main__":
    main()
