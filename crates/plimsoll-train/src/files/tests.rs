//! Written files read back, and damaged or mismatched files are refused with the reason.

use super::*;
use plimsoll_core::{Bytes, DType, Exit, Failure};
use plimsoll_program::models::{ModelConfig, Parameter, preset};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Returns a tiny model: two layers, grouped-query attention.
fn tiny(tied: bool) -> ModelConfig {
    let shape = preset("llama-3.1-8b").unwrap();
    ModelConfig { hidden: 8, layers: 2, heads: 2, kv_heads: 1, head_dim: 4, ffn: 6, vocab: 10, tied, ..shape }
}

fn stored(name: &str, dtype: DType, shape: &[u64]) -> StoredTensor {
    StoredTensor { name: name.into(), dtype, shape: shape.to_vec() }
}

/// Returns bytes that differ from tensor to tensor. As floats of any type they are finite.
fn content(name: &str, bytes: u64) -> Vec<u8> {
    let seed = name.bytes().fold(7u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
    (0..bytes).map(|at| (seed.wrapping_add(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 & 0x3f).collect()
}

fn write(dir: &Path, tensors: &[StoredTensor], max_shard: Bytes) {
    let mut writer = WeightWriter::create(dir, "model", tensors, max_shard).unwrap();
    for tensor in tensors {
        let bytes = content(&tensor.name, tensor.shape.iter().product::<u64>() * tensor.dtype.bytes());
        for piece in bytes.chunks(8) {
            writer.write(&tensor.name, piece).unwrap();
        }
    }
    let files = writer.finish().unwrap();
    for (name, summary) in files {
        assert_eq!(FileSummary::of(&fs::read(dir.join(&name)).unwrap()), summary, "{name}");
    }
}

/// Writes a model directory with the tensors of `config`, which `change` may modify.
fn model_with(config: &ModelConfig, change: impl FnOnce(&mut Vec<StoredTensor>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors: Vec<_> = config.hf_parameters().iter().map(|p| stored(&p.hf_name, DType::F32, &p.shape)).collect();
    change(&mut tensors);
    write(dir.path(), &tensors, MAX_SHARD_BYTES);
    let text = config.to_json(None, DType::F32).to_string();
    fs::write(dir.path().join("config.json"), text).unwrap();
    dir
}

/// Returns the message for `dir`, without its path.
fn refusal(dir: &Path) -> String {
    let failure = Failure::from(ModelDir::open(dir, &[]).unwrap_err());
    assert_eq!(failure.exit, Exit::Input);
    failure.message.replace(&format!("{}/", dir.display()), "").replace(&dir.display().to_string(), "DIR")
}

#[test]
fn written_tensors_read_back_from_file_and_shards() {
    let tensors = [
        stored("a", DType::Bf16, &[3]),
        stored("b", DType::F32, &[2, 3]),
        stored("empty", DType::F32, &[0, 4]),
        stored("scalar", DType::F64, &[]),
        stored("c", DType::U8, &[7]),
        stored("d", DType::I32, &[1]),
    ];
    for (max_shard, expected) in [
        (MAX_SHARD_BYTES, vec!["model.safetensors"]),
        (Bytes(38), vec!["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &tensors, max_shard);
        let files = WeightFiles::open(dir.path()).unwrap().unwrap();
        let names: Vec<_> = files.paths().iter().map(|path| path.file_name().unwrap()).collect();
        assert_eq!(names, expected);
        assert_eq!(files.entries().count(), tensors.len());
        for tensor in &tensors {
            let entry = files.entry(&tensor.name).unwrap();
            assert_eq!((entry.dtype(), &entry.shape), (Some(tensor.dtype), &tensor.shape));
            assert!(entry.begin.is_multiple_of(tensor.dtype.bytes()), "{} is not aligned", tensor.name);
            let expected = content(&tensor.name, entry.bytes);
            let mut found = vec![0; entry.bytes as usize];
            let (first, second) = found.split_at_mut(entry.bytes as usize / 2);
            files.read_at(entry, 0, first).unwrap();
            files.read_at(entry, first.len() as u64, second).unwrap();
            assert_eq!(found, expected, "{}", tensor.name);
        }
    }
}

/// The reference is the published `safetensors` crate.
#[test]
fn published_crate_reads_written_files() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[stored("a", DType::Bf16, &[3]), stored("b", DType::F32, &[2, 3])], MAX_SHARD_BYTES);
    let bytes = fs::read(dir.path().join("model.safetensors")).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.tensor("a").unwrap().data(), content("a", 6));
    assert_eq!(read.tensor("b").unwrap().shape(), [2, 3]);
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
}

#[test]
#[should_panic(expected = "tensor `a` lacks 4 bytes")]
fn finish_panics_on_incomplete_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = WeightWriter::create(dir.path(), "m", &[stored("a", DType::F32, &[2])], MAX_SHARD_BYTES).unwrap();
    writer.write("a", &[0; 4]).unwrap();
    let _ = writer.finish();
}

#[test]
fn non_finite_values_are_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let nan = f32::NAN.to_le_bytes();
    for (dtype, bytes) in [(DType::F32, &nan[..]), (DType::Bf16, &[0x80, 0xff]), (DType::F16, &[0, 0x7c])] {
        let tensors = [stored("good", DType::U8, &[1]), stored("bad", dtype, &[3])];
        let mut writer = WeightWriter::create(dir.path(), "m", &tensors, MAX_SHARD_BYTES).unwrap();
        writer.write("good", &[0xff]).unwrap();
        for value in [&vec![0; bytes.len()], bytes, &vec![0; bytes.len()]] {
            writer.write("bad", value).unwrap();
        }
        let refusal = writer.finish().unwrap_err();
        assert!(matches!(&refusal, FilesError::NotFinite { tensor, .. } if tensor == "bad"), "{refusal}");
    }
}

#[test]
fn file_truncated_anywhere_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[stored("a", DType::F32, &[3]), stored("b", DType::Bf16, &[2])], MAX_SHARD_BYTES);
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        assert!(matches!(WeightFiles::open(dir.path()), Err(FilesError::Header { .. })), "{length}");
    }
    let mut longer = whole.clone();
    longer.push(0);
    fs::write(&path, longer).unwrap();
    assert!(WeightFiles::open(dir.path()).is_err());
    // A length field beyond the file is refused before allocation.
    fs::write(&path, [&90_000_000u64.to_le_bytes()[..], b"{}"].concat()).unwrap();
    let message = WeightFiles::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("claims 90000000 bytes, but 2 follow"), "{message}");
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n").unwrap();
    let message = WeightFiles::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("is a pointer of Git LFS"), "{message}");
}

