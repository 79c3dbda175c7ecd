//! Progress of a download on standard error, if that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use plimsoll_core::printable::printable_message;

/// A line that shows the present file and the bytes of all files. It disappears when it is dropped.
pub struct DownloadBar {
    bar: ProgressBar,
}

impl DownloadBar {
    /// Creates the line, which appears with the first bytes. Nothing is shown if the user wants quiet, or if standard
    /// error is no terminal.
    pub fn new(is_quiet: bool) -> DownloadBar {
        let target = if is_quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        DownloadBar::on(target)
    }

    fn on(target: ProgressDrawTarget) -> DownloadBar {
        let bar = ProgressBar::with_draw_target(Some(0), target);
        let template = "{wide_msg} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
        bar.set_style(ProgressStyle::with_template(template).expect("a template of our own"));
        DownloadBar { bar }
    }

    /// Shows that `done_bytes` of `total_bytes` have arrived, and that `file` is downloaded now.
    pub fn update(&self, file: &str, done_bytes: u64, total_bytes: u64) {
        if self.bar.message() != file {
            self.bar.set_message(printable_message(file));
        }
        self.bar.set_length(total_bytes);
        self.bar.set_position(done_bytes);
    }

    /// Prints a note above the line.
    pub fn print_above(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }
}

impl Drop for DownloadBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::InMemoryTerm;

    #[test]
    fn bar_shows_file_and_bytes_then_disappears() {
        let terminal = InMemoryTerm::new(4, 100);
        let bar = DownloadBar::on(ProgressDrawTarget::term_like(Box::new(terminal.clone())));
        bar.update("model.safetensors", 3 << 20, 6 << 20);
        bar.bar.tick();
        let shown = terminal.contents();
        assert!(shown.starts_with("model.safetensors ") && shown.contains("3.00 MiB of 6.00 MiB"), "{shown}");
        drop(bar);
        assert_eq!(terminal.contents(), "");
    }
}
