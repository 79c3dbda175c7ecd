//! How far a small device goes, on paper and charges included: with what may wait on the host, and with the rungs that
//! the user allows.

use plimsoll_core::{Budget, Bytes, DType, HostSpec, Rung};
use plimsoll_plan::paper::paper;
use plimsoll_plan::search::{Answer, Lossy, Pins, Question, search};
use plimsoll_program::models::decoder::{AdamState, Optimizer, Source};
use plimsoll_program::models::preset;
use plimsoll_program::passes::check::check;
use std::time::Instant;

const ADAMW: Optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full };

struct Case {
    model: &'static str,
    device: &'static str,
    budget: Budget,
    host: Bytes,
    sequence: u64,
    allow: &'static [Rung],
}

impl Case {
    /// Plans, says what came of it, and checks that what fits is well-formed.
    fn planned(&self) -> Answer {
        let Case { model, device, budget, host, sequence, allow } = *self;
        let config = preset(model).expect("listed");
        let device = paper(device, budget).expect("listed");
        let begin = Instant::now();
        let answer = search(&Question {
            config: &config,
            precision: DType::Bf16,
            sequence,
            sequences: 65536 / sequence,
            source: Source::Random { seed: 1 },
            optimizer: Some(ADAMW),
            evaluate: true,
            generation: None,
            device: &device,
            host: HostSpec { budget: host, memory_bytes_per_second: 30e9 },
            lossy: Lossy { allow: allow.to_vec(), offer: Rung::ALL.to_vec(), ..Lossy::default() },
            pins: Pins::default(),
            rungs: vec![],
        });
        let plan = &answer.plan;
        println!(
            "{model} on {} of {}: {} {}, {} there and {} on the host, {:.2} s a step, {} tried, planned in {:.2?}",
            device.budget,
            device.name,
            if plan.fits { "fits:" } else { "does not fit:" },
            plan.recipe,
            plan.devices[0].peak_bytes,
            plan.host.peak_bytes,
            plan.predicted.step_seconds,
            answer.tried.len(),
            begin.elapsed()
        );
        for need in &plan.needs {
            println!("  needs {need:?}");
        }
        check(&answer.set).unwrap();
        assert!(!plan.fits || plan.devices[0].peak_bytes <= device.budget && plan.host.peak_bytes <= host);
        answer
    }
}

#[test]
fn seven_billion_parameters_train_whole_on_a_card_of_24_gib() {
    let case = Case {
        model: "qwen2.5-7b",
        device: "rtx3090",
        budget: Budget::Share(1.0),
        host: Bytes::gib(128),
        sequence: 1024,
        allow: &[],
    };
    let plan = case.planned().plan;
    assert!(plan.fits);
    assert!(plan.host.peak_bytes > Bytes::gib(90), "masters, state and gradients are 16 bytes a parameter");
}

#[test]
fn eight_billion_parameters_take_adapters_on_a_card_of_8_gib() {
    let case = Case {
        model: "llama-3.1-8b",
        device: "rtx3070",
        budget: Budget::Share(1.0),
        host: Bytes::gib(16),
        sequence: 4096,
        allow: &[Rung::Lora, Rung::Nf4],
    };
    let plan = case.planned().plan;
    assert!(plan.fits);
}

#[test]
fn thirteen_billion_parameters_take_adapters_in_12_gib() {
    let case = Case {
        model: "llama-2-13b",
        device: "rtx3090",
        budget: Budget::Amount(Bytes::gib(12)),
        host: Bytes::gib(16),
        sequence: 4096,
        allow: &[Rung::Lora, Rung::Nf4],
    };
    let plan = case.planned().plan;
    assert!(plan.fits);
}

#[test]
fn what_does_not_fit_says_what_would() {
    let case = Case {
        model: "llama-3.2-1b",
        device: "rtx3070",
        budget: Budget::Amount(Bytes::gib(3)),
        host: Bytes::gib(2),
        sequence: 1024,
        allow: &[],
    };
    let plan = case.planned().plan;
    assert!(!plan.fits);
}
