"""Which transport serves which ranks: what `--backend` may say, what it comes to, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from ddlcore.errors import PluginError, TransportError
from ddlcore.hooks import TransportProvider
from ddlcore.plug.registry import Distribution, Registry
from ddlcore.runtime.backend import Backend, TransportChoice, parse_backend
from ddlcore.runtime.routes import Route, choose_route
from ddlcore.text.installing import pip_install
from ddlcore.types import Kind, Member

PROVIDERS = (
    TransportProvider("solo", "x:Solo", priority=100, sizes=(1, 1)),
    TransportProvider("threads", "x:Threads", in_process=True, sizes=(2, None)),
    TransportProvider("shm", "x:Shm", priority=50, one_host=True, sizes=(2, None)),
    TransportProvider("hierarchical", "x:Both", composes=True, sizes=(2, None)),
    TransportProvider("gloo", "x:Gloo", priority=10),
    TransportProvider("mpi", "x:Mpi", priority=20, launcher="mpiexec"),
    TransportProvider("ucx", "x:Ucx", priority=30, requires=("no_such_module_at_all",), install="pip install ucx"),
    TransportProvider("nccl", "x:Nccl", priority=90, devices=("cuda",), spans_devices=True),
    TransportProvider("slurm_only", "x:Slurm", launcher="slurm"),
)
ONE_HOST, TWO_HOSTS, ONE_EACH = (0, 0, 0), (0, 0, 1, 1), (0, 1, 2)


def registry_of(*names: str) -> Registry:
    """One with these providers; all of them where no name is given."""
    registry = Registry()
    for provider in PROVIDERS:
        if not names or provider.name in names:
            registry.offer(provider, Distribution("birds", "1"))
    return registry


def route(backend: str, hosts: tuple[int, ...], registry: Registry | None = None, launcher: str = "") -> Route:
    members = [Member(2 * rank, host) for rank, host in enumerate(hosts)]
    return choose_route(backend, members, registry or registry_of(), launcher)


@pytest.mark.parametrize(
    ("text", "default", "kinds"),
    [
        ("auto", ("auto",), {}),
        ("gloo", ("gloo",), {}),
        (" shm + gloo ", ("shm", "gloo"), {}),
        (
            "nccl, allgather=mpi,broadcast = shm+mpi",
            ("nccl",),
            {Kind.ALLGATHER: ("mpi",), Kind.BROADCAST: ("shm", "mpi")},
        ),
        ("shm+gloo,barrier=auto", ("shm", "gloo"), {Kind.BARRIER: ("auto",)}),
    ],
)
def test_what_may_be_said(text: str, default: tuple[str, ...], kinds: Mapping[Kind, tuple[str, ...]]) -> None:
    """A default, then exceptions by Horovod's names of the kinds; blanks do not matter."""
    expected = Backend(TransportChoice(default), {kind: TransportChoice(names) for kind, names in kinds.items()})
    assert parse_backend(text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "a name is missing; it is auto, NAME, LOCAL\\+CROSS"),
        ("gloo,", "'' is not of the form KIND=NAME"),
        (",gloo", "a name is missing"),
        ("shm+", "a name is missing"),
        ("+gloo", "a name is missing"),
        ("shm++gloo", "a name is missing"),
        ("shm+gloo+mpi", "shm\\+gloo\\+mpi has 3 parts"),
        ("auto+gloo", "auto composes by itself"),
        ("allgather=mpi", "comes first, such as auto,allgather=mpi"),
        ("gloo,mpi", "'mpi' is not of the form KIND=NAME"),
        ("gloo,allgather=", "a name is missing"),
        ("gloo,=mpi", "'' is no kind of operation; there are allreduce, allgather, broadcast, alltoall"),
        ("gloo,gather=mpi", "'gather' is no kind of operation"),
        ("gloo,join=mpi", "'join' is no kind of operation"),
        ("gloo,allgather=mpi,allgather=mpi", "allgather is there twice"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, complaint: str) -> None:
    """In one line that shows what was said."""
    with pytest.raises(ValueError, match=complaint) as caught:
        parse_backend(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "hosts", "name", "reason"),
    [
        ("auto", (0,), "solo", "auto: a world of one"),
        ("gloo", (0,), "solo", "auto: a world of one"),
        ("shm+gloo", (0,), "solo", "auto: a world of one"),
        ("auto", ONE_HOST, "shm", "auto: 3 ranks on 1 host"),
        ("auto", TWO_HOSTS, "shm+gloo", "auto: 4 ranks on 2 hosts"),
        ("auto", (0, 1, 0), "shm+gloo", "auto: 3 ranks on 2 hosts"),
        ("auto", ONE_EACH, "gloo", "auto: 3 ranks on 3 hosts"),
        ("gloo", ONE_HOST, "gloo", "asked for"),
        ("gloo", TWO_HOSTS, "gloo", "asked for"),
        ("shm+gloo", TWO_HOSTS, "shm+gloo", "asked for"),
        ("shm+gloo", ONE_HOST, "shm", "asked for shm+gloo; all ranks are on one host"),
        ("shm+ucx", ONE_HOST, "shm", "asked for shm+ucx; all ranks are on one host"),
        ("shm+gloo", ONE_EACH, "gloo", "asked for shm+gloo; each rank is alone on its host"),
        ("shm+mpi", TWO_HOSTS, "shm+mpi", "asked for"),
        ("threads+threads", TWO_HOSTS, "threads+threads", "asked for"),
        ("nccl", TWO_HOSTS, "shm+gloo", "auto: 4 ranks on 2 hosts, for host memory"),
        ("nccl,allgather=mpi", TWO_HOSTS, "shm+gloo,allgather=mpi", "auto: 4 ranks on 2 hosts, for host memory"),
        ("gloo,alltoall=shm+mpi", TWO_HOSTS, "gloo,alltoall=shm+mpi", "asked for"),
        ("auto,alltoall=gloo", TWO_HOSTS, "shm+gloo,alltoall=gloo", "auto: 4 ranks on 2 hosts"),
        ("auto,alltoall=shm", ONE_HOST, "shm", "auto: 3 ranks on 1 host"),
        ("gloo,alltoall=mpi", (0,), "solo", "auto: a world of one"),
    ],
)
def test_what_it_comes_to(backend: str, hosts: tuple[int, ...], name: str, reason: str) -> None:
    """The transport, as `--backend` would say it, and why."""
    taken = route(backend, hosts)
    assert (taken.name, taken.reason) == (name, reason)


