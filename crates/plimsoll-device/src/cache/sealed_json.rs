//! JSON objects with a checksum: a last key `crc32` holds the CRC-32 of the object without it, as compact JSON. The
//! checksum covers every key and value in their order, but no spaces and line breaks.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The key of the checksum.
const KEY: &str = "crc32";

/// Reason that a sealed JSON object cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SealedJsonError {
    /// The text is no JSON, or the object has other fields than the type.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The value is not an object.
    #[error("not a JSON object")]
    NoObject,
    /// The checksum is missing, or is not that of the content.
    #[error("its checksum does not match: the content was changed")]
    Checksum,
}

/// Returns `value`, which has the JSON form of an object, with its checksum.
///
/// # Errors
/// The value has no JSON form, or another one.
pub fn seal(value: &impl Serialize) -> Result<Value, SealedJsonError> {
    let Value::Object(mut object) = serde_json::to_value(value)? else { return Err(SealedJsonError::NoObject) };
    object.shift_remove(KEY);
    let checksum = checksum(&object)?;
    object.insert(KEY.to_owned(), checksum.into());
    Ok(Value::Object(object))
}

/// Whether a value is an object with a checksum, right or wrong.
pub fn is_sealed(value: &Value) -> bool {
    value.get(KEY).is_some()
}

/// Returns the value that was sealed.
///
/// # Errors
/// The checksum is missing or wrong, or the object has other fields than `T`.
pub fn unseal<T: DeserializeOwned>(sealed: Value) -> Result<T, SealedJsonError> {
    let Value::Object(mut object) = sealed else { return Err(SealedJsonError::NoObject) };
    let stored = object.shift_remove(KEY);
    if stored != Some(checksum(&object)?.into()) {
        return Err(SealedJsonError::Checksum);
    }
    Ok(serde_json::from_value(Value::Object(object))?)
}

/// Returns the value that was sealed and written as JSON text.
///
/// # Errors
/// As [`unseal`], or the text is no JSON.
pub fn from_slice<T: DeserializeOwned>(text: &[u8]) -> Result<T, SealedJsonError> {
    unseal(serde_json::from_slice(text)?)
}

fn checksum(object: &Map<String, Value>) -> Result<u32, serde_json::Error> {
    Ok(crc32fast::hash(&serde_json::to_vec(object)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn no_changed_byte_passes() {
        let value = json!({"gpu": "Example", "rates": [1.5e9, 0.1, 7], "nested": {"b": null, "a": u64::MAX}});
        let text = seal(&value).unwrap().to_string().into_bytes();
        assert_eq!(from_slice::<Value>(&text).unwrap(), value);
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut changed = text.clone();
                changed[at] ^= 1 << bit;
                // Another spelling of the same number is no change.
                let same = from_slice::<Value>(&changed).is_ok_and(|read| read != value);
                assert!(!same, "{}", String::from_utf8_lossy(&changed));
            }
        }
    }

    #[test]
    fn damaged_entry_is_dropped_alone() {
        let folder = tempfile::tempdir().unwrap();
        let entries = [json!({"rate": 10}), json!({"rate": 20})];
        super::super::save(folder.path(), "rates.json", &entries);
        let file = folder.path().join("rates.json");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.replace("\"rate\": 20", "\"rate\": 21")).unwrap();
        assert_eq!(super::super::load::<Value>(&file), entries[..1]);
        std::fs::write(&file, r#"[{"rate": 30}]"#).unwrap();
        assert_eq!(super::super::load::<Value>(&file), [json!({"rate": 30})], "written by hand");
    }
}
