//! How fast a GPU is: products through the library and the algorithms that runs use, memory through our own kernels,
//! the link through the copies of the executor; and how the GPU was before and after.

use super::gpus::{Card, Here};
use super::nvml::Condition;
use super::open::{free_bytes, open};
use crate::bench::{AT_ONCE, BenchError, DeviceBench, GpuBench, Meeting, MemoryRate, ProductRate, median};
use crate::device::DeviceError;
use crate::op_rates::{self, Scale, Subject};
use crate::trial::{Open, Trial, add, repeated};
use plimsoll_core::{Bytes, Category, DType, Link, Space};
use plimsoll_program::builder::Builder;
use plimsoll_program::op::Queue;
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, Op, OpKind, Operand, Placement, ProgramSet, Tensor};
use std::time::Duration;

/// The three products of a layer of a model with 1 to 8 billion parameters, over 4096 tokens: one round.
const LARGE: [[u64; 3]; 3] = [[4096, 11264, 2048], [4096, 2048, 5632], [4096, 4096, 4096]];
/// The same for what is too slow for that.
const SMALL: [[u64; 3]; 3] = [[32, 48, 16], [32, 16, 48], [32, 32, 32]];

/// What has fewer multiprocessors than this is no GPU that Plimsoll runs on, but something that stands in for one.
const MULTIPROCESSORS_MIN: u32 = 4;

/// Measures a GPU in about `duration`. Its context stays, with what libraries have loaded in it.
///
/// # Errors
/// What is missing on this machine, or what the GPU refuses.
pub fn measure(
    here: &'static Here,
    card: &Card,
    duration: Duration,
    stage: &mut dyn FnMut(&str),
) -> Result<DeviceBench, BenchError> {
    let name = format!("cuda:{}", card.index);
    let free = free_bytes(here, card)?;
    let before = here.condition(card);
    let open_card = |set: ProgramSet, placement: Placement, precision: DType| {
        Ok(open(card.index, 1, precision, None, set, placement)?.device)
    };
    let subject = |precision, scale| Subject { kernels: Kernels::Cuda, precision, scale, open: &open_card };
    let (scale, forms) = size(card);
    let mut products = Vec::new();
    for (dtype, share) in [(DType::F32, 0.15), (DType::Bf16, 0.4)] {
        stage(&format!("{name}: products in {dtype}"));
        products.push(product_rate(&subject(dtype, scale), &forms, duration.mul_f64(share), &mut || {})?);
    }
    let after = here.condition(card);
    stage(&format!("{name}: memory and link"));
    let array = array_bytes(card, free);
    let memory = memory_rate(&open_card, array, duration.mul_f64(0.1), &mut || {})?;
    let link = link(&open_card, Bytes(array.0.min(128 << 20)), duration.mul_f64(0.1))?;
    let op_seconds = op_seconds(&open_card)?;
    stage(&format!("{name}: the ops of a step"));
    let mut ops = op_rates::measure(&subject(DType::F32, scale))?;
    ops.bf16 = Some(Box::new(op_rates::measure(&subject(DType::Bf16, scale))?));
    Ok(DeviceBench {
        device: name,
        simulated: false,
        model: card.name.clone(),
        threads: 0,
        products,
        memory,
        op_seconds,
        ops,
        contention: 0.0,
        gpu: Some(GpuBench {
            driver: here.driver_version.clone(),
            multiprocessors: card.multiprocessors,
            to_device: link.0,
            to_host: link.1,
            before,
            after,
        }),
    })
}

/// What is measured of a GPU while all other devices work, too.
pub(crate) struct Share {
    pub products: Vec<ProductRate>,
    pub memory: MemoryRate,
    pub condition: Condition,
}

/// Measures a GPU together with all others that come to `meeting`: products in f32, in bf16, then memory, each for a third
/// of `duration`.
///
/// # Errors
/// As [`measure`]; the others are not kept waiting.
pub(crate) fn share(
    here: &'static Here,
    card: &Card,
    duration: Duration,
    meeting: &Meeting,
) -> Result<Share, BenchError> {
    let open_card = |set: ProgramSet, placement: Placement, precision: DType| {
        Ok(open(card.index, 1, precision, None, set, placement)?.device)
    };
    let (scale, forms) = size(card);
    let rate = |precision| {
        let subject = Subject { kernels: Kernels::Cuda, precision, scale, open: &open_card };
        meeting.attend(|ready| product_rate(&subject, &forms, duration / 3, ready))
    };
    let products = AT_ONCE.map(rate);
    let condition = here.condition(card);
    let memory = meeting.attend(|ready| {
        let array = array_bytes(card, free_bytes(here, card)?);
        Ok(memory_rate(&open_card, array, duration / 3, ready)?)
    });
    Ok(Share { products: products.into_iter().collect::<Result<_, _>>()?, memory: memory?, condition })
}

/// Sizes that fill a GPU, and the products that its rates are told by.
fn size(card: &Card) -> (Scale, [[u64; 3]; 3]) {
    if card.multiprocessors >= MULTIPROCESSORS_MIN { (Scale::GPU, LARGE) } else { (Scale::TINY, SMALL) }
}

/// Beyond every cache, and never much of what is free.
fn array_bytes(card: &Card, free: Bytes) -> Bytes {
    let largest = if card.multiprocessors >= MULTIPROCESSORS_MIN { 512 << 20 } else { 1 << 16 };
    Bytes((free.0 / 8).min(largest).max(1 << 12).next_multiple_of(4096))
}

