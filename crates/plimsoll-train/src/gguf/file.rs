//! Reading of the header of a GGUF file: its keys, and the type and place of each tensor.
//!
//! A file may be damaged or lie, so each length is checked against the bytes that follow before memory is taken for it.

use super::error::GgufError;
use super::metadata::{ALIGNMENT, MAGIC, value_type};
use crate::block_types::BlockType;
use crate::files::FilesError;
use plimsoll_device::regular_file;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

/// Most keys, tensors and list elements of a file.
const COUNT_MAX: u64 = 1 << 24;
/// Longest text in bytes.
const TEXT_BYTES_MAX: u64 = 1 << 24;
/// Most dimensions of a tensor.
const DIMENSIONS_MAX: u32 = 4;

/// A GGUF file, open for reading, with its header.
#[derive(Debug)]
pub struct GgufFile {
    /// Path of the file.
    pub path: PathBuf,
    /// The open file.
    pub file: File,
    /// The value of each key. Numbers, texts and lists have their form in JSON.
    pub keys: BTreeMap<String, Value>,
    /// Each tensor by its name.
    pub tensors: BTreeMap<String, StoredTensor>,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// Shape: rows, then columns; or elements.
    pub shape: Vec<u64>,
    /// Type of the elements.
    pub block_type: BlockType,
    /// Offset of the first byte in the file.
    pub begin: u64,
}

impl GgufFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// A file that cannot be read, a damaged header, or a tensor of a type that cannot be read.
    pub fn open(path: &Path) -> Result<GgufFile, GgufError> {
        let file = regular_file::open(path).map_err(|error| FilesError::io(path, "read", error))?;
        let bytes = file.metadata().map_err(|error| FilesError::io(path, "read", error))?.len();
        let reader = BufReader::new(&file);
        let mut header = HeaderReader { reader, read: 0, bytes, left: COUNT_MAX };
        let (keys, tensors) = header.read_all().map_err(|error| error.at(path))?;
        Ok(GgufFile { path: path.to_owned(), file, keys, tensors })
    }
}

/// The reason why a header cannot be read.
enum HeaderError {
    Io(io::Error),
    Malformed(String),
    UnsupportedType { tensor: String, number: u32 },
}

impl HeaderError {
    fn at(self, path: &Path) -> GgufError {
        let path = path.to_owned();
        match self {
            HeaderError::Io(error) => FilesError::io(&path, "read", error).into(),
            HeaderError::Malformed(reason) => GgufError::Malformed { path, reason },
            HeaderError::UnsupportedType { tensor, number } => {
                GgufError::UnsupportedType { path, tensor, type_name: name_type(number) }
            }
        }
    }
}

/// Returns the name of a type of elements that cannot be read.
fn name_type(number: u32) -> String {
    let known = [
        (3, "q4_1"),
        (9, "q8_1"),
        (10, "q2_k"),
        (11, "q3_k"),
        (15, "q8_k"),
        (16, "iq2_xxs"),
        (17, "iq2_xs"),
        (18, "iq3_xxs"),
        (19, "iq1_s"),
        (20, "iq4_nl"),
        (21, "iq3_s"),
        (22, "iq2_s"),
        (23, "iq4_xs"),
        (28, "f64"),
        (29, "iq1_m"),
        (34, "tq1_0"),
        (35, "tq2_0"),
        (39, "mxfp4"),
    ];
    let name = known.into_iter().find(|(known, _)| *known == number).map(|(_, name)| name.to_owned());
    name.unwrap_or_else(|| format!("number {number}"))
}

/// Name, shape, type and offset of a tensor, as the header has them.
struct TensorInfo {
    name: String,
    shape: Vec<u64>,
    block_type: BlockType,
    offset: u64,
}

type Header = (BTreeMap<String, Value>, BTreeMap<String, StoredTensor>);

/// A header that is read from its beginning.
struct HeaderReader<R> {
    reader: R,
    /// Bytes that have been read.
    read: u64,
    /// Size of the file in bytes.
    bytes: u64,
    /// Number of keys, tensors and list elements that may still follow.
    left: u64,
}

