//! One hostile input: a command of the program, with damage to the files that it reads, to its arguments or to its
//! surroundings.

use super::super::case::Rng;
use super::pool::{self, Pool};
use super::process::{HANG_SECONDS, MEASUREMENT_SECONDS, Start};
use super::scenario::{SCENARIOS, Scenario};
use super::{arguments, damage};
use plimsoll_program::models::ModelType;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Share of inputs with absurd arguments.
const ARGUMENTS_SHARE: f64 = 0.2;
/// Share of inputs with odd surroundings.
const SURROUNDINGS_SHARE: f64 = 0.05;
/// Share of damaged inputs with damage to two files.
const TWICE_SHARE: f64 = 0.12;
/// Share of damaged inputs that are left undamaged, as a check of the soak itself.
const UNDAMAGED_SHARE: f64 = 0.01;

/// One hostile input.
pub struct Input {
    /// Kind of the input in the report.
    pub kind: &'static str,
    /// The command.
    pub start: Start,
    /// The damage in words.
    pub description: String,
    /// Reason why the command has to fail; `None` if it need not.
    pub failure: Option<&'static str>,
    /// Whether nothing is damaged.
    pub undamaged: bool,
    /// Whether text on stderr can be read.
    pub is_message_readable: bool,
    /// Words of which a refusal contains one; empty if it may be any.
    pub names: Vec<String>,
    /// Place of the scenario in [`SCENARIOS`] with whose result that of the command is compared; `None` without one.
    pub scenario: Option<usize>,
}

impl Input {
    /// Draws an input, and damages its files in `folder`, which is a copy of the pool.
    ///
    /// # Errors
    /// Fails if a file cannot be damaged.
    pub fn draw(pool: &Pool, folder: &Path, rng: &mut Rng) -> anyhow::Result<Input> {
        if rng.chance(ARGUMENTS_SHARE) {
            pool::make_special_files(folder)?;
            Ok(Input::new("arguments", Start::new(arguments::absurd_command(&pool.keys, rng))))
        } else if rng.chance(SURROUNDINGS_SHARE) {
            pool::make_special_files(folder)?;
            Ok(Input::with_odd_surroundings(pool, rng))
        } else {
            Input::with_damaged_files(pool, folder, rng)
        }
    }

    fn new(kind: &'static str, start: Start) -> Input {
        Input {
            kind,
            start,
            description: String::new(),
            failure: None,
            undamaged: false,
            is_message_readable: true,
            names: Vec::new(),
            scenario: None,
        }
    }

    /// Draws odd surroundings for a command with valid files and arguments.
    fn with_odd_surroundings(pool: &Pool, rng: &mut Rng) -> Input {
        let odd = arguments::odd_surroundings(rng);
        let (_, scenario) = draw_scenario(rng);
        let start = Start::new(arguments_of(scenario, rng.pick(&ModelType::ALL), &pool.folder));
        let mut input = Input::new("surroundings", start);
        input.description = format!("{} {:?}", odd.script, odd.variables);
        (input.start.script, input.start.variables) = (odd.script, odd.variables);
        input.start.seconds = MEASUREMENT_SECONDS;
        input.is_message_readable = odd.is_readable;
        input.failure = odd.loses_results.then_some("its result is lost");
        input
    }

    /// Draws a scenario, and damages one or two of the files in `folder` that its command reads.
    fn with_damaged_files(pool: &Pool, folder: &Path, rng: &mut Rng) -> anyhow::Result<Input> {
        let (place, scenario) = draw_scenario(rng);
        let model = rng.pick(&ModelType::ALL);
        let mut input = Input::new(scenario.kind, Start::new(arguments_of(scenario, model, &pool.folder)));
        input.scenario = Some(place);
        // `budget` refuses, because no run is under way.
        input.undamaged = rng.chance(UNDAMAGED_SHARE) && scenario.kind != "budget";
        let times = if input.undamaged { 0 } else { 1 + u64::from(rng.chance(TWICE_SHARE)) };
        let others = [
            "run.toml",
            "data/train.jsonl",
            "llama/config.json",
            "mistral/tokenizer.json",
            "qwen3/model.safetensors",
            "plan.json",
            "run/checkpoints/step-1/state.safetensors",
        ];
        let others = others.map(|name| pool.folder.join(name));
        let mut is_named = true;
        for _ in 0..times {
            let target = rng.pick(scenario.targets).replace("MODEL", model.name());
            let Some(file) = matching(folder, &target, rng)? else { continue };
            // Other damage to the same file could repair it.
            if input.description.contains(&*file.file_name().unwrap_or_default().to_string_lossy()) {
                continue;
            }
            let damaged = damage::damage(&file, &others, &folder.join("victim"), rng)?;
            let name = file.strip_prefix(folder).unwrap_or(&file).to_string_lossy().into_owned();
            let _ = write!(input.description, "{name}: {}; ", damaged.description);
            if damaged.unreadable && scenario.required {
                input.failure = Some("the file cannot be read");
            }
            let measures = name.starts_with("cache");
            input.start.seconds = if measures { MEASUREMENT_SECONDS } else { input.start.seconds.max(HANG_SECONDS) };
            // The values of a readable run file name any other things.
            is_named &= damaged.unreadable || !name.ends_with(".toml");
            input.names.extend(name.split('/').map(str::to_owned));
        }
        if !is_named {
            input.names.clear();
        }
        Ok(input)
    }
}

/// Returns the words of a scenario's command.
pub fn arguments_of(scenario: &Scenario, model: ModelType, pool: &Path) -> Vec<OsString> {
    let command = scenario.command.replace("MODEL", model.name()).replace("POOL", &pool.to_string_lossy());
    command.split(' ').map(OsString::from).collect()
}

/// Returns a random scenario with its place in [`SCENARIOS`].
fn draw_scenario(rng: &mut Rng) -> (usize, &'static Scenario) {
    let weights: Vec<u64> = SCENARIOS.iter().map(|scenario| scenario.weight).collect();
    let place = arguments::weighted(&weights, rng);
    (place, &SCENARIOS[place])
}

/// Returns a file in a folder that matches a name, in which `*` stands for any part of a name; `None` if there is none.
/// A name without `*` need not exist. The choice does not depend on random parts of names.
fn matching(folder: &Path, name: &str, rng: &mut Rng) -> anyhow::Result<Option<PathBuf>> {
    if !name.contains('*') {
        return Ok(Some(folder.join(name)));
    }
    let pattern = format!("{}/{name}", glob::Pattern::escape(&folder.to_string_lossy()));
    let mut files: Vec<PathBuf> = glob::glob(&pattern)?.flatten().collect();
    files.retain(|file| file.extension().is_none_or(|format| format != damage::ASIDE));
    files.sort_by_key(|file| {
        let size = file.metadata().map_or(0, |metadata| metadata.len());
        (file.extension().map(ToOwned::to_owned), size, file.clone())
    });
    Ok(if files.is_empty() { None } else { Some(rng.pick(&files)) })
}
