"""Names of kernels and variables: one resolver for load(), inspect(), define_op and C++."""

from __future__ import annotations

import pytest
from stated_cubins import TMPL, cubin, entry, info, ptx
from unit.elf_builder import NOBITS, PROGBITS, Cubin, Kernel, Section, Symbol

import torch_cubin
from torch_cubin import errors

NAMES = (
    TMPL,
    "_Z5scaleIfEvPT_",
    "_Z5scaleI6__halfEvPT_",
    "_ZN1a4sameEPKfj",
    "_ZN1b4sameEPKfj",
    "_Z6vecAddPf",
    "_Z4fillIjLb1ELj4EEvPT_l",
    "_ZN2ns12_GLOBAL__N_13runEPi",
    "_ZN36_GLOBAL__N__a050d708_4_a_cu_7d216c332anEPi",
    "plain",
)
CALLED = {
    "tmpl<float,4>": TMPL,
    "tmpl<float, 4>": TMPL,
    " tmpl < float , 4 > ": TMPL,
    "tmpl": TMPL,
    "tmpl<float, 4>(float *, int)": TMPL,
    "void tmpl<float, 4>(float*, int)": TMPL,
    "scale<float>": "_Z5scaleIfEvPT_",
    "scale<half>": "_Z5scaleI6__halfEvPT_",
    "a::same": "_ZN1a4sameEPKfj",
    "::a::same": "_ZN1a4sameEPKfj",
    "::ns::run": "_ZN2ns12_GLOBAL__N_13runEPi",
    "::scale<struct __half>": "_Z5scaleI6__halfEvPT_",
    "b::same(const float*, unsigned)": "_ZN1b4sameEPKfj",
    "b::same(float const*, unsigned int)": "_ZN1b4sameEPKfj",
    "vecAdd": "_Z6vecAddPf",
    "fill<unsigned, true, 4>": "_Z4fillIjLb1ELj4EEvPT_l",
    "fill<uint32_t, true, 4u>(uint32_t*, int64_t)": "_Z4fillIjLb1ELj4EEvPT_l",
    "ns::run": "_ZN2ns12_GLOBAL__N_13runEPi",
    "an": "_ZN36_GLOBAL__N__a050d708_4_a_cu_7d216c332anEPi",
    "plain": "plain",
}


@pytest.fixture(scope="module")
def module() -> torch_cubin.Module:
    sizes = {"_ZN1a4sameEPKfj": (8, 4), "_ZN1b4sameEPKfj": (8, 4), TMPL: (8, 4)}
    return torch_cubin.load(cubin({name: sizes.get(name, (8,)) for name in NAMES}))


@pytest.mark.parametrize("name", CALLED)
def test_module_finds_kernels_by_cpp_name(module, name: str) -> None:
    assert name in module
    assert module[name].name == CALLED[name]
    assert module[name] is module[CALLED[name]]
    assert module.images[0][name].name == CALLED[name]


@pytest.mark.parametrize("name", ["scale", "same", "same(const float*, unsigned int)"])
def test_an_ambiguous_name_lists_all(module, name: str) -> None:
    wanted = [known for known in NAMES if name.split("(")[0] in known]
    for names in (module, module.images[0]):
        with pytest.raises(errors.NoKernelError) as caught:
            names[name]
        assert all(known in str(caught.value) for known in wanted)
    assert name not in module


def test_near_names(module) -> None:
    with pytest.raises(errors.NoKernelError, match=r"expected '_Z6vecAddPf' \(vecAdd\(float\*\)\)"):
        module["vecAd"]
    with pytest.raises(errors.NoKernelError, match="expected '_Z5scaleI"):
        module["scalar<float>"]


def test_an_error_about_ptx_does_not_call_it_a_cubin() -> None:
    module = torch_cubin.load(ptx(entry("k", "u64")), jit=True)
    for names in (module, module.images[0]):
        with pytest.raises(errors.NoKernelError) as caught:
            names["missing"]
        assert "cubin:" not in str(caught.value).replace("torch_cubin", "")
        assert "the cubin" not in str(caught.value)


