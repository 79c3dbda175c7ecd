//! Tests of chat templates: constructs, masks, limits and sources. `parity/templates.py` compares more of them with
//! transformers.

use super::*;
use crate::data::conversation::Message;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A template that writes each turn as it writes the last one.
const TURNS: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}\
                     {% if add_generation_prompt %}<|assistant|>{% endif %}";
/// A template that drops thinking before the last message.
const DROPS: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content.split('>')[-1] }}<|end|>\n\
                     {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

fn settings() -> ChatSettings {
    ChatSettings {
        train_on: TrainOn::Assistant,
        train_on_end: TrainOnEnd::Turn,
        not_prefix: NotPrefix::Split,
        now: 1_772_719_629,
    }
}

/// Writes a tokenizer of single characters with special tokens, and a template.
fn model(template: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let specials = ["<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"];
    let added = specials.iter().enumerate().map(|(at, token)| {
        json!({ "id": at, "content": token, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false })
    });
    let characters = (' '..='~').chain(['\n']).enumerate().map(|(at, c)| (c.to_string(), json!(at + specials.len())));
    let vocab: serde_json::Map<String, Value> =
        characters.chain(specials.iter().enumerate().map(|(at, token)| ((*token).to_owned(), json!(at)))).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(), "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": { "type": "BPE", "vocab": vocab, "merges": [], "unk_token": null, "fuse_unk": false, "byte_fallback": false },
    });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({ "chat_template": template, "bos_token": "<s>", "eos_token": "<|end|>" });
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

fn chats(folder: &Path, settings: ChatSettings) -> Result<ConversationTokenizer, TemplateError> {
    let tokenizer = Arc::new(Tokenizer::load(&folder.join("tokenizer.json")).unwrap());
    ConversationTokenizer::new(tokenizer, ChatTemplate::find(folder, None)?, settings)
}

fn conversation(messages: &[(&str, &str)]) -> Conversation {
    let message = |(role, content): &(&str, &str)| Message {
        object: json!({ "role": role, "content": content }).as_object().unwrap().clone(),
        train: None,
    };
    Conversation { messages: messages.iter().map(message).collect(), ..Conversation::default() }
}

fn two_turns() -> Conversation {
    conversation(&[("user", "a"), ("assistant", "t>b"), ("user", "c"), ("assistant", "t>d")])
}

/// Renders a template with one message.
fn render(template: &str) -> Result<String, TemplateError> {
    let folder = model(template);
    chats(folder.path(), settings())?.session().render(&conversation(&[("user", "Hello there")]), false)
}

/// Returns the texts of the documents, with labelled stretches in brackets.
fn labelled(template: &str, settings: ChatSettings, conversation: &Conversation) -> Result<Vec<String>, TemplateError> {
    let folder = model(template);
    let chats = chats(folder.path(), settings)?;
    let documents = chats.session().tokenize(conversation)?;
    let show = |document: &LabelledDocument| {
        let mut text = String::new();
        let mut inside = false;
        for (id, label) in document.ids.iter().zip(&document.labels) {
            assert!(*label == -100 || label == id);
            let is_labelled = *label != -100;
            if is_labelled != inside {
                text.push(if is_labelled { '[' } else { ']' });
            }
            inside = is_labelled;
            text.push_str(&chats.tokenizer.token_text(*id as u32));
        }
        text + if inside { "]" } else { "" }
    };
    Ok(documents.iter().map(show).collect())
}

