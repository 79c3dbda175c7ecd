//! Models and data of the Hugging Face Hub: downloads, the cache, access and faults, with a server on loopback.

mod server;

use crate::common::{CommandOutput, Running, SMALL, Workspace};
use serde_json::{Value, json};
use server::{Fault, Server, checksum};
use std::fs;
use std::net::TcpListener;

/// Model of the tests on the hub.
const MODEL: &str = "models/acme/tiny";

/// Arguments that plan the model.
const PLAN: [&str; 5] = ["plan", "--sequence", "32", "--model", "hub:acme/tiny"];

/// A workspace, and a hub with the workspace's model and data.
struct Hub {
    workspace: Workspace,
    server: Server,
}

impl Hub {
    /// Starts a hub whose model has a configuration and a tokenizer.
    fn new() -> Hub {
        let hub = Hub { workspace: Workspace::new(&SMALL), server: Server::start() };
        hub.put_model('1', "model");
        let file = |name: &str| (name.to_owned(), hub.workspace.read(name).into_bytes());
        hub.server.put(
            "datasets/acme/sums",
            '2',
            [file("train.jsonl"), ("test.jsonl".to_owned(), file("eval.jsonl").1)],
        );
        hub
    }

    /// Puts a folder of the workspace on the hub as its model.
    fn put_model(&self, commit: char, folder: &str) {
        let name = |path: &std::path::Path| path.to_str().unwrap().to_owned();
        let files = self.workspace.read_files(folder);
        self.server.put(MODEL, commit, files.iter().map(|(path, bytes)| (name(path), bytes.clone())));
    }

    /// Puts a model with weights on the hub, as training writes it. Returns the bytes of the weights.
    fn put_trained_model(&self) -> Vec<u8> {
        self.workspace.succeed(&["train", "run.toml", "--set", "train.steps=1", "--set", "run.dir=first"]);
        self.put_model('1', "first/model");
        fs::read(self.workspace.path("first/model/model.safetensors")).unwrap()
    }

    fn start(&self, environment: &[&str], args: &[&str]) -> Running {
        let home = format!("HF_HOME={}", self.workspace.path("hf").display());
        let endpoint = format!("HF_ENDPOINT={}", self.server.address);
        let mut words = vec!["env"];
        for unset in ["HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY"] {
            words.extend(["-u", unset]);
        }
        words.extend(["-u", "ALL_PROXY", "-u", "all_proxy", &home, &endpoint]);
        words.extend(environment);
        self.workspace.start_wrapped(&words, args)
    }

    fn run(&self, environment: &[&str], args: &[&str]) -> CommandOutput {
        self.start(environment, args).wait()
    }

    fn succeed(&self, environment: &[&str], args: &[&str]) -> CommandOutput {
        let done = self.run(environment, args);
        assert_eq!(done.code, Some(0), "{args:?}: {}", done.stderr);
        done
    }

    /// Plans the model in this environment. Returns the error.
    fn refusal(&self, environment: &[&str], model: &str) -> String {
        self.run(environment, &["plan", "--sequence", "32", "--model", model]).refusal(2)
    }

    /// Returns the paths of the files that were requested since the last call, without the API.
    fn requested_files(&self) -> Vec<String> {
        let requests = self.server.take_requests().into_iter().map(|request| request.path);
        let file = |path: String| Some(path.split_once("/resolve/")?.1.split_once('/')?.1.to_owned());
        requests.filter_map(file).collect()
    }
}

/// Arguments that train one step from the hub's model and data.
const TRAIN: [&str; 9] = [
    "train",
    "run.toml",
    "--set",
    "train.steps=1",
    "--set",
    "model.path=hub:acme/tiny",
    "--set",
    "data.train=hub:acme/sums",
    "--set",
];
const INIT: &str = "model.init=pretrained";

fn train<'a>(more: &[&'a str]) -> Vec<&'a str> {
    TRAIN.iter().copied().chain([INIT]).chain(more.iter().copied()).collect()
}

