//! Shares of a batch: whole sequences that make the slowest as fast as it can be, everybody under its own load line, and
//! nobody in the team who slows it.

mod common;

use common::device;
use plimsoll_core::{
    Budget, Bytes, Class, DType, DeviceKind, DeviceSpec, FileSpec, HostSpec, Link, Plan, Rung, Sharing,
};
use plimsoll_plan::paper;
use plimsoll_plan::request::DevicesRequest;
use plimsoll_plan::search::{Question, search};
use plimsoll_plan::team::{
    Evaluations, Only, TeamAnswer, TeamQuestion, alternatives, plan_again, plan_of_team, say_what_would_use, share_out,
    share_out_if_fits,
};
use plimsoll_program::Schedule;
use plimsoll_program::models::{ModelConfig, preset};
use plimsoll_program::passes::collectives::agree;
use std::time::Instant;

fn question<'a>(config: &'a ModelConfig, device: &'a DeviceSpec, sequences: u64) -> Question<'a> {
    common::question(config, device, [sequences, 256.min(config.max_positions)])
}

fn team<'a>(config: &'a ModelConfig, devices: &'a [DeviceSpec], sequences: u64) -> TeamQuestion<'a> {
    let devices = devices.iter().map(|device| question(config, device, sequences)).collect();
    TeamQuestion { devices, host: Bytes::ZERO, all: false, only: None, evaluations: None }
}

fn say(answer: &TeamAnswer, begin: Instant) {
    let plan = &answer.plan;
    println!("fits {}, {:?}, {:?}, planned in {:.2?}", plan.fits, plan.sharing, plan.predicted, begin.elapsed());
    for member in &plan.team {
        println!(
            "  {}: {} sequences, {}, {:.3} s busy, {:.3} s idle",
            member.device, member.sequences, member.recipe, member.busy_seconds, member.idle_seconds
        );
    }
    for out in &plan.left_out {
        println!("  left out {out:?}");
    }
}

#[test]
fn a_team_does_what_its_devices_do_alone() {
    let config = preset("smollm2-135m").expect("listed");
    for paces in [vec![1.0, 0.57], vec![1.0, 0.5], vec![1.0, 0.25], vec![0.1; 8]] {
        let devices: Vec<DeviceSpec> = paces
            .iter()
            .enumerate()
            .map(|(n, pace)| device(&format!("virtual:{n}"), Bytes::gib(24), *pace, Link::MEMORY))
            .collect();
        let begin = Instant::now();
        let answer = share_out(&team(&config, &devices, 64));
        say(&answer, begin);
        let alone: f64 = devices
            .iter()
            .map(|one| share_out(&team(&config, std::slice::from_ref(one), 64)).plan.predicted.tokens_per_second)
            .sum();
        let worth = answer.plan.predicted.tokens_per_second / alone;
        println!("  {paces:?}: {worth:.4} of the sum");
        assert!(worth >= 0.95, "{paces:?}: {worth}");
        assert_eq!(answer.plan.sharing, Some(Sharing::Batch));
        assert_eq!(answer.plan.class, Class::Reordered);
        assert_eq!(answer.parts.len(), devices.len());
        let bound = answer.plan.worth.expect("of several devices");
        assert!((bound.alone / alone - 1.0).abs() < 0.005 && bound.at_most < bound.alone, "{bound:?}");
        assert!(answer.plan.predicted.tokens_per_second <= bound.at_most, "{bound:?}");
        let fastest = &alternatives(&team(&config, &devices, 64), &answer.plan)[0];
        assert!(fastest.devices.len() == devices.len(), "{fastest:?}");
    }
}

#[test]
fn what_links_cost_is_said_and_which_host_would_be_faster_without_the_other() {
    let config = preset("smollm2-135m").expect("listed");
    let over = |link: Link| {
        let names = [("a/virtual:0", 1.0), ("b/virtual:1", 0.5)];
        let devices = names.map(|(name, pace)| device(name, Bytes::gib(24), pace, link));
        share_out(&TeamQuestion { all: true, ..team(&config, &devices, 64) }).plan
    };
    let (fast, slow) = (over(Link::MEMORY), over(Link { bytes_per_second: 2e6, latency_seconds: 1e-4 }));
    let cost = |plan: &Plan| plan.link_seconds.expect("of several devices") / plan.predicted.step_seconds;
    assert!(cost(&fast) < 0.01 && cost(&slow) > 0.1, "{} and {}", cost(&fast), cost(&slow));
    assert_eq!(fast.faster_alone, None);
    let alone = slow.faster_alone.expect("the second host is not worth the wait");
    assert!(alone.name == "a" && alone.tokens_per_second > slow.predicted.tokens_per_second);
}