#[test]
fn constructs_render_as_in_jinja() {
    for (template, expected) in [
        ("  {% if true %}\n  x\n  {% endif %}\n\n", "  x\n"),
        ("{{ messages[0]['content'][::-1] }}", "ereht olleH"),
        ("{{ messages[-1].content.split(' ')[1:] }}", "['there']"),
        (
            "{% set ns = namespace(n=0) %}{% for x in 'abc' %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
            "6",
        ),
        ("{% macro f(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}", "1-21-3"),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        ("{{ {'items': [1]}.items() | list | length }}{{ {'get': 1}.get('get') }}", "11"),
        ("{{ none }} {{ true }} {{ 1.0 }} {{ [none, 'a'] }} {{ tools is none }}", "None True 1.0 [None, 'a'] True"),
        ("{{ {'b': '<é>', 'a': [1, 2.5]} | tojson }}", r#"{"b": "<é>", "a": [1, 2.5]}"#),
        ("{{ {'a': [1]} | tojson(indent=1, separators=(',', ':')) }}", "{\n \"a\":[\n  1\n ]\n}"),
        ("{% generation %}x{% endgeneration %}{{ strftime_now('%d %b %Y') }}", "x05 Mar 2026"),
        ("{{ bos_token }}{{ missing }}{{ missing is defined }}", "<s>False"),
        ("{% block a %}x{{ 1 }}{% endblock %}", "x1"),
        ("a\r\nb", "a\nb"),
        ("{% for m in messages %}{{ -loop.index % 3 }}{{ 'ß'.title() }}{% endfor %}", "2Ss"),
    ] {
        assert_eq!(render(template).unwrap(), expected, "{template}");
    }
}

#[test]
fn errors_name_template_and_line() {
    for (template, line, expected) in [
        ("\n{% if %}", 2, "unexpected"),
        ("a\nb\n{{ raise_exception('no such role') }}", 3, "no such role"),
        ("{{ messages[0].missing.deeper }}", 1, "undefined"),
        ("{{ 'a' + 1 }}", 1, "cannot add string and number"),
        ("{{ messages.append(1) }}", 1, "`append` changes a value"),
        ("{% include 'x' %}", 1, "template"),
        ("{{ x | nothing }}", 1, "nothing"),
    ] {
        let message = render(template).unwrap_err().to_string();
        assert!(message.contains(&format!("tokenizer_config.json:{line}: ")), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn turns_are_labelled_as_set() {
    let text = |train_on, ends| {
        let settings = ChatSettings { train_on, train_on_end: ends, ..settings() };
        labelled(TURNS, settings, &two_turns()).unwrap().concat().replace("<|user|>", "U").replace("<|assistant|>", "A")
    };
    assert_eq!(text(TrainOn::Assistant, TrainOnEnd::Turn), "Ua<|end|>\nA[t>b<|end|>]\nUc<|end|>\nA[t>d<|end|>]\n");
    assert_eq!(text(TrainOn::Assistant, TrainOnEnd::Last), "Ua<|end|>\nA[t>b]<|end|>\nUc<|end|>\nA[t>d<|end|>]\n");
    assert_eq!(text(TrainOn::Assistant, TrainOnEnd::None), "Ua<|end|>\nA[t>b]<|end|>\nUc<|end|>\nA[t>d]<|end|>\n");
    assert_eq!(text(TrainOn::Last, TrainOnEnd::Turn), "Ua<|end|>\nAt>b<|end|>\nUc<|end|>\nA[t>d<|end|>]\n");
    assert_eq!(text(TrainOn::Completion, TrainOnEnd::Turn), "Ua<|end|>\nAt>b<|end|>\nUc<|end|>\nA[t>d<|end|>]\n");
    assert_eq!(text(TrainOn::All, TrainOnEnd::Turn), "[Ua<|end|>\nAt>b<|end|>\nUc<|end|>\nAt>d<|end|>\n]");
}

#[test]
fn messages_override_the_setting() {
    let mut conversation = two_turns();
    conversation.messages[1].train = Some(false);
    conversation.messages[2].train = Some(true);
    let texts = labelled(TURNS, settings(), &conversation).unwrap();
    assert_eq!(texts, ["<|user|>a<|end|>\n<|assistant|>t>b<|end|>\n[<|user|>c<|end|>\n]<|assistant|>[t>d<|end|>]\n"]);
    let settings = ChatSettings { train_on: TrainOn::All, ..settings() };
    let texts = labelled(TURNS, settings, &conversation).unwrap();
    assert_eq!(texts, ["[<|user|>a<|end|>\n<|assistant|>]t>b<|end|>\n[<|user|>c<|end|>\n<|assistant|>t>d<|end|>\n]"]);
}

#[test]
fn changed_turns_are_split_or_refused() {
    let texts = labelled(DROPS, settings(), &two_turns()).unwrap();
    let first = "<|user|>a<|end|>\n<|assistant|>[t>b<|end|>]\n";
    let second = "<|user|>a<|end|>\n<|assistant|>b<|end|>\n<|user|>c<|end|>\n<|assistant|>[t>d<|end|>]\n";
    assert_eq!(texts, [first, second]);
    let refuse = ChatSettings { not_prefix: NotPrefix::Refuse, ..settings() };
    let error = labelled(DROPS, refuse.clone(), &two_turns()).unwrap_err();
    assert!(matches!(error, TemplateError::NotPrefix { message: 2, .. }), "{error}");
    let one_turn = conversation(&[("user", "a"), ("assistant", "t>b")]);
    assert_eq!(labelled(DROPS, refuse, &one_turn).unwrap(), [first]);
    let folder = model(DROPS);
    let chats = chats(folder.path(), settings()).unwrap();
    for _ in 0..2 {
        chats.session().tokenize(&two_turns()).unwrap();
    }
    assert_eq!(chats.warnings(), [TemplateWarning::SplitTurns]);
}

#[test]
fn generation_blocks_mark_changed_turns() {
    let inner = "{{ m.content if loop.last else m.content.split('>')[-1] }}<|end|>";
    let template = format!(
        "{{% for m in messages %}}{{% if m.role == 'user' %}}<|user|>{{{{ m.content }}}}{{% else %}}<|assistant|>\
         {{% generation %}}{inner}{{% endgeneration %}}{{% endif %}}{{% endfor %}}"
    );
    let texts = labelled(&template, settings(), &two_turns()).unwrap();
    assert_eq!(texts, ["<|user|>a<|assistant|>[b<|end|>]<|user|>c<|assistant|>[t>d<|end|>]"]);
}

#[test]
fn differing_generation_blocks_are_refused() {
    let template =
        TURNS.replace("{{ m.content }}", "{% generation %}{{ m.content[:1] }}{% endgeneration %}{{ m.content[1:] }} x");
    let template =
        template.replace("<|{{ m.role }}|>{%", "<|{{ m.role }}|>{% if m.role == 'user' %}{{ m.content }}{% else %}{%");
    let template = template.replace(" x<|end|>", " x{% endif %}<|end|>");
    let error = labelled(&template, settings(), &two_turns()).unwrap_err();
    assert!(matches!(error, TemplateError::MasksDiffer { .. }), "{error}");
}

#[test]
fn first_message_of_the_assistant_is_labelled() {
    let template = format!("{{{{ messages[0].role[0:0] + messages[0].content[0:0] }}}}{TURNS}");
    let texts = labelled(&template, settings(), &conversation(&[("assistant", "hi")])).unwrap();
    assert_eq!(texts, ["<|assistant|>[hi<|end|>]\n"]);
    assert!(matches!(labelled(TURNS, settings(), &conversation(&[])), Err(TemplateError::EmptyConversation)));
}

#[test]
fn endless_templates_end() {
    for (template, expected) in [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too many steps"),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "too much memory",
        ),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "too much memory",
        ),
        (
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "too much memory",
        ),
        (
            "{% set ns = namespace(x='a') %}{% for i in range(9) %}{% set ns.x = ns.x | replace('a', 'a' * 999) %}{% endfor %}",
            "too much memory",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(20) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}",
            "too much memory",
        ),
        ("{% set n = 999999999999 %}{{ 'x' * n }}", "too much memory"),
        ("{{ '%999999999d' | format(1) }}", "width"),
        ("{{ 'a' | indent(999999999) }}", "wider"),
        ("{{ [1] | tojson(indent=999999999) }}", "wider"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('abcdefgh') }}", "too much memory"),
        ("{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}", "nests"),
        ("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | tojson }}", "nested deeper"),
    ] {
        let message = render(template).unwrap_err().to_string();
        assert!(message.contains(expected), "{template}: {message}");
    }
    let long = render(&"x".repeat((256 << 10) + 1)).unwrap_err();
    assert!(matches!(long, TemplateError::TooLong { .. }), "{long}");
    let deep = render(&format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000))).unwrap_err();
    assert!(matches!(deep, TemplateError::Syntax { .. }), "{deep}");
}

