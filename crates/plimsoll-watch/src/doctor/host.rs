//! Checks of the processor, the memory and the limits of this process.

use super::{Finding, FindingId, Readings, Severity};
use crate::text::percent;
use plimsoll_core::{Bytes, DeviceKind};
use plimsoll_device::machine::DeviceInfo;

/// Fraction of this machine's memory below which free memory is short.
const SHORT_MEMORY: f64 = 0.1;
/// Least bytes of swap that count as used. Less is left over from earlier work on most machines.
const SWAP_MIN: Bytes = Bytes(64 << 20);
/// Fraction of this machine's memory from which used swap slows work.
const SWAP_SHARE: f64 = 0.1;
/// Load of the processor, 0 to 1, from which it is busy.
const BUSY: f64 = 0.9;
/// Temperature of the processor in degrees Celsius from which it is hot. Most reduce their clocks from 95 to 105.
const HOT_CELSIUS: f64 = 90.0;
/// Limit of open files below which a run on GPUs, with many data files or over Ray may be refused one.
const OPEN_FILES: u64 = 256;
/// Threads beside the compute threads that a run, its GPUs and Ray start at most.
const OTHER_THREADS: u64 = 64;
/// Step that lifts a limit for good, after the command for the present shell.
const LIMITS_FILE: &str = "if the shell refuses, as root in /etc/security/limits.conf, then log in again";

/// Returns the findings about the machine and the limits of this process.
pub(super) fn findings(readings: &Readings) -> Vec<Finding> {
    let Some(cpu) = readings.machine.devices.iter().find(|device| device.kind == DeviceKind::Cpu) else {
        return vec![];
    };
    let checks = [
        short_memory(cpu),
        memory_limit(readings),
        address_space_limit(readings),
        data_limit(readings),
        file_size_limit(readings),
        open_files_limit(readings),
        thread_limit(readings, cpu),
        locked_memory_limit(readings),
        swap(readings),
        busy(readings),
        hot(readings),
    ];
    checks.into_iter().flatten().collect()
}

fn short_memory(cpu: &DeviceInfo) -> Option<Finding> {
    let (free, total) = (cpu.memory_free_bytes, cpu.memory_total_bytes);
    if total == Bytes::ZERO || free.0 as f64 >= SHORT_MEMORY * total.0 as f64 {
        return None;
    }
    let text = format!("{free} of {total} memory are free ({})", cpu.memory_bound_by);
    let cost = format!("runs on the processor get {}, and offload hardly any", cpu.defaults.budget_bytes);
    let mend = "end the largest processes: ps -eo pid,rss,comm --sort=-rss | head";
    Some(Finding::new(FindingId::HostMemoryShort, Severity::Warning, text, cost, mend))
}

/// Returns a finding if a control group limits memory below that of the machine.
fn memory_limit(readings: &Readings) -> Option<Finding> {
    let total = readings.physical.total_bytes?;
    let limit = readings.memory_limits.iter().min_by_key(|limit| limit.limit).filter(|limit| limit.limit < total)?;
    let text = format!("{} is limited to {} of this machine's {total}", limit.source, limit.limit);
    // A wider group that others have filled may leave less than the narrowest one.
    let left = readings.memory_limits.iter().map(|limit| limit.limit.saturating_sub(limit.used)).min()?;
    let cost = format!("runs get at most the {left} that the limits leave, offloaded tensors included");
    let mend = "raise it where the container or job starts, such as docker run --memory 64g or sbatch --mem 64G";
    Some(Finding::new(FindingId::MemoryLimit, Severity::Note, text, cost, mend))
}

fn address_space_limit(readings: &Readings) -> Option<Finding> {
    let limit = below_memory(readings, readings.limits.address_space)?;
    let gpus = if readings.usable_gpus().next().is_some() {
        ", and GPUs may not open: CUDA reserves address space for all memory of the machine and its GPUs"
    } else {
        ""
    };
    let text = format!("the address space of a process is limited to {limit} (ulimit -v)");
    let cost = format!("runs plan with less than {limit} of memory{gpus}");
    let mend = format!("ulimit -v unlimited\n{LIMITS_FILE}");
    Some(Finding::new(FindingId::AddressSpaceLimit, Severity::Warning, text, cost, mend))
}

fn data_limit(readings: &Readings) -> Option<Finding> {
    let limit = below_memory(readings, readings.limits.data)?;
    let text = format!("the private memory of a process is limited to {limit} (ulimit -d)");
    let cost = format!("runs plan with less than {limit} of memory");
    let mend = format!("ulimit -d unlimited\n{LIMITS_FILE}");
    Some(Finding::new(FindingId::DataLimit, Severity::Warning, text, cost, mend))
}

/// Returns a limit if it is below the memory of the machine.
fn below_memory(readings: &Readings, limit: Option<Bytes>) -> Option<Bytes> {
    let total = readings.physical.total_bytes?;
    limit.filter(|limit| *limit < total)
}