/// The ideal share of the faster device is 42.7 sequences of 64; a choice among micro-batches of powers of two, and of what
/// divides the shares that those make fastest, stops at 42 : 22.
#[test]
fn shares_that_nothing_divides_are_looked_at() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [0.6, 0.3].map(|pace| {
        let mut device = device("virtual:a", Bytes::gib(24), pace, Link::MEMORY);
        (device.rates.op_seconds, device.rates.memory_bytes_per_second) = (2e-4, 1e13);
        device
    });
    let answer = share_out(&team(&config, &devices, 64));
    let sequences: Vec<u64> = answer.plan.team.iter().map(|member| member.sequences).collect();
    assert_eq!(sequences, [43, 21]);
}

#[test]
fn a_plan_of_given_shares_and_recipes_is_the_same_plan() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [("a", 24, 1.0), ("b", 8, 0.57)];
    let devices = devices.map(|(name, gib, pace)| device(name, Bytes::gib(gib), pace, Link::MEMORY));
    let team = team(&config, &devices, 64);
    let answer = share_out(&team);
    let planned = Plan { worth: None, ..answer.plan };
    assert_eq!(plan_of_team(&team, &planned.team).plan, planned);
    assert_eq!(plan_again(&team, &planned.team).plan, planned);
}

#[test]
fn only_the_squeezed_device_changes_its_recipe() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [("a", 24, 1.0), ("b", 8, 0.57)];
    let devices = devices.map(|(name, gib, pace)| device(name, Bytes::gib(gib), pace, Link::MEMORY));
    let before = share_out(&team(&config, &devices, 64)).plan;
    let mut squeezed = devices.clone();
    squeezed[1].budget = before.devices[1].peak_bytes.saturating_sub(Bytes::mib(64));
    let after = plan_again(&team(&config, &squeezed, 64), &before.team).plan;
    assert!(after.fits && after.devices[1].peak_bytes <= squeezed[1].budget);
    assert_eq!(after.team[0].recipe, before.team[0].recipe);
    let sequences = |plan: &Plan| plan.team.iter().map(|member| member.sequences).collect::<Vec<_>>();
    assert_eq!(sequences(&after), sequences(&before));
    assert_ne!(after.team[1].recipe, before.team[1].recipe);
}

#[test]
fn a_member_of_a_team_takes_no_scratch_file_and_is_offered_none() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [device("a", Bytes::gib(24), 1.0, Link::MEMORY), device("b", Bytes::gib(24), 1.0, Link::MEMORY)];
    let answer = share_out(&team(&config, &devices, 8));
    assert_eq!(answer.plan.sharing, Some(Sharing::Batch));
    let room = Bytes::gib(100);
    let file = FileSpec { room, ..FileSpec::NONE };
    let squeezed = DeviceSpec { budget: Bytes::gib(1), ..devices[0].clone() };
    let host = HostSpec { budget: Bytes::mib(512), file, ..HostSpec::NONE };
    let question = Question { host, ..question(&config, &squeezed, 8) };
    assert!(search(&question).plan.needs.iter().any(|need| need.file_bytes.is_some()), "alone it may have one");
    let refused = search(&question.of_share(&answer.parts[0].share, answer.parts[0].sequences)).plan;
    assert!(!refused.fits && refused.needs.iter().all(|need| need.file_bytes.is_none()), "{:?}", refused.needs);
}

