"""Define what a setting is. The names of its flag, variable and key of the config file are derived from its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ddlcore.types import Value

# The groups of options in the help of a command, in this order, and what each is for.
GROUPS: Mapping[str, str] = {
    "job": "what is started, and with which settings",
    "hosts": "where ranks run, and how they are reached",
    "output": "what is shown and recorded",
    "performance": "how tensors are reduced",
    "faults": "when a wait or a difference is reported, or ends the job",
    "tuning": "the search for better settings",
}


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings.

    ``name`` ends with the unit of the value, if the value has a unit. The names of the variable and of the flag are
    derived from ``name``. The help of a command shows the flags in groups, and ``group`` is the key in ``GROUPS`` of
    the flag's group. If ``group`` of a plugin's setting is not a key of ``GROUPS``, the help shows the flag in a group
    of that plugin.
    """

    name: str
    type: type[str] | type[int] | type[float] | type[bool]
    default: Value
    doc: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    group: str = ""
    brief: str = ""  # what the short help says, in one line; empty, or of a plugin: only --help-all shows the flag
    metavar: str = ""  # what the help shows in place of the value; empty: a word for the type
    bare: str = ""  # the value if the flag is given without one; empty: the flag needs a value
    form: str = ""  # with ``bare``: regular expression of the words after the flag that are its value

    @property
    def env(self) -> str:
        return "DDL_" + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, raw: object, where: str) -> Value:
        """Convert ``raw``, a text or a value from a TOML file, to a value of this setting, and return that value.

        ``where``: the flag, variable or key from which ``raw`` was read. Raises ValueError, with ``where`` in the
        message, if ``raw`` is not a valid value.
        """
        value = self._convert(raw, where)
        value = next((one for one in self.choices if one.lower() == str(value).lower()), value)
        if self.choices and value not in self.choices:
            raise ValueError(f"{where}: {raw!r} is not one of {', '.join(self.choices)}")
        if self.minimum is not None and not isinstance(value, str) and value < self.minimum:
            raise ValueError(f"{where}: {raw!r} is below the least allowed value {self.minimum:g}")
        return value

    def _convert(self, raw: object, where: str) -> Value:
        if self.type is bool and isinstance(raw, str):
            word = raw.strip().lower()
            if word in ("1", "true", "yes", "on"):
                return True
            if word in ("0", "false", "no", "off", ""):
                return False
            raise ValueError(f"{where}: {raw!r} is neither true nor false (use 1 or 0)")
        if isinstance(raw, bool) is not (self.type is bool):
            raise ValueError(f"{where}: {raw!r} is not of type {self.type.__name__}")
        if isinstance(raw, bool):
            return raw
        try:
            if self.type is int and isinstance(raw, float):
                raise ValueError  # int() would silently round 1.5 down
            value = self.type(str(raw))
            if value != value:
                raise ValueError  # nan compares false with every limit
            return value
        except ValueError:
            raise ValueError(f"{where}: {raw!r} is not of type {self.type.__name__}") from None
