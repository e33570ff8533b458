"""Refuses to run beside the original Horovod, which has packages of the same names."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ddlcore.text.installing import pip_install

INSTEAD = "pip uninstall -y horovod ddl-horovod && pip install ddl-horovod"


def refuse_original() -> None:
    """Raise ImportError if the distribution ``horovod`` is installed in this environment.

    Both distributions then write their files into one folder, so a program could load parts of both.
    """
    try:
        found = version("horovod")
    except PackageNotFoundError:
        return
    raise ImportError(
        f"horovod {found} and ddl-horovod are both installed, and share the folder `horovod`; keep one: {INSTEAD}"
    )


def needs(package: str, importer: str) -> None:
    """Raise ImportError, with the line that installs it, if ``package``, such as "ddl_torch", is not installed.

    ``importer`` is the package of Horovod's that needs it.
    """
    if find_spec(package) is None:
        raise ImportError(f"{importer} needs {package.replace('_', '-')}: {pip_install(package.replace('_', '-'))}")
