"""Decide which command each rank executes, by the words after the options of ``ddl run``.

This module runs no command.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_PYTHON = re.compile(r"python(w|\d+(\.\d+)?t?)?")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "env")
_TAKES_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def ranks_path(
    path: str, executable: str = sys.executable, in_environment: bool = sys.prefix != sys.base_prefix
) -> str:
    """Return the variable PATH of the ranks: ``path``, with the directory of ``executable`` in front if necessary.

    The directory is added if ``ddl`` runs in a virtual environment (``in_environment``) whose directory is not in
    ``path``. Because of this, ``.venv/bin/ddl run python train.py`` uses the python of that virtual environment even if
    the environment is not activated.
    """
    directory = os.path.dirname(executable)
    if not in_environment or directory in path.split(os.pathsep):
        return path
    return directory + os.pathsep + path if path else directory


def resolve_command(command: Sequence[str], *, path: str, interpreter: str = sys.executable) -> list[str]:
    """Return the command to execute for ``command``, the words that the user has written.

    The first item of the result is a path with a directory. ``command`` may be ``python train.py …``, ``train.py …``,
    ``-m module …``, or any executable with arguments. ``interpreter`` runs ``train.py …`` and ``-m module …``. Programs
    are looked up in ``path``, which has the form of the variable PATH. Raises ValueError, with a message of one line,
    if the program or its script does not exist.
    """
    if not command:
        raise ValueError("no command; write it after the options, such as: ddl run -np 4 python train.py")
    first = command[0]
    if first == "-m":
        if len(command) < 2:
            raise ValueError("-m: no module named; write it as: ddl run -np 4 -m package.module")
        return [interpreter, *command]
    if first.endswith(".py"):
        _require_script(first)
        return [interpreter, *command]
    program = shutil.which(first, path=path)
    if program is None and _PYTHON.fullmatch(first):
        program = interpreter
    if program is None:
        raise ValueError(_why_not(first))
    if _is_python(program):
        script = _script_of(command[1:])
        if script is not None:
            _require_script(script)
    return [program, *command[1:]]


def own_script(command: Sequence[str]) -> tuple[str, ...]:
    """Return the files that ``command`` needs on each host: its Python script, or () if it has no Python script."""
    first = command[0] if command else ""
    if first.endswith(".py"):
        return (first,)
    script = _script_of(command[1:]) if _is_python(first) else None
    return () if script is None else (script,)


def own_python(program: str, *arguments: str) -> list[str]:
    """Return a command that runs the Python code ``program`` with this interpreter and the ddlcore of this process."""
    root = str(Path(os.path.abspath(__file__)).parents[3])
    return [sys.executable, "-c", f"import sys; sys.path.append(sys.argv.pop(1))\n{program}", root, *arguments]


def may_run_python(resolved: Sequence[str]) -> bool:
    """Return whether the command ``resolved`` may run Python. Return False only if this is clearly not the case."""
    name = os.path.basename(resolved[0])
    if _is_python(resolved[0]) or name in _SHELLS:
        return True
    try:
        with open(resolved[0], "rb") as file:
            first_line = file.readline(256) if file.read(2) == b"#!" else b""
    except OSError:
        return False
    return b"python" in first_line or first_line.rstrip().endswith(b"sh")


def _is_python(program: str) -> bool:
    return _PYTHON.fullmatch(os.path.basename(program)) is not None


def _script_of(arguments: Sequence[str]) -> str | None:
    """Return the script in ``arguments``, the arguments of a Python interpreter.

    Return None if the interpreter runs a module (-m), a string (-c) or stdin.
    """
    rest = iter(arguments)
    for argument in rest:
        if argument in _TAKES_VALUE:
            next(rest, None)
        elif argument == "-" or argument.startswith(("-c", "-m")):
            return None
        elif not argument.startswith("-"):
            return argument
        elif not argument.startswith("--") and argument[-1] in "cm":  # flags in one word: -uc, -Bm
            return None
    return None


def _require_script(script: str) -> None:
    if not os.path.exists(script):
        raise ValueError(f"{script}: no such file (looked in {os.getcwd()})")


def _why_not(program: str) -> str:
    if os.sep not in program:
        return f"{program}: no such program on PATH"
    if os.path.isdir(program):
        return f"{program}: is a directory"
    if os.path.exists(program):
        return f"{program}: may not be executed (chmod +x {program}, or name the program that runs it)"
    return f"{program}: no such file (looked in {os.getcwd()})"
