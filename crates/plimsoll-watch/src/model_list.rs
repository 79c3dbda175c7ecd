//! The models that can be trained on some devices ([`ModelList`]), for `plimsoll models` and the dialogue of
//! `plimsoll init`. Each row comes from a plan of that model; nothing here estimates.

use crate::text::{columns, count, excerpt, percent};
use plimsoll_core::{Bytes, Parallelism, Plan, RecomputeLevel, Remedy, Rung, format_count};
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Version of the JSON form of [`ModelList`]. It changes when a field changes its meaning or is removed.
pub const MODELS_VERSION: u32 = 1;
/// Default of the least useful speed: at 100 tokens per second, 10 million tokens take about a day.
pub const USEFUL_TOKENS_PER_SECOND: f64 = 100.0;

/// Models, each planned with each method on the same devices, most useful first. Unknown values are `null`, never 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ModelList {
    /// Version of this format.
    pub version: u32,
    /// The devices for which the models were planned.
    pub devices: Vec<ListedDevice>,
    /// Tokens of one sequence.
    pub sequence: u64,
    /// Tokens of one optimizer step, padding included.
    pub batch_tokens: u64,
    /// Predicted tokens per second from which on a larger model ranks before a faster one.
    pub useful_tokens_per_second: f64,
    /// One entry for each model and method, most useful first.
    pub models: Vec<PlannedModel>,
    /// Folders that are not listed, each with the reason.
    pub notes: Vec<String>,
}

/// A device of the list.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ListedDevice {
    /// Name of the device.
    pub name: String,
    /// Whether speeds on this device are simulated.
    pub simulated: bool,
    /// The load line: the most bytes that the device may hold.
    pub budget_bytes: Bytes,
}

/// Whether a model can be trained with a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// A plan fits under all load lines.
    Fits,
    /// No plan fits.
    DoesNotFit,
    /// The model was not planned, because the time ran out.
    NotPlanned,
}

/// Origin of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ModelOrigin {
    /// A published shape without weights.
    Preset,
    /// A folder that the user named, or one inside it.
    Folder,
    /// The cache of Hugging Face.
    HuggingFaceCache,
}

/// A model planned with one method.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlannedModel {
    /// Name of the preset, or path of the folder.
    pub model: String,
    /// Name for tables and questions: `ORG/NAME` for a model in the cache of Hugging Face, else `model`.
    #[serde(skip)]
    pub label: String,
    /// Value of `--model` that names the model, also if a folder has the name of the preset.
    #[serde(skip)]
    pub argument: String,
    /// Whether the model has weights here, so that training need not start from random ones.
    #[serde(skip)]
    pub has_weights: bool,
    /// Origin of the model.
    pub origin: ModelOrigin,
    /// Number of parameters.
    pub parameters: u64,
    /// The lossy rungs of the method; empty for full training without any.
    pub rungs: Vec<Rung>,
    /// Whether the model can be trained with this method.
    pub fit: Fit,
    /// Predicted tokens (padding included) per second; `None` unless it fits.
    pub tokens_per_second: Option<f64>,
    /// Whether that speed is the one of simulated devices.
    pub simulated: bool,
    /// Predicted memory of each device that takes part; empty unless it fits.
    pub peaks: Vec<PredictedPeak>,
    /// Predicted bytes of offloaded tensors in host memory; `None` unless it fits.
    pub host_bytes: Option<Bytes>,
    /// The parallelism; `None` for a single device.
    pub parallelism: Option<Parallelism>,
    /// Choices of the plan besides its rungs that cost speed, such as `recompute in 8 of 16 layers`; empty for none.
    pub given_up: Vec<String>,
    /// The memory with which it would fit; `None` if it fits, or if that is not known.
    pub missing: Option<MissingMemory>,
    /// The command that prints this plan.
    pub command: String,
}

/// Predicted memory of one device.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PredictedPeak {
    /// Name of the device.
    pub device: String,
    /// Predicted peak of arena and charges.
    pub peak_bytes: Bytes,
    /// The load line.
    pub budget_bytes: Bytes,
}

/// Least memory with which a model would fit. Either figure alone is enough.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MissingMemory {
    /// Least load line of the device, or of the first device in `load_lines`; `None` if it is not known.
    pub device_bytes: Option<Bytes>,
    /// Load lines that together are enough, by device name. Empty for a single device, or if they are not known.
    pub load_lines: BTreeMap<String, Bytes>,
    /// Least host memory for offloaded tensors; `None` if none is enough, or if it is not known.
    pub host_bytes: Option<Bytes>,
}

