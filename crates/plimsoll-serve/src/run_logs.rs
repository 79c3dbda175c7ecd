//! The logs of a run for other programs, as the section `[watch]` of the run file asks for them.

use crate::webhook::Webhook;
use plimsoll_core::{Failure, LogRequest, Record, RunResult};
use plimsoll_watch::logging::message::{Messages, WebhookMessage};
use plimsoll_watch::logging::tensorboard::TensorBoard;
use plimsoll_watch::logging::{Background, warning_record};
use std::time::Duration;

/// Most events that may wait for TensorBoard's file, a few seconds of the shortest steps.
const TENSORBOARD_EVENTS_MAX: usize = 16 << 10;
/// Most messages that may wait for the webhook.
const WEBHOOK_MESSAGES_MAX: usize = 64;
/// Most time after a run in which TensorBoard's file is completed.
const TENSORBOARD_END: Duration = Duration::from_secs(5);
/// Most time after a run in which the last messages are posted. Two failed attempts take less.
const WEBHOOK_END: Duration = Duration::from_secs(15);

/// The logs of a run.
pub struct RunLogs {
    tensorboard: Option<Background<Record>>,
    webhook: Option<(Messages, Background<WebhookMessage>)>,
}

impl RunLogs {
    /// Starts the logs that a run asks for.
    ///
    /// # Errors
    /// The URL of the webhook is invalid.
    pub fn start(request: &LogRequest) -> Result<RunLogs, Failure> {
        let webhook = request.webhook.map(Webhook::new).transpose()?.map(|mut webhook| {
            let post = move |message: WebhookMessage| webhook.take(&message);
            (Messages::new(request.folder), Background::start("webhook", WEBHOOK_MESSAGES_MAX, post))
        });
        let tensorboard = request.tensorboard.then(|| {
            let mut file = TensorBoard::new(request.folder, request.steps_per_epoch);
            Background::start("tensorboard", TENSORBOARD_EVENTS_MAX, move |record: Record| file.take(&record))
        });
        Ok(RunLogs { tensorboard, webhook })
    }

    /// Hands an event of the run to its logs, without waiting for them. Returns warnings about the logs as events, in the
    /// form in which observers of the run receive them; they are not in `events.jsonl`.
    pub fn observe(&mut self, record: &Record) -> Vec<Record> {
        let mut warnings = Vec::new();
        if let Some(tensorboard) = &mut self.tensorboard {
            warnings.extend(tensorboard.send(record.clone()));
        }
        if let Some((messages, webhook)) = &mut self.webhook
            && let Some(message) = messages.of_event(record)
        {
            warnings.extend(webhook.send(message));
        }
        warnings.into_iter().map(warning_record).collect()
    }

    /// Completes the logs of a run that has ended with `outcome`. Waits for them, some seconds at most. Returns warnings
    /// like [`RunLogs::observe`].
    pub fn finish(self, outcome: Result<&RunResult, &Failure>) -> Vec<Record> {
        let mut warnings = Vec::new();
        if let Some((messages, mut webhook)) = self.webhook {
            warnings.extend(webhook.send(messages.of_outcome(outcome)));
            warnings.extend(webhook.finish(WEBHOOK_END));
        }
        warnings.extend(self.tensorboard.into_iter().flat_map(|file| file.finish(TENSORBOARD_END)));
        warnings.into_iter().map(warning_record).collect()
    }
}