#[test]
fn index_that_mismatches_files_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[stored("a", DType::F32, &[3]), stored("b", DType::F32, &[3])], Bytes(12));
    let path = dir.path().join("model.safetensors.index.json");
    let good = fs::read_to_string(&path).unwrap();
    let with = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        fs::write(&path, good.replace(from, to)).unwrap();
        WeightFiles::open(dir.path()).unwrap_err().to_string()
    };
    assert!(
        with("model-00002-of-00002", "model-00003-of-00003")
            .contains("`model-00003-of-00003.safetensors` does not exist")
    );
    assert!(with("model-00002-of-00002", "../model").contains("is not the name of a file in this directory"));
    assert!(with("\"b\":", "\"c\":").contains("tensor `c` is not in `model-00002-of-00002.safetensors`"));
    assert!(with("\"b\":", "\"a\":").contains("tensor `a` occurs twice"));
    let frequencies = "\"layers.0.rotary_emb.inv_freq\": \"model-00002-of-00002.safetensors\", \"b\":";
    fs::write(&path, good.replace("\"b\":", frequencies)).unwrap();
    assert_eq!(WeightFiles::open(dir.path()).unwrap().unwrap().entries().count(), 2);
    assert!(with("weight_map", "weights").contains("missing field `weight_map`"));
}

