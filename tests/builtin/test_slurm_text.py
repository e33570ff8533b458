"""Lists as Slurm writes them, unfolded by us without asking it."""

from __future__ import annotations

import pytest

from ddlcore.builtin.slurm_text import node_names, tasks_per_node


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("vm", ["vm"]),
        ("taurusi[1001-1003,1007]", ["taurusi1001", "taurusi1002", "taurusi1003", "taurusi1007"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[099-101],login,gpu-a", ["n099", "n100", "n101", "login", "gpu-a"]),
        ("r[1-2]n[1-2]x", ["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
        ("a.b.c, d", ["a.b.c", "d"]),
    ],
)
def test_node_names(text: str, names: list[str]) -> None:
    """Ranges, leading zeros, several brackets, plain names."""
    assert node_names(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n1-3]", "n[3-1]", "n[]", "n[a-b]", "a,,b", "n[1[2]]", "n[1-999999999]"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    """One line that repeats it."""
    with pytest.raises(ValueError, match=r"list of nodes|more than") as caught:
        node_names(text)
    assert f"'{text}'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2]), ("72(x1)", [72])]
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    """One count a node."""
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "two", "2x3", "2(x)", "-1", "1,", "1(x999999999)"])
def test_what_is_no_list_of_tasks(text: str) -> None:
    """One line that repeats it."""
    with pytest.raises(ValueError, match="tasks per node"):
        tasks_per_node(text)
