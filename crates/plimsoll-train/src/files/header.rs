//! Parser of the header of a `*.safetensors` file. It works on bytes in memory and opens no file.
//!
//! Layout of a file: a length L (u64, little endian), L bytes of JSON with the type, shape and data offsets of each
//! tensor, then the data. The published `safetensors` crate needs the whole file to read the header, accepts duplicate
//! names silently, and does not say which tensor is invalid. Only its types are used here.

use super::error::HeaderError;
use safetensors::Dtype;
use serde::de::{Error as _, IgnoredAny, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;

/// Size in bytes of the length field at the beginning of a `*.safetensors` file.
pub(super) const LENGTH_BYTES: u64 = 8;

/// Size limit of a `*.safetensors` header in bytes, set by the format.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A tensor as the header of a `*.safetensors` file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeaderEntry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Offset in bytes from the first byte of the data.
    pub begin: u64,
    pub bytes: u64,
}

/// Decodes the length of the header in bytes from `prefix`, the first 8 bytes of a file. Checks that a file of
/// `file_bytes` bytes can hold such a header.
pub(super) fn check_header_bytes(prefix: [u8; 8], file_bytes: u64) -> Result<u64, HeaderError> {
    let bytes = u64::from_le_bytes(prefix);
    let left = file_bytes.saturating_sub(LENGTH_BYTES);
    if bytes > left {
        return Err(HeaderError::Truncated { bytes, left });
    }
    if bytes > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLarge { bytes, max_bytes: MAX_HEADER_BYTES });
    }
    Ok(bytes)
}

/// Parses the header of a file with `data_bytes` bytes of data. Returns the tensors in the order of their data. Fails
/// unless they cover all data without gap or overlap.
pub(super) fn parse_header(json: &[u8], data_bytes: u64) -> Result<Vec<HeaderEntry>, HeaderError> {
    let header: JsonHeader = serde_json::from_slice(json).map_err(|e| HeaderError::Json { message: e.to_string() })?;
    let mut tensors = header.0.into_iter().map(parse_entry).collect::<Result<Vec<_>, _>>()?;
    tensors.sort_by_key(|tensor| (tensor.begin, tensor.bytes));
    let mut end = 0;
    for tensor in &tensors {
        if tensor.begin != end {
            return Err(HeaderError::WrongOffset { tensor: tensor.name.clone(), begin: tensor.begin, expected: end });
        }
        // Cannot overflow: begin + bytes is the u64 end offset from the header.
        end += tensor.bytes;
    }
    if end != data_bytes {
        return Err(HeaderError::WrongDataLength { needed: end, found: data_bytes });
    }
    Ok(tensors)
}

/// Converts a tensor's entry in the JSON header, a pair of its name and its properties, to a [`HeaderEntry`].
///
/// # Errors
/// An unknown type, or offsets that do not span exactly the bytes that type and shape need.
fn parse_entry((name, raw): (String, JsonEntry)) -> Result<HeaderEntry, HeaderError> {
    let JsonEntry { dtype: dtype_name, shape, data_offsets: [begin, end] } = raw;
    let deserializer: serde::de::value::StrDeserializer<serde::de::value::Error> =
        dtype_name.as_str().into_deserializer();
    let Ok(dtype) = Dtype::deserialize(deserializer) else {
        return Err(HeaderError::UnknownDType { tensor: name, dtype: dtype_name });
    };
    let elements = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    let needed = elements
        .and_then(|elements| elements.checked_mul(dtype.bitsize() as u64))
        .filter(|bits| bits.is_multiple_of(8))
        .map(|bits| bits / 8);
    match end.checked_sub(begin) {
        Some(bytes) if needed == Some(bytes) => Ok(HeaderEntry { name, dtype, shape, begin, bytes }),
        _ => {
            let spanned = i128::from(end) - i128::from(begin);
            Err(HeaderError::SizeMismatch { tensor: name, dtype: dtype_name, shape, spanned, needed })
        }
    }
}

#[derive(Deserialize)]
struct JsonEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's tensors as they stand in the JSON.
struct JsonHeader(Vec<(String, JsonEntry)>);

impl<'de> Deserialize<'de> for JsonHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<JsonHeader, D::Error> {
        unique_map(deserializer, "tensor", &["__metadata__"]).map(JsonHeader)
    }
}

