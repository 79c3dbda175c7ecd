//! Devices that refuse memory at random while small runs are under way: every run ends done or can be gone on with,
//! none hangs (the soak's watch over its cases), none trains on other samples, and where only identical rungs were
//! taken every bit is that of the undisturbed run.

use super::case::Draw;
use super::tally::Tally;
use super::whole::{config, data};
use anyhow::{Context, ensure};
use plimsoll_core::{Bytes, Class, DType, Event, Exit, Record};
use plimsoll_program::models::ModelType;
use plimsoll_train::run::rehearsal::Injection;
use plimsoll_train::run::training::Run;
use plimsoll_train::run_file::RunFile;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Steps of a run.
pub(super) const STEPS: u64 = 6;
/// How far losses and norms may be apart where sums are taken in another order.
pub(super) const F32_DISTANCE: f64 = 1e-3;
pub(super) const BF16_DISTANCE: f64 = 5e-2;

/// What a run is about.
pub(super) struct Asked {
    pub folder: PathBuf,
    pub settings: Vec<String>,
    pub share: f64,
    pub precision: DType,
    pub label: String,
}

/// Hidden, layers, heads, their keys and values, the feed-forward, the vocabulary: of a model of some hundred kilobytes.
pub(super) fn small(draw: &mut Draw) -> [u64; 6] {
    let kv_heads = draw.of(&[1, 2]);
    let heads = kv_heads * draw.of(&[1, 2]);
    let hidden = heads * draw.of(&[8, 16]);
    [hidden, draw.from(1, 4), heads, kv_heads, draw.from(8, 96), draw.of(&[500, 600, 900])]
}

impl Asked {
    fn new(seed: u64, number: u64) -> anyhow::Result<Asked> {
        let device = |draw: &mut Draw| {
            draw.of(&["cpu=512MiB", "virtual:a=64MiB@1.0", "virtual:a=64MiB@1.0:16GB/s,host=32MiB"]).to_owned()
        };
        Asked::on(seed, number, &small, &device)
    }

    /// A run of a model and on devices that are drawn, too.
    pub fn on(
        seed: u64,
        number: u64,
        sizes: &dyn Fn(&mut Draw) -> [u64; 6],
        devices: &dyn Fn(&mut Draw) -> String,
    ) -> anyhow::Result<Asked> {
        let mut draw = Draw::new(seed ^ 9, number);
        let folder = std::env::temp_dir().join(format!("plimsoll-refusals-{}-{seed}-{number}", std::process::id()));
        fs::create_dir_all(&folder).context("cannot make a folder")?;
        let sizes = sizes(&mut draw);
        let config = config(draw.of(&ModelType::ALL), sizes);
        fs::write(folder.join("config.json"), config.to_json(None, DType::F32).to_string())?;
        let data = data(&folder, config.vocab)?;
        fs::write(folder.join("run.toml"), "")?;
        let precision = draw.of(&[DType::F32, DType::F32, DType::Bf16]);
        let rungs = draw.of(&[&[][..], &[], &["adam8bit"], &["lora"], &["lora", "int8"], &["lora", "nf4"]]);
        let device = devices(&mut draw);
        let share = draw.of(&[0.003, 0.01, 0.03, 0.1, 0.3]);
        let mut settings = vec![
            format!("model.path={}", folder.display()),
            "model.init=random".to_owned(),
            format!("data.train={data}"),
            format!("data.eval={data}"),
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
            format!("run.devices={device}"),
            "run.threads=1".into(),
        ];
        if !rungs.is_empty() {
            settings.push(format!("train.rungs={}", rungs.join(",")));
        }
        if draw.chance(0.5) {
            settings.push(format!("recipe.micro_batch={}", draw.of(&[1, 2, 4])));
        }
        let label = format!(
            "--seed {seed} --case {number}: {} layers, {precision}, rungs {rungs:?}, {device}, random:{share}",
            config.layers
        );
        Ok(Asked { folder, settings, share, precision, label })
    }

    pub fn file(&self, run: &Path) -> anyhow::Result<RunFile> {
        let mut settings = self.settings.clone();
        settings.push(format!("run.dir={}", run.display()));
        Ok(RunFile::load(Some(&self.folder.join("run.toml")), &settings)?)
    }

