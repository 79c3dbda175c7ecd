//! `plimsoll generate`: conversations from files and with a user, files of prompts, stop texts, the model's own rules.

use crate::common::{SMALL, Shape, Workspace};
use serde_json::{Value, json};
use std::fs;

const MARKS: [(u32, &str); 4] = [(28, "<|im_start|>"), (29, "<|im_end|>"), (30, "\n"), (31, " ")];

/// Returns a workspace with a trained model whose tokenizer has the markers of the template `chatml`.
fn workspace() -> Workspace {
    let workspace = Workspace::new(&Shape { steps: 8, ..SMALL });
    workspace.add_tokens(&MARKS);
    workspace.succeed(&["train", "run.toml", "--quiet"]);
    workspace
}

/// Generates with the trained model, at most five tokens.
fn generate(workspace: &Workspace, more: &[&str]) -> Value {
    workspace.succeed(&[&["generate", "run/model", "--max-tokens", "5", "--json"], more].concat()).json()
}

/// Answers a conversation, given as pairs of role and content.
fn answer(workspace: &Workspace, messages: &[(&str, &str)]) -> Value {
    let messages: Vec<Value> =
        messages.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect();
    workspace.write("messages.json", json!(messages).to_string());
    generate(workspace, &["--messages", "messages.json", "--template", "chatml", "--temperature", "2"])
}

/// Gives lines to a conversation. Returns its output and its notes.
fn talk(workspace: &Workspace, lines: &str, more: &[&str]) -> (String, String) {
    workspace.write("lines.txt", lines);
    let chat = ["generate", "run/model", "--chat", "--template", "chatml", "--max-tokens", "5", "--temperature", "2"];
    let read_lines = ["sh", "-c", "exec \"$@\" <lines.txt", "sh"];
    let done = workspace.start_wrapped(&read_lines, &[&chat, more].concat()).wait();
    assert_eq!(done.code, Some(0), "{done:?}");
    (done.stdout, done.stderr)
}

fn text(answer: &Value) -> &str {
    answer["text"].as_str().unwrap()
}

#[test]
fn conversation_is_rendered_by_template() {
    let workspace = workspace();
    let found = answer(&workspace, &[("user", "abc")]);
    let prompt = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n";
    let expected = generate(&workspace, &["--prompt", prompt, "--temperature", "2"]);
    assert_eq!((&found["tokens"], &found["text"]), (&expected["tokens"], &expected["text"]));
    assert_eq!(found["end"], expected["end"]);
    assert!(expected["messages"].is_null() && found["prompt"].is_null());
    let messages = json!([{ "role": "user", "content": "abc" }, { "role": "assistant", "content": found["text"] }]);
    assert_eq!(found["messages"], messages);
    // An object may hold tools beside the messages.
    workspace
        .write("object.json", json!({ "messages": [{ "role": "user", "content": "abc" }], "tools": [] }).to_string());
    let object = generate(&workspace, &["--messages", "object.json", "--template", "chatml", "--temperature", "2"]);
    assert_eq!(object, found);
    // People see the answer alone.
    let shown = ["generate", "run/model", "--max-tokens", "5", "--messages", "object.json", "--template", "chatml"];
    assert_eq!(
        workspace.succeed(&[&shown[..], &["--temperature", "2"]].concat()).stdout,
        format!("{}\n", text(&found))
    );
}

