"""Checks that the stand-in detects the faults it is meant to detect: check.py FOLDER, with its libraries in FOLDER.

Each test runs in its own process, because a lost device stays lost, and a host that touches device memory dies.
"""

import ctypes
import os
import subprocess
import sys
import unittest

FOLDER = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 else None

# Start of every script: a context, and calls that must succeed unless `expect` names another code.
BEGIN = """
import ctypes, sys
from ctypes import byref, c_int, c_void_p, c_uint64, c_size_t, c_uint
cuda = ctypes.CDLL("libcuda.so.1"); nvrtc = ctypes.CDLL("libnvrtc.so.13")
def call(name, *arguments, expect=0, library=cuda):
    code = getattr(library, name)(*arguments)
    assert code == expect, f"{name}: {code}"
def create(name, kind, *arguments):
    out = kind(); call(name, byref(out), *arguments); return out
call("cuInit", 0)
context = create("cuDevicePrimaryCtxRetain", c_void_p, 0); call("cuCtxSetCurrent", context)
def stream(): return create("cuStreamCreate", c_void_p, 1)
def event(): return create("cuEventCreate", c_void_p, 2)
def pinned(count):
    place = create("cuMemHostAlloc", c_void_p, c_size_t(4 * count), 1)
    return ctypes.cast(place, ctypes.POINTER(ctypes.c_float))
def device(count): return create("cuMemAlloc_v2", c_uint64, c_size_t(4 * count))
def kernels(source, *names):
    program = c_void_p()
    call("nvrtcCreateProgram", byref(program), source.encode(), b"unit.cu", 0, None, None, library=nvrtc)
    options = (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_86")
    code = nvrtc.nvrtcCompileProgram(program, 1, options)
    size = c_size_t(); call("nvrtcGetProgramLogSize", program, byref(size), library=nvrtc)
    log = ctypes.create_string_buffer(size.value); call("nvrtcGetProgramLog", program, log, library=nvrtc)
    if code: print("LOG", log.value.decode()); sys.exit(3)
    call("nvrtcGetCUBINSize", program, byref(size), library=nvrtc)
    image = ctypes.create_string_buffer(size.value); call("nvrtcGetCUBIN", program, image, library=nvrtc)
    module = create("cuModuleLoadData", c_void_p, image)
    return [create("cuModuleGetFunction", c_void_p, module, name.encode()) for name in names]
def launch(function, on, *values, blocks=1, threads=32, shared=0, expect=0):
    pointers = (c_void_p * len(values))(*[ctypes.cast(byref(v), c_void_p) for v in values])
    call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, shared, on, pointers, None, expect=expect)
"""

ADD = '''
extern "C" __global__ void __launch_bounds__(32) add(float* at, float value) { at[threadIdx.x] += value; }
'''


def run(script, **settings):
    environment = {**os.environ, "LD_LIBRARY_PATH": FOLDER}
    environment.update({f"PLIMSOLL_STAND_IN_{name}": str(value) for name, value in settings.items()})
    return subprocess.run(
        [sys.executable, "-c", BEGIN + script], env=environment, capture_output=True, text=True, timeout=60
    )


