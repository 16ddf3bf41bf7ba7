//! Tests that mistakes of users are errors with a remedy and an exit code, and that nothing is overwritten.

use crate::setup::Run;

#[test]
fn mistakes_in_a_configuration_are_named() {
    let run = Run::new();
    run.fail(&["train", "absent.toml"], 1, &["absent.toml"]);
    run.fail(&["trian", "run.toml"], 1, &["trian"]);
    run.fail(
        &["train", "run.toml", "--set", "max_stps=3"],
        1,
        &["`max_stps` is not a setting", "`training.max_steps`"],
    );
    run.fail(&["train", "run.toml", "--set", "recipe=fp9"], 1, &["fp9"]);
    run.fail(&["train", "run.toml", "--set", "max_steps=many"], 1, &["run.toml", "max_steps"]);
    run.write("bad.toml", b"[model\npath = 3");
    run.fail(&["train", "bad.toml"], 1, &["bad.toml", "not valid TOML", "line 1"]);
    run.replace("run.toml", "max_length = 16", "max_lenght = 16");
    run.fail(&["train", "run.toml"], 1, &["`data.max_lenght` is not a setting; did you mean `data.max_length`?"]);
    assert!(!run.path("run").exists(), "nothing was started");
}

#[test]
fn mistakes_in_a_model_folder_are_named() {
    let run = Run::new();
    run.fail(&["train", "run.toml", "--set", "model.path=absent"], 1, &["absent"]);
    for (from, to, words) in [
        ("LlamaForCausalLM", "BloomForCausalLM", "`BloomForCausalLM` is not one of"),
        ("\"hidden_size\": 32", "\"hidden_size\": \"big\"", "`hidden_size` has the value \"big\""),
        ("\"hidden_size\": 32, ", "", "the key `hidden_size` is missing"),
        ("\"num_attention_heads\": 2", "\"num_attention_heads\": 3", "`hidden_size` 32 does not divide into 3 heads"),
        ("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 0", "`num_hidden_layers` is 0"),
        ("\"vocab_size\": 100", "\"vocab_size\": 50", "`vocab_size` is 50"),
        ("\"rms_norm_eps\": 1e-5", "\"rope_scaling\": {\"rope_type\": \"spiral\"}", "`spiral` is not implemented"),
        ("{\"arch", "{\"arch\": tru, \"arch", "not valid JSON"),
    ] {
        let run = Run::new();
        run.replace("model/config.json", from, to);
        run.fail(&["train", "run.toml"], 1, &[words]);
    }
    run.fail(&["train", "run.toml", "--set", "init=pretrained", "--set", "output_dir=b"], 1, &["model", "safetensors"]);
    run.write("model/tokenizer.json", b"{\"broken\": ");
    run.fail(&["train", "run.toml", "--set", "output_dir=c"], 1, &["tokenizer.json"]);
}

#[test]
fn folders_that_are_almost_a_model_are_explained() {
    let run = Run::new();
    let eval =
        |model: &str, words: &str| run.fail(&["eval", model, "--data", "text.txt", "--device", "cpu"], 1, &[words]);
    run.write("weights/model.safetensors", b"");
    eval("weights/model.safetensors", "this is a file, and a model is a folder: name its folder");
    run.write("a.gguf", b"GGUF");
    eval("a.gguf", "this is a file, and a model is a folder: `ottava convert` makes a folder of it");
    run.write("models--a--b/snapshots/0123abc/config.json", b"{}");
    eval("models--a--b", "name models--a--b/snapshots/0123abc");
    std::fs::rename(run.path("model/tokenizer.json"), run.path("model/vocab.json")).unwrap();
    eval("model", "vocab.json alone is not read");
    run.fail(&["train", "run.toml"], 1, &["vocab.json alone is not read"]);
    assert!(!run.path("run").exists(), "a run that did not start leaves no folder");
}

