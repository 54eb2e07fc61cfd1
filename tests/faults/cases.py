"""The fault cases: what may go wrong, and the outcome that is defined for each.

A test shows a case by the mark `fault_case(number, ...)`; tests/unit/test_fault_cases.py holds that
every case has one. `python tools/fault_cases.py` runs them and prints this table with what it saw.
Outcomes in brackets are the tags of torch_cubin's errors.
"""

from __future__ import annotations

CASES = {
    1: (
        "a path that is missing, a directory, unreadable, or a FIFO",
        "[file] with the system's text; never blocks",
    ),
    2: ("an empty file, or one of 1 to 63 bytes", "[image], too short"),
    3: ("a cubin truncated at any byte", "[image] for every length"),
    4: ("bytes after the last table", "[image], with their number"),
    5: (
        "random bytes, and bit flips in every field of the headers",
        "accepted or [image]; no crash, no read outside, bounded time",
    ),
    6: (
        "sections whose offset, size, count or link overflow; tables without an end",
        "[image] that names the section",
    ),
    7: ("ELF files of other machines, classes and kinds", "[image] that says what the file is"),
    8: (
        "a fatbin, PTX or LTO IR given as a cubin",
        "[image] that says which and how to extract; PTX is compiled only by name",
    ),
    9: (
        "huge files, and a million symbols or sections",
        "[image] past the stated limits; bounded time and memory",
    ),
    10: (
        "a manifest of another hash, missing, malformed, with a key twice, or of other folders",
        "[hash] or [file]; nothing is loaded",
    ),
    11: ("a file replaced between its hash and the load", "the hashed bytes are the loaded bytes"),
    12: ("two processes that write one folder", "a reader sees a whole package or none"),
    13: ("an image for another arch", "[arch], or loads where NVIDIA's rules allow it"),
    14: ("a driver that is too old for the library or for an image", "[driver] with both versions"),
    15: (
        "a kernel's name that is absent, empty, huge, or no text",
        "[no_kernel] with the nearest names",
    ),
    16: (
        "several kernels, device functions, a name twice",
        "kernels alone are listed; a name twice is [image]",
    ),
    17: ("too few or too many arguments", "[params] with the expected list"),
    18: ("arguments of a wrong size or type", "[params] with index and sizes"),
    19: ("parameters at the driver's limit of bytes, and past it", "run, or [params]"),
    20: ("grids and blocks that no GPU, or this kernel, can have", "[launch]"),
    21: ("clusters that do not divide the grid, or do not fit", "[launch]"),
    22: (
        "dynamic shared memory at 48 KiB, at the limit, one past it",
        "run; past it [launch] with both numbers",
    ),
    23: (
        "threads that launch one kernel with little and with much shared memory",
        "right results; the limit is never lowered",
    ),
    24: (
        "no libcuda, the toolkit's stub, one without a function",
        "the import succeeds, the first use is [driver] with path or version",
    ),
    25: (
        "no device, none visible, a part of one (MIG)",
        "[no_device]; a part runs by its own count of multiprocessors",
    ),
    26: (
        "every driver call fails with every code",
        "the tag of the code, its name and text; nothing leaks",
    ),
    27: ("a driver call that fails once", "the next call succeeds"),
    28: (
        "first use by many threads at once, a load that is slow or fails in one",
        "one load; all succeed or see the error",
    ),
    29: ("a fork before and after the first use", "success; [fork] with the advice to spawn"),
    30: (
        "first calls inside a CUDA graph's capture; replays after the objects are gone",
        "success or [capture]; replays are right",
    ),
    31: (
        "a first use in one thread while another captures, in every mode",
        "no capture is invalidated",
    ),
    32: ("unload during use, twice, and a launch after it", "waits or refuses; [closed] after"),
    33: ("a context that another library reset", "[closed], no crash"),
    34: (
        "no memory for a load, once or always",
        "one retry with the cache emptied, then PyTorch's OutOfMemoryError",
    ),
    35: (
        "a kernel that faults, traps, asserts or reads misaligned",
        "[fault] that names the kernel and says to restart, at later calls too",
    ),
    36: (
        "an exit with live handles, in threads, during an exception, after a fork",
        "the status that is asked for, no output, no core",
    ),
    37: (
        "tensors on another device than the current one, on two, on the CPU; other streams",
        "the right device and stream; a mix is [input]",
    ),
    38: ("sizes of 0 and 1, primes, and past 2^31", "right, or [input]"),
    39: ("transposed, sliced, expanded, offset tensors", "as PyTorch"),
    40: ("lazy conjugates, FakeTensors, sparse, quantized, meta tensors", "as PyTorch, or [input]"),
    41: ("every dtype, and mixtures", "those that are supported; others are refused by name"),
    42: ("outputs that overlap an input or themselves", "[input]"),
    43: ("NaN, infinities, negative zero, denormals", "of PyTorch's class"),
    44: (
        "Python objects whose methods raise or lie, numbers that fit nowhere",
        "Python's errors, or their own",
    ),
    45: (
        "locales, a lost working directory, paths that are no UTF-8, full and read-only disks, "
        "a clock that is set back",
        "the same result, or [file]",
    ),
}
