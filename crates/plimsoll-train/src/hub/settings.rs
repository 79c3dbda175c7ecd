//! Settings of the hub from the environment, with the variables and defaults of `huggingface_hub`.

use super::error::HubError;
use plimsoll_device::regular_file;
use std::env;
use std::path::PathBuf;

/// The hub that is asked without `HF_ENDPOINT`.
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// A secret of an account on the hub. It is printed nowhere.
pub(super) struct Token {
    pub(super) value: String,
    /// The variable or file that holds it.
    pub(super) source: String,
}

/// Place of the hub and of its cache, and the rights of the user.
pub struct HubSettings {
    /// Folder with a folder for each repository.
    pub(super) cache: PathBuf,
    /// Address of the hub, without a slash at its end.
    pub(super) endpoint: String,
    pub(super) token: Option<Token>,
    /// Whether only the cache is used.
    pub(super) offline: bool,
}

/// Value of a variable; `None` if it is not set or empty.
fn variable(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().trim().to_owned()).filter(|value| !value.is_empty())
}

impl HubSettings {
    /// Reads the settings: `HF_HUB_CACHE`, `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// An endpoint that is no address, a token with characters that no token has, or no folder for the cache.
    pub fn from_environment() -> Result<HubSettings, HubError> {
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let is_address = ["https://", "http://"].iter().any(|scheme| endpoint.starts_with(scheme));
        if !is_address || endpoint.contains(|letter: char| letter.is_whitespace() || letter.is_control()) {
            let problem = format!("`{endpoint}` is no address such as {DEFAULT_ENDPOINT}");
            return Err(HubError::Setting { variable: "HF_ENDPOINT", problem });
        }
        let is_true = |value: String| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str());
        let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().filter_map(variable).any(is_true);
        let cache = cache_folder().ok_or_else(|| HubError::Setting {
            variable: "HF_HOME",
            problem: "there is no home folder for the cache of the hub".to_owned(),
        })?;
        Ok(HubSettings { cache, endpoint, token: read_token()?, offline })
    }

    /// Returns the address of a page or file on the hub.
    pub(super) fn address(&self, path: &str) -> String {
        format!("{}/{path}", self.endpoint)
    }
}

/// Reads the token from `HF_TOKEN`, or else from the file that `hf auth login` writes.
fn read_token() -> Result<Option<Token>, HubError> {
    let in_variable = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].into_iter().find_map(|name| Some((variable(name)?, name)));
    let token = match in_variable {
        Some((value, name)) => Some(Token { value, source: name.to_owned() }),
        None => token_file().and_then(|path| {
            let value = regular_file::read_text(&path).ok()?.trim().to_owned();
            (!value.is_empty()).then(|| Token { value, source: path.display().to_string() })
        }),
    };
    if let Some(Token { value, source }) = &token
        && !value.bytes().all(|byte| byte.is_ascii_graphic())
    {
        let problem = format!("the token in {source} has spaces or other characters that no token has");
        return Err(HubError::Setting { variable: "HF_TOKEN", problem });
    }
    Ok(token)
}

fn token_file() -> Option<PathBuf> {
    let named = |name: &str| variable(name).map(PathBuf::from);
    named("HF_TOKEN_PATH").or_else(|| Some(home_folder(named)?.join("token")))
}

/// Returns the folder in which Hugging Face's libraries keep downloaded repositories; `None` if the home folder is
/// unknown.
pub fn cache_folder() -> Option<PathBuf> {
    cache_folder_in(|name| variable(name).map(PathBuf::from))
}

/// Returns the folder of [`cache_folder`] in an environment, whose variables `named` returns.
fn cache_folder_in(named: impl Fn(&str) -> Option<PathBuf> + Copy) -> Option<PathBuf> {
    let cache = named("HF_HUB_CACHE").or_else(|| named("HUGGINGFACE_HUB_CACHE"));
    cache.or_else(|| Some(home_folder(named)?.join("hub")))
}

/// Returns the folder of Hugging Face's libraries in an environment.
fn home_folder(named: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let caches = || named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")));
    named("HF_HOME").or_else(|| Some(caches()?.join("huggingface")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_folder_follows_the_environment() {
        let variables = [("HF_HUB_CACHE", "/a"), ("HF_HOME", "/b"), ("XDG_CACHE_HOME", "/c"), ("HOME", "/d")];
        let folder = |known: usize| {
            let set = &variables[known..];
            let folder =
                cache_folder_in(|name| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()));
            folder.map(|folder| folder.to_string_lossy().into_owned())
        };
        for (known, expected) in ["/a", "/b/hub", "/c/huggingface/hub", "/d/.cache/huggingface/hub"].iter().enumerate()
        {
            assert_eq!(folder(known).as_deref(), Some(*expected));
        }
        assert_eq!(folder(variables.len()), None);
    }
}