impl PlannedModel {
    /// Stores the figures of a plan that fits.
    pub fn set_plan(&mut self, plan: &Plan) {
        let peak = |device: &plimsoll_core::DevicePlan| PredictedPeak {
            device: device.name.clone(),
            peak_bytes: device.peak_bytes,
            budget_bytes: device.budget_bytes,
        };
        self.fit = Fit::Fits;
        self.tokens_per_second = Some(plan.predicted.tokens_per_second);
        self.simulated = plan.devices.iter().any(|device| device.simulated);
        self.peaks = plan.devices.iter().map(peak).collect();
        self.host_bytes = Some(plan.host.arena_bytes);
        self.parallelism = plan.parallelism;
        self.given_up = given_up(plan);
        self.missing = None;
    }

    /// Stores what a refused plan needs.
    pub fn set_refusal(&mut self, refused: &Plan) {
        let needs = || refused.needs.iter().filter(|need| need.file_bytes.is_none());
        let lines = needs().filter(|need| need.host_bytes.is_none()).min_by_key(|need| need.budget_bytes);
        let host_bytes = needs().filter_map(|need| need.host_bytes).min();
        let several = refused.devices.len() + refused.excluded.len() > 1;
        let named = lines.filter(|need| several || !need.other_budget_bytes.is_empty());
        let load_lines = named.map(|need| load_lines(need, refused)).unwrap_or_default();
        self.fit = Fit::DoesNotFit;
        let device_bytes = lines.map(|need| need.budget_bytes);
        let is_known = device_bytes.is_some() || host_bytes.is_some();
        self.missing = is_known.then_some(MissingMemory { device_bytes, load_lines, host_bytes });
    }

    /// Returns the name of the method: `full` or `lora`, with its rungs.
    pub fn method(&self) -> String {
        let base = if self.rungs.contains(&Rung::Lora) { "lora" } else { "full" };
        let others = self.rungs.iter().filter(|rung| **rung != Rung::Lora).map(ToString::to_string);
        std::iter::once(base.to_owned()).chain(others).collect::<Vec<_>>().join("+")
    }

    /// Returns the largest share of its load line that a device holds at its peak.
    pub fn load(&self) -> Option<f64> {
        let share = |peak: &PredictedPeak| peak.peak_bytes.0 as f64 / (peak.budget_bytes.0 as f64).max(1.0);
        self.peaks.iter().map(share).max_by(f64::total_cmp)
    }

    /// Describes the result in one line: speed and peak, or what is missing.
    pub fn outcome(&self) -> String {
        match self.fit {
            Fit::NotPlanned => "not planned: the time ran out".to_owned(),
            Fit::DoesNotFit => self.missing.as_ref().map_or("does not fit".to_owned(), |missing| missing.text()),
            Fit::Fits => {
                let speed = self.tokens_per_second.map_or_else(|| "-".to_owned(), speed_text);
                let simulated = if self.simulated { " (simulated)" } else { "" };
                let load =
                    self.load().map_or_else(String::new, |load| format!(", {} of the load line", percent(load, 0)));
                let given_up = match &self.given_up[..] {
                    [] => String::new(),
                    some => format!("; {}", some.join(", ")),
                };
                format!("{speed} tok/s{simulated}{load}{given_up}")
            }
        }
    }
}

impl MissingMemory {
    /// Describes the least memory that is enough.
    fn text(&self) -> String {
        let lines = self.load_lines.iter().map(|(device, bytes)| format!("{bytes} on {}", excerpt(device)));
        let lines = lines.collect::<Vec<_>>().join(" and ");
        let named = (!lines.is_empty()).then(|| format!("load lines of {lines}"));
        let parts = [
            named.or_else(|| self.device_bytes.map(|bytes| format!("a load line of {bytes}"))),
            self.host_bytes.map(|bytes| format!("{bytes} on the host")),
        ];
        format!("does not fit: needs {}", parts.into_iter().flatten().collect::<Vec<_>>().join(", or "))
    }
}

/// Returns the load lines that a remedy sets, by device name.
fn load_lines(remedy: &Remedy, refused: &Plan) -> BTreeMap<String, Bytes> {
    let mut lines = remedy.other_budget_bytes.clone();
    if let Some(first) = refused.devices.first() {
        let line = lines.entry(first.name.clone()).or_default();
        *line = (*line).max(remedy.budget_bytes);
    }
    lines
}

