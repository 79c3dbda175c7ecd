//! The stand-in for a GPU, built and opened by the tests of this crate. It runs on the CPU; see `README.md` beside this.

use plimsoll_core::{Algorithms, DType};
use plimsoll_device::cuda::compile::Compiler;
use plimsoll_device::cuda::driver::Driver;
use plimsoll_device::cuda::executor::{self, Opened, Opening};
use plimsoll_device::cuda::{nccl, products};
use plimsoll_device::device::DeviceError;
use plimsoll_program::{Placement, ProgramSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

/// The folder of its libraries, which are built once.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-in");
        let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_stand_in/build");
        assert!(Command::new(build).arg(&folder).status().unwrap().success());
        folder
    })
}

/// Opens it with the Programs of a plan.
pub fn open(
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    algorithms: Option<&Algorithms>,
) -> Result<Opened, DeviceError> {
    open_gpu(0, set, placement, precision, algorithms)
}

/// The same of the GPU of that number; of two, as `cargo xtask cuda-check` says.
pub fn open_gpu(
    ordinal: u32,
    set: ProgramSet,
    placement: Placement,
    precision: DType,
    algorithms: Option<&Algorithms>,
) -> Result<Opened, DeviceError> {
    let folder = folder();
    let driver = Arc::new(Driver::load(&folder.join("libcuda.so.1"))?);
    let products = Arc::new(products::Library::load(&folder.join("libcublasLt.so.13"))?);
    let compiler = Arc::new(Compiler::open(&folder.join("libnvrtc.so.13"), "13", Some(folder))?);
    let nccl = Arc::new(nccl::Library::load(&folder.join("nccl/libnccl.so.2"))?);
    let opening = Opening {
        driver: &driver,
        products: &products,
        compiler: &compiler,
        nccl: Some(&nccl),
        ordinal,
        precision,
        threads: 1,
        algorithms,
        free_before: None,
        charges_max: None,
        scratch: Some(folder),
    };
    executor::open(&opening, set, placement)
}
