//! Built-in chat templates, by name. Each is prefix-preserving: it writes earlier turns as it writes the last one.

/// Names and texts of the built-in templates.
const TEMPLATES: [(&str, &str); 9] = [
    ("chatml", include_str!("template/builtin/chatml.jinja")),
    ("llama3", include_str!("template/builtin/llama3.jinja")),
    ("qwen", include_str!("template/builtin/qwen.jinja")),
    ("mistral", include_str!("template/builtin/mistral.jinja")),
    ("gemma", include_str!("template/builtin/gemma.jinja")),
    ("phi", include_str!("template/builtin/phi.jinja")),
    ("zephyr", include_str!("template/builtin/zephyr.jinja")),
    ("alpaca", include_str!("template/builtin/alpaca.jinja")),
    ("vicuna", include_str!("template/builtin/vicuna.jinja")),
];

/// Returns the text of a built-in template, and `None` if there is none of this name.
pub(super) fn text(name: &str) -> Option<&'static str> {
    TEMPLATES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Returns the names of the built-in templates, for messages.
pub(super) fn names() -> String {
    TEMPLATES.map(|(name, _)| name).join(", ")
}
