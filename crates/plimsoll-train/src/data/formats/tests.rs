//! Tests of the formats: their recognition, the conversations that they become, and refused records.

use super::super::containers::Record;
use super::super::conversation::{Conversation, Message};
use super::super::error::{Place, SourceLocation};
use super::super::testing::documents_of;
use super::*;
use serde_json::json;

/// Returns the document of a record.
fn document(record: &Value, format: RecordFormat) -> Result<Document<'static>, String> {
    parse_record(Record::Row(record.clone()), format)
}

/// Returns the conversation of a record, and whether each message is trained on.
fn conversation(record: &Value, format: RecordFormat) -> (Conversation, Vec<Option<bool>>) {
    match document(record, format).unwrap() {
        Document::Conversation(conversation) => {
            let flags = conversation.messages.iter().map(|message| message.train).collect();
            (*conversation, flags)
        }
        other => panic!("{other:?}"),
    }
}

/// Returns the messages of a record as a list of JSON objects.
fn messages(record: &Value, format: RecordFormat) -> Value {
    let (conversation, _) = conversation(record, format);
    conversation.messages.into_iter().map(|Message { object, .. }| Value::Object(object)).collect()
}

#[test]
fn formats_are_recognized_by_keys() {
    let message = json!({"role": "user", "content": "a"});
    for (record, expected) in [
        (json!({"text": "a", "url": "b"}), "text"),
        (json!({"text": "a", "messages": null}), "text"),
        (json!({"input_ids": [1], "labels": [1]}), "tokens"),
        (json!({"messages": [message]}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"conversations": [message]}), "messages"),
        (json!({"conversations": [{"from": "human", "value": "a"}]}), "sharegpt"),
        (json!({"messages": [{"from": "human", "value": "a"}]}), "sharegpt"),
        (json!({"instruction": "a", "input": "", "output": "b"}), "alpaca"),
        (json!({"prompt": "a", "completion": "b"}), "prompt_completion"),
        (json!({"prompt": [message], "completion": [message]}), "prompt_completion"),
        (json!({"prompt": "a", "completion": "b", "label": true}), "preference"),
        (json!({"chosen": "a", "rejected": "b"}), "preference"),
        (json!({"prompt": [message], "chosen": [message], "rejected": [message]}), "preference"),
        // A prompt by itself, and a label beside a text, are other data.
        (json!({"messages": [message], "prompt": "a"}), "messages"),
        (json!({"text": "a", "label": 1}), "text"),
        (json!({"text": "a", "input_ids": [1]}), "two formats, text and tokens"),
        (json!({"text": "a", "instruction": "b", "output": "c"}), "two formats, text and alpaca"),
        (json!({"messages": [message], "chosen": "a", "rejected": "b"}), "two formats, messages and preference"),
        (json!({"messages": [message], "conversations": [{"from": "human"}]}), "two formats, messages and sharegpt"),
        (json!({"prompt": "a"}), "prompt"),
        (json!({"prompt": [message], "answer": "b", "label": 1}), "prompt"),
        (json!({"prompt": "a", "instruction": "b", "output": "c"}), "alpaca"),
        (json!({"prompt": "a", "chosen": "b"}), "fits no format; its keys are prompt, chosen"),
        (json!({"prompt_ids": [1], "completion_ids": [2], "rewards": 1.0}), "rollouts"),
        (json!({"prompt_ids": [1], "completion_ids": [2], "prompt": "a", "completion": "b"}), "rollouts"),
        (json!({"instruction": "a", "response": "b"}), "fits no format; its keys are instruction, response"),
        (json!({"question": "a", "answer": "b"}), "fits no format; its keys are question, answer"),
        (json!({"messages": "a"}), "invalid type: string \"a\", expected a list of messages"),
        (json!({"messages": ["a"]}), "invalid type: string \"a\", expected a message with `role` or `from`"),
        (json!([1]), "expected an object"),
    ] {
        let location = || SourceLocation { file: "a.jsonl".into(), place: Place::Line(1) };
        for record in [Record::Row(record.clone()), Record::Json(&record.to_string())] {
            let found = check_reading(&record, None, location).map(RecordFormat::name);
            match found {
                Ok(name) => assert_eq!(name, expected, "{record:?}"),
                Err(error) => assert!(error.to_string().contains(expected), "{record:?}: {error}"),
            }
        }
    }
}

