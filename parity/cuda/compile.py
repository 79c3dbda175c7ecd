"""Compiles CUDA C without a GPU, as Plimsoll does: NVRTC to machine code, and the resources of each kernel.

    compile.py PACKAGES DIR OPTION...      e.g. compile.py .venv/lib/python3.12/site-packages target/units --std=c++17

PACKAGES contains nvidia/ with NVRTC, as pip installs it. DIR contains a folder per architecture, such as 86, with
complete units, *.cu, as the executor passes them to NVRTC; options are NVRTC's. The first line on stdout is
{"nvrtc": VERSION}, followed by one line per kernel, unit and architecture. The log of a unit that does not compile is
printed on stderr, and the exit code is 1. Called by `cargo xtask cuda-check`, which supplies the options and checks the
resources.
"""

import concurrent.futures
import ctypes
import json
import os
import pathlib
import re
import sys


def one(packages, pattern):
    files = sorted((packages / "nvidia").glob(pattern))
    if not files:
        sys.exit(f"no {pattern} below {packages}/nvidia")
    return files[0]


class Nvrtc:
    """Thread-safe wrapper for the few libnvrtc functions needed here."""

    def __init__(self, packages):
        # NVRTC loads this library by name, so it must be loaded first.
        builtins = one(packages, "*/lib/libnvrtc-builtins.so.*")
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(one(packages, "*/lib/libnvrtc.so.*")))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: {self.library.nvrtcGetErrorString(code).decode()}")

    def log_of(self, program):
        size = ctypes.c_size_t()
        self.call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call("nvrtcGetProgramLog", program, buffer)
        return buffer.value.decode()

    def compile(self, name, source, arch, options):
        """Compiles to machine code. Returns whether that succeeded, and the log, which contains the resources."""
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        options = [option.encode() for option in [*options, f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v"]]
        try:
            code = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            return code == 0, self.log_of(program)
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))


def resources(log):
    """Parses the resource usage per kernel from the output of ptxas -v. Returns it, and the lines about anything else."""
    found = []
    for part in re.split(r"Compiling entry function '", log)[1:]:
        kernel = part.split("'", 1)[0]
        number = lambda pattern: int(match[1]) if (match := re.search(pattern, part)) else 0
        found.append(
            {
                "kernel": kernel,
                "registers": number(r"Used (\d+) registers"),
                "spill_store_bytes": number(r"(\d+) bytes spill stores"),
                "spill_load_bytes": number(r"(\d+) bytes spill loads"),
                "stack_bytes": number(r"(\d+) bytes stack frame"),
                "static_shared_bytes": number(r"(\d+) bytes smem"),
            }
        )
    others = [line for line in log.strip("\0 \n").splitlines() if not re.match(r"ptxas\s+(info\s*:|\.)", line)]
    return found, "\n".join(others)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    units, options = sorted(pathlib.Path(sys.argv[2]).glob("*/*.cu")), sys.argv[3:]
    nvrtc = Nvrtc(pathlib.Path(sys.argv[1]))
    print(json.dumps({"nvrtc": nvrtc.version}), flush=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        work = {
            pool.submit(nvrtc.compile, unit.name, unit.read_text(), unit.parent.name, options): unit for unit in units
        }
        for future in concurrent.futures.as_completed(work):
            unit, (compiled, log) = work[future], future.result()
            kernels, said = resources(log)
            if said or not compiled:
                print(f"== {unit.stem} for sm_{unit.parent.name}\n{said}", file=sys.stderr, flush=True)
            failed += not compiled
            for kernel in kernels if compiled else []:
                print(json.dumps({"unit": unit.stem, "arch": unit.parent.name, **kernel}), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