#[test]
fn loops_take_absent_lists_but_not_none() {
    let list = |name: &str| format!("<{{% for item in {name} %}}{{{{ item }}}}{{% endfor %}}>");
    assert_eq!(render(&list("absent")).unwrap(), "<>");
    assert_eq!(render(&list("[1, 2]")).unwrap(), "<12>");
    for none in ["none", "tools", "documents"] {
        let message = render(&list(none)).unwrap_err().to_string();
        assert!(message.contains("`none` is no list"), "{none}: {message}");
    }
}

#[test]
fn named_templates_are_chosen_by_tools() {
    let folder = model("");
    let list = json!([{ "name": "default", "template": "D" }, { "name": "tool_use", "template": "T" }]);
    fs::write(folder.path().join("tokenizer_config.json"), json!({ "chat_template": list }).to_string()).unwrap();
    let text = |tools: Vec<Value>| {
        let conversation = Conversation { tools, ..conversation(&[("user", "a")]) };
        chats(folder.path(), settings()).unwrap().session().render(&conversation, false).unwrap()
    };
    assert_eq!(text(vec![]), "D");
    assert_eq!(text(vec![json!({})]), "T");
    fs::write(folder.path().join("chat_template.jinja"), "F").unwrap();
    assert_eq!(text(vec![json!({})]), "F", "a file has precedence");
    fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    fs::write(folder.path().join("additional_chat_templates/tool_use.jinja"), "A").unwrap();
    assert_eq!((text(vec![]), text(vec![json!({})])), ("F".to_owned(), "A".to_owned()));
}

