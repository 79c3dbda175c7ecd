//! How little memory a run can do with before it gets slower: what a worker is given that shares its device with others.

use super::{Answer, Question, search};
use plimsoll_core::{Bytes, DeviceSpec};

/// Searches before it is near enough.
const TRIES: u32 = 7;

/// The plan under the lowest load line that is predicted to take at most `slower` longer than the fastest (0.02 is 2 %),
/// found by halving; the fastest's seconds of a step come with it. It takes the same lossy rungs: less memory never costs
/// arithmetic here. Where nothing fits, the answer of [`search`].
pub fn lean(question: &Question, slower: f64) -> (Answer, f64) {
    let fastest = search(question);
    let seconds = fastest.plan.predicted.step_seconds;
    if !fastest.plan.fits {
        return (fastest, seconds);
    }
    let peak = |answer: &Answer| answer.plan.devices[0].peak_bytes;
    let (mut too_little, mut best) = (question.device.charges, fastest);
    for _ in 0..TRIES {
        let line = Bytes((too_little.0 + peak(&best).0) / 2);
        let device = DeviceSpec { budget: line, ..question.device.clone() };
        let leaner = search(&Question { device: &device, ..question.clone() });
        let plan = &leaner.plan;
        if plan.fits && plan.rungs == best.plan.rungs && plan.predicted.step_seconds <= seconds * (1.0 + slower) {
            best = leaner;
        } else {
            too_little = line;
        }
    }
    (best, seconds)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paper::paper;
    use crate::search::{Lossy, Pins};
    use plimsoll_core::{Budget, DType, HostSpec};
    use plimsoll_program::Share;
    use plimsoll_program::models::decoder::{AdamState, Optimizer, Source};
    use plimsoll_program::models::preset;

    #[test]
    fn a_lean_plan_takes_less_is_hardly_slower_and_fits_under_its_own_peak() {
        let config = preset("smollm2-135m").unwrap();
        let device = paper("rtx3090", Budget::DEVICE).unwrap();
        let adamw = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full };
        let question = Question {
            config: &config,
            precision: DType::Bf16,
            sequence: 512,
            sequences: 32,
            source: Source::Random { seed: 1 },
            optimizer: Some(adamw),
            evaluate: false,
            generation: None,
            device: &device,
            host: HostSpec::NONE,
            lossy: Lossy::default(),
            pins: Pins::default(),
            rungs: vec![],
            share: Share::ALONE,
        };
        let fastest = search(&question).plan;
        let (lean, seconds) = lean(&question, 0.02);
        let peak = lean.plan.devices[0].peak_bytes;
        assert_eq!(seconds, fastest.predicted.step_seconds);
        assert!(lean.plan.predicted.step_seconds <= seconds * 1.02);
        assert!(peak.0 < fastest.devices[0].peak_bytes.0 * 9 / 10, "{peak} of {}", fastest.devices[0].peak_bytes);
        let own = DeviceSpec { budget: peak, ..device.clone() };
        let under = search(&Question { device: &own, ..question }).plan;
        assert!(under.fits && under.predicted.step_seconds <= seconds * 1.02);
    }
}