    /// Trains in a folder; how it ended, where that was not well.
    pub fn train(&self, run: &Path, injections: &[Injection], resume: bool) -> anyhow::Result<Option<Exit>> {
        let file = self.file(run)?;
        let mut run = if resume { Run::resume(file)? } else { Run::new(file)? };
        let plan = &run.prepared().planned.plan;
        if !plan.fits {
            let charges = plan.devices.iter().map(|device| device.charges_bytes).collect();
            return Err(Refused { charges, needs: format!("{:?}", plan.needs) }.into());
        }
        run.rehearse(injections.to_vec())?;
        match run.start(&mut |_| {}, &AtomicBool::new(false)) {
            Ok(_) => Ok(None),
            Err(failure) if failure.exit == Exit::Stopped => Ok(Some(failure.exit)),
            Err(failure) => Err(failure.into()),
        }
    }
}

/// A start that was planned not to fit.
#[derive(Debug)]
pub(super) struct Refused {
    /// What each device was charged with beside its arena.
    pub charges: Vec<Bytes>,
    needs: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "does not fit: {}", self.needs)
    }
}

impl std::error::Error for Refused {}

impl Asked {
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
}

/// What a run did, step by step (the last time that it was done), and what tells apart the tensors that it left: they
/// themselves would be in this process while the next run measures what it holds.
pub(super) struct Left {
    /// Labelled tokens, loss, norm.
    pub steps: BTreeMap<u64, (u64, f64, f64)>,
    pub classes: Vec<Class>,
    tensors: Vec<(String, u64)>,
}

impl Left {
    pub fn read(run: &Path) -> anyhow::Result<Left> {
        let (mut steps, mut classes) = (BTreeMap::new(), Vec::new());
        for line in fs::read_to_string(run.join("events.jsonl"))?.lines() {
            match serde_json::from_str::<Record>(line)?.event {
                Event::Step { step, loss, norm, labelled_tokens, .. } => {
                    steps.insert(step, (labelled_tokens, loss, norm));
                }
                Event::Retreat(retreat) => classes.push(retreat.class),
                _ => {}
            }
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
        Ok(Left { steps, classes, tensors })
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

/// One run undisturbed, and the same under refusals.
pub fn run_refusals(seed: u64, number: u64) -> Tally {
    let mut tally = Tally::default();
    let asked = Asked::new(seed, number);
    let label = asked.as_ref().map_or_else(|_| number.to_string(), |asked| asked.label.clone());
    let result = asked.and_then(|asked| {
        let shown = show(&asked, &mut tally);
        let _ = fs::remove_dir_all(&asked.folder);
        shown
    });
    tally.check("runs end done or resumable", result.is_ok(), || format!("{label}: {:#}", result.unwrap_err()));
    tally
}

fn show(asked: &Asked, tally: &mut Tally) -> anyhow::Result<()> {
    let label = &asked.label;
    let (plain, refused) = (asked.folder.join("plain"), asked.folder.join("refused"));
    let ended = asked.train(&plain, &[], false)?;
    ensure!(ended.is_none(), "the undisturbed run stopped");
    let mut resumed = false;
    let random = [Injection::Random { share: asked.share }];
    if asked.train(&refused, &random, false).context("under refusals")?.is_some() {
        resumed = true;
        tally.cover("stopped and resumed");
        let ended = asked.train(&refused, &[], true).context("resumed")?;
        ensure!(ended.is_none(), "the resumed run stopped");
    }
    let (plain, refused) = (Left::read(&plain)?, Left::read(&refused)?);
    tally.cover(if refused.classes.is_empty() { "never refused" } else { "refused" });
    let samples = |left: &Left| left.steps.iter().map(|(step, (labelled, ..))| (*step, *labelled)).collect::<Vec<_>>();
    tally.check("the samples of every step are the same", samples(&plain) == samples(&refused), || {
        format!("{label}: {:?} was {:?}", samples(&refused), samples(&plain))
    });
    let identical = !resumed && refused.classes.iter().all(|class| *class == Class::Identical);
    if identical {
        tally.cover("identical rungs only");
        tally.check("identical rungs leave every bit", plain.tensors == refused.tensors, || label.clone());
        tally.check("identical rungs leave every loss", plain.steps == refused.steps, || label.clone());
        return Ok(());
    }
    asked.near("over other rungs", &plain, &refused, tally);
    Ok(())
}
