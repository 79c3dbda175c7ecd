//! Small runs of the program, drawn at random, and what they leave. Each start is a process of its own under a watchdog:
//! what one holds is charged to no other, and a fault ends it alone.

use super::case::Draw;
use super::tally::Tally;
use super::whole::{config, data};
use crate::program::{self, Ended};
use anyhow::{Context, bail, ensure};
use plimsoll_core::{Class, DType, Event, Exit, Plan, Record};
use plimsoll_program::models::ModelType;
use plimsoll_train::fault_injection::Injection;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Steps of a run.
pub const STEPS: u64 = 6;
/// Of all documents, so many are evaluated on: steps are what matters.
const EVAL_DOCUMENTS: usize = 6;
/// How far losses and norms may be apart where sums are taken in another order.
pub const F32_DISTANCE: f64 = 1e-3;
pub const BF16_DISTANCE: f64 = 5e-2;

/// A start that takes longer hangs: each is over in some seconds on a machine left alone.
const START_SECONDS_MAX: u64 = 180;
/// A case has at most so many starts.
const STARTS_MAX: u64 = 12;
/// A case that takes longer hangs.
pub const CASE_SECONDS_MAX: u64 = STARTS_MAX * START_SECONDS_MAX;

/// A run that is asked for.
pub struct Asked {
    binary: PathBuf,
    /// Where all of its runs are.
    pub folder: PathBuf,
    /// What its run file says.
    pub settings: Vec<String>,
    /// On these devices.
    pub devices: String,
    /// How often its devices refuse.
    pub share: f64,
    /// Of its arithmetic.
    pub precision: DType,
    /// What it is called in failures.
    pub label: String,
}

/// Hidden, layers, heads, their keys and values, the feed-forward, the vocabulary: of a model of some hundred kilobytes.
pub fn small(draw: &mut Draw) -> [u64; 6] {
    let kv_heads = draw.of(&[1, 2]);
    let heads = kv_heads * draw.of(&[1, 2]);
    let hidden = heads * draw.of(&[8, 16]);
    [hidden, draw.from(1, 4), heads, kv_heads, draw.from(8, 96), draw.of(&[500, 600, 900])]
}