#[test]
fn records_of_another_format_are_refused_at_any_distance() {
    let text = "{\"text\": \"a\"}\n".repeat(200);
    for (name, first, last, expected) in [
        (
            "a.jsonl",
            &*text,
            "{\"prompt\": \"a\", \"completion\": \"b\"}",
            "is prompt_completion, that of the records before it is text",
        ),
        ("a.jsonl", &text, "{\"text\": \"a\", \"messages\": []}", "fits two formats, text and messages"),
        ("a.jsonl", &text, "{\"text\": null}", "fits no format"),
    ] {
        let refusal = documents_of(name, format!("{first}{last}\n").as_bytes(), Format::Auto).unwrap_err();
        assert!(refusal.starts_with("a.jsonl:201: ") && refusal.contains(expected), "{refusal}");
        let named = documents_of(name, format!("{first}{last}\n").as_bytes(), Format::Text);
        assert_eq!(named.is_ok(), last.contains("\"text\": \"a\""), "a named format ignores other keys: {last}");
    }
    // An empty list of messages fits both formats of conversations.
    let mixed = "{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}]}\n{\"conversations\": []}\n";
    assert_eq!(documents_of("a.jsonl", mixed.as_bytes(), Format::Auto).unwrap().len(), 2);
}

#[test]
fn conversations_have_one_layout() {
    let expected = json!([
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"},
        {"role": "assistant", "content": "7"}, {"role": "user", "content": "And\n5+6?"},
        {"role": "assistant", "content": "11"},
    ]);
    for (format, record) in [
        (RecordFormat::Messages, json!({"messages": expected})),
        (RecordFormat::Messages, json!({"conversations": expected, "id": 7})),
        (
            RecordFormat::Messages,
            json!({"messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, {"role": "human", "content": "3+4?"},
                {"role": "gpt", "content": "7", "tool_calls": null}, {"role": "input", "content": "And\n5+6?"},
                {"content": "11", "role": "model"},
            ]}),
        ),
        (
            RecordFormat::Sharegpt,
            json!({"system": "Be brief.", "conversations": [
                {"from": "human", "value": "3+4?"}, {"from": "gpt", "value": "7"},
                {"from": "user", "value": "And\n5+6?"}, {"from": "output", "value": "11"},
            ]}),
        ),
        (
            RecordFormat::Alpaca,
            json!({
                "system": "Be brief.", "history": [["3+4?", "7"]], "instruction": "And", "input": "5+6?", "output": "11"
            }),
        ),
        (
            RecordFormat::PromptCompletion,
            json!({
                "prompt": &expected.as_array().unwrap()[..4], "completion": &expected.as_array().unwrap()[4..]
            }),
        ),
    ] {
        assert_eq!(messages(&record, format), expected, "{format}: {record}");
    }
}

#[test]
fn tools_calls_and_thoughts_are_kept() {
    let tools = json!([{"type": "function", "function": {"name": "add"}}]);
    let call = json!({"name": "add", "arguments": {"a": 3}});
    let record = json!({
        "tools": tools.to_string(),
        "conversations": [
            {"from": "human", "value": "3+4?"}, {"from": "function_call", "value": call.to_string()},
            {"from": "observation", "value": "7"}, {"from": "gpt", "value": "It is 7."},
        ],
    });
    let expected = json!([
        {"role": "user", "content": "3+4?"},
        {"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "7"}, {"role": "assistant", "content": "It is 7."},
    ]);
    assert_eq!(messages(&record, RecordFormat::Sharegpt), expected);
    assert_eq!(conversation(&record, RecordFormat::Sharegpt).0.tools, *tools.as_array().unwrap());
    let record = json!({
        "tools": tools, "chat_template_kwargs": {"enable_thinking": true},
        "messages": [
            {"role": "developer", "content": "Add."}, {"role": "user", "content": "3+4?", "name": "a"},
            {"role": "assistant", "reasoning_content": "3, 4: 7", "tool_calls": [{"id": "1", "function": call}]},
            {"role": "tool", "tool_call_id": "1", "content": "7"}, {"role": "ipython", "content": "x"},
        ],
    });
    let mut expected = record["messages"].clone();
    expected[2] = json!({
        "role": "assistant", "content": null, "reasoning_content": "3, 4: 7", "tool_calls": [{"id": "1", "function": call}]
    });
    assert_eq!(messages(&record, RecordFormat::Messages), expected);
    let (conversation, _) = conversation(&record, RecordFormat::Messages);
    assert_eq!(Value::Object(conversation.template_variables), json!({"enable_thinking": true}));
    assert_eq!(conversation.tools, *tools.as_array().unwrap());
}

#[test]
fn flags_say_which_messages_are_trained() {
    let record = json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},
        {"role": "assistant", "content": "c", "train": true}, {"role": "assistant", "content": "d", "weight": 1.0},
    ]});
    let (conversation_of_flags, flags) = conversation(&record, RecordFormat::Messages);
    assert_eq!(flags, [None, Some(false), Some(true), Some(true)]);
    assert!(conversation_of_flags.messages.iter().all(|message| message.object.len() == 2), "templates see no flags");
    let record = json!({
        "prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "completion": [{"role": "assistant", "content": "c"}],
    });
    assert_eq!(conversation(&record, RecordFormat::PromptCompletion).1, [Some(false), Some(false), None]);
}

