"""What the source may not name: surroundings in the runtime, plugins in the core, this machine anywhere."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, Source, core, every, plugins, tools

SURROUNDINGS = re.compile(r"\b(pluggy|environ|getenv|torch|tensorflow|keras|mxnet|jax)\b", re.IGNORECASE)
PLUGINS = re.compile(r"nccl|gloo|(?<!co)mpi|torch|tensorflow|keras|mxnet", re.IGNORECASE)  # not in compile
TABLE = "plug/aliases.py"  # the one that names plugins and frameworks, and what installs them
# What other launchers are called, take and set: ddl recognises their ranks, starts its agents by them, and takes
# horovodrun's command lines and variables. These words are theirs, and name no plugin of ours.
THEIRS = (
    r"\b(?:OMPI|MPISPAWN|JSM|TORCHELASTIC|HOROVOD)_\w+|\bMPI_LOCAL(?:RANKID|NRANKS)\b|\bNCCL_IB_DISABLE\b",  # variables
    r'"--[a-z-]+(?:=[a-z]+)?"',  # flags
    r"\b(?:use_gloo|use_mpi|mpi_args)\b",  # keywords of horovod.run
    r"\b(?:torch_env|TORCHRUN_VARIABLES)\b|--no-torch-env",  # whether torchrun's variables are set
    r"\b(?:mpirun(?:_rsh)?|mpiexec|MPICH|OpenMpi|openmpi|Torchrun|torchrun)\b",  # commands, and whose they are
)
LAUNCHERS = re.compile("|".join(THEIRS))
ENVIRON = re.compile(r"\bos\.(environ|getenv|putenv)\b")

READS_ENVIRONMENT = {
    "ddlcore/process/environment.py": "the one reader of DDL_* variables",
    "ddlcore/contracts/cache.py": "finds the user's cache directory by XDG_CACHE_HOME, before there is a job that has settings",
}


def test_the_runtime_knows_no_surroundings() -> None:
    """Nothing under runtime/ names pluggy, the environment or a framework, not even in a comment."""
    runtime = [source for source in core() if source.module.startswith("ddlcore.runtime")]
    hits = [
        f"{source}:{n} {line.strip()}"
        for source in runtime
        for n, line in enumerate(source.text.splitlines(), 1)
        if SURROUNDINGS.search(line)
    ]
    assert len(runtime) > 20
    assert hits == []


def test_the_core_names_no_plugin() -> None:
    """A plugin or a framework stands in the table of aliases only, not even in a comment or as a part of a word.

    In every file, templates included. The words of other launchers are let through, see LAUNCHERS.
    """
    folder = ROOT / "ddlcore"
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    hits = [
        f"{name}:{number} {line.strip()}"
        for path in files
        if (name := str(path.relative_to(folder))) != TABLE
        for number, line in enumerate([name, *path.read_text(encoding="utf-8").splitlines()])
        if PLUGINS.search(LAUNCHERS.sub("", line))
    ]
    assert len(files) > 100
    assert hits == []


@pytest.mark.parametrize(
    "word", ["two_nccl_wheels", "GlooPeer", "an MPI call", "mpi4py", '"mpi"', "PyTorch", "ddl_mxnet"]
)
def test_a_name_in_whatever_word_is_found(word: str) -> None:
    """What is let through is launchers' only."""
    theirs = 're.compile("OMPI_COMM_WORLD_RANK"), "--gloo", "--mpi=none"  # mpirun sets it, torchrun and MPICH do not'
    assert not PLUGINS.search(LAUNCHERS.sub("", theirs))
    assert PLUGINS.search(LAUNCHERS.sub("", f"{theirs}; {word}"))


def test_the_environment_is_read_in_one_file() -> None:
    """Others may hand os.environ on, whole, as an argument; what is in it is read where the table of settings is.

    The launcher and its commands, which make the environment of other processes, are excepted.
    """
    excepted = ("ddlcore.launch", "ddlcore.commands", *tools())
    held = [one for one in every() if str(one) not in READS_ENVIRONMENT and not one.module.startswith(excepted)]
    assert [hit for source in held for hit in _reads_of_the_environment(source)] == []


def _reads_of_the_environment(source: Source) -> list[str]:
    handed_on = {id(argument) for node in source.nodes if isinstance(node, ast.Call) for argument in node.args}
    return [
        f"{source}:{node.lineno} {node.value.id}.{node.attr}"
        for node in source.nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and ENVIRON.fullmatch(f"{node.value.id}.{node.attr}")
        and id(node) not in handed_on
    ]


def test_the_exceptions_are_needed() -> None:
    """An exception whose file is gone, or no longer needs it, goes too."""
    named = "".join(source.text for source in core())
    for words in THEIRS:
        assert any(PLUGINS.search(word) for word in re.findall(words, named))
    for name in READS_ENVIRONMENT:
        assert ENVIRON.search((ROOT / name).read_text())