/// Deserializes an object as a list of pairs and refuses duplicate names. Entries named in `skipped` are dropped;
/// `noun` names an entry in messages.
pub(super) fn unique_map<'de, D, T>(
    deserializer: D,
    noun: &'static str,
    skipped: &'static [&'static str],
) -> Result<Vec<(String, T)>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Pairs<T>(&'static str, &'static [&'static str], PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Pairs<T> {
        type Value = Vec<(String, T)>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "an object with a value for each {}", self.0)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut seen = BTreeSet::new();
            let mut pairs = Vec::new();
            while let Some(name) = map.next_key::<String>()? {
                if !seen.insert(name.clone()) {
                    return Err(A::Error::custom(format!("{} `{name}` occurs twice", self.0)));
                }
                if self.1.contains(&name.as_str()) {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
                let value = map.next_value().map_err(|e| A::Error::custom(format!("{} `{name}`: {e}", self.0)))?;
                pairs.push((name, value));
            }
            Ok(pairs)
        }
    }

    deserializer.deserialize_map(Pairs(noun, skipped, PhantomData))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TWO: &str = r#"{"__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]},
        "a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}"#;

    #[test]
    fn tensors_are_sorted_by_data_offset() {
        let tensors = parse_header(TWO.as_bytes(), 14).unwrap();
        let facts: Vec<_> = tensors.iter().map(|p| (p.name.as_str(), p.dtype, p.begin, p.bytes)).collect();
        assert_eq!(facts, [("a", Dtype::F32, 0, 8), ("b", Dtype::BF16, 8, 6)]);
        assert_eq!(parse_header(b"{}  ", 0), Ok(vec![]));
    }

    #[test]
    fn inconsistent_headers_are_refused_by_tensor() {
        let changed = |from: &str, to: &str| {
            assert!(TWO.contains(from), "{from}");
            parse_header(TWO.replace(from, to).as_bytes(), 14).unwrap_err().to_string()
        };
        assert_eq!(changed("BF16", "BF17"), "tensor `b` has the unknown type `BF17`");
        assert_eq!(changed("[3]", "[4]"), "tensor `b` (BF16 [4]) spans 6 bytes, but needs 8");
        assert_eq!(changed("[8, 14]", "[14, 8]"), "tensor `b` (BF16 [3]) spans -6 bytes, but needs 6");
        let gap = "tensor `b` begins at byte 10 of the data, but the previous tensor ends at 8";
        assert_eq!(changed("[8, 14]", "[10, 16]"), gap);
        let overlap = "tensor `b` begins at byte 4 of the data, but the previous tensor ends at 8";
        assert_eq!(changed("[8, 14]", "[4, 10]"), overlap);
        let wide = changed("[3]", "[4294967296, 4294967296]");
        assert!(wide.ends_with("spans 6 bytes, but its shape is too large"), "{wide}");
        assert!(changed("\"b\"", "\"a\"").contains("tensor `a` occurs twice"));
        assert!(changed("[3]", "[-3]").contains("tensor `b`: invalid value"));
        assert!(changed("\"dtype\": \"BF16\",", "").contains("tensor `b`: missing field `dtype`"));
        let cut = parse_header(TWO.as_bytes(), 13).unwrap_err().to_string();
        assert_eq!(cut, "the tensors need 14 bytes of data, but the file has 13: it is truncated");
        assert!(matches!(parse_header(TWO.as_bytes(), 15), Err(HeaderError::WrongDataLength { .. })));
    }

    #[test]
    fn impossible_length_is_refused_before_allocation() {
        assert_eq!(
            check_header_bytes(u64::MAX.to_le_bytes(), 100),
            Err(HeaderError::Truncated { bytes: u64::MAX, left: 92 })
        );
        assert!(matches!(check_header_bytes([0; 8], 3), Ok(0)));
        let large = check_header_bytes((MAX_HEADER_BYTES + 1).to_le_bytes(), 1 << 40);
        assert!(matches!(large, Err(HeaderError::TooLarge { .. })));
    }

    proptest! {
        #[test]
        fn arbitrary_headers_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), data in any::<u64>()) {
            let _ = parse_header(&bytes, data);
        }

        /// An accepted header covers the data exactly, even after random changes.
        #[test]
        fn accepted_header_covers_data_exactly(
            changes in prop::collection::vec((0usize..TWO.len(), any::<u8>()), 1..4),
            number in any::<u64>(),
            data in prop_oneof![Just(14u64), 0u64..64],
        ) {
            let mut bytes = TWO.as_bytes().to_vec();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            for text in [bytes, TWO.replace("14", &number.to_string()).into_bytes()] {
                if let Ok(tensors) = parse_header(&text, data) {
                    prop_assert_eq!(tensors.iter().map(|p| p.bytes).sum::<u64>(), data);
                }
            }
        }
    }
}