#[test]
fn a_tied_head_with_other_weights_is_an_error() {
    let run = Run::new();
    let checkpoint = run.checkpoint();
    let folder = checkpoint.to_str().unwrap();
    std::fs::remove_file(run.path(&format!("{folder}/manifest.json"))).unwrap();
    let config = format!("{folder}/config.json");
    run.replace(&config, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    let eval = ["eval", folder, "--data", "text.txt", "--device", "cpu", "--max-length", "8"];
    let words = "config.json ties the head to `model.embed_tokens.weight` (`tie_word_embeddings`), and the folder holds another";
    run.fail(&eval, 1, &[words, "set `tie_word_embeddings` to false to use both, as transformers does"]);
    // A copy of the embedding is accepted, because older writers stored one.
    let weights = format!("{folder}/model.safetensors");
    let bytes = std::fs::read(run.path(&weights)).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let range = |name: &str| {
        let offsets = &header[name]["data_offsets"];
        let at = |i: usize| 8 + length + offsets[i].as_u64().unwrap() as usize;
        at(0)..at(1)
    };
    let mut same = bytes.clone();
    same.copy_within(range("model.embed_tokens.weight"), range("lm_head.weight").start);
    run.write(&weights, &same);
    run.succeed(&eval);
}

/// Users edit how a model is used, and neither its weights nor its tokens.
#[test]
fn edited_texts_of_a_checkpoint_are_used_with_a_warning() {
    let run = Run::new();
    let checkpoint = run.checkpoint();
    let name = |file: &str| checkpoint.join(file).to_str().unwrap().to_string();
    let eval = ["eval", checkpoint.to_str().unwrap(), "--data", "text.txt", "--device", "cpu", "--max-length", "8"];
    let edited = name("generation_config.json");
    let mut text = std::fs::read(run.path(&edited)).unwrap();
    text.extend(b"\n\n");
    run.write(&edited, &text);
    let output = run.command(&eval).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.contains("generation_config.json was changed"), "{errors}");
    std::fs::remove_file(run.path(&edited)).unwrap();
    run.fail(&eval, 7, &["generation_config.json"]);
    run.write(&edited, &text);
    let config = name("config.json");
    let mut text = std::fs::read(run.path(&config)).unwrap();
    text.push(b'\n');
    run.write(&config, &text);
    run.fail(&eval, 7, &["config.json", "the manifest says"]);
}

#[test]
fn damaged_weights_are_named() {
    let run = Run::new();
    let checkpoint = run.checkpoint();
    let weights = checkpoint.join("model.safetensors");
    let weights = weights.to_str().unwrap();
    let eval = ["eval", checkpoint.to_str().unwrap(), "--data", "text.txt", "--device", "cpu", "--max-length", "8"];
    let whole = std::fs::read(run.path(weights)).unwrap();
    run.write(weights, &whole[..whole.len() - 3]);
    run.fail(&eval, 7, &["model.safetensors", "the manifest says"]);
    // Without the manifest, this is an ordinary model folder, whose files are checked without it.
    std::fs::remove_file(run.path(checkpoint.join("manifest.json").to_str().unwrap())).unwrap();
    run.write(weights, &whole[..whole.len() - 3]);
    run.fail(&eval, 1, &["model.safetensors"]);
    let text = String::from_utf8_lossy(&whole[8..2000]).into_owned();
    assert!(text.contains("BF16"));
    let unknown: Vec<u8> = replace(&whole, b"\"dtype\":\"BF16\"", b"\"dtype\":\"XF16\"");
    run.write(weights, &unknown);
    run.fail(&eval, 1, &["model.safetensors"]);
    run.write(weights, &whole);
    let config = checkpoint.join("config.json");
    run.replace(config.to_str().unwrap(), "\"intermediate_size\": 48", "\"intermediate_size\": 64");
    run.fail(&eval, 1, &["gate_proj", "[48, 32]", "[64, 32]"]);
    run.replace(config.to_str().unwrap(), "\"intermediate_size\": 64", "\"intermediate_size\": 48");
    run.replace(config.to_str().unwrap(), "\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2");
    run.fail(&eval, 1, &["model.layers.1."]);
    std::fs::remove_file(run.path(weights)).unwrap();
    run.fail(&eval, 1, &["safetensors"]);
}

fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|w| w == from).expect("the text is there");
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}

#[test]
fn mistakes_in_data_are_named_by_line() {
    let run = Run::new();
    run.fail(&["train", "run.toml", "--set", "train_files=[\"absent.txt\"]"], 2, &["absent.txt"]);
    run.write("empty.txt", b"\n\n");
    run.fail(&["train", "run.toml", "--set", "train_files=[\"empty.txt\"]"], 2, &["empty.txt"]);
    run.write("broken.txt", b"fine\nnot \xff fine\n");
    run.fail(&["train", "run.toml", "--set", "train_files=[\"broken.txt\"]"], 2, &["broken.txt:2", "UTF-8"]);
    run.write("broken.jsonl", b"{\"text\": \"a\"}\n{\"txt\": \"b\"}\n");
    run.fail(&["train", "run.toml", "--set", "train_files=[\"broken.jsonl\"]"], 2, &["broken.jsonl:2", "text"]);
    assert!(!run.path("run/metrics.jsonl").exists());
}