/// Returns the choices of a plan, besides its rungs, that cost speed.
fn given_up(plan: &Plan) -> Vec<String> {
    let mut list = Vec::new();
    let levels = &plan.recipe.recompute;
    let recomputed = levels.iter().filter(|level| **level != RecomputeLevel::Nothing).count();
    if recomputed > 0 {
        list.push(format!("recompute in {recomputed} of {}", format_count(levels.len() as u64, "layer")));
    }
    if plan.host.arena_bytes > Bytes::ZERO {
        list.push(format!("offload of {}", plan.host.arena_bytes));
    }
    if let Some(file) = &plan.file {
        list.push(format!("scratch file of {}", file.arena_bytes));
    }
    let unused = plan.excluded.len() as u64;
    list.extend((unused > 0).then(|| format!("{} unused", format_count(unused, "device"))));
    list
}

impl ModelList {
    /// Sorts the models by usefulness: those that fit at a useful speed, the largest first, and of one model the least loss
    /// first. Then those that fit and are slower, the fastest first. Then all others, the smallest first.
    pub fn sort(&mut self) {
        let useful = self.useful_tokens_per_second;
        self.models.sort_by(|one, other| compare(one, other, useful));
    }

    /// Returns the list as a JSON object on several lines.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data has a JSON form")
    }

    /// Returns the list as a table under a line on devices and workload.
    pub fn table(&self) -> String {
        let headings = ["model", "parameters", "method", "tok/s", "peak", "of load line"];
        let mut rows = vec![headings.map(str::to_owned).to_vec()];
        rows.extend(self.models.iter().map(cells));
        let table = columns(&rows);
        let width = table.lines().map(|line| line.chars().count()).max().unwrap_or_default();
        let remarks = std::iter::once("gives up, or lacks".to_owned()).chain(self.models.iter().map(remark));
        let with_remark =
            |(line, remark): (&str, String)| format!("{line:width$}  {remark}").trim_end().to_owned() + "\n";
        let table: String = table.lines().zip(remarks).map(with_remark).collect();
        let device = |device: &ListedDevice| {
            let simulated = if device.simulated { ", simulated" } else { "" };
            format!("{} ({}{simulated})", excerpt(&device.name), device.budget_bytes)
        };
        let devices: Vec<String> = self.devices.iter().map(device).collect();
        let workload = format!(
            "predicted for {}: sequences of {}, steps of {}\n\n",
            devices.join(", "),
            format_count(self.sequence, "token"),
            format_count(self.batch_tokens, "token")
        );
        workload + &table
    }
}

/// Returns the rank of a model among all: the smaller, the more useful.
fn rank(model: &PlannedModel, useful: f64) -> u8 {
    match (model.fit, model.tokens_per_second) {
        (Fit::Fits, Some(speed)) if speed >= useful => 0,
        (Fit::Fits, _) => 1,
        (Fit::NotPlanned, _) => 2,
        (Fit::DoesNotFit, _) => 3,
    }
}

fn compare(one: &PlannedModel, other: &PlannedModel, useful: f64) -> Ordering {
    let by_rank = rank(one, useful).cmp(&rank(other, useful));
    let by_loss = || compare_loss(&one.rungs, &other.rungs);
    let by_size = || other.parameters.cmp(&one.parameters);
    let by_name = || one.model.cmp(&other.model);
    let speed = |model: &PlannedModel| model.tokens_per_second.unwrap_or(0.0);
    by_rank.then_with(|| match rank(one, useful) {
        0 => by_size().then_with(by_name).then_with(by_loss),
        1 => speed(other).total_cmp(&speed(one)).then_with(by_name).then_with(by_loss),
        _ => by_size().reverse().then_with(by_name).then_with(by_loss),
    })
}

/// Compares two methods by loss: first by their number of lossy rungs, then by the rungs themselves, the most lossy first.
fn compare_loss(one: &[Rung], other: &[Rung]) -> Ordering {
    let by_rung = |rung: Rung| one.contains(&rung).cmp(&other.contains(&rung));
    let most_first = [Rung::Lora, Rung::Nf4, Rung::Int8, Rung::Adam8bit, Rung::Bf16];
    most_first.into_iter().map(by_rung).fold(one.len().cmp(&other.len()), Ordering::then)
}

/// Returns the cells of a model in the table.
fn cells(model: &PlannedModel) -> Vec<String> {
    let unknown = || "-".to_owned();
    let simulated = if model.simulated { " (simulated)" } else { "" };
    let peaks: Vec<String> = model.peaks.iter().map(|peak| peak.peak_bytes.to_string()).collect();
    vec![
        excerpt(&model.label),
        count(model.parameters as f64),
        model.method(),
        model.tokens_per_second.map_or_else(unknown, |speed| format!("{}{simulated}", speed_text(speed))),
        if peaks.is_empty() { unknown() } else { peaks.join(", ") },
        model.load().map_or_else(unknown, |load| percent(load, 0)),
    ]
}

