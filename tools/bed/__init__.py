"""Test beds on one machine: hosts that are network namespaces (``Bed``), and a Slurm cluster (``Slurm``)."""

from tools.bed.bed import Bed, Host
from tools.bed.possible import why_no_bed

__all__ = ["Bed", "Host", "why_no_bed"]