def test_no_file_names_this_machine() -> None:
    """What is committed holds on any machine: no path of this checkout, none below the home of who runs this."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [f"{Path.home()}/".encode(), f"{ROOT}/".encode()]
    files = [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    assert [str(path) for path in files if any(word in path.read_bytes() for word in paths)] == []


def test_no_text_is_asked_whether_it_is_of_digits() -> None:
    """`"²".isdigit()` is true, and int("²") raises: isdecimal is what int takes."""
    assert [str(source) for source in every() if ".isdigit(" in source.text and source.path != Path(__file__)] == []


# Words that had a private meaning once, with what they are called now. Names of other projects and ordinary sentences are
# let through: only identifiers and file names are looked at, whole or between underscores.
FORMER_WORDS = {
    "inbox": "tensor_queue",
    "aloft": "in_flight",
    "flown": "in_flight",
    "recurring": "persistent",
    "again_together": "start_all",
    "verdict": "failure or exit_status",
    "rhythm": "replay_controller",
    "standings": "replay_status",
    "entrance": "listener",
    "doorman": "authenticator",
    "knock": "probe",
    "reception": "registration",
    "brain": "coordinator",
    "crew": "agents",
    "elsewhere": "remote",
    "adoption": "detection",
    "guest": "external_rank",
    "witness": "observed",
    "onlookers": "observers",
    "scribe": "trace_writer",
    "courier": "worker",
    "errand": "task",
    "parcel": "bucket",
    "cure": "fix",
    "seat": "slot or rank_info",
    "lane": "channel or stream",
    "leg": "trial",
    "pilot": "search_driver",
    "by_host": "stage_on_host",
}
THEIR_WORDS = {
    "ddlcore/contracts/dlpack.py": {"lane"},  # DLPack's field
    "examples/plugins/ddl_jax/src/ddl_jax/dlpack.py": {"lane"},
    "plugins/ddl_nccl/src/ddl_nccl/cuda/kernels.py": {"lane"},  # CUDA's: a thread of a warp
    "plugins/ddl_nccl/src/ddl_nccl/cuda/primitives.py": {"lane"},
    "plugins/ddl_shm/src/ddl_shm/hierarchical/layout.py": {"by_host"},  # ranks by their host
}


def _former(name: str) -> list[str]:
    """Return the former words in an identifier, in whatever style it is written."""
    plain = "_" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_") + "_"
    return [word for word in FORMER_WORDS if f"_{word}_" in plain or f"_{word}s_" in plain]


def test_no_name_is_a_former_word() -> None:
    """In names of modules, classes, functions, arguments, variables and attributes."""
    hits = [
        f"{source}: {name} is {' and '.join(words)}"
        for source in every()
        for name in sorted(_names(source))
        if (words := [one for one in _former(name) if one not in THEIR_WORDS.get(str(source), ())])
    ]
    assert hits == [], "see FORMER_WORDS for what to call it"


def _names(source: Source) -> set[str]:
    names = {source.path.stem}
    for node in source.nodes:
        names |= {
            value for field in ("id", "attr", "name", "arg") if isinstance(value := getattr(node, field, None), str)
        }
    return names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Inbox", ["inbox"]),
        ("_try_knock", ["knock"]),
        ("seats", ["seat"]),
        ("secured", []),
        ("planes", []),
        ("legend", []),
    ],
)
def test_former_words_are_found_in_any_style(name: str, words: list[str]) -> None:
    """Whole, or between underscores; not as a part of another word."""
    assert _former(name) == words


# Class names that several packages use, because each implements the same concept for the tensors of its framework.
PER_FRAMEWORK = {"Call", "Compression", "ElasticSampler", "GlobalBatchSampler", "Reducer", "Reduction", "Slot"}
FRAMEWORKS = {"ddl_mxnet", "ddl_tf", "ddl_torch"}


def test_a_public_class_has_a_name_of_its_own() -> None:
    """In the core and all plugins. Two share a name only if they are one thing.

    These are a protocol and what implements it, a class and its subclass of the same name, and those of PER_FRAMEWORK.
    """
    found: dict[str, list[tuple[str, ast.ClassDef]]] = {}
    packages = {"ddlcore": core(), **plugins(), **tools()}
    for package, source in ((name, source) for name, sources in packages.items() for source in sources):
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append((package, node))
    twice = {name: [package for package, _ in own] for name, own in found.items() if not _are_one_thing(name, own)}
    assert twice == {}
    assert {name for name in PER_FRAMEWORK if len(found[name]) > 1} == PER_FRAMEWORK


def _are_one_thing(name: str, found: list[tuple[str, ast.ClassDef]]) -> bool:
    originals = [
        (package, node)
        for package, node in found
        if not any(ast.unparse(base).rpartition(".")[2] == name for base in node.bases)
    ]
    packages = [package for package, _ in originals]
    if name in PER_FRAMEWORK and set(packages) <= FRAMEWORKS and len(set(packages)) == len(packages):
        return True
    return 1 in (len(found), len(originals)) or (
        len(originals) == 2 and any(_is_protocol(node) for _, node in originals)
    )


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)