#[test]
fn missing_templates_are_named() {
    let folder = model("");
    let config = folder.path().join("tokenizer_config.json");
    fs::write(&config, "{}").unwrap();
    assert!(matches!(ChatTemplate::find(folder.path(), None), Err(TemplateError::NoTemplate { .. })));
    assert!(matches!(ChatTemplate::find(folder.path(), Some("nothing")), Err(TemplateError::UnknownTemplate { .. })));
    assert!(ChatTemplate::find(folder.path(), Some("chatml")).is_ok());
    fs::write(&config, json!({ "chat_template": [{ "name": "rag", "template": "" }] }).to_string()).unwrap();
    let error = chats(folder.path(), settings()).unwrap().session().render(&two_turns(), false).unwrap_err();
    assert!(matches!(error, TemplateError::NoDefault { .. }), "{error}");
    fs::write(&config, json!({ "chat_template": 3 }).to_string()).unwrap();
    assert!(matches!(ChatTemplate::find(folder.path(), None), Err(TemplateError::InvalidFile { .. })));
}

#[test]
fn unusual_tokens_are_warned_of() {
    let folder = model("<s><s>{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}");
    let chats = chats(folder.path(), settings()).unwrap();
    chats.session().tokenize(&two_turns()).unwrap();
    let expected = [
        TemplateWarning::RepeatedBeginToken("<s>".to_owned()),
        TemplateWarning::NoEndToken,
        TemplateWarning::SplitMarker("<|im_end|>".to_owned()),
    ];
    for warning in &expected {
        assert!(chats.warnings().contains(warning), "{:?}", chats.warnings());
    }
}

#[test]
fn built_in_templates_keep_their_turns() {
    let folder = model("");
    let refuse = ChatSettings { not_prefix: NotPrefix::Refuse, ..settings() };
    for name in crate::data::builtin_template::names().split(", ") {
        let tokenizer = Arc::new(Tokenizer::load(&folder.path().join("tokenizer.json")).unwrap());
        let template = ChatTemplate::find(folder.path(), Some(name)).unwrap();
        let chats = ConversationTokenizer::new(tokenizer, template, refuse.clone()).unwrap();
        let documents = chats.session().tokenize(&two_turns()).unwrap();
        assert_eq!(documents.len(), 1, "{name}");
        let text: String = documents[0]
            .labels
            .iter()
            .filter(|label| **label >= 0)
            .map(|label| chats.tokenizer.token_text(*label as u32))
            .collect();
        assert!(text.contains("t>b") && text.contains("t>d") && !text.contains('c'), "{name}: {text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn arbitrary_templates_never_panic(
        parts in prop::collection::vec(prop::sample::select(vec![
            "{{", "}}", "{%", "%}", "{#", "#}", " for x in messages ", " endfor ", " if ", " else ", " endif ", "messages", "[0]", "[::-1]",
            ".content", "|", "tojson", "(", ")", "'a'", "1", "~", "+", "*", "-", " set x = ", "x", " generation ", " endgeneration ",
            " raw ", " endraw ", " macro f(x) ", " endmacro ", "f", ".split", ".items()", "\n", "é", " in ", " is ", " string ", "[1:", "]",
        ]), 0..24),
        noise in ".{0,8}",
    ) {
        let template = parts.concat() + &noise;
        if let Err(error) = render(&template) {
            prop_assert!(!error.to_string().contains("the library"), "{}: {}", template, error);
        }
    }
}