#[test]
fn who_cannot_hold_the_model_or_would_slow_the_team_is_left_out_and_named() {
    let config = preset("smollm2-135m").expect("listed");
    let slow_link = Link { bytes_per_second: 1e6, latency_seconds: 0.0 };
    let named = |name: &str, gib: u64, pace: f64, link: Link| device(name, Bytes::gib(gib), pace, link);
    for (devices, left_out, why) in [
        ([named("a", 8, 1.0, slow_link), named("b", 1, 1.0, slow_link)], "b", "its smallest recipe holds"),
        ([named("a", 8, 0.5, slow_link), named("b", 8, 1.0, slow_link)], "a", "it would slow the team"),
    ] {
        let answer = share_out(&team(&config, &devices, 64));
        assert!(answer.plan.fits && answer.plan.sharing.is_none() && answer.plan.team.is_empty());
        assert_eq!(answer.parts.len(), 1);
        let [out] = &answer.plan.left_out[..] else { panic!("{:?}", answer.plan.left_out) };
        assert!(out.device == left_out && out.why.starts_with(why) && out.used_by.is_none(), "{out:?}");
        let (question, mut plan) = (team(&config, &devices, 64), answer.plan.clone());
        say_what_would_use(&question, &DevicesRequest::default(), &mut plan);
        assert_eq!(plan.left_out[0].used_by.as_deref(), Some("--set run.team=all"));
        let all = TeamQuestion { all: true, ..team(&config, &devices, 64) };
        let all = share_out(&all).plan;
        let said = plan.left_out[0].tokens_per_second;
        let planned = why.starts_with("it would").then_some(all.predicted.tokens_per_second);
        assert_eq!(said, planned, "{:?}", plan.left_out);
        // Over so slow a link only hidden states go.
        assert_eq!((all.fits, all.team.len(), all.sharing), (true, 2, Some(Sharing::Layers)));
    }
}

#[test]
fn of_two_devices_with_one_name_the_one_that_is_left_out_is_given_the_line() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = [Budget::Share(0.9), Budget::Amount(Bytes::mib(700)), Budget::Amount(Bytes::mib(600))]
        .map(|budget| paper::paper("rtx3070", budget).expect("listed"));
    let request: DevicesRequest = "rtx3070,rtx3070=700MiB,rtx3070=600MiB".parse().expect("a request");
    let question = team(&config, &devices, 64);
    let mut plan = share_out(&question).plan;
    assert_eq!(plan.left_out.iter().map(|out| out.number).collect::<Vec<_>>(), [1, 2]);
    say_what_would_use(&question, &request, &mut plan);
    for (out, [before, after]) in
        plan.left_out.iter().zip([["rtx3070", "rtx3070=600MiB"], ["rtx3070", "rtx3070=700MiB"]])
    {
        let words = out.used_by.as_deref().expect("a larger line would do");
        let lines: Vec<&str> = words.strip_prefix("--devices ").expect("a line").split(',').collect();
        let other = if out.number == 1 { lines[2] } else { lines[1] };
        assert_eq!([lines[0], other], [before, after], "{words}");
        let typed: DevicesRequest =
            words.strip_prefix("--devices ").expect("a line").parse().expect("what is said is read");
        let given =
            typed.devices.iter().map(|asked| paper::paper(&asked.name(), asked.budget().unwrap_or(Budget::DEVICE)));
        let given: Vec<DeviceSpec> = given.map(|device| device.expect("listed")).collect();
        assert_eq!(share_out(&team(&config, &given, 64)).parts.len(), 2, "{words}");
    }
}

/// Who cannot hold the model is told what it would hold with the rungs that may be taken.
#[test]
fn what_lacks_is_told_under_the_rungs_that_are_allowed() {
    let config = preset("llama-2-13b").expect("listed");
    let devices = ["rtx3090", "rtx3070"].map(|name| paper::paper(name, Budget::Amount(Bytes::gib(2))).expect("listed"));
    let told = |allow: &[Rung]| {
        let mut question = team(&config, &devices, 4);
        question.devices.iter_mut().for_each(|one| one.lossy.allow = allow.to_vec());
        let plan = share_out(&question).plan;
        let [out] = &plan.left_out[..] else { panic!("{:?}", plan.left_out) };
        let said = out.why.strip_prefix("its smallest recipe holds ").and_then(|why| why.split_once(" GiB"));
        said.and_then(|(gib, _)| gib.parse::<f64>().ok()).unwrap_or_else(|| panic!("{out:?}"))
    };
    let (full, adapters) = (told(&[]), told(&[Rung::Lora]));
    assert!(adapters < 0.5 * full, "{full} GiB in full, {adapters} GiB with adapters");
}

