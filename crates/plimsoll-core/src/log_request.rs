//! The logs of a run for other programs, as its run file asks for them (`[watch]`).

use std::path::Path;

/// The logs that a run asks for.
#[derive(Clone, Copy, Debug)]
pub struct LogRequest<'a> {
    /// Folder of the run.
    pub folder: &'a Path,
    /// Whether to write TensorBoard event files (`watch.tensorboard`).
    pub tensorboard: bool,
    /// URL of the webhook (`watch.webhook`); `None` for no messages.
    pub webhook: Option<&'a str>,
    /// Optimizer steps of one pass over the training data.
    pub steps_per_epoch: f64,
}
