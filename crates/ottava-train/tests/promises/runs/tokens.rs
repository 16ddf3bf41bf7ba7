//! Runs with more tokens than the model's folder, and with a built-in chat template.

use crate::peft::lora::{adapter_run, base, folder_losses};
use crate::runs::resume::{config, metrics, train, write_inputs};
use ottava_checkpoint::{AdapterFolder, FolderWeights, Texts, merge};
use ottava_data::{ChatTemplate, Clock, Tokenizer};
use ottava_models::{ConfigFile, DecoderConfig, decoder_config};
use ottava_recipe::RecipeName;
use ottava_recipe::param::{FolderTensor, Init, WeightSource};
use ottava_settings::{LoraConfig, Pairs, RunConfig, TokenizerConfig, WeightInit};
use ottava_tensor::Device;
use ottava_tensor::testing::values;
use ottava_train::trainer::Start;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The rows of embedding and head of the base, and of a run with four new tokens after its 97, padded.
const ROWS: [usize; 2] = [100, 104];

fn with_tokens(mut run: RunConfig) -> RunConfig {
    run.tokenizer = TokenizerConfig {
        added_tokens: vec!["<x>".into(), "<y>".into()],
        added_special_tokens: ["<|im_start|>", "<|im_end|>"].map(String::from).to_vec(),
        pad_vocab_to_multiple_of: 8,
        ..TokenizerConfig::default()
    };
    run.resolved(&mut |_| Ok(())).unwrap()
}

fn last(run: &RunConfig) -> PathBuf {
    run.output_dir.join("checkpoints/checkpoint-6")
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Returns the folder of a base model, and a run that trains all its weights.
fn base_and_run(inputs: &Path, name: &str) -> (PathBuf, RunConfig) {
    write_inputs(inputs);
    let base = base(inputs);
    let mut run = config(inputs, &inputs.join(name), RecipeName::Fp32);
    (run.model.path, run.model.init) = (base.clone(), WeightInit::Pretrained);
    (base, run)
}

#[test]
fn new_rows_are_the_mean_of_the_rows_of_the_folder() {
    let inputs = tempfile::tempdir().unwrap();
    let (base, run) = base_and_run(inputs.path(), "run");
    let sizes = with_tokens(run).decoder_config().unwrap();
    let [own, rows] = ROWS;
    assert_eq!(sizes.vocabulary, rows);
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let tensor = |rows: usize| FolderTensor::new(name.into(), vec![rows, 32]);
        let read = |weights: &mut FolderWeights, rows: usize, elements: std::ops::Range<usize>| {
            values(&weights.read(&tensor(rows), elements, Init::Zeros).unwrap())
        };
        let known = read(&mut FolderWeights::open(&base).unwrap(), own, 0..own * 32);
        let mut weights = FolderWeights::open_for(&base, &sizes).unwrap();
        let all = read(&mut weights, rows, 0..rows * 32);
        assert_eq!(all[..own * 32], known, "{name}");
        for (at, value) in all[own * 32..].iter().enumerate() {
            let mean = known.iter().skip(at % 32).step_by(32).sum::<f64>() / own as f64;
            assert!((value - mean).abs() < 1e-7, "{name}: {value}, and the mean is {mean}");
        }
        // Ranks read any range.
        for range in [0..5, own * 32 - 7..own * 32 + 9, own * 32..own * 32 + 40, rows * 32 - 3..rows * 32] {
            assert_eq!(read(&mut weights, rows, range.clone()), all[range], "{name}");
        }
    }
}