/// Who would only slow the others evaluates for them, if it can hold the weights, keeps up, and is no dearer than its worth.
#[test]
fn who_is_left_out_evaluates_where_it_has_room_and_saves_time() {
    let config = preset("smollm2-135m").expect("listed");
    let slow_link = Link { bytes_per_second: 1e6, latency_seconds: 0.0 };
    let devices = |mib: u64, pace: f64| {
        [device("a", Bytes::gib(8), 1.0, slow_link), device("b", Bytes::mib(mib), pace, slow_link)]
    };
    let asked = |devices: &[DeviceSpec], every: u64, rows: Option<u64>| {
        let evaluations = Some(Evaluations { every, rows });
        share_out(&TeamQuestion { evaluations, ..team(&config, devices, 64) })
    };
    // Weights of 513 MiB: one with room for training, too, and one without.
    for mib in [8192, 1000] {
        let devices = devices(mib, 0.5);
        let answer = asked(&devices, 100, Some(1000));
        let [out] = &answer.plan.left_out[..] else { panic!("{:?}", answer.plan.left_out) };
        let evaluates = out.evaluates.as_ref().expect("it has room and time");
        let part = answer.evaluator.as_ref().expect("it does");
        assert!(out.device == "b" && part.device == 1, "{out:?}");
        assert_eq!(evaluates.device, part.answer.plan.devices[0]);
        assert!(part.answer.plan.fits && evaluates.device.peak_bytes <= devices[1].budget);
        assert!(part.answer.set.program("update").is_none() && part.answer.set.program("renew").is_some());
        let step_seconds = answer.plan.predicted.step_seconds;
        let crossing = 4.0 * 134.5e6 / slow_link.bytes_per_second;
        assert!(evaluates.hand_over_seconds > crossing, "the weights cross the link: {evaluates:?}");
        assert!(evaluates.saves(100.0 * step_seconds) > 0.0 && evaluates.saves(0.0) < 0.0, "{evaluates:?}");
        assert!((evaluates.seconds / evaluates.team_seconds - 2.0).abs() < 0.2, "half the pace: {evaluates:?}");
        // Rows that nobody has read yet: as many as it takes to be worth it.
        let unread =
            asked(&devices, 100, None).plan.left_out[0].evaluates.clone().expect("some number of rows is worth it");
        let (least, of_one) = (unread.least_rows(), unread.team_seconds);
        assert!((of_one * 1000.0 / evaluates.team_seconds - 1.0).abs() < 0.05, "{unread:?}");
        assert!(of_one * least as f64 >= unread.hand_over_seconds, "{unread:?}");
        // As many rows at once as the one that trains, if there is room.
        let (own, theirs) = (evaluates.recipe.micro_batch, answer.plan.recipe.micro_batch);
        assert!(own == theirs || mib == 1000 && own < theirs, "{own} and {theirs}");
        // A run that goes on has no other place for it.
        let evaluations = Some(Evaluations { every: 100, rows: Some(1000) });
        let question = TeamQuestion { evaluations, ..team(&config, &devices, 64) };
        if !answer.plan.team.is_empty() {
            assert_eq!(plan_of_team(&question, &answer.plan.team).evaluator.map(|part| part.device), Some(1));
        }
    }
    for (devices, every, rows, why) in [
        (devices(500, 0.5), 100, 1000, "it cannot hold the weights"),
        (devices(8192, 0.5), 0, 1000, "at the end the others would wait for it"),
        (devices(8192, 0.01), 1, 100_000, "the others would wait for it all the time"),
    ] {
        let answer = asked(&devices, every, Some(rows));
        let out = &answer.plan.left_out[0];
        assert!(out.device == "b" && out.evaluates.is_none() && answer.evaluator.is_none(), "{why}: {out:?}");
    }
    let devices = devices(8192, 0.5);
    let mut dear = team(&config, &devices, 64);
    dear.devices.iter_mut().for_each(|question| question.host.memory_bytes_per_second = 1e6);
    for (rows, worth) in [(16, false), (16_000, true)] {
        let evaluations = Some(Evaluations { every: 10_000, rows: Some(rows) });
        let answer = share_out(&TeamQuestion { evaluations, ..dear.clone() });
        assert_eq!(answer.evaluator.is_some(), worth, "{rows} rows beside weights that take minutes to hand over");
    }
    let all = TeamQuestion { all: true, ..team(&config, &devices, 64) };
    let evaluations = Some(Evaluations { every: 100, rows: Some(1000) });
    let all = share_out(&TeamQuestion { evaluations, ..all });
    assert!(all.plan.left_out.is_empty() && all.evaluator.is_none());
    assert!(share_out(&team(&config, &devices, 64)).evaluator.is_none(), "there is nothing to evaluate on");
}

