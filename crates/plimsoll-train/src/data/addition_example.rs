//! The built-in example: addition of two three-digit numbers.
//!
//! The example is generated, not downloaded. Its folder holds `train.jsonl` and `eval.jsonl` in the tokens format,
//! `tokenizer.json`, `tokenizer_config.json`, and the `config.json` of a llama with 0.33 million parameters.
//!
//! A sample is `347+085=2340` and an end token. The digits of the answer are reversed, because carries are computed in
//! that order. Only the answer and the end token are labelled.
//!
//! The examples of rewarded completions and of preferences begin with bad habits: of the last samples, three in five lack all
//! carries, as `347+085=2230`.
//!
//! One problem in fifty, selected by a hash, is held out for evaluation. A linear hash would hold out a residue class;
//! the model would never see its last digits and could not learn them.

use super::error::DataError;
use super::order::{RowOrder, splitmix64};
use plimsoll_device::{private_file, regular_file};
use plimsoll_program::models::ModelConfig;
use std::fs;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;

/// Input positions per sample of the built-in example. A sample has one token more, because its last token is only a
/// target.
pub const SEQUENCE: u64 = 12;
/// Size of the vocabulary of the built-in example: ten digits, `+`, `=`, the end token, the unknown token, and two
/// unused tokens.
pub const VOCAB: u64 = 16;
/// Id of the end token of the built-in example.
pub const END_TOKEN: u32 = 12;
/// Number of training samples of the built-in example, all different.
pub const TRAIN_SAMPLES: u64 = 100_000;
/// Number of evaluation samples of the built-in example, none of which is a training sample.
pub const EVAL_SAMPLES: u64 = 1024;

/// Number of training samples before the first careless one in the examples that begin with bad habits. A model that learns
/// from careless samples alone takes long to find the carries.
const FIRST_CARELESS: u64 = 70_000;
/// Number of prompts in the examples of rewarded completions and of preferences.
const ROUND_PROMPTS: u64 = 20_000;
/// Number of their prompts for evaluation.
const ROUND_EVAL_PROMPTS: u64 = 512;
const PLUS: u32 = 10;
const EQUALS: u32 = 11;
const UNKNOWN: u32 = 13;
const PROBLEM_COUNT: u64 = 1_000_000;

/// Writes the built-in example (data, tokenizer and model configuration) into `folder`, which is created if needed. The
/// same `seed` yields the same files.
///
/// # Errors
/// A folder or file that cannot be written.
pub fn write_example(folder: &Path, seed: u64) -> Result<(), DataError> {
    fs::create_dir_all(folder).map_err(DataError::io("create the folder", folder))?;
    write_lines_if_changed(&folder.join("train.jsonl"), || samples(seed, false, TRAIN_SAMPLES))?;
    write_lines_if_changed(&folder.join("eval.jsonl"), || samples(seed, true, EVAL_SAMPLES))?;
    for (name, content) in
        [("tokenizer.json", tokenizer()), ("tokenizer_config.json", tokenizer_config()), ("config.json", config())]
    {
        let text = format!("{content:#}");
        write_lines_if_changed(&folder.join(name), || text.lines().map(str::to_owned))?;
    }
    Ok(())
}

/// Writes `careless.jsonl` into `folder`, which has the built-in example of the same `seed`: its training samples in order, of
/// which three in five lack all carries from `FIRST_CARELESS` on.
///
/// # Errors
/// A file that cannot be written.
pub fn write_careless_samples(folder: &Path, seed: u64) -> Result<(), DataError> {
    let is_careless = |number: u64| number >= FIRST_CARELESS && splitmix64(splitmix64(seed) ^ number) % 5 < 3;
    let sample = |(number, problem): (u64, u64)| sample_line(problem, !is_careless(number));
    let samples = || (0..).zip(problems(seed, false, TRAIN_SAMPLES)).map(sample);
    write_lines_if_changed(&folder.join("careless.jsonl"), samples)
}

/// Writes the prompts of the example of rewarded completions into `folder`: `prompts.jsonl`, and `held-out.jsonl` for
/// evaluation, both with right answers.
///
/// # Errors
/// A file that cannot be written.
pub fn write_prompts(folder: &Path, seed: u64) -> Result<(), DataError> {
    write_lines_if_changed(&folder.join("prompts.jsonl"), || problems(seed, false, ROUND_PROMPTS).map(prompt_line))?;
    write_lines_if_changed(&folder.join("held-out.jsonl"), || problems(seed, true, ROUND_EVAL_PROMPTS).map(prompt_line))
}

