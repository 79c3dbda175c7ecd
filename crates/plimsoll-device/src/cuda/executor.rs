//! Runs Programs on a GPU: every operand is a range of the one arena, every op a few kernels, a product or a copy.
//!
//! **What is asynchronous.** Running a Program puts its ops on queues and comes back; the host is ahead of the device.
//! It waits only where it must: for what it reads ([`Device::read`]), for files that are written, for ops of its own
//! processor, and where an [`Observer`] wants each op to be over before the next begins. It does ops of its own
//! processor itself: meanwhile streams go on with what they were given, and get nothing new. An update by the host that
//! takes longer than that leaves the GPU idle, which predicted times do not know.
//!
//! **What orders it.** Ops of a queue are done in order (a stream). Ops of different queues wait for each other by
//! events, as hazards on arena ranges demand (`plimsoll_program::order`). At the end of a Program the queue of
//! computation joins all others, and at the begin of the next the others start after it; inputs are written, and
//! results read, on that queue. So Programs follow one another as if each had ended.
//!
//! **Collectives** are the host's to take part in, with bytes that the device brings (`collectives`). They are put off until
//! something waits for them, or the Program has nothing else: by then the device has the rest of the pass to work on.
//! Messages of a pipeline stand in the host's arena, and are the host's alone.
//!
//! **What memory there is.** The arena of the device; the pinned arena of the host; [`STAGING_BYTES`] of pinned
//! staging; what contexts, modules and libraries hold ([`Charges`]). That is measured when the device is opened, after
//! every kernel and every product was started once, because drivers load code at its first start. They are started in
//! an arena that is only as large as the largest op needs: the whole one is taken when all charges are known, so that
//! a load line is not crossed even for a moment.
//!
//! **What is prepared.** At opening every op of every Program is resolved to functions, addresses and grids, so that a
//! step costs the host a few calls an op. Updates that follow each other share launches; this changes no bit, since
//! each element is updated by itself. Sums of squares do not: their order would depend on who looks.
//!
//! [`STAGING_BYTES`]: super::staging::STAGING_BYTES

use super::arena::DeviceArena;
use super::collectives::{ROUND_BYTES, Ready, Stands};
use super::compile::Compiler;
use super::driver::{Address, Context, CudaError, Driver, Function, Gpu, Module};
use super::kernels::launch::{self, Launch, Updated};
use super::kernels::ops::{self, Places};
use super::kernels::{Real, Unit};
use super::machine::Machine;
use super::nccl::{self, Nccl, SCRATCH_BYTES};
use super::products::{self, Operands, Products, Shape};
use super::queues::{self, Signals};
use crate::cpu::executor::{RunOp, Site, runner};
use crate::cpu::pool::Pool;
use crate::device::{Call, Device, DeviceError, FileSpace, Memory, NoFiles, Observer, Room, Unseen};
use crate::probe;
use crate::spaces::{self, Arenas};
use crate::transport::{self, Seat};
use plimsoll_core::{Algorithms, Bytes, CollectivesBy, DType, Space};
use plimsoll_program::op::{Collective, Piece, Queue};
use plimsoll_program::{Index, Lifetime, Op, OpKind, Operand, Placement, Program, ProgramSet, Tensor, TensorId, order};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::c_void;
use std::path::Path;
use std::sync::{Arc, PoisonError};

/// How messages call this device.
const DEVICE: &str = "a single gpu";

/// Arguments that a kernel has at most.
const ARGUMENTS: usize = 32;

/// What it takes to open a GPU.
pub struct Opening<'a> {
    /// The driver.
    pub driver: &'a Arc<Driver>,
    /// cuBLASLt.
    pub products: &'a Arc<products::Library>,
    /// NVRTC and its cache.
    pub compiler: &'a Arc<Compiler>,
    /// NCCL, where it is here.
    pub nccl: Option<&'a Arc<nccl::Library>>,
    /// The GPU's number among the visible ones.
    pub ordinal: u32,
    /// What the run computes in: f32 or bf16.
    pub precision: DType,
    /// Threads of the processor, for ops that the host does.
    pub threads: usize,
    /// The algorithms of products that were chosen before, from plan or checkpoint.
    pub algorithms: Option<&'a Algorithms>,
    /// Where the scratch file is, where there may be one.
    pub scratch: Option<&'a Path>,
    /// What is free on the GPU now, where NVML says so: before this process has a context on it, if it has none yet.
    pub free_before: Option<Bytes>,
    /// The charges that were planned with: where they turn out to be more, no arena is taken.
    pub charges_max: Option<Bytes>,
}

/// What only the context itself takes, where nobody said what was free before it: most take less.
const CONTEXT_BYTES_MAX: Bytes = Bytes::mib(512);

/// Bytes that a GPU holds for us beside the arena, measured after everything was started once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charges {
    /// The context. Where nobody said what was free before it: all that is held on the GPU then, or what most contexts
    /// do not reach, whichever is less.
    pub context: Bytes,
    /// Modules, cuBLASLt, local memory of kernels: what came after the context.
    pub libraries: Bytes,
    /// What is mapped beyond the arena's own bytes, at most: it changes with them, and charges should not.
    pub rounding: Bytes,
}

impl Charges {
    /// All of them.
    pub fn total(&self) -> Bytes {
        self.context + self.libraries + self.rounding
    }

    /// What a GPU holds is seen whole only when its context is opened for the first time: libraries keep much of what they
    /// have loaded in it. `since_first` is what came since then, as far as it is ours: others may have taken or given
    /// meanwhile, so that it counts as much as is possible.
    fn with_those_before(mut self, context: &Context, since_first: Bytes) -> Charges {
        let mut charged = context.charged.lock().unwrap_or_else(PoisonError::into_inner);
        *charged = (*charged).max(since_first.clamp(self.libraries, self.libraries + *charged));
        self.libraries = *charged;
        self
    }
}

/// An opened GPU.
pub struct Opened {
    /// Ready to run Programs; its arena is unwritten.
    pub device: Box<dyn Device>,
    /// What it is.
    pub gpu: Gpu,
    /// What it holds beside the arena.
    pub charges: Charges,
    /// The algorithms of its products, to be kept with plan and checkpoint.
    pub algorithms: Algorithms,
    /// Whether some of them were chosen now: a run that goes on may then differ in bits.
    pub chosen_anew: bool,
}

/// Opens a GPU: loads the kernels, chooses the algorithms of products, starts everything once, measures what that holds,
/// and only then takes the arena, whole and at once.
///
/// # Errors
/// What the GPU refuses; [`CudaError::Refused`] where the arena is larger than what is free;
/// [`DeviceError::MoreCharges`] where more is held beside it than was planned with.
pub fn open(opening: &Opening, set: ProgramSet, placement: Placement) -> Result<Opened, DeviceError> {
    let (mut device, charges) = start(opening, set, placement)?;
    device.charges = charges;
    if let Some(planned) = opening.charges_max.filter(|planned| charges.total() > *planned) {
        return Err(DeviceError::MoreCharges { held: charges.total(), planned });
    }
    let arena_bytes = device.plan.placement.arena_bytes;
    device.machine.retake(arena_bytes)?;
    device.machine.fill_pattern()?;
    device.prepare_all()?;
    device.machine.context.synchronize()?;
    let (algorithms, chosen_anew) = device.products.algorithms();
    let gpu = device.machine.context.gpu().clone();
    Ok(Opened { device: Box::new(device), gpu, charges, algorithms, chosen_anew })
}