#[test]
fn files_without_index_are_read_together() {
    let dir = tempfile::tempdir().unwrap();
    assert!(WeightFiles::open(dir.path()).unwrap().is_none());
    write(dir.path(), &[stored("a", DType::F32, &[3]), stored("b", DType::F32, &[3])], Bytes(12));
    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    assert_eq!(WeightFiles::open(dir.path()).unwrap().unwrap().entries().count(), 2);
    fs::copy(dir.path().join("model-00001-of-00002.safetensors"), dir.path().join("copy.safetensors")).unwrap();
    let message = WeightFiles::open(dir.path()).unwrap_err().to_string();
    assert!(message.starts_with("tensor `a` is in both "), "{message}");
}

#[test]
fn model_directory_opens_with_every_parameter() {
    for tied in [false, true] {
        let config = tiny(tied);
        let dir = model_with(&config, |_| ());
        let model = ModelDir::open(dir.path(), &[]).unwrap();
        let weights = model.require_weights().unwrap();
        assert_eq!(model.config, config);
        assert_eq!(weights.bytes(), Bytes(4 * config.parameters()));
        assert_eq!(weights.dtypes().into_iter().collect::<Vec<_>>(), [DType::F32]);
        let parameters: Vec<Parameter> = weights.parameters.iter().map(|(parameter, _)| parameter.clone()).collect();
        assert_eq!(parameters, config.hf_parameters());
        for (parameter, entry) in &weights.parameters {
            assert_eq!(Some(entry), weights.files.entry(&parameter.hf_name));
        }
    }
}

#[test]
fn alternative_names_of_transformers_are_accepted() {
    let untied = tiny(false);
    let without_prefix = model_with(&untied, |tensors| {
        for tensor in tensors {
            tensor.name = tensor.name.replace("model.", "");
        }
    });
    assert!(ModelDir::open(without_prefix.path(), &[]).is_ok());
    let with_frequencies = model_with(&untied, |tensors| {
        tensors.push(stored("model.layers.0.self_attn.rotary_emb.inv_freq", DType::F32, &[2]));
    });
    assert!(ModelDir::open(with_frequencies.path(), &[]).is_ok());
    let head_alone = model_with(&tiny(true), |tensors| tensors[0].name = "lm_head.weight".into());
    let weights = ModelDir::open(head_alone.path(), &[]).unwrap().weights.unwrap();
    assert_eq!((&*weights.parameters[0].0.hf_name, weights.parameters.len()), ("model.embed_tokens.weight", 20));
}

/// Writes a model with images whose text part is `config`, and whose tensors are renamed by `rename`.
fn whole_model(config: &ModelConfig, rename: impl Fn(&str) -> String) -> tempfile::TempDir {
    let dir = model_with(config, |tensors| {
        tensors.iter_mut().for_each(|tensor| tensor.name = rename(&tensor.name));
        tensors.push(stored("vision_tower.patch_embedding.weight", DType::F32, &[3, 2]));
        tensors.push(stored("multi_modal_projector.linear_1.weight", DType::I32, &[8, 3]));
    });
    let root = json!({"model_type": "llava", "text_config": config.to_json(None, DType::F32), "vision_config": {}});
    fs::write(dir.path().join("config.json"), root.to_string()).unwrap();
    dir
}

