//! What is known of a run from its events so far, in one line. Pure: events in, text out.

use crate::text::{clock, count, percent, seconds};
use plimsoll_core::{Bytes, Event, Retreat};

/// Weight of the newest step in the running mean of the step time.
const NEWEST: f64 = 0.1;
/// Without a terminal at most about this many lines tell of steps, and as many as the next limit asks for.
const LINES: u64 = 50;
/// Without a terminal no more than these seconds of training pass without a line.
const SILENCE_SECONDS: f64 = 30.0;

/// The state of a run, made of its events alone.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// 0 where the run is measured in hours.
    steps: u64,
    product_flops: f64,
    peak_flops: f64,
    simulated: bool,
    /// Running mean of the seconds of a step, checkpoints and evaluations left out.
    step_seconds: Option<f64>,
    last: Option<LastStep>,
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
    /// Takes an event in; answers the whole line that tells of it to somebody without a terminal, if
    /// it is worth one: every evaluation, checkpoint and warning, but not every step.
    pub fn see(&mut self, event: &Event) -> Option<String> {
        match event {
            Event::Start { step, steps, product_flops, peak_flops, simulated, .. } => {
                (self.steps, self.product_flops, self.peak_flops) = (*steps, *product_flops, *peak_flops);
                self.simulated = *simulated;
                (*step > 1).then(|| format!("goes on at step {step}"))
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
                let due = self.steps > 0 && (step.is_multiple_of(self.steps.div_ceil(LINES)) || *step == self.steps);
                if !first && !due && self.silent_seconds < SILENCE_SECONDS {
                    return None;
                }
                self.silent_seconds = 0.0;
                Some(self.line())
            }
            Event::Evaluation { step, loss, exact_match, seconds: took, device, .. } => {
                let by = device.as_ref().map_or(String::new(), |device| format!(" by {device}"));
                let exact = exact_match.map(|share| format!(", exact match {}", percent(share, 1))).unwrap_or_default();
                Some(format!("evaluation after step {step}{by}: loss {loss:.4}{exact} ({})", seconds(*took)))
            }
            Event::Checkpoint { step, path, seconds: took } => {
                Some(format!("checkpoint after step {step}: {path} ({})", seconds(*took)))
            }
            Event::Retreat(retreat) => Some(retreat_line(retreat)),
            Event::Rest { step, device, celsius, throttled, celsius_after, max_celsius, seconds: took } => {
                let why = if *throttled { ", slowed down by heat" } else { "" };
                let limit = format!("of {max_celsius:.0} °C allowed");
                let end = format!("{celsius_after:.0} °C after {}", seconds(*took));
                Some(format!("rest after step {step}: {device} at {celsius:.0} {limit}{why}; {end}"))
            }
            Event::Lost { step, device, why, left, back_to } => {
                let from = back_to.map_or(String::new(), |step| match step {
                    0 => " from the beginning: the state, or a part of it, was on it".to_owned(),
                    step => format!(" from the checkpoint of step {step}: the state, or a part of it, was on it"),
                });
                let then = match &left[..] {
                    [] => "the run stops".to_owned(),
                    [one] => format!("{one} goes on{from}"),
                    left => format!("{} go on{from}", left.join(", ")),
                };
                // Most reasons are sentences about the device.
                let what = match why.starts_with(device) {
                    true => why.clone(),
                    false => format!("{device} ({why})"),
                };
                Some(format!("lost at step {step}: {what}; {then}"))
            }
            Event::Back { step, device, team } => {
                Some(format!("back after step {step}: {device}; {} go on", team.join(", ")))
            }
            Event::Warning { message } => Some(format!("warning: {message}")),
            Event::End { .. } => None,
        }
    }

    /// The run in one line of less than 80 columns:
    /// `120/450  loss 1.2345  rate 1.9e-3  48.7 k tok/s  38 % of peak  40.00 MiB  0:26 left`.
    pub fn line(&self) -> String {
        let (Some(last), Some(mean)) = (self.last, self.step_seconds) else { return "starting".to_owned() };
        let mut parts = vec![
            if self.steps > 0 { format!("{}/{}", last.step, self.steps) } else { format!("step {}", last.step) },
            format!("loss {:.4}", last.loss),
            format!("rate {:.1e}", last.learning_rate),
            format!("{} tok/s{}", count(last.tokens as f64 / mean), if self.simulated { " (simulated)" } else { "" }),
        ];
        if !self.simulated && self.peak_flops > 0.0 {
            parts.push(format!("{} of peak", percent(self.product_flops / mean / self.peak_flops, 0)));
        }
        parts.push(last.bytes.to_string());
        if self.steps > 0 {
            parts.push(format!("{} left", clock(self.steps.saturating_sub(last.step) as f64 * mean)));
        }
        parts.join("  ")
    }

    /// Steps done and steps in all.
    pub fn place(&self) -> (u64, u64) {
        (self.last.map_or(0, |last| last.step), self.steps)
    }
}