#[test]
fn trained_models_and_adapters_keep_the_template_of_their_data() {
    let workspace = workspace();
    let record = json!({ "messages": [{ "role": "user", "content": "ab" }, { "role": "assistant", "content": "cd" }] });
    workspace.write("chat.jsonl", format!("{record}\n").repeat(8));
    workspace.write("ask.json", json!([{ "role": "user", "content": "ab" }]).to_string());
    let train = |more: &[&str]| {
        let data =
            ["data.train=chat.jsonl", "data.eval=[]", "data.format=auto", "data.template=chatml", "train.steps=2"];
        let all: Vec<&str> = data.iter().chain(more).flat_map(|setting| ["--set", *setting]).collect();
        workspace.succeed(&[&["train", "run.toml", "--quiet"], &all[..]].concat());
    };
    train(&["run.dir=full"]);
    train(&["run.dir=tuned", "model.path=run/model", "model.init=pretrained", "train.method=lora"]);
    for model in [&["full/model"][..], &["run/model", "--adapter", "tuned/adapter"]] {
        let ask = [&["generate"], model, &["--messages", "ask.json", "--max-tokens", "4", "--json"]].concat();
        let found = workspace.succeed(&ask).json();
        assert_eq!(found, workspace.succeed(&[&ask[..], &["--template", "chatml"]].concat()).json(), "{model:?}");
        let eval = [&["eval"], model, &["--data", "chat.jsonl", "--json"]].concat();
        assert!(workspace.succeed(&eval).json()["loss"].is_number());
    }
    // Merged models take the template of the adapters.
    workspace.succeed(&["export", "tuned", "--merged", "merged"]);
    for folder in ["full/model", "tuned/adapter", "merged"] {
        assert!(workspace.read(&format!("{folder}/chat_template.jinja")).contains("<|im_start|>"), "{folder}");
    }
}

#[test]
fn flags_without_effect_are_refused() {
    let workspace = Workspace::new(&SMALL);
    for (line, flag) in [
        (&["generate", "m", "--prompt", "a", "--system", "b"][..], "--system"),
        (&["generate", "m", "--prompt", "a", "--out", "o.jsonl"], "--out"),
        (&["generate", "m", "--messages", "a.json", "--context", "64"], "--context"),
        (&["export", "m", "--gguf", "a.gguf", "--type", "f16", "--shard-size", "1GiB"], "--shard-size"),
        (&["export", "m", "--merged", "a", "--modelfile", "b"], "--modelfile"),
    ] {
        let done = workspace.run(line);
        assert!(done.code == Some(2) && done.stderr.contains("cannot be used with"), "{line:?}: {}", done.stderr);
        assert!(done.stderr.contains(flag), "{line:?}: {}", done.stderr);
    }
}

#[test]
fn missing_models_are_named_with_their_other_sources() {
    let workspace = Workspace::new(&SMALL);
    for (model, hint) in [
        ("Qwen/Qwen2.5-0.5B", "for a model of the Hugging Face Hub: hub:Qwen/Qwen2.5-0.5B"),
        ("models/Qwen2.5-0.5B", "for a model of the Hugging Face Hub: hub:OWNER/Qwen2.5-0.5B"),
        ("smollm2-135m", "smollm2-135m is a preset, which has no weights"),
    ] {
        for line in [&["generate", model, "--prompt", "a"][..], &["export", model, "--merged", "out"]] {
            let refusal = workspace.expect_refusal(2, line);
            assert!(refusal.contains("no such directory") && refusal.contains(hint), "{line:?}: {refusal}");
        }
    }
}

#[test]
fn chat_continues_the_conversation() {
    let workspace = workspace();
    let first = answer(&workspace, &[("user", "ab")]);
    let second = answer(&workspace, &[("user", "ab"), ("assistant", text(&first)), ("user", "cd")]);
    let alone = answer(&workspace, &[("user", "cd")]);
    assert_ne!(text(&second), text(&alone), "the model sees the earlier messages");
    let lines = |answers: &[&Value]| answers.iter().map(|answer| format!("{}\n", text(answer))).collect::<String>();
    let (shown, notes) = talk(&workspace, "ab\n\ncd\n", &[]);
    assert_eq!(shown, lines(&[&first, &second]), "{notes}");
    let (shown, _) = talk(&workspace, "ab\n/reset\ncd\n/exit\nab\n", &[]);
    assert_eq!(shown, lines(&[&first, &alone]));
    let system = answer(&workspace, &[("system", "x"), ("user", "ab")]);
    let (shown, _) = talk(&workspace, "ab\n/reset\nab", &["--system", "x"]);
    assert_eq!(shown, lines(&[&system, &system]));
}

