//! Small runs under a load line that is hardly enough. The peak of each process, by the kernel's own count, stays under
//! the load line, and the planned charges cover all memory outside the arenas.
//!
//! No charges cover the memory of planning, which grows with the layers. A run whose planning takes more than the load
//! line is refused. The first process may pass it while it tokenizes; a second one then trains.

use super::case::Rng;
use super::runs::{RandomRun, small_model};
use super::tally::Tally;
use super::whole_process::ModelSizes;
use anyhow::{Context, bail, ensure};
use plimsoll_core::{Bytes, Exit, Plan, RunResult};
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Seconds after which a run counts as hanging.
const RUN_SECONDS_MAX: u64 = 180;
/// Most budgets that are tried for one run. Training is charged with more than a plan without data, so the first may be
/// refused.
const BUDGETS_MAX: u32 = 8;

/// Returns the sizes of a random model with up to 24 layers. Every third has a wide vocabulary.
fn model_sizes(rng: &mut Rng) -> ModelSizes {
    let small = small_model(rng);
    let layers = rng.pick(&[1, 2, 3, 4, 6, 9, 12, 16, 24]);
    let vocab = if rng.chance(1.0 / 3.0) { rng.pick(&[30_001, 70_001]) } else { small.vocab };
    ModelSizes { layers, vocab, ffn: rng.pick(&[small.ffn, 200, 512]), ..small }
}

/// Returns the sizes of a random model whose adapters and base weights take some megabytes.
fn adapter_model_sizes(rng: &mut Rng) -> ModelSizes {
    let hidden = rng.pick(&[64, 128, 192]);
    let (layers, ffn) = (rng.pick(&[2, 4, 8, 16]), hidden * rng.pick(&[2, 3]));
    ModelSizes { hidden, layers, heads: 4, kv_heads: rng.pick(&[2, 4]), ffn, vocab: rng.pick(&[600, 4000, 30_001]) }
}

/// Models and training methods of the runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Models {
    /// Small models of any training method.
    Small,
    /// Models of some megabytes with LoRA adapters over plain, int8 or nf4 weights.
    Adapters,
}

/// Devices of a run: the CPU, or one or two virtual devices.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Devices {
    Cpu,
    Virtual,
    TwoVirtual,
}

impl Devices {
    /// Returns the devices with a load line of `bytes` each, as a setting.
    fn setting(self, bytes: Bytes) -> String {
        let bytes = bytes.0;
        match self {
            Devices::Cpu => format!("run.devices=cpu={bytes}B"),
            Devices::Virtual => format!("run.devices=virtual:a={bytes}B@1.0"),
            Devices::TwoVirtual => format!("run.devices=virtual:a={bytes}B@1.0,virtual:b={bytes}B@0.5"),
        }
    }
}

/// Trains one random run under a random load line, and compares the kernel's count with it.
pub fn run_budget(binary: &Path, models: Models, seed: u64, number: u64) -> Tally {
    let mut tally = Tally::default();
    let case = BudgetCase::new(binary, models, seed, number);
    let result = case.and_then(|case| {
        let checked = case.check(&mut tally);
        let _ = fs::remove_dir_all(&case.run.folder);
        checked.with_context(|| case.run.label.clone())
    });
    tally.check("runs end", result.is_ok(), || format!("--seed {seed} --case {number}: {:#}", result.unwrap_err()));
    tally
}

/// A random run, with its devices and the place of its load line.
struct BudgetCase {
    run: RandomRun,
    /// Lossy rungs of the run, such as `lora,nf4`.
    rungs: &'static str,
    devices: Devices,
    /// Place of the load line between the smallest that fits (0) and that of the fastest recipe (1).
    place: f64,
}