/// A retreat in one line: `retreat in step 12: cpu refused memory in backward; micro-batch 8 → 4, ...`.
pub fn retreat_line(retreat: &Retreat) -> String {
    let Retreat { step, why, from, to, arena_bytes_before, arena_bytes, seconds: took, .. } = retreat;
    let head = match retreat.sequences {
        Some(_) => "shared anew",
        None if arena_bytes > arena_bytes_before => "room again",
        None => "retreat",
    };
    let head = format!("{head} at step {step}: {why}");
    let shares = retreat.sequences.map(|[then, now]| format!("{} {then} -> {now} sequences, ", retreat.device));
    let shares = shares.unwrap_or_default();
    if from == to && arena_bytes == arena_bytes_before && shares.is_empty() {
        return format!("{head}; done again as it was");
    }
    let held = retreat.held_bytes_before.zip(retreat.held_bytes).map(|(then, now)| format!("held {then} -> {now}"));
    let steps = retreat.step_seconds_before.zip(retreat.step_seconds);
    let steps = steps.map(|(then, now)| format!("a step {} -> {}", seconds(then), seconds(now)));
    let measured: Vec<String> = held.into_iter().chain(steps).collect();
    let measured = if measured.is_empty() { String::new() } else { format!("; measured {}", measured.join(", ")) };
    format!(
        "{head}; from now on {shares}{to}: arena {arena_bytes_before} -> {arena_bytes}, a step {} -> {} predicted{measured} (took {})",
        seconds(retreat.predicted_step_seconds_before),
        seconds(retreat.predicted_step_seconds),
        seconds(*took),
    )
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
        }
    }

    #[test]
    fn a_run_is_one_line_of_less_than_eighty_columns() {
        let mut progress = Progress::default();
        assert_eq!(progress.line(), "starting");
        progress.see(&start(450));
        progress.see(&step(120, 0.08));
        let line = "120/450  loss 1.2346  rate 1.9e-3  51.2 k tok/s  38 % of peak  40.00 MiB  0:26 left";
        assert_eq!(progress.line(), line);
        assert_eq!(progress.place(), (120, 450));
    }

    #[test]
    fn without_a_measured_peak_no_share_of_it_is_claimed() {
        let mut progress = Progress::default();
        let mut event = start(9);
        if let Event::Start { peak_flops, .. } = &mut event {
            *peak_flops = 0.0;
        }
        progress.see(&event);
        progress.see(&step(1, 0.08));
        assert!(!progress.line().contains("peak"), "{}", progress.line());
    }

    #[test]
    fn the_speed_of_a_simulated_device_is_called_simulated() {
        let mut progress = Progress::default();
        let mut event = start(450);
        if let Event::Start { simulated, .. } = &mut event {
            *simulated = true;
        }
        progress.see(&event);
        progress.see(&step(120, 0.08));
        let line = "120/450  loss 1.2346  rate 1.9e-3  51.2 k tok/s (simulated)  40.00 MiB  0:26 left";
        assert_eq!(progress.line(), line);
    }

    #[test]
    fn lines_are_few_where_steps_are_many_and_quick() {
        let mut progress = Progress::default();
        assert_eq!(progress.see(&start(1000)), None);
        let told: Vec<u64> = (1..=1000).filter(|number| progress.see(&step(*number, 0.01)).is_some()).collect();
        assert_eq!((told.len(), told[0], told[1], told[50]), (51, 1, 20, 1000));
        let mut slow = Progress::default();
        slow.see(&start(1000));
        assert!((1..=10).all(|number| slow.see(&step(number, 31.0)).is_some()));
    }

    #[test]
    fn a_run_of_hours_claims_no_last_step() {
        let mut progress = Progress::default();
        progress.see(&start(0));
        let told: Vec<u64> = (1..=100).filter(|number| progress.see(&step(*number, 1.0)).is_some()).collect();
        assert_eq!(told, [1, 31, 61, 91]);
        let line = progress.line();
        assert!(line.starts_with("step 100  loss") && !line.contains("left"), "{line}");
    }

    #[test]
    fn what_happens_beside_steps_is_always_told() {
        let mut progress = Progress::default();
        for (device, by) in [(None, ""), (Some("cuda:1".to_owned()), " by cuda:1")] {
            let (loss, exact_match) = (0.5, Some(0.975));
            let evaluation = Event::Evaluation { step: 50, loss, exact_match, tokens: 10, seconds: 0.25, device };
            let told = format!("evaluation after step 50{by}: loss 0.5000, exact match 97.5 % (250.0 ms)");
            assert_eq!(progress.see(&evaluation), Some(told));
        }
        let checkpoint = Event::Checkpoint { step: 50, path: "runs/a/checkpoints/step-50".into(), seconds: 1.5 };
        assert_eq!(
            progress.see(&checkpoint).as_deref(),
            Some("checkpoint after step 50: runs/a/checkpoints/step-50 (1.50 s)")
        );
        let (device, throttled) = ("cpu".into(), false);
        let (celsius, celsius_after, max_celsius) = (86.0, 78.0, 85.0);
        let rest = Event::Rest { step: 51, device, celsius, throttled, celsius_after, max_celsius, seconds: 12.0 };
        assert_eq!(
            progress.see(&rest).as_deref(),
            Some("rest after step 51: cpu at 86 of 85 °C allowed; 78 °C after 12.00 s")
        );
        let lost = |left: &[&str]| {
            let left = left.iter().map(|name| (*name).to_owned()).collect();
            Event::Lost { step: 7, device: "virtual:c".into(), why: "it is gone".into(), left, back_to: None }
        };
        let told = |end: &str| Some(format!("lost at step 7: virtual:c (it is gone); {end}"));
        assert_eq!(progress.see(&lost(&["virtual:a"])), told("virtual:a goes on"));
        assert_eq!(progress.see(&lost(&["virtual:a", "virtual:b"])), told("virtual:a, virtual:b go on"));
        let (device, why) = ("b/cuda:0".to_owned(), "b/cuda:0 is gone: its process has ended".to_owned());
        let named = Event::Lost { step: 7, device, why, left: vec![], back_to: None };
        let once = "lost at step 7: b/cuda:0 is gone: its process has ended; the run stops";
        assert_eq!(progress.see(&named).as_deref(), Some(once));
        let back =
            Event::Back { step: 9, device: "virtual:c".into(), team: vec!["virtual:a".into(), "virtual:c".into()] };
        assert_eq!(progress.see(&back).as_deref(), Some("back after step 9: virtual:c; virtual:a, virtual:c go on"));
        let warning = Event::Warning { message: "the disk is slow".into() };
        assert_eq!(progress.see(&warning).as_deref(), Some("warning: the disk is slow"));
    }
}
