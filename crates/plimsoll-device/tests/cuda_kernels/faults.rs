//! Tests that the shim detects the faults it is meant to detect.

use super::*;

/// Runs `body` as a kernel on `blocks` blocks of 64 threads with 64 floats of shared memory; returns the fault.
fn run(name: &str, blocks: u32, body: &str) -> Result<(), String> {
    let source = format!(
        "extern __shared__ __align__(16) float shared[];\nstruct alignas(16) Four {{ float at[4]; }};\n\
         extern \"C\" __global__ void broken(float* out) {{ {body} }}"
    );
    let library = compile_text(&format!("fault-{name}"), &source, &["broken"]);
    let mut gpu = Gpu::new(0);
    let out = gpu.allocate(Kind::F32, 64);
    gpu.try_run(&library, "broken", [blocks, 1, 1], 64, 256, &[Argument::Address(out)])?;
    assert!(gpu.get(out).iter().all(|x| x.is_finite()));
    Ok(())
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn shim_detects_faults() {
    let turned = "shared[threadIdx.x] = threadIdx.x; __syncthreads(); out[threadIdx.x] = shared[63 - threadIdx.x];";
    let packs = "if (threadIdx.x < 8) *(Four*)(shared + 8 * threadIdx.x + 4) = Four(); __syncthreads();";
    let packs = format!("shared[threadIdx.x] = 0; __syncthreads(); {packs} out[threadIdx.x] = shared[threadIdx.x];");
    let copy = "copy_word(shared + threadIdx.x, out + threadIdx.x, false); copies_landed(); __syncthreads();";
    let copy = format!("{copy} out[threadIdx.x] = shared[63 - threadIdx.x];");
    let neighbour = "shared[threadIdx.x] = threadIdx.x; __shfl_xor_sync(0xffffffffu, 1, 1); \
                     out[threadIdx.x] = shared[threadIdx.x ^ 1];";
    let within = neighbour.replace("__shfl_xor_sync(0xffffffffu, 1, 1)", "__syncwarp()");
    for right in [turned, &packs, &copy, &within] {
        assert_eq!(run("none", 1, right), Ok(()), "{right}");
    }
    let twice = turned.replace("out[", "shared[threadIdx.x] = 1; out[");
    for (name, blocks, body, what) in [
        ("no-barrier", 1, turned.replace("__syncthreads();", ""), "just read"),
        ("late-barrier", 1, "if (threadIdx.x < 32) __syncthreads(); out[threadIdx.x] = 0;".into(), "never come"),
        (
            "beyond-shared",
            1,
            turned.replace("shared[threadIdx.x]", "shared[threadIdx.x + 1]"),
            "beyond its shared memory",
        ),
        ("beside", 1, turned.replace("out[threadIdx.x]", "out[threadIdx.x + 1]"), "outside a tensor"),
        ("reads-beside", 1, turned.replace("= shared[63 -", "= 0 * out[64 +"), "outside a tensor"),
        ("half-a-warp", 1, format!("if (threadIdx.x % 2) __shfl_xor_sync(0xffffffffu, 1, 1); {turned}"), "never come"),
        // The thread order alone shows none of these.
        ("within-a-warp", 1, neighbour.into(), "no barrier between"),
        (
            "the-same",
            1,
            turned.replace("shared[threadIdx.x] = threadIdx.x", "shared[threadIdx.x / 2] = 0"),
            "no barrier between",
        ),
        ("still-read", 1, twice, "just read"),
        ("between-blocks", 2, turned.into(), "no barrier between"),
        ("no-pack", 1, packs.replace("+ 4) =", "+ 2) ="), "not aligned"),
        (
            "no-wait",
            1,
            copy.replace("copies_landed(); __syncthreads();", "__syncthreads(); copies_landed();"),
            "still comes",
        ),
        (
            "still-comes",
            1,
            copy.replace("copies_landed();", "").replace("out[", "copies_landed(); out["),
            "still comes",
        ),
    ] {
        let found = run(name, blocks, &body).expect_err(name);
        assert!(found.contains(what), "{name}: {found}");
    }
}