#[test]
fn old_messages_leave_a_full_cache() {
    let workspace = workspace();
    let (shown, notes) = talk(&workspace, "ab\ncd\nef\n", &["--context", "40"]);
    // Two questions with an answer take more than 40 tokens.
    let alone = answer(&workspace, &[("user", "ef")]);
    assert!(shown.ends_with(&format!("\n{}\n", text(&alone))), "{shown}");
    assert_eq!(
        notes.matches("note: 2 old messages dropped: the cache has no room for them (--context)").count(),
        2,
        "{notes}"
    );
    workspace.write("lines.txt", "a".repeat(60));
    let chat = ["generate", "run/model", "--chat", "--template", "chatml", "--context", "40"];
    let refusal = workspace.start_wrapped(&["sh", "-c", "exec \"$@\" <lines.txt", "sh"], &chat).wait().refusal(2);
    assert!(
        refusal.contains("the message takes 79 tokens; the cache holds 40, 10 of them for the answer"),
        "{refusal}"
    );
    let refusal = workspace.expect_refusal(2, &[&chat[..5], &["--context", "65"]].concat());
    assert!(refusal.contains("--context 65 exceeds the model's 64 positions"), "{refusal}");
}

#[test]
fn files_of_prompts_are_answered_like_single_prompts() {
    let workspace = workspace();
    let records = [
        json!({ "id": 7, "prompt": "abc" }),
        json!({ "messages": [{ "role": "user", "content": "ab" }] }),
        json!({ "prompt": [{ "role": "user", "content": "cd" }], "tag": null }),
        json!({ "prompt": "abd", "text": "replaced" }),
    ];
    workspace.write("prompts.jsonl", records.iter().map(|record| format!("{record}\n")).collect::<String>());
    let batch = [
        "generate",
        "run/model",
        "--max-tokens",
        "5",
        "--template",
        "chatml",
        "--prompts",
        "prompts.jsonl",
        "--out",
        "answers.jsonl",
        "--temperature",
        "2",
    ];
    assert_eq!(workspace.succeed(&batch).stdout, "answers: answers.jsonl\n");
    let whole = workspace.read("answers.jsonl");
    let answers: Vec<Value> = whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let singles = [
        generate(&workspace, &["--prompt", "abc", "--temperature", "2"]),
        answer(&workspace, &[("user", "ab")]),
        answer(&workspace, &[("user", "cd")]),
        generate(&workspace, &["--prompt", "abd", "--temperature", "2"]),
    ];
    assert_eq!(answers.len(), singles.len());
    for ((found, record), single) in answers.iter().zip(&records).zip(&singles) {
        for key in ["text", "tokens", "end"] {
            assert_eq!(found[key], single[key], "{record}");
        }
        for (key, value) in record.as_object().unwrap().iter().filter(|(key, _)| *key != "text") {
            assert_eq!(&found[key], value);
        }
    }

    // An incomplete file is continued.
    let second_line = whole.match_indices('\n').nth(1).unwrap().0;
    for kept in [0, second_line / 2, second_line + 1, second_line + 9, whole.len()] {
        fs::write(workspace.path("answers.jsonl"), &whole[..kept]).unwrap();
        workspace.succeed(&batch);
        assert_eq!(workspace.read("answers.jsonl"), whole, "continued after {kept} bytes");
    }
    // Answers to other prompts stay.
    let other = whole.replacen("abc", "xyz", 1);
    workspace.write("answers.jsonl", &other);
    let refusal = workspace.expect_refusal(2, &batch);
    assert!(refusal.contains("answers.jsonl:1: it is no answer to prompt 1"), "{refusal}");
    assert_eq!(workspace.read("answers.jsonl"), other);
}