/// What every plan of state in parts has to be.
fn is_state_in_parts(team: &TeamQuestion, answer: &TeamAnswer) {
    let plan = &answer.plan;
    assert!(plan.fits && plan.sharing == Some(Sharing::State) && plan.class >= Class::Reordered);
    assert_eq!(plan.team.iter().map(|member| member.state.expect("a part")).sum::<u64>(), 1024);
    let sequences: u64 = plan.team.iter().map(|member| member.sequences).sum();
    assert_eq!(sequences, team.devices[0].sequences);
    let count = answer.parts[0].share.micro_batches;
    for (part, member) in answer.parts.iter().zip(&plan.team) {
        assert_eq!(part.share.micro_batches, count);
        let most = count * u64::from(member.recipe.micro_batch);
        assert!(member.sequences <= most && (member.sequences > 0 || most == 0), "{member:?}");
    }
    let schedule = Schedule::accumulate(count as u32);
    let ranks = answer.parts.iter().map(|part| (&part.answer.set, &schedule)).collect::<Vec<_>>();
    if team.devices[0].device.kind != DeviceKind::Paper {
        agree(&ranks).expect("all ranks agree");
    }
    assert!(plan.host.peak_bytes <= team.host);
    let again = plan_of_team(team, &plan.team).plan;
    assert_eq!(again.team, plan.team);
    assert!(again.fits && again.predicted == plan.predicted, "{:?} {:?}", again.predicted, plan.predicted);
}

#[test]
fn a_model_that_fits_neither_device_alone_is_held_in_parts_by_both() {
    let config = preset("smollm2-135m").expect("listed");
    for (mib, paces, link) in [
        ([1900, 700], [1.0, 0.57], Link::MEMORY),
        ([1800, 1000], [0.5, 1.0], Link { bytes_per_second: 1e9, latency_seconds: 1e-5 }),
        ([1500, 1500], [1.0, 1.0], Link::MEMORY),
    ] {
        let device = |name: &str, at: usize| device(name, Bytes::mib(mib[at]), paces[at], link);
        let devices = [device("a", 0), device("b", 1)];
        for device in &devices {
            assert!(!share_out(&team(&config, std::slice::from_ref(device), 64)).plan.fits, "{}", device.budget);
        }
        let (team, begin) = (team(&config, &devices, 64), Instant::now());
        let answer = share_out(&team);
        say(&answer, begin);
        is_state_in_parts(&team, &answer);
        let parts: Vec<u64> = answer.plan.team.iter().filter_map(|member| member.state).collect();
        assert_eq!(parts[0].cmp(&parts[1]), mib[0].cmp(&mib[1]), "by free memory: {parts:?}");
        let computed: Vec<u64> = answer.plan.team.iter().map(|member| member.sequences).collect();
        assert!((computed[0] > computed[1]) == (paces[0] > paces[1]), "by speed: {computed:?}");
        let ways = alternatives(&team, &answer.plan);
        assert!(ways[0].sharing == Some(Sharing::State) && ways.iter().filter(|way| !way.fits).count() > 0, "{ways:?}");
    }
}

#[test]
fn who_would_be_in_the_way_even_with_one_sequence_holds_a_part_of_the_state() {
    let config = preset("smollm2-135m").expect("listed");
    let of = |name: &str, mib: u64, pace: f64| device(name, Bytes::mib(mib), pace, Link::MEMORY);
    for devices in [
        vec![of("fast", 1200, 1.0), of("slow", 1900, 0.02)],
        vec![of("slow", 1900, 0.02), of("fast", 1200, 1.0), of("other", 700, 0.8)],
    ] {
        let (named, begin) = (team(&config, &devices, 64), Instant::now());
        let answer = share_out(&named);
        say(&answer, begin);
        is_state_in_parts(&named, &answer);
        let holds = answer.plan.team.iter().find(|member| member.device == "slow").expect("it takes part");
        assert_eq!((holds.sequences, holds.recipe.micro_batch), (0, 0));
        assert!(holds.why.as_ref().is_some_and(|why| why.contains("slow the team to 3")), "{:?}", holds.why);
        // The others cannot do without it, and with sequences of its own it would be in their way.
        let others: Vec<DeviceSpec> = devices.iter().filter(|device| device.name != "slow").cloned().collect();
        assert!(!share_out(&team(&config, &others, 64)).plan.fits);
        let tokens = answer.plan.predicted.tokens_per_second;
        let ways = alternatives(&named, &answer.plan);
        let all_compute = ways.iter().filter(|way| way.shares.iter().all(|share| !share.starts_with("0 ")));
        assert!(all_compute.clone().any(|way| way.sharing == Some(Sharing::State)), "{ways:?}");
        let fits = all_compute.filter(|way| way.fits).map(|way| way.predicted.tokens_per_second);
        assert!(fits.fold(0.0, f64::max) < 0.5 * tokens, "{ways:?}");
        // It takes part.
        let all = share_out(&TeamQuestion { all: true, ..named.clone() }).plan;
        assert_eq!((all.team, all.left_out), (answer.plan.team, vec![]));
    }
}

