"""Translates the HOROVOD_* variables of an environment to ddl's own variables."""

from __future__ import annotations

from collections.abc import Mapping

from ddl_horovod.tables import Answers, read_variables

# What horovodrun tells its ranks, and the facts of the setting rank_variables that they are.
RANK_VARIABLES: Mapping[str, str] = {
    "HOROVOD_RANK": "rank",
    "HOROVOD_SIZE": "size",
    "HOROVOD_LOCAL_RANK": "local_rank",
    "HOROVOD_LOCAL_SIZE": "local_size",
    "HOROVOD_CROSS_RANK": "cross_rank",
    "HOROVOD_CROSS_SIZE": "cross_size",
    "HOROVOD_HOSTNAME": "address",
}


def with_ddl_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return ``environ`` with the variables of ddl that its HOROVOD_* variables ask for, and lines about all others.

    A variable of ddl that ``environ`` has stays as it is. Variables that tell a rank its place are not mentioned, because
    horovodrun sets them. Raises ValueError, with a message of one line, for a malformed value.
    """
    answers = read_variables({name: value for name, value in environ.items() if name not in RANK_VARIABLES})
    return {**variables_of(answers), **environ}, [*answers.notes, *answers.refusals]


def variables_of(answers: Answers) -> dict[str, str]:
    """Return the settings and variables in ``answers`` as environment variables of ddl."""
    settings = {
        f"DDL_{name.upper()}": str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in answers.settings.items()
    }
    return {**settings, **answers.environ}


def rank_variables(environ: Mapping[str, str]) -> str:
    """Return the value of the setting rank_variables under which ranks are told their place by Horovod's variables, too."""
    ours = [f"{name}={fact}" for name, fact in RANK_VARIABLES.items()]
    return ",".join([*filter(None, [environ.get("DDL_RANK_VARIABLES", "")]), *ours])
