"""Write the settings that a search has found to a config file for ``ddl run --config``."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddlcore.commands.search_lines import outcome
from ddlcore.contracts.atomic import replacing
from ddlcore.contracts.tuner import Value
from ddlcore.tune.session import Phase, Session

_SIZES = ("fusion_bytes", "first_bucket_bytes")


def about_text(command: Sequence[str], ranks: int, hosts: int) -> str:
    """Return one line of text that says which command was tuned, with how many ranks and hosts.

    The line contains no control characters, such as line breaks, so that it can be a comment in a TOML file.
    """
    text = f"{shlex.join(command)}, {ranks} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def settings_found(session: Session) -> dict[str, Value]:
    """Return the settings for which the search found better values, with these values.

    The dict is empty before the search has ended.
    """
    if session.phase is not Phase.DONE or session.result is None:
        return {}
    return {name: session.result[name] for name in session.changed(session.result)}


def config_text(session: Session | None, about: str, base: Mapping[str, Value] | None = None) -> str:
    """Return the text of the config file. ``about`` is the result of ``about_text``.

    ``base`` holds the settings of the config file with which the training ran, or None. The text contains these
    settings, too, unless the search has found other values for them. ``session`` is the state of the search, or None if
    no step was measured.
    """
    lines = [f"# Written by `ddl tune` for: {about}"]
    found = settings_found(session) if session is not None else {}
    kept = {name: value for name, value in (base or {}).items() if name not in found}
    sized = session is not None and "overlap" in session.default and any(name in found for name in _SIZES)
    if sized and kept.get("overlap") == "auto":
        del kept["overlap"]  # with the new sizes, "auto" would mean another value: see below
    stays = ["# from the config file of this training", *(f"{n} = {_toml(v)}" for n, v in kept.items())] if kept else []
    if session is None:
        lines += ["# No step was measured; nothing is changed.", *stays]
        return "\n".join(lines) + "\n"
    lacks = session.lacks()
    if lacks:
        lines.append(f"# The script ended too early, and nothing is certain yet. Still to do: {lacks}.")
        best = session.best
        lines += [f"# the best so far: {name} = {_toml(best[name])}" for name in session.changed(best)] + stays
        return "\n".join(lines) + "\n"
    lines.append(f"# {outcome(session)}")
    lines += [f"{name} = {_toml(value)}" for name, value in found.items()]
    lines += stays
    if sized and not {"overlap"} & {*found, *kept}:
        # If a size is set, overlap=auto means on. But the search measured with the default value of overlap on these
        # hosts. So this value must be written, too; otherwise the file would describe settings that were not measured.
        lines += [
            "# the default value here; the sizes alone would turn overlap on",
            f"overlap = {_toml(session.default['overlap'])}",
        ]
    return "\n".join(lines) + "\n"


def write_config(path: Path, session: Session | None, about: str, base: Mapping[str, Value] | None = None) -> None:
    """Write the result of ``config_text`` to ``path``.

    Raises ValueError, with a message of one line, if the file cannot be written.
    """
    try:
        write_whole(path, config_text(session, about, base).encode())
    except OSError as error:
        raise ValueError(f"--out {path}: {error.strerror}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Replace the content of the file at ``path`` by ``data``.

    If the file cannot be written, OSError is raised and the old content is unchanged.
    """
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe
        path.write_bytes(data)
        return
    with replacing(path) as new:
        new.write_bytes(data)


def kept_beside(out: Path, report: Path) -> tuple[Path, Path]:
    """Return the paths of the config file and the report of a search that has not ended.

    These are ``out`` and ``report`` if neither file exists. Otherwise other names in the same folders are returned, so
    that the files of an earlier search are not overwritten.
    """
    if not any(path.exists() for path in (out, report, report.with_suffix(".png"))):
        return out, report
    return out.with_name(f"{out.stem}.unfinished{out.suffix}"), report.with_name(
        f"{report.stem}.unfinished{report.suffix}"
    )


def _toml(value: Value) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    # TOML's strings, numbers and booleans are those of JSON, except for surrogate pairs and DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def values_of(file: Mapping[str, object]) -> dict[str, Value]:
    """Return the settings in the content of a config file, as values that a search can try.

    ``file`` is the parsed content. Entries that are not text, numbers or booleans are left out.
    """
    return {name: value for name, value in file.items() if isinstance(value, (str, int, float, bool))}
