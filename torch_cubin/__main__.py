# The command line: parses arguments, calls the module of the command, prints errors.
"""python -m torch_cubin: a demonstration, a look into device code, a check of this machine."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from pathlib import Path

import torch_cubin
from torch_cubin._native import library, process

# Exists only in a checkout, not in a wheel.
BENCHMARK = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_matmul.py"


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 success, 1 failure, 2 wrong arguments."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.run is not _bench:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.run is None:
        parser.print_help(sys.stderr)
        return 2
    options.rest = rest
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may contain unprintable characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # doctor reports this error itself.
        if options.run is not _doctor and not process.without_torch():
            library.packages_error()
        status = options.run(options)
        if sys.stdout is not None:  # a service may have closed it
            sys.stdout.flush()  # inside the try, which handles a closed pipe
        return status
    except torch_cubin.Error as error:
        print(_by_flags(str(error), options), file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name != "torch" or not process.without_torch():
            raise
        print(
            "torch_cubin [file]: this command needs PyTorch: expected the package torch. Install "
            "it (torch 2.11 or newer).",
            file=sys.stderr,
        )
        return 1
    except BrokenPipeError:  # `inspect LIBRARY | head`: the reader has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _by_flags(message: str, options: argparse.Namespace) -> str:
    """An error's text with this command's flags for the keywords that Python would be given."""
    for name in vars(options):
        flag = "--" + name.replace("_", "-")
        message = re.sub(rf"(?<![\w.(]){name}=(?:True\b)?(?!\w)", flag, message)
    return message


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_cubin", description=__doc__)
    parser.add_argument("--version", action="version", version=torch_cubin.__version__)
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    demo = commands.add_parser("demo", help="kernels and a model at work, compared with PyTorch")
    demo.set_defaults(run=_demo)

    inspect = commands.add_parser("inspect", help="what a file of device code holds; needs no GPU")
    inspect.add_argument(
        "file",
        metavar="FILE",
        help="a cubin, a fatbin, PTX, an object, library or program with device code in it, or C "
        "source with device code in an array",
    )
    inspect.add_argument("--json", action="store_true", help="for programs: see docs/inspect.md")
    inspect.set_defaults(run=_inspect)

    calibrate = commands.add_parser(
        "calibrate", help="measure which calls are faster than PyTorch's: the policy 'fastest'"
    )
    calibrate.add_argument("--device", type=int, default=0, metavar="INDEX")
    calibrate.add_argument("--again", action="store_true", help="even if a result was kept")
    calibrate.set_defaults(run=_calibrate)

    doctor = commands.add_parser("doctor", help="check the installation, the driver and the GPU")
    doctor.add_argument("--all", action="store_true", help="list all of PyTorch's internals")
    doctor.set_defaults(run=_doctor)

    cmake = commands.add_parser("cmake-dir", help="the folder of torch_cubin.cmake, for CMake")
    cmake.set_defaults(run=_cmake_dir)

    tune = commands.add_parser("tune", help="measure which kernels are quickest; needs a GPU")
    what = tune.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--sweep", action="store_true", help="cubes and the projections of language models"
    )
    what.add_argument("--shapes", metavar="MxNxK,...", help="these")
    tune.add_argument("--layouts", default="nt,nn", help="nt (b is transposed), nn, tn, tt")
    tune.add_argument("--dtype", default="bfloat16", help="float16, bfloat16, tf32, float32, ...")
    tune.add_argument(
        "--lines",
        type=Path,
        default=Path("tuned.jsonl"),
        metavar="FILE",
        help="what was measured so far; a run that was interrupted goes on there (tuned.jsonl)",
    )
    tune.add_argument("--table", type=Path, metavar="FILE", help="the tuned table, for load_tuned")
    tune.add_argument("--seconds", type=float, default=float("inf"), help="end after so long")
    tune.set_defaults(run=_tune)

    export = commands.add_parser("export", help="compile a kernel for define_op; needs no GPU")
    producers = export.add_subparsers(required=True, metavar="PRODUCER")
    triton = producers.add_parser("triton", help="a @triton.jit function, by the Triton installed")
    triton.add_argument("kernel", metavar="FILE.py:NAME", help="the file is executed")
    triton.add_argument(
        "--signature", required=True, metavar="TYPES",
        help='in Triton\'s notation: "*fp32:16, *fp32:16, i32, 1024"',
    )  # fmt: skip
    triton.add_argument("--arch", required=True, metavar="ARCHS", help="sm_80,sm_90a")
    triton.add_argument("--num-warps", type=int)
    triton.add_argument("--num-stages", type=int)
    triton.add_argument("--num-ctas", type=int)
    triton.add_argument("--maxnreg", type=int)
    triton.add_argument("--output", "-o", type=Path, metavar="FOLDER", help="default: NAME")
    triton.add_argument("--overwrite", action="store_true", help="replace what FOLDER holds")
    triton.set_defaults(run=_export_triton)

    if BENCHMARK.is_file():
        bench = commands.add_parser(
            "bench",
            help="speed against torch.matmul; needs a GPU. More arguments: bench --quick, ...",
            add_help=False,
        )
        bench.set_defaults(run=_bench)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from torch_cubin._command_line import demo

    return demo.run()


def _inspect(options: argparse.Namespace) -> int:
    found = torch_cubin.inspect(options.file)
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from torch_cubin._command_line import doctor

    return doctor.run(all=options.all)


def _calibrate(options: argparse.Namespace) -> int:
    from torch_cubin._command_line import calibrate

    return calibrate.run(options.device, again=options.again)


def _tune(options: argparse.Namespace) -> int:
    from torch_cubin._tuning import sweep

    return sweep.run(options)


def _export_triton(options: argparse.Namespace) -> int:
    from torch_cubin._command_line import export

    return export.triton(options)


def _cmake_dir(options: argparse.Namespace) -> int:
    print(Path(__file__).resolve().parent / "cmake")
    return 0


def _bench(options: argparse.Namespace) -> int:
    import subprocess

    return subprocess.run([sys.executable, str(BENCHMARK), *options.rest], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