#[test]
fn an_existing_run_is_not_overwritten() {
    let run = Run::new();
    run.checkpoint();
    let before = std::fs::read(run.path("run/metrics.jsonl")).unwrap();
    run.fail(&["train", "run.toml"], 1, &["already holds a run", "--resume"]);
    assert_eq!(std::fs::read(run.path("run/metrics.jsonl")).unwrap(), before);
    run.fail(&["train", "run.toml", "--resume", "--set", "recipe=fp32"], 1, &["`bf16`", "`fp32`"]);
    let text = std::fs::read(run.path("text.txt")).unwrap();
    run.write("text.txt", b"another text\nthan before\nit was\nlonger\n");
    run.fail(&["train", "run.toml", "--resume"], 2, &["have changed since"]);
    run.write("text.txt", &text);
    run.write("run/checkpoints/checkpoint-2/model.safetensors", b"damaged");
    run.fail(&["train", "run.toml", "--resume"], 7, &["checkpoint"]);
}

#[test]
fn a_missing_gpu_is_an_error() {
    if ottava_tensor::testing::gpu().is_some() {
        return;
    }
    let run = Run::new();
    run.fail(&["train", "run.toml", "--device", "cuda"], 8, &["CUDA driver"]);
    run.fail(&["generate", "model", "--prompt", "x", "--device", "cuda"], 8, &["CUDA driver"]);
}

#[test]
fn what_users_bring_instead_of_a_run_or_a_model_is_explained() {
    let run = Run::new();
    run.fail(&["plan", "nosuch.toml"], 1, &["nosuch.toml: there is no such file; relative paths start at the folder"]);
    run.write("configs/moved.toml", b"");
    run.fail(&["plan", "moved.toml"], 1, &["did you mean configs/moved.toml?"]);
    run.fail(&["train", "model"], 1, &["this is a folder, and a run is a TOML file: `ottava init model DATA.jsonl`"]);
    run.fail(&["train", "a.gguf"], 1, &["`ottava convert a.gguf FOLDER`"]);
    run.fail(&["plan", "axolotl.yml"], 1, &["`ottava import axolotl.yml`"]);
    let hub = ["train", "run.toml", "--set", "model.path=Qwen/Qwen2.5-0.5B"];
    run.fail(&hub, 1, &["HF_HUB_OFFLINE is set", "Run `ottava download Qwen/Qwen2.5-0.5B` where there is a network"]);
    let pretrained = ["train", "run.toml", "--set", "init=pretrained"];
    run.write("model/model-00001-of-00002.safetensors", b"x");
    run.fail(
        &pretrained,
        1,
        &["holds model-00001-of-00002.safetensors", "model.safetensors.index.json", "download it too"],
    );
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
    run.write("model/model.safetensors", pointer);
    run.fail(&pretrained, 1, &["model.safetensors", "pointer of Git LFS", "git lfs pull"]);
    run.write("text.txt", pointer);
    run.fail(&["train", "run.toml"], 2, &["text.txt", "pointer of Git LFS"]);
}

#[test]
fn flags_of_other_trainers_are_answered_with_our_setting() {
    let run = Run::new();
    run.fail(&["train", "run.toml", "--bf16"], 1, &["`--bf16`: write `--set precision.recipe=bf16`"]);
    let lr = "`--learning_rate`: write `--set optimizer.learning_rate=0.01`";
    run.fail(&["train", "run.toml", "--learning_rate", "0.01"], 1, &[lr]);
    run.fail(&["train", "run.toml", "--learning_rate=0.01"], 1, &[lr]);
    run.fail(&["plan", "run.toml", "--zero-stage", "2"], 1, &["`--set parallel.zero=2`"]);
    run.fail(&["train", "run.toml", "--storage", "O9"], 1, &["O9"]);
    // The flag of version 0.1 with its old value, and the current flag.
    run.succeed(&["plan", "run.toml", "--set", "level=O1"]);
    run.succeed(&["train", "run.toml", "--recipe", "fp8-current", "--level", "O1"]);
    let resolved = std::fs::read_to_string(run.path("run/config.toml")).unwrap();
    assert!(resolved.contains("recipe = \"fp8-current\"") && resolved.contains("storage = \"msamp-o1\""), "{resolved}");
}