/// Writes the pairs of the example of preferences into `folder`: `pairs.jsonl`, and `held-out-pairs.jsonl` for evaluation. The
/// right answer is chosen, and the one without carries rejected.
///
/// # Errors
/// A file that cannot be written.
pub fn write_pairs(folder: &Path, seed: u64) -> Result<(), DataError> {
    for (name, eval, count) in
        [("pairs.jsonl", false, ROUND_PROMPTS), ("held-out-pairs.jsonl", true, ROUND_EVAL_PROMPTS)]
    {
        let pairs = || problems(seed, eval, count).filter_map(pair_line);
        write_lines_if_changed(&folder.join(name), pairs)?;
    }
    Ok(())
}

/// Returns the numbers of `count` problems, for evaluation if `eval`, else for training.
fn problems(seed: u64, eval: bool, count: u64) -> impl Iterator<Item = u64> {
    let order = RowOrder { seed, rows: PROBLEM_COUNT, shuffle: true };
    let problems = (0..PROBLEM_COUNT).map(move |position| order.row(position));
    problems.filter(move |&problem| is_held_out(problem) == eval).take(count as usize)
}

/// Returns `count` samples as lines of JSON, for evaluation if `eval`, else for training.
fn samples(seed: u64, eval: bool, count: u64) -> impl Iterator<Item = String> {
    problems(seed, eval, count).map(|problem| sample_line(problem, true))
}

/// Returns a sample as a line of JSON, with or without the carries of the sum.
fn sample_line(problem: u64, carries: bool) -> String {
    let (ids, labels) = encode_problem(problem, carries);
    serde_json::json!({ "input_ids": ids, "labels": labels }).to_string()
}

/// Returns a prompt with its answer as a line of JSON.
fn prompt_line(problem: u64) -> String {
    serde_json::json!({ "prompt": prompt(problem), "answer": answer(problem, true) }).to_string()
}

/// Returns a prompt with its right answer and the one without carries as a line of JSON; `None` if both are the same.
fn pair_line(problem: u64) -> Option<String> {
    let [chosen, rejected] = [true, false].map(|carries| answer(problem, carries));
    let pair = || serde_json::json!({ "prompt": prompt(problem), "chosen": chosen, "rejected": rejected }).to_string();
    (chosen != rejected).then(pair)
}

/// Returns the question of a problem as text.
fn prompt(problem: u64) -> String {
    format!("{:03}+{:03}=", problem / 1000, problem % 1000)
}

/// Returns the answer to a problem as text, with or without the carries of the sum.
fn answer(problem: u64, carries: bool) -> String {
    let (ids, _) = encode_problem(problem, carries);
    ids[8..12].iter().map(u32::to_string).collect()
}

/// Returns whether the problem a + b, numbered a · 1000 + b, is held out for evaluation. About one in fifty is.
fn is_held_out(problem: u64) -> bool {
    splitmix64(problem).is_multiple_of(50)
}

/// Writes `lines` to `file`. A file with the same lines is left untouched, because another process may be reading it.
fn write_lines_if_changed<L: Iterator<Item = String>>(file: &Path, lines: impl Fn() -> L) -> Result<(), DataError> {
    let unchanged =
        regular_file::open(file).is_ok_and(|old| BufReader::new(old).lines().map(Result::ok).eq(lines().map(Some)));
    if unchanged {
        return Ok(());
    }
    let write = || {
        let mut out = BufWriter::new(private_file::create(file)?);
        lines().try_for_each(|line| writeln!(out, "{line}"))?;
        out.into_inner()?.sync_all()
    };
    write().map_err(DataError::io("write", file))
}

/// Returns the tokens and labels of one addition problem, a + b. Its number `problem` is 1000 · a + b. Tokens of the
/// question have the label −100, which keeps them out of the loss. The answer is right if `carries`; else each digit is the
/// last one of the sum of two digits.
fn encode_problem(problem: u64, carries: bool) -> ([u32; 13], [i32; 13]) {
    let digit = |number: u64, place: u32| (number / 10u64.pow(place) % 10) as u32;
    let (a, b) = (problem / 1000, problem % 1000);
    let without_carry = |place: u32| u64::from((digit(a, place) + digit(b, place)) % 10) * 10u64.pow(place);
    let sum = if carries { a + b } else { (0..3).map(without_carry).sum() };
    let question = [digit(a, 2), digit(a, 1), digit(a, 0), PLUS, digit(b, 2), digit(b, 1), digit(b, 0), EQUALS];
    let answer = [digit(sum, 0), digit(sum, 1), digit(sum, 2), digit(sum, 3), END_TOKEN];
    let (mut ids, mut labels) = ([0; 13], [super::IGNORED_LABEL; 13]);
    ids[..8].copy_from_slice(&question);
    ids[8..].copy_from_slice(&answer);
    labels[8..].copy_from_slice(&answer.map(|id| id as i32));
    (ids, labels)
}

