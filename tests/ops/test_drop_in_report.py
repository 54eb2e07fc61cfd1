"""torch_cubin.report(): which calls it counts, since when, and its text."""

from __future__ import annotations

import dataclasses
import re

import torch
from drop_in_cases import integers
from in_threads import in_threads

import torch_cubin
from torch_cubin._drop_in import report as _report


def _counts() -> dict[str, tuple[int, int]]:
    return {row.function: (row.calls, row.shapes) for row in torch_cubin.report().served}


def test_counts_calls_and_shapes() -> None:
    a = integers(4, 4)
    with torch_cubin.drop_in():
        for rows in (1, 2, 2, 3):
            a[:rows] @ a
        torch.mm(a, a)
        torch.mm(a.double(), a.double())
    rows = {(row.function, row.dtype): row for row in torch_cubin.report().served}
    assert rows["Tensor.matmul (@)", "float32"].calls == 4
    assert rows["Tensor.matmul (@)", "float32"].shapes == 3
    assert rows["torch.mm", "float64"].calls == 1
    assert all(row.traced == 0 for row in rows.values())


def test_report_lists_the_most_frequent_calls_first() -> None:
    a = integers(4, 4)
    with torch_cubin.drop_in():
        torch.mm(a, a)
        for _ in range(3):
            a @ a
    assert [row.calls for row in torch_cubin.report().served] == [3, 1]


def test_the_outermost_drop_in_resets_the_report_and_a_nested_one_does_not() -> None:
    a = integers(4, 4)
    with torch_cubin.drop_in():
        a @ a
        with torch_cubin.drop_in():
            a @ a
            a.long() @ a.long()
        a @ a
    report = torch_cubin.report()
    assert _counts() == {"Tensor.matmul (@)": (3, 1)}
    assert [(row.reason, row.calls) for row in report.declined] == [("dtype int64", 1)]
    with torch_cubin.drop_in():
        assert _counts() == {}
        torch.mm(a, a)
    assert _counts() == {"torch.mm": (1, 1)}


def test_reset() -> None:
    a = integers(4, 4)
    with torch_cubin.drop_in():
        a @ a
        assert len(torch_cubin.report(reset=True).served) == 1
        assert torch_cubin.report().served == ()
        a @ a
    assert _counts() == {"Tensor.matmul (@)": (1, 1)}


def test_threads_add_up_without_losing_a_call() -> None:
    a = integers(4, 4)

    def work() -> None:
        with torch_cubin.drop_in():
            for _ in range(200):
                a @ a

    with torch_cubin.drop_in():
        in_threads(work, [()] * 4)
    assert _counts() == {"Tensor.matmul (@)": (800, 1)}


def test_a_stored_mode_can_be_entered_again() -> None:
    a = integers(4, 4)
    mode = torch_cubin.drop_in()
    for _ in range(2):
        with mode:
            a @ a
        assert _counts() == {"Tensor.matmul (@)": (1, 1)}


def test_shapes_stop_counting_at_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(_report, "MAX_SHAPES", 2)
    a = integers(4, 4)
    with torch_cubin.drop_in():
        for rows in range(1, 5):
            a[:rows] @ a
    assert _counts() == {"Tensor.matmul (@)": (4, 2)}


def test_symbolic_sizes_are_counted_without_a_shape() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    a = integers(4, 4)
    with torch_cubin.drop_in():
        make_fx(lambda x: x @ x, tracing_mode="symbolic")(a)
    calls, _ = _counts()["Tensor.matmul (@)"]
    assert calls == 1


def test_reads_as_a_table() -> None:
    a = integers(4, 4)
    with torch_cubin.drop_in():
        a @ a
        torch.mm(a, a, out=torch.empty_like(a))
    lines = str(torch_cubin.report()).splitlines()
    assert " ".join(lines[0].split()) == "served by cubin ops dtype device shapes calls traced"
    assert lines[2].split() == ["Tensor.matmul", "(@)", "float32", "cpu", "1", "1", "0"]
    assert lines[4].split() == ["left", "to", "PyTorch", "because", "calls", "traced"]
    assert "out= was given" in lines[6]


def test_the_report_separates_what_ran_on_the_cpu_and_stays_short_on_a_gpu() -> None:
    a = integers(4, 4)
    torch._dynamo.reset()
    with torch_cubin.drop_in():
        a @ a
        torch.compile(torch.mm, backend="eager")(a, a)
    on_cpu = torch_cubin.report()
    assert {(row.function, row.device) for row in on_cpu.served} == {
        ("Tensor.matmul (@)", "cpu"),
        ("torch.mm", "cpu"),
    }
    assert "cpu: " in str(on_cpu)
    rows = [dataclasses.replace(row, device="cuda") for row in on_cpu.served]
    ran = [dataclasses.replace(row, device="cuda") for row in on_cpu.ran]
    on_gpu = str(dataclasses.replace(on_cpu, served=tuple(rows), ran=tuple(ran)))
    assert not re.search("cpu|cuda|device", on_gpu)
    mixed = dataclasses.replace(on_cpu, served=(*on_cpu.served, *rows))
    devices = [line.split()[-4] for line in str(mixed).splitlines()[2:6]]
    assert devices == ["cpu", "cpu", "cuda", "cuda"]


def test_an_empty_report_says_so() -> None:
    with torch_cubin.drop_in():
        torch.relu(torch.ones(3))
    report = torch_cubin.report()
    assert (report.served, report.declined) == ((), ())
    assert "nothing" in str(report)
    assert ("CPU build" in str(report)) == (torch.version.cuda is None)