#[test]
fn plan_downloads_the_configuration_only() {
    let hub = Hub::new();
    hub.put_trained_model();
    let plan = PLAN;
    let shown = hub.succeed(&[], &plan).stdout;
    assert!(shown.starts_with("plan for tiny: "), "{shown}");
    assert_eq!(hub.requested_files(), ["config.json"]);
    hub.succeed(&[], &plan);
    assert_eq!(hub.requested_files(), [""; 0]);
    // The layout of huggingface_hub.
    let root = "hf/hub/models--acme--tiny";
    let commit = "1".repeat(40);
    assert_eq!(hub.workspace.read(&format!("{root}/refs/main")), commit);
    let config = hub.workspace.read("first/model/config.json");
    let command = if config.len() < 1024 { "git hash-object --stdin" } else { "sha256sum" };
    let digits = checksum(command, config.as_bytes());
    assert_eq!(hub.workspace.read(&format!("{root}/blobs/{digits}")), config);
    let link = fs::read_link(hub.workspace.path(&format!("{root}/snapshots/{commit}/config.json"))).unwrap();
    assert_eq!(link.to_str(), Some(&*format!("../../blobs/{digits}")));
}

#[test]
fn run_from_the_hub_equals_run_from_files() {
    let hub = Hub::new();
    hub.put_trained_model();
    let local = ["model.path=first/model", INIT, "run.dir=local", "train.steps=1"];
    let local: Vec<&str> = local.iter().flat_map(|setting| ["--set", *setting]).collect();
    hub.workspace.succeed(&[&["train", "run.toml"], &*local].concat());
    hub.succeed(&[], &train(&["--set", "data.eval=hub:acme/sums"]));
    assert_eq!(hub.workspace.read_files("run/model"), hub.workspace.read_files("local/model"));
    let result = |run: &str| hub.workspace.json(&format!("{run}/result.json"))["eval"].clone();
    assert_eq!(result("run"), result("local"));
    // The run file names the commits, so a resumed run has the same files after the branch has moved.
    let stored = hub.workspace.read("run/run.toml");
    let (model, data) =
        (format!("\"hub:acme/tiny@{}\"", "1".repeat(40)), format!("\"hub:acme/sums@{}\"", "2".repeat(40)));
    assert!(stored.contains(&model) && stored.matches(&data).count() == 2, "{stored}");
    hub.put_model('3', "model");
    hub.server.take_requests();
    let resume = ["train", "--resume", "run", "--set", "train.steps=2"];
    hub.succeed(&[], &resume);
    assert_eq!(hub.server.take_requests().len(), 0);
    assert_eq!(hub.workspace.json("run/result.json")["steps"], 2);
}

#[test]
fn only_the_weights_of_the_index_are_fetched() {
    let hub = Hub::new();
    let weights = hub.put_trained_model();
    let length = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&weights[8..8 + length]).unwrap();
    let names = header.as_object().unwrap().keys().filter(|name| *name != "__metadata__");
    let shard = "model-00001-of-00001.safetensors";
    let map: Value = names.map(|name| (name.clone(), json!(shard))).collect::<serde_json::Map<_, _>>().into();
    hub.workspace.write("first/model/model.safetensors.index.json", json!({"weight_map": map}).to_string());
    fs::rename(hub.workspace.path("first/model/model.safetensors"), hub.workspace.path("first/model").join(shard))
        .unwrap();
    hub.workspace.write("first/model/consolidated.safetensors", "the same once more");
    hub.put_model('1', "first/model");
    hub.succeed(&[], &train(&[]));
    let mut requested = hub.requested_files();
    requested.retain(|name| name.contains("safetensors"));
    assert_eq!(requested, ["model.safetensors.index.json", shard]);
    // Weights in another format are no weights.
    hub.server.put(
        "models/acme/old",
        '4',
        [
            ("config.json".to_owned(), hub.workspace.read("model/config.json").into_bytes()),
            ("pytorch_model.bin".to_owned(), vec![1]),
        ],
    );
    let refusal = hub.run(&[], &train(&["--set", "model.path=hub:acme/old", "--set", "run.dir=other"])).refusal(2);
    assert!(refusal.contains("the model has no file *.safetensors"), "{refusal}");
    assert!(refusal.contains("its files: config.json, pytorch_model.bin"), "{refusal}");
}

