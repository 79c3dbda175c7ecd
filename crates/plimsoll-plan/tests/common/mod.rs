//! What tests ask the planner, and of which devices.
#![allow(dead_code, reason = "each file of tests needs some of it")]

use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, HostSpec, Link, OpRates, Rates};
use plimsoll_plan::search::{Lossy, Pins, Question};
use plimsoll_program::Share;
use plimsoll_program::models::ModelConfig;
use plimsoll_program::models::decoder::{AdamState, Optimizer, Source};

/// A model that is trained whole and evaluated, in f32, `[sequences, sequence]` tokens a step, with nothing on a host.
pub fn question<'a>(config: &'a ModelConfig, device: &'a DeviceSpec, [sequences, sequence]: [u64; 2]) -> Question<'a> {
    Question {
        config,
        precision: DType::F32,
        sequence,
        sequences,
        source: Source::Random { seed: 1 },
        optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full }),
        evaluate: true,
        generation: None,
        device,
        host: HostSpec::NONE,
        lossy: Lossy::default(),
        pins: Pins::default(),
        rungs: vec![],
        share: Share::ALONE,
    }
}

/// So much of a host.
pub fn host(budget: Bytes) -> HostSpec {
    HostSpec { budget, memory_bytes_per_second: 30e9, ..HostSpec::NONE }
}

/// A simulated device of so much of a core's speed, with this link to others.
pub fn device(name: &str, budget: Bytes, pace: f64, team_link: Link) -> DeviceSpec {
    let core = Rates {
        f32_flops: 100e9,
        bf16_flops: 200e9,
        memory_bytes_per_second: 20e9,
        op_seconds: 2e-6,
        host_link: Link { bytes_per_second: 16e9, latency_seconds: 10e-6 },
        measured: false,
        ops: OpRates::default(),
    };
    DeviceSpec {
        name: name.into(),
        kind: DeviceKind::Virtual,
        budget,
        charges: Bytes::mib(8),
        charges_measured: false,
        link_measured: false,
        nccl: None,
        threads: 1,
        rates: core.paced(pace),
        team_link,
    }
}