/// What a GPU would hold beside the arena of these Programs, and the algorithms that their products would have. No more is
/// taken on the way than the largest op needs.
///
/// # Errors
/// What the GPU refuses.
pub fn charges(opening: &Opening, set: ProgramSet, placement: Placement) -> Result<(Charges, Algorithms), DeviceError> {
    let (device, charges) = start(opening, set, placement)?;
    Ok((charges, device.products.algorithms().0))
}

/// A GPU on which everything was started once, in an arena that is as large as the largest op needs; and what is held
/// beside it, or will be when the whole arena is taken.
fn start(opening: &Opening, set: ProgramSet, placement: Placement) -> Result<(CudaDevice, Charges), DeviceError> {
    let real = match opening.precision {
        DType::F32 => Real::F32,
        DType::Bf16 => Real::Bf16,
        _ => return Err(DeviceError::Unsupported { op: "this precision", device: DEVICE }),
    };
    let context = Context::open(opening.driver, opening.ordinal, opening.free_before)?;
    let (free_with_context, total) = context.memory()?;
    let machine = Machine::take(&context, &placement, opening.scratch)?;
    let products = Products::new(opening.products, &context, opening.algorithms)?;
    let plan = Arc::new(Plan { set, placement, real });
    let pool = plan.pool(opening.threads)?;
    let (prepared, kernels, compiler) = (BTreeMap::new(), Kernels::default(), opening.compiler.clone());
    let mut device = CudaDevice {
        prepared,
        products,
        kernels,
        plan,
        machine,
        pool,
        threads: opening.threads,
        compiler,
        charges: Charges::default(),
        started: Started::default(),
        seat: None,
        library: opening.nccl.cloned(),
        nccl: None,
        torn: false,
    };
    device.load_kernels()?;
    device.rehearse()?;
    let (free_after, _) = context.memory()?;
    let held = device.machine.held();
    let charges = Charges {
        context: match context.free_before() {
            Some(before) => before.saturating_sub(context.free_at_first()),
            None => total.saturating_sub(context.free_at_first()).min(CONTEXT_BYTES_MAX),
        },
        libraries: free_with_context.saturating_sub(free_after).saturating_sub(held),
        rounding: DeviceArena::rounding_max(&context)?,
    };
    let since_first = context.free_at_first().saturating_sub(free_after).saturating_sub(held);
    Ok((device, charges.with_those_before(&context, since_first)))
}

/// Loaded modules, and the kernels in them.
#[derive(Default)]
struct Kernels {
    functions: BTreeMap<(Unit, &'static str), Function>,
    /// What each may have of shared memory: never less than a plan before had, which may come back.
    shared_bytes: BTreeMap<(Unit, &'static str), u32>,
    modules: BTreeMap<Unit, Module>,
}

/// What was started once on a device: its code is there, and no memory is taken when it is started again.
#[derive(Clone, Default)]
struct Started {
    kernels: BTreeSet<(Unit, &'static str)>,
    products: BTreeSet<Shape>,
}

impl Kernels {
    fn function(&self, launch: &Launch) -> Function {
        self.functions[&(launch.unit, launch.kernel)]
    }
}

/// What runs, and where its tensors stand.
struct Plan {
    set: ProgramSet,
    placement: Placement,
    real: Real,
}

impl Plan {
    /// Up to where the device's arena holds what stays from Program to Program.
    fn kept_bytes(&self) -> u64 {
        let stays = |tensor: &Tensor| tensor.lifetime == Lifetime::Persistent && tensor.space == Space::Device;
        let kept = self.set.tensors.iter().zip(&self.placement.offsets).filter(|(tensor, _)| stays(tensor));
        let ends = kept.flat_map(|(tensor, slots)| slots.iter().flatten().map(|first| first + tensor.bytes()));
        ends.max().unwrap_or(0)
    }

    /// Whether an op is about a message that stands in the host's arena.
    fn is_mail(&self, op: &Op) -> bool {
        match &op.kind {
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
                let on_host = |piece: &Piece| self.set.tensor(piece.input.tensor).space == Space::Host;
                exchange.is_message() && exchange.pieces.iter().all(on_host)
            }
            _ => false,
        }
    }

    /// That messages in the device's memory have been taken when the Program that shows them ends: a slot of staging cannot
    /// be lent any longer.
    fn check_messages(&self, program: &Program) -> Result<(), DeviceError> {
        let late = DeviceError::NoTeam { device: "a GPU that waits late for messages out of its memory" };
        let mut shown: Vec<(Option<u32>, Index)> = Vec::new();
        for op in program.blocks.iter().flat_map(|block| &block.ops).filter(|op| !self.is_mail(op)) {
            match &op.kind {
                OpKind::CollectiveStart(message) if message.collective == Collective::Send => {
                    shown.push((message.peer, message.sequence));
                }
                OpKind::CollectiveWait(message) if message.collective == Collective::Send => {
                    let place = shown.iter().position(|other| *other == (message.peer, message.sequence));
                    // Else it was shown by a Program before this one.
                    let Some(place) = place else { return Err(late) };
                    shown.remove(place);
                }
                _ => {}
            }
        }
        if shown.is_empty() { Ok(()) } else { Err(late) }
    }

    /// Threads for the ops of the host's processor, where there are any.
    fn pool(&self, threads: usize) -> Result<Option<Pool>, DeviceError> {
        let is_on_host = |program: &Program| program.trace().any(|(op, _)| op.queue.is_hosts());
        Ok(self.set.programs.iter().any(is_on_host).then(|| Pool::new(threads)).transpose()?)
    }
}

/// An iteration of a block: where operands stand in it.
#[derive(Clone, Copy)]
struct Frame<'a> {
    plan: &'a Plan,
    /// The plan's, or that of an op which stands alone.
    placement: &'a Placement,
    /// The arena's first byte.
    base: Address,
    variable: i64,
    micro_batch: i64,
}

impl Frame<'_> {
    fn space(&self, operand: &Operand) -> Space {
        self.plan.set.tensor(operand.tensor).space
    }

    /// The operand's first byte in its tensor's slot.
    fn first_byte(&self, operand: &Operand) -> u64 {
        self.index(operand.offset) as u64 * self.dtype(operand).bytes()
    }

    /// The operand's first byte in the arena of its space.
    fn offset(&self, operand: &Operand) -> u64 {
        let slots = i64::from(self.plan.set.tensor(operand.tensor).slots);
        let slot = self.index(operand.slot).rem_euclid(slots) as u32;
        self.placement.offset(operand.tensor, slot) + self.first_byte(operand)
    }

    /// Where operands stand when the op is the only one: what it touches of the device's arena begins at the first byte,
    /// in the same order, overlapping as before, and as far from multiples of 256 bytes. The arena that it needs is
    /// never larger than the whole one.
    fn alone(&self, op: &Op) -> Placement {
        let elements_of = |id: TensorId| self.plan.set.tensor(id).elements();
        let accesses = op.accesses(&elements_of);
        let mut spans: Vec<(u64, u64, TensorId, u32)> = accesses
            .iter()
            .filter(|access| self.space(&access.operand) == Space::Device)
            .map(|access| {
                let tensor = self.plan.set.tensor(access.operand.tensor);
                let slot = self.index(access.operand.slot).rem_euclid(i64::from(tensor.slots)) as u32;
                let start = self.placement.offset(access.operand.tensor, slot);
                let bytes = access.elements * tensor.dtype.bytes();
                (start, self.offset(&access.operand) + bytes, access.operand.tensor, slot)
            })
            .collect();
        spans.sort_unstable();
        let mut placement = Placement { arena_bytes: 0, ..self.placement.clone() };
        let (mut covered, mut shift) = (0, 0);
        for (start, end, tensor, slot) in spans {
            if start >= covered {
                // What lies between goes, in whole steps of 256.
                shift = (start - placement.arena_bytes) / 256 * 256;
            }
            covered = end.max(covered);
            placement.offsets[tensor.0 as usize][slot as usize] = Some(start - shift);
            placement.arena_bytes = covered - shift;
        }
        placement
    }

