//! Tests ranks that divide the tensors of each layer or the tokens of each sequence, as processes on the CPU.

use crate::ranks::{expect_ends_of_all_ranks, losses, train};
use crate::setup::{Run, steps};
use std::fs;

/// The settings of all runs: products in FP8, a number of tokens that four ranks can divide, and samples at the end.
pub const COMMON: [&str; 5] = [
    "recipe=fp8-delayed",
    "lr_scheduler.type=constant",
    "async_save=false",
    "data.max_length=64",
    "generation.prompts=[\"line 4\"]",
];

/// Creates a model whose heads, columns and vocabulary four ranks can divide.
pub fn inputs() -> Run {
    let run = Run::new();
    for (from, to) in [
        ("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2"),
        (
            "\"num_attention_heads\": 2, \"num_key_value_heads\": 1",
            "\"num_attention_heads\": 4, \"num_key_value_heads\": 4",
        ),
    ] {
        run.replace("model/config.json", from, to);
    }
    run
}

/// Returns the arguments of `ottava train` with these settings.
pub fn args(settings: &[&str], more: &[&str]) -> Vec<String> {
    let settings = COMMON.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    let all = train(&settings.chain(more.iter().copied()).collect::<Vec<_>>());
    all.into_iter().map(String::from).collect()
}

/// Trains with these settings.
pub fn go(run: &Run, settings: &[&str], more: &[&str]) -> String {
    let args = args(settings, more);
    run.succeed(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Compares losses. Ranks add in another order, so some values are cast to a neighbouring code.
pub fn expect_near(run: &Run, alone: &Run, what: &str) {
    let (got, expected) = (losses(run), losses(alone));
    assert_eq!(got.len(), expected.len(), "{what}");
    for (step, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert!((got / expected - 1.0).abs() < 2e-3, "{what}, step {}: {got} and {expected}", step + 1);
    }
}

#[test]
fn ranks_of_every_mesh_train_as_one_process_does() {
    let alone = inputs();
    let samples = go(&alone, &["max_steps=3"], &[]);
    for (ranks, settings) in [
        ("2", &["parallel.tensor=2"][..]),
        ("4", &["parallel.tensor=4", "recompute=full", "async_save=true"]),
        ("4", &["parallel.tensor=2", "parallel.zero=1", "parallel.check_replicas=1"]),
        ("4", &["parallel.tensor=2", "parallel.pipeline=2", "pipeline_schedule=zero-bubble"]),
        ("8", &["parallel.tensor=2", "parallel.pipeline=2", "parallel.zero=1"]),
        ("2", &["parallel.context=2", "parallel.check_replicas=1"]),
        ("4", &["parallel.context=4", "recompute=attention", "parallel.zero=3"]),
        ("4", &["parallel.context=2", "parallel.tensor=2"]),
        ("4", &["parallel.context=2", "parallel.pipeline=2"]),
    ] {
        let run = inputs();
        let said = go(&run, &[&["max_steps=3"], settings].concat(), &["--ranks", ranks]);
        expect_near(&run, &alone, &format!("{settings:?}"));
        assert_eq!(said.lines().count(), samples.lines().count(), "{settings:?}: samples of the whole model");
        assert_eq!(run.ottava(&["eval", "run/checkpoints/checkpoint-3", "--data", "text.txt"]).status.code(), Some(0));
    }
}

#[test]
fn a_run_resumes_with_other_tensor_ranks() {
    let unbroken = inputs();
    go(&unbroken, &["max_steps=8"], &[]);
    let run = inputs();
    for (steps, ranks, settings) in [
        ("max_steps=2", "2", &["parallel.tensor=2"][..]),
        ("max_steps=4", "4", &["parallel.tensor=4"]),
        ("max_steps=5", "1", &[]),
        ("max_steps=6", "4", &["parallel.tensor=2", "parallel.pipeline=2"]),
        ("max_steps=7", "4", &["parallel.context=2", "parallel.zero=1"]),
        ("max_steps=8", "4", &["parallel.tensor=2", "parallel.zero=3"]),
    ] {
        let resume = if steps == "max_steps=2" { &[][..] } else { &["--resume"] };
        go(&run, &[&[steps], settings].concat(), &[&["--ranks", ranks], resume].concat());
    }
    assert_eq!(steps(&run.path("run/metrics.jsonl")), (0..=8).collect::<Vec<_>>());
    expect_near(&run, &unbroken, "six meshes");
}

#[test]
fn adapters_train_on_tensor_ranks() {
    let base = inputs();
    go(&base, &["max_steps=1"], &[]);
    let adapted = ["model.path=run/checkpoints/checkpoint-1", "model.init=pretrained", "lora.r=2", "max_steps=2"];
    let train = |folder: &str, more: &[&str], ranks: &[&str]| {
        go(&base, &[&adapted[..], &[&format!("output_dir={folder}")], more].concat(), ranks);
        fs::metadata(base.path(&format!("{folder}/checkpoints/checkpoint-2/adapter_model.safetensors"))).unwrap().len()
    };
    assert_eq!(train("alone", &[], &[]), train("divided", &["parallel.tensor=2"], &["--ranks", "2"]));
}

/// Returns the output of a command from one process, and from `ranks` ranks that divide a model.
pub fn alone_and_divided(run: &Run, ranks: &str, args: &[&str]) -> [String; 2] {
    [&[][..], &["--ranks", ranks]].map(|more| run.succeed(&[args, more].concat()))
}

/// Expects that `ranks` ranks that divide `model` have the same loss as one process.
pub fn expect_losses_of_one_process(run: &Run, model: &str, ranks: &str) {
    for (recipe, most) in [("fp32", 1e-6), ("fp8-row", 1e-3)] {
        let eval = ["eval", model, "--data", "text.txt", "--recipe", recipe, "--json"];
        let [alone, divided] = alone_and_divided(run, ranks, &eval).map(|report| {
            let report: serde_json::Value = serde_json::from_str(&report).unwrap();
            report["loss"].as_f64().unwrap()
        });
        assert!((divided / alone - 1.0).abs() < most, "{recipe}, {ranks} ranks: {divided}, {alone} alone");
    }
}

/// Tests that ranks that divide a model have the same loss and generate the same texts as one process, also if ranks share key and value heads.
#[test]
fn ranks_divide_a_model_for_inference() {
    for (kv_heads, ranks) in [("4", "2"), ("1", "4")] {
        let run = inputs();
        run.replace("model/config.json", "\"num_key_value_heads\": 4", &format!("\"num_key_value_heads\": {kv_heads}"));
        go(&run, &["max_steps=2"], &[]);
        let model = "run/checkpoints/checkpoint-2";
        let said = |args: &[&str]| alone_and_divided(&run, ranks, args);
        expect_losses_of_one_process(&run, model, ranks);
        let prompt = ["generate", model, "--prompt", "line 4", "--recipe", "fp32", "--max-new-tokens", "16"];
        for more in [&["--kv-cache-dtype", "fp8", "--json"][..], &["--temperature", "1", "--seed", "3"]] {
            let [alone, divided] = said(&[&prompt[..], more].concat());
            assert_eq!(divided, alone, "{more:?}, {ranks} ranks");
        }
    }
}

/// Tests that latent attention trains and resumes on every axis, and that ranks that divide it generate the same texts as one process.
#[test]
fn ranks_divide_latent_attention() {
    for query_rank in ["null", "16"] {
        let run = inputs();
        let config = format!(
            r#"{{"architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100, "max_position_embeddings": 64,
            "q_lora_rank": {query_rank}, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}}"#
        );
        run.write("model/config.json", config.as_bytes());
        go(&run, &["max_steps=2", "parallel.tensor=2"], &["--ranks", "2"]);
        go(&run, &["max_steps=3", "parallel.context=2", "parallel.tensor=2"], &["--ranks", "4", "--resume"]);
        go(&run, &["max_steps=4"], &["--resume"]);
        let generate = ["generate", "run/checkpoints/checkpoint-4", "--prompt", "line 4", "--recipe", "fp32"];
        let alone = [&generate[..], &["--max-new-tokens", "16", "--json"]].concat();
        assert_eq!(run.succeed(&[&alone[..], &["--ranks", "2"]].concat()), run.succeed(&alone), "{query_rank}");
    }
}