#[test]
fn text_part_opens_without_other_tensors() {
    let config = tiny(false);
    let older = |name: &str| format!("language_model.{name}");
    let newer = |name: &str| name.replace("model.", "model.language_model.");
    for rename in [&older as &dyn Fn(&str) -> String, &newer] {
        let dir = whole_model(&config, rename);
        let model = ModelDir::open(dir.path(), &[]).unwrap();
        assert_eq!(model.config, config);
        let weights = model.require_weights().unwrap();
        for (parameter, entry) in &weights.parameters {
            let mut found = vec![0; entry.bytes as usize];
            weights.files.read_at(entry, 0, &mut found).unwrap();
            assert_eq!(found, content(&rename(&parameter.hf_name), entry.bytes), "{}", parameter.hf_name);
        }
        let note = model.other_parts_note().unwrap();
        let expected = ": the text part of a llava model is a llama model; 2 tensors of other parts are left out";
        assert!(note.ends_with(expected), "{note}");
        assert_eq!(model.raw_config["model_type"], "llama");
    }
    let text_alone = model_with(&config, |_| ());
    assert_eq!(ModelDir::open(text_alone.path(), &[]).unwrap().other_parts_note(), None);
    let superfluous = whole_model(&config, |name| older(name).replace("layers.1.mlp.up_proj", "layers.2.mlp.up_proj"));
    assert_eq!(
        refusal(superfluous.path()),
        "DIR: the weights do not match config.json: missing `model.layers.1.mlp.up_proj.weight`; unexpected \
         `model.layers.2.mlp.up_proj.weight`"
    );
    let twice = whole_model(&config, |name| match name {
        "model.norm.weight" => "model.language_model.embed_tokens.weight".to_owned(),
        name => older(name),
    });
    assert!(refusal(twice.path()).starts_with("tensor `model.embed_tokens.weight` is in both "));
}

