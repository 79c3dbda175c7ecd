//! The progress of a run as one line, from its events so far.

use crate::text::{clock, count, percent, seconds};
use plimsoll_core::{Bytes, Event, PreferenceFigures, Recovery, RoundFigures, format_count};

/// Weight of the newest step in the running mean of the step time, 0 to 1.
const NEWEST: f64 = 0.1;
/// Approximate number of step lines that a run prints without a terminal. [`MAX_SILENCE_SECONDS`] may demand more.
const MAX_STEP_LINES: u64 = 50;
/// Seconds of training after which the next completed step prints a line, if there is no terminal.
const MAX_SILENCE_SECONDS: f64 = 30.0;
/// Seconds of a step from which on its predicted time is printed at the start, and its elapsed time on a terminal.
pub(crate) const LONG_STEP_SECONDS: f64 = 10.0;

/// The state of a run, derived from its events alone.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Number of steps of the run; 0 if its length is given in hours.
    steps: u64,
    /// Number of floating-point operations in the matrix products of a step, without recompute.
    product_flops: f64,
    /// Peak floating-point operations per second of all devices together in matrix products; 0 if unknown.
    peak_flops: f64,
    simulated: bool,
    /// Names of the devices that train.
    devices: Vec<String>,
    /// Running mean of the seconds per step, without the time of checkpoints and evaluations. `None` before the first
    /// step.
    step_seconds: Option<f64>,
    /// The newest completed step; `None` before the first one.
    last: Option<LastStep>,
    /// How much the answers of the newest step are preferred; `None` without pairs of answers.
    preferences: Option<PreferenceFigures>,
    /// Figures of the completions of the newest step; `None` without sampled completions.
    round: Option<Box<RoundFigures>>,
    /// Seconds of training since the last step for which a line was printed.
    silent_seconds: f64,
}

#[derive(Clone, Copy, Debug)]
struct LastStep {
    step: u64,
    loss: f64,
    learning_rate: f64,
    tokens: u64,
    bytes: Bytes,
}

impl Progress {
    /// Updates the state with an event, and returns the line to print for it. Returns `None` for most steps, for the
    /// start of a run that does not resume and has short steps, and for the end of a run.
    pub fn update(&mut self, event: &Event) -> Option<String> {
        match event {
            Event::Start {
                step, steps, product_flops, peak_flops, simulated, devices, predicted_step_seconds, ..
            } => {
                (self.steps, self.product_flops, self.peak_flops) = (*steps, *product_flops, *peak_flops);
                (self.simulated, self.devices) = (*simulated, devices.clone());
                start_line(*step, *steps, *predicted_step_seconds)
            }
            Event::Step { step, loss, learning_rate, tokens, seconds, bytes, .. } => {
                let mean = self.step_seconds.map_or(*seconds, |mean| mean + NEWEST * (seconds - mean));
                self.step_seconds = Some(mean);
                let first = self.last.is_none();
                self.last = Some(LastStep {
                    step: *step,
                    loss: *loss,
                    learning_rate: *learning_rate,
                    tokens: *tokens,
                    bytes: *bytes,
                });
                self.silent_seconds += seconds;
                let due =
                    self.steps > 0 && (step.is_multiple_of(self.steps.div_ceil(MAX_STEP_LINES)) || *step == self.steps);
                if !first && !due && self.silent_seconds < MAX_SILENCE_SECONDS {
                    return None;
                }
                self.silent_seconds = 0.0;
                Some(self.line())
            }
            Event::Evaluation { step, loss, reward, exact_match, seconds: took, device, .. } => {
                let by = device.as_ref().map_or(String::new(), |device| format!(" by {device}"));
                let exact = exact_match.map(|share| format!(", exact match {}", percent(share, 1))).unwrap_or_default();
                let found = reward.map_or(format!("loss {loss:.4}"), |reward| format!("reward {reward:.3}"));
                Some(format!("evaluation after step {step}{by}: {found}{exact} ({})", seconds(*took)))
            }
            Event::Reference { rows, all_rows, seconds: took } => {
                let of_all = format_count(*all_rows, "row");
                Some(format!("log-probabilities before step 1: {rows} of {of_all} ({})", seconds(*took)))
            }
            Event::Preferences { evaluation: false, figures, .. } => {
                self.preferences = Some(*figures);
                None
            }
            Event::Preferences { step, figures, .. } => {
                Some(format!("preferences after step {step}: {}", preferences_text(figures)))
            }
            Event::Round { figures, .. } => {
                self.round = Some(figures.clone());
                None
            }
            Event::Checkpoint { step, path, seconds: took } => {
                Some(format!("checkpoint after step {step}: {path} ({})", seconds(*took)))
            }
            Event::Recovery(recovery) => Some(recovery_line(recovery)),
            Event::ThermalPause { step, device, celsius, throttled, celsius_after, max_celsius, seconds: took } => {
                let throttled = if *throttled { ", throttled by heat" } else { "" };
                let limit = format!("(limit {max_celsius:.0} °C)");
                let end = format!("{celsius_after:.0} °C after {}", seconds(*took));
                Some(format!("thermal pause after step {step}: {device} at {celsius:.0} °C {limit}{throttled}; {end}"))
            }
            Event::DeviceLost { step, device, reason, remaining_devices, resumed_from_step } => {
                self.devices.clone_from(remaining_devices);
                Some(device_lost_line(*step, device, reason, remaining_devices, *resumed_from_step))
            }
            Event::DeviceReturned { step, device, team } => {
                self.devices.clone_from(team);
                Some(format!("device returned after step {step}: {device}; training continues on {}", team.join(", ")))
            }
            Event::Warning { message } => Some(format!("warning: {message}")),
            Event::End { .. } => None,
        }
    }

