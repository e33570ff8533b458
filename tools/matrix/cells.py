"""The cells of the matrix: which Python, which versions, which tests and which examples."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CELLS", "Cell", "Plant"]


@dataclass(frozen=True)
class Plant:
    """A planted incompatibility: the deletion of a function that ddl uses, as a new release of a library might do it.

    ``lines`` are added to the end of ``file``, a path in site-packages.
    """

    file: str
    lines: str  # such as "del Trainer.step"

    @property
    def gone(self) -> str:
        """The name that is deleted. An error that is due to the deletion contains it."""
        return self.lines.split(".")[-1].split()[-1]


@dataclass(frozen=True)
class Cell:
    """One environment: ``packages`` on ``python``, with ``plugins`` from this tree, and what is run in it."""

    name: str
    python: str  # such as "3.13"
    packages: tuple[str, ...]  # requirements of what the cell is about, beside those of the plugins
    plugins: tuple[str, ...]  # folders in plugins/; each cell has the core, and what the tests themselves need
    tests: tuple[str, ...]  # files and folders for pytest
    examples: tuple[str, ...]  # words after `ddl run -np 2 python`
    shown: tuple[str, ...]  # modules whose versions stand in the table
    plant: Plant
    oldest: bool = False  # take the oldest versions that the bounds allow, of all that ddl requires
    strict: bool = False  # a warning that something which ddl uses will change or go is an error


_CORE = (
    "tests/api",
    "tests/builtin",
    "tests/contracts",
    "tests/control",
    "tests/coordinator",
    "tests/core",
    "tests/kernels",
    "tests/observe",
    "tests/plug",
    "tests/runtime",
    "tests/semantics",
    "tests/text",
    "tests/tune",
)
_LAUNCH = (
    "tests/cluster",
    "tests/commands",
    "tests/faults",
    "tests/launch",
    "tests/models",
    "plugins/ddl_conform",
    "plugins/ddl_dashboard",
    "plugins/ddl_doctor",
    "plugins/ddl_prometheus",
    *(f"plugins/ddl_horovod/tests/test_{name}.py" for name in ("checks", "config_file", "horovodrun", "process_sets")),
)
_TORCH = ("ddl_shm", "ddl_gloo", "ddl_mpi", "ddl_torch")
_TORCH_EXAMPLES = (
    "examples/torch_digits.py",
    "examples/torch_backend/ddp.py",
    "examples/torch_backend/fsdp2.py",
)
# What uses torch for users who call none of its collectives themselves; the tests of these run where they are installed.
_TRAINERS = ("accelerate", "lightning", "torchmetrics", "transformers")
_TF_EXAMPLES = ("examples/tf2_digits.py", "examples/keras_digits.py", "examples/tf1_session_digits.py")

_NUMPY_GOES = Plant("numpy/__init__.py", "del frombuffer")
_TORCH_GOES = Plant("torch/__init__.py", "del Tensor.register_post_accumulate_grad_hook")
_KERAS_GOES = Plant("keras/src/optimizers/base_optimizer.py", "del BaseOptimizer.apply")
_PLUGGY_GOES = Plant("pluggy/__init__.py", "del PluginManager")
_MXNET_GOES = Plant("mxnet/__init__.py", "del gluon.Trainer._allreduce_grads")


def _torch(python: str, version: str, *packages: str, oldest: bool = False, strict: bool = False) -> Cell:
    """Return the cell of a release of torch, or of the newest one if ``version`` is empty."""
    return Cell(
        f"torch-{'oldest' if oldest else version or 'newest'}-py{python}",
        python,
        (f"torch=={version}.*" if version else "torch", "mpich>=4.3", *packages),
        _TORCH,
        tuple(f"plugins/{one}" for one in _TORCH),
        _TORCH_EXAMPLES,
        ("torch", "numpy", "numba"),
        _TORCH_GOES,
        oldest,
        strict,
    )


def _tensorflow(
    python: str, version: str, requirement: str, *packages: str, oldest: bool = False, strict: bool = False
) -> Cell:
    return Cell(
        f"tensorflow-{version}-py{python}",
        python,
        (requirement, *packages),
        ("ddl_shm", "ddl_tf"),
        ("plugins/ddl_tf",),
        _TF_EXAMPLES,
        ("tensorflow", "keras", "numpy", "numba"),
        _KERAS_GOES,
        oldest,
        strict,
    )


def _core(python: str, *packages: str, oldest: bool = False, strict: bool = False) -> Cell:
    return Cell(
        f"core-{'oldest' if oldest else 'newest'}-py{python}",
        python,
        packages,
        ("ddl_shm", "ddl_mpi", "ddl_gloo", "ddl_torch", "ddl_horovod"),  # tests of the core use them, too
        (*_CORE, "plugins/ddl_shm", "plugins/ddl_mpi"),
        ("examples/numpy_allreduce.py",),
        ("numpy", "numba", "mpi4py", "mpich"),
        _NUMPY_GOES,
        oldest,
        strict,
    )


def _launch(python: str) -> Cell:
    """Return the cell of the commands, of the launcher, and of the plugins that belong to no framework."""
    return Cell(
        f"launch-newest-py{python}",
        python,
        ("matplotlib", "mpich"),
        ("ddl_shm", "ddl_gloo", "ddl_mpi", "ddl_torch", "ddl_nccl", "ddl_horovod", "ddl_dashboard", "ddl_prometheus"),
        _LAUNCH,
        ("examples/numpy_allreduce.py",),
        ("pluggy", "numpy", "torch"),
        _PLUGGY_GOES,
        strict=True,
    )


CELLS: dict[str, Cell] = {
    cell.name: cell
    for cell in (
        _core("3.10", "mpich>=4.3", oldest=True),
        _core("3.13", "mpich", strict=True),
        _core("3.14", "mpich", strict=True),
        _launch("3.13"),
        _launch("3.14"),
        _torch("3.10", "2.10", oldest=True),
        _torch("3.10", "2.13", "numpy<2"),
        _torch("3.13", "2.13"),
        _torch("3.10", "2.14"),  # the newest for this Python
        _torch("3.13", "2.14"),
        _torch("3.13", "", *_TRAINERS, strict=True),
        _torch("3.14", "", strict=True),
        _tensorflow("3.10", "oldest", "tensorflow-cpu>=2.16", oldest=True),
        _tensorflow("3.10", "2.21", "tensorflow-cpu==2.21.*", "numpy<2"),
        _tensorflow("3.13", "2.21", "tensorflow-cpu==2.21.*"),
        # A requirement that names a pre-release allows pre-releases.
        _tensorflow("3.13", "newest", "tensorflow-cpu>=2.22.0rc0", strict=True),
        *(
            Cell(
                f"mxnet-1.9-py{python}",
                python,
                ("mxnet>=1.9.1",),
                ("ddl_shm", "ddl_mxnet"),
                ("plugins/ddl_mxnet",),
                ("examples/mxnet_digits.py", "examples/mxnet_module_digits.py"),
                ("mxnet", "numpy", "numba"),
                _MXNET_GOES,
            )
            for python in ("3.10", "3.12")
        ),
    )
}