impl Asked {
    /// A run of a model and on devices that are drawn, too.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn on(
        binary: &Path,
        (seed, number): (u64, u64),
        sizes: &dyn Fn(&mut Draw) -> [u64; 6],
        devices: &dyn Fn(&mut Draw) -> String,
    ) -> anyhow::Result<Asked> {
        let mut draw = Draw::new(seed ^ 9, number);
        let folder = std::env::temp_dir().join(format!("plimsoll-soak-{}-{seed}-{number}", std::process::id()));
        fs::create_dir_all(&folder).context("cannot make a folder")?;
        program::know_the_rates(&folder.join("cache"))?;
        let sizes = sizes(&mut draw);
        let config = config(draw.of(&ModelType::ALL), sizes);
        fs::write(folder.join("config.json"), config.to_json(None, DType::F32).to_string())?;
        let data = data(&folder, config.vocab)?;
        let some: Vec<String> = fs::read_to_string(&data)?.lines().take(EVAL_DOCUMENTS).map(str::to_owned).collect();
        fs::write(folder.join("eval.jsonl"), some.join("\n"))?;
        fs::write(folder.join("run.toml"), "")?;
        let precision = draw.of(&[DType::F32, DType::F32, DType::Bf16]);
        let rungs = draw.of(&[&[][..], &[], &["adam8bit"], &["lora"], &["lora", "int8"], &["lora", "nf4"]]);
        let devices = devices(&mut draw);
        let share = draw.of(&[0.003, 0.01, 0.03, 0.1, 0.3]);
        let mut settings = vec![
            format!("model.path={}", folder.display()),
            "model.init=random".to_owned(),
            format!("data.train={data}"),
            "data.eval=eval.jsonl".into(),
            "data.format=tokens".into(),
            "data.sequence=32".into(),
            // Each row has a count of labels of its own: other samples would show.
            "data.pack=false".into(),
            "train.batch_tokens=256".into(),
            format!("train.steps={STEPS}"),
            "train.warmup_steps=0".into(),
            format!("train.precision={precision}"),
            format!("train.seed={}", number + 1),
            format!("train.save_every={}", draw.from(1, 4)),
            format!("train.eval_every={}", draw.from(2, 6)),
            format!("run.devices={devices}"),
            "run.threads=1".into(),
        ];
        if !rungs.is_empty() {
            settings.push(format!("train.rungs={}", rungs.join(",")));
        }
        if draw.chance(0.5) {
            settings.push(format!("recipe.micro_batch={}", draw.of(&[1, 2, 4])));
        }
        let label = format!(
            "--seed {seed} --case {number}: {} layers, {precision}, rungs {rungs:?}, {devices}, random:{share}",
            config.layers
        );
        Ok(Asked { binary: binary.to_owned(), folder, settings, devices, share, precision, label })
    }

    /// The same run with other settings.
    pub fn with(&self, settings: &[&str]) -> Asked {
        let (mut all, binary) = (self.settings.clone(), self.binary.clone());
        all.extend(settings.iter().map(|setting| (*setting).to_owned()));
        let (folder, devices, label) = (self.folder.clone(), self.devices.clone(), self.label.clone());
        Asked { binary, folder, settings: all, devices, label, ..*self }
    }

    /// Starts the program with a command that has all settings, or with one that needs none.
    fn start(&self, command: &[&str], with_settings: bool) -> anyhow::Result<Ended> {
        let mut program = Command::new(&self.binary);
        program.current_dir(&self.folder).env("PLIMSOLL_CACHE", self.folder.join("cache")).args(command);
        if with_settings {
            program.arg("run.toml");
            program.args(self.settings.iter().flat_map(|setting| ["--set", setting]));
        }
        program::start(&mut program, &self.folder, START_SECONDS_MAX)
    }

    /// The plan of it, which may be one that does not fit; and what is said then.
    ///
    /// # Errors
    /// Where there is none.
    pub fn plan(&self) -> anyhow::Result<(Plan, String)> {
        let ended = self.start(&["plan", "--json"], true)?;
        let answered = [Exit::Done, Exit::DoesNotFit].map(|exit| Some(exit as i32)).contains(&ended.code);
        ensure!(answered, "plan ended with {:?}: {}", ended.code, ended.complained);
        let plan: Plan = serde_json::from_str(&ended.said).context("the plan")?;
        ensure!(plan.fits == (ended.code == Some(0)), "a plan that fits: {}, exit {:?}", plan.fits, ended.code);
        Ok((plan, ended.complained))
    }

    /// Trains in a folder of the run's, or goes on there; where it stopped and can be gone on with: what was said then.
    ///
    /// # Errors
    /// Where it ended in any other way.
    pub fn train(&self, run: &str, injections: &[Injection]) -> anyhow::Result<Option<String>> {
        // What was never begun is begun anew.
        let begun = self.folder.join(run).join("run.toml").exists();
        let dir = format!("run.dir={run}");
        let mut words = vec!["train", "--quiet"];
        let injections: Vec<String> = injections.iter().map(ToString::to_string).collect();
        words.extend(injections.iter().flat_map(|injection| injection.split(' ')));
        words.extend(if begun { ["--resume", run] } else { ["--set", &dir] });
        let ended = self.start(&words, !begun)?;
        match ended.code {
            Some(0) => Ok(None),
            Some(code) if code == Exit::Stopped as i32 => Ok(Some(ended.complained)),
            code => bail!("train ended with {code:?}: {}", ended.complained),
        }
    }

    /// That losses and norms of two runs are as near as sums in another order are.
    pub fn near(&self, what: &str, one: &Left, other: &Left, tally: &mut Tally) {
        let most = if self.precision == DType::F32 { F32_DISTANCE } else { BF16_DISTANCE };
        let pairs = one.steps.values().zip(other.steps.values());
        let apart =
            pairs.flat_map(|(a, b)| [(a.1, b.1), (a.2, b.2)]).map(|(a, b)| (a - b).abs() / a.abs().max(b.abs()));
        let apart = apart.fold(0.0, f64::max);
        let kind = format!("distance of losses and norms {what}, {}", self.precision);
        tally.figure(&kind, apart, apart <= most, || format!("{}: {:?}, {:?}", self.label, one.steps, other.steps));
    }

    /// That every step of two runs had the same samples.
    pub fn same_samples(&self, one: &Left, other: &Left, tally: &mut Tally) {
        let samples =
            |left: &Left| left.steps.iter().map(|(step, (labelled, ..))| (*step, *labelled)).collect::<Vec<_>>();
        tally.check("the samples of every step are the same", samples(one) == samples(other), || {
            format!("{}: {:?} was {:?}", self.label, samples(other), samples(one))
        });
    }
}

/// What a run did, step by step (the last time that it was done), and what tells apart the tensors that it left.
pub struct Left {
    /// Labelled tokens, loss, norm.
    pub steps: BTreeMap<u64, (u64, f64, f64)>,
    /// All that happened, in order.
    pub events: Vec<Event>,
    /// Of its last checkpoint.
    pub tensors: Vec<(String, u64)>,
}

impl Left {
    /// Reads what a run that is done has left.
    ///
    /// # Errors
    /// Files that are not there.
    pub fn read(run: &Path) -> anyhow::Result<Left> {
        let (mut steps, mut events) = (BTreeMap::new(), Vec::new());
        for line in fs::read_to_string(run.join("events.jsonl"))?.lines() {
            let event = serde_json::from_str::<Record>(line)?.event;
            if let Event::Step { step, loss, norm, labelled_tokens, .. } = event {
                steps.insert(step, (labelled_tokens, loss, norm));
            }
            events.push(event);
        }
        let mut tensors = Vec::new();
        for entry in fs::read_dir(run.join(format!("checkpoints/step-{STEPS}")))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                tensors.push((name, hash(&path)?));
            }
        }
        tensors.sort();
        ensure!(!tensors.is_empty(), "no tensors in the last checkpoint");
        Ok(Left { steps, events, tensors })
    }

    /// The classes of all rungs that were taken.
    pub fn classes(&self) -> Vec<Class> {
        let class = |event: &Event| if let Event::Retreat(retreat) = event { Some(retreat.class) } else { None };
        self.events.iter().filter_map(class).collect()
    }
}

/// What tells the contents of a file from others.
fn hash(path: &Path) -> anyhow::Result<u64> {
    let (mut file, mut hasher) = (BufReader::new(fs::File::open(path)?), DefaultHasher::new());
    loop {
        let bytes = file.fill_buf()?;
        if bytes.is_empty() {
            return Ok(hasher.finish());
        }
        hasher.write(bytes);
        let read = bytes.len();
        file.consume(read);
    }
}
