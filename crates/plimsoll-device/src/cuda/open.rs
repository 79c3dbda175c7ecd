//! From `cuda:0` to an executor: driver, compiler and library of products are opened once in the life of the process,
//! each from the file that was found.

use super::compile::Compiler;
use super::driver::Driver;
use super::executor::{self, Opened, Opening};
use super::gpus::{self, Card, Here};
use super::products::{self, Algorithms};
use crate::calibration;
use crate::device::{Device, DeviceError};
use crate::probe::Heat;
use plimsoll_core::{Bytes, DType};
use plimsoll_program::{Placement, ProgramSet};
use std::sync::{Arc, Mutex, PoisonError};

/// What every GPU is driven with.
pub(crate) struct Tools {
    /// The driver.
    pub driver: Arc<Driver>,
    products: Arc<products::Library>,
    compiler: Arc<Compiler>,
}

/// The driver with what goes with it, opened at the first call. What is missing then may be there at the next.
pub(crate) fn tools(here: &'static Here) -> Result<&'static Tools, DeviceError> {
    static TOOLS: Mutex<Option<&'static Tools>> = Mutex::new(None);
    let mut tools = TOOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(tools) = *tools {
        return Ok(tools);
    }
    let folder = calibration::folder();
    let opened = Tools {
        driver: Arc::new(Driver::load(&here.driver.path)?),
        products: Arc::new(products::Library::load(&here.cublaslt()?.path)?),
        compiler: Arc::new(Compiler::open(&here.nvrtc()?.path, &here.driver_version, folder.as_deref())?),
    };
    // Never closed: drivers do not bear to be taken away.
    Ok(tools.insert(Box::leak(Box::new(opened))))
}

/// A GPU by the driver's number of it.
///
/// # Errors
/// There is none of that number, or no driver.
pub fn card(index: u32) -> Result<(&'static Here, &'static Card), DeviceError> {
    let here = gpus::here()?;
    let count = here.cards.len() as u32;
    let card = here.cards.get(index as usize);
    Ok((here, card.ok_or(super::driver::CudaError::NoDevice { ordinal: index, count })?))
}

/// What is free on a GPU now: as NVML sees it, or where that is not to be had, as a context sees it.
///
/// # Errors
/// What the driver refuses.
pub fn free_bytes(here: &'static Here, card: &Card) -> Result<Bytes, DeviceError> {
    if let Some(memory) = here.memory(card) {
        return Ok(memory.free_bytes);
    }
    // The context is given back at once; what it takes itself is missing in the answer, on the safe side.
    let context = super::driver::Context::open(&tools(here)?.driver, card.index)?;
    Ok(context.memory()?.0)
}

/// What only the context itself takes, where nobody said what was free before it: most take less.
const CONTEXT_BYTES: Bytes = Bytes::mib(512);

/// A GPU that a run has opened, as it is seen from beside the Programs.
pub struct OnGpu {
    here: &'static Here,
    card: &'static Card,
    /// What it holds for this process beside the arena, measured after everything was started once.
    pub charges: Bytes,
    /// The algorithms of its products: with others, last bits differ.
    pub algorithms: Algorithms,
    /// Whether some of these were chosen now.
    pub chosen_anew: bool,
}

impl OnGpu {
    /// What this process holds on it now, where NVML sees processes (not in containers, nor on WSL).
    pub fn held(&self) -> Option<Bytes> {
        let own = std::process::id();
        self.here.processes(self.card).into_iter().find(|process| process.pid == own)?.held_bytes
    }

    /// How warm it is, where NVML says so.
    pub fn heat(&self) -> Option<Heat> {
        let condition = self.here.condition(self.card);
        let throttled = condition.throttled_by.iter().any(|by| by.starts_with("heat"));
        Some(Heat { celsius: f64::from(condition.temperature_celsius?), throttled })
    }

    /// Tells the next run what was measured and chosen.
    pub fn keep(&self) {
        calibration::keep_charges(self.here, self.card, self.charges);
        calibration::keep_algorithms(&self.algorithms);
    }
}

/// Opens a GPU with the Programs of a plan: the arena is taken whole, and everything is started once.
///
/// # Errors
/// What is missing on this machine, or what the GPU refuses.
pub fn open(
    index: u32,
    threads: usize,
    precision: DType,
    algorithms: Option<&Algorithms>,
    set: ProgramSet,
    placement: Placement,
) -> Result<Opened, DeviceError> {
    let (here, card) = card(index)?;
    let tools = tools(here)?;
    let opening = Opening {
        driver: &tools.driver,
        products: &tools.products,
        compiler: &tools.compiler,
        ordinal: index,
        precision,
        threads,
        algorithms,
        free_before: here.memory(card).map(|memory| memory.free_bytes),
    };
    executor::open(&opening, set, placement)
}

/// Opens a GPU for a run, which also wants to see it from beside its Programs. Without `algorithms` of the run itself,
/// products have those that were chosen on this machine before.
///
/// # Errors
/// As [`open`].
pub fn open_for_run(
    index: u32,
    threads: usize,
    precision: DType,
    algorithms: Option<&Algorithms>,
    set: ProgramSet,
    placement: Placement,
) -> Result<(Box<dyn Device>, OnGpu), DeviceError> {
    let (here, card) = card(index)?;
    let known = calibration::algorithms(card);
    let algorithms = algorithms.or(known.as_ref());
    let Opened { device, charges, algorithms, chosen_anew, .. } =
        open(index, threads, precision, algorithms, set, placement)?;
    let charges = charges.context.unwrap_or(CONTEXT_BYTES) + charges.libraries + charges.rounding;
    Ok((device, OnGpu { here, card, charges, algorithms, chosen_anew }))
}
