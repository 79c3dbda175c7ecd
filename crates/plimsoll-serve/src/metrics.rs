//! A snapshot in the text format of Prometheus (OpenMetrics). Values in base units: bytes, seconds, ratios from 0 to 1.
//!
//! A figure that is unknown is absent. The number of samples is bounded: devices by [`MAX_DEVICES`], categories and phases
//! by their types.

use plimsoll_core::Bytes;
use plimsoll_core::printable::{MAX_NAME_CHARS, printable_line, shortened};
use plimsoll_watch::snapshot::{DeviceSnapshot, RunSnapshot, RunState, Snapshot};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::fmt;
use std::sync::atomic::AtomicU64;

/// Most devices with samples.
const MAX_DEVICES: usize = 64;
/// Hertz of a megahertz.
const MHZ: f64 = 1e6;

/// A figure of `T`: name after the prefix `plimsoll_`, meaning, and value.
struct Figure<T: 'static>(&'static str, &'static str, fn(&T) -> Option<f64>);

/// Figures of each device, with the labels `device` and, in a run, `rank`.
const DEVICE: &[Figure<DeviceSnapshot>] = &[
    Figure("device_in_run", "1 for a device of the run, else 0", |d| flag(d.in_run)),
    Figure("device_simulated", "1 for a simulated device, else 0", |d| flag(d.simulated)),
    Figure("device_total_bytes", "Memory of the device", |d| bytes(d.total_bytes)),
    Figure("device_free_bytes", "Memory that no process holds", |d| bytes(d.free_bytes)),
    Figure("device_others_bytes", "Memory that other processes hold, estimated", |d| bytes(d.others_bytes)),
    Figure("device_load_line_bytes", "Most memory that the run may hold", |d| bytes(d.load_line_bytes)),
    Figure("device_predicted_peak_bytes", "Predicted peak of the run", |d| bytes(d.predicted_peak_bytes)),
    Figure("device_measured_peak_bytes", "Measured peak of the run so far", |d| bytes(d.measured_peak_bytes)),
    Figure("device_held_bytes", "Measured memory of the run now", |d| bytes(d.held_bytes)),
    Figure("device_charges_bytes", "Memory of the run outside its arena", |d| bytes(d.charges_bytes)),
    Figure("device_utilization_ratio", "Part of the recent past in which the device worked", |d| d.utilization),
    Figure("device_temperature_celsius", "Temperature", |d| d.temperature_c),
    Figure("device_power_watts", "Power draw", |d| d.power_w),
    Figure("device_power_limit_watts", "Power limit", |d| d.power_limit_w),
    Figure("device_clock_hertz", "Clock of the multiprocessors", |d| hertz(d.clock_mhz)),
    Figure("device_clock_limit_hertz", "Highest clock of the multiprocessors", |d| hertz(d.clock_limit_mhz)),
];

/// Figures of the run.
const RUN: &[Figure<RunSnapshot>] = &[
    Figure("run_simulated", "1 if the speed is that of simulated devices, else 0", |r| flag(r.simulated)),
    Figure("run_step", "Completed steps", |r| Some(r.step as f64)),
    Figure("run_steps", "All steps of the run", |r| r.steps.map(|steps| steps as f64)),
    Figure("run_loss", "Loss of the newest step", |r| r.loss),
    Figure("run_eval_loss", "Loss of the newest evaluation", |r| r.eval_loss),
    Figure("run_gradient_norm", "Global gradient norm of the newest step", |r| r.gradient_norm),
    Figure("run_learning_rate", "Learning rate of the newest step", |r| r.learning_rate),
    Figure("run_step_seconds", "Running mean of the seconds of a step", |r| r.step_seconds),
    Figure("run_predicted_step_seconds", "Predicted seconds of a step", |r| r.predicted_step_seconds),
    Figure("run_tokens_per_second", "Tokens per second, padding included", |r| r.tokens_per_second),
    Figure("run_peak_share_ratio", "Part of the peak rate of matrix products that is reached", |r| r.peak_share),
    Figure("run_eta_seconds", "Predicted seconds until the last step", |r| r.eta_seconds),
    Figure("run_silent_seconds", "Seconds since the newest event", |r| r.silent_seconds),
    Figure("run_checkpoint_step", "Step of the newest checkpoint", |r| r.checkpoint_step.map(|step| step as f64)),
];

/// Figures of the machine and of the snapshot itself.
const MACHINE: &[Figure<Snapshot>] = &[
    Figure("snapshot_timestamp_seconds", "Time of the snapshot", |s| Some(s.at)),
    Figure("warnings", "Number of warnings", |s| Some(s.warnings.len() as f64)),
    Figure("cpu_load_ratio", "Busy part of the processor's time", |s| s.cpu.load),
    Figure("host_total_bytes", "Memory of this machine", |s| bytes(s.host.total_bytes)),
    Figure("host_free_bytes", "Free memory of this machine", |s| bytes(s.host.free_bytes)),
    Figure("host_load_line_bytes", "Most memory for offloaded tensors", |s| bytes(s.host.load_line_bytes)),
    Figure("host_planned_bytes", "Planned memory of offloaded tensors", |s| bytes(s.host.arena_bytes)),
];