/// Returns a finding if files are limited: an error if the run writes a larger one. Without a plan, any limit is noted.
fn file_size_limit(readings: &Readings) -> Option<Finding> {
    let limit = readings.limits.file_size?;
    let text = format!("files are limited to {limit} (ulimit -f)");
    let mend = format!("ulimit -f unlimited\n{LIMITS_FILE}");
    let Some(planned) = readings.run.as_ref().and_then(|run| run.planned.as_ref()) else {
        let cost = "a run whose checkpoint or model has a larger file stops when it saves";
        return Some(Finding::new(FindingId::FileSizeLimit, Severity::Note, text, cost, mend));
    };
    let checkpoint = planned.plan.checkpoint_bytes.min(planned.file_bytes_max);
    let scratch = planned.plan.file.as_ref().map_or(Bytes::ZERO, |file| file.arena_bytes);
    let cost = if scratch > limit {
        format!("the run does not start: its scratch file takes {scratch} (predicted)")
    } else if checkpoint > limit {
        format!("the run stops at its first checkpoint, which has a file of {checkpoint} (predicted)")
    } else {
        return None;
    };
    Some(Finding::new(FindingId::FileSizeLimit, Severity::Error, text, cost, mend))
}

fn open_files_limit(readings: &Readings) -> Option<Finding> {
    let limit = readings.limits.open_files.filter(|limit| *limit < OPEN_FILES)?;
    let text = format!("a process may have {limit} open files (ulimit -n)");
    let cost = "runs on GPUs, with many data files or over Ray may be refused one more";
    let mend = format!("ulimit -n 1024\n{LIMITS_FILE}");
    Some(Finding::new(FindingId::OpenFilesLimit, Severity::Warning, text, cost, mend))
}

/// Returns a finding if the user can start fewer threads than a run may need. Root has no limit.
fn thread_limit(readings: &Readings, cpu: &DeviceInfo) -> Option<Finding> {
    let (limit, now) = (readings.limits.threads?, readings.user_threads.filter(|now| now.user != 0)?);
    let (left, needed) = (limit.saturating_sub(now.threads), u64::from(cpu.threads) + OTHER_THREADS);
    if left >= needed {
        return None;
    }
    let text = format!("this user has {} of {limit} permitted threads (ulimit -u)", now.threads);
    let cost = format!("a run takes up to {needed} threads; with fewer it is slower, or does not start");
    let mend = format!("end other programs: ps -u $USER -o pid,nlwp,comm --sort=-nlwp | head\n{LIMITS_FILE}");
    Some(Finding::new(FindingId::ThreadLimit, Severity::Warning, text, cost, mend))
}

/// Returns a finding if memory cannot be locked without limit on a machine with InfiniBand, whose transfers need that.
fn locked_memory_limit(readings: &Readings) -> Option<Finding> {
    let limit = readings.limits.locked_memory.filter(|_| readings.has_infiniband)?;
    let text = format!("a process may lock {limit} of memory (ulimit -l), and this machine has InfiniBand");
    let cost = "NCCL may fail to use InfiniBand";
    let mend = format!("ulimit -l unlimited\nin a container: docker run --ulimit memlock=-1\n{LIMITS_FILE}");
    Some(Finding::new(FindingId::LockedMemoryLimit, Severity::Note, text, cost, mend))
}

/// Returns a finding if swap is in use. In a control group that limits memory, the swap may be that of other programs of
/// the host.
fn swap(readings: &Readings) -> Option<Finding> {
    if !readings.memory_limits.is_empty() {
        return None;
    }
    let used = readings.physical.swap_used_bytes.filter(|used| *used >= SWAP_MIN)?;
    let total = readings.physical.total_bytes?;
    let is_much = used.0 as f64 >= SWAP_SHARE * total.0 as f64;
    let severity = if is_much { Severity::Warning } else { Severity::Note };
    let text = format!("{used} of swap are in use");
    let cost = "a step waits for the disk if it touches memory that was swapped out";
    let mend = "end other programs: ps -eo pid,rss,comm --sort=-rss | head";
    Some(Finding::new(FindingId::SwapInUse, severity, text, cost, mend))
}

fn busy(readings: &Readings) -> Option<Finding> {
    let load = readings.cpu_load.filter(|load| *load > BUSY)?;
    let text = format!("the processor is {} busy", percent(load, 0));
    let cost = "runs on the processor, data loading and offload are slower than predicted";
    let mend = "end other programs: ps -eo pid,pcpu,comm --sort=-pcpu | head";
    Some(Finding::new(FindingId::CpuBusy, Severity::Warning, text, cost, mend))
}

fn hot(readings: &Readings) -> Option<Finding> {
    let celsius = readings.cpu_celsius.filter(|celsius| *celsius >= HOT_CELSIUS)?;
    let text = format!("the processor has {celsius:.0} °C");
    let cost = "its clocks fall under load, and runs on it are slower than predicted";
    let mend = "end other programs, and improve the cooling\nor pause a hot run: --set run.max_temperature=85";
    Some(Finding::new(FindingId::CpuHot, Severity::Warning, text, cost, mend))
}