    /// Where operands stand when all of them begin at the first byte, as far from multiples of 256 bytes as before.
    fn piled(&self, op: &Op) -> Placement {
        let mut placement = Placement { arena_bytes: 0, ..self.placement.clone() };
        for access in op.accesses(&|id| self.plan.set.tensor(id).elements()) {
            let tensor = self.plan.set.tensor(access.operand.tensor);
            if tensor.space == Space::Device {
                let slot = self.index(access.operand.slot).rem_euclid(i64::from(tensor.slots)) as u32;
                let first = self.placement.offset(access.operand.tensor, slot) % 256;
                placement.offsets[access.operand.tensor.0 as usize][slot as usize] = Some(first);
                let end = first + self.first_byte(&access.operand) + access.elements * tensor.dtype.bytes();
                placement.arena_bytes = placement.arena_bytes.max(end);
            }
        }
        placement
    }

    /// The shape of a product and its operands, where the op is one.
    fn product(&self, kind: &OpKind) -> Option<(Shape, Operands)> {
        let OpKind::Product {
            a,
            b,
            out,
            bias,
            residual,
            workspace,
            m,
            n,
            k,
            a_transposed,
            b_transposed,
            a_stride,
            out_stride,
            scale,
            accumulate,
        } = kind
        else {
            return None;
        };
        let result = self.at(out);
        let added = match residual {
            Some(residual) if !accumulate => self.at(residual),
            _ => result,
        };
        let operands = Operands {
            scale: *scale as f32,
            a: self.at(a),
            b: self.at(b),
            added,
            out: result,
            bias: bias.as_ref().map_or(0, |bias| self.at(bias)),
            workspace: self.at(workspace),
        };
        let shape = Shape {
            m: *m,
            n: *n,
            k: *k,
            a_transposed: *a_transposed,
            b_transposed: *b_transposed,
            a_stride: *a_stride,
            added_stride: if residual.is_some() && !accumulate { *n } else { *out_stride },
            out_stride: *out_stride,
            input: self.dtype(a),
            output: self.dtype(out),
            bias: bias.is_some(),
            adds: *accumulate || residual.is_some(),
            alignment: operands.alignments(),
            workspace_bytes: self.plan.set.tensor(workspace.tensor).bytes(),
        };
        Some((shape, operands))
    }

    /// The kernels that may follow a product: for a bias that the library does not take along, and for a residual
    /// where the result is added to what stands there.
    fn after_product(&self, kind: &OpKind) -> Vec<(AfterProduct, Launch)> {
        let OpKind::Product { out, bias, residual, m, n, out_stride, accumulate, .. } = kind else { return Vec::new() };
        let add = |x: &Operand, x_stride: u64| {
            let [launch] = launch::add_rows(self.plan.real, self.at(x), x_stride, self.at(out), *out_stride, *m, *n);
            launch
        };
        let mut after = Vec::new();
        if let Some(bias) = bias {
            after.push((AfterProduct::Bias, add(bias, 0)));
        }
        if let Some(residual) = residual.filter(|_| *accumulate) {
            after.push((AfterProduct::Residual, add(&residual, *n)));
        }
        after
    }

    /// The address of a place in the arena.
    fn address(&self, offset: u64, bytes: u64) -> Address {
        let end = self.placement.arena_bytes;
        assert!(offset + bytes <= end, "bug: {bytes} bytes at {offset} do not lie in an arena of {end}");
        self.base + offset
    }

    /// That kernels and products touch the device's memory only.
    fn check(&self, op: &Op) -> Result<(), DeviceError> {
        let copies = matches!(op.kind, OpKind::TransferStart { .. } | OpKind::TransferWait { .. });
        let on_device = |operand: &Operand| self.space(operand) == Space::Device;
        if copies || self.is_hosts(op) || op.accesses(&|_| 1).iter().all(|access| on_device(&access.operand)) {
            return Ok(());
        }
        Err(DeviceError::Unsupported { op: op.name(), device: "a gpu on memory of the host" })
    }

    /// Whether the host does it: ops of its processor, and messages that stand in its arena.
    fn is_hosts(&self, op: &Op) -> bool {
        op.queue.is_hosts() || self.plan.is_mail(op)
    }

    /// Every kernel that the op may start; see [`Frame::check`].
    fn launches(&self, op: &Op) -> Vec<Launch> {
        if op.queue.is_hosts() {
            return Vec::new();
        }
        match &op.kind {
            OpKind::Product { .. } => self.after_product(&op.kind).into_iter().map(|(_, launch)| launch).collect(),
            kind => ops::launches(kind, self).unwrap_or_default(),
        }
    }

    /// Ranges of the device's arena that an op touches.
    fn touched(&self, op: &Op) -> Vec<(Address, u64)> {
        let elements_of = |id: TensorId| self.plan.set.tensor(id).elements();
        let accesses = op.accesses(&elements_of);
        let on_device = accesses.iter().filter(|access| self.space(&access.operand) == Space::Device);
        on_device
            .map(|access| {
                let bytes = access.elements * self.dtype(&access.operand).bytes();
                (self.address(self.offset(&access.operand), bytes), bytes)
            })
            .collect()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterProduct {
    Bias,
    Residual,
}

impl Places for Frame<'_> {
    fn real(&self) -> Real {
        self.plan.real
    }

    fn at(&self, operand: &Operand) -> Address {
        assert_eq!(self.space(operand), Space::Device, "bug: a kernel touches the device's memory only");
        self.address(self.offset(operand), 0)
    }

    fn dtype(&self, operand: &Operand) -> DType {
        self.plan.set.tensor(operand.tensor).dtype
    }

    fn index(&self, index: Index) -> i64 {
        index.at(self.variable, self.micro_batch)
    }
}

/// A place in one of the arenas, or in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Device(Address),
    /// Byte of the host's arena.
    Host(u64),
    /// Byte of a file-space tensor.
    File(TensorId, u64),
}

/// What is put on a queue.
enum Work {
    Kernel(Function, Launch),
    Product(Shape, Operands),
    /// Bytes from one place to another.
    Copy {
        from: Place,
        to: Place,
        bytes: u64,
    },
    /// An op of the host's processor, or a message that stands in its arena.
    OnHost {
        op: Box<Op>,
        variable: i64,
    },
    /// This device's part in a collective.
    Collective(Box<Ready>),
}

impl Work {
    /// Whether the host does it itself, and now: all that it depends on has to be over.
    fn is_done_by_host(&self) -> bool {
        match self {
            Work::Kernel(..) | Work::Product(..) | Work::Collective(_) => false,
            Work::OnHost { .. } => true,
            Work::Copy { from, to, .. } => !matches!((from, to), (Place::Device(_), _) | (_, Place::Device(_))),
        }
    }
}

