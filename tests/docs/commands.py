"""Takes a block of shell apart into commands, and has each program's own parser say whether it is one."""

from __future__ import annotations

import re
import shlex
import subprocess
from functools import cache
from typing import Any

import click
from ddl_horovod.command import horovodrun

from ddlcore.commands.cli import _ddl
from ddlcore.config.file import read_toml
from tests.docs.blocks import ROOT, Block

__all__ = ["commands", "objection"]

HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?")
# Other people's programs that a page tells to use: nothing here could parse what they are given.
FOREIGN = {
    "apt-get",
    "conda",
    "docker",
    "kubectl",
    "mpirun",
    "salloc",
    "sbatch",
    "scontrol",
    "srun",
    "torchrun",
    "/usr/sbin/sshd",
}
BUILTIN = {
    "[",
    "echo",
    "exit",
    "export",
    "head",
    "kill",
    "mkdir",
    "paste",
    "rm",
    "sed",
    "source",
    "tar",
    "trap",
    "wait",
}
KEYWORDS = {"do", "done", "fi", "if", "then", "while"}  # of a shell, in front of a command


def commands(block: Block) -> list[str]:
    """One a line, as a shell takes it, with its comment: a heredoc and lines that go on are one."""
    if block.language == "console":
        return [line[2:] for line in block.code.splitlines() if line.startswith("$ ")]
    found: list[str] = []
    end = ""
    for line in block.code.splitlines():
        if end:
            found[-1] += "\n" + line
            end = "" if line.strip() == end else end
        elif found and found[-1].endswith("\\"):
            found[-1] += "\n" + line
        elif line.strip() and not line.lstrip().startswith("#"):
            found.append(line)
            end = heredoc[1] if (heredoc := HEREDOC.search(line)) else ""
    return found


def objection(script: str) -> str:
    """What is wrong with shell, whole: its grammar, and the options of ours and of pip's programs in it. "" if nothing."""
    told = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=40)
    if told.returncode:
        return told.stderr
    bare = re.sub(r"<<-?\s*'?(\w+)'?\n.*?^\1$", "", script, flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ")
    for line in bare.splitlines():
        for part in _parts(line):
            if why := _objection(part):
                return f"`{line.strip()}`: {why}"
    return ""


def _parts(line: str) -> list[list[str]]:
    """The simple commands of a line, in words, without redirections and variables in front."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split = True
    lexer.commenters = "" if re.search(r"\$\{?#", line) else "#"
    parts: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if skip:
            skip = False
        elif set(word) <= set("<>"):
            skip = True
        elif set(word) <= set(";&|()"):
            parts.append([])
        elif parts[-1] or not (word == "exec" or re.match(r"\w+=", word)):
            parts[-1].append(word)
    return [part for part in parts if part]


def _objection(words: list[str]) -> str:
    while words and words[0] in KEYWORDS:
        words = words[1:]
    if not words:
        return ""
    program = words[0].removeprefix(".venv/bin/")
    if program == "bash" and words[1:2] == ["-c"]:
        return objection(words[2])
    if program == "ddl":
        return _ddl_objection(words[1:])
    if program == "horovodrun":
        return _parse_objection(horovodrun, "horovodrun", words[1:], None)
    if program == "pip":
        return _pip_objection(words[1:])
    if program == "make":
        return _make_objection(words[1:])
    if program == "uv":
        return _objection(words[2:]) if words[1:2] == ["run"] else ""
    if program in {"python", "python3"}:
        return _script_objection(words[1:])
    if program == "pytest":
        lost = [word for word in words[1:] if "/" in word and not (ROOT / word).exists()]
        return f"there is no {lost}" if lost else ""
    if program in {"srun", "mpirun", "torchrun"}:  # what they start is ours again
        starts = [at for at, word in enumerate(words) if at and word in ("ddl", "python")]
        return _objection(words[starts[0] :]) if starts else ""
    return "" if program in FOREIGN | BUILTIN else f"nothing is known of `{program}`"


def _make_objection(words: list[str]) -> str:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"\$\((\w+)\)", makefile))
    lost = {word for word in words if word not in targets and word.partition("=")[0] not in variables}
    return f"make has no {lost}" if lost else ""


def _ddl_objection(words: list[str]) -> str:
    group: click.Command = _ddl
    context = click.Context(_ddl, info_name="ddl", **_ddl.context_settings)
    while isinstance(group, click.Group) and words and not words[0].startswith("-"):
        found = group.get_command(context, words[0])
        if found is None and group is not _ddl:  # of a group that is a command itself
            break
        if found is None:
            return f"`ddl {words[0]}` does not exist"
        group, words = found, words[1:]
    return _parse_objection(group, "ddl", words, context if group is not _ddl else None)


def _parse_objection(command: click.Command, name: str, words: list[str], parent: click.Context | None) -> str:
    try:
        # click keeps the option --help as a command's first context makes it, here with the names that `ddl` gives it.
        command.make_context(name, list(words), parent=parent)
    except click.exceptions.Exit:
        pass  # --version, say
    except click.ClickException as error:
        return error.format_message()
    return ""


def _pip_objection(words: list[str]) -> str:
    """By pip's own parser; and what is to be installed is a project of this tree, with that extra, or a requirement."""
    from packaging.requirements import InvalidRequirement, Requirement
    from pip._internal.commands import create_command

    try:
        told, asked = create_command(words[0]).parse_args(words[1:])
    except SystemExit:
        return f"pip {words[0]} takes no such option"
    if words[0] not in ("install", "download", "wheel"):
        return ""
    for text in [*asked, *getattr(told, "editables", ())]:
        name, _, extra = text.partition("[")
        if name.startswith((".", "/")):
            project = next((one for one in _projects().values() if one["folder"] == (ROOT / name).resolve()), None)
            if project is None:
                if name in (".", "./ddl-mine"):
                    continue
                return f"{name} is no project of this tree"
        else:
            try:
                wanted = Requirement(text)
            except InvalidRequirement as error:
                return f"{text}: {error}"
            project = _projects().get(wanted.name)
            extra = ",".join(wanted.extras)
        lost = set(filter(None, extra.rstrip("]").split(","))) - set(project["extras"]) if project else set()
        if lost:
            return f"{text}: there is no extra {lost}"
    return ""


@cache
def _projects() -> dict[str, Any]:
    """Distributions of this tree: their folders and extras."""
    found = {}
    for path in [
        ROOT / "pyproject.toml",
        *ROOT.glob("plugins/*/pyproject.toml"),
        *ROOT.glob("examples/plugins/*/pyproject.toml"),
    ]:
        project: Any = read_toml(path)["project"]
        found[project["name"]] = {"folder": path.parent, "extras": list(project.get("optional-dependencies", ()))}
    return found


def _script_objection(words: list[str]) -> str:
    """A script of this tree is there and has these options, as far as its package's text says; modules are importable."""
    if words[0] in ("-c", "-m") or not words[0].startswith(("examples/", "tools/")):
        return ""
    script = ROOT / words[0]
    if not script.is_file():
        return f"there is no {words[0]}"
    near = [script, *script.parent.glob("*/*.py")] if script.parent.name == "tools" else [script]
    text = "".join(path.read_text() for path in near)
    stop = words.index("--") if "--" in words else len(words)
    lost = [word for word in words[1:stop] if word.startswith("-") and f'"{word}"' not in text]
    return f"{words[0]} has no {lost}" if lost else ""
