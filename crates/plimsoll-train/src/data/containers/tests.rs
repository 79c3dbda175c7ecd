//! Tests of all containers: the same documents from each, refusals with file and place, and arbitrary bytes.

use super::super::testing::{documents_of, read_file};
use super::super::{Format, Place};
use super::RECORD_BYTES_MAX;
use ::parquet::basic::Compression as Codec;
use ::parquet::data_type::{BoolType, ByteArray, ByteArrayType, Int32Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;

/// Returns the format and records of each format. All keys of a format have values of one type.
fn samples() -> Vec<(Format, Vec<Value>)> {
    let odd = "two\nlines, a \"quote\", a tab\t; and 語 \u{1f600}";
    vec![
        (Format::Text, vec![json!({"text": "first"}), json!({"text": odd}), json!({"text": ""})]),
        (
            Format::Tokens,
            vec![
                json!({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}),
                json!({"input_ids": [4, 5], "attention_mask": [1, 1]}),
            ],
        ),
        (
            Format::Messages,
            vec![
                json!({"messages": [{"role": "system", "content": "Be brief."}, {"role": "human", "content": odd}]}),
                json!({"messages": [
                    {"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "7", "thinking": "3, 4: 7"}
                ]}),
            ],
        ),
        (
            Format::Sharegpt,
            vec![json!({
                "system": "Be brief.",
                "conversations": [{"from": "human", "value": odd}, {"from": "gpt", "value": "Yes."}]
            })],
        ),
        (
            Format::Alpaca,
            vec![
                json!({"instruction": "Add.", "input": "3+4", "output": "7"}),
                json!({"instruction": odd, "input": "", "output": ""}),
            ],
        ),
        (
            Format::PromptCompletion,
            vec![json!({"prompt": "[3+4]=", "completion": "7"}), json!({"prompt": odd, "completion": "yes"})],
        ),
        (
            Format::PromptCompletion,
            vec![json!({
                "prompt": [{"role": "user", "content": "3+4?"}], "completion": [{"role": "assistant", "content": "7"}]
            })],
        ),
        (Format::Preference, vec![json!({"prompt": "3+4=", "chosen": "7", "rejected": "8"})]),
        (Format::Preference, vec![json!({"prompt": "3+4=", "completion": "7", "label": true})]),
    ]
}

fn json_lines(records: &[Value], line_end: &str) -> String {
    records.iter().map(|record| record.to_string() + line_end).collect()
}

/// Returns the columns of the records, in the order of their first use.
fn columns_of(records: &[Value]) -> Vec<String> {
    let mut columns: Vec<String> = Vec::new();
    for key in records.iter().flat_map(|record| record.as_object().unwrap().keys()) {
        if !columns.contains(key) {
            columns.push(key.clone());
        }
    }
    columns
}

/// Writes records as rows. Lists are written as JSON.
fn table(records: &[Value], separator: &str) -> String {
    let columns = columns_of(records);
    let mut text = columns.join(separator) + "\n";
    for record in records {
        let cell = |column: &String| match &record[column] {
            Value::Null => String::new(),
            Value::String(text) => format!("\"{}\"", text.replace('"', "\"\"")),
            other => format!("\"{}\"", other.to_string().replace('"', "\"\"")),
        };
        text += &(columns.iter().map(cell).collect::<Vec<_>>().join(separator) + "\n");
    }
    text
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd_of(bytes: &[u8]) -> Vec<u8> {
    ::zstd::encode_all(bytes, 1).unwrap()
}

fn utf16(text: &str) -> Vec<u8> {
    "\u{feff}".encode_utf16().chain(text.encode_utf16()).flat_map(u16::to_le_bytes).collect()
}

/// Writes records as a Parquet file with `group_rows` rows in a row group.
pub(in super::super) fn parquet_of(records: &[Value], codec: Codec, group_rows: usize) -> Vec<u8> {
    let columns = columns_of(records);
    let field = |column: &String| {
        let value = records.iter().map(|record| &record[column]).find(|value| !value.is_null()).unwrap();
        match value.get(0) {
            _ if value.is_boolean() => format!("optional boolean {column};"),
            None => format!("optional binary {column} (STRING);"),
            Some(Value::Number(_)) => {
                format!("optional group {column} (LIST) {{ repeated group list {{ optional int32 element; }} }}")
            }
            Some(_) => {
                let names = message_keys(records, column);
                let fields: String = names.iter().map(|name| format!("optional binary {name} (STRING);")).collect();
                format!(
                    "optional group {column} (LIST) {{ repeated group list {{ optional group element {{ {fields} }} }} }}"
                )
            }
        }
    };
    let fields: String = columns.iter().map(field).collect();
    let schema = Arc::new(parse_message_type(&format!("message schema {{ {fields} }}")).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(codec).build());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, properties).unwrap();
    for group in records.chunks(group_rows) {
        let mut out = writer.next_row_group().unwrap();
        for column in &columns {
            write_column(&mut out, records, group, column);
        }
        out.close().unwrap();
    }
    writer.close().unwrap();
    bytes
}

/// Returns the keys of the messages in a column.
fn message_keys(records: &[Value], column: &str) -> Vec<String> {
    let messages = records.iter().flat_map(|record| record[column].as_array().unwrap());
    columns_of(&messages.cloned().collect::<Vec<_>>())
}

/// Writes a column of a row group: texts, flags, lists of numbers, or lists of structs with texts.
fn write_column<W: Write + Send>(
    out: &mut SerializedRowGroupWriter<W>,
    all: &[Value],
    records: &[Value],
    column: &str,
) {
    let first = all.iter().map(|record| &record[column]).find(|value| !value.is_null()).unwrap();
    if first.is_boolean() {
        let flags: Vec<bool> = records.iter().map(|record| record[column].as_bool().unwrap()).collect();
        let mut writer = out.next_column().unwrap().unwrap();
        writer.typed::<BoolType>().write_batch(&flags, Some(&vec![1; flags.len()]), None).unwrap();
        return writer.close().unwrap();
    }
    let is_number = first.get(0).is_some_and(Value::is_number);
    let names = if first.is_array() && !is_number { message_keys(all, column) } else { vec![String::new()] };
    for name in names {
        let (mut texts, mut numbers, mut definition, mut repetition) = (vec![], vec![], vec![], vec![]);
        for record in records {
            let elements = match &record[column] {
                Value::Null => {
                    definition.push(0);
                    repetition.push(0);
                    continue;
                }
                Value::Array(elements) => elements.clone(),
                text => vec![text.clone()],
            };
            for (index, element) in elements.iter().enumerate() {
                let value = if name.is_empty() { element } else { &element[&name] };
                repetition.push(i16::from(index > 0));
                let present = if !first.is_array() { 1 } else { 3 + i16::from(!name.is_empty()) };
                definition.push(present - i16::from(value.is_null()));
                texts.extend(value.as_str().map(ByteArray::from));
                numbers.extend(value.as_i64().map(|number| number as i32));
            }
        }
        let repetition = first.is_array().then_some(&repetition[..]);
        let mut writer = out.next_column().unwrap().unwrap();
        match is_number {
            true => writer.typed::<Int32Type>().write_batch(&numbers, Some(&definition), repetition).unwrap(),
            false => writer.typed::<ByteArrayType>().write_batch(&texts, Some(&definition), repetition).unwrap(),
        };
        writer.close().unwrap();
    }
}

#[test]
fn every_container_yields_the_same_documents() {
    for (format, records) in samples() {
        let without_places = |documents: Vec<(Place, String)>| -> Vec<String> {
            documents.into_iter().map(|(_, document)| document).collect()
        };
        let lines = json_lines(&records, "\n");
        let expected = without_places(documents_of("data.jsonl", lines.as_bytes(), format).unwrap());
        assert_eq!(expected.len(), records.len());
        let pretty = serde_json::to_string_pretty(&records).unwrap();
        let (csv, tsv) = (table(&records, ","), table(&records, "\t"));
        let spaced = format!("\u{feff}\n{}", json_lines(&records, "\r\n\r\n")).trim_end().to_owned();
        let files: Vec<(&str, Vec<u8>)> = vec![
            ("a.ndjson", spaced.into()),
            ("a.jsonl", utf16(&lines)),
            ("a.jsonl.gz", gzip(lines.as_bytes())),
            ("a.jsonl.zst", zstd_of(lines.as_bytes())),
            ("a.jsonl.gz", [gzip(lines.as_bytes()), gzip(b"\n")].concat()),
            ("a.json", pretty.clone().into()),
            ("a.json", utf16(&pretty)),
            ("a.json", lines.clone().into()),
            ("a.json.gz", gzip(Value::from(records.clone()).to_string().as_bytes())),
            ("a.json.zst", zstd_of(format!("\u{feff}{pretty}\r\n").as_bytes())),
            ("a.csv", csv.clone().into()),
            ("a.csv", utf16(&csv)),
            ("a.csv.gz", gzip(csv.trim_end().as_bytes())),
            ("a.csv.zst", zstd_of(format!("\u{feff}{csv}\n\n").as_bytes())),
            ("A.TSV", tsv.clone().into()),
            ("a.tsv.gz", gzip(tsv.as_bytes())),
            ("a.tsv.zst", zstd_of(tsv.as_bytes())),
            ("a.parquet", parquet_of(&records, Codec::SNAPPY, 10)),
            ("b.parquet", parquet_of(&records, Codec::ZSTD(Default::default()), 1)),
            ("c.parquet", parquet_of(&records, Codec::UNCOMPRESSED, 10)),
        ];
        for (name, bytes) in files {
            for format in [format, Format::Auto] {
                let documents = documents_of(name, &bytes, format).map(without_places);
                assert_eq!(documents.as_ref(), Ok(&expected), "{name} as {format:?}");
            }
        }
    }
}

#[test]
fn plain_text_is_one_document_in_each_compression() {
    let text = "a line\r\nanother 語\n";
    let expected = vec![(Place::File, format!("Text {{ window: {text:?}, start: 0, ends: true }}"))];
    let marked = format!("\u{feff}{text}");
    for (name, bytes) in [
        ("a.txt", text.into()),
        ("a.txt", marked.clone().into_bytes()),
        ("a.txt", utf16(text)),
        ("a.txt.gz", gzip(marked.as_bytes())),
        ("a.txt.zst", zstd_of(text.as_bytes())),
    ] {
        assert_eq!(documents_of(name, &bytes, Format::Auto), Ok(expected.clone()), "{name}");
    }
    for name in ["a.txt", "a.txt.gz", "a.txt.zst"] {
        assert_eq!(documents_of(name, b"", Format::Text), Ok(vec![(Place::File, "Empty".to_owned())]), "{name}");
    }
    for name in ["a.jsonl", "a.json", "a.csv", "a.tsv.gz"] {
        let bytes = compress(&name[name.len() - 3..], b"\n".into());
        assert_eq!(documents_of(name, &bytes, Format::Auto).map(|documents| documents.len()), Ok(0), "{name}");
    }
}

#[test]
fn places_are_lines_or_records() {
    let places = |name: &str, text: &str| -> Vec<Place> {
        documents_of(name, text.as_bytes(), Format::Text).unwrap().into_iter().map(|(place, _)| place).collect()
    };
    let line = "{\"text\": \"a\"}";
    assert_eq!(places("a.jsonl", &format!("\n{line}\n\n{line}")), [Place::Line(2), Place::Line(4)]);
    assert_eq!(places("a.json", &format!("\n{line}\n\n{line}")), [Place::Line(2), Place::Line(4)]);
    assert_eq!(places("a.json", &format!("[{line},\n\n{line}]")), [Place::Record(1), Place::Record(2)]);
    assert_eq!(places("a.csv", "text,b\n\"a\nb\",1\nc,2\n"), [Place::Record(1), Place::Record(2)]);
}

#[test]
fn malformed_files_are_refused_with_place() {
    let line = "{\"text\": \"a\"}\n";
    let long = format!("{line}{{\"text\": \"{}\"}}", "a".repeat(RECORD_BYTES_MAX));
    let long_json = format!("[{}]", long.replacen('\n', ",", 1));
    let long_csv = format!("text\na\n{}", "b".repeat(RECORD_BYTES_MAX + 1));
    let lines = |second: &str| (line.to_owned() + second).into_bytes();
    let files: Vec<(&str, Vec<u8>, &str)> = vec![
        ("a.jsonl", lines("{\"text\": \"a\""), "a.jsonl:2: EOF while parsing an object (column 12)"),
        ("a.jsonl", lines("nonsense"), "a.jsonl:2: expected ident (column 2)"),
        ("a.jsonl", lines("[1, 2]"), "a.jsonl:2: expected an object, found a list"),
        ("a.jsonl", lines("{\"text\": NaN}"), "a.jsonl:2: NaN is no JSON value"),
        ("a.jsonl", lines("\0\0\0"), "a.jsonl:2: NUL bytes"),
        ("a.jsonl", [line.as_bytes(), b"{\"text\": \"\xff\"}"].concat(), "a.jsonl:2: not UTF-8"),
        ("a.jsonl", long.clone().into(), "a.jsonl:2: the line is longer than 16.00 MiB"),
        ("a.jsonl", lines("{\"text\": null}"), "a.jsonl:2: the record fits no format; its keys are text"),
        ("a.jsonl", lines("{}"), "a.jsonl:2: the record fits no format; it has no keys"),
        ("a.jsonl", lines("{\"txt\": \"a\"}"), "a.jsonl:2: the record fits no format; its keys are txt"),
        (
            "a.jsonl",
            lines("{\"text\": \"a\", \"input_ids\": [1]}"),
            "a.jsonl:2: the record fits two formats, text and tokens",
        ),
        (
            "a.jsonl",
            lines("{\"messages\": []}"),
            "a.jsonl:2: the format of the record is messages, that of the records before it is text",
        ),
        ("a.json", lines("{\"text\": 5}"), "a.json:2: invalid type: integer `5`, expected a string (column 10)"),
        (
            "a.json",
            b"[{\"text\": \"a\"}, {\"text\":\n5}]".into(),
            "a.json, record 2: invalid type: integer `5`, expected a string (line 2 of the record, column 1)",
        ),
        ("a.json", b"[{\"text\": \"a\"}".into(), "a.json, record 1: the list does not end with `]` (line 1)"),
        ("a.json", b"[{\"text\": \"a\"},\n]".into(), "a.json, record 1: expected an object after the `,` (line 2)"),
        (
            "a.json",
            b"[{\"text\": \"a\"}\n{\"text\": \"b\"}]".into(),
            "a.json, record 1: expected `,` or `]` after it (line 2)",
        ),
        ("a.json", b"[{\"text\": \"a\"}] {}".into(), "a.json, record 1: expected nothing after the list (line 1)"),
        ("a.json", b"[{\"text\": \"a\"}, 7]".into(), "a.json, record 2: invalid type: integer `7`, expected an object"),
        ("a.json", b"[{\"text\": \"a\"}, {\"text\": \"b".into(), "a.json, record 2: EOF while parsing a string"),
        ("a.json", b"{\"data\": [{\"text\": \"a\"}]}".into(), "a.json:1: the record fits no format; its keys are data"),
        ("a.json", long_json.into(), "a.json, record 2: the record is longer than 16.00 MiB"),
        ("a.csv", b"text,text\na,b\n".into(), "a.csv: two columns have the name `text`"),
        ("a.csv", b"prompt;completion\na;b\n".into(), "a.csv: the only column is `prompt;completion`; expected commas"),
        ("a.csv", b"text,b\na,1\nb\n".into(), "a.csv, record 2: 1 value for 2 columns"),
        ("a.csv", b"text\na\n\"b\nc\n".into(), "a.csv, record 2: a quote is never closed"),
        ("a.csv", b"text\na\n\xff\n".into(), "a.csv, record 2: not UTF-8"),
        ("a.csv", b"text\na\nb\0\n".into(), "a.csv, record 2: NUL bytes"),
        ("a.csv", b"messages\n[{'role': 'user'}]\n".into(), "a.csv, record 1: column `messages` is not JSON"),
        ("a.csv", b"a,b\n1,2\n".into(), "a.csv, record 1: the record fits no format; its keys are a, b"),
        ("a.csv", long_csv.into(), "a.csv, record 2: the record is longer than 16.00 MiB"),
        ("a.tsv", b"text\tb\na\n".into(), "a.tsv, record 1: 1 value for 2 columns"),
    ];
    assert!(files.len() >= 30);
    expect_refusals(files);
}

#[test]
fn files_of_another_kind_are_refused() {
    let line = "{\"text\": \"a\"}\n";
    let parquet = parquet_of(&[json!({"text": "a"}), json!({"text": "b"})], Codec::SNAPPY, 1);
    let mut cut = gzip(line.repeat(1000).as_bytes());
    cut.truncate(cut.len() / 2);
    let mut cut_zstd = zstd_of(line.repeat(1000).as_bytes());
    cut_zstd.truncate(cut_zstd.len() - 3);
    let long_row = json!({"text": "b".repeat(RECORD_BYTES_MAX + 1)});
    let long_parquet = parquet_of(&[json!({"text": "a"}), long_row], Codec::SNAPPY, 2);
    let bomb = gzip(&vec![b'a'; 2 * RECORD_BYTES_MAX]);
    expect_refusals(vec![
        ("a.txt", b"a\0b".into(), "a.txt: NUL bytes"),
        ("a.txt", b"a\xffb".into(), "a.txt: not UTF-8"),
        ("a.txt", b"\xff\xfea".into(), "a.txt is damaged: UTF-16 text ends inside a character"),
        ("a.txt", b"\xff\xfe\0\0a\0\0\0".into(), "a.txt: expected text, found UTF-32 text"),
        ("a.jsonl", gzip(line.as_bytes()), "a.jsonl: expected text, found gzip data"),
        ("a.jsonl", parquet.clone(), "a.jsonl: expected text, found Parquet data"),
        ("a.jsonl.gz", line.into(), "a.jsonl.gz: expected gzip data, found other data"),
        ("a.jsonl.gz", cut, "a.jsonl.gz is damaged: "),
        ("a.jsonl.gz", bomb, "a.jsonl.gz:1: the line is longer than 16.00 MiB"),
        ("a.jsonl.gz", gzip(&gzip(line.as_bytes())), "a.jsonl.gz: expected text, found gzip data"),
        ("a.jsonl.zst", line.into(), "a.jsonl.zst: expected zstd data, found other data"),
        ("a.jsonl.zst", cut_zstd, "a.jsonl.zst is damaged: "),
        ("a.parquet", line.into(), "a.parquet: expected Parquet data, found other data"),
        ("a.parquet", parquet[..parquet.len() / 2].into(), "a.parquet is damaged: "),
        (
            "a.parquet",
            parquet_of(&[json!({"a": "b"})], Codec::SNAPPY, 1),
            "a.parquet: the record fits no format; its keys are a",
        ),
        ("a.parquet", long_parquet, "a.parquet, record 2: the record is longer than 16.00 MiB"),
        ("a.parquet.gz", gzip(&parquet), "a.parquet.gz: expected a .parquet file that is not compressed again"),
        ("a.xlsx", line.into(), "a.xlsx: expected a .jsonl, .json, .csv, .tsv, .parquet or .txt file"),
    ]);
}

/// Checks that each file, by name and content, is refused with a message that begins so.
fn expect_refusals(files: Vec<(&str, Vec<u8>, &str)>) {
    for (name, bytes, message) in files {
        let refusal = documents_of(name, &bytes, Format::Auto).unwrap_err();
        assert!(refusal.starts_with(message), "{refusal}\nexpected {message}");
    }
}

/// Returns bytes as they are, or as the content of a compressed file.
fn compress(ending: &str, bytes: Vec<u8>) -> Vec<u8> {
    match ending {
        ".gz" => gzip(&bytes),
        ".zst" => zstd_of(&bytes),
        _ => bytes,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_bytes_never_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        container in prop::sample::select(vec!["jsonl", "json", "csv", "tsv", "txt", "parquet"]),
        ending in prop::sample::select(vec!["", ".gz", ".zst"]),
        is_compressed: bool,
    ) {
        let bytes = if is_compressed { compress(ending, bytes) } else { bytes };
        let _ = read_file(&format!("a.{container}{ending}"), &bytes, Format::Auto, 10, |_, _| ());
    }

    /// Nearly valid text reaches the parsers behind the first bytes.
    #[test]
    fn nearly_valid_text_never_panics(
        text in "[\\[\\]{}\",:\\\\ \n\ra-c0\u{feff}語]{0,60}",
        name in prop::sample::select(vec!["a.jsonl", "a.json", "a.csv", "a.tsv"]),
        head in prop::sample::select(vec!["", "[", "{\"text\":", "text\n", "messages,text\n", "\u{feff}{\"messages\": ["]),
        format in prop::sample::select(vec![
            Format::Auto, Format::Text, Format::Tokens, Format::Messages, Format::Sharegpt, Format::Alpaca,
            Format::PromptCompletion, Format::Preference,
        ]),
    ) {
        let _ = read_file(name, format!("{head}{text}").as_bytes(), format, 10, |_, _| ());
    }

    #[test]
    fn changed_parquet_bytes_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let records: Vec<Value> = samples().swap_remove(2).1;
        let mut bytes = parquet_of(&records, Codec::SNAPPY, 1);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = read_file("a.parquet", &bytes, Format::Auto, 10, |_, _| ());
    }
}