/// Ops that are put on their queue as one.
struct Step {
    /// Number of the first op.
    first: u32,
    /// How many ops it is.
    count: u32,
    queue: Queue,
    /// Events that have to be over before.
    awaits: Vec<usize>,
    works: Vec<Work>,
    /// The event that is over afterwards.
    gives: Option<usize>,
}

/// A step of the queue of communication, until its turn comes.
struct PutOff<'a> {
    step: &'a Step,
    /// Which gate it has to pass.
    gate: usize,
    /// Whether it does something in this call.
    runs: bool,
}

/// A Program, ready to be put on queues.
struct Prepared {
    steps: Vec<Step>,
    /// Whether operands stand elsewhere for other micro-batches.
    by_micro_batch: bool,
    /// Whether it has ops on other queues than that of computation.
    forks: bool,
    /// Whether the host itself does something in it.
    on_host: bool,
    /// Up to where it gives scratch to ops, in the device's arena.
    scratch_end: u64,
}

/// Updates that may share launches: those with the same numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Together {
    AdamW { scalars: Address, betas: [f64; 2], eps: f64 },
    AdamW8 { scalars: Address, betas: [f64; 2], eps: f64 },
    Sgd { scalars: Address, momentum: f64 },
}

impl Together {
    fn of(op: &Op, places: &impl Places) -> Option<Together> {
        match &op.kind {
            _ if op.queue != Queue::Compute => None,
            OpKind::AdamW { scalars, betas, eps, .. } => {
                Some(Together::AdamW { scalars: places.at(scalars), betas: *betas, eps: *eps })
            }
            OpKind::AdamW8 { scalars, betas, eps, .. } => {
                Some(Together::AdamW8 { scalars: places.at(scalars), betas: *betas, eps: *eps })
            }
            OpKind::Sgd { scalars, momentum, .. } => {
                Some(Together::Sgd { scalars: places.at(scalars), momentum: *momentum })
            }
            _ => None,
        }
    }

    fn launches(self, tensors: &[Updated]) -> Vec<Launch> {
        match self {
            Together::AdamW { scalars, betas, eps } => launch::adamw(tensors, scalars, betas, eps),
            Together::AdamW8 { scalars, betas, eps } => launch::adamw8(tensors, scalars, betas, eps),
            Together::Sgd { scalars, momentum } => launch::sgd(tensors, scalars, momentum),
        }
    }
}

/// By op: the number of the op that it is started with, which is its own or that of the first of its group.
fn leaders(together: &[Option<Together>]) -> Vec<u32> {
    let mut leaders: Vec<u32> = Vec::with_capacity(together.len());
    for (index, group) in together.iter().enumerate() {
        let follows = index > 0 && group.is_some() && *group == together[index - 1];
        leaders.push(if follows { leaders[index - 1] } else { index as u32 + 1 });
    }
    leaders
}

/// A GPU with the Programs of a run. Fields are dropped in order, and what uses memory goes before it.
struct CudaDevice {
    /// Its part in the team's exchanges, where they go by NCCL.
    nccl: Option<Nccl>,
    /// By Program and, where it matters, micro-batch.
    prepared: BTreeMap<(usize, u32), Arc<Prepared>>,
    products: Products,
    kernels: Kernels,
    plan: Arc<Plan>,
    machine: Machine,
    /// For ops of the host's processor, where there are any.
    pool: Option<Pool>,
    threads: usize,
    compiler: Arc<Compiler>,
    charges: Charges,
    started: Started,
    /// Its place in a team.
    seat: Option<Seat>,
    /// NCCL, where it is here.
    library: Option<Arc<nccl::Library>>,
    /// Whether what passes between the ops of a Program is lost: then none goes on in its middle.
    torn: bool,
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Modules and libraries go only when nothing runs in them, and from a context that is current.
        let _ = self.machine.context.enter();
        // What waits for other ranks on the device ends with this.
        self.nccl = None;
        let _ = self.machine.context.synchronize();
    }
}

