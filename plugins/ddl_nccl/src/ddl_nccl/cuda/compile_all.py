"""Compiles every kernel without a GPU, and reports the result: ``python -m ddl_nccl.cuda.compile_all``.

The exit code is 1 if a kernel does not compile, does not access memory 16 bytes at a time where it could, or calls a
function that does not exist; it is 3 if there is no compiler.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ddl_nccl.cuda.compile import KernelError, NoCompiler, assembled, compile_ptx
from ddl_nccl.cuda.names import OPS, Name, catalogue

NO_COMPILER = 3
_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.\w+)?\.v(\d)\.[a-z](\d+)")


@dataclass(frozen=True)
class CompileReport:
    """The result of compiling one kernel."""

    name: str
    loads: int  # instructions in its PTX that read 16 bytes
    stores: int  # instructions that write 16 bytes
    narrow: int  # vector accesses of fewer than 16 bytes: several where one would do
    calls: int  # functions that are called but do not exist
    machine_code: int  # bytes after translation for the device; 0 if only a driver can translate
    seconds: float

    def fails(self) -> bool:
        """Return whether the kernel has a defect."""
        reads = self.loads > 0 or self.name == "ddl_fill"
        return not reads or self.stores == 0 or self.narrow > 0 or self.calls > 0


def examine(name: Name, capability: tuple[int, int], assemble: bool = True) -> CompileReport:
    """Compile one kernel and return the report. Raises NoCompiler if there is no compiler.

    If ``assemble`` is true, the PTX is also translated to machine code if possible.
    """
    start = time.perf_counter()
    code = compile_ptx(name, capability)
    image = assembled(code.encode(), str(name), capability) if assemble else b""
    widths = [(kind, int(n) * int(bits) // 8) for kind, n, bits in _ACCESS.findall(code)]
    return CompileReport(
        name=str(name),
        loads=widths.count(("ld", 16)),
        stores=widths.count(("st", 16)),
        narrow=sum(nbytes != 16 for _, nbytes in widths),
        calls=code.count(".extern .func"),
        machine_code=len(image),
        seconds=round(time.perf_counter() - start, 2),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the command-line ``arguments``, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ddl_nccl.cuda.compile_all", description=__doc__)
    parser.add_argument("--capability", default="9.0", help="compute capability of the devices (default: %(default)s)")
    parser.add_argument("--ptx-only", action="store_true", help="do not translate further, which takes longer")
    parser.add_argument(
        "--one-op", action="store_true", help="of the reductions one a type: others differ by one instruction"
    )
    parser.add_argument("--json", action="store_true", help="print one object")
    parsed = parser.parse_args(arguments)
    found = re.fullmatch(r"(\d+)\.(\d)", parsed.capability)
    if found is None:
        parser.error(f"--capability {parsed.capability} is none; give it as 9.0")
    capability = (int(found[1]), int(found[2]))
    reports: list[CompileReport] = []
    try:
        for name in catalogue():
            if parsed.one_op and name.verb == "reduce" and name.op != OPS[name.dtypes[0] % len(OPS)]:
                continue
            reports.append(examine(name, capability, not parsed.ptx_only))
            if not parsed.json:
                print(_line(reports[-1]), flush=True)
    except (NoCompiler, KernelError) as error:
        print(error, file=sys.stderr)
        return NO_COMPILER if isinstance(error, NoCompiler) else 1
    bad = [report.name for report in reports if report.fails()]
    if parsed.json:
        print(json.dumps({"capability": parsed.capability, "bad": bad, "kernels": [asdict(each) for each in reports]}))
    else:
        seconds = sum(report.seconds for report in reports)
        print(
            f"{len(reports)} kernels for {parsed.capability} in {seconds:.1f} s; {', '.join(bad) or 'none'} not as it should be"
        )
    return 1 if bad else 0


def _line(report: CompileReport) -> str:
    code = f"{report.machine_code} bytes" if report.machine_code else "PTX"
    judged = "WRONG" if report.fails() else "good"
    return f"{report.name:36} {report.loads:3} loads and {report.stores:3} stores of 16 bytes  {code:>12}  {judged}"


if __name__ == "__main__":
    sys.exit(main())
