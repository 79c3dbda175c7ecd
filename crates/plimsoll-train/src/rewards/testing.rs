//! Helpers of the tests of rewards.

use super::{Completion, Rewards};
use plimsoll_core::Failure;
use serde_json::{Map, Value, json};
use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// An owned completion.
pub(super) struct Sample {
    pub prompt: Value,
    pub text: String,
    pub tokens: Vec<i32>,
    pub columns: Map<String, Value>,
}

impl Sample {
    /// Creates a completion of three tokens. `columns` is an object.
    pub fn new(text: &str, columns: Value) -> Sample {
        let Value::Object(columns) = columns else { panic!("columns are an object") };
        Sample { prompt: json!("2+2?"), text: text.to_owned(), tokens: vec![1, 2, 3], columns }
    }

    pub fn completion(&self) -> Completion<'_> {
        Completion { prompt: &self.prompt, text: &self.text, tokens: &self.tokens, columns: &self.columns }
    }
}

/// Opens rewards with a timeout of a minute for commands.
pub(super) fn open(specs: &[&str]) -> Rewards {
    open_with_timeout(specs, Duration::from_secs(60))
}

pub(super) fn open_with_timeout(specs: &[&str], timeout: Duration) -> Rewards {
    let specs: Vec<_> = specs.iter().map(|spec| spec.parse().unwrap()).collect();
    Rewards::open(&specs, &[], timeout).unwrap()
}

/// Computes the first reward of each completion.
pub(super) fn score(rewards: &mut Rewards, samples: &[Sample]) -> Result<Vec<Option<f64>>, Failure> {
    let completions: Vec<_> = samples.iter().map(Sample::completion).collect();
    let scores = rewards.score(&completions, &[])?;
    Ok(scores.into_iter().map(|scores| scores[0]).collect())
}

/// Runs the body of a test that could hang, for two minutes at most.
pub(super) fn with_watchdog(test: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = channel();
    let worker = thread::spawn(move || {
        test();
        let _ = sender.send(());
    });
    if receiver.recv_timeout(Duration::from_secs(120)) == Err(RecvTimeoutError::Timeout) {
        panic!("the test hangs");
    }
    if let Err(panic) = worker.join() {
        resume_unwind(panic);
    }
}