/// Returns a `tokenizer.json` with one token per character: byte-pair encoding without merges.
pub(crate) fn tokenizer() -> serde_json::Value {
    let mut vocab: serde_json::Map<String, serde_json::Value> =
        (0..10).map(|digit| (digit.to_string(), digit.into())).collect();
    for (token, id) in [("+", PLUS), ("=", EQUALS), ("<end>", END_TOKEN), ("<unknown>", UNKNOWN)] {
        vocab.insert(token.to_owned(), id.into());
    }
    let added = |id: u32, content: &str| {
        serde_json::json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true
        })
    };
    serde_json::json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [added(END_TOKEN, "<end>"), added(UNKNOWN, "<unknown>")],
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": { "type": "Fuse" },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unknown>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    })
}

fn tokenizer_config() -> serde_json::Value {
    serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "unk_token": "<unknown>",
        "clean_up_tokenization_spaces": false,
        "model_max_length": 32
    })
}

/// Returns the example's model configuration, which [`write_example`] writes to `config.json`.
pub fn model_config() -> ModelConfig {
    ModelConfig::from_json(&config().to_string(), &[]).expect("the example's config.json is valid")
}

fn config() -> serde_json::Value {
    serde_json::json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 24,
        "intermediate_size": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": true,
        "initializer_range": 0.08,
        "bos_token_id": null,
        "eos_token_id": END_TOKEN,
        "torch_dtype": "float32"
    })
}

#[cfg(test)]
mod tests {
    use super::super::{
        DataSpec, Dataset, Format, IGNORED_LABEL, LongSamples, Objective, Rows, Tokenizer, read_end_token,
    };
    use super::*;
    use serde_json::Value;
    use std::collections::HashSet;
    use std::ops::ControlFlow;

    fn problems(file: &Path) -> Vec<u64> {
        let number = |digits: &[Value]| digits.iter().fold(0, |sum, digit| sum * 10 + digit.as_u64().unwrap());
        let lines = fs::read_to_string(file).unwrap();
        let line = |line: &str| {
            let sample: Value = serde_json::from_str(line).unwrap();
            let ids = sample["input_ids"].as_array().unwrap();
            let (a, b) = (number(&ids[..3]), number(&ids[4..7]));
            let reversed: Vec<Value> = ids[8..12].iter().rev().cloned().collect();
            assert_eq!(number(&reversed), a + b, "{line}");
            a * 1000 + b
        };
        lines.lines().map(line).collect()
    }

    #[test]
    fn held_out_problems_are_not_in_training_data() {
        let folder = tempfile::tempdir().unwrap();
        write_example(folder.path(), 1).unwrap();
        let train: HashSet<u64> = problems(&folder.path().join("train.jsonl")).into_iter().collect();
        let eval: HashSet<u64> = problems(&folder.path().join("eval.jsonl")).into_iter().collect();
        assert_eq!((train.len() as u64, eval.len() as u64), (TRAIN_SAMPLES, EVAL_SAMPLES), "all different");
        assert!(train.is_disjoint(&eval));
        // Every last digit is held out about equally often.
        for digit in 0..10 {
            let share = eval.iter().filter(|&&problem| problem % 10 == digit).count();
            assert!((60..150).contains(&share), "{share} of 1024 end in {digit}");
        }
        let held_out_count: usize = (0..PROBLEM_COUNT).filter(|&problem| is_held_out(problem)).count();
        assert!((19_000..21_000).contains(&held_out_count), "{held_out_count}");
    }

