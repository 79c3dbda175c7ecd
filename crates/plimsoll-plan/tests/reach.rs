//! How far a small device goes with what may wait on the host: on paper, charges included.

use plimsoll_core::{Budget, Bytes, DType, HostSpec};
use plimsoll_plan::paper::paper;
use plimsoll_plan::search::{Answer, Pins, Question, search};
use plimsoll_program::models::decoder::{AdamState, Optimizer, Source};
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::check::check;
use std::time::Instant;

const ADAMW: Optimizer = Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full };

fn planned(name: &str, device: &str, host: Bytes, ask: impl FnOnce(Question) -> Answer) -> Answer {
    let config: ModelConfig = preset(name).expect("listed");
    let device = paper(device, Budget::Share(1.0)).expect("listed");
    let begin = Instant::now();
    let answer = ask(Question {
        config: &config,
        precision: DType::Bf16,
        sequence: 1024,
        sequences: 64,
        source: Source::Random { seed: 1 },
        optimizer: Some(ADAMW),
        evaluate: true,
        generation: None,
        device: &device,
        host: HostSpec { budget: host, memory_bytes_per_second: 30e9 },
        pins: Pins::default(),
    });
    let plan = &answer.plan;
    println!(
        "{name} on {}: {} ({:?} fits {}), host {}, {:.2} s a step, {} tried, planned in {:?}",
        device.name,
        plan.recipe,
        plan.devices[0].peak_bytes,
        plan.fits,
        plan.host.peak_bytes,
        plan.predicted.step_seconds,
        answer.tried.len(),
        begin.elapsed()
    );
    answer
}

#[test]
fn seven_billion_parameters_train_whole_on_a_card_of_24_gib() {
    let answer = planned("qwen2.5-7b", "rtx3090", Bytes::gib(128), |question| search(&question));
    assert!(answer.plan.fits);
    check(&answer.set).unwrap();
    assert!(answer.plan.host.peak_bytes > Bytes::gib(90), "masters, state and gradients are 16 bytes a parameter");
}

#[test]
fn a_small_card_and_a_large_host() {
    for (name, device, host) in [
        ("smollm2-360m", "rtx3070", 64),
        ("llama-3.2-3b", "rtx3070", 64),
        ("llama-3.1-8b", "rtx3070", 128),
        ("llama-2-13b", "rtx3090", 256),
    ] {
        planned(name, device, Bytes::gib(host), |question| search(&question));
    }
}
