"""Make a virtual environment, and install packages into it with uv, from where pip would take them.

    python tools/environment.py FOLDER [arguments of `uv pip install` …]

uv installs the frameworks in a tenth of pip's time, because it downloads and unpacks many wheels at once. But uv does not
read pip's settings, for example the package index of a company, so this program passes them on to uv. The program runs
before anything else is installed, and uses only Python's standard library.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["PYPI_ALONE", "of_pip", "settings"]

ROOT = Path(__file__).resolve().parents[1]
# pip's settings, with the variable of uv that means the same, and what separates several values there.
SAME = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}
# Variables by which pip, uv and this program take packages from PyPI only: no other index, and no folder on a disk.
PYPI_ALONE = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_CONSTRAINT": "",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_INDEX_URL": "",
    "UV_FIND_LINKS": "",
    "UV_NO_CONFIG": "1",
}
# By default, uv takes a package from the first index that has it. pip takes the highest version of all indexes.
ALL_INDEXES = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
# The parts of pip's configuration that hold for `pip install`; a later one has precedence.
SECTIONS = ("global", "install", ":env:")


def settings(listed: str) -> dict[str, str]:
    """Return the variables by which uv does what pip is set to do. ``listed`` is the output of `pip config list`."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in found and value:
            found[section][name.strip(".")] = str(ast.literal_eval(value))
    chosen = {name: value for section in SECTIONS for name, value in found[section].items()}
    return ALL_INDEXES | {
        variable: separator.join(chosen[name].split())
        for name, (variable, separator) in SAME.items()
        if chosen.get(name, "").split()
    }


@functools.cache
def of_pip(python: Path) -> dict[str, str]:
    """Return ``settings`` of the pip of ``python``. Variables of uv that the user has set have precedence."""
    command: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
    return {name: value for name, value in settings(listed).items() if name not in os.environ}


def main(arguments: list[str]) -> int:
    """Make the environment in the folder ``arguments[0]``, install what the other arguments say, return the exit code."""
    folder, wanted = Path(arguments[0]), arguments[1:]
    python, uv = folder / "bin/python", folder / "bin/uv"
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    try:
        if not uv.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", "uv"], check=True)
        command: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", python, *wanted]
        subprocess.run(command, check=True, env=os.environ | of_pip(python))
    except subprocess.CalledProcessError as error:  # the program has said why
        return int(error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