def test_a_composed_route_has_its_parts() -> None:
    """The composer is what is built, of a local and a cross-host one, in that order."""
    taken = route("auto", TWO_HOSTS)
    assert (taken.provider.name, [part.provider.name for part in taken.parts]) == ("hierarchical", ["shm", "gloo"])
    assert [provider.name for provider in taken.providers()] == ["hierarchical", "shm", "gloo"]
    assert not route("gloo", TWO_HOSTS).parts


def test_kinds_share_a_transport() -> None:
    """Each kind knows what serves it; the others are the default's."""
    taken = route("gloo,allgather=shm+mpi,barrier=shm+mpi", TWO_HOSTS)
    served = [taken.serving(kind).name for kind in (Kind.ALLGATHER, Kind.BARRIER)]
    assert served == ["shm+mpi", "shm+mpi"]
    assert taken.serving(Kind.ALLREDUCE) is taken


def test_auto_takes_what_fits_the_launcher() -> None:
    """A transport whose ranks a certain launcher must start is taken under it, or by name."""
    assert route("auto", TWO_HOSTS, launcher="mpiexec").name == "shm+mpi"
    assert route("auto", TWO_HOSTS, launcher="ssh").name == "shm+gloo"
    assert route("mpi", TWO_HOSTS, launcher="ssh").launcher == "mpiexec"
    assert route("gloo,alltoall=mpi", TWO_HOSTS).launcher == "mpiexec"
    assert route("auto", TWO_HOSTS).launcher == ""
    with pytest.raises(ValueError, match="want ranks started by mpiexec and by slurm; choose one"):
        _ = route("mpi,alltoall=slurm_only", TWO_HOSTS).launcher