impl CudaDevice {
    fn frame(&self, variable: i64, micro_batch: u32) -> Frame<'_> {
        let (plan, base) = (&*self.plan, self.machine.base());
        Frame { plan, placement: &plan.placement, base, variable, micro_batch: i64::from(micro_batch) }
    }

    // ---- opening ----

    /// Compiles and loads every kernel that an op of any Program starts, as far as that was not done before.
    fn load_kernels(&mut self) -> Result<(), DeviceError> {
        let mut shared_bytes: BTreeMap<(Unit, &'static str), u32> = BTreeMap::new();
        for program in &self.plan.set.programs {
            self.plan.check_messages(program)?;
            for (op, variable) in program.trace() {
                let frame = self.frame(variable, 0);
                frame.check(op)?;
                for launch in frame.launches(op) {
                    let most = shared_bytes.entry((launch.unit, launch.kernel)).or_default();
                    *most = launch.shared_bytes.max(*most);
                }
            }
        }
        let mut units: Vec<Unit> = shared_bytes.keys().map(|(unit, _)| *unit).collect();
        units.dedup();
        units.retain(|unit| !self.kernels.modules.contains_key(unit));
        let context = &self.machine.context;
        let gpu = context.gpu();
        if let Some(((_, kernel), bytes)) = shared_bytes.iter().find(|(_, bytes)| **bytes > gpu.shared_bytes_max) {
            let [asked, most] = [*bytes, gpu.shared_bytes_max].map(|bytes| Bytes(bytes.into()));
            return Err(CudaError::Shared { kernel, asked, gpu: gpu.name.clone(), most }.into());
        }
        let cubins = self.compiler.cubins(&units, gpu.architecture)?;
        for (unit, cubin) in units.into_iter().zip(cubins) {
            self.kernels.modules.insert(unit, Module::load(context, &cubin)?);
        }
        for ((unit, kernel), bytes) in shared_bytes {
            let most = self.kernels.shared_bytes.entry((unit, kernel)).or_default();
            *most = bytes.max(*most);
            let function = self.kernels.modules[&unit].function(kernel, *most)?;
            self.kernels.functions.insert((unit, kernel), function);
        }
        Ok(())
    }

    /// Chooses an algorithm for every product that has none, as the library proposes: nothing is timed, since the arena
    /// holds what stays.
    fn choose_algorithms(&mut self) -> Result<(), CudaError> {
        for program in &self.plan.set.programs {
            for (op, variable) in program.trace() {
                let (plan, base) = (&*self.plan, self.machine.base());
                let frame = Frame { plan, placement: &plan.placement, base, variable, micro_batch: 0 };
                if let Some((shape, operands)) = frame.product(&op.kind) {
                    // SAFETY: nothing is started, for want of a stream.
                    unsafe { self.products.prepare(shape, &operands, None) }?;
                }
            }
        }
        Ok(())
    }

    /// Starts every kernel and every product once, each op alone, on zeros, in an arena that is as large as the largest
    /// of them needs; products have their algorithms chosen there.
    fn rehearse(&mut self) -> Result<(), DeviceError> {
        let plan = self.plan.clone();
        let (ops, started) = self.distinct(&plan);
        let placements: Vec<Placement> = ops.iter().map(|(op, variable)| self.frame(*variable, 0).alone(op)).collect();
        self.machine.retake(placements.iter().map(|placement| placement.arena_bytes).max().unwrap_or(0))?;
        let base = self.machine.base();
        for ((op, variable), placement) in ops.into_iter().zip(&placements) {
            self.start_alone(&Frame { plan: &plan, placement, base, variable, micro_batch: 0 }, op)?;
        }
        self.started = started;
        Ok(self.machine.context.synchronize()?)
    }

    /// Starts an op on zeros, wherever its operands stand; a product that has no algorithm gets the quickest.
    fn start_alone(&mut self, frame: &Frame, op: &Op) -> Result<(), DeviceError> {
        for (at, bytes) in frame.touched(op) {
            // SAFETY: a range of the arena, in the order of the queue that the op is started on.
            unsafe { self.machine.queues.compute().zero(at, bytes) }?;
        }
        if let Some((shape, operands)) = frame.product(&op.kind) {
            // SAFETY: ranges of the arena, as large as the plan says (`passes::check`); nothing else is at work.
            unsafe { self.products.prepare(shape, &operands, Some(self.machine.queues.compute())) }?;
        }
        for work in self.works(frame, op)? {
            self.start(&work, Queue::Compute, 0, &mut NoFiles)?;
        }
        Ok(())
    }

    /// Ops that together start every kernel and every product that was not started before, each with the number of its
    /// iteration; and what has been started then.
    fn distinct<'a>(&self, plan: &'a Plan) -> (Vec<(&'a Op, i64)>, Started) {
        let (mut started, mut found) = (self.started.clone(), Vec::new());
        for (op, variable) in plan.set.programs.iter().flat_map(|program| program.trace()) {
            let frame = Frame { plan, ..self.frame(variable, 0) };
            let mut is_new = frame.product(&op.kind).is_some_and(|(shape, _)| started.products.insert(shape));
            for launch in frame.launches(op) {
                is_new |= started.kernels.insert((launch.unit, launch.kernel));
            }
            if is_new {
                found.push((op, variable));
            }
        }
        (found, started)
    }

    /// Starts once what the plan that was gone over to has and none before it had, so that drivers and libraries load
    /// its code now, and not in a step: in the part of the arena where nothing stays, which a smaller plan has just
    /// given memory back for. Operands of a product that is too large for that part stand on top of each other, since
    /// nobody looks at the result; another op that is too large is left to its first step.
    fn start_new(&mut self) -> Result<(), DeviceError> {
        let plan = self.plan.clone();
        let (ops, started) = self.distinct(&plan);
        if ops.is_empty() {
            return Ok(());
        }
        let (free, _) = self.machine.context.memory()?;
        let first = plan.kept_bytes().next_multiple_of(256);
        let (base, room) = (self.machine.base() + first, plan.placement.arena_bytes.saturating_sub(first));
        for (op, variable) in ops {
            let whole = self.frame(variable, 0);
            let alone = whole.alone(op);
            let is_product = matches!(op.kind, OpKind::Product { .. });
            let placement = if alone.arena_bytes > room && is_product { whole.piled(op) } else { alone };
            if placement.arena_bytes <= room {
                self.start_alone(&Frame { plan: &plan, placement: &placement, base, variable, micro_batch: 0 }, op)?;
            }
        }
        self.machine.context.synchronize()?;
        let taken = free.saturating_sub(self.machine.context.memory()?.0);
        (self.started, self.charges.libraries) = (started, self.charges.libraries + taken);
        // What was written there is nobody's.
        self.machine.resize(Space::Device, plan.placement.arena_bytes, first.min(plan.placement.arena_bytes))
    }

    /// Makes the plan that it has now, instead of `old`, run: first what can be refused, then what stays moves, then code
    /// that is new is loaded. Algorithms are not timed now: the arena holds what stays.
    fn go_over_from(&mut self, old: &Plan) -> Result<(), DeviceError> {
        let pool = self.plan.pool(self.threads)?;
        let (free, _) = self.machine.context.memory()?;
        let loaded = self.load_kernels();
        self.charges.libraries += free.saturating_sub(self.machine.context.memory()?.0);
        loaded?;
        self.choose_algorithms()?;
        self.prepare_all()?;
        let plan = self.plan.clone();
        let (old, new) = ((&old.set, &old.placement), (&plan.set, &plan.placement));
        self.machine.spaces().scratch().check()?;
        spaces::adopt(&mut self.machine, old, new)?;
        self.machine.spaces().scratch().check()?;
        if let Err(error) = self.start_new() {
            // Back to where it was, but for what passes from op to op.
            self.torn = true;
            if let Err(stuck) = spaces::adopt(&mut self.machine, new, old) {
                let gone = CudaError::Memory { what: "go back to the plan before" };
                self.machine.keep(Err::<(), _>(if let DeviceError::Cuda(error) = stuck { error } else { gone }));
            }
            return Err(error);
        }
        self.pool = pool;
        Ok(())
    }

    // ---- preparing ----

    /// What an op is on this device.
    fn works(&self, frame: &Frame, op: &Op) -> Result<Vec<Work>, DeviceError> {
        if frame.is_hosts(op) {
            return Ok(vec![Work::OnHost { op: Box::new(op.clone()), variable: frame.variable }]);
        }
        let kernel = |launch: Launch| Work::Kernel(self.kernels.function(&launch), launch);
        let copy = |from: &Operand, to: &Operand, elements: u64| {
            let place = |operand: &Operand| match frame.space(operand) {
                Space::Device => Place::Device(frame.at(operand)),
                Space::Host => Place::Host(frame.offset(operand)),
                Space::File => Place::File(operand.tensor, frame.first_byte(operand)),
                Space::Scratch => panic!("bug: the host copies to and from the scratch file"),
            };
            vec![Work::Copy { from: place(from), to: place(to), bytes: elements * frame.dtype(from).bytes() }]
        };
        Ok(match &op.kind {
            kind @ OpKind::Product { .. } => {
                let (shape, operands) = frame.product(kind).expect("a product");
                let mut works = vec![Work::Product(shape, operands)];
                let after = frame.after_product(kind).into_iter();
                let needed =
                    after.filter(|(what, _)| *what == AfterProduct::Residual || self.products.bias_by_kernel(&shape));
                works.extend(needed.map(|(_, launch)| kernel(launch)));
                works
            }
            OpKind::Cast { from, to, elements } if frame.dtype(from) == frame.dtype(to) => copy(from, to, *elements),
            OpKind::TransferStart { from, to, elements, .. } => copy(from, to, *elements),
            OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange)
                if matches!(op.kind, OpKind::CollectiveStart(_)) != (exchange.collective == Collective::Send) =>
            {
                let stands = |piece: &Piece| Stands {
                    input: frame.at(&piece.input),
                    output: frame.at(&piece.output),
                    dtype: frame.dtype(&piece.input),
                };
                let (number, pieces) = (frame.index(exchange.sequence), exchange.pieces.iter().map(stands).collect());
                vec![Work::Collective(Box::new(Ready::new(exchange.clone(), number as u64, pieces)))]
            }
            // Its queue has come here when the copy, or the collective, is done.
            OpKind::TransferWait { .. } | OpKind::CollectiveStart(_) | OpKind::CollectiveWait(_) => Vec::new(),
            kind => {
                let unsupported = || DeviceError::Unsupported { op: op.name(), device: DEVICE };
                ops::launches(kind, frame).ok_or_else(unsupported)?.into_iter().map(kernel).collect()
            }
        })
    }

    /// A Program as steps, each with the events that it waits for and gives.
    fn prepare(&self, index: usize, micro_batch: u32) -> Result<Prepared, DeviceError> {
        let Plan { set, placement, .. } = &*self.plan;
        let program = &set.programs[index];
        let trace: Vec<(&Op, i64)> = program.trace().collect();
        let frame = |variable| self.frame(variable, micro_batch);
        let together: Vec<Option<Together>> =
            trace.iter().map(|&(op, variable)| Together::of(op, &frame(variable))).collect();
        let leaders = leaders(&together);
        // The host has done its own ops when it comes to the next one.
        let mut waits = order::waits(set, program, placement);
        waits.retain(|wait| !trace[wait.on as usize - 1].0.queue.is_hosts());
        let Signals { gives, mut awaits, .. } = queues::signals(&waits, |op| leaders[op as usize - 1]);
        let mut steps: Vec<Step> = Vec::new();
        for (number, &(op, variable)) in (1..).zip(&trace) {
            if leaders[number as usize - 1] != number {
                steps.last_mut().expect("its leader stands before it").count += 1;
                continue;
            }
            let works = self.works(&frame(variable), op)?;
            let awaits = awaits.remove(&number).unwrap_or_default();
            steps.push(Step {
                first: number,
                count: 1,
                queue: op.queue,
                awaits,
                works,
                gives: gives.get(&number).copied(),
            });
        }
        for step in steps.iter_mut().filter(|step| step.count > 1) {
            let members = step.first as usize - 1..(step.first + step.count) as usize - 1;
            let updated = |&(op, variable): &(&Op, i64)| ops::updated(&op.kind, &frame(variable)).expect("an update");
            let tensors: Vec<Updated> = trace[members.clone()].iter().map(updated).collect();
            let group = together[members.start].expect("a group");
            let kernel = |launch: Launch| Work::Kernel(self.kernels.function(&launch), launch);
            step.works = group.launches(&tensors).into_iter().map(kernel).collect();
        }
        Ok(Prepared {
            by_micro_batch: trace.iter().any(|(op, _)| op.differs_by_micro_batch()),
            forks: trace.iter().any(|(op, _)| op.queue != Queue::Compute && !op.queue.is_hosts()),
            on_host: steps.iter().flat_map(|step| &step.works).any(Work::is_done_by_host),
            scratch_end: self.scratch_end(&trace),
            steps,
        })
    }

    /// Where the topmost scratch of these ops ends.
    fn scratch_end(&self, trace: &[(&Op, i64)]) -> u64 {
        let ends = trace.iter().flat_map(|&(op, variable)| {
            let frame = self.frame(variable, 0);
            let elements_of = |id: TensorId| self.plan.set.tensor(id).elements();
            let scratch = |operand: &Operand| {
                let tensor = self.plan.set.tensor(operand.tensor);
                tensor.category == plimsoll_core::Category::Workspace && tensor.space == Space::Device
            };
            let accesses = op.accesses(&elements_of);
            let ends: Vec<u64> = accesses
                .iter()
                .filter(|access| scratch(&access.operand))
                .map(|access| frame.offset(&access.operand) + access.elements * frame.dtype(&access.operand).bytes())
                .collect();
            ends
        });
        ends.max().unwrap_or(0)
    }

    /// Prepares every Program for its first micro-batch.
    fn prepare_all(&mut self) -> Result<(), DeviceError> {
        (0..self.plan.set.programs.len()).try_for_each(|index| self.prepared(index, 0).map(drop))
    }

    /// A Program, prepared now or before.
    fn prepared(&mut self, index: usize, micro_batch: u32) -> Result<Arc<Prepared>, DeviceError> {
        let first = self.prepared.get(&(index, 0)).filter(|first| !first.by_micro_batch);
        let key = (index, micro_batch);
        if let Some(known) = first.or_else(|| self.prepared.get(&key)) {
            return Ok(known.clone());
        }
        let prepared = Arc::new(self.prepare(index, micro_batch)?);
        let events = prepared.steps.iter().filter_map(|step| step.gives).max().map_or(0, |most| most + 1);
        self.machine.queues.make_events(events)?;
        let communicates = |step: &&Step| step.queue == Queue::Communication;
        self.machine.queues.make_gates(prepared.steps.iter().filter(communicates).count())?;
        self.prepared.insert(key, prepared.clone());
        Ok(prepared)
    }

    // ---- running ----

    /// Puts a piece of work on a queue, or does it, where it is the host's. What has no stream goes where everything
    /// joins.
    fn start(
        &mut self,
        work: &Work,
        queue: Queue,
        micro_batch: u32,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        let queues = &self.machine.queues;
        let stream = queues.stream(queue).unwrap_or_else(|| queues.compute());
        // SAFETY (of all that is started here and in `copy`): addresses are ranges of the arenas as the plan has them,
        // whose tensors are as large as their ops say (`passes::check`); what is at work at the same time touches other
        // ranges, because steps wait for each other as hazards demand; the host waits for what it touches itself.
        match work {
            Work::Kernel(function, launch) => {
                let mut pointers = [std::ptr::null::<c_void>(); ARGUMENTS];
                for (pointer, argument) in pointers.iter_mut().zip(&launch.arguments) {
                    *pointer = argument.pointer();
                }
                let pointers = &pointers[..launch.arguments.len()];
                // SAFETY: as above; arguments are in the order of the kernel's signature (tested against its source).
                unsafe { stream.launch(*function, launch.grid, launch.block, launch.shared_bytes, pointers) }?;
            }
            // SAFETY: as above.
            Work::Product(shape, operands) => unsafe { self.products.run(shape, operands, stream) }?,
            Work::OnHost { op, variable } => {
                let Plan { set, placement, real } = &*self.plan;
                let (spaces, micro_batch) = (self.machine.spaces(), i64::from(micro_batch));
                let site = |pool| Site { spaces, pool, set, placement, variable: *variable, micro_batch };
                let (seat, nobody) = (self.seat.as_ref(), Pool::new(1)?);
                match &op.kind {
                    OpKind::CollectiveStart(message) => {
                        transport::exchange(site(&nobody), seat, message, 0.0, 0.0)?;
                    }
                    OpKind::CollectiveWait(message) => {
                        transport::ended(site(&nobody), seat, message, 0.0)?;
                    }
                    _ => {
                        let pool = self.pool.as_ref().expect("there is a pool where there are ops of the host");
                        let run: RunOp = runner(if *real == Real::Bf16 { DType::Bf16 } else { DType::F32 });
                        pool.enter(|| run(site(pool), op, files))?;
                    }
                }
            }
            Work::Copy { from, to, bytes } => self.copy(*from, *to, *bytes, queue, files)?,
            Work::Collective(ready) => {
                let alone = DeviceError::Unsupported { op: "a collective", device: "a device without a team" };
                let seat = self.seat.as_ref().ok_or(alone)?;
                // SAFETY: as above.
                unsafe { ready.meet(seat, self.nccl.as_mut(), stream, &mut self.machine.staging, files) }?;
            }
        }
        Ok(())
    }

    /// Puts a step on its queue whose turn has come.
    fn go_on_with(&mut self, off: &PutOff, micro_batch: u32, files: &mut dyn FileSpace) -> Result<(), DeviceError> {
        self.machine.queues.pass_gate(off.gate)?;
        if off.runs {
            if let (true, Some(stream)) =
                (off.step.works.iter().any(Work::is_done_by_host), self.machine.queues.stream(off.step.queue))
            {
                stream.synchronize()?;
            }
            for work in &off.step.works {
                self.start(work, off.step.queue, micro_batch, files)?;
            }
        }
        Ok(off.step.gives.map_or(Ok(()), |event| self.machine.queues.signal(off.step.queue, event))?)
    }

    /// Puts a copy on a queue, or does it, where the device has no part in it.
    fn copy(
        &mut self,
        from: Place,
        to: Place,
        bytes: u64,
        queue: Queue,
        files: &mut dyn FileSpace,
    ) -> Result<(), DeviceError> {
        let host = self.machine.host();
        let Machine { queues, staging, .. } = &mut self.machine;
        let stream = queues.stream(queue).unwrap_or_else(|| queues.compute());
        let name = |tensor: TensorId| &self.plan.set.tensor(tensor).name;
        let failed = |tensor| move |source| DeviceError::File { tensor: name(tensor).clone(), source };
        if matches!(from, Place::File(..)) {
            // It may be read from where something was written just now.
            staging.flush(files)?;
        }
        match (from, to) {
            // SAFETY: see `start`.
            (Place::Device(from), Place::Device(to)) => unsafe { stream.copy(to, from, bytes) }?,
            // SAFETY: see `start`.
            (Place::Host(from), Place::Device(to)) => unsafe { stream.copy_in(to, host.at(from, bytes), bytes) }?,
            // SAFETY: see `start`.
            (Place::Device(from), Place::Host(to)) => unsafe { stream.copy_out(host.at(to, bytes), from, bytes) }?,
            (Place::File(tensor, first), Place::Device(to)) => {
                let give = |files: &mut dyn FileSpace, offset: u64, part: &mut [u8]| {
                    files.read(name(tensor), first + offset, part).map_err(failed(tensor))
                };
                // SAFETY: see `start`.
                unsafe { staging.send(stream, to, bytes, files, give) }?;
            }
            (Place::Device(from), Place::File(tensor, first)) => {
                // SAFETY: see `start`.
                unsafe { staging.receive_into_file(stream, from, bytes, name(tensor), first, files) }?;
            }
            (Place::File(tensor, first), Place::Host(to)) => {
                // SAFETY: see `start`; the range was waited for.
                let into = unsafe { std::slice::from_raw_parts_mut(host.at(to, bytes), bytes as usize) };
                files.read(name(tensor), first, into).map_err(failed(tensor))?;
            }
            (Place::Host(from), Place::File(tensor, first)) => {
                // SAFETY: see `start`; the range was waited for.
                let from = unsafe { std::slice::from_raw_parts(host.at(from, bytes), bytes as usize) };
                files.write(name(tensor), first, from).map_err(failed(tensor))?;
            }
            // SAFETY: see `start`; both ranges were waited for.
            (Place::Host(from), Place::Host(to)) => unsafe {
                std::ptr::copy(host.at(from, bytes), host.at(to, bytes), bytes as usize);
            },
            (Place::File(..), Place::File(..)) => {
                return Err(DeviceError::Unsupported { op: "copy of a file", device: DEVICE });
            }
        }
        Ok(())
    }

    /// What a step waits for: its queue, or, where the host does the work, the host.
    fn wait_before(&self, step: &Step) -> Result<(), CudaError> {
        let queues = &self.machine.queues;
        let by_host = step.works.iter().any(Work::is_done_by_host);
        let waiting = if by_host { Queue::Host } else { step.queue };
        step.awaits.iter().try_for_each(|event| queues.wait(waiting, *event))?;
        match queues.stream(step.queue) {
            Some(stream) if by_host => stream.synchronize(),
            _ => Ok(()),
        }
    }

    /// Ops of a Program from `call.from` on, as steps. Where the observer refuses an op, everything before it is
    /// started, and nothing after.
    fn run_steps(
        &mut self,
        prepared: &Prepared,
        program: &Program,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        if prepared.forks {
            self.machine.queues.fork()?;
        }
        if prepared.on_host {
            self.machine.queues.compute().synchronize()?;
        }
        let mut put_off = VecDeque::new();
        let timed = self.seat.is_some();
        if timed {
            self.machine.queues.computes()?;
        }
        let started = self.start_steps(prepared, program, call, files, observer, &mut put_off);
        if timed {
            self.machine.queues.stands_still()?;
        }
        let met = put_off.iter().try_for_each(|off| self.go_on_with(off, call.micro_batch, files));
        started.and(met)?;
        if prepared.forks {
            self.machine.queues.join()?;
        }
        Ok(())
    }

    /// Puts steps on queues, or off, where others have to come for them.
    fn start_steps<'a>(
        &mut self,
        prepared: &'a Prepared,
        program: &Program,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
        put_off: &mut VecDeque<PutOff<'a>>,
    ) -> Result<(), DeviceError> {
        let mut gate = 0;
        let mut trace = (1..).zip(program.trace());
        let mut members: Vec<(u32, &Op, i64)> = Vec::new();
        for step in &prepared.steps {
            members.clear();
            members.extend(trace.by_ref().take(step.count as usize).map(|(tick, (op, variable))| (tick, op, variable)));
            members.retain(|(tick, ..)| *tick >= call.from);
            if members.is_empty() {
                continue;
            }
            let runs = members[0].1.runs(call.last);
            if step.queue == Queue::Communication && !runs {
                // What comes later may rely on what it waits for.
                self.put_off(step, &mut gate, false, put_off)?;
                continue;
            }
            let mut refused = None;
            for (index, &(tick, op, _)) in members.iter().enumerate() {
                if let Err(error) = observer.before(tick, op, &mut Unseen) {
                    refused = Some(error);
                    members.truncate(index);
                    break;
                }
            }
            if members.is_empty() {
                return refused.map_or(Ok(()), Err);
            }
            // What they wait for has to be on its queue.
            let awaited = |off: &PutOff| off.step.gives.is_some_and(|event| step.awaits.contains(&event));
            let for_others = put_off.iter().any(awaited);
            let waits = for_others || step.queue == Queue::Compute && !step.awaits.is_empty();
            let timed = waits && self.seat.is_some();
            if timed {
                self.machine.queues.stands_still()?;
            }
            while put_off.iter().any(awaited) {
                let first = put_off.pop_front().expect("there is one that is awaited");
                self.go_on_with(&first, call.micro_batch, files)?;
            }
            if step.queue == Queue::Communication {
                if timed {
                    self.machine.queues.computes()?;
                }
                self.put_off(step, &mut gate, true, put_off)?;
                members.iter().for_each(|&(tick, op, _)| observer.after(tick, op, &mut Unseen));
                continue;
            }
            self.wait_before(step)?;
            if timed {
                self.machine.queues.computes()?;
            }
            if members.len() == step.count as usize {
                for work in &step.works {
                    self.start(work, step.queue, call.micro_batch, files)?;
                }
            } else {
                // A part of a group, op by op: the same bits.
                for &(_, op, variable) in &members {
                    for work in self.works(&self.frame(variable, call.micro_batch), op)? {
                        self.start(&work, step.queue, call.micro_batch, files)?;
                    }
                }
            }
            if let Some(event) = step.gives {
                self.machine.queues.signal(step.queue, event)?;
            }
            members.iter().for_each(|&(tick, op, _)| observer.after(tick, op, &mut Unseen));
            if let Some(error) = refused {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Puts a step off: what it waits for is what has been put on queues so far.
    fn put_off<'a>(
        &mut self,
        step: &'a Step,
        gate: &mut usize,
        runs: bool,
        put_off: &mut VecDeque<PutOff<'a>>,
    ) -> Result<(), CudaError> {
        self.machine.queues.close_gate(*gate, &step.awaits)?;
        put_off.push_back(PutOff { step, gate: *gate, runs });
        *gate += 1;
        Ok(())
    }

    /// Ops of a Program from `call.from` on, each over before the next begins, all on one queue.
    fn run_singly(
        &mut self,
        program: &Program,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        self.machine.context.synchronize()?;
        let trace = (1..).zip(program.trace()).skip_while(|(tick, _)| *tick < call.from);
        for (tick, (op, variable)) in trace.filter(|(_, (op, _))| op.runs(call.last)) {
            observer.before(tick, op, &mut self.machine)?;
            let works = self.works(&self.frame(variable, call.micro_batch), op)?;
            if works.iter().any(Work::is_done_by_host) {
                self.machine.context.synchronize()?;
            }
            for work in &works {
                self.start(work, Queue::Compute, call.micro_batch, files)?;
            }
            self.machine.context.synchronize()?;
            self.machine.staging.flush(files)?;
            self.machine.check()?;
            observer.after(tick, op, &mut self.machine);
        }
        Ok(())
    }
}

impl Device for CudaDevice {
    fn run_observed(
        &mut self,
        call: Call,
        files: &mut dyn FileSpace,
        observer: &mut dyn Observer,
    ) -> Result<(), DeviceError> {
        self.machine.check()?;
        self.machine.context.enter()?;
        self.torn &= call.from > 1;
        if self.torn {
            return Err(CudaError::Memory { what: "go on in the middle of a program" }.into());
        }
        let missing = || DeviceError::NoProgram { program: call.program.to_owned() };
        let index = self.plan.set.program_index(call.program).ok_or_else(missing)?;
        let prepared = self.prepared(index, call.micro_batch)?;
        self.machine.scratch_end = self.machine.scratch_end.max(prepared.scratch_end);
        let (plan, seat) = (self.plan.clone(), self.seat.clone());
        let program = &plan.set.programs[index];
        let done = transport::seated(seat.as_ref(), || match observer.one_at_a_time() {
            true => self.run_singly(program, call, files, observer),
            false => self.run_steps(&prepared, program, call, files, observer),
        });
        let Err(error) = done else {
            self.machine.staging.flush(files)?;
            return Ok(());
        };
        // What was started ends before anybody hears of it. What a refused op's predecessors gave to files is written,
        // unless files are what failed.
        self.machine.context.synchronize()?;
        if matches!(error, DeviceError::File { .. }) {
            self.machine.staging.forget();
        } else {
            self.machine.staging.flush(files)?;
        }
        Err(error)
    }

    /// A transport that does not go in rounds which staging holds cannot have its bytes.
    fn join(&mut self, seat: Seat) -> Result<(), DeviceError> {
        if seat.transport.round_bytes().is_none_or(|bytes| bytes > ROUND_BYTES) {
            return Err(DeviceError::NoTeam { device: "a GPU whose bytes go through staging" });
        }
        self.machine.context.enter()?;
        let library = self.library.as_ref().filter(|_| seat.nccl);
        self.nccl = library.map(|library| Nccl::new(library, &self.compiler, &self.machine.context, SCRATCH_BYTES));
        self.machine.join(seat.clone());
        self.seat = Some(seat);
        Ok(())
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        self.machine.check()?;
        self.machine.context.enter()?;
        Ok(self.machine.context.synchronize()?)
    }

    fn collectives(&self) -> Option<CollectivesBy> {
        self.nccl.as_ref()?.used()
    }

    /// By the GPU's own clock, of Programs that were run in a team.
    fn computed(&mut self) -> Option<f64> {
        self.machine.context.enter().and_then(|()| self.machine.queues.computed()).ok()
    }

    fn write(&mut self, tensor: TensorId, slot: u32, bytes: &[u8]) {
        let (known, first) = (self.plan.set.tensor(tensor), self.plan.placement.offset(tensor, slot));
        assert!(bytes.len() as u64 <= known.bytes(), "{} is smaller", known.name);
        let written = self.machine.write(known.space, first, bytes);
        self.machine.keep(written);
    }

    /// A device that is lost gives NaN; [`Device::settle`] and the next Program say that it is lost.
    fn read(&mut self, tensor: TensorId, slot: u32, bytes: &mut [u8]) {
        let (known, first) = (self.plan.set.tensor(tensor), self.plan.placement.offset(tensor, slot));
        assert!(bytes.len() as u64 <= known.bytes(), "{} is smaller", known.name);
        let read = self.machine.read(known.space, first, bytes);
        if self.machine.keep(read).is_none() {
            bytes.fill(0xff);
        }
    }

    fn adopt(&mut self, set: ProgramSet, placement: Placement) -> Result<(), DeviceError> {
        self.machine.check()?;
        self.machine.context.enter()?;
        self.machine.context.synchronize()?;
        self.seat.iter().for_each(Seat::withdraw);
        // The next team may be another one, or none.
        self.nccl.iter_mut().for_each(Nccl::close);
        let before = self.machine.bytes(Space::Device).0;
        // Addresses of the new plan need not lie in the arena as it is.
        if placement.arena_bytes > before {
            self.machine.resize(Space::Device, placement.arena_bytes, before)?;
        }
        let real = self.plan.real;
        let old = std::mem::replace(&mut self.plan, Arc::new(Plan { set, placement, real }));
        let old_prepared = std::mem::take(&mut self.prepared);
        let done = self.go_over_from(&old);
        if done.is_err() {
            (self.plan, self.prepared) = (old, old_prepared);
            self.machine.resize(Space::Device, before, before)?;
        }
        done
    }

    fn algorithms(&self) -> Option<Algorithms> {
        Some(self.products.algorithms().0)
    }

    /// As the driver says it, others' programs included; what is held is counted, not asked for.
    fn room(&mut self) -> Option<Room> {
        let context = &self.machine.context;
        let (free, total) = context.enter().and_then(|()| context.memory()).ok()?;
        let bound_by = format!("cuda:{}", context.gpu().ordinal);
        let nccl = self.nccl.as_ref().map_or(Bytes::ZERO, Nccl::held);
        let held = self.machine.held() + self.charges.context + self.charges.libraries + nccl;
        Some(Room { memory: probe::Memory { total, free, bound_by }, held })
    }

    fn memory(&mut self) -> &mut dyn Memory {
        &mut self.machine
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_neighbours_with_the_same_numbers_are_updated_together() {
        let sgd = |momentum| Some(Together::Sgd { scalars: 256, momentum });
        let (a, b) = (sgd(0.9), sgd(0.8));
        assert_eq!(leaders(&[None, a, a, b, None, b, a, a, a]), [1, 2, 2, 4, 5, 6, 7, 7, 7]);
        assert_eq!(leaders(&[]), Vec::<u32>::new());
    }

    #[test]
    fn a_copy_that_the_device_has_no_part_in_is_the_hosts() {
        let copy = |from, to| Work::Copy { from, to, bytes: 8 }.is_done_by_host();
        let (device, host, file) = (Place::Device(512), Place::Host(0), Place::File(TensorId(0), 0));
        assert!(
            [(device, host), (host, device), (device, device), (file, device), (device, file)]
                .iter()
                .all(|&(from, to)| !copy(from, to))
        );
        assert!([(host, host), (file, host), (host, file)].iter().all(|&(from, to)| copy(from, to)));
    }
}
