//! Grids of settings for a sweep: `train.seed=1,2` stands for two values of a key, and several keys for all
//! combinations.

use super::{RunConfig, RunConfigError};
use plimsoll_core::Failure;
use std::fs;
use std::path::Path;

/// Keys that `plimsoll sweep` sets itself, each with the flag to use instead.
const SET_BY_SWEEP: [(&str, &str); 4] = [
    ("run.dir", "every run has a folder in the sweep's: --dir"),
    ("run.devices", "the devices are the sweep's: --devices"),
    ("memory.budget", "runs share the load lines of the sweep's devices: --budget"),
    ("memory.host", "runs share the host's line: --devices ...,host=8GiB"),
];

/// One combination of settings in a sweep's grid. The sweep runs each of its run files with these settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GridPoint {
    /// All settings of this point, each as `section.key=value`.
    pub settings: Vec<String>,
    /// Settings of this point that differ from other points, each as `key=value`. They become part of the run's name.
    pub labels: Vec<String>,
}

/// Returns one point for each combination of the values in `texts`; the last key changes fastest. Without texts there
/// is one point without settings.
///
/// Each text is `section.key=value` or `section.key=value,value,...`. Commas in brackets or quotes belong to a value.
///
/// # Errors
/// A text without a key or a value, a repeated value, or a key that a sweep sets itself.
pub fn grid(texts: &[String]) -> Result<Vec<GridPoint>, Failure> {
    let mut points = vec![GridPoint::default()];
    for text in texts {
        let wrong = |message: &str| RunConfigError::Setting { text: text.clone(), message: message.to_owned() };
        let (key, values) = text.split_once('=').ok_or_else(|| wrong("no `=` between key and value"))?;
        let key = key.trim();
        if let Some((_, reason)) = SET_BY_SWEEP.iter().find(|(own, _)| *own == key) {
            return Err(Failure::input(format!("--set {text}: a sweep sets {key} itself")).hint(*reason));
        }
        let values = split_values(values);
        if values.iter().any(String::is_empty) {
            return Err(wrong("a value is missing").into());
        }
        if let Some((_, twice)) = values.iter().enumerate().find(|(index, value)| values[..*index].contains(value)) {
            return Err(Failure::input(format!("--set {text}: {key} is given {twice} twice"))
                .hint("that would be the same run again: name each value once"));
        }
        let several = values.len() > 1;
        let name = key.rsplit('.').next().unwrap_or(key);
        points = points
            .iter()
            .flat_map(|point| {
                values.iter().map(move |value| {
                    let mut next = point.clone();
                    next.settings.push(format!("{key}={value}"));
                    next.labels.extend(several.then(|| format!("{name}={value}")));
                    next
                })
            })
            .collect();
    }
    Ok(points)
}

/// Returns the runs of a sweep with their names: one run for each run file in `files` and each point in `points`. If
/// `files` is empty, the built-in example takes its place. `settings` apply to every run.
///
/// Names are unique, and valid as names of folders.
///
/// # Errors
/// An invalid run file or setting, a run file without data or length, or a run file that is named twice.
pub fn runs(files: &[&Path], settings: &[String], points: &[GridPoint]) -> Result<Vec<(String, RunConfig)>, Failure> {
    let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mut pairs = files.iter().enumerate().flat_map(|(index, a)| files[index + 1..].iter().map(move |b| (*a, *b)));
    if let Some((a, b)) = pairs.find(|(a, b)| real(a) == real(b)) {
        let twice = if a == b { a.display().to_string() } else { format!("{}, {}", a.display(), b.display()) };
        return Err(Failure::input(format!("{twice}: the same run file is named twice"))
            .hint("name each once; --set train.seed=1,2 makes several runs of one"));
    }
    let files: Vec<Option<&Path>> = match files {
        [] => vec![None],
        files => files.iter().copied().map(Some).collect(),
    };
    let mut runs: Vec<(String, RunConfig)> = Vec::new();
    for path in files {
        let stem = path.and_then(Path::file_stem).map_or("sums".into(), |stem| stem.to_string_lossy());
        for point in points {
            let settings = [settings, &point.settings].concat();
            let file = RunConfig::load(path, &settings)?;
            file.check_trainable()?;
            let name = folder_name(&[&[stem.to_string()], &point.labels[..]].concat().join("-"));
            let taken = |name: &str| runs.iter().any(|(other, _)| other == name);
            let numbered = (2..).map(|number| format!("{name}-{number}"));
            let name = std::iter::once(name.clone()).chain(numbered).find(|name| !taken(name));
            runs.push((name.expect("numbers do not end"), file));
        }
    }
    Ok(runs)
}

