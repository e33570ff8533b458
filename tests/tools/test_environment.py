"""How uv learns what pip is set to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.environment import of_pip, settings

LISTED = """\
:env:.find-links='/wheels /more'
global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'
global.find-links='/elsewhere'
global.quiet='1'
install.constraint='/etc/constraints.txt'
global.constraint='/other.txt'
list.format='columns'
"""


def test_settings_of_pip_become_variables_of_uv() -> None:
    """The environment has precedence over the section `install`, and that over `global`."""
    assert settings(LISTED) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX": "https://a.example/simple https://b.example/simple",
        "UV_CONSTRAINT": "/etc/constraints.txt",
    }


def test_an_empty_variable_takes_a_setting_away() -> None:
    """So `PIP_FIND_LINKS= make venv` takes no wheel from a folder that pip's configuration names."""
    assert settings("global.find-links='/wheels'\n:env:.find-links=''\n") == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_pip_itself_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """uv gets what pip's variables and files say. If the user has set a variable of uv, its value stays."""
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://index.example/simple\ntimeout = 7\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "60")
    found = of_pip.__wrapped__(Path(sys.executable))
    assert found["UV_DEFAULT_INDEX"] == "https://index.example/simple"
    assert found["UV_NO_INDEX"] == "1"
    assert "UV_HTTP_TIMEOUT" not in found
