//! Builds and opens the stand-in for a GPU, which runs on the CPU; see `README.md`.

use plimsoll_core::{DType, GemmAlgorithms};
use plimsoll_device::cuda::compile::Compiler;
use plimsoll_device::cuda::driver::Driver;
use plimsoll_device::cuda::executor::{self, OpenRequest, OpenedGpu, ProcessBytes};
use plimsoll_device::cuda::{nccl, products};
use plimsoll_device::error::DeviceError;
use plimsoll_program::{Placement, ProgramSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

/// Returns the folder of the stand-in's libraries, and builds them at the first call.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-in");
        let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_stand_in/build");
        assert!(Command::new(build).arg(&folder).status().unwrap().success());
        folder
    })
}

/// Opens GPU 0 of the stand-in with the programs of a plan.
pub fn open(
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    algorithms: Option<&GemmAlgorithms>,
) -> Result<OpenedGpu, DeviceError> {
    open_gpu(0, set, placement, precision, algorithms)
}

/// Opens a GPU of the stand-in; `cargo xtask cuda-check` configures two.
pub fn open_gpu(
    ordinal: u32,
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    algorithms: Option<&GemmAlgorithms>,
) -> Result<OpenedGpu, DeviceError> {
    let folder = folder();
    let driver = Arc::new(Driver::load(&folder.join("libcuda.so.1"))?);
    let products = Arc::new(products::Library::load(&folder.join("libcublasLt.so.13"))?);
    let compiler = Arc::new(Compiler::open(&folder.join("libnvrtc.so.13"), "13", Some(folder))?);
    let nccl = Arc::new(nccl::Library::load(&folder.join("nccl/libnccl.so.2"))?);
    let process_bytes: ProcessBytes = Arc::new(|| None);
    let request = OpenRequest {
        driver: &driver,
        products: &products,
        compiler: &compiler,
        nccl: Some(&nccl),
        ordinal,
        precision,
        threads: 1,
        algorithms,
        free_before: None,
        process_bytes: &process_bytes,
        charges_max: None,
        scratch: Some(folder),
    };
    executor::open(&request, set, placement)
}
