//! A GPU that adopts another plan loads new code at the adoption, on the stand-in, which runs on the CPU. This test has
//! a process of its own, because it measures free GPU memory.

mod cuda_stand_in;

use plimsoll_core::{DType, RecomputeLevel, Space};
use plimsoll_device::cuda::executor::OpenedGpu;
use plimsoll_device::device::{AvailableMemory, Device};
use plimsoll_program::models::config::{Extras, ModelConfig, ModelType, RopeScaling};
use plimsoll_program::models::decoder::{
    AdamState, Base, BuildOptions, Method, Optimizer, Scores, Training, WeightSource, build,
};
use plimsoll_program::workspace::Kernels;
use plimsoll_program::{Lifetime, Placement, ProgramKind, ProgramSet, TensorId};

fn programs(micro_batch: u64) -> ProgramSet {
    let config = ModelConfig {
        model_type: ModelType::Llama,
        hidden: 24,
        layers: 2,
        heads: 3,
        kv_heads: 1,
        head_dim: 8,
        ffn: 40,
        vocab: 61,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::None,
        qkv_bias: false,
        attention_out_bias: false,
        ffn_bias: false,
        qk_norm: None,
        max_positions: 64,
        bos: None,
        eos: vec![],
        init_std: 0.1,
        extras: Extras::default(),
    };
    build(&BuildOptions {
        config: &config,
        layers: 0..config.layers,
        precision: DType::F32,
        kernels: Kernels::Cuda,
        sequence: 8,
        micro_batch,
        source: WeightSource::Random { seed: 4 },
        method: Method::Full,
        base: Base::Plain,
        streamed_head: false,
        training: Some(Training {
            optimizer: Optimizer::AdamW { betas: [0.9, 0.95], eps: 1e-3, decay: 0.1, state: AdamState::Full },
            recompute: vec![RecomputeLevel::Nothing; 2],
        }),
        evaluate: false,
        scores: Scores::None,
        temperature: 1.0,
        generation: None,
        files: true,
    })
}

/// Places persistent tensors lowest, as the planner does, without overlaps, and leaves `room` bytes unused at the top.
fn disjoint_placement(set: &ProgramSet, room: u64) -> Placement {
    let mut order: Vec<usize> = (0..set.tensors.len()).collect();
    order.sort_by_key(|&index| set.tensors[index].lifetime != Lifetime::Persistent);
    let mut placement = Placement { offsets: vec![Vec::new(); set.tensors.len()], ..Placement::default() };
    for index in order {
        let tensor = &set.tensors[index];
        let end = match tensor.space {
            Space::Device => Some(&mut placement.arena_bytes),
            Space::Host => Some(&mut placement.host_bytes),
            Space::Scratch | Space::File => None,
        };
        let bytes = tensor.bytes().next_multiple_of(256);
        let first = end.map(|end| std::mem::replace(end, *end + bytes * u64::from(tensor.slots)));
        placement.offsets[index] = (0..tensor.slots).map(|slot| Some(first? + u64::from(slot) * bytes)).collect();
    }
    placement.arena_bytes += room;
    placement
}

/// Runs a step on zeros, which are valid tokens, labels and positions.
fn step(device: &mut dyn Device, set: &ProgramSet) {
    for name in ["train.tokens", "train.labels", "train.positions", "train.document_start", "train.token_weights"] {
        let tensor = set.find(name).unwrap();
        device.write(tensor, 0, &vec![0; set.tensor(tensor).bytes() as usize]);
    }
    for program in [
        ProgramKind::BeginStep,
        ProgramKind::Forward,
        ProgramKind::Backward,
        ProgramKind::GradientNorm,
        ProgramKind::Update,
    ] {
        device.run(program).unwrap();
    }
    device.synchronize().unwrap();
}

/// Returns the bytes of all persistent tensors on the device.
fn persistent_bytes(device: &mut dyn Device, set: &ProgramSet) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for (number, tensor) in set.tensors.iter().enumerate() {
        let trained =
            tensor.category == plimsoll_core::Category::Weight || tensor.category == plimsoll_core::Category::Optimizer;
        if trained && tensor.lifetime == Lifetime::Persistent && tensor.space == Space::Device {
            for slot in 0..tensor.slots {
                let mut bytes = vec![0; tensor.bytes() as usize];
                device.read(TensorId(number as u32), slot, &mut bytes);
                all.push((format!("{}.{slot}", tensor.name), bytes));
            }
        }
    }
    all
}

#[test]
#[ignore = "needs g++: cargo xtask cuda-check"]
fn new_code_loads_at_adoption() {
    let (large, small) = (programs(16), programs(1));
    let opened = cuda_stand_in::open(small.clone(), disjoint_placement(&small, 0), DType::F32, None).unwrap();
    let OpenedGpu { mut device, .. } = opened;
    device.run(ProgramKind::Load).unwrap();
    device.run(ProgramKind::InitOptimizer).unwrap();
    step(&mut *device, &small);
    let trained = persistent_bytes(&mut *device, &small);
    let held = |room: &AvailableMemory| room.memory.free.0 + room.held_bytes.0;
    let before = device.available_memory().unwrap();
    // Products of other sizes need other kernels of the library. The first plan has room to warm up each op; the second
    // needs overlapping operands.
    for (set, room) in [(&large, 8 << 20), (&programs(64), 0)] {
        device.adopt(set.clone(), disjoint_placement(set, room)).unwrap();
        let after = device.available_memory().unwrap();
        assert_eq!(held(&after), held(&before), "charges include the new code");
        assert_eq!(persistent_bytes(&mut *device, set), trained, "persistent tensors keep every bit");
        assert!(!device.memory().has_stray_writes(Space::Device));
        step(&mut *device, set);
        assert_eq!(device.available_memory().unwrap().memory.free, after.memory.free, "a step allocates no memory");
        device.adopt(small.clone(), disjoint_placement(&small, 0)).unwrap();
        // Restore the initial state.
        device.run(ProgramKind::Load).unwrap();
        device.run(ProgramKind::InitOptimizer).unwrap();
        step(&mut *device, &small);
        assert_eq!(persistent_bytes(&mut *device, &small), trained);
    }
}