#[test]
fn a_signal_or_a_dead_rank_ends_all_ranks() {
    let settings = ["max_steps=100000", "save_steps=5", "parallel.tensor=2", "parallel.context=2"];
    let args = args(&settings, &["--ranks", "4"]);
    let common: Vec<&str> = COMMON.into_iter().flat_map(|setting| ["--set", setting]).collect();
    expect_ends_of_all_ranks(inputs, &args.iter().map(String::as_str).collect::<Vec<_>>(), &common);
}

#[test]
fn layers_that_do_not_divide_are_errors() {
    let run = Run::new();
    let fails = |settings: &[&str], words: &str| {
        let args = args(settings, &["--ranks", "2"]);
        run.fail(&args.iter().map(String::as_str).collect::<Vec<_>>(), 1, &[words]);
    };
    fails(&["parallel.context=2", "data.max_length=63"], "do not divide evenly");
    fails(&["parallel.tensor=2", "data.max_length=20"], "divide multiples of 32");
    fails(
        &["parallel.tensor=2", "batch_invariant=true"],
        "set `parallel.tensor` to 1, or leave `precision.batch_invariant` out",
    );
    fails(&["batch_invariant=true", "recipe=fp8-current"], "whose scales depend on all tokens of a batch");
    run.replace("model/config.json", "\"num_key_value_heads\": 1", "\"num_key_value_heads\": 2");
    fails(&["parallel.tensor=2", "storage=coat"], "groups of 128 values do not divide the");
    run.replace(
        "model/config.json",
        "\"num_attention_heads\": 2, \"num_key_value_heads\": 2",
        "\"num_attention_heads\": 1",
    );
    fails(&["parallel.context=2"], "set `parallel.context` to a divisor of 1");
    assert!(!run.path("run/metrics.jsonl").exists(), "nothing was trained");
}
