//! Screens of the view for snapshots with fixed numbers, and its keys.

use super::*;
use crate::snapshot::plan::{PlanSnapshot, WorkerSnapshot};
use crate::snapshot::{
    CpuSnapshot, FeedEntry, HistoryPoint, HostSnapshot, ProcessSnapshot, RunSnapshot, RunState, SNAPSHOT_VERSION,
};
use plimsoll_core::{Bytes, Category, Recommendation, TimelinePoint, WorkKind};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use std::collections::BTreeMap;

const PLAIN: Abilities = Abilities { color: false, unicode: true };
const ASCII: Abilities = Abilities { color: false, unicode: false };

/// Returns a simulated device of a run, of which each category holds some MiB.
fn device(name: &str, mib: [u64; 4], line: u64) -> DeviceSnapshot {
    let categories = [Category::Weight, Category::Gradient, Category::Optimizer, Category::Activation];
    let by_category: BTreeMap<Category, Bytes> = categories.into_iter().zip(mib.map(Bytes::mib)).collect();
    let peak = Bytes::mib(mib.iter().sum::<u64>() + 8);
    DeviceSnapshot {
        name: name.to_owned(),
        simulated: true,
        in_run: true,
        load_line_bytes: Some(Bytes::mib(line)),
        predicted_peak_bytes: Some(peak),
        measured_peak_bytes: Some(peak.saturating_sub(Bytes::mib(3))),
        held_bytes: Some(peak.saturating_sub(Bytes::mib(4))),
        by_program: [(WorkKind::Forward, Bytes::mib(12)), (WorkKind::Backward, Bytes::mib(20))].into(),
        timeline: timeline(&by_category),
        by_category,
        charges_bytes: Some(Bytes::mib(8)),
        ..DeviceSnapshot::default()
    }
}

/// Returns the timeline of a model of four layers, whose activations grow and then shrink. The peak is as given.
fn timeline(peak: &BTreeMap<Category, Bytes>) -> Vec<TimelinePoint> {
    let point = |work: WorkKind, layer: Option<u32>, tenths: u64| {
        let mut by_category = peak.clone();
        by_category.entry(Category::Activation).and_modify(|bytes| *bytes = Bytes(bytes.0 * tenths / 10));
        let op = layer.map_or("adam_w", |_| if work == WorkKind::Forward { "attention" } else { "product" });
        TimelinePoint {
            work,
            part: layer.map(|_| "layer".to_owned()),
            layer,
            op: Some(op.to_owned()),
            tensor: Some(if layer.is_some() { "down" } else { "embedding" }.to_owned()),
            bytes: by_category.values().copied().sum(),
            by_category,
        }
    };
    let forward = (0..4).map(|layer| point(WorkKind::Forward, Some(layer), 2 + 2 * u64::from(layer)));
    let backward = (0..4).rev().map(|layer| point(WorkKind::Backward, Some(layer), 4 + 2 * u64::from(layer)));
    let update = [point(WorkKind::Update, None, 0)];
    forward.chain(backward).chain(update).collect()
}

fn processor() -> DeviceSnapshot {
    DeviceSnapshot {
        name: "cpu".to_owned(),
        model: Some("Example 4000".to_owned()),
        total_bytes: Some(Bytes::gib(16)),
        free_bytes: Some(Bytes::gib(12)),
        others_bytes: Some(Bytes::gib(4)),
        load_line_bytes: Some(Bytes::gib(10)),
        utilization: Some(0.67),
        temperature_c: Some(61.0),
        ..DeviceSnapshot::default()
    }
}

fn run() -> RunSnapshot {
    let point = |step: u64| HistoryPoint {
        step,
        time: step as f64,
        loss: Some(4.0 * (-(step as f64) / 40.0).exp() + 0.5),
        gradient_norm: 0.5,
        learning_rate: 1e-3,
        tokens_per_second: 55_900.0,
    };
    RunSnapshot {
        folder: "runs/sums".to_owned(),
        state: RunState::Running,
        simulated: true,
        step: 120,
        steps: Some(600),
        loss: Some(0.699),
        gradient_norm: Some(0.5),
        learning_rate: Some(1e-3),
        step_seconds: Some(0.0275),
        predicted_step_seconds: Some(0.027),
        tokens_per_second: Some(55_900.0),
        peak_share: None,
        eta_seconds: Some(13.2),
        silent_seconds: Some(0.1),
        eval_loss: None,
        checkpoint_step: None,
        plan: None,
        history: (1..=120).map(point).collect(),
    }
}

