"""The stand-in driver as tests see it: what it recorded, and what it is to do next.

For a process that was started with the stand-in's folder in LD_LIBRARY_PATH (tests/faults).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator


class FakeDriver:
    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        for name in ("errors", "functions", "images", "journal", "launches", "violations"):
            getattr(library, f"fake_{name}").restype = ctypes.c_char_p
        for name in ("calls", "libraries_alive"):
            getattr(library, f"fake_{name}").restype = ctypes.c_long
        self._library = library

    def _lines(self, name: str) -> list[str]:
        text = getattr(self._library, f"fake_{name}")().decode()
        return text.split("\n") if text else []

    def functions(self) -> list[str]:
        """Every function of csrc/driver/table.h."""
        return self._lines("functions")

    def errors(self) -> dict[int, str]:
        """Every code of cuda.h that is an error, with its name."""
        return {int(code): name for code, name in map(str.split, self._lines("errors"))}

    def journal(self) -> list[str]:
        """The functions called, in order."""
        return self._lines("journal")

    def images(self) -> list[str]:
        """The ELF headers of what was given to cuLibraryLoadData, in hex; "PTX" for text."""
        return self._lines("images")

    def launches(self) -> list[dict]:
        return [json.loads(line) for line in self._lines("launches")]

    def violations(self) -> list[str]:
        """The forbidden calls: launches without a context, uses of unloaded libraries."""
        return self._lines("violations")

    def calls(self, name: str) -> int:
        return self._library.fake_calls(name.encode())

    def libraries(self) -> int:
        """Libraries loaded and not unloaded."""
        return self._library.fake_libraries_alive()

    def fail(self, name: str, code: int, after: int = 0, times: int = 1) -> None:
        """The next call of `name` fails; or `times` calls, once `after` have succeeded."""
        done = self._library.fake_fail(
            name.encode(), ctypes.c_long(after), ctypes.c_long(times), code
        )
        assert done == 0, name

    def set(self, name: str, value: int) -> None:
        self._library.fake_set(name.encode(), ctypes.c_long(value))

    @contextlib.contextmanager
    def setting(self, name: str, value: int) -> Iterator[None]:
        self.set(name, value)
        yield
        self._library.fake_unset(name.encode())

    @contextlib.contextmanager
    def default_streams(self) -> Iterator[None]:
        """PyTorch's current streams are the default ones, as they are in most programs."""
        torch_cuda = ctypes.CDLL("libtorch_cuda.so")
        torch_cuda.fake_default_streams(1)
        try:
            yield
        finally:
            torch_cuda.fake_default_streams(0)

    @contextlib.contextmanager
    def external_streams(self) -> Iterator[None]:
        """PyTorch's current streams are torch.cuda.ExternalStream's."""
        torch_cuda = ctypes.CDLL("libtorch_cuda.so")
        torch_cuda.fake_external_streams(1)
        try:
            yield
        finally:
            torch_cuda.fake_external_streams(0)

    def make_current(self, context: int) -> None:
        """This thread's context: 0 for none, 0x1000 + i for the primary one of device i."""
        self._library.fake_make_current(ctypes.c_long(context))

    def quiet(self, on: bool) -> None:
        """Whether to record nothing: for measuring the host's own cost."""
        self._library.fake_quiet(int(on))

    def declare(self, module) -> None:
        """Passes the sizes of the kernels' parameters, which a driver reads from the cubin."""
        for image in module.images:
            for kernel in image.kernels:
                self.declare_kernel(kernel.name, [param.size for param in kernel.params])

    def declare_kernel(self, name: str, sizes: list[int]) -> None:
        array = (ctypes.c_int * len(sizes))(*sizes)
        self._library.fake_declare(name.encode(), len(sizes), array)

    def declare_global(self, name: str, size: int) -> None:
        self._library.fake_global(name.encode(), ctypes.c_long(size))

    def destroy_graph(self) -> None:
        """Of the captures so far: its user objects are released."""
        self._library.fake_destroy_graph()

    def reset(self) -> None:
        self._library.fake_reset()


__all__ = ["FakeDriver"]