/// Converts a text into a folder name of at most 120 bytes. Characters that are special to shells or file systems
/// become `-`, and leading dots and dashes are removed. An empty result becomes `run`.
fn folder_name(text: &str) -> String {
    const LONGEST_BYTES: usize = 120;
    let plain = |letter: char| letter.is_alphanumeric() || "._=+-".contains(letter);
    let mut name: String = text.chars().map(|letter| if plain(letter) { letter } else { '-' }).collect();
    while name.len() > LONGEST_BYTES {
        name.pop();
    }
    // A leading dot would hide the folder, and a leading `-` looks like a flag.
    match name.trim_start_matches(['.', '-']) {
        "" => "run".to_owned(),
        name => name.to_owned(),
    }
}

/// Splits a text at commas outside brackets and quotes.
fn split_values(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let (mut depth, mut quote) = (0_u32, None);
    for letter in text.chars() {
        match (letter, quote) {
            (',', None) if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            ('"' | '\'', None) => quote = Some(letter),
            (_, Some(open)) if letter == open => quote = None,
            ('[' | '{', None) => depth += 1,
            (']' | '}', None) => depth = depth.saturating_sub(1),
            _ => {}
        }
        parts.last_mut().expect("never empty").push(letter);
    }
    parts.iter().map(|part| part.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(texts: &[&str]) -> Vec<GridPoint> {
        grid(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn grid_combines_all_values_last_key_fastest() {
        let grid = points(&["train.learning_rate=1e-4, 3e-4", "train.steps=5", "train.seed=1,2"]);
        let labels: Vec<String> = grid.iter().map(|point| point.labels.join(" ")).collect();
        assert_eq!(
            labels,
            [
                "learning_rate=1e-4 seed=1",
                "learning_rate=1e-4 seed=2",
                "learning_rate=3e-4 seed=1",
                "learning_rate=3e-4 seed=2"
            ]
        );
        assert_eq!(grid[2].settings, ["train.learning_rate=3e-4", "train.steps=5", "train.seed=1"]);
        assert_eq!(points(&[]), [GridPoint::default()]);
    }

    #[test]
    fn commas_in_brackets_and_quotes_do_not_split() {
        let grid = points(&["train.betas=[0.9,0.95],[0.8,0.9]", "memory.allow=\"bf16,lora\""]);
        assert_eq!(grid.len(), 2);
        assert_eq!(grid[1].settings, ["train.betas=[0.8,0.9]", "memory.allow=\"bf16,lora\""]);
    }

    #[test]
    fn invalid_grids_are_rejected() {
        let refused = |text: &str| grid(&[text.to_owned()]).unwrap_err().to_string();
        assert!(refused("train.seed").starts_with("--set train.seed: no `=`"));
        assert!(refused("train.seed=1, 2,1").contains("train.seed is given 1 twice"));
        assert!(refused("train.seed=1,,2").contains("a value is missing"));
        assert!(refused("run.dir=a,b").contains("--dir") && refused("run.devices=cpu").contains("--devices"));
        assert!(refused("memory.budget=1GiB,2GiB").contains("--budget"));
    }

    #[test]
    fn run_names_are_unique_folder_names() {
        let grid = points(&["train.betas=[0.9,0.95],[0.8,0.9]", "train.seed=1"]);
        let names = |points: &[GridPoint]| -> Vec<String> {
            runs(&[], &[], points).unwrap().into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(&grid), ["sums-betas=-0.9-0.95-", "sums-betas=-0.8-0.9-"]);
        assert_eq!(names(&[GridPoint::default(), GridPoint::default()]), ["sums", "sums-2"]);
        assert_eq!(folder_name("../a b"), "a-b");
        assert_eq!([folder_name("模型"), folder_name("--"), folder_name("é?")], ["模型", "run", "é-"]);
        assert_eq!(folder_name(&"é".repeat(100)).len(), 120);
        let wrong = runs(&[], &["train.stepz=1".into()], &[GridPoint::default()]).unwrap_err();
        assert!(wrong.to_string().contains("did you mean `train.steps`"), "{wrong}");
    }
}