#[test]
fn answers_of_other_settings_are_not_mixed() {
    let workspace = workspace();
    workspace.write("prompts.jsonl", "{\"prompt\": \"abc\"}\n{\"prompt\": \"abd\"}\n");
    let run = |more: &[&'static str]| {
        let batch =
            ["generate", "run/model", "--prompts", "prompts.jsonl", "--out", "answers.jsonl", "--max-tokens", "3"];
        [&batch[..], more].concat()
    };
    workspace.succeed(&run(&["--temperature", "2"]));
    let whole = workspace.read("answers.jsonl");
    let first = &whole[..=whole.find('\n').unwrap()];
    workspace.write("answers.jsonl", first);
    let refusal = workspace.expect_refusal(2, &run(&["--temperature", "0.5"]));
    assert!(
        refusal.starts_with(
            "error: answers.jsonl: its 1 answers have temperature 2.0, but this command has 0.5\n  hint: name another file"
        ),
        "{refusal}"
    );
    assert_eq!(workspace.read("answers.jsonl"), first);
    // Threads change no answer.
    workspace.succeed(&run(&["--temperature", "2", "--threads", "1"]));
    assert_eq!(workspace.read("answers.jsonl"), whole);
    workspace.write("answers.jsonl", first);
    fs::remove_file(workspace.path("answers.jsonl.settings.json")).unwrap();
    let refusal = workspace.expect_refusal(2, &run(&["--temperature", "2"]));
    assert!(refusal.contains("answers.jsonl.settings.json: cannot read the settings of its answers"), "{refusal}");
}

/// Runs a file of prompts. Returns the answers and the note about the prompts that are answered at once.
fn answer_file(workspace: &Workspace, more: &[&str]) -> (String, String) {
    let run = ["generate", "run/model", "--prompts", "prompts.jsonl", "--out", "answers.jsonl"];
    let done = workspace.succeed(&[&run[..], more].concat());
    let note = done.stderr.lines().find(|line| line.contains("at once")).expect("a note").to_owned();
    (workspace.read("answers.jsonl"), note)
}

#[test]
fn prompts_at_once_get_answers_of_single_prompts() {
    let workspace = workspace();
    let letter = |number: usize| char::from(b'a' + (number % 26) as u8);
    let text = |number: usize| (0..1 + number * 7 % 20).map(|at| letter(number + at * at)).collect::<String>();
    let prompts: Vec<String> = (0..70).map(text).collect();
    let lines = prompts.iter().map(|prompt| format!("{}\n", json!({ "prompt": prompt })));
    workspace.write("prompts.jsonl", lines.collect::<String>());
    for rules in [&["--max-tokens", "12"][..], &["--max-tokens", "12", "--temperature", "1.5", "--stop", "a"]] {
        let (whole, note) = answer_file(&workspace, rules);
        assert_eq!(note, "note: 64 prompts answered at once");
        let answers: Vec<Value> = whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let ends: std::collections::HashSet<&str> =
            answers.iter().map(|answer| answer["end"].as_str().unwrap()).collect();
        assert!(ends.len() > 1 || rules.len() == 2, "answers end unequally: {ends:?}");
        for (number, answer) in answers.iter().enumerate() {
            assert_eq!(answer["prompt"], prompts[number]);
            if number % 9 == 0 {
                let alone = ["generate", "run/model", "--json", "--prompt", &prompts[number]];
                assert_eq!(workspace.succeed(&[&alone[..], rules].concat()).json(), *answer, "{number}");
            }
        }
        // An interrupted file is continued in other slots, beside other prompts.
        for kept in [whole.len() / 3, whole.len() - 1] {
            fs::write(workspace.path("answers.jsonl"), &whole[..kept]).unwrap();
            assert_eq!(answer_file(&workspace, rules).0, whole, "continued after {kept} bytes");
        }
        // With a load line for few sequences.
        let run = ["generate", "run/model", "--prompts", "prompts.jsonl", "--out", "few.jsonl", "--budget", "1MiB"];
        let refusal = workspace.expect_refusal(3, &[&run[..], rules].concat());
        let least = refusal.split("--budget ").nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap();
        fs::remove_file(workspace.path("answers.jsonl")).unwrap();
        let (few, note) = answer_file(&workspace, &[rules, &["--budget", least]].concat());
        assert!(few == whole && note.contains("the load line has no room for more"), "{note}");
        assert!(!note.contains("64 prompts"), "{note}");
        fs::remove_file(workspace.path("answers.jsonl")).unwrap();
    }
}