impl<R: Read> HeaderReader<R> {
    fn read_all(&mut self) -> Result<Header, HeaderError> {
        if self.take::<4>()? != *MAGIC {
            return Err(HeaderError::Malformed("no GGUF file: it does not begin with `GGUF`".to_owned()));
        }
        let version = self.number_u32()?;
        if !(2..=3).contains(&version) {
            return Err(HeaderError::Malformed(format!("GGUF version {version}; versions 2 and 3 can be read")));
        }
        let (tensor_count, key_count) = (self.count()?, self.count()?);
        let mut keys = BTreeMap::new();
        for _ in 0..key_count {
            let (key, value_type) = (self.text()?, self.number_u32()?);
            let value = self.value(value_type, true)?;
            if keys.insert(key.clone(), value).is_some() {
                return Err(HeaderError::Malformed(format!("the key `{key}` occurs twice")));
            }
        }
        let infos = (0..tensor_count).map(|_| self.tensor()).collect::<Result<Vec<TensorInfo>, HeaderError>>()?;
        let alignment = keys.get("general.alignment").map_or(Some(ALIGNMENT), Value::as_u64);
        let Some(alignment) = alignment.filter(|alignment| alignment.is_power_of_two()) else {
            return Err(HeaderError::Malformed("general.alignment is no power of two".to_owned()));
        };
        let Some(data) = self.read.checked_next_multiple_of(alignment) else { return Err(ends_early()) };
        let mut tensors = BTreeMap::new();
        for TensorInfo { name, shape, block_type, offset } in infos {
            let elements = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
            let bytes =
                elements.and_then(|elements| (elements / block_type.elements()).checked_mul(block_type.block_bytes()));
            let begin = data.checked_add(offset);
            let end = bytes.zip(begin).and_then(|(bytes, begin)| begin.checked_add(bytes));
            let (Some(begin), Some(_)) = (begin, end.filter(|end| *end <= self.bytes)) else {
                return Err(HeaderError::Malformed(format!(
                    "tensor `{name}` ends beyond the file: it is cut off or damaged"
                )));
            };
            if tensors.insert(name.clone(), StoredTensor { shape, block_type, begin }).is_some() {
                return Err(HeaderError::Malformed(format!("the tensor `{name}` occurs twice")));
            }
        }
        Ok((keys, tensors))
    }

    fn tensor(&mut self) -> Result<TensorInfo, HeaderError> {
        let (name, dimensions) = (self.text()?, self.number_u32()?);
        if !(1..=DIMENSIONS_MAX).contains(&dimensions) {
            return Err(HeaderError::Malformed(format!("tensor `{name}` has {dimensions} dimensions")));
        }
        // The file has the columns first.
        let mut shape = (0..dimensions).map(|_| self.number_u64()).collect::<Result<Vec<u64>, HeaderError>>()?;
        shape.reverse();
        let (number, offset) = (self.number_u32()?, self.number_u64()?);
        let Some(block_type) = BlockType::ALL.into_iter().find(|block_type| block_type.id() == number) else {
            return Err(HeaderError::UnsupportedType { tensor: name, number });
        };
        let columns = shape[shape.len() - 1];
        if !columns.is_multiple_of(block_type.elements()) {
            let blocks = block_type.elements();
            let reason = format!("tensor `{name}` has {columns} columns, no multiple of the {blocks} of {block_type}");
            return Err(HeaderError::Malformed(reason));
        }
        Ok(TensorInfo { name, shape, block_type, offset })
    }

    /// Reads a value of a type. A list may be within a list only if `may_nest`.
    fn value(&mut self, value_type: u32, may_nest: bool) -> Result<Value, HeaderError> {
        Ok(match value_type {
            value_type::U8 => self.take::<1>()?[0].into(),
            value_type::I8 => (self.take::<1>()?[0] as i8).into(),
            value_type::U16 => u16::from_le_bytes(self.take()?).into(),
            value_type::I16 => i16::from_le_bytes(self.take()?).into(),
            value_type::U32 => self.number_u32()?.into(),
            value_type::I32 => i32::from_le_bytes(self.take()?).into(),
            value_type::F32 => decimal(f32::from_le_bytes(self.take()?)).into(),
            value_type::BOOL => (self.take::<1>()?[0] != 0).into(),
            value_type::STRING => self.text()?.into(),
            value_type::U64 => self.number_u64()?.into(),
            value_type::I64 => i64::from_le_bytes(self.take()?).into(),
            value_type::F64 => f64::from_le_bytes(self.take()?).into(),
            value_type::ARRAY if may_nest => {
                let (inner, count) = (self.number_u32()?, self.count()?);
                let values = (0..count).map(|_| self.value(inner, false));
                values.collect::<Result<Vec<Value>, HeaderError>>()?.into()
            }
            other => return Err(HeaderError::Malformed(format!("a key has a value of type {other}"))),
        })
    }

    fn text(&mut self) -> Result<String, HeaderError> {
        let length = self.number_u64()?;
        if length > TEXT_BYTES_MAX || length > self.bytes.saturating_sub(self.read) {
            return Err(HeaderError::Malformed(format!(
                "a text of {length} bytes should follow, more than the file has: it is cut off or damaged"
            )));
        }
        let mut text = vec![0; length as usize];
        self.fill(&mut text)?;
        String::from_utf8(text).map_err(|_| HeaderError::Malformed("a text is not UTF-8".to_owned()))
    }