    /// Formats the newest step as one line:
    /// `120/450  loss 1.2345  rate 1.9e-3  48.7 k tok/s  38 % of peak  0:26 left  40.00 MiB on cpu`. Of several devices,
    /// all figures are sums: `80.00 MiB on 2 devices`. Before the first step, returns `starting`.
    pub fn line(&self) -> String {
        let (Some(last), Some(tokens_per_second)) = (self.last, self.tokens_per_second()) else {
            return "starting".to_owned();
        };
        let mut parts = vec![
            if self.steps > 0 { format!("{}/{}", last.step, self.steps) } else { format!("step {}", last.step) },
            if last.loss.is_nan() { "no label".to_owned() } else { format!("loss {:.4}", last.loss) },
        ];
        parts.extend(self.preferences.map(|figures| format!("prefers {}", percent(figures.accuracy, 0))));
        if let Some(figures) = &self.round {
            let length = figures.completions.mean_length;
            parts.extend([format!("reward {:.3}", figures.reward), format!("length {length:.0}")]);
        }
        parts.extend([
            format!("rate {:.1e}", last.learning_rate),
            format!("{} tok/s{}", count(tokens_per_second), if self.simulated { " (simulated)" } else { "" }),
        ]);
        parts.extend(self.peak_share().map(|share| format!("{} of peak", percent(share, 0))));
        parts.extend(self.seconds_left().map(|left| format!("{} left", clock(left))));
        parts.push(match &*self.devices {
            [] => last.bytes.to_string(),
            [device] => format!("{} on {device}", last.bytes),
            several => format!("{} on {} devices", last.bytes, several.len()),
        });
        parts.join("  ")
    }

    /// Returns whether the speed is that of simulated devices.
    pub fn is_simulated(&self) -> bool {
        self.simulated
    }

    /// Returns the running mean of the seconds of a step; `None` before the first step.
    pub fn step_seconds(&self) -> Option<f64> {
        self.step_seconds
    }

    /// Returns the tokens (including padding) per second, from the running mean; `None` before the first step.
    pub fn tokens_per_second(&self) -> Option<f64> {
        Some(self.last?.tokens as f64 / self.step_seconds?)
    }