#[test]
fn runs_with_new_tokens_resume_exactly_and_their_folders_have_the_tokens() {
    let inputs = tempfile::tempdir().unwrap();
    let (_, run) = base_and_run(inputs.path(), "straight");
    let straight = with_tokens(run.clone());
    let split = with_tokens(RunConfig { output_dir: inputs.path().join("split"), ..run });
    train(&straight, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    train(&split, &Device::Cpu, &Start::New, 3).unwrap_err();
    train(&split, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
    assert_eq!(metrics(&straight.output_dir), metrics(&split.output_dir));
    let bytes = |run: &RunConfig| std::fs::read(last(run).join("model.safetensors")).unwrap();
    assert!(bytes(&straight) == bytes(&split), "the weights differ");
    let folder = last(&straight);
    assert_eq!(json(&folder.join("config.json"))["vocab_size"], ROWS[1]);
    let tokenizer = Tokenizer::load(&folder).unwrap();
    let ids = ["<x>", "<y>", "<|im_start|>", "<|im_end|>"].map(|token| tokenizer.token_id(token));
    assert_eq!(ids, [97, 98, 99, 100].map(Some));
    assert!(folder_losses(&folder, None, RecipeName::Fp32).is_finite());
    // A run with the checkpoint as its model needs no `[tokenizer]`.
    let mut further = config(inputs.path(), &inputs.path().join("further"), RecipeName::Fp32);
    (further.model.path, further.model.init) = (folder.clone(), WeightInit::Pretrained);
    train(&further, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let loss = |run: &RunConfig, at: usize| metrics(&run.output_dir)[at]["eval_loss"].as_f64().unwrap();
    assert_eq!(loss(&further, 0), loss(&straight, metrics(&straight.output_dir).len() - 1));
}

#[test]
fn adapters_with_new_tokens_train_embedding_and_head() {
    let inputs = tempfile::tempdir().unwrap();
    let (base, _) = base_and_run(inputs.path(), "unused");
    // Texts of the base end at two tokens.
    std::fs::remove_file(base.join("manifest.json")).unwrap();
    std::fs::write(base.join("generation_config.json"), r#"{"eos_token_id": [0, 5]}"#).unwrap();
    let plain = adapter_run(inputs.path(), &base, &inputs.path().join("plain"), RecipeName::Fp32);
    // The folder has a row for this token, which is untrained.
    let mut within = plain.clone();
    within.tokenizer.added_tokens = vec!["<x>".into()];
    let error = within.resolved(&mut |_| Ok(())).unwrap().decoder_config().unwrap_err().to_string();
    assert!(error.contains("adds 1 tokens such as \"<x>\""), "{error}");
    let error = with_tokens(plain).decoder_config().unwrap_err().to_string();
    assert!(
        error.contains("adds 4 tokens such as \"<x>\"")
            && error.contains("`lora.modules_to_save = [\"embed_tokens\", \"lm_head\"]`"),
        "{error}"
    );
    let run = |name: &str| {
        let mut run = adapter_run(inputs.path(), &base, &inputs.path().join(name), RecipeName::Fp32);
        run.lora.modules_to_save = ["embed_tokens", "lm_head"].map(String::from).to_vec();
        with_tokens(run)
    };
    let (straight, split) = (run("straight"), run("split"));
    train(&straight, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    train(&split, &Device::Cpu, &Start::New, 3).unwrap_err();
    train(&split, &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
    assert_eq!(metrics(&straight.output_dir), metrics(&split.output_dir));
    let (folder, merged) = (last(&straight), inputs.path().join("merged"));
    let adapter = AdapterFolder::open(&folder).unwrap();
    let DecoderConfig { vocabulary, .. } = adapter.on(decoder_config(&ConfigFile::read(&base).unwrap()).unwrap());
    assert_eq!((vocabulary, Tokenizer::load(&folder).unwrap().vocab_size()), (ROWS[1], 101));
    merge(&base, &adapter, None, &merged).unwrap();
    assert_eq!(json(&merged.join("config.json"))["vocab_size"], ROWS[1]);
    assert_eq!(Tokenizer::load(&merged).unwrap().vocab_size(), 101);
    let [with, sum] = [(&base, Some(&*folder)), (&merged, None)]
        .map(|(model, adapter)| folder_losses(model, adapter, RecipeName::Fp32));
    // The merged weights differ by the roundings of sums.
    assert!((with / sum - 1.0).abs() < 1e-6, "base and adapter lose {with}, the merged model {sum}");
    expect_ends(&base, &folder, &inputs.path().join("peft"));
    expect_further_run(&straight, run);
}

/// Texts end at the tokens of the base and of the adapter, also with an adapter of PEFT, which names one token.
fn expect_ends(base: &Path, folder: &Path, peft: &Path) {
    assert_eq!(Tokenizer::load(folder).unwrap().eos_ids(), [0, 5]);
    std::fs::create_dir(peft).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(folder.join(name), peft.join(name)).unwrap();
    }
    let mut config = json(&peft.join("tokenizer_config.json"));
    config["eos_token"] = "<y>".into();
    std::fs::write(peft.join("tokenizer_config.json"), config.to_string()).unwrap();
    let sorted = |ids: &[u32]| ids.iter().copied().collect::<std::collections::BTreeSet<_>>();
    let texts = Texts::of(base, Some(peft), ROWS[1]).unwrap();
    assert_eq!(sorted(texts.tokenizer.eos_ids()), sorted(&[0, 5, 98]));
    // Its folder has no chat template.
    assert_eq!(texts.template, base);
    // The tokens do not fit a model of fewer rows.
    assert_eq!(Texts::of(base, Some(peft), ROWS[0]).unwrap().tokenizer.eos_ids(), [0, 5]);
    std::fs::write(base.join("chat_template.jinja"), "of the base").unwrap();
    std::fs::write(base.join("processor_config.json"), "{}").unwrap();
    let merged = peft.with_extension("merged");
    merge(base, &AdapterFolder::open(peft).unwrap(), None, &merged).unwrap();
    assert_eq!(sorted(Tokenizer::load(&merged).unwrap().eos_ids()), sorted(&[0, 5, 98]));
    for name in ["config.json", "generation_config.json"] {
        let ids: Vec<u32> = serde_json::from_value(json(&merged.join(name))["eos_token_id"].clone()).unwrap();
        assert_eq!(sorted(&ids), sorted(&[0, 5, 98]), "{name}");
    }
    assert_eq!(std::fs::read_to_string(merged.join("chat_template.jinja")).unwrap(), "of the base");
    assert!(merged.join("processor_config.json").is_file());
}

/// A run that starts from the adapter of the run `before` has the tokens of this adapter, and the same evaluation.
fn expect_further_run(before: &RunConfig, run: impl Fn(&str) -> RunConfig) {
    let start = |lora: LoraConfig| {
        let further = RunConfig { lora, tokenizer: TokenizerConfig::default(), ..run("further") };
        further.resolved(&mut |_| Ok(()))
    };
    let lora = LoraConfig { init_from: last(before), ..LoraConfig::default() };
    let head = vec!["lm_head".to_string()];
    let error = start(LoraConfig { modules_to_save: head, ..lora.clone() }).unwrap_err().to_string();
    assert!(error.contains("`lora.modules_to_save` is [\"lm_head\"], and the adapter "), "{error}");
    let further = start(lora).unwrap();
    assert_eq!(further.tokenizer_path(), last(before));
    assert_eq!(further.decoder_config().unwrap().vocabulary, ROWS[1]);
    train(&further, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let loss = |run: &RunConfig, at: usize| metrics(&run.output_dir)[at]["eval_loss"].as_f64().unwrap();
    assert_eq!(loss(&further, 0), loss(before, metrics(&before.output_dir).len() - 1));
}

#[test]
fn a_base_model_learns_chats_by_a_built_in_template() {
    let inputs = tempfile::tempdir().unwrap();
    let (_, mut run) = base_and_run(inputs.path(), "run");
    let chat = r#"{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}"#;
    std::fs::write(inputs.path().join("chats.jsonl"), [chat; 40].join("\n")).unwrap();
    run.data.train_files = vec![inputs.path().join("chats.jsonl")];
    run.data.max_length = 32;
    run.tokenizer.chat_template = "chatml".into();
    let error = run.clone().resolved(&mut |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("`added_special_tokens = [\"<|im_start|>\", \"<|im_end|>\"]`"), "{error}");
    run.tokenizer.added_special_tokens = ["<|im_start|>", "<|im_end|>"].map(String::from).to_vec();
    run.tokenizer.special_tokens = Pairs(vec![("pad_token".into(), "<|endoftext|>".into())]);
    let mut run = run.resolved(&mut |_| Ok(())).unwrap();
    run.resolve_data().unwrap();
    train(&run, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let folder = last(&run);
    assert!(ChatTemplate::load(&folder, None, Clock::Fixed).unwrap().unwrap().source().contains("<|im_start|>"));
    let (generation, config) = (json(&folder.join("generation_config.json")), json(&folder.join("config.json")));
    // Texts of the base end with id 0.
    assert_eq!(
        (&generation["eos_token_id"], &generation["pad_token_id"]),
        (&serde_json::json!([0, 98]), &Value::from(0))
    );
    assert_eq!((&config["eos_token_id"], &config["vocab_size"]), (&Value::from(98), &Value::from(ROWS[0])));
    assert_eq!(Tokenizer::load(&folder).unwrap().eos_ids(), [0, 98]);
    let loss = |at: usize| metrics(&run.output_dir)[at]["eval_loss"].as_f64().unwrap();
    assert!(loss(metrics(&run.output_dir).len() - 1) < loss(0), "the chats are learned");
}