    /// Reads the number of values that follow. Each has a byte at least.
    fn count(&mut self) -> Result<u64, HeaderError> {
        let count = self.number_u64()?;
        if count > self.left || count > self.bytes.saturating_sub(self.read) {
            return Err(HeaderError::Malformed(format!(
                "{count} values should follow, more than the file has: it is cut off or damaged"
            )));
        }
        self.left -= count;
        Ok(count)
    }

    fn number_u32(&mut self) -> Result<u32, HeaderError> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn number_u64(&mut self) -> Result<u64, HeaderError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn take<const BYTES: usize>(&mut self) -> Result<[u8; BYTES], HeaderError> {
        let mut bytes = [0; BYTES];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<(), HeaderError> {
        self.reader.read_exact(into).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ends_early(),
            _ => HeaderError::Io(error),
        })?;
        self.read += into.len() as u64;
        Ok(())
    }
}

fn ends_early() -> HeaderError {
    HeaderError::Malformed("the file ends within its header: it is cut off or damaged".to_owned())
}

/// Returns the shortest decimal number that rounds to `value`: 0.00001, and not 0.000009999999747.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

#[cfg(test)]
mod tests {
    use super::super::import::{ImportError, read_parts};
    use super::super::metadata::{Metadata, MetadataValue};
    use super::super::planned_tensor::PlannedTensor;
    use super::*;
    use proptest::prelude::*;

    /// Returns the bytes of a file with a model of one layer, whose tensors are zeros.
    fn small_file() -> Vec<u8> {
        let mut metadata = Metadata::default();
        metadata.push("general.architecture", "llama");
        for (key, value) in [
            ("embedding_length", 32u32),
            ("block_count", 1),
            ("feed_forward_length", 32),
            ("attention.head_count", 2),
            ("context_length", 64),
        ] {
            metadata.push(format!("llama.{key}"), value);
        }
        metadata.push("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
        metadata.push("tokenizer.ggml.model", "llama");
        let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
        let texts: Vec<String> = ["<unk>", "a", "b", "ab"].map(str::to_owned).into_iter().chain(bytes).collect();
        let scores = (0..texts.len()).map(|id| -(id as f32)).collect();
        let kinds = texts.iter().map(|text| if text.starts_with("<0x") { 6 } else { 1 }).collect();
        metadata.push("tokenizer.ggml.tokens", MetadataValue::Strings(texts));
        metadata.push("tokenizer.ggml.scores", MetadataValue::F32s(scores));
        metadata.push("tokenizer.ggml.token_type", MetadataValue::I32s(kinds));
        let mut embedding = PlannedTensor::computed("token_embd.weight", 260);
        embedding.shape = vec![260, 32];
        let tensors = [embedding, PlannedTensor::computed("rope_freqs.weight", 8)];
        let data: u64 = tensors.iter().map(PlannedTensor::bytes).sum();
        let mut file = metadata.encode(&tensors);
        file.resize(file.len() + data as usize, 0);
        file
    }

    fn open(bytes: &[u8]) -> Result<GgufFile, GgufError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        GgufFile::open(file.path())
    }

    #[test]
    fn header_has_keys_and_tensors() {
        let file = open(&small_file()).unwrap();
        assert_eq!(file.keys["llama.block_count"], 1);
        assert_eq!(file.keys["llama.attention.layer_norm_rms_epsilon"], 1e-5);
        assert_eq!(file.keys["tokenizer.ggml.tokens"][3], "ab");
        let embedding = &file.tensors["token_embd.weight"];
        assert_eq!((&embedding.shape[..], embedding.block_type), (&[260, 32][..], BlockType::F32));
        assert_eq!(embedding.begin + 4 * 260 * 32, file.tensors["rope_freqs.weight"].begin);
        let Err(ImportError::Unsupported(part)) = read_parts(&file) else { panic!("zeros are no divisors") };
        assert_eq!(part, "the divisors in `rope_freqs.weight` are not those of Llama 3");
    }

    proptest! {
        /// Damaged files are read or refused, and nothing panics.
        #[test]
        fn damaged_files_do_not_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6), cut in any::<Option<prop::sample::Index>>()) {
            let mut bytes = small_file();
            // Most bytes are data, which nothing checks here.
            let header = bytes.len() - 4 * 260 * 32;
            for (at, byte) in changes {
                bytes[at.index(header)] = byte;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(header));
            }
            if let Ok(file) = open(&bytes) {
                let _ = read_parts(&file);
            }
        }
    }
}