    /// Returns the part of the devices' peak rate of matrix products that is reached. `None` if the peak is unknown, or
    /// if devices are simulated.
    pub fn peak_share(&self) -> Option<f64> {
        let is_known = !self.simulated && self.peak_flops > 0.0;
        self.step_seconds.filter(|_| is_known).map(|mean| self.product_flops / mean / self.peak_flops)
    }

    /// Returns the predicted seconds until the last step. `None` before the first step, and for a run whose length is
    /// given in hours.
    pub fn seconds_left(&self) -> Option<f64> {
        let steps = self.steps.checked_sub(self.last?.step).filter(|_| self.steps > 0);
        Some(steps? as f64 * self.step_seconds?)
    }

    /// Returns the newest completed step, counted from 1, and the number of all steps of the run. The former is 0
    /// before the first step. The latter is 0 if the length of the run is given in hours.
    pub fn steps_done_and_total(&self) -> (u64, u64) {
        (self.last.map_or(0, |last| last.step), self.steps)
    }
}

/// Formats the line at the start of a run, before its next step `step`. Names the predicted time if steps are long.
/// Returns `None` if there is nothing to say.
fn start_line(step: u64, steps: u64, step_seconds: f64) -> Option<String> {
    let resuming = (step > 1).then(|| format!("resuming at step {step}"));
    let all = steps.saturating_add(1).saturating_sub(step) as f64 * step_seconds;
    let all = if steps > 0 { format!(", all steps {}", seconds(all)) } else { String::new() };
    let long =
        (step_seconds >= LONG_STEP_SECONDS).then(|| format!("a step takes {}{all} (predicted)", seconds(step_seconds)));
    let parts: Vec<String> = resuming.into_iter().chain(long).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Formats the message that a device was lost, as one line. The run continues on `remaining_devices`; if there are
/// none, it stops. `resumed_from_step` is the step of the checkpoint to which the run goes back: 0 for the start of the
/// run, `None` if it does not go back.
fn device_lost_line(
    step: u64,
    device: &str,
    reason: &str,
    remaining_devices: &[String],
    resumed_from_step: Option<u64>,
) -> String {
    let origin = match resumed_from_step {
        None => String::new(),
        Some(0) => " from the start, because the lost device held weights or optimizer state".to_owned(),
        Some(step) => {
            format!(" from the checkpoint of step {step}, because the lost device held weights or optimizer state")
        }
    };
    let outcome = match remaining_devices {
        [] => "the run stops".to_owned(),
        devices => format!("training continues on {}{origin}", devices.join(", ")),
    };
    // Most reasons already name the device.
    let cause = if reason.starts_with(device) { reason.to_owned() } else { format!("{device} ({reason})") };
    format!("device lost at step {step}: {cause}; {outcome}")
}

/// Formats a recovery as one line: `recovery at step 12: cpu refused memory in backward; now micro-batch 4, ...`. A
/// change of the device's share is a short line; `events.jsonl` has the rest.
pub fn recovery_line(recovery: &Recovery) -> String {
    let Recovery { step, reason, from, to, arena_bytes_before, arena_bytes, seconds: took, .. } = recovery;
    if let Some([then, now]) = recovery.sequences {
        let [before, after] = [recovery.predicted_step_seconds_before, recovery.predicted_step_seconds].map(seconds);
        let share = format!("{} {then} -> {now} sequences", recovery.device);
        return format!("shares at step {step}: {share}, step {before} -> {after} (predicted)");
    }
    let kind = if arena_bytes > arena_bytes_before { "larger plan" } else { "recovery" };
    let head = format!("{kind} at step {step}: {reason}");
    if from == to && arena_bytes == arena_bytes_before {
        return format!("{head}; repeated without changes");
    }
    let memory =
        recovery.held_bytes_before.zip(recovery.held_bytes).map(|(then, now)| format!("memory {then} -> {now}"));
    let steps = recovery.step_seconds_before.zip(recovery.step_seconds);
    let steps = steps.map(|(then, now)| format!("step {} -> {}", seconds(then), seconds(now)));
    let measured: Vec<String> = memory.into_iter().chain(steps).collect();
    let measured = if measured.is_empty() { String::new() } else { format!("; measured {}", measured.join(", ")) };
    format!(
        "{head}; now {to}: arena {arena_bytes_before} -> {arena_bytes}, step {} -> {} (predicted){measured} (took {})",
        seconds(recovery.predicted_step_seconds_before),
        seconds(recovery.predicted_step_seconds),
        seconds(*took),
    )
}

/// Describes how often a model prefers the chosen answer: `the chosen answer in 75.0 % of 40 pairs, reward margin 0.123`.
pub fn preferences_text(figures: &PreferenceFigures) -> String {
    let pairs = format_count(figures.pairs, "pair");
    format!("the chosen answer in {} of {pairs}, reward margin {:.3}", percent(figures.accuracy, 1), figures.margin())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn start(steps: u64) -> Event {
        Event::Start {
            step: 1,
            steps,
            parameters: 330_000,
            arena_bytes: Bytes::mib(36),
            predicted_step_seconds: 0.08,
            product_flops: 6e9,
            peak_flops: 2e11,
            simulated: false,
            devices: vec!["cpu".into()],
            environment: None,
        }
    }

    pub(crate) fn step(step: u64, seconds: f64) -> Event {
        Event::Step {
            step,
            loss: 1.23456,
            norm: 0.5,
            learning_rate: 1.93e-3,
            tokens: 4096,
            labelled_tokens: 1024,
            seconds,
            bytes: Bytes::mib(40),
            memory: None,
        }
    }

    #[test]
    fn progress_line_names_its_device() {
        let mut progress = Progress::default();
        assert_eq!(progress.line(), "starting");
        progress.update(&start(450));
        progress.update(&step(120, 0.08));
        let line = "120/450  loss 1.2346  rate 1.9e-3  51.2 k tok/s  38 % of peak  0:26 left  40.00 MiB on cpu";
        assert_eq!(progress.line(), line);
        assert_eq!(progress.steps_done_and_total(), (120, 450));
    }

    #[test]
    fn bytes_of_a_team_are_a_sum() {
        let mut progress = Progress::default();
        let mut event = start(450);
        if let Event::Start { devices, .. } = &mut event {
            devices.push("cuda:0".into());
        }
        progress.update(&event);
        progress.update(&step(120, 0.08));
        assert!(progress.line().ends_with("  0:26 left  40.00 MiB on 2 devices"), "{}", progress.line());
        progress.update(&device_lost(&["cpu"]));
        assert!(progress.line().ends_with("  0:26 left  40.00 MiB on cpu"), "{}", progress.line());
    }

    #[test]
    fn long_steps_are_announced_at_start() {
        assert_eq!(start_line(1, 20, 9.0), None);
        assert_eq!(start_line(7, 20, 9.0).as_deref(), Some("resuming at step 7"));
        let long = "a step takes 11 min 40 s, all steps 3 h 53 min (predicted)";
        assert_eq!(start_line(1, 20, 700.0).as_deref(), Some(long));
        let hours = "resuming at step 7; a step takes 11 min 40 s (predicted)";
        assert_eq!(start_line(7, 0, 700.0).as_deref(), Some(hours));
    }

    #[test]
    fn unknown_peak_is_not_shown() {
        let mut progress = Progress::default();
        let mut event = start(9);
        if let Event::Start { peak_flops, .. } = &mut event {
            *peak_flops = 0.0;
        }
        progress.update(&event);
        progress.update(&step(1, 0.08));
        assert!(!progress.line().contains("peak"), "{}", progress.line());
    }

    #[test]
    fn simulated_speed_is_labelled() {
        let mut progress = Progress::default();
        let mut event = start(450);
        if let Event::Start { simulated, .. } = &mut event {
            *simulated = true;
        }
        progress.update(&event);
        progress.update(&step(120, 0.08));
        let line = "120/450  loss 1.2346  rate 1.9e-3  51.2 k tok/s (simulated)  0:26 left  40.00 MiB on cpu";
        assert_eq!(progress.line(), line);
    }

    #[test]
    fn quick_steps_print_few_lines() {
        let mut progress = Progress::default();
        assert_eq!(progress.update(&start(1000)), None);
        let printed: Vec<u64> = (1..=1000).filter(|number| progress.update(&step(*number, 0.01)).is_some()).collect();
        assert_eq!((printed.len(), printed[0], printed[1], printed[50]), (51, 1, 20, 1000));
        let mut slow = Progress::default();
        slow.update(&start(1000));
        assert!((1..=10).all(|number| slow.update(&step(number, 31.0)).is_some()));
    }

    #[test]
    fn run_of_hours_shows_no_total() {
        let mut progress = Progress::default();
        progress.update(&start(0));
        let printed: Vec<u64> = (1..=100).filter(|number| progress.update(&step(*number, 1.0)).is_some()).collect();
        assert_eq!(printed, [1, 31, 61, 91]);
        let line = progress.line();
        assert!(line.starts_with("step 100  loss") && !line.contains("left"), "{line}");
    }

    #[test]
    fn events_other_than_steps_always_print() {
        let mut progress = Progress::default();
        for (device, by) in [(None, ""), (Some("cuda:1".to_owned()), " by cuda:1")] {
            let (loss, exact_match) = (0.5, Some(0.975));
            let (tokens, seconds, reward) = (10, 0.25, None);
            let evaluation = Event::Evaluation { step: 50, loss, reward, exact_match, tokens, seconds, device };
            let told = format!("evaluation after step 50{by}: loss 0.5000, exact match 97.5 % (250.0 ms)");
            assert_eq!(progress.update(&evaluation), Some(told));
        }
        let checkpoint = Event::Checkpoint { step: 50, path: "runs/a/checkpoints/step-50".into(), seconds: 1.5 };
        assert_eq!(
            progress.update(&checkpoint).as_deref(),
            Some("checkpoint after step 50: runs/a/checkpoints/step-50 (1.50 s)")
        );
        let (device, throttled) = ("cpu".into(), false);
        let (celsius, celsius_after, max_celsius) = (86.0, 78.0, 85.0);
        let pause =
            Event::ThermalPause { step: 51, device, celsius, throttled, celsius_after, max_celsius, seconds: 12.0 };
        assert_eq!(
            progress.update(&pause).as_deref(),
            Some("thermal pause after step 51: cpu at 86 °C (limit 85 °C); 78 °C after 12.00 s")
        );
        let told = |end: &str| Some(format!("device lost at step 7: virtual:c (it is gone); {end}"));
        assert_eq!(progress.update(&device_lost(&["virtual:a"])), told("training continues on virtual:a"));
        assert_eq!(
            progress.update(&device_lost(&["virtual:a", "virtual:b"])),
            told("training continues on virtual:a, virtual:b")
        );
        let (device, reason) = ("b/cuda:0".to_owned(), "b/cuda:0 is gone: its process has ended".to_owned());
        let named = Event::DeviceLost { step: 7, device, reason, remaining_devices: vec![], resumed_from_step: None };
        let once = "device lost at step 7: b/cuda:0 is gone: its process has ended; the run stops";
        assert_eq!(progress.update(&named).as_deref(), Some(once));
        let back = Event::DeviceReturned {
            step: 9,
            device: "virtual:c".into(),
            team: vec!["virtual:a".into(), "virtual:c".into()],
        };
        assert_eq!(
            progress.update(&back).as_deref(),
            Some("device returned after step 9: virtual:c; training continues on virtual:a, virtual:c")
        );
        let warning = Event::Warning { message: "the disk is slow".into() };
        assert_eq!(progress.update(&warning).as_deref(), Some("warning: the disk is slow"));
    }

    /// Returns the event that `virtual:c` was lost at step 7 and these devices are left.
    fn device_lost(left: &[&str]) -> Event {
        Event::DeviceLost {
            step: 7,
            device: "virtual:c".into(),
            reason: "it is gone".into(),
            remaining_devices: left.iter().map(|name| (*name).to_owned()).collect(),
            resumed_from_step: None,
        }
    }
}
