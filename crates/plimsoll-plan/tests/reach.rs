//! How far a small device goes, on paper and charges included: with what may wait on the host, and with the rungs that
//! the user allows.

mod common;

use common::question;
use plimsoll_core::{Budget, Bytes, Class, DType, DeviceKind, DeviceSpec, Offload, Recipe, RecomputeLevel, Rung};
use plimsoll_plan::paper::paper;
use plimsoll_plan::search::{Answer, Lossy, Pins, Question, plan_of, search};
use plimsoll_program::models::decoder::{Base, Method, head_blocks};
use plimsoll_program::models::preset;
use plimsoll_program::passes::check::check;
use plimsoll_program::workspace::Kernels;
use std::time::Instant;

/// What is planned; lossy rungs are offered.
#[derive(Clone)]
struct Case {
    model: &'static str,
    device: &'static str,
    budget: Budget,
    host: Bytes,
    sequence: u64,
    tokens: u64,
    allow: Vec<Rung>,
    lossy: Lossy,
}

impl Case {
    /// Plans, says what came of it, and checks that what fits is well-formed.
    fn planned(&self) -> Answer {
        self.offered(&Rung::ALL)
    }

    /// The same where what does not fit is offered these rungs.
    fn offered(&self, offer: &[Rung]) -> Answer {
        let Case { model, device, budget, host, sequence, tokens, .. } = *self;
        let config = preset(model).expect("listed");
        let device = paper(device, budget).expect("listed");
        let begin = Instant::now();
        let answer = search(&Question {
            precision: DType::Bf16,
            host: common::host(host),
            lossy: Lossy { allow: self.allow.clone(), offer: offer.to_vec(), ..self.lossy.clone() },
            ..question(&config, &device, [tokens / sequence, sequence])
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

/// Adapters of rank 16 on every projection of a base in nf4.
fn adapters_in_4_bit() -> Lossy {
    let lossy = Lossy::default();
    Lossy { method: Method::Lora(lossy.lora.clone()), base: Base::Nf4, ..lossy }
}

#[test]
fn seven_billion_parameters_train_whole_on_a_card_of_24_gib() {
    let case = Case {
        model: "qwen2.5-7b",
        device: "rtx3090",
        budget: Budget::Share(1.0),
        host: Bytes::gib(128),
        sequence: 1024,
        tokens: 65_536,
        allow: vec![],
        lossy: Lossy::default(),
    };
    let plan = case.planned().plan;
    assert!(plan.fits);
    // Master, moments and gradient in f32 and the weight in bf16: 18 bytes a parameter, of which the card holds some.
    let short = Case { host: Bytes::gib(110), ..case }.planned().plan;
    assert!(short.fits && short.host.peak_bytes > Bytes::gib(100));
    assert!(plan.predicted.step_seconds < short.predicted.step_seconds, "what more of the host is for");
}

#[test]
fn eight_billion_parameters_take_adapters_on_a_card_of_8_gib() {
    let case = Case {
        model: "llama-3.1-8b",
        device: "rtx3070",
        budget: Budget::Share(1.0),
        host: Bytes::gib(16),
        sequence: 4096,
        tokens: 65_536,
        allow: vec![],
        lossy: adapters_in_4_bit(),
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
        tokens: 65_536,
        allow: vec![],
        lossy: adapters_in_4_bit(),
    };
    let plan = case.planned().plan;
    assert!(plan.fits);
}

#[test]
fn what_does_not_fit_says_what_would_and_each_of_it_does() {
    let case = Case {
        model: "smollm2-135m",
        device: "rtx3070",
        budget: Budget::Amount(Bytes::mib(900)),
        host: Bytes::mib(256),
        sequence: 512,
        tokens: 65_536,
        allow: vec![],
        lossy: Lossy::default(),
    };
    let plan = case.planned().plan;
    assert!(!plan.fits);
    assert!(plan.needs.len() > 3, "{:?}", plan.needs);
    let host = plan.needs.iter().filter_map(|need| need.host_bytes);
    assert_eq!(host.count(), 1, "more of the host would do: {:?}", plan.needs);
    for need in &plan.needs {
        let budget = Budget::Amount(need.budget_bytes);
        let host = need.host_bytes.unwrap_or(case.host);
        let enough = Case { allow: need.allow.clone(), budget, host, ..case.clone() };
        assert!(enough.planned().plan.fits, "{need:?}");
    }
    let least = plan.needs[0].budget_bytes.saturating_sub(Bytes::mib(1));
    assert!(!Case { budget: Budget::Amount(least), ..case }.planned().plan.fits);
}

/// What is gained by less than this part is not looked for.
const LITTLE: f64 = 1.006;

/// Plans a case with more and more room; says so of each step.
fn never_slower(case: &Case, rooms: impl Iterator<Item = (Budget, Bytes)>) {
    let mut before = f64::INFINITY;
    for (budget, host) in rooms {
        let plan = Case { budget, host, ..case.clone() }.offered(&[]).plan;
        let seconds = if plan.fits { plan.predicted.step_seconds } else { f64::INFINITY };
        assert!(seconds <= before * LITTLE, "{budget:?}, {host} on the host: {seconds} s, with less {before} s");
        before = before.min(seconds);
    }
    assert!(before.is_finite(), "something fits");
}

#[test]
fn more_of_the_host_never_makes_a_step_slower() {
    let small = Case {
        model: "smollm2-135m",
        device: "rtx3070",
        budget: Budget::Amount(Bytes::gib(3)),
        host: Bytes::ZERO,
        sequence: 512,
        tokens: 65_536,
        allow: vec![],
        lossy: Lossy::default(),
    };
    for gib in [1, 3] {
        let budget = Budget::Amount(Bytes::gib(gib));
        never_slower(&small, (0..=8).map(|step| (budget, Bytes::mib(300 * step))));
    }
    let adapters = Case { model: "llama-3.1-8b", sequence: 4096, lossy: adapters_in_4_bit(), ..small.clone() };
    never_slower(&adapters, (2..=6).map(|gib| (Budget::DEVICE, Bytes::gib(gib))));
    never_slower(&adapters, (2..=6).map(|gib| (Budget::Share(1.0), Bytes::gib(gib))));
    let whole = Case { model: "qwen2.5-7b", device: "rtx3090", sequence: 1024, ..small };
    never_slower(&whole, (105..=130).step_by(5).map(|gib| (Budget::Share(1.0), Bytes::gib(gib))));
}

#[test]
fn more_of_the_device_never_makes_a_step_slower() {
    let case = Case {
        model: "smollm2-135m",
        device: "rtx3070",
        budget: Budget::Share(1.0),
        host: Bytes::gib(1),
        sequence: 512,
        tokens: 65_536,
        allow: vec![],
        lossy: Lossy::default(),
    };
    for host in [Bytes::ZERO, Bytes::gib(1), Bytes::gib(3)] {
        never_slower(&case, (2..=8).map(|step| (Budget::Amount(Bytes::mib(500 * step)), host)));
    }
    // Steps of few tokens, in which copies take longest.
    let few = Case { model: "tinyllama-1.1b", device: "rtx3090", tokens: 4096, ..case };
    never_slower(&few, (12..=20).map(|step| (Budget::Amount(Bytes::mib(500 * step)), Bytes::gib(100))));
}

#[test]
fn levels_that_are_pinned_as_they_would_be_chosen_change_nothing() {
    let config = preset("smollm2-360m").unwrap();
    let device = paper("rtx3070", Budget::Amount(Bytes::gib(5))).unwrap();
    let open = Question {
        precision: DType::Bf16,
        host: common::host(Bytes::gib(16)),
        ..question(&config, &device, [16, 1024])
    };
    let free = search(&open).plan;
    assert!(!free.recipe.offload.is_nothing(), "{}", free.recipe);
    let pins = Pins { recompute: Some(free.recipe.recompute.clone()), ..Pins::default() };
    let pinned = search(&Question { pins, ..open }).plan;
    assert_eq!(pinned.recipe.recompute, free.recipe.recompute);
    let (pinned, free) = (pinned.predicted.step_seconds, free.predicted.step_seconds);
    assert!(pinned <= free * LITTLE, "{pinned} s, free {free} s");
}

#[test]
fn a_refusal_names_the_least_of_the_host_and_only_rungs_that_are_taken() {
    let case = Case {
        model: "llama-3.1-8b",
        device: "rtx3070",
        budget: Budget::DEVICE,
        host: Bytes::gib(1),
        sequence: 4096,
        tokens: 65_536,
        allow: vec![Rung::Int8, Rung::Nf4, Rung::Lora],
        lossy: Lossy::default(),
    };
    let plan = case.planned().plan;
    assert!(!plan.fits);
    for need in &plan.needs {
        assert!(!(need.allow.contains(&Rung::Int8) && need.allow.contains(&Rung::Nf4)), "{need:?}");
    }
    let host = plan.needs.iter().find(|need| need.host_bytes.is_some()).expect("more of the host would do");
    let bytes = host.host_bytes.expect("it is of the host");
    assert!(bytes < Bytes::gib(4), "adapters over 4 bits need little there: {host:?}");
    let enough = Case { host: bytes, allow: host.allow.clone(), ..case.clone() };
    assert!(enough.planned().plan.fits, "{host:?}");
    let short = Case { host: Bytes(bytes.0 * 9 / 10), ..enough };
    assert!(!short.planned().plan.fits, "nor does much less: {host:?}");
}

#[test]
fn who_allows_a_coarse_base_loses_no_more_than_adapters_where_they_are_enough() {
    let case = Case {
        model: "llama-3.1-8b",
        device: "rtx3090",
        budget: Budget::DEVICE,
        host: Bytes::ZERO,
        sequence: 1024,
        tokens: 65_536,
        allow: vec![],
        lossy: Lossy::default(),
    };
    assert!(!case.planned().plan.fits, "something has to be lost");
    for allow in [vec![Rung::Nf4], vec![Rung::Int8], vec![Rung::Bf16, Rung::Int8, Rung::Nf4]] {
        assert_eq!(Case { allow, ..case.clone() }.planned().plan.rungs, [Rung::Lora]);
    }
    // Where the device is too small for that, the base is what gives way.
    let small = Case { device: "rtx3070", host: Bytes::gib(1), sequence: 512, allow: vec![Rung::Nf4], ..case };
    assert_eq!(small.planned().plan.rungs, [Rung::Lora, Rung::Nf4]);
}

#[test]
fn the_least_of_the_host_is_found_where_the_device_is_full() {
    let config = preset("llama-3.1-8b").unwrap();
    let device = paper("rtx3070", Budget::Amount(Bytes::mib(4776))).unwrap();
    let lossy = Lossy { allow: vec![Rung::Nf4], offer: Rung::ALL.to_vec(), ..Lossy::default() };
    let host = common::host(Bytes::mib(3604));
    let plan = search(&Question { host, lossy, ..question(&config, &device, [16, 1024]) }).plan;
    assert!(!plan.fits);
    let need = plan.needs.iter().find(|need| need.host_bytes.is_some()).expect("more of the host would do");
    // What packs a little worse than it was bounded is not the end of it.
    assert!(need.host_bytes < Some(Bytes::gib(6)), "{need:?}");
}

#[test]
fn what_the_host_adds_up_for_a_gpu_has_another_order_and_for_a_part_of_itself_has_not() {
    let (config, gpu) = (preset("smollm2-135m").unwrap(), paper("rtx3090", Budget::Share(1.0)).unwrap());
    let simulated = DeviceSpec { kind: DeviceKind::Virtual, threads: 1, ..gpu.clone() };
    for (device, embedding, class) in
        [(&gpu, false, Class::Identical), (&gpu, true, Class::Reordered), (&simulated, true, Class::Identical)]
    {
        let host = common::host(Bytes::gib(8));
        let question = Question { evaluate: false, host, ..question(&config, device, [2, 128]) };
        let on_device = Recipe::on_device(2, vec![RecomputeLevel::Nothing; config.layers as usize]);
        let recipe = Recipe { offload: Offload { embedding, ..Offload::NOTHING }, ..on_device.clone() };
        assert_eq!(question.class_between(&on_device, &recipe), class, "{} {embedding}", device.name);
        assert_eq!(plan_of(&question, &recipe).plan.class, class, "{} {embedding}", device.name);
    }
}

#[test]
fn who_does_the_update_is_a_matter_of_price() {
    let config = preset("smollm2-360m").expect("listed");
    let fast = paper("rtx3070", Budget::Amount(Bytes::gib(2))).expect("listed");
    let mut slow = fast.clone();
    slow.rates.host_link.bytes_per_second = 1e9;
    for (device, by_host) in [(fast, false), (slow, true)] {
        let host = common::host(Bytes::gib(64));
        let question =
            Question { precision: DType::Bf16, evaluate: false, host, ..question(&config, &device, [8, 512]) };
        let plan = search(&question).plan;
        assert!(plan.fits && plan.recipe.offload.optimizer > 0, "{}", plan.recipe);
        assert_eq!(plan.recipe.offload.update, by_host, "{}", plan.recipe);
        let mut other = plan.recipe.clone();
        other.offload.update = !by_host;
        assert!(plan.predicted.step_seconds < plan_of(&question, &other).plan.predicted.step_seconds);
    }
}

#[test]
fn a_head_that_waits_frees_all_but_two_blocks_of_it() {
    let config = preset("llama-3.1-8b").expect("listed");
    let device = paper("rtx3070", Budget::Share(1.0)).expect("listed");
    let sequence = 4096;
    let question = Question {
        precision: DType::Bf16,
        host: common::host(Bytes::gib(16)),
        lossy: adapters_in_4_bit(),
        ..question(&config, &device, [16, sequence])
    };
    let layers = config.layers as usize;
    let planned = |head: bool| {
        let offload = Offload { inputs: layers as u32, embedding: true, head, ..Offload::NOTHING };
        let recipe = Recipe { offload, ..Recipe::on_device(1, vec![RecomputeLevel::Block; layers]) };
        plan_of(&question, &recipe).plan
    };
    let (stays, waits) = (planned(false), planned(true));
    let [whole, block] =
        [config.vocab, head_blocks(config.vocab, Kernels::Cuda)[0].end].map(|rows| rows * config.hidden * 2);
    // The wide sums of the gradient are of all rows then.
    let sums = sequence * config.hidden * 4;
    let freed = stays.devices[0].arena_bytes.0 - waits.devices[0].arena_bytes.0;
    assert!(freed + sums >= whole - 2 * block && freed <= whole, "{} freed", Bytes(freed));
    assert_eq!((stays.class, waits.class), (Class::Reordered, Class::Reordered), "by its micro-batches alone");
    let seconds = waits.predicted.step_seconds - stays.predicted.step_seconds;
    println!("{} freed for {seconds:.2} s of {:.2} s a step", Bytes(freed), stays.predicted.step_seconds);
    assert!(seconds > 0.0, "logits are made twice");
}