/// With one sequence each a step is over after one micro-batch; without those of one of them the others have two to compute.
#[test]
fn two_that_would_be_in_the_way_hold_together() {
    let config = ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
    let of = |name: &str, mib: u64, pace: f64| device(name, Bytes::mib(mib), pace, Link::MEMORY);
    let fast = of("fast", 102, 1.0);
    for (slow, said) in [
        (
            [of("b", 190, 0.02), of("c", 190, 0.02)],
            "with some of their own it and 1 other like it would slow the team to ",
        ),
        ([of("b", 208, 0.015), of("c", 170, 0.02)], "with some of its own it would slow the team to "),
    ] {
        let devices = [std::slice::from_ref(&fast), &slow[..]].concat();
        let only = Some(Only::Sharing(Sharing::State));
        let (team, begin) = (TeamQuestion { only, ..team(&config, &devices, 3) }, Instant::now());
        let answer = share_out(&team);
        say(&answer, begin);
        is_state_in_parts(&team, &answer);
        let sequences: Vec<u64> = answer.plan.team.iter().map(|member| member.sequences).collect();
        assert_eq!(sequences, [3, 0, 0]);
        for member in &answer.plan.team[1..] {
            assert!(member.why.as_ref().is_some_and(|why| why.starts_with(said)), "{:?}", member.why);
        }
        let all = share_out(&TeamQuestion { all: true, ..team.clone() }).plan;
        assert_eq!(all.team, answer.plan.team);
    }
}

#[test]
fn who_holds_a_part_and_computes_nothing_is_beneath_its_line_like_everybody() {
    let config = ModelConfig { layers: 4, vocab: 1024, ..preset("smollm2-135m").expect("listed") };
    let mut held = 0;
    for paces in [[0.5, 0.02], [0.02, 0.1]] {
        for [fast, slow, other] in [[140, 220, 0], [170, 190, 0], [200, 260, 0], [120, 300, 80], [100, 160, 100]] {
            for (on_host, pace) in [0, 40].into_iter().zip(paces) {
                let of = |name: &str, mib: u64, pace: f64| device(name, Bytes::mib(mib), pace, Link::MEMORY);
                let mut devices = vec![of("fast", fast, 1.0), of("slow", slow, pace)];
                devices.extend((other > 0).then(|| of("other", other, 0.6)));
                let host = Bytes::mib(on_host);
                let only = Some(Only::Sharing(Sharing::State));
                let mut team = TeamQuestion { host, only, ..team(&config, &devices, 12) };
                team.devices.iter_mut().for_each(|question| question.host = common::host(host));
                let answer = share_out_if_fits(&team).filter(|answer| answer.plan.sharing == Some(Sharing::State));
                let Some(answer) = answer else { continue };
                is_state_in_parts(&team, &answer);
                held += answer.plan.team.iter().filter(|member| member.sequences == 0).count();
                for plan in &answer.plan.devices {
                    assert!(plan.peak_bytes <= plan.budget_bytes, "{plan:?}");
                }
            }
        }
    }
    assert!(held >= 5, "{held}");
}