#[test]
fn answers_end_before_stop_texts() {
    let workspace = workspace();
    let all = generate(&workspace, &["--prompt", "abc"]);
    let text = text(&all);
    assert!(text.len() >= 2, "{all}");
    let stop = &text[1..2];
    let stopped = generate(&workspace, &["--prompt", "abc", "--stop", "no such text", "--stop", stop]);
    assert_eq!(
        (stopped["text"].as_str().unwrap(), &stopped["end"]),
        (&text[..text.find(stop).unwrap()], &json!("stop_text"))
    );
    assert_eq!(stopped["tokens"].as_array().unwrap().len(), text.find(stop).unwrap() + 1);
}

#[test]
fn rules_of_the_model_are_honoured() {
    let workspace = workspace();
    let args = ["generate", "run/model", "--prompt", "abc", "--json"];
    let run = |more: &[&str]| workspace.succeed(&[&args[..], more].concat());
    let drawn = run(&["--temperature", "2", "--top-p", "0.9", "--max-tokens", "9"]).json();
    let greedy = run(&["--max-tokens", "9"]).json();
    assert_ne!(drawn, greedy);
    let rules = json!({ "eos_token_id": 0, "do_sample": true, "temperature": 2.0, "top_k": 0, "top_p": 0.9, "max_new_tokens": 9, "num_beams": 3 });
    workspace.write("run/model/generation_config.json", rules.to_string());
    let own = run(&[]);
    assert_eq!(own.json(), drawn);
    assert!(own.stderr.contains("note: generation_config.json: `num_beams` has no effect here"), "{}", own.stderr);
    assert_eq!(run(&["--temperature", "0"]).json(), greedy, "the user's rules have precedence");
    workspace.write("run/model/generation_config.json", json!({ "temperature": "hot" }).to_string());
    let refusal = workspace.run(&args).refusal(2);
    assert!(
        refusal.contains("generation_config.json: `temperature` is \"hot\", expected a number of 0 or more"),
        "{refusal}"
    );
}

#[test]
fn invalid_prompts_name_their_place() {
    let workspace = workspace();
    let refusal = |words: &[&str]| {
        workspace.expect_refusal(2, &[&["generate", "run/model", "--max-tokens", "5"], words].concat())
    };
    let user = json!([{ "role": "user", "content": "ab" }]);
    workspace.write("user.json", user.to_string());
    assert!(refusal(&["--messages", "user.json"]).contains("has no chat template"));
    for (content, expected) in [
        ("nonsense", "bad.json: expected ident"),
        ("3", "bad.json: expected a list of messages, or an object with `messages`"),
        ("[]", "bad.json: it has no messages"),
        (r#"{"prompt": "ab"}"#, "bad.json: missing field `messages`"),
        (r#"[{"role": "user"}]"#, "bad.json: `messages[0]` has no `content`"),
        (
            r#"[{"role": "assistant", "content": "a"}]"#,
            "bad.json: the last message is from the assistant; end with one of the user",
        ),
    ] {
        workspace.write("bad.json", content);
        let found = refusal(&["--messages", "bad.json", "--template", "chatml"]);
        assert!(found.contains(expected), "{content}: {found}");
    }
    for (content, expected) in [
        ("", "bad.jsonl: it has no prompt"),
        ("{\"prompt\": \"a\"}\n{\"text\": \"a\"}", "bad.jsonl:2: missing field `prompt` or `messages`"),
        ("{\"prompt\": 5}", "bad.jsonl:1: `prompt` is a number, expected a text or a list of messages"),
        ("{\"prompt\": \"\"}", "bad.jsonl:1: the prompt has no tokens"),
        (
            &json!({ "prompt": "a".repeat(62) }).to_string(),
            "bad.jsonl:1: 62 prompt tokens and 5 new tokens exceed the model's 64 positions",
        ),
    ] {
        workspace.write("bad.jsonl", content);
        let found = refusal(&["--prompts", "bad.jsonl", "--out", "out.jsonl", "--template", "chatml"]);
        assert!(found.contains(expected), "{content}: {found}");
        assert!(!workspace.path("out.jsonl").exists());
    }
}