fn snapshot() -> Snapshot {
    Snapshot {
        version: SNAPSHOT_VERSION,
        at: 1000.0,
        devices: vec![
            device("virtual:large", [4, 4, 8, 16], 48),
            device("virtual:small", [4, 4, 8, 6], 32),
            processor(),
        ],
        host: HostSnapshot {
            total_bytes: Some(Bytes::gib(16)),
            free_bytes: Some(Bytes::gib(12)),
            load_line_bytes: Some(Bytes::gib(1)),
            arena_bytes: Some(Bytes::ZERO),
        },
        cpu: CpuSnapshot { load: Some(0.67), band: None },
        no_gpu: None,
        run: Some(run()),
        recommendations: vec![],
        warnings: vec!["virtual:small was lost; the run continues without it".to_owned()],
        feed: vec![FeedEntry {
            time: 1.0,
            text: "recovery at step 12: virtual:large refused memory in backward".to_owned(),
        }],
    }
}

fn screen(width: u16, height: u16, snapshot: &Snapshot, state: &ViewState) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, snapshot, state)).unwrap();
    let buffer = terminal.backend().buffer();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned() + "\n";
    (0..height).map(row).collect()
}

fn press(state: &mut ViewState, codes: &[KeyCode]) -> Vec<Reaction> {
    press_on(state, &snapshot(), codes)
}

fn press_on(state: &mut ViewState, snapshot: &Snapshot, codes: &[KeyCode]) -> Vec<Reaction> {
    codes.iter().map(|code| state.press(KeyEvent::new(*code, KeyModifiers::NONE), snapshot)).collect()
}

#[test]
fn run_fills_a_small_screen() {
    insta::assert_snapshot!(screen(80, 24, &snapshot(), &ViewState::new(PLAIN)));
}

#[test]
fn run_fills_a_large_screen() {
    insta::assert_snapshot!(screen(120, 40, &snapshot(), &ViewState::new(PLAIN)));
}

#[test]
fn machine_without_run_lists_its_devices() {
    let alone = Snapshot { devices: vec![processor()], run: None, warnings: vec![], feed: vec![], ..snapshot() };
    insta::assert_snapshot!(screen(80, 8, &alone, &ViewState::new(PLAIN)));
}

#[test]
fn details_list_categories_and_work() {
    let mut state = ViewState::new(PLAIN);
    press(&mut state, &[KeyCode::Enter]);
    insta::assert_snapshot!(screen(80, 24, &snapshot(), &state));
}

#[test]
fn details_list_measured_categories() {
    let mut shown = snapshot();
    let measured = [(Category::Weight, Bytes::mib(4)), (Category::Workspace, Bytes::mib(1))];
    shown.devices[1].measured_by_category = Some(measured.into());
    let mut state = ViewState::new(PLAIN);
    press(&mut state, &[KeyCode::Enter]);
    let screen = screen(80, 24, &shown, &state);
    let rows: Vec<Vec<&str>> = screen.lines().map(|line| line.split_whitespace().collect()).collect();
    // The plan has no workspace, and nothing of the activations was measured.
    for row in
        ["w weight 4.00 MiB 4.00 MiB", "a activation 6.00 MiB 0 B", "k workspace 0 B 1.00 MiB", "c charges 8.00 MiB"]
    {
        assert!(rows.contains(&row.split(' ').collect()), "{row}: {screen}");
    }
}

#[test]
fn advice_lists_commands_warnings_and_plan() {
    let mut shown = snapshot();
    let command = "plimsoll train runs/sums/run.toml --devices virtual:large=64MiB@0.3,virtual:small=32MiB@0.2 \
                   --set recipe.micro_batch=8";
    shown.recommendations = vec![Recommendation {
        text: "micro-batch 8: 11 % faster, uses 410 MiB more".to_owned(),
        command: command.to_owned(),
        bytes: 410 << 20,
        speedup: 1.11,
    }];
    let worker = WorkerSnapshot {
        device: "virtual:large".to_owned(),
        sequences: Some(6),
        layers: None,
        recipe: "micro-batch 2, recompute nothing".to_owned(),
    };
    shown.run.as_mut().unwrap().plan = Some(PlanSnapshot {
        parallelism: "data parallel".to_owned(),
        effect: "reordered".to_owned(),
        predicted_tokens_per_second: 55_900.0,
        workers: vec![worker],
        excluded: vec![],
    });
    let mut state = ViewState::new(PLAIN);
    press_on(&mut state, &shown, &[KeyCode::Char('r')]);
    insta::assert_snapshot!(screen(80, 10, &shown, &state));
    let narrow = screen(40, 4, &shown, &state);
    assert!(narrow.contains("more lines: Page Down"), "{narrow}");
    press_on(&mut state, &shown, &[KeyCode::PageDown]);
    assert!(screen(40, 6, &shown, &state).contains("recipe.micro_batch=8"));
    press_on(&mut state, &shown, &[KeyCode::Char('r')]);
    assert_eq!(state.screen, Screen::Overview);
}

