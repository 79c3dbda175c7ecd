//! Plan requests and devices shared by the planner's tests.

use plimsoll_core::{Bytes, DType, DeviceKind, DeviceSpec, HostSpec, Link, OpRates, Rates};
use plimsoll_plan::search::{LossyOptions, PinnedChoices, PlanRequest};
use plimsoll_program::Share;
use plimsoll_program::models::ModelConfig;
use plimsoll_program::models::decoder::{AdamState, Optimizer, Scores, WeightSource};

/// Returns a request for full fine-tuning with evaluation in f32, with `[sequences, sequence]` tokens per step and no
/// host.
pub fn plan_request<'a>(
    config: &'a ModelConfig,
    device: &'a DeviceSpec,
    [sequences, sequence]: [u64; 2],
) -> PlanRequest<'a> {
    PlanRequest {
        config,
        precision: DType::F32,
        sequence,
        sequences,
        source: WeightSource::Random { seed: 1 },
        optimizer: Some(Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-8, decay: 0.1, state: AdamState::Full }),
        evaluate: true,
        scores: Scores::None,
        temperature: 1.0,
        generation: None,
        device,
        host: HostSpec::NONE,
        lossy: LossyOptions::default(),
        pins: PinnedChoices::default(),
        rungs: vec![],
        share: Share::SINGLE_DEVICE,
    }
}

/// Returns a host with this budget.
pub fn host(budget: Bytes) -> HostSpec {
    HostSpec { budget, memory_bytes_per_second: 30e9, ..HostSpec::NONE }
}

/// Returns a virtual device at `pace` times the rate of a core, with a team link.
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
