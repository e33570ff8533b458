"""Writes what a search has found as a config file for `ddl run --config`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddlcore.contracts.atomic import replacing
from ddlcore.contracts.tuner import Value
from ddlcore.launch.tune.talk import outcome
from ddlcore.tune.session import Phase, Session

__all__ = ["about_text", "config_text", "kept_beside", "settings_found", "values_of", "write_config", "write_whole"]

_SIZES = ("fusion_bytes", "first_bucket_bytes")


def about_text(command: Sequence[str], ranks: int, hosts: int) -> str:
    """What was tuned, in one line that any file can hold: a comment in TOML ends with its line."""
    text = f"{shlex.join(command)}, {ranks} ranks on {hosts} host{'s' if hosts > 1 else ''}"
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def settings_found(session: Session) -> dict[str, Value]:
    """What a config file has to say: the settings that are worth a change; none before that is certain."""
    if session.phase is not Phase.DONE or session.result is None:
        return {}
    return {name: session.result[name] for name in session.changed(session.result)}


def config_text(session: Session | None, about: str, base: Mapping[str, Value] | None = None) -> str:
    """The file. ``about``: what was tuned. ``base``: the settings of the config file that it was tuned with: they stay."""
    lines = [f"# Written by `ddl tune` for: {about}"]
    found = settings_found(session) if session is not None else {}
    kept = {name: value for name, value in (base or {}).items() if name not in found}
    sized = session is not None and "overlap" in session.default and any(name in found for name in _SIZES)
    if sized and kept.get("overlap") == "auto":
        del kept["overlap"]  # it would say something else now, see below
    stays = (
        ["# of the config file that it was tuned with", *(f"{n} = {_toml(v)}" for n, v in kept.items())] if kept else []
    )
    if session is None:
        lines += ["# No step was measured; nothing is changed.", *stays]
        return "\n".join(lines) + "\n"
    lacks = session.lacks()
    if lacks:
        lines.append(f"# The script ended too early, and nothing is certain yet: lacking are {lacks}.")
        best = session.best
        lines += [f"# so far the best: {name} = {_toml(best[name])}" for name in session.changed(best)] + stays
        return "\n".join(lines) + "\n"
    lines.append(f"# {outcome(session)}")
    lines += [f"{name} = {_toml(value)}" for name, value in found.items()]
    lines += stays
    if sized and not {"overlap"} & {*found, *kept}:
        # Sizes that somebody chose turn overlap=auto on; what was measured had it as it is by default here.
        lines += [
            "# as it is by default here; sizes alone would turn it on",
            f"overlap = {_toml(session.default['overlap'])}",
        ]
    return "\n".join(lines) + "\n"


def write_config(path: Path, session: Session | None, about: str, base: Mapping[str, Value] | None = None) -> None:
    """Raises ValueError in one line where that cannot be."""
    try:
        write_whole(path, config_text(session, about, base).encode())
    except OSError as error:
        raise ValueError(f"--out {path}: {error.strerror}") from None


def write_whole(path: Path, data: bytes) -> None:
    """In place of what stands there, all of it or nothing. Raises OSError."""
    if path.exists() and not path.is_file():  # /dev/stdout, a pipe
        path.write_bytes(data)
        return
    with replacing(path) as new:
        new.write_bytes(data)


def kept_beside(out: Path, report: Path) -> tuple[Path, Path]:
    """Where a search that was not finished writes: not over what an earlier one has found."""
    if not any(path.exists() for path in (out, report, report.with_suffix(".png"))):
        return out, report
    return out.with_name(f"{out.stem}.unfinished{out.suffix}"), report.with_name(
        f"{report.stem}.unfinished{report.suffix}"
    )


def _toml(value: Value) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    # TOML's strings, numbers and booleans are JSON's, but for what JSON writes as two halves, and DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def values_of(file: Mapping[str, object]) -> dict[str, Value]:
    """The settings of a config file, as values to try."""
    return {name: value for name, value in file.items() if isinstance(value, (str, int, float, bool))}