/// Returns what the plan of a model gives up, or what the model lacks.
fn remark(model: &PlannedModel) -> String {
    match model.fit {
        Fit::Fits => model.given_up.join(", "),
        _ => model.outcome(),
    }
}

/// Formats tokens per second; slow speeds have two decimals.
fn speed_text(speed: f64) -> String {
    const DECIMALS_BELOW: f64 = 10.0;
    if speed < DECIMALS_BELOW { format!("{speed:.2}") } else { count(speed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str, parameters: u64, rungs: &[Rung], speed: Option<f64>) -> PlannedModel {
        PlannedModel {
            model: name.to_owned(),
            label: name.to_owned(),
            argument: name.to_owned(),
            has_weights: false,
            origin: ModelOrigin::Preset,
            parameters,
            rungs: rungs.to_vec(),
            fit: if speed.is_some() { Fit::Fits } else { Fit::DoesNotFit },
            tokens_per_second: speed,
            simulated: false,
            peaks: vec![],
            host_bytes: None,
            parallelism: None,
            given_up: vec![],
            missing: None,
            command: String::new(),
        }
    }

    fn list(models: Vec<PlannedModel>) -> ModelList {
        let devices = vec![ListedDevice { name: "cpu".to_owned(), simulated: false, budget_bytes: Bytes::gib(4) }];
        let mut list = ModelList {
            version: MODELS_VERSION,
            devices,
            sequence: 1024,
            batch_tokens: 65536,
            useful_tokens_per_second: USEFUL_TOKENS_PER_SECOND,
            models,
            notes: vec![],
        };
        list.sort();
        list
    }

    #[test]
    fn largest_useful_model_comes_first() {
        let lora = [Rung::Lora];
        let list = list(vec![
            model("tiny", 10, &[], Some(9000.0)),
            model("slow", 900, &[], Some(3.0)),
            model("large", 500, &lora, Some(150.0)),
            model("huge", 5000, &lora, None),
            model("slower", 800, &[], Some(1.0)),
            model("large", 500, &[], Some(120.0)),
            model("too-large", 2000, &[], None),
        ]);
        let order: Vec<String> = list.models.iter().map(|row| format!("{} {}", row.model, row.method())).collect();
        assert_eq!(
            order,
            ["large full", "large lora", "tiny full", "slow full", "slower full", "too-large full", "huge lora"]
        );
    }

    #[test]
    fn least_loss_comes_first() {
        let [bf16, adam8bit, lora, int8, nf4] = Rung::ALL;
        let expected: [&[Rung]; 10] = [
            &[],
            &[bf16],
            &[adam8bit],
            &[lora],
            &[bf16, adam8bit],
            &[bf16, lora],
            &[lora, int8],
            &[lora, nf4],
            &[bf16, lora, int8],
            &[bf16, lora, nf4],
        ];
        let mut methods = expected;
        methods.reverse();
        methods.sort_by(|one, other| compare_loss(one, other));
        assert_eq!(methods, expected);
    }

    #[test]
    fn table_names_missing_memory() {
        let mut short = model("big\u{1b}[31m", 7_000_000_000, &[Rung::Lora, Rung::Nf4], None);
        let mut missing = MissingMemory {
            device_bytes: Some(Bytes::gib(9)),
            load_lines: BTreeMap::new(),
            host_bytes: Some(Bytes::gib(30)),
        };
        short.missing = Some(missing.clone());
        let mut team = model("team", 8_000_000_000, &[], None);
        missing.load_lines =
            [("cuda:1", Bytes::gib(9)), ("cuda:2", Bytes::gib(5))].map(|(name, line)| (name.to_owned(), line)).into();
        team.missing = Some(missing);
        let mut fits = model("small", 1_000_000, &[Rung::Bf16], Some(512.0));
        fits.peaks =
            vec![PredictedPeak { device: "cpu".to_owned(), peak_bytes: Bytes::gib(1), budget_bytes: Bytes::gib(4) }];
        fits.given_up = vec!["recompute in 2 of 4 layers".to_owned()];
        let text = list(vec![short, team, fits]).table();
        assert!(text.contains("needs load lines of 9.00 GiB on cuda:1 and 5.00 GiB on cuda:2, or 30.00 GiB"), "{text}");
        assert!(text.contains("does not fit: needs a load line of 9.00 GiB, or 30.00 GiB on the host"), "{text}");
        assert!(
            text.contains("lora+nf4") && text.contains("full+bf16") && text.contains("25 %  recompute in 2"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'), "{text:?}");
    }
}
