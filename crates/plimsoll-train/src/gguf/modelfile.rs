//! The Modelfile of Ollama: the file to load, and the settings of generation.
//!
//! It has no `TEMPLATE`: Ollama takes the chat template of the GGUF file if it knows it.

use crate::files::GenerationDefaults;
use std::path::Path;

/// Returns the text of a Modelfile at `path` for the file `gguf`, with the rules of sampling of the model and the texts at
/// which generation stops. A model without `do_sample` gets temperature 0, so Ollama takes its most likely token, as
/// `plimsoll generate` does.
pub fn modelfile(path: &Path, gguf: &Path, defaults: &GenerationDefaults, stops: &[String]) -> String {
    let mut text = format!("FROM {}\n", from_path(path, gguf));
    let temperature = if defaults.do_sample == Some(true) { defaults.temperature } else { Some(0.0) };
    let parameters = [
        ("temperature", temperature),
        ("top_p", defaults.top_p),
        ("top_k", defaults.top_k.map(|tokens| tokens as f64)),
        ("min_p", defaults.min_p),
        ("repeat_penalty", defaults.repetition_penalty),
        ("num_predict", defaults.max_new_tokens.map(|tokens| tokens as f64)),
    ];
    for (parameter, value) in parameters {
        if let Some(number) = value {
            text += &format!("PARAMETER {parameter} {number}\n");
        }
    }
    for stop in stops {
        text += &format!("PARAMETER stop {}\n", quoted(stop));
    }
    text
}

/// Returns the path of the GGUF file as a Modelfile names it: relative if both files are in the same folder.
fn from_path(path: &Path, gguf: &Path) -> String {
    let folder = |file: &Path| std::path::absolute(file).ok().and_then(|file| Some(file.parent()?.to_owned()));
    match gguf.file_name() {
        Some(name) if folder(path) == folder(gguf) => format!("./{}", name.to_string_lossy()),
        _ => std::path::absolute(gguf).unwrap_or_else(|_| gguf.to_owned()).display().to_string(),
    }
}

/// Returns a text in the quotes of a Modelfile.
fn quoted(text: &str) -> String {
    if text.contains(['"', '\n']) { format!("\"\"\"{text}\"\"\"") } else { format!("\"{text}\"") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modelfile_has_path_settings_and_stops() {
        let defaults = GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.7),
            top_k: Some(20),
            repetition_penalty: Some(1.05),
            ..GenerationDefaults::default()
        };
        let stops = ["<|im_end|>".to_owned(), "a\"b".to_owned()];
        let text = modelfile(Path::new("out/Modelfile"), Path::new("out/model.gguf"), &defaults, &stops);
        let expected = "FROM ./model.gguf\nPARAMETER temperature 0.7\nPARAMETER top_k 20\nPARAMETER repeat_penalty 1.05\n\
                        PARAMETER stop \"<|im_end|>\"\nPARAMETER stop \"\"\"a\"b\"\"\"\n";
        assert_eq!(text, expected);
        // Without `do_sample`, the temperature of the file has no effect.
        let greedy = GenerationDefaults { temperature: Some(0.7), ..GenerationDefaults::default() };
        let text = modelfile(Path::new("Modelfile"), Path::new("/data/model.gguf"), &greedy, &[]);
        assert_eq!(text, "FROM /data/model.gguf\nPARAMETER temperature 0\n");
    }
}
