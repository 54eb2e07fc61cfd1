"""docs/serving_a_model.md: its program of all entry points, on the CPU."""

from __future__ import annotations

import pytest
import serving_page


def test_the_program_runs(torch_python) -> None:
    """In a process of its own: install() and transformers' registrations stay."""
    pytest.importorskip("transformers")
    printed = torch_python.output(serving_page.program().replace('"cuda"', '"cpu"'))
    assert "served by cubin ops" in printed


def test_it_has_every_entry_point_of_the_table() -> None:
    text, program = serving_page.PAGE.read_text(), serving_page.program()
    table = text.partition("| you have |")[2].partition("\n\n")[0]
    for name in ("install()", "drop_in()", "register()", "activate_flash_attention_impl", "float8(",
                 "torch.ops.cubin."):  # fmt: skip
        assert name in table
        assert name in program