impl BudgetCase {
    fn new(binary: &Path, models: Models, seed: u64, number: u64) -> anyhow::Result<BudgetCase> {
        let mut rng = Rng::new(seed ^ 11, number);
        let devices = rng.pick(&[Devices::Cpu, Devices::Cpu, Devices::Virtual, Devices::Virtual, Devices::TwoVirtual]);
        let sizes: &dyn Fn(&mut Rng) -> ModelSizes =
            if models == Models::Adapters { &adapter_model_sizes } else { &model_sizes };
        let mut run = RandomRun::on(binary, (seed, number), sizes, &|_| "cpu".to_owned())?;
        let sequence = rng.pick(&[16, 32, 64, 128]);
        let (precisions, rungs, sequences): (&[&str], &[&str], &[u64]) = match models {
            Models::Small => (&["f32", "bf16", "f64"], &["", "lora", "lora", "lora,int8", "lora,nf4"], &[4, 8, 16, 17]),
            Models::Adapters => (&["f32", "bf16"], &["lora", "lora,int8", "lora,nf4"], &[2, 4, 8]),
        };
        let (precision, rungs) = (rng.pick(precisions), rng.pick(rungs));
        let threads = rng.pick(&[1, 2]).min(thread::available_parallelism().map_or(1, usize::from));
        run.settings.retain(|setting| !setting.starts_with("train.rungs") && !setting.starts_with("recipe."));
        run.settings.extend([
            format!("data.sequence={sequence}"),
            format!("train.batch_tokens={}", sequence * rng.pick(sequences)),
            "train.steps=3".to_owned(),
            format!("data.pack={}", rng.chance(0.5)),
            format!("train.precision={precision}"),
            format!("run.threads={threads}"),
        ]);
        if !rungs.is_empty() {
            run.settings.push(format!("train.rungs={rungs}"));
        }
        // The first run on a machine measures its rates.
        let measures = rng.chance(0.1);
        if measures {
            fs::remove_dir_all(run.folder.join("cache"))?;
        }
        let first = if measures { ", first on its machine" } else { "" };
        run.label += &format!(": {precision} {rungs}, {devices:?}, sequence {sequence}{first}");
        Ok(BudgetCase { run, rungs, devices, place: rng.fraction().powi(2) })
    }

    /// Returns the largest predicted peak of a device, if each has this load line.
    fn planned_peak(&self, line: Bytes) -> anyhow::Result<Bytes> {
        let (plan, _) = self.run.with(&[&self.devices.setting(line)]).plan()?;
        plan.devices.iter().map(|device| device.peak_bytes).max().context("a plan has devices")
    }

    /// Trains under the first load line that is not refused, and compares the kernel's count with it.
    fn check(&self, tally: &mut Tally) -> anyhow::Result<()> {
        let cache = self.run.folder.join("cache");
        let is_first = !cache.exists();
        let (least, most) = (self.planned_peak(Bytes::mib(8))?, self.planned_peak(Bytes::gib(2))?);
        let mut line = least + Bytes((most.saturating_sub(least).0 as f64 * self.place) as u64);
        for _ in 0..BUDGETS_MAX {
            if is_first {
                fs::remove_dir_all(&cache)?;
            }
            let trained = self.train(line)?;
            if let Some(peaks) = trained {
                return self.compare(peaks, tally);
            }
            line = line + Bytes(line.0 / 32) + Bytes::mib(1);
        }
        bail!("refused up to {line}")
    }