#[test]
fn broken_download_resumes_where_it_broke_off() {
    let hub = Hub::new();
    let weights = hub.put_trained_model();
    let ranges = |hub: &Hub| {
        let requests = hub.server.take_requests().into_iter();
        let of_weights = requests.filter(|request| request.path.ends_with("/model.safetensors"));
        of_weights.map(|request| request.header("range").to_owned()).collect::<Vec<_>>()
    };
    // The connection is closed twice within one command.
    hub.server.fail("model.safetensors", Fault::CutAfter(1000), 2);
    hub.succeed(&[], &train(&[]));
    assert_eq!(ranges(&hub), ["", "bytes=1000-", "bytes=2000-"]);
    let folder = format!("hf/hub/models--acme--tiny/snapshots/{}/model.safetensors", "1".repeat(40));
    assert!(fs::read(hub.workspace.path(&folder)).unwrap() == weights);
    // Another process continues what a killed one began.
    fs::remove_dir_all(hub.workspace.path("hf")).unwrap();
    hub.server.fail("model.safetensors", Fault::StallAfter(3000), 1);
    let partial = hub.workspace.path("hf/hub/models--acme--tiny/blobs");
    let partial = partial.join(format!("{}.incomplete", checksum("sha256sum", &weights)));
    let again = train(&["--set", "run.dir=again"]);
    let mut killed = hub.start(&[], &again);
    assert!(killed.wait_until(|| fs::metadata(&partial).is_ok_and(|found| found.len() == 3000)));
    killed.kill();
    ranges(&hub);
    hub.succeed(&[], &again);
    assert_eq!(ranges(&hub), ["bytes=3000-"]);
    assert!(!partial.exists() && fs::read(hub.workspace.path(&folder)).unwrap() == weights);
}

