"""Compiles CUDA C without a GPU: NVRTC to PTX, ptxas to machine code, and the resources of each kernel.

    compile.py DIR ARCHS OPTION...      e.g. compile.py target/cuda-check 80,86 --std=c++17

DIR contains complete units, *.cu, as the executor passes them to NVRTC; options are NVRTC's. The first line on stdout is
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
import subprocess
import sys
import tempfile

def packages():
    """Returns the folder nvidia/ of this venv."""
    found = [p / "nvidia" for p in map(pathlib.Path, sys.path) if (p / "nvidia").is_dir()]
    if not found:
        sys.exit("no package nvidia in this Python: pip install -r parity/cuda/requirements.txt")
    return found[0]


def one(pattern):
    files = sorted(packages().glob(pattern))
    if not files:
        sys.exit(f"no {pattern} below {packages()}")
    return files[0]


class Nvrtc:
    """Thread-safe wrapper for the few libnvrtc functions needed here."""

    def __init__(self):
        # NVRTC loads this library by name, so it must be loaded first.
        builtins = one("*/lib/libnvrtc-builtins.so.*")
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(one("*/lib/libnvrtc.so.*")))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: {self.library.nvrtcGetErrorString(code).decode()}")

    def text(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.value.decode()

    def ptx(self, name, source, arch, options):
        """Compiles to (PTX, log); PTX is None if compilation failed."""
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        options = [option.encode() for option in [*options, f"--gpu-architecture=compute_{arch}"]]
        try:
            code = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
            log = self.text(program, "ProgramLog")
            return (self.text(program, "PTX") if code == 0 else None), log
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))


def needs(log):
    """Parses the resource usage per kernel from the output of ptxas -v."""
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
    return found


def compile_unit(nvrtc, ptxas, path, arch, options):
    ptx, log = nvrtc.ptx(path.name, path.read_text(), arch, options)
    if ptx is None:
        return None, log
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "unit.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"-arch=sm_{arch}", source, "-o", source.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return None, done.stdout + done.stderr
        return needs(done.stderr), log


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    units, archs, options = sorted(pathlib.Path(sys.argv[1]).glob("*.cu")), sys.argv[2].split(","), sys.argv[3:]
    nvrtc, ptxas = Nvrtc(), one("*/bin/ptxas")
    print(json.dumps({"nvrtc": nvrtc.version}), flush=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        work = {
            pool.submit(compile_unit, nvrtc, ptxas, unit, arch, options): (unit.stem, arch)
            for unit in units
            for arch in archs
        }
        for future in concurrent.futures.as_completed(work):
            unit, arch = work[future]
            kernels, log = future.result()
            if kernels is None or log.strip("\0 \n"):
                print(f"== {unit} for sm_{arch}\n{log}", file=sys.stderr, flush=True)
            failed += kernels is None
            for kernel in kernels or []:
                print(json.dumps({"unit": unit, "arch": arch, **kernel}), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
