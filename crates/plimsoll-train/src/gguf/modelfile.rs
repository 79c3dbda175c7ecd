//! The Modelfile of Ollama: the file to load, and the settings of generation.
//!
//! It has no `TEMPLATE`: Ollama takes the chat template of the GGUF file if it knows it.

use serde_json::Value;
use std::path::Path;

/// Keys of `generation_config.json` with the parameters of Ollama.
const PARAMETERS: [(&str, &str); 4] =
    [("temperature", "temperature"), ("top_p", "top_p"), ("top_k", "top_k"), ("repetition_penalty", "repeat_penalty")];

/// Returns the text of a Modelfile at `path` for the file `gguf`, with the settings of a `generation_config.json` and the
/// texts at which generation stops.
pub fn modelfile(path: &Path, gguf: &Path, settings: &Value, stops: &[String]) -> String {
    let mut text = format!("FROM {}\n", from_path(path, gguf));
    for (key, parameter) in PARAMETERS {
        if let Some(number) = settings.get(key).filter(|value| value.is_number()) {
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
    use serde_json::json;

    #[test]
    fn modelfile_has_path_settings_and_stops() {
        let settings =
            json!({"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "do_sample": true, "top_p": null});
        let stops = ["<|im_end|>".to_owned(), "a\"b".to_owned()];
        let text = modelfile(Path::new("out/Modelfile"), Path::new("out/model.gguf"), &settings, &stops);
        let expected = "FROM ./model.gguf\nPARAMETER temperature 0.7\nPARAMETER top_k 20\nPARAMETER repeat_penalty 1.05\n\
                        PARAMETER stop \"<|im_end|>\"\nPARAMETER stop \"\"\"a\"b\"\"\"\n";
        assert_eq!(text, expected);
        let text = modelfile(Path::new("Modelfile"), Path::new("/data/model.gguf"), &Value::Null, &[]);
        assert_eq!(text, "FROM /data/model.gguf\n");
    }
}
