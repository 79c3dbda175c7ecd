//! From `cuda:0` to an executor: driver, compiler and library of products are opened once in the life of the process,
//! each from the file that was found.

use super::arena::DeviceArena;
use super::compile::Compiler;
use super::driver::Driver;
use super::executor::{self, Opened, Opening};
use super::gpus::{self, Card, Here};
use super::{nccl, products};
use crate::calibration;
use crate::device::{Device, DeviceError};
use crate::probe::Heat;
use plimsoll_core::{Algorithms, Bytes, DType, MeasuredBy};
use plimsoll_program::{Placement, ProgramSet};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What every GPU is driven with.
pub(crate) struct Tools {
    /// The driver.
    pub driver: Arc<Driver>,
    products: Arc<products::Library>,
    compiler: Arc<Compiler>,
    /// None where there is none that can be used.
    nccl: Option<Arc<nccl::Library>>,
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
        nccl: here.nccl().and_then(|found| nccl::Library::load(&found.path).ok()).map(Arc::new),
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
    // The context stays, and what it takes itself is missing in the answer, on the safe side.
    let context = super::driver::Context::open(&tools(here)?.driver, card.index, None)?;
    Ok(context.memory()?.0)
}

/// Takes bytes of a GPU and holds them for nobody's Programs, until they are dropped.
///
/// # Errors
/// There is none of that number, or it has not that much left.
pub fn hold(index: u32, bytes: Bytes) -> Result<DeviceArena, DeviceError> {
    let (here, _) = card(index)?;
    let context = super::driver::Context::open(&tools(here)?.driver, index, None)?;
    Ok(DeviceArena::take(&context, bytes.0)?)
}

/// What was free on a GPU, as NVML says it, before this process had a context there: asked at the first call.
fn free_before(here: &Here, card: &Card) -> Option<Bytes> {
    static KNOWN: Mutex<BTreeMap<u32, Option<Bytes>>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *known.entry(card.index).or_insert_with(|| here.memory(card).map(|memory| memory.free_bytes))
}

/// What asks a GPU for a sign of life, from any thread and beside its work, its opening included. One that fell off the bus
/// answers no more, and a driver that hangs does not come back. Where NVML said nothing of it when it was first asked, it
/// counts as there.
pub fn answers(index: u32) -> impl Fn() -> bool + Send + Sync {
    let told = OnceLock::new();
    move || {
        let answers = card(index).is_ok_and(|(here, card)| here.memory(card).is_some());
        let first = *told.get_or_init(|| answers);
        answers || !first
    }
}

/// A GPU that a run has opened, as it is seen from beside the Programs.
pub struct OnGpu {
    here: &'static Here,
    card: &'static Card,
    /// Whether some of the algorithms of its products were chosen now.
    pub chosen_anew: bool,
}

impl OnGpu {
    /// What this process holds on it now, where NVML sees processes (not in containers, nor on WSL).
    pub fn held(&self) -> Option<Bytes> {
        let own = std::process::id();
        self.here.processes(self.card).into_iter().find(|process| process.pid == own)?.held_bytes
    }

    /// The same, and where processes cannot be seen what is free less than before this process came, as far as NVML
    /// says that. No figure is better than one that was only counted.
    pub fn measured(&self) -> Option<(Bytes, MeasuredBy)> {
        let less = || {
            let now = self.here.memory(self.card)?.free_bytes;
            Some((free_before(self.here, self.card)?.saturating_sub(now), MeasuredBy::FreeMemory))
        };
        self.held().map(|held| (held, MeasuredBy::Process)).or_else(less)
    }

    /// How warm it is, where NVML says so.
    pub fn heat(&self) -> Option<Heat> {
        self.here.condition(self.card).heat()
    }
}

/// What a run is given of a GPU, and what is known of it already.
#[derive(Clone, Copy)]
pub struct Wish<'a> {
    /// The GPU's number.
    pub index: u32,
    /// Threads of the processor, for ops that the host does.
    pub threads: usize,
    /// What is computed in.
    pub precision: DType,
    /// The algorithms that products had before; without them those that were chosen on this machine before.
    pub algorithms: Option<&'a Algorithms>,
    /// The charges that were planned with, where they were measured: more are refused before the arena is taken.
    pub charges: Option<Bytes>,
    /// Where its scratch file is, where it may have one.
    pub scratch: Option<&'a Path>,
}

impl Wish<'_> {
    fn opening<T>(
        &self,
        then: impl FnOnce(&Opening, &'static Here, &'static Card) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let (here, card) = card(self.index)?;
        let tools = tools(here)?;
        let first = free_before(here, card);
        let known = if self.algorithms.is_none() { calibration::algorithms(card) } else { None };
        let opening = Opening {
            driver: &tools.driver,
            products: &tools.products,
            compiler: &tools.compiler,
            nccl: tools.nccl.as_ref(),
            ordinal: self.index,
            precision: self.precision,
            threads: self.threads,
            algorithms: self.algorithms.or(known.as_ref()),
            // Where a context was ended, a library may have kept it all the same, and what it holds would count as others'.
            free_before: here.memory(card).map(|memory| memory.free_bytes).max(first),
            charges_max: self.charges,
            scratch: self.scratch,
        };
        then(&opening, here, card)
    }
}

/// Opens a GPU with the Programs of a plan to be measured: products have these algorithms, others are chosen anew, and
/// charges are what they are.
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
    let wish = Wish { index, threads, precision, algorithms, charges: None, scratch: None };
    wish.opening(|opening, _, _| executor::open(&Opening { algorithms, ..*opening }, set, placement))
}

/// Measures what a GPU holds beside the arena of these Programs, taking no more than the largest of their ops needs; tells
/// the next runs.
///
/// # Errors
/// As [`open`].
pub fn measure_charges(wish: &Wish, set: ProgramSet, placement: Placement) -> Result<Bytes, DeviceError> {
    wish.opening(|opening, here, card| {
        let (charges, algorithms) = executor::charges(opening, set, placement)?;
        calibration::keep_charges(here, card, charges.total());
        calibration::keep_algorithms(&algorithms);
        Ok(charges.total())
    })
}

/// Opens a GPU for a run, which also wants to see it from beside its Programs. What was measured and chosen is told to
/// the next runs.
///
/// # Errors
/// As [`open`], and [`DeviceError::MoreCharges`].
pub fn open_for_run(
    wish: &Wish,
    set: ProgramSet,
    placement: Placement,
) -> Result<(Box<dyn Device>, OnGpu), DeviceError> {
    wish.opening(|opening, here, card| {
        let opened = executor::open(opening, set, placement);
        if let Err(DeviceError::MoreCharges { held, .. }) = opened {
            calibration::keep_charges(here, card, held);
        }
        let Opened { device, charges, algorithms, chosen_anew, .. } = opened?;
        calibration::keep_charges(here, card, charges.total());
        calibration::keep_algorithms(&algorithms);
        Ok((device, OnGpu { here, card, chosen_anew }))
    })
}