#[test]
fn words_of_other_programs_are_answered_with_our_command() {
    let run = Run::new();
    run.fail(&["finetune", "run.toml"], 1, &["`finetune` is `ottava train RUN.toml`"]);
    run.fail(&["train", "--config", "run.toml"], 1, &["write `ottava train RUN.toml`"]);
    run.fail(&["train", "run.toml", "--set", "learning_rate", "1e-4"], 1, &["write `--set learning_rate=1e-4`"]);
    run.fail(&["train", "--resume", "run.toml"], 1, &["write `ottava train run.toml --resume`"]);
    run.fail(&["convert", "model", "new"], 1, &["this is a model folder already", "--format bf16"]);
    run.fail(&["train", "run.toml", "--set", "report_to=mlflow"], 1, &["MLFLOW_TRACKING_URI is not set"]);
    run.fail(&["train", "run.toml", "--set", "report_to=all"], 1, &["list the trackers"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    run.fail(&["monitor", "model", "--port", &port], 1, &["choose another port with --port"]);
    run.succeed(&["train", "run.toml"]);
    let again = run.ottava(&["train", "run.toml", "--resume"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("has made all of its steps before"), "{again:?}");
    std::fs::rename(run.path("model/tokenizer.json"), run.path("model/tokenizer.model")).unwrap();
    run.fail(&["generate", "model", "--prompt", "x"], 1, &["model/tokenizer.json", "save_pretrained"]);
    std::fs::remove_file(run.path("model/tokenizer.model")).unwrap();
    run.fail(&["generate", "model", "--prompt", "x"], 1, &["name another one in `model.tokenizer`"]);
}

#[test]
fn a_starter_run_and_an_imported_one_train() {
    let run = Run::new();
    let said = run.succeed(&["init", "model", "text.txt", "--output", "first.toml"]);
    assert!(said.contains("`ottava train first.toml`"), "{said}");
    let steps = ["--device", "cpu", "--set", "max_steps=1", "--set", "max_length=8", "--set", "text_documents=line"];
    run.succeed(&[&["train", "first.toml"], &steps[..]].concat());
    run.fail(&["init", "model", "text.txt", "--output", "first.toml"], 1, &["not overwritten"]);
    run.fail(&["init", "model", "absent.jsonl", "--output", "absent.toml"], 2, &["absent.jsonl"]);
    // The weights of the first run, and a learning rate for adapters.
    let trained = ["init", "run/model", "text.txt", "--output", "lora.toml", "--recipe", "fp8-row", "--lora"];
    run.fail(&[&["init", "model"], &trained[2..]].concat(), 1, &["adapters need the weights of a model"]);
    run.replace("first.toml", "output_dir = \"runs/model\"", "output_dir = \"run\"");
    run.succeed(&[&["train", "first.toml"], &steps[..]].concat());
    run.succeed(&trained);
    let text = std::fs::read_to_string(run.path("lora.toml")).unwrap();
    for line in ["recipe = \"fp8-row\"", "[lora]\nr = 16", "learning_rate = 2e-4"] {
        assert!(text.contains(line), "no {line} in {text}");
    }
    // A model without a tokenizer or a chat template is told at once.
    run.write(
        "chats.jsonl",
        br#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
    );
    let told = run.ottava(&["init", "model", "chats.jsonl", "--output", "chats.toml"]);
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.contains("there is no chat template") && told.contains("`tokenizer.chat_template`"), "{told}");
    std::fs::rename(run.path("model/tokenizer.json"), run.path("tokenizer.json")).unwrap();
    let told = run.ottava(&["init", "model", "text.txt", "--output", "none.toml"]);
    let told = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.contains("there is no tokenizer.json") && told.contains("`model.tokenizer`"), "{told}");
    std::fs::rename(run.path("tokenizer.json"), run.path("model/tokenizer.json")).unwrap();
    let axolotl = "base_model: model\nreinit_weights: true\ndatasets:\n  - path: text.txt\n    type: completion\nval_set_size: 2\n\
                   sequence_len: 8\nmicro_batch_size: 2\nmax_steps: 1\nlearning_rate: 1e-3\nnum_nodes: 3\n";
    run.write("axolotl.yml", axolotl.as_bytes());
    let output = run.ottava(&["import", "axolotl.yml", "--output", "imported.toml"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains("not translated: axolotl.yml:11: `num_nodes`"), "{said}");
    run.succeed(&["train", "imported.toml", "--device", "cpu", "--set", "text_documents=line"]);
}

#[test]
fn arguments_that_are_no_text_are_errors_without_a_panic() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let no_text = OsStr::from_bytes(b"\xff");
    for args in [&[no_text][..], &["train".as_ref(), "--unknown".as_ref(), no_text], &["plan".as_ref(), no_text]] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_ottava")).args(args).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 2)) && error.contains("error: "), "{args:?}: {error}");
    }
}