    /// Trains under this load line, and returns the peaks of the process; `None` if the run was refused.
    fn train(&self, line: Bytes) -> anyhow::Result<Option<Peaks>> {
        let run = self.run.with(&[&self.devices.setting(line), "run.dir=run"]);
        let stderr = run.folder.join("stderr");
        let mut program = run.command(&["train", "--quiet"], true);
        program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&stderr)?);
        let mut child = program.spawn().context("the program cannot be started")?;
        let (code, peaks) = wait_and_watch(&mut child)?;
        match code {
            Some(0) => Ok(Some(peaks)),
            Some(code) if code == Exit::DoesNotFit as i32 => Ok(None),
            code => bail!("train ended with {code:?}: {}", fs::read_to_string(&stderr)?),
        }
    }

    /// Compares the `peaks` of a process with the load lines and predictions of its devices. Arenas of other devices
    /// and of the host do not count.
    fn compare(&self, peaks: Peaks, tally: &mut Tally) -> anyhow::Result<()> {
        let folder = self.run.folder.join("run");
        let read = |name: &str| fs::read_to_string(folder.join(name)).context("a finished run has its files");
        let result: RunResult = serde_json::from_str(&read("result.json")?)?;
        let plan: Plan = serde_json::from_str(&read("plan.json")?)?;
        ensure!(!result.memory.is_empty(), "no devices in result.json");
        let arenas: Bytes = result.memory.iter().map(|device| device.arena_bytes).sum();
        for device in &result.memory {
            let others = arenas.saturating_sub(device.arena_bytes) + plan.host.arena_bytes;
            let held = peaks.training.saturating_sub(others);
            let above = |bytes: Bytes, limit: Bytes| (bytes.0 as f64 - limit.0 as f64) / f64::from(1 << 20);
            let described = || format!("{}: {} holds {held}, {peaks:?}, {device:?}", self.run.label, device.device);
            let (line, planned) = (device.budget_bytes, device.predicted_bytes);
            tally.figure("MiB above the load line", above(held, line), held <= line, described);
            tally.figure("MiB above the prediction", above(held, planned), held <= planned, described);
            let planning = above(peaks.planning, line);
            tally.figure("MiB above the load line while planning", planning, planning <= 0.0, described);
            let most = held.max(peaks.planning);
            let says_so = device.over_load_line_bytes.is_some();
            // The kernel's counters lag by some pages per thread.
            let is_near = above(most, line).abs() < 1.0;
            tally.check("result.json tells of a passed line", is_near || says_so == (most > line), described);
        }
        tally.cover(&format!("{:?}", self.devices));
        tally.cover(if self.rungs.is_empty() { "full training" } else { self.rungs });
        Ok(())
    }
}

/// Highest peaks (`VmHWM`) of a process, as the kernel showed them.
#[derive(Clone, Copy, Debug, Default)]
struct Peaks {
    /// Peak while data and plan were prepared; zero if training needed at least as much.
    planning: Bytes,
    /// Peak from then on.
    training: Bytes,
}

impl Peaks {
    /// Adds a value of `VmHWM`. A process that begins to train resets it, so a first drop ends the planning. Smaller
    /// drops come from the start of planning and from counters that lag.
    fn add(&mut self, peak: Bytes) {
        if peak + Bytes::mib(1) < self.training && self.planning == Bytes::ZERO {
            (self.planning, self.training) = (self.training, peak);
        }
        self.training = self.training.max(peak);
    }
}

/// Environment variable of a process that has tokenized and started again in its own place.
const RESTARTED_VARIABLE: &[u8] = b"PLIMSOLL_STARTED_AGAIN=";

/// Waits for the end of a process. Returns its exit code and its peaks; after a restart in its own place, the peaks since
/// then.
fn wait_and_watch(child: &mut Child) -> anyhow::Result<(Option<i32>, Peaks)> {
    let (status, started, mut peaks) = (format!("/proc/{}/status", child.id()), Instant::now(), Peaks::default());
    let environment = format!("/proc/{}/environ", child.id());
    let mut has_restarted = false;
    loop {
        if !has_restarted && fs::read(&environment).is_ok_and(|text| contains(&text, RESTARTED_VARIABLE)) {
            (has_restarted, peaks) = (true, Peaks::default());
        }
        let text = fs::read_to_string(&status).unwrap_or_default();
        let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        if let Some(kib) = peak.and_then(|kib| kib.parse::<u64>().ok()) {
            peaks.add(Bytes(kib << 10));
        }
        if let Some(ended) = child.try_wait()? {
            return Ok((ended.code(), peaks));
        }
        if started.elapsed().as_secs() >= RUN_SECONDS_MAX {
            child.kill()?;
            child.wait()?;
            bail!("hung: ended after {RUN_SECONDS_MAX} s");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns whether `text` contains `part`.
fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_large_drop_ends_planning() {
        let peaks = |mib: &[u64]| {
            let mut peaks = Peaks::default();
            mib.iter().for_each(|mib| peaks.add(Bytes::mib(*mib)));
            (peaks.planning, peaks.training)
        };
        assert_eq!(peaks(&[10, 20, 19, 30]), (Bytes::ZERO, Bytes::mib(30)));
        assert_eq!(peaks(&[10, 67, 25, 34, 20]), (Bytes::mib(67), Bytes::mib(34)));
    }
}
