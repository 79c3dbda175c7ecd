//! The reward `json_schema`: texts that are JSON and satisfy a schema.

use super::Completion;
use jsonschema::Validator;
use plimsoll_core::Failure;
use plimsoll_device::regular_file;
use serde_json::Value;
use std::path::Path;

/// Key of a record that holds a schema.
const SCHEMA_COLUMN: &str = "schema";

/// The schema of completions. References to other files or addresses are never followed.
pub(super) enum SchemaReward {
    /// One schema for all completions.
    Fixed(Validator),
    /// The schema of each record, with the last one that was compiled.
    OfRecords(Option<(Value, Validator)>),
}

impl SchemaReward {
    /// Reads the schema in a file.
    ///
    /// # Errors
    /// A file that cannot be read, is not JSON, or is not a valid schema.
    pub fn open(file: &Path) -> Result<SchemaReward, Failure> {
        let failed = |problem: String| Failure::input(format!("schema {} of a reward: {problem}", file.display()));
        let text = regular_file::read_text(file).map_err(|error| failed(error.to_string()))?;
        let schema: Value = serde_json::from_str(&text).map_err(|error| failed(format!("it is not JSON: {error}")))?;
        Ok(SchemaReward::Fixed(compile(&schema).map_err(failed)?))
    }

    /// Creates a reward that takes the schema from the key `schema` of each record.
    pub fn of_records() -> SchemaReward {
        SchemaReward::OfRecords(None)
    }

    /// Returns whether the text of a completion is JSON that satisfies the schema. White space around it is permitted.
    ///
    /// # Errors
    /// A record without a valid schema.
    pub fn is_satisfied(&mut self, reward: &str, completion: &Completion) -> Result<bool, Failure> {
        let validator = match self {
            SchemaReward::Fixed(validator) => validator,
            SchemaReward::OfRecords(last) => {
                let schema = completion.column(reward, SCHEMA_COLUMN)?;
                // All completions of a prompt follow each other.
                if last.as_ref().is_none_or(|(known, _)| known != schema) {
                    let failed =
                        |problem| Failure::input(format!("reward {reward}: `{SCHEMA_COLUMN}` of a record: {problem}"));
                    *last = Some((schema.clone(), compile_column(schema).map_err(failed)?));
                }
                &last.as_ref().expect("it was compiled above").1
            }
        };
        Ok(serde_json::from_str(completion.text).is_ok_and(|value: Value| validator.is_valid(&value)))
    }
}

/// Compiles the schema of a record: an object, a boolean, or a text that holds one of them.
fn compile_column(schema: &Value) -> Result<Validator, String> {
    match schema {
        Value::String(text) => {
            let schema = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
            compile(&schema)
        }
        schema => compile(schema),
    }
}

/// Compiles a schema, and returns a description of the problem if it is invalid.
fn compile(schema: &Value) -> Result<Validator, String> {
    jsonschema::validator_for(schema).map_err(|error| format!("it is not a valid JSON schema: {error}"))
}