class StandIn(unittest.TestCase):
    def run_ok(self, script, **settings):
        done = run(script, **settings)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_kernel_runs_between_two_copies(self):
        output = self.run_ok(f"""
add, = kernels({ADD!r}, "add")
s, host, at = stream(), pinned(32), device(32)
for i in range(32): host[i] = i
call("cuMemcpyHtoDAsync_v2", at, host, c_size_t(128), s)
launch(add, s, at, ctypes.c_float(0.5))
call("cuMemcpyDtoHAsync_v2", host, at, c_size_t(128), s)
assert host[7] == 7
call("cuStreamSynchronize", s)
print(host[7])
""")
        self.assertEqual(output, "7.5\n")

    # Two streams, with and without the wait between them.
    TWO_STREAMS = """
add, = kernels(%r, "add")
a, b, host, at, ready = stream(), stream(), pinned(32), device(32), event()
for i in range(32): host[i] = 1
call("cuMemcpyHtoDAsync_v2", at, host, c_size_t(128), a)
call("cuEventRecord", ready, a)
%s
launch(add, b, at, ctypes.c_float(1))
call("cuCtxSynchronize")
call("cuMemcpyDtoHAsync_v2", host, at, c_size_t(128), b); call("cuStreamSynchronize", b)
print(host[0])
"""

    def test_missing_wait_shows_with_some_seed(self):
        waits, without = 'call("cuStreamWaitEvent", b, ready, 0)', "pass"
        ordered = {self.run_ok(self.TWO_STREAMS % (ADD, waits), SEED=seed) for seed in range(6)}
        self.assertEqual(ordered, {"2.0\n"})
        unordered = {self.run_ok(self.TWO_STREAMS % (ADD, without), SEED=seed) for seed in range(6)}
        self.assertGreater(len(unordered), 1)

    def test_early_reuse_of_pinned_buffer_shows(self):
        output = self.run_ok("""
s, host, at = stream(), pinned(1), device(2)
for i in range(2):
    host[0] = i
    call("cuMemcpyHtoDAsync_v2", c_uint64(at.value + 4 * i), host, c_size_t(4), s)
back = pinned(2)
call("cuMemcpyDtoHAsync_v2", back, at, c_size_t(8), s); call("cuStreamSynchronize", s)
print(back[0], back[1])
""")
        self.assertEqual(output, "1.0 1.0\n")

    def test_host_access_to_device_memory_dies(self):
        done = run("at = device(4); ctypes.cast(at.value, ctypes.POINTER(ctypes.c_float))[0]")
        self.assertIn("the host touched", done.stderr)
        self.assertLess(done.returncode, 0)

    def test_write_beyond_allocation_is_detected(self):
        done = run(f"""
add, = kernels({ADD!r}, "add")
s, at = stream(), device(31)
launch(add, s, at, ctypes.c_float(1)); call("cuStreamSynchronize", s)
""")
        self.assertIn("beyond an allocation", done.stderr)

    def test_memory_runs_out_and_is_freed(self):
        self.run_ok("""
def free():
    out, total = c_size_t(), c_size_t(); call("cuMemGetInfo_v2", byref(out), byref(total)); return out.value
before = free(); assert before == 212 << 20, before
at = device(100 << 18)
assert free() == before - (100 << 20)
out = c_uint64(); call("cuMemAlloc_v2", byref(out), c_size_t(113 << 20), expect=2)
call("cuMemFree_v2", at); assert free() == before
""", MEMORY="512MiB")

    def test_requested_faults_occur(self):
        self.run_ok('device(1); out = c_uint64(); call("cuMemAlloc_v2", byref(out), c_size_t(4), expect=2)', OOM_AT=2)
        self.run_ok(f"""
add, = kernels({ADD!r}, "add")
s, at = stream(), device(32)
launch(add, s, at, ctypes.c_float(1)); launch(add, s, at, ctypes.c_float(1), expect=719)
call("cuStreamSynchronize", s, expect=719)
""", LOST_AT=2)

    def test_launch_needs_permission_for_shared_memory(self):
        self.run_ok(f"""
add, = kernels({ADD!r}, "add")
s, at = stream(), device(32)
launch(add, s, at, ctypes.c_float(1), shared=50 << 10, expect=1)
call("cuFuncSetAttribute", add, 8, 50 << 10)
launch(add, s, at, ctypes.c_float(1), shared=50 << 10)
call("cuCtxSynchronize")
""")

    def test_compile_error_includes_log(self):
        done = run("kernels('extern \"C\" __global__ void broken(float* at) { at = nothing; }', 'broken')")
        self.assertEqual(done.returncode, 3)
        self.assertIn("nothing", done.stdout)

    def test_remapped_memory_keeps_its_contents(self):
        self.run_ok("""
GRANULE = 2 << 20
class Properties(ctypes.Structure):
    _fields_ = [("kind", c_int), ("handles", c_int), ("location", c_int), ("id", c_int), ("rest", c_uint64 * 2)]
class Access(ctypes.Structure):
    _fields_ = [("location", c_int), ("id", c_int), ("flags", c_int)]
properties, access = Properties(1, 0, 1, 0), Access(1, 0, 3)
place = create("cuMemAddressReserve", c_uint64, c_size_t(4 * GRANULE), c_size_t(0), c_uint64(0), c_uint64(0))
memory = create("cuMemCreate", c_uint64, c_size_t(GRANULE), byref(properties), c_uint64(0))
def put(at):
    call("cuMemMap", c_uint64(at), c_size_t(GRANULE), c_size_t(0), memory, c_uint64(0))
    call("cuMemSetAccess", c_uint64(at), c_size_t(GRANULE), byref(access), c_size_t(1))
s, host = stream(), pinned(1)
put(place.value); host[0] = 3
call("cuMemcpyHtoDAsync_v2", place, host, c_size_t(4), s); call("cuStreamSynchronize", s)
call("cuMemUnmap", place, c_size_t(GRANULE)); host[0] = 0
call("cuMemcpyHtoDAsync_v2", place, host, c_size_t(4), s, expect=1)
put(place.value + GRANULE)
call("cuMemcpyDtoHAsync_v2", host, c_uint64(place.value + GRANULE), c_size_t(4), s); call("cuStreamSynchronize", s)
assert host[0] == 3
""")


if __name__ == "__main__":
    if FOLDER is None:
        sys.exit(__doc__)
    unittest.main()
