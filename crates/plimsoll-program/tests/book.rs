//! The documentation's table of presets agrees with the code.

use plimsoll_program::models::{preset, preset_names};

#[test]
fn documentation_lists_every_preset() {
    let book = include_str!("../../../docs/models.md");
    let listed: Vec<&str> = book.lines().filter(|line| line.starts_with("| `")).collect();
    let known: Vec<String> = preset_names()
        .map(|name| {
            let config = preset(name).expect("a preset has its own name");
            let kind = config.model_type.name();
            format!("| `{name}` | `{kind}` | {} |", size(config.parameters()))
        })
        .collect();
    assert_eq!(listed, known);
}

fn size(parameters: u64) -> String {
    match parameters as f64 {
        count if count < 999.5e6 => format!("{:.0} M", count / 1e6),
        count => format!("{:.2} B", count / 1e9),
    }
}