#[test]
fn damaged_part_or_ignored_range_restarts_the_download() {
    let hub = Hub::new();
    let weights = hub.put_trained_model();
    let blobs = hub.workspace.path("hf/hub/models--acme--tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let digits = checksum("sha256sum", &weights);
    for (run, left, fault) in [
        ("a", vec![7; 500], None),
        ("b", weights[..500].to_vec(), Some(Fault::IgnoreRange)),
        ("c", vec![7; weights.len() + 1], None),
        ("d", weights[..500].to_vec(), Some(Fault::Status(416, ""))),
    ] {
        let _ = fs::remove_file(blobs.join(&digits));
        fs::write(blobs.join(format!("{digits}.incomplete")), left).unwrap();
        fault.into_iter().for_each(|fault| hub.server.fail("model.safetensors", fault, 1));
        hub.succeed(&[], &train(&["--set", &format!("run.dir={run}")]));
        assert!(fs::read(blobs.join(&digits)).unwrap() == weights, "{run}");
    }
}

#[test]
fn wrong_checksum_is_refused_and_deleted() {
    let hub = Hub::new();
    let weights = hub.put_trained_model();
    for (file, command) in [("tokenizer_config.json", "git hash-object --stdin"), ("model.safetensors", "sha256sum")] {
        hub.server.fail(&format!("/{file}"), Fault::Corrupt, 1);
        let refusal = hub.run(&[], &train(&[])).refusal(2);
        let place = hub.server.address.trim_start_matches("http://");
        let content = hub.workspace.read_files("first/model").remove(std::path::Path::new(file)).unwrap();
        let expected = checksum(command, &content);
        let says =
            [format!("model.path: hub:acme/tiny: {file} from {place} has checksum"), format!("expected {expected}")];
        assert!(says.iter().all(|words| refusal.contains(words)), "{refusal}");
        let left = hub.workspace.file_names("hf/hub/models--acme--tiny/blobs");
        assert!(!left.iter().any(|name| name.starts_with(&expected)), "{left:?}");
    }
    hub.succeed(&[], &train(&[]));
    assert_eq!(weights.len() as u64, fs::metadata(hub.workspace.path("first/model/model.safetensors")).unwrap().len());
}

#[test]
fn files_larger_than_the_disk_are_not_begun() {
    let hub = Hub::new();
    hub.put_trained_model();
    hub.server.state_bytes(MODEL, 1 << 60);
    let refusal = hub.run(&[], &train(&[])).refusal(2);
    let says = ["error: model.path: hub:acme/tiny: ", " TiB are to be downloaded, and the disk of ", "HF_HOME=/path"];
    assert!(says.iter().all(|says| refusal.contains(says)), "{refusal}");
    let requested = hub.requested_files();
    assert!(!requested.iter().any(|file| file.ends_with(".safetensors")), "{requested:?}");
}

#[test]
fn refused_access_is_explained() {
    let hub = Hub::new();
    let gated = "X-Error-Code: GatedRepo\r\nX-Error-Message: Access is restricted\r\n";
    let page = format!("accept the conditions on {}/acme/tiny", hub.server.address);
    let log_in = "set a token of your account: HF_TOKEN=hf_...";
    let token = "HF_TOKEN=hf_secret";
    let cases: [(&str, Fault, &[&str], &[&str]); 7] = [
        ("/api/", Fault::Status(401, ""), &[], &["has no model `acme/tiny`\n", log_in]),
        ("/api/", Fault::Status(401, ""), &[token], &["the hub refuses the token in HF_TOKEN", "set a valid token"]),
        ("/api/", Fault::Status(404, "X-Error-Code: RepoNotFound\r\n"), &[token], &["that the token may read"]),
        ("config.json", Fault::Status(401, gated), &[], &["the model is gated", &page, log_in]),
        ("config.json", Fault::Status(403, gated), &[token], &["the model is gated", &page, "an account with access"]),
        ("config.json", Fault::Status(403, "X-Error-Message: no scope\r\n"), &[token], &["forbids access: no scope"]),
        ("config.json", Fault::Status(404, "X-Error-Code: EntryNotFound\r\n"), &[], &["has no file config.json"]),
    ];
    for (part, fault, environment, says) in cases {
        hub.server.fail(part, fault.clone(), 1);
        let refusal = hub.refusal(environment, "hub:acme/tiny");
        assert!(says.iter().all(|words| refusal.contains(words)), "{fault:?}: {refusal}");
        assert!(
            refusal.starts_with("error: model.path: hub:acme/tiny: ") && !refusal.contains("hf_secret"),
            "{refusal}"
        );
    }
}

#[test]
fn missing_repository_revision_or_file_is_named() {
    let hub = Hub::new();
    hub.server.put("models/acme/empty", '4', [("README.md".to_owned(), vec![1])]);
    hub.server.put("models/acme/hostile", '5', [("../../escaped".to_owned(), vec![1])]);
    for (model, says) in [
        ("hub:acme/none", "has no model `acme/none`"),
        ("hub:acme/tiny@v2", "hub:acme/tiny@v2: the model has no revision `v2`"),
        ("hub:acme/empty", "the model has no file config.json\n  hint: its files: README.md"),
        ("hub:acme/tiny:sub/*", "the model has no file sub/config.json"),
        ("hub:acme/tiny:*/*", "a model lies in one folder"),
        ("hub:acme", "has no model `acme`"),
        ("hub:acme/../tiny", "the name of a repository is OWNER/NAME"),
        ("hub:acme/hostile", "`../../escaped` is no path in a repository"),
    ] {
        let refusal = hub.refusal(&[], model);
        assert!(refusal.contains(says), "{model}: {refusal}");
    }
    hub.succeed(&[], &["plan", "--sequence", "32", "--model", "hub:acme/tiny@v1/a"]);
    assert_eq!(hub.workspace.read("hf/hub/models--acme--tiny/refs/v1/a"), "1".repeat(40));
}

#[test]
fn pause_that_the_hub_asks_for_is_made() {
    let hub = Hub::new();
    hub.server.fail("/api/", Fault::Status(429, "Retry-After: 1\r\n"), 1);
    hub.server.fail("config.json", Fault::Status(503, ""), 1);
    let began = std::time::Instant::now();
    hub.succeed(&[], &PLAN);
    assert!(began.elapsed().as_secs_f64() >= 1.0);
    fs::remove_dir_all(hub.workspace.path("hf")).unwrap();
    hub.server.fail("/api/", Fault::Status(429, "Retry-After: 9999\r\n"), 1);
    let refusal = hub.refusal(&[], "hub:acme/tiny");
    assert!(refusal.contains("takes no more requests now (status 429); it asks for a pause of 9999 s"), "{refusal}");
    assert!(refusal.contains("a token raises the limit"), "{refusal}");
}

#[test]
fn token_goes_to_the_hub_only() {
    let hub = Hub::new();
    let other = Server::start();
    let config = hub.workspace.read("model/config.json").into_bytes();
    other.put(MODEL, '1', [("config.json".to_owned(), config)]);
    hub.server.fail("config.json", Fault::Redirect(other.address.clone()), usize::MAX);
    hub.workspace.write("token", "hf_file\n");
    let file = format!("HF_TOKEN_PATH={}", hub.workspace.path("token").display());
    for (environment, token) in [("HF_TOKEN=hf_secret", "Bearer hf_secret"), (&*file, "Bearer hf_file")] {
        let _ = fs::remove_dir_all(hub.workspace.path("hf"));
        hub.succeed(&[environment], &PLAN);
        let (at_hub, redirected) = (hub.server.take_requests(), other.take_requests());
        assert_eq!((at_hub.len(), redirected.len()), (2, 1));
        assert!(at_hub.iter().all(|request| request.header("authorization") == token), "{at_hub:?}");
        assert_eq!(redirected[0].header("authorization"), "");
    }
}

#[test]
fn offline_uses_complete_copies_only() {
    let hub = Hub::new();
    hub.put_trained_model();
    let (offline, plan) = (["HF_HUB_OFFLINE=1"], PLAN);
    let refusal = hub.refusal(&offline, "hub:acme/tiny");
    assert!(
        refusal.contains("HF_HUB_OFFLINE is set, and ") && refusal.contains("has no copy of revision `main`"),
        "{refusal}"
    );
    hub.succeed(&[], &plan);
    hub.server.take_requests();
    hub.succeed(&offline, &plan);
    let refusal = hub.run(&offline, &train(&[])).refusal(2);
    assert!(refusal.contains("is not in ") && refusal.contains("HF_HUB_OFFLINE is set"), "{refusal}");
    assert!(refusal.contains("the same command without HF_HUB_OFFLINE"), "{refusal}");
    assert_eq!(hub.server.take_requests().len(), 0);
    // A hub that cannot be reached is like offline mode, with a note.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let unreachable = format!("HF_ENDPOINT=http://{closed}");
    let note = hub.succeed(&[&unreachable], &plan).stderr;
    assert!(
        note.starts_with(&format!("note: {closed} cannot be reached: ")) && note.contains("from the cache"),
        "{note}"
    );
    let refusal = hub.refusal(&[&unreachable], "hub:acme/other");
    assert!(refusal.contains(&format!("{closed} cannot be reached")), "{refusal}");
    // Python's library keeps no list of files: those that are there count.
    fs::remove_dir_all(hub.workspace.path("hf/hub/models--acme--tiny/plimsoll")).unwrap();
    hub.succeed(&offline, &plan);
}

#[test]
fn names_tell_the_use_of_data() {
    let hub = Hub::new();
    // Equal files would be one blob.
    let lines =
        |name: &str| (name.to_owned(), (hub.workspace.read("train.jsonl") + &" ".repeat(name.len())).into_bytes());
    let report = |train: &str| {
        let train = format!("data.train={train}");
        hub.run(&[], &["data", "run.toml", "--json", "--set", &train, "--set", "data.eval=hub:acme/sums"])
    };
    let documents = |train: &str| {
        let done = report(train);
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        (done.json()["documents"].as_u64().unwrap(), done.json()["eval"]["documents"].as_u64().unwrap())
    };
    assert_eq!(documents("hub:acme/sums"), (200, 24));
    assert_eq!(documents("hub:acme/sums:t*t.jsonl"), (24, 24));
    let names = ["README.md", "a/train-0.jsonl", "a/train-1 [x].jsonl", "b/train.jsonl", "b/dev.jsonl"].map(lines);
    hub.server.put("datasets/acme/sets", '6', names);
    assert_eq!(documents("hub:acme/sets:a/*"), (400, 24));
    for (train, says) in [
        ("hub:acme/sets", "the dataset has several sets of files\n  hint: its files: a/train-0.jsonl, "),
        ("hub:acme/sets:c/*", "the dataset has no file c/*"),
        ("hub:acme/nothing", "has no dataset `acme/nothing`"),
    ] {
        let refusal = report(train).stderr;
        assert!(refusal.starts_with("error: data.train: ") && refusal.contains(says), "{train}: {refusal}");
    }
}

#[test]
fn init_takes_model_and_data_of_the_hub() {
    let hub = Hub::new();
    hub.put_trained_model();
    let words = "init --yes --model hub:acme/tiny --data hub:acme/sums --devices virtual:a=300MiB@0.5 --sequence 32 \
                 --batch-tokens 256 --steps 2 --run-dir first-run --out new.toml";
    hub.succeed(&[], &words.split_whitespace().collect::<Vec<_>>());
    let text = hub.workspace.read("new.toml");
    let says = ["path = \"hub:acme/tiny\"", "\"hub:acme/sums\"", "tokens, 200 documents, 1 file"];
    assert!(says.iter().all(|says| text.contains(says)), "{text}");
    hub.succeed(&[], &["train", "new.toml", "--quiet"]);
    assert_eq!(hub.workspace.json("first-run/result.json")["steps"], 2);
    let refusal = hub.run(&[], &["init", "--yes", "--model", "hub:acme/tiny", "--data", "hub:acme/none"]).refusal(2);
    assert!(refusal.contains("has no dataset `acme/none`"), "{refusal}");
}

#[test]
fn sources_take_splits_and_keep_commits() {
    let hub = Hub::new();
    let sources = |table: &str| format!("data.source=[{table}, {{path = \"train.jsonl\"}}]");
    let report = |sources: &str| hub.run(&[], &["data", "run.toml", "--json", "--set", sources]);
    for (table, documents) in [
        ("{path = \"hub:acme/sums\"}", 200),
        ("{path = \"hub:acme/sums\", split = \"test\"}", 24),
        ("{path = \"hub:acme/sums:t*.jsonl\", split = \"test\"}", 24),
    ] {
        let done = report(&sources(table));
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        let source = done.json()["sources"][0].clone();
        assert_eq!(source["documents"], documents, "{table}");
        assert!(source["path"][0].as_str().unwrap().starts_with("hub:acme/sums@2222"), "{source}");
    }
    for files in ["", ":t*.jsonl"] {
        let table = format!("{{path = \"hub:acme/sums{files}\", split = \"dev\"}}");
        let refusal = report(&sources(&table)).stderr;
        let says = "error: data.source[1].path: ";
        assert!(refusal.starts_with(says) && refusal.contains("has the split \"validation\""), "{refusal}");
        assert!(refusal.contains("its files: ") && refusal.contains("test.jsonl"), "{refusal}");
    }

    let test = sources("{path = \"hub:acme/sums\", split = \"test\"}");
    hub.succeed(&[], &["train", "run.toml", "--set", "train.steps=2", "--set", "train.save_every=1", "--set", &test]);
    let stored = hub.workspace.read("run/run.toml");
    let id = format!("path = [\"hub:acme/sums@{}\"]\nsplit = \"test\"\n", "2".repeat(40));
    assert!(stored.contains(&id), "{stored}");
    fs::remove_dir_all(hub.workspace.path("run/checkpoints/step-2")).unwrap();
    hub.succeed(&[], &["train", "--resume", "run"]);
}