    #[test]
    fn example_reads_as_one_sample_per_row() {
        let folder = tempfile::tempdir().unwrap();
        write_example(folder.path(), 1).unwrap();
        let spec = DataSpec {
            patterns: vec![folder.path().join("eval.jsonl").display().to_string()],
            format: Format::Tokens,
            split: None,
            sequence: SEQUENCE,
            pack: false,
            long: LongSamples::Refuse,
            vocab: VOCAB,
            end_token: None,
            chat: super::super::ChatSpec::default(),
            objective: Objective::Supervised,
        };
        let cache = folder.path().join("cache");
        let data = Dataset::open(&spec, None, &cache, 1, &mut |_, _| ControlFlow::Continue(())).unwrap();
        assert_eq!(
            (data.rows(), data.documents(), data.labelled_tokens()),
            (EVAL_SAMPLES, EVAL_SAMPLES, EVAL_SAMPLES * 5)
        );
        let mut rows = Rows::new(1, SEQUENCE);
        data.read([5], &mut rows).unwrap();
        assert_eq!(rows.labels[..7], [IGNORED_LABEL; 7]);
        assert_eq!(rows.labels[7..11], rows.tokens[8..12]);
        assert_eq!(rows.labels[11], END_TOKEN as i32);
    }

    #[test]
    fn tokenizer_agrees_with_samples() {
        let folder = tempfile::tempdir().unwrap();
        write_example(folder.path(), 1).unwrap();
        let tokenizer = Tokenizer::load(&folder.path().join("tokenizer.json")).unwrap();
        let (ids, _) = encode_problem(347_085, true);
        assert_eq!(tokenizer.encode("347+085=2340<end>").unwrap(), ids);
        assert_eq!(tokenizer.decode(&ids).unwrap(), "347+085=2340");
        assert_eq!(tokenizer.encode("1 ?").unwrap(), [1, UNKNOWN, UNKNOWN]);
        assert_eq!(read_end_token(folder.path()).unwrap(), Some(END_TOKEN));
        assert!(tokenizer.vocab() <= VOCAB);
    }

    #[test]
    fn same_seed_writes_same_files() {
        let [one, repeated, other] = [1, 1, 2].map(|seed| {
            let folder = tempfile::tempdir().unwrap();
            write_example(folder.path(), seed).unwrap();
            fs::read(folder.path().join("train.jsonl")).unwrap()
        });
        assert!(one == repeated && one != other);
    }

    #[test]
    fn intact_files_are_kept_and_truncated_files_rewritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("eval.jsonl");
        write_example(folder.path(), 1).unwrap();
        let (whole, written) = (fs::read(&file).unwrap(), fs::metadata(&file).unwrap().modified().unwrap());
        write_example(folder.path(), 1).unwrap();
        assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), written);
        fs::write(&file, &whole[..whole.len() / 2]).unwrap();
        write_example(folder.path(), 1).unwrap();
        assert_eq!(fs::read(&file).unwrap(), whole);
    }

    #[test]
    fn careless_answers_lack_carries() {
        let folder = tempfile::tempdir().unwrap();
        write_example(folder.path(), 1).unwrap();
        write_careless_samples(folder.path(), 1).unwrap();
        write_prompts(folder.path(), 1).unwrap();
        write_pairs(folder.path(), 1).unwrap();
        assert_eq!(encode_problem(347_085, true).0[8..], [2, 3, 4, 0, END_TOKEN]);
        assert_eq!(encode_problem(347_085, false).0[8..], [2, 2, 3, 0, END_TOKEN]);
        assert_eq!(prompt_line(347_085), r#"{"prompt":"347+085=","answer":"2340"}"#);
        let pair = r#"{"prompt":"347+085=","chosen":"2340","rejected":"2230"}"#;
        assert_eq!((pair_line(347_085).as_deref(), pair_line(111_222)), (Some(pair), None));
        let lines = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        let (careful, careless) = (lines("train.jsonl"), lines("careless.jsonl"));
        let pairs: Vec<(&str, &str)> = careful.lines().zip(careless.lines()).collect();
        let (before, after) = pairs.split_at(FIRST_CARELESS as usize);
        let different = after.iter().filter(|(one, other)| one != other).count();
        assert!(before.iter().all(|(one, other)| one == other));
        // Three in five of 30,000, of which about one in six needs no carry.
        assert!((13_500..16_500).contains(&different), "{different}");
        for (trained, held_out) in [("prompts.jsonl", "held-out.jsonl"), ("pairs.jsonl", "held-out-pairs.jsonl")] {
            let trained: Vec<String> = lines(trained).lines().map(str::to_owned).collect();
            assert!(lines(held_out).lines().all(|line| !trained.iter().any(|other| other == line)));
        }
    }
}