#[test]
fn map_shows_arena_over_a_small_screen() {
    let mut state = ViewState::new(PLAIN);
    press(&mut state, &[KeyCode::Down, KeyCode::Char('m')]);
    insta::assert_snapshot!(screen(80, 24, &snapshot(), &state));
}

#[test]
fn map_shows_arena_over_a_large_screen() {
    let mut state = ViewState::new(PLAIN);
    press(&mut state, &[KeyCode::Char('m'), KeyCode::Left, KeyCode::Left]);
    insta::assert_snapshot!(screen(120, 40, &snapshot(), &state));
}

#[test]
fn map_keys_move_between_moments() {
    let snapshot = snapshot();
    let mut state = ViewState::new(ASCII);
    press(&mut state, &[KeyCode::Left]);
    assert_eq!(state.moment, None, "only the map has points");
    let moment = |state: &ViewState| {
        let drawn = screen(100, 24, &snapshot, state);
        drawn.lines().find(|line| line.starts_with("point")).unwrap().to_owned()
    };
    press(&mut state, &[KeyCode::Down, KeyCode::Char('m')]);
    assert_eq!(moment(&state), "point 5 of 9: 40.00 MiB in the backward pass, layer 3, at matrix product of down");
    press(&mut state, &[KeyCode::Right]);
    assert!(moment(&state).starts_with("point 6 of 9: 36.80 MiB in the backward pass, layer 2"));
    press(&mut state, &[KeyCode::Left; 20]);
    assert!(moment(&state).starts_with("point 1 of 9: 27.20 MiB in the forward pass, layer 0, at attention"));
    press(&mut state, &[KeyCode::Right; 20]);
    assert_eq!(moment(&state), "point 9 of 9: 24.00 MiB in the update, at adam_w of embedding");
    let far = DeviceSnapshot { load_line_bytes: Some(Bytes::gib(10)), ..snapshot.devices[0].clone() };
    let far = Snapshot { devices: vec![far, processor()], ..snapshot.clone() };
    press(&mut state, &[KeyCode::Up]);
    let drawn = screen(80, 24, &far, &state);
    assert!(drawn.contains("\nline above") && drawn.is_ascii(), "{drawn}");
    press(&mut state, &[KeyCode::Down]);
    assert!(screen(80, 24, &far, &state).starts_with("cpu: no plan of a run"));
    assert_eq!(press(&mut state, &[KeyCode::Esc, KeyCode::Esc]), [Reaction::Redraw, Reaction::Quit]);
}

#[test]
fn plain_terminal_gets_ascii_without_color() {
    let mut terminal = Terminal::new(TestBackend::new(100, 30)).unwrap();
    let state = ViewState { shows_help: true, ..ViewState::new(ASCII) };
    let mut snapshot = snapshot();
    snapshot.run.as_mut().unwrap().folder = "läufe/eins".to_owned();
    terminal.draw(|frame| draw(frame, &snapshot, &state)).unwrap();
    let buffer = terminal.backend().buffer();
    for cell in buffer.content() {
        assert!(cell.symbol().is_ascii(), "{:?}", cell.symbol());
        assert_eq!((cell.fg, cell.bg), (Color::Reset, Color::Reset));
    }
}

#[test]
fn tiny_terminal_does_not_panic() {
    for (width, height) in [(1, 1), (5, 2), (30, 3), (200, 1), (80, 6), (2, 60)] {
        for keys in [&[][..], &[KeyCode::Enter], &[KeyCode::Char('h')], &[KeyCode::Down, KeyCode::Char('m')]] {
            let mut state = ViewState::new(PLAIN);
            press(&mut state, keys);
            screen(width, height, &snapshot(), &state);
        }
    }
}