def test_a_declared_op_takes_kernels_by_cpp_name() -> None:
    image = cubin({TMPL: (8, 4), "_ZN1a4sameEPKfj": (8, 4)})
    for number, name in enumerate(("tmpl<float,4>", "tmpl", TMPL)):
        op = torch_cubin.define_op(
            f"kernel_names::f{number}(Tensor(a!) x) -> ()", kernel=(image, name),
            tensors={"x": "float32[n]"}, args=lambda x: (x, x.shape[0]), grid=1, block=32,
        )  # fmt: skip
        assert op is not None


def test_a_path_and_a_name_with_scopes(tmp_path) -> None:
    path = tmp_path / "a.cubin"
    path.write_bytes(cubin({"_ZN1a4sameEPKfj": (8, 4)}))
    torch_cubin.define_op(
        "kernel_names::g(Tensor(a!) x) -> ()", kernel=f"{path}:a::same",
        tensors={"x": "float32[n]"}, args=lambda x: (x, x.shape[0]), grid=1, block=32,
    )  # fmt: skip


def with_variables() -> bytes:
    sections = [
        Section(".nv.global", NOBITS, size=64),
        Section(".nv.constant3", PROGBITS, data=bytes(16)),
    ]
    first = 6  # behind the tables and one kernel
    symbols = [
        Symbol("_ZN2ns3cfgE", first + 1, size=16, info=0x01, other=0),
        Symbol("_ZN34_INTERNAL_a050d708_4_a_cu_7d216c332ns6hiddenE", first, 4, info=1, other=0),
        Symbol("table", first, size=32, info=0x11, other=0),
        Symbol("$str", first, size=8, info=0x01, other=0),
    ]
    return Cubin([Kernel("k", info(8))], sections=sections, symbols=symbols).build()


def test_inspect_lists_variables() -> None:
    image = torch_cubin.inspect(with_variables())
    assert [(v.name, v.cpp_name, v.size, v.space) for v in image.variables] == [
        ("_ZN2ns3cfgE", "ns::cfg", 16, "constant"),
        (
            "_ZN34_INTERNAL_a050d708_4_a_cu_7d216c332ns6hiddenE",
            "_INTERNAL_a050d708_4_a_cu_7d216c33::ns::hidden", 4, "global",
        ),
        ("table", "", 32, "global"),
    ]  # fmt: skip
    assert "3 variables" in str(image)
    assert "constant         16  _ZN2ns3cfgE  ns::cfg" in str(image)
    head = (
        ".visible .const .align 4 .b8 _ZN2ns3cfgE[16];\n.global .align 8 .u64 p = 3;\n"
        ".global .align 4 .f32 m[2][3] = {{1.0, 2.0, 3.0}, {4.0, 5.0, 6.0}};\n"
        ".visible .global .align 16 .v4 .f32 q;\n.global .align 1 .b8 $str[3] = {37, 102};"
    )
    found = torch_cubin.inspect(ptx(entry("k", "u64"), head))
    assert [(v.name, v.size, v.space) for v in found.variables] == [
        ("_ZN2ns3cfgE", 16, "constant"), ("p", 8, "global"), ("m", 24, "global"),
        ("q", 16, "global"),
    ]  # fmt: skip


def test_inspect_shows_cpp_names_and_types() -> None:
    image = torch_cubin.inspect(cubin({TMPL: (8, 4), "plain": (8,)}))
    kernel = image[TMPL]
    assert kernel.cpp_name == "void tmpl<float, 4>(float*, int)"
    assert [(p.kind, p.cpp_type) for p in kernel.params] == [
        ("pointer", "float*"),
        ("value", "int"),
    ]
    assert (image["plain"].cpp_name, image["plain"].params[0].cpp_type) == ("", "")
    assert "tmpl<float, 4>(float*, int)" in str(image)
    found = torch_cubin.inspect(ptx(entry(TMPL, "u64, u32")))
    assert [p.cpp_type for p in found[TMPL].params] == ["float*", "int"]


def test_a_name_that_repeats_itself_without_end_is_not_spelled_out() -> None:
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    name = "_Z1fSt4pairIiiE"
    for i in range(34):
        part = "S_" if i == 0 else f"S{digits[i - 1]}_"
        name += f"St4pairI{part}{part}E"
    image = torch_cubin.inspect(cubin({name: (8,)}))
    assert image.kernels[0].cpp_name == ""


@pytest.mark.parametrize("name", ["::same", "::run", "::"])
def test_a_global_name_has_all_scopes(module, name: str) -> None:
    assert name not in module
