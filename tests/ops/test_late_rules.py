"""Rules of the built-in ops whose modules are imported at their first call."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from torch_cubin._ops import late, register


def test_the_list_is_what_the_modules_register() -> None:
    listed = [
        (module, name, key)
        for module, keys, names in register.rules()
        for key in keys
        for name in names
    ]
    assert len(listed) == len(set(listed))
    modules = {module for module, _, _ in listed}
    assert {(m, *rule) for m in modules for rule in late.rules_of(m)} == set(listed)


def test_packers_of_programs_find_the_modules() -> None:
    """PyInstaller and others pack what import statements name: the rules' modules have none but
    those for type checkers."""
    tree = ast.parse(Path(register.__file__).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n))
    (imports,) = block.body
    assert imports.module == "torch_cubin._ops"
    named = [alias.name for alias in imports.names]
    assert sorted(named) == sorted({m for m, _, _ in register.rules()} | {"no_derivatives"})


# A module, and calls that need one of its rules.
CALLS = {
    "autograd": """
x = a.clone().requires_grad_()
ops.matmul(x, a).sum().backward()
assert torch.equal(x.grad, 2 * a)
""",
    "vmap": "assert torch.equal(torch.vmap(ops.matmul)(a[None], a[None])[0], a @ a)",
    "fake": 'assert ops.matmul(a.to("meta"), a.to("meta")).shape == (2, 2)',
    "autocast": """
with torch.autocast("cpu", torch.bfloat16):
    assert ops.matmul(a, a).dtype == torch.bfloat16
""",
    "layouts": 'refused(lambda: ops.matmul(a.to_sparse(), a), "sparse")',
    # Batching rules that do not ask for the keys of the call, and those that do.
    "scaled": 'refused(lambda: torch.vmap(lambda x: ops.quantize(x, 0))(a[None]), "torch.vmap")',
    "rows": "assert torch.vmap(lambda x: ops.softmax(x, -1))(a[None]).shape == (1, 2, 2)",
}


@pytest.mark.parametrize("module", CALLS)
def test_a_rule_imports_its_module_at_its_first_call(module: str, torch_python) -> None:
    code = f"""
import sys, torch
import torch_cubin

def refused(call, text):
    try:
        call()
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError("no error")

ops, a = torch.ops.cubin, torch.ones(2, 2)
before = set(sys.modules)
for _ in range(2):
    {CALLS[module].strip().replace(chr(10), chr(10) + "    ")}
print("torch_cubin._ops.{module}" in set(sys.modules) - before)
"""
    assert torch_python.output(code).strip() == "True"


CALL_OF_A_RULE = "torch.vmap(torch.ops.cubin.matmul)(torch.ones(1, 2, 2), torch.ones(1, 2, 2))"


@pytest.mark.parametrize(
    ("module", "call", "place"),
    [
        # A rule's module, also where its search begins with another finder than ours.
        ("_ops.vmap", CALL_OF_A_RULE, 0),
        ("_ops.vmap", CALL_OF_A_RULE, 1),
        # Any other, which an attribute of the package imports, or a statement, after others.
        ("_kernels.tensor_map", "torch_cubin.TensorMap", 1),
        ("_kernels.tensor_map", "import torch_cubin._kernels.tensor_map", 1),
    ],
)
def test_a_fork_waits_for_an_import_of_another_thread(
    module: str, call: str, place: int, torch_python
) -> None:
    """Otherwise the child finds the module locked, for ever. PyTorch's own imports and its ops'
    first calls, which hold locks, too, and for which no fork waits, are done before."""
    code = f"""
import os, signal, sys, threading, time
import torch
import torch_cubin

torch.vmap(torch.sin)(torch.ones(1))
torch.broadcast_shapes((1,), (1,))
ones = torch.ones(1, 2, 2)
torch.vmap(lambda x, y: torch.matmul(x.movedim(0, 1), y.permute(1, 0)))(ones, ones)
torch.ops.cubin.matmul(ones, ones)
started = threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch_cubin.{module}":
            started.set()
            time.sleep(0.5)

def call():
    {call}

sys.meta_path.insert({place}, Slow())
thread = threading.Thread(target=call)
thread.start()
started.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    call()
    grandchild = os.fork()  # which waits for nobody
    os._exit(0 if grandchild == 0 else os.waitpid(grandchild, 0)[1])
thread.join()
call()
print(os.waitpid(child, 0)[1])
"""
    assert torch_python.output(code).strip() == "0"


def test_a_fork_below_an_import_does_not_wait_for_it(torch_python) -> None:
    code = """
import os, sys, time
import torch_cubin

class Forking:
    def find_spec(self, name, path=None, target=None):
        if name == "torch_cubin._kernels.tensor_map":
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

sys.meta_path.insert(1, Forking())
begin = time.monotonic()
torch_cubin.TensorMap
print(time.monotonic() - begin < 5)
"""
    assert torch_python.output(code).strip() == "True"


def test_no_import_is_compiled(torch_python) -> None:
    """Below a frame that torch.compile gives up on, it compiles each function that is called."""
    code = """
import contextlib, torch
import torch_cubin
from torch._dynamo import convert_frame

seen = []
assemble = convert_frame.ConvertFrameAssert.__call__

def watched(self, frame, *args, **kwargs):
    seen.append(f"{frame.f_code.co_filename} {frame.f_code.co_name}")
    return assemble(self, frame, *args, **kwargs)

convert_frame.ConvertFrameAssert.__call__ = watched

@contextlib.contextmanager
def context():
    yield

def function(a):
    with context():
        torch._dynamo.graph_break()
        return torch.ops.cubin.matmul(a, a)

a = torch.ones(2, 2, requires_grad=True)
torch.compile(function, backend="eager")(a).sum().backward()
assert torch.equal(a.grad, torch.full((2, 2), 4.0))
assert any("function" in each for each in seen)
print([each for each in seen if "/torch_cubin/_ops/" in each or "importlib" in each])
"""
    assert torch_python.output(code).strip() == "[]"


def test_install_imports_no_rules(torch_python) -> None:
    code = """
import sys, torch
import torch_cubin

with torch_cubin.install():
    names = ("attention_checks", "autograd", "sharding", "vmap")
    print([name for name in names if f"torch_cubin._ops.{name}" in sys.modules])
"""
    assert torch_python.output(code).strip() == "[]"