#[test]
fn snapshot_of_a_hostile_server_is_drawn() {
    let text = "\u{1b}]0;title\u{7}\r\n\u{202e}".to_owned();
    let mut hostile = snapshot();
    hostile.warnings = vec![text.clone(); 1000];
    hostile.feed = vec![FeedEntry { time: f64::MIN, text: text.clone() }; 1000];
    hostile.cpu.load = Some(1e300);
    let process = ProcessSnapshot { pid: 0, name: Some(text.clone()), held_bytes: None, is_plimsoll: false };
    for (device, line) in hostile.devices.iter_mut().zip([0, 1, u64::MAX]) {
        (device.name, device.model) = (text.clone(), Some(text.clone()));
        (device.load_line_bytes, device.total_bytes) = (Some(Bytes(line)), Some(Bytes(u64::MAX - line)));
        (device.charges_bytes, device.others_bytes) = (Some(Bytes(u64::MAX)), Some(Bytes(u64::MAX)));
        (device.measured_peak_bytes, device.utilization, device.power_w) =
            (Some(Bytes::ZERO), Some(-1e300), Some(1e300));
        device.processes = vec![process.clone(); 100];
        for point in &mut device.timeline {
            (point.bytes, point.layer, point.part) = (Bytes(u64::MAX), Some(u32::MAX), Some(text.clone()));
            (point.op, point.tensor) = (Some(text.clone()), Some(text.clone()));
            point.by_category.values_mut().for_each(|bytes| *bytes = Bytes(u64::MAX));
        }
    }
    let run = hostile.run.as_mut().unwrap();
    (run.folder, run.step, run.steps) = (text, u64::MAX, Some(0));
    (run.eta_seconds, run.tokens_per_second, run.loss) = (Some(1e300), Some(-1e300), Some(f64::MAX));
    run.history[7].loss = Some(f64::MIN);
    for keys in
        [&[][..], &[KeyCode::Enter], &[KeyCode::Down, KeyCode::Enter], &[KeyCode::Char('.'); 3], &[KeyCode::Char('m')]]
    {
        let mut state = ViewState::new(PLAIN);
        press(&mut state, keys);
        let drawn = screen(100, 40, &hostile, &state);
        assert!(!drawn.contains(|c: char| c != '\n' && (c.is_control() || c == '\u{202e}')), "{drawn:?}");
    }
}

#[test]
fn details_scroll_to_their_last_line() {
    let processes = (1..=30).map(|pid| ProcessSnapshot { pid, name: None, held_bytes: None, is_plimsoll: false });
    let mut snapshot = snapshot();
    snapshot.devices = vec![DeviceSnapshot { processes: processes.collect(), ..processor() }];
    let mut state = ViewState::new(PLAIN);
    press_on(&mut state, &snapshot, &[KeyCode::Enter]);
    let shown = screen(80, 24, &snapshot, &state);
    assert!(shown.contains("more lines: Page Down") && !shown.contains("30            ? process"), "{shown}");
    press_on(&mut state, &snapshot, &[KeyCode::PageDown; 9]);
    let shown = screen(80, 24, &snapshot, &state);
    assert!(shown.contains("30            ? process") && !shown.contains("more lines"), "{shown}");
    press_on(&mut state, &snapshot, &[KeyCode::PageUp; 9]);
    assert!(screen(80, 24, &snapshot, &state).contains("free on the device"));
}

#[test]
fn keys_select_sort_and_quit() {
    let snapshot = snapshot();
    let mut state = ViewState::new(PLAIN);
    let names =
        |state: &ViewState| state.devices(&snapshot).iter().map(|device| device.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&state), ["virtual:small", "virtual:large", "cpu"], "least headroom first");
    press(&mut state, &[KeyCode::Char('.')]);
    assert_eq!(names(&state), ["virtual:large", "virtual:small", "cpu"], "as in the plan");
    press(&mut state, &[KeyCode::Char(','), KeyCode::Char(',')]);
    assert_eq!(names(&state)[0], "cpu", "busiest first");
    press(&mut state, &[KeyCode::Down; 5]);
    assert_eq!(state.selected, 2);
    assert_eq!(
        press(&mut state, &[KeyCode::Enter, KeyCode::Esc, KeyCode::Esc]),
        [Reaction::Redraw, Reaction::Redraw, Reaction::Quit]
    );
    assert_eq!(press(&mut state, &[KeyCode::Char('q')]), [Reaction::Quit]);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(state.press(interrupt, &snapshot), Reaction::Interrupt);
}

#[test]
fn lines_show_the_same_numbers() {
    let text = lines::lines(&snapshot());
    for part in ["runs/sums running: step 120 of 600  loss 0.6990", "55.9 k tok/s  0:13 left", "planned 40.00 MiB"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&lines::json(&snapshot())).unwrap();
    assert_eq!(json["run"]["tokens_per_second"], 55_900.0);
    assert_eq!(json["devices"][0]["predicted_peak_bytes"], Bytes::mib(40).0);
    assert!(text.contains("virtual:large: predicted peak 40.00 MiB in the backward pass, layer 3, at"), "{text}");
    assert_eq!(json["devices"][0]["timeline"][4]["layer"], 3);
    assert_eq!(json["devices"][0]["power_w"], serde_json::Value::Null);
}