def test_nothing_is_put_around_what_spans_devices() -> None:
    """auto leaves it alone, and so must the user; host memory is not its business."""
    spanning = TransportProvider("nvlink", "x:Nvlink", priority=70, devices=("cpu", "cuda"), spans_devices=True)
    registry = registry_of()
    registry.offer(spanning, Distribution("birds", "1"))
    assert route("auto", TWO_HOSTS, registry).name == "nvlink"
    with pytest.raises(TransportError, match="nccl spans hosts and devices by itself; use --backend nccl"):
        route("shm+nccl", TWO_HOSTS)


@pytest.mark.parametrize(
    ("backend", "hosts", "complaint"),
    [
        ("shm", TWO_HOSTS, "transport shm cannot be used: it serves the ranks of one host only"),
        ("ucx", TWO_HOSTS, "no_such_module_at_all not installed; pip install ucx"),
        ("shm+ucx", TWO_HOSTS, "no_such_module_at_all not installed; pip install ucx"),
        ("gloo+mpi", TWO_HOSTS, "gloo is no transport within a host"),
        ("gloo+mpi", ONE_HOST, "gloo is no transport within a host"),
        ("shm+shm", TWO_HOSTS, "shm does not span hosts"),
        ("shm+solo", TWO_HOSTS, "solo does not span hosts"),
        ("shm+hierarchical", TWO_HOSTS, "hierarchical does not span hosts"),
        ("hierarchical", TWO_HOSTS, "hierarchical is made of two others; name these, as LOCAL"),
        ("gloo,alltoall=shm", TWO_HOSTS, "transport shm cannot be used: it serves the ranks of one host only"),
        ("solo", ONE_HOST, "it serves 1 to 1 ranks, not 3"),
    ],
)
def test_what_cannot_serve_is_refused(backend: str, hosts: tuple[int, ...], complaint: str) -> None:
    """TransportError in one line, before anything is opened."""
    with pytest.raises(TransportError, match=complaint) as caught:
        route(backend, hosts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "shm+gloo", "shm,alltoall=gloo"])
@pytest.mark.parametrize("hosts", [(0,), ONE_HOST, TWO_HOSTS])
def test_a_name_that_is_not_installed_has_its_pip_line(backend: str, hosts: tuple[int, ...]) -> None:
    """Wherever it stands, and also where it would not be needed: a wrong name is never passed over."""
    with pytest.raises(
        PluginError, match=f"no transport is called 'gloo'; install it: {re.escape(pip_install('ddl-gloo'))}"
    ):
        route(backend, hosts, registry_of("solo", "shm", "hierarchical"))


def test_auto_says_what_is_missing_across_hosts() -> None:
    """What is installed and lacks something is named with its line; without any, where to look."""
    with pytest.raises(TransportError, match=r"ucx: no_such_module_at_all not installed; pip install ucx"):
        route("auto", TWO_HOSTS, registry_of("solo", "shm", "hierarchical", "ucx"))
    with pytest.raises(TransportError, match=r"install one that spans hosts \(`ddl info` prints the commands\)"):
        route("auto", TWO_HOSTS, registry_of("solo", "shm", "hierarchical"))


def test_auto_says_what_is_missing_on_a_host() -> None:
    """The core alone has no transport between processes."""
    with pytest.raises(TransportError, match=r"install one for the ranks of a host \(`ddl info` prints the commands\)"):
        route("auto", ONE_HOST, registry_of("solo", "threads"))


@pytest.mark.parametrize("names", [("gloo", "hierarchical"), ("gloo", "shm")])
def test_auto_does_without_parts(names: tuple[str, ...]) -> None:
    """Without a transport within hosts, or without one that composes two, the cross-host one serves all ranks alike."""
    assert route("auto", TWO_HOSTS, registry_of(*names)).name == "gloo"


def test_what_was_asked_for_needs_what_composes() -> None:
    """The message says where the command is."""
    with pytest.raises(
        TransportError, match=r"nothing installed composes shm with gloo.*`ddl info` prints the command"
    ):
        route("shm+gloo", TWO_HOSTS, registry_of("shm", "gloo"))