#[test]
fn generation_config_decides_end_tokens() {
    let config = tiny(false);
    let dir = model_with(&config, |_| ());
    let end_tokens = |dir: &Path| ModelDir::open(dir, &[]).unwrap().config.eos;
    assert_eq!(end_tokens(dir.path()), config.eos);
    let file = dir.path().join("generation_config.json");
    fs::write(&file, r#"{"eos_token_id": null}"#).unwrap();
    assert_eq!(end_tokens(dir.path()), [0; 0]);
    fs::write(&file, r#"{"temperature": 0.6, "eos_token_id": [4, 7]}"#).unwrap();
    assert_eq!(end_tokens(dir.path()), [4, 7]);
    let tensors: Vec<StoredTensor> =
        config.hf_parameters().iter().map(|p| stored(&p.hf_name, DType::F32, &p.shape)).collect();
    let new = dir.path().join("new");
    let trained = ModelConfig { eos: vec![5, 4, 7], ..config };
    write_model_dir::<FilesError>(
        &new,
        &trained,
        &trained.to_json(None, DType::F32),
        &tensors,
        MAX_SHARD_BYTES,
        SideFiles { from: Some(dir.path()), template: None },
        |writer| tensors.iter().try_for_each(|tensor| writer.write(&tensor.name, &vec![0; tensor.bytes() as usize])),
    )
    .unwrap();
    assert_eq!(end_tokens(&new), [5, 4, 7]);
    let written: Value = serde_json::from_slice(&fs::read(new.join("generation_config.json")).unwrap()).unwrap();
    assert_eq!(written, json!({ "temperature": 0.6, "eos_token_id": [5, 4, 7] }));
    fs::write(&file, r#"{"eos_token_id": "2"}"#).unwrap();
    assert!(refusal(dir.path()).starts_with("generation_config.json: `eos_token_id` is \"2\""));
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("nowhere", &file).unwrap();
    assert!(refusal(dir.path()).contains("generation_config.json: "), "a link to a missing file");
}

#[test]
fn mismatched_weights_are_named() {
    let untied = tiny(false);
    let without = model_with(&untied, |tensors| {
        tensors.retain(|t| !t.name.ends_with("layernorm.weight"));
        tensors.push(stored("model.layers.0.self_attn.q_proj.bias", DType::F32, &[8]));
    });
    assert_eq!(
        refusal(without.path()),
        "DIR: the weights do not match config.json: missing `model.layers.0.input_layernorm.weight`, \
         `model.layers.0.post_attention_layernorm.weight`, `model.layers.1.input_layernorm.weight` and 1 more; \
         unexpected `model.layers.0.self_attn.q_proj.bias`"
    );
    let wide = model_with(&untied, |tensors| tensors[0].shape[0] = 11);
    assert_eq!(
        refusal(wide.path()),
        "model.safetensors: tensor `model.embed_tokens.weight` has shape [11, 8], but config.json says [10, 8]"
    );
    let integers = model_with(&untied, |tensors| tensors[0].dtype = DType::I32);
    assert_eq!(
        refusal(integers.path()),
        "model.safetensors: tensor `model.embed_tokens.weight` is stored as I32, expected F32, BF16 or F16"
    );
}

/// transformers ties a stored head only if it equals the embedding.
#[test]
fn stored_head_of_tied_model_must_equal_embedding() {
    let tied = tiny(true);
    let dir = model_with(&tied, |tensors| tensors.push(stored("lm_head.weight", DType::F32, &[10, 8])));
    assert_eq!(
        refusal(dir.path()),
        "DIR: `tie_word_embeddings` is true, but `lm_head.weight` differs from the embedding"
    );
    let path = dir.path().join("model.safetensors");
    let files = WeightFiles::open(dir.path()).unwrap().unwrap();
    let [embedding, head] = ["model.embed_tokens.weight", "lm_head.weight"].map(|n| files.entry(n).unwrap().clone());
    let mut bytes = fs::read(&path).unwrap();
    bytes.copy_within(embedding.begin as usize..(embedding.begin + embedding.bytes) as usize, head.begin as usize);
    fs::write(&path, bytes).unwrap();
    assert!(ModelDir::open(dir.path(), &[]).is_ok());
}

#[test]
fn directory_with_only_configuration_has_no_weights() {
    let dir = model_with(&tiny(false), |_| ());
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let model = ModelDir::open(dir.path(), &[]).unwrap();
    assert!(model.weights.is_none() && model.tokenizer_path.is_none());
    fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    let failure = Failure::from(model.require_weights().unwrap_err());
    assert!(failure.message.ends_with("no *.safetensors file, only pytorch_model.bin"), "{failure}");
    assert!(failure.hints[0].contains("save_pretrained"), "{failure}");
    fs::write(dir.path().join("config.json"), "{\"model_type\": \"gpt2\"}").unwrap();
    let message = refusal(dir.path());
    assert!(message.starts_with("config.json: `model_type` is \"gpt2\", which is not supported"), "{message}");
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert_eq!(refusal(dir.path()), "config.json: no such file");
    let hints = || Failure::from(ModelDir::open(dir.path(), &[]).unwrap_err()).hints;
    assert_eq!(hints(), [""; 0]);
    // The folders of a run are easily mistaken for a model.
    fs::create_dir(dir.path().join("adapter")).unwrap();
    fs::write(dir.path().join("adapter/adapter_config.json"), "{}").unwrap();
    assert!(hints()[0].ends_with("/adapter") && hints()[0].starts_with("these are adapters: "), "{:?}", hints());
    fs::create_dir(dir.path().join("model")).unwrap();
    fs::write(dir.path().join("model/config.json"), "{}").unwrap();
    assert!(hints()[0].ends_with("/model"), "{:?}", hints());
    assert_eq!(refusal(&dir.path().join("absent")), "DIR: no such directory");
    assert!(refusal(&dir.path().join("absent.json")).ends_with("no such file"));
}

#[test]
fn written_model_keeps_side_files_and_extra_keys() {
    let config = tiny(false);
    let old = model_with(&config, |_| ());
    fs::write(old.path().join("tokenizer.json"), "{}").unwrap();
    fs::write(old.path().join("notes.txt"), "not ours").unwrap();
    let mut raw: Value = serde_json::from_slice(&fs::read(old.path().join("config.json")).unwrap()).unwrap();
    raw["pad_token_id"] = json!(5);
    let new = old.path().join("new");
    let tensors: Vec<StoredTensor> =
        config.hf_parameters().iter().map(|p| stored(&p.hf_name, DType::Bf16, &p.shape)).collect();
    let save = |fail: bool| {
        let config_json = config.to_json(Some(&raw), DType::Bf16);
        write_model_dir::<FilesError>(
            &new,
            &config,
            &config_json,
            &tensors,
            MAX_SHARD_BYTES,
            SideFiles { from: Some(old.path()), template: None },
            |writer| {
                for parameter in config.hf_parameters() {
                    let bytes = content(&parameter.hf_name, 2 * parameter.elements());
                    writer.write(&parameter.hf_name, &bytes)?;
                    if fail {
                        return Err(FilesError::io(&new, "write", std::io::ErrorKind::StorageFull.into()));
                    }
                }
                Ok(())
            },
        )
    };
    save(false).unwrap();
    let full = Failure::from(save(true).unwrap_err());
    assert!(full.hints[0].contains("the previous version is intact"), "{full}");
    let model = ModelDir::open(&new, &[]).unwrap();
    assert_eq!((model.config, &model.raw_config["pad_token_id"]), (config.clone(), &json!(5)));
    assert_eq!(model.raw_config["dtype"], "bfloat16");
    assert_eq!(model.tokenizer_path, Some(new.join("tokenizer.json")));
    assert!(!new.join("notes.txt").exists());
    assert_eq!(model.weights.unwrap().bytes(), Bytes(2 * config.parameters()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// A damaged file is refused, or all its tensors lie inside the file and can be read.
    #[test]
    fn damaged_file_never_panics(
        flips in prop::collection::vec((0usize..600, any::<u8>()), 1..6),
        cut in prop_oneof![4 => Just(usize::MAX), 1 => 0usize..600],
    ) {
        let dir = tempfile::tempdir().unwrap();
        let tensors = [stored("a", DType::F32, &[3]), stored("b", DType::Bf16, &[2, 2]), stored("c", DType::U8, &[9])];
        write(dir.path(), &tensors, MAX_SHARD_BYTES);
        let path = dir.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let length = bytes.len();
        for (at, byte) in flips {
            bytes[at % length] = byte;
        }
        bytes.truncate(cut);
        fs::write(&path, &bytes).unwrap();
        if let Ok(Some(files)) = WeightFiles::open(dir.path()) {
            for (_, entry) in files.entries() {
                prop_assert!(entry.begin + entry.bytes <= bytes.len() as u64);
                files.read_at(entry, 0, &mut vec![0; entry.bytes as usize]).unwrap();
            }
        }
    }
}

#[test]
fn floats_are_converted_to_the_nearest_value() {
    let values = [1.0f32, -0.1, 65504.0, 1e-7];
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    for (dtype, expected) in [
        (DType::F16, values.map(|value| half::f16::from_f32(value).to_bits())),
        (DType::Bf16, values.map(|value| half::bf16::from_f32(value).to_bits())),
    ] {
        let converted = convert_floats(DType::F32, dtype, &bytes).unwrap();
        assert_eq!(converted, expected.map(u16::to_le_bytes).concat());
        // A type with fewer bits has values of the wider one only.
        let back = convert_floats(dtype, DType::F32, &converted).unwrap();
        assert_eq!(convert_floats(DType::F32, dtype, &back).unwrap(), converted);
    }
    assert_eq!(convert_floats(DType::F32, DType::F16, &65520.0f32.to_le_bytes()), Err(65520.0));
    assert!(convert_floats(DType::Bf16, DType::F16, &half::bf16::from_f32(-1e9).to_le_bytes()).is_err());
    // NaN stays NaN, which the writer of the file refuses.
    let nan = convert_floats(DType::F32, DType::Bf16, &f32::NAN.to_le_bytes()).unwrap();
    assert!(has_non_finite(DType::Bf16, &nan));
}