#[test]
fn more_memory_of_a_device_makes_no_team_slower() {
    let slow = Link { bytes_per_second: 125e6, latency_seconds: 1e-4 };
    // Over a slow link parts should be alike, whatever the room. Where one device alone is the fastest, it is the one with
    // more room. The first stage of three is not always the one with the most.
    /// A card with its MiB, before and after.
    type Card = (&'static str, [u64; 2]);
    /// A model on cards, sequences by tokens, a host, and whether all cards take part.
    type Case<'a> = (&'a str, &'a [Card], [u64; 2], Bytes, bool);
    let cases: [Case; 3] = [
        ("smollm2-360m", &[("rtx4090", [3363, 3363]), ("rtx3070", [6168, 7311])], [64, 256], Bytes::ZERO, true),
        ("smollm2-360m", &[("rtx4090", [4345, 4345]), ("rtx4090", [4922, 5021])], [16, 256], Bytes::gib(4), false),
        (
            "smollm2-135m",
            &[("rtx3070", [2425, 2645]), ("rtx4090", [2491, 2491]), ("rtx3070", [2262, 2262])],
            [16, 1024],
            Bytes::gib(4),
            true,
        ),
    ];
    for (model, cards, shape, host, all) in cases {
        let config = preset(model).expect("listed");
        let seconds = |at: usize| {
            let card = |(name, mib): &Card| {
                let card = paper::paper(name, Budget::Amount(Bytes::mib(mib[at]))).expect("listed");
                DeviceSpec { team_link: slow, ..card }
            };
            let cards: Vec<DeviceSpec> = cards.iter().map(card).collect();
            let of = |card| Question {
                precision: DType::Bf16,
                host: common::host(host),
                ..common::question(&config, card, shape)
            };
            let (team, begin) = (
                TeamQuestion { devices: cards.iter().map(of).collect(), host, all, only: None, evaluations: None },
                Instant::now(),
            );
            let answer = share_out(&team);
            say(&answer, begin);
            assert!(answer.plan.fits);
            answer.plan.predicted.step_seconds
        };
        let [less, more] = [0, 1].map(seconds);
        assert!(more < 1.02 * less, "{model} on {cards:?}: {more} s, {less} s with less");
    }
}

#[test]
fn who_is_far_away_is_left_out_of_a_pipeline_and_of_a_batch() {
    let config = preset("smollm2-135m").expect("listed");
    let link = |bytes_per_second: f64| Link { bytes_per_second, latency_seconds: 1e-5 };
    let with = |devices: &[DeviceSpec], host: Bytes| {
        let mut team = TeamQuestion { host, ..team(&config, devices, 64) };
        team.devices.iter_mut().for_each(|question| question.host = common::host(host));
        let begin = Instant::now();
        let answer = share_out(&team);
        say(&answer, begin);
        assert!(answer.plan.fits);
        answer.plan
    };
    // One of two that are alike but for their link.
    let near = [("a", 1500, 0.5, 16e9), ("b", 1500, 0.3, 16e9)];
    let near = near.map(|(name, mib, pace, rate)| device(name, Bytes::mib(mib), pace, link(rate)));
    let far = [near[0].clone(), near[1].clone(), device("c", Bytes::mib(1500), 0.3, link(1e5))];
    let (pair, three) = (with(&near, Bytes::ZERO), with(&far, Bytes::ZERO));
    assert!(
        three.predicted.step_seconds < 1.01 * pair.predicted.step_seconds,
        "{:?}, {:?}",
        three.predicted,
        pair.predicted
    );
    assert_eq!(three.left_out[0].device, "c");
    // Two that are as far away: to leave out one of them gains nothing. Neither does the order in which they are named.
    let cards = |rates: [f64; 4]| rates.map(|rate| device("a", Bytes::mib(1500), 0.5, link(rate)));
    let pair = with(&cards([16e9; 4])[..2], Bytes::ZERO);
    for rates in [[16e9, 16e9, 1e5, 1e5], [1e5, 16e9, 1e6, 16e9], [1e5, 1e5, 16e9, 16e9]] {
        let four = with(&cards(rates), Bytes::ZERO).predicted;
        assert!(four.step_seconds < 1.01 * pair.predicted.step_seconds, "{rates:?} {four:?}, {:?}", pair.predicted);
    }
    // What is packed waits longer for a slow link than was worked out: one alone may be faster then.
    let card = |mib: u64, rate: f64| {
        let card = paper::paper("rtx4060ti-16g", Budget::Amount(Bytes::mib(mib))).expect("listed");
        DeviceSpec { team_link: link(rate), ..card }
    };
    let cards = [card(9000, 12e9), card(2000, 1e8)];
    let (alone, both) = (with(&cards[..1], Bytes::gib(128)), with(&cards, Bytes::gib(128)));
    assert!(
        both.predicted.step_seconds < 1.01 * alone.predicted.step_seconds,
        "{:?}, {:?}",
        both.predicted,
        alone.predicted
    );
}

#[test]
fn where_the_host_is_enough_for_one_the_fastest_works() {
    // A layer alone, which no pipeline can share.
    let config = ModelConfig { layers: 1, vocab: 32, ..preset("smollm2-135m").expect("listed") };
    let host = Bytes::mib(40);
    let plan = |devices: &[DeviceSpec]| {
        let mut team = TeamQuestion { host, ..team(&config, devices, 6) };
        team.devices.iter_mut().for_each(|question| question.host = common::host(host));
        let begin = Instant::now();
        let answer = share_out(&team);
        say(&answer, begin);
        answer.plan
    };
    let of = |name: &str, mib: u64, pace: f64| device(name, Bytes::mib(mib), pace, Link::MEMORY);
    let [slow, fast] = [of("slow", 60, 0.1), of("fast", 50, 0.4)];
    let alone = plan(std::slice::from_ref(&fast));
    assert!(alone.fits && plan(std::slice::from_ref(&slow)).fits);
    for both in [[slow.clone(), fast.clone()], [fast, slow]] {
        let both = plan(&both);
        assert_eq!(both.sharing, None);
        assert!(both.predicted.step_seconds < 1.01 * alone.predicted.step_seconds, "{:?}", both.predicted);
        assert!(both.left_out.iter().all(|out| !out.why.contains("smallest recipe")), "{:?}", both.left_out);
    }
}

#[test]
fn sequences_follow_speed_while_parts_of_the_state_stay() {
    let config = preset("smollm2-135m").expect("listed");
    let devices = |paces: [f64; 2]| {
        let device = |name: &str, at: usize| device(name, Bytes::mib(1500), paces[at], Link::MEMORY);
        [device("a", 0), device("b", 1)]
    };
    let (even, slower) = (devices([1.0, 1.0]), devices([1.0, 0.4]));
    let before = share_out(&team(&config, &even, 64));
    assert_eq!(before.plan.sharing, Some(Sharing::State));
    let parts = |answer: &TeamAnswer| answer.parts[0].share.state.clone();
    let as_it_is = plan_of_team(&team(&config, &slower, 64), &before.plan.team).plan;
    let kept = TeamQuestion { only: Some(Only::Parts(parts(&before))), ..team(&config, &slower, 64) };
    let after = share_out(&kept);
    is_state_in_parts(&kept, &after);
    assert_eq!(parts(&after), parts(&before));
    let sequences: Vec<u64> = after.plan.team.iter().map(|member| member.sequences).collect();
    assert!(sequences[0] > sequences[1], "{sequences:?}");
    let (then, now) = (after.plan.predicted.step_seconds, as_it_is.predicted.step_seconds);
    assert!(then < 0.9 * now, "{then} {now}");
}

#[test]
fn large_models_are_planned_for_large_teams() {
    let eight = &["rtx5090"; 8][..];
    are_planned("qwen2.5-32b", eight, &[(0, &[Rung::Lora], true), (512, &[], true)]);
}

#[test]
fn large_models_are_planned_for_unequal_devices_where_they_fit_and_where_they_do_not() {
    are_planned("llama-2-13b", &["rtx3090", "rtx3070"], &[(128, &[Rung::Lora], true), (128, &[], false)]);
}

/// Beside so many GiB of the host, under these rungs, it fits or not.
fn are_planned(model: &str, names: &[&str], cases: &[(u64, &[Rung], bool)]) {
    let devices = |names: &[&str]| -> Vec<DeviceSpec> {
        names.iter().map(|name| paper::paper(name, Budget::Share(0.9)).expect("listed")).collect()
    };
    for &(host, rungs, fits) in cases {
        let (config, devices) = (preset(model).expect("listed"), devices(names));
        let host = HostSpec { budget: Bytes::gib(host), memory_bytes_per_second: 50e9, ..HostSpec::NONE };
        let question = |device| {
            let mut question =
                Question { precision: DType::Bf16, sequence: 1024, host, ..question(&config, device, 64) };
            question.lossy.allow = rungs.to_vec();
            question
        };
        let team = TeamQuestion {
            devices: devices.iter().map(question).collect(),
            host: host.budget,
            all: false,
            only: None,
            evaluations: None,
        };
        let begin = Instant::now();
        let answer = share_out(&team);
        println!("{model} over {names:?}, {rungs:?}:");
        say(&answer, begin);
        assert_eq!(answer.plan.fits, fits);
        if answer.plan.sharing == Some(Sharing::State) {
            is_state_in_parts(&team, &answer);
        }
    }
}
