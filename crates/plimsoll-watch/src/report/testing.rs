//! Run folders for tests, written file by file as a run writes them.

use plimsoll_core::{Bytes, Category, EVENTS_VERSION, Event, HeldMemory, Plan, Record, RunEnvironment, RunResult};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Time of the first event, in seconds since the Unix epoch: 2026-11-27 08:00:00 UTC.
pub(crate) const START: f64 = 1_795_766_400.0;

/// A run to be written.
pub(crate) struct TestRun {
    /// Path of the model in the run file.
    pub model: String,
    /// The device of the run, as in `run.devices`.
    pub device: String,
    /// Number of steps in the log.
    pub steps: u64,
    /// Tokens per second in the result.
    pub tokens_per_second: f64,
    /// Time of the first event.
    pub start: f64,
    /// Status of the last event, and whether there is a result; `None` for a run without an end.
    pub ended: Option<&'static str>,
}

impl Default for TestRun {
    fn default() -> TestRun {
        TestRun {
            model: "/models/llama".into(),
            device: "cpu".into(),
            steps: 20,
            tokens_per_second: 5000.5,
            start: START,
            ended: Some("done"),
        }
    }
}

/// Returns measured bytes of an arena of 16 MiB by category, of which activations have as many MiB. The plan has 4 MiB
/// of weights and 12 MiB of activations.
fn arena_use(activation: u64) -> BTreeMap<Category, Bytes> {
    let workspace = (Category::Workspace, Bytes::mib(12 - activation));
    [(Category::Weight, Bytes::mib(4)), (Category::Activation, Bytes::mib(activation)), workspace].into()
}

impl TestRun {
    /// Writes the run into the folder `name` of `parent`, and returns that folder.
    pub fn write(&self, parent: &Path, name: &str) -> PathBuf {
        let folder = parent.join(name);
        fs::create_dir_all(&folder).unwrap();
        let run_file = json!({
            "model": {"path": self.model, "init": "random"},
            "data": {"train": ["/data/train.jsonl"], "eval": [], "sequence": 32},
            "train": {
                "steps": 40, "batch_tokens": 256, "optimizer": "adamw", "learning_rate": 0.01, "schedule": "cosine",
                "precision": "f32", "method": "full", "rungs": [], "seed": 1,
            },
            "run": {"dir": folder.to_str().unwrap(), "devices": self.device},
        });
        fs::write(folder.join("run.toml"), toml::to_string(&run_file).unwrap()).unwrap();
        fs::write(folder.join("plan.json"), serde_json::to_vec(&self.plan()).unwrap()).unwrap();
        fs::write(folder.join("events.jsonl"), self.log()).unwrap();
        if let Some(status) = self.ended {
            fs::write(folder.join("result.json"), serde_json::to_vec(&self.result(status)).unwrap()).unwrap();
        }
        folder
    }

    /// Returns the name of the device.
    fn device_name(&self) -> &str {
        self.device.split('=').next().unwrap()
    }

    fn plan(&self) -> Plan {
        let host = json!({
            "name": "host", "simulated": false, "budget_bytes": 0, "arena_bytes": 0, "charges_bytes": 0,
            "peak_bytes": 0, "by_category": {}, "by_program": {}, "lower_bound_bytes": 0,
        });
        let plan = json!({
            "fits": true, "recipe": {"micro_batch": 8, "recompute": ["nothing", "block"]}, "class": "reordered",
            "devices": [{
                "name": self.device_name(), "simulated": self.device.starts_with("virtual:"), "budget_bytes": Bytes::mib(48),
                "arena_bytes": Bytes::mib(16), "charges_bytes": Bytes::mib(24), "peak_bytes": Bytes::mib(40),
                "by_category": {"weight": Bytes::mib(4), "activation": Bytes::mib(12)},
                "by_program": {"forward": Bytes::mib(15), "backward": Bytes::mib(16)},
                "lower_bound_bytes": Bytes::mib(16),
            }],
            "host": host, "predicted": {"step_seconds": 0.05, "tokens_per_second": 5120.0}, "needs": [],
        });
        serde_json::from_value(plan).unwrap()
    }

    fn result(&self, status: &str) -> RunResult {
        let result = json!({
            "status": status, "steps": self.steps, "loss": {"first": 3.0, "last": 1.0},
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": {"median": 0.052, "p95": 0.06, "predicted": 0.05},
            "eval": {"loss": 1.25, "exact_match": 0.5},
            "memory": [{
                "device": self.device_name(), "budget_bytes": Bytes::mib(48), "arena_bytes": Bytes::mib(16),
                "arena_measured_bytes": Bytes::mib(16), "arena_measured_by_category": arena_use(10),
                "predicted_bytes": Bytes::mib(40),
                "measured_bytes": Bytes::mib(39), "measured_by": "process",
            }],
            "recipe": {"micro_batch": 8, "recompute": ["nothing", "block"]}, "recoveries": [],
            "reproducible": false, "reproducible_because": ["shares follow measured speeds"],
        });
        serde_json::from_value(result).unwrap()
    }

    /// Returns the log: a start, steps whose loss falls by 0.1 from 3.0, a warning, an evaluation, and the end.
    fn log(&self) -> String {
        let mut events = vec![Event::Start {
            step: 1,
            steps: 40,
            parameters: 12_345,
            arena_bytes: Bytes::mib(16),
            predicted_step_seconds: 0.05,
            product_flops: 1e6,
            peak_flops: 0.0,
            simulated: self.device.starts_with("virtual:"),
            devices: vec![self.device_name().to_owned()],
            environment: Some(Box::new(RunEnvironment {
                plimsoll_version: "0.1.0".into(),
                commit: None,
                system: "linux 6.8.0".into(),
                processor: "A Processor".into(),
                cores: 2,
                memory_bytes: Bytes::gib(16),
            })),
        }];
        events.extend((1..=self.steps).map(|step| self.step(step)));
        events.push(Event::Warning { message: "a <script>alert(1)</script> warning".into() });
        let (step, seconds) = (self.steps, 0.5);
        let (loss, reward, exact_match, tokens, device) = (1.25, None, Some(0.5), 10, None);
        events.push(Event::Evaluation { step, loss, reward, exact_match, tokens, seconds, device });
        events.extend(self.ended.map(|status| Event::End { status: status.into(), step }));
        let record = |(number, event): (usize, Event)| Record {
            version: EVENTS_VERSION,
            time: self.start + number as f64,
            event,
        };
        let lines = events.into_iter().enumerate().map(record);
        lines.map(|record| serde_json::to_string(&record).unwrap() + "\n").collect()
    }

    fn step(&self, step: u64) -> Event {
        let device = self.device_name().to_owned();
        // Bytes by category are written when they are new.
        let arena_by_category = (step == 1).then(|| arena_use(11));
        Event::Step {
            step,
            loss: 3.1 - step as f64 / 10.0,
            norm: 0.5,
            learning_rate: 1e-3,
            tokens: 256,
            labelled_tokens: 200,
            seconds: 0.064,
            bytes: Bytes::mib(38),
            memory: Some(vec![HeldMemory {
                device,
                held_bytes: Bytes::mib(37),
                peak_bytes: Some(Bytes::mib(38)),
                arena_by_category,
            }]),
        }
    }
}