fn product_rate(
    subject: &Subject,
    forms: &[[u64; 3]],
    duration: Duration,
    ready: &mut dyn FnMut(),
) -> Result<ProductRate, BenchError> {
    let each = duration / forms.len() as u32;
    let seconds = op_rates::products(subject, forms, 4, each, ready)?;
    let operations: f64 = forms.iter().map(|[m, n, k]| 2.0 * (m * n * k) as f64).sum();
    let of = |pick: &dyn Fn(&[f64]) -> f64| operations / seconds.iter().map(|rounds| pick(rounds)).sum::<f64>();
    let half = |rounds: &[f64]| {
        let half = &rounds[rounds.len() / 2..];
        half.iter().sum::<f64>() / half.len() as f64
    };
    Ok(ProductRate {
        dtype: subject.precision,
        median_flops: of(&median),
        best_flops: of(&|rounds| rounds.iter().copied().fold(f64::INFINITY, f64::min)),
        sustained_flops: of(&half),
    })
}

/// Ops in a round, so that starting and waiting for it are lost in it.
const REPEAT: u32 = 16;

fn memory_rate(
    open: &Open,
    array: Bytes,
    duration: Duration,
    ready: &mut dyn FnMut(),
) -> Result<MemoryRate, DeviceError> {
    let elements = array.0 / 4;
    let mut builder = Builder::new(DType::F32, Kernels::Cuda);
    let [a, b] = ["a", "b"].map(|name| builder.persistent(name, &[elements], DType::F32, Category::Weight, 1));
    let metrics = builder.persistent("metrics", &[8], DType::F64, Category::Weight, 1);
    let scratch = builder.tensor(Tensor {
        name: "scratch".into(),
        shape: vec![Kernels::Cuda.squared_norm().max(1)],
        dtype: DType::F64,
        space: Space::Device,
        category: Category::Workspace,
        lifetime: Lifetime::Persistent,
        slots: 1,
    });
    let [x, y, sums, workspace] = [a, b, metrics, scratch].map(Operand::whole);
    let ops = [
        ("read", OpKind::SquaredNorm { x, metrics: sums, workspace, elements }),
        ("write", OpKind::Fill { into: x, value: 1.0, elements }),
        ("copy", OpKind::Cast { from: x, to: y, elements }),
        ("triad", OpKind::Add { x, into: y, elements }),
    ];
    let mut names = Vec::new();
    for (name, kind) in ops {
        add(&mut builder.set, repeated(name, vec![kind.into()], REPEAT));
        names.push(name);
    }
    let mut trial = Trial::open(open, builder.set, DType::F32, a)?;
    ready();
    let mut rate = |name: &str, arrays: f64| {
        let rounds = trial.rounds(name, duration / 4)?;
        Ok::<f64, DeviceError>(arrays * array.0 as f64 * f64::from(REPEAT) / median(&rounds))
    };
    Ok(MemoryRate {
        array_bytes: array,
        write: rate("write", 1.0)?,
        read: rate("read", 1.0)?,
        copy: rate("copy", 2.0)?,
        triad: rate("triad", 3.0)?,
    })
}

/// Copies between pinned host memory and the device: to it, and from it.
fn link(open: &Open, array: Bytes, duration: Duration) -> Result<(Link, Link), DeviceError> {
    let elements = array.0 / 4;
    let mut builder = Builder::new(DType::F32, Kernels::Cuda);
    let device = builder.persistent("device", &[elements], DType::F32, Category::Staging, 1);
    let host = builder.tensor(Tensor {
        name: "host".into(),
        shape: vec![elements],
        dtype: DType::F32,
        space: Space::Host,
        category: Category::Staging,
        lifetime: Lifetime::Persistent,
        slots: 1,
    });
    let copy = |from, to, elements, queue| {
        let (from, to) = (Operand::whole(from), Operand::whole(to));
        let start = Op { kind: OpKind::TransferStart { from, to, elements, sequence: 0 }, queue };
        vec![start, Op { kind: OpKind::TransferWait { from, to, elements, sequence: 0 }, queue: Queue::Compute }]
    };
    for (name, elements) in [("whole", elements), ("one", 1)] {
        let (to_device, to_host) = (format!("{name} to device"), format!("{name} to host"));
        add(&mut builder.set, repeated(&to_device, copy(host, device, elements, Queue::CopyIn), REPEAT));
        add(&mut builder.set, repeated(&to_host, copy(device, host, elements, Queue::CopyOut), REPEAT));
    }
    let mut trial = Trial::open(open, builder.set, DType::F32, device)?;
    let mut way = |way: &str| {
        let whole = median(&trial.rounds(&format!("whole {way}"), duration / 4)?) / f64::from(REPEAT);
        let one = median(&trial.rounds(&format!("one {way}"), duration / 4)?) / f64::from(REPEAT);
        Ok::<Link, DeviceError>(Link {
            bytes_per_second: array.0 as f64 / (whole - one).max(whole / 2.0),
            latency_seconds: one,
        })
    };
    Ok((way("to device")?, way("to host")?))
}

/// What starting an op costs when the device has nothing else to do.
fn op_seconds(open: &Open) -> Result<f64, DeviceError> {
    const OPS: u32 = 256;
    let mut builder = Builder::new(DType::F32, Kernels::Cuda);
    let a = builder.persistent("a", &[32], DType::F32, Category::Weight, 1);
    let fill = OpKind::Fill { into: Operand::whole(a), value: 1.0, elements: 32 };
    add(&mut builder.set, repeated("fill", vec![fill.into()], OPS));
    let mut trial = Trial::open(open, builder.set, DType::F32, a)?;
    Ok(median(&trial.rounds("fill", Duration::from_millis(20))?) / f64::from(OPS))
}