fn bytes(bytes: Option<Bytes>) -> Option<f64> {
    bytes.map(|bytes| bytes.0 as f64)
}

fn hertz(mhz: Option<u32>) -> Option<f64> {
    mhz.map(|mhz| f64::from(mhz) * MHZ)
}

fn flag(holds: bool) -> Option<f64> {
    Some(f64::from(u8::from(holds)))
}

type Labels = Vec<(&'static str, String)>;
type Sample = Gauge<f64, AtomicU64>;

/// Returns the text of a snapshot.
pub(crate) fn text(snapshot: &Snapshot) -> String {
    let mut registry = Registry::with_prefix("plimsoll");
    let devices: Vec<LabelledDevice> = labelled_devices(snapshot).take(MAX_DEVICES).collect();
    for Figure(name, help, value) in DEVICE {
        register(
            &mut registry,
            name,
            help,
            devices.iter().map(|device| (of_device(device, None), value(device.figures))),
        );
    }
    let planned =
        devices.iter().flat_map(|device| device.figures.by_category.iter().map(|of| part_of(device, "category", of)));
    register(&mut registry, "device_planned_bytes", "Planned memory when the arena is fullest, by category", planned);
    let measured = devices.iter().flat_map(|device| {
        let by_category = device.figures.measured_by_category.iter().flatten();
        by_category.map(|of| part_of(device, "category", of))
    });
    register(
        &mut registry,
        "device_measured_bytes",
        "Measured memory when the arena is fullest, by category",
        measured,
    );
    let peaks =
        devices.iter().flat_map(|device| device.figures.by_program.iter().map(|of| part_of(device, "phase", of)));
    register(&mut registry, "device_planned_peak_bytes", "Planned peak of the arena, by phase", peaks);
    for Figure(name, help, value) in MACHINE {
        register_single(&mut registry, name, help, value(snapshot));
    }
    let run = snapshot.run.as_ref();
    for Figure(name, help, value) in RUN {
        register_single(&mut registry, name, help, run.and_then(value));
    }
    let states = run.into_iter().flat_map(|run| STATES.map(|(state, name)| state_sample(run, state, name)));
    register(&mut registry, "run_state", "1 for the state of the run, 0 for the others", states);
    let mut text = String::new();
    encode(&mut text, &registry).expect("a string takes any text");
    text
}

/// The states of a run, by the names that they have in JSON.
const STATES: [(RunState, &str); 5] = [
    (RunState::Starting, "starting"),
    (RunState::Running, "running"),
    (RunState::Done, "done"),
    (RunState::Stopped, "stopped"),
    (RunState::Died, "died"),
];

fn state_sample(run: &RunSnapshot, state: RunState, name: &str) -> (Labels, Option<f64>) {
    (vec![("state", name.to_owned())], flag(run.state == state))
}

/// A device with its labels.
struct LabelledDevice<'s> {
    figures: &'s DeviceSnapshot,
    /// Place of the device in the plan of the run, counted from 0; `None` for a device outside the run.
    rank: Option<usize>,
}

/// Returns the devices of a snapshot, in order. Those of the run come first, in the order of its plan.
fn labelled_devices(snapshot: &Snapshot) -> impl Iterator<Item = LabelledDevice<'_>> {
    let devices = snapshot.devices.iter().enumerate();
    devices.map(|(place, figures)| LabelledDevice { figures, rank: figures.in_run.then_some(place) })
}

/// Returns the bytes of a part of a device's memory. `label` names the kind of part.
fn part_of(device: &LabelledDevice, label: &'static str, of: (&impl fmt::Display, &Bytes)) -> (Labels, Option<f64>) {
    let (part, part_bytes) = of;
    (of_device(device, Some((label, part.to_string()))), bytes(Some(*part_bytes)))
}

/// Returns the labels of a device, with a further one. Its name is that of a file, so it is bounded and has one line.
fn of_device(device: &LabelledDevice, further: Option<(&'static str, String)>) -> Labels {
    let name = printable_line(&shortened(&device.figures.name, MAX_NAME_CHARS));
    // `prometheus-client` writes labels as they are.
    let name = name.replace('\\', r"\\").replace('"', r#"\""#);
    let rank = device.rank.map(|rank| ("rank", rank.to_string()));
    [("device", name)].into_iter().chain(rank).chain(further).collect()
}

/// Registers a figure with those of its samples that are known. A figure without any is left out.
fn register(registry: &mut Registry, name: &str, help: &str, samples: impl IntoIterator<Item = (Labels, Option<f64>)>) {
    let family = Family::<Labels, Sample>::default();
    let mut is_known = false;
    for (labels, value) in samples {
        if let Some(value) = value.filter(|value| value.is_finite()) {
            family.get_or_create(&labels).set(value);
            is_known = true;
        }
    }
    if is_known {
        registry.register(name, help, family);
    }
}

/// Registers a figure without labels, if it is known.
fn register_single(registry: &mut Registry, name: &str, help: &str, value: Option<f64>) {
    if let Some(value) = value.filter(|value| value.is_finite()) {
        let sample = Sample::default();
        sample.set(value);
        registry.register(name, help, sample);
    }
}