#[test]
fn malformed_records_are_refused_with_reason() {
    use RecordFormat::Messages;
    let one = |message: Value| json!({"messages": [{"role": "user", "content": "a"}, message]});
    for (format, record, expected) in [
        (Messages, json!({"messages": {}}), "`messages` is an object, expected a list of messages"),
        (Messages, json!({"text": "a"}), "missing field `messages`"),
        (
            Messages,
            json!({"messages": [], "conversations": []}),
            "it has both `messages` and `conversations`; keep one",
        ),
        (Messages, one(json!("a")), "`messages[1]` is a text, expected an object"),
        (Messages, one(json!({"content": "a"})), "`messages[1]` has no `role`"),
        (Messages, one(json!({"role": 1, "content": "a"})), "`messages[1].role` is a number, expected a text"),
        (Messages, one(json!({"role": "user"})), "`messages[1]` has no `content`"),
        (Messages, one(json!({"role": "user", "content": 5})), "`messages[1].content` is a number, expected a text"),
        (
            Messages,
            one(json!({"role": "user", "content": [{"type": "image_url", "image_url": "a"}]})),
            "`messages[1].content[0]` is of the type `image_url`; only text is supported",
        ),
        (
            Messages,
            one(json!({"role": "user", "content": ["a"]})),
            "`messages[1].content[0]` is not {\"type\": \"text\"",
        ),
        (
            Messages,
            one(json!({"from": "gpt", "value": "a"})),
            "`messages[1]` has `from` instead of `role`: the format is sharegpt",
        ),
        (
            Messages,
            one(json!({"role": "assistant", "content": "a", "weight": 0.5})),
            "`messages[1].weight` is 0.5, expected",
        ),
        (
            Messages,
            one(json!({"role": "assistant", "content": "a", "weight": 0, "train": true})),
            "`messages[1]` has a `train` and",
        ),
        (
            Messages,
            json!({"messages": [{"role": "user", "content": "a"}], "tools": 5}),
            "`tools` is a number, expected a list",
        ),
        (
            Messages,
            json!({"messages": [{"role": "user", "content": "a"}], "tools": "a"}),
            "`tools` is not a list as JSON",
        ),
        (
            Messages,
            json!({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": []}),
            "`chat_template_kwargs` is a list",
        ),
    ] {
        expect_refusal(&record, format, expected);
    }
}

#[test]
fn malformed_records_of_other_layouts_are_refused() {
    use RecordFormat::{Alpaca, Preference, PromptCompletion, Sharegpt};
    for (format, record, expected) in [
        (
            Sharegpt,
            json!({"conversations": [{"from": "bing", "value": "a"}]}),
            "`conversations[0].from` is `bing`, expected one of human",
        ),
        (
            Sharegpt,
            json!({"conversations": [{"from": "function_call", "value": "add"}]}),
            "`conversations[0].value` of a function_call is not",
        ),
        (
            Sharegpt,
            json!({"system": "a", "conversations": [{"from": "system", "value": "b"}]}),
            "it has a `system` beside a system message",
        ),
        (Alpaca, json!({"instruction": "a"}), "missing field `output`"),
        (Alpaca, json!({"instruction": 5, "output": "a"}), "`instruction` is a number, expected a text"),
        (Alpaca, json!({"instruction": "a", "output": "b", "history": [["a"]]}), "`history[0]` is not a pair of texts"),
        (PromptCompletion, json!({"prompt": "a"}), "missing field `completion`"),
        (
            PromptCompletion,
            json!({"prompt": "a", "completion": []}),
            "`prompt` is a text and `completion` is a list, expected two texts",
        ),
        (
            PromptCompletion,
            json!({"prompt": "a", "completion": "b", "label": false}),
            "it has a `label`, true or false: the format is preference",
        ),
        (Preference, json!({"chosen": "a"}), "missing field `rejected`"),
        (
            Preference,
            json!({"chosen": "a", "rejected": []}),
            "`chosen` is a text and `rejected` is a list of messages, expected both as texts or both as lists of messages",
        ),
        (Preference, json!({"chosen": [{"role": "user"}], "rejected": []}), "`chosen[0]` has no `content`"),
        (Preference, json!({"label": true, "prompt": "a"}), "missing field `completion`"),
    ] {
        expect_refusal(&record, format, expected);
    }
}

/// Checks that a record of `format` is refused with a reason that begins with `expected`.
fn expect_refusal(record: &Value, format: RecordFormat, expected: &str) {
    let refusal = document(record, format).unwrap_err();
    assert!(refusal.starts_with(expected), "{refusal}\nexpected {expected}");
}
