//! Tests ranks that divide the experts of a mixture, as processes on the CPU.

use crate::layer_axes::{COMMON, alone_and_divided, args, expect_losses_of_one_process, expect_near, go};
use crate::ranks::expect_ends_of_all_ranks;
use crate::setup::{Run, steps};

/// Creates a mixture of four experts. Each token chooses two experts.
fn inputs() -> Run {
    let run = Run::new();
    run.write(
        "model/config.json",
        br#"{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 64,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
            "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "norm_topk_prob": true, "tie_word_embeddings": false, "eos_token_id": 0}"#,
    );
    run
}

#[test]
fn ranks_with_other_experts_train_as_one_process_does() {
    let alone = inputs();
    let samples = go(&alone, &["max_steps=3", "global_batch_size=4"], &[]);
    for (ranks, settings) in [
        ("2", &["parallel.expert=2", "parallel.check_replicas=1"][..]),
        ("4", &["parallel.expert=2", "parallel.zero=1", "parallel.check_replicas=1", "per_device_train_batch_size=1"]),
        ("4", &["parallel.expert=4", "recompute=full", "async_save=true", "per_device_train_batch_size=1"]),
        ("2", &["parallel.expert=2", "parallel.context=2", "parallel.zero=3"]),
        ("4", &["parallel.expert=2", "parallel.pipeline=2"]),
        ("4", &["parallel.tensor=4", "parallel.check_replicas=1"]),
        ("4", &["parallel.tensor=2", "parallel.expert=2", "parallel.zero=1", "parallel.check_replicas=1"]),
    ] {
        let run = inputs();
        let said = go(&run, &[&["max_steps=3", "global_batch_size=4"], settings].concat(), &["--ranks", ranks]);
        expect_near(&run, &alone, &format!("{settings:?}"));
        assert_eq!(said.lines().count(), samples.lines().count(), "{settings:?}: samples of the whole model");
        assert_eq!(run.ottava(&["eval", "run/checkpoints/checkpoint-3", "--data", "text.txt"]).status.code(), Some(0));
    }
}

#[test]
fn a_run_resumes_with_other_ranks_of_experts() {
    let (unbroken, run) = (inputs(), inputs());
    go(&unbroken, &["max_steps=6", "global_batch_size=4"], &[]);
    for (steps, ranks, settings) in [
        ("max_steps=1", "2", &["parallel.tensor=2"][..]),
        ("max_steps=2", "2", &["parallel.expert=2"]),
        ("max_steps=3", "4", &["parallel.expert=4", "per_device_train_batch_size=1"]),
        ("max_steps=4", "1", &[]),
        ("max_steps=5", "4", &["parallel.expert=2", "parallel.zero=3", "per_device_train_batch_size=1"]),
        ("max_steps=6", "2", &["parallel.pipeline=2"]),
    ] {
        let resume = if steps == "max_steps=1" { &[][..] } else { &["--resume"] };
        go(&run, &[&[steps, "global_batch_size=4"], settings].concat(), &[&["--ranks", ranks], resume].concat());
    }
    assert_eq!(steps(&run.path("run/metrics.jsonl")), (0..=6).collect::<Vec<_>>());
    expect_near(&run, &unbroken, "six meshes");
}

#[test]
fn a_signal_or_a_dead_rank_ends_all_expert_ranks() {
    let settings = ["max_steps=100000", "save_steps=5", "parallel.expert=2", "parallel.pipeline=2"];
    let args = args(&settings, &["--ranks", "4"]);
    let common: Vec<&str> = COMMON.into_iter().flat_map(|setting| ["--set", setting]).collect();
    expect_ends_of_all_ranks(inputs, &args.iter().map(String::as_str).collect::<Vec<_>>(), &common);
}

/// Any division that the search chooses can be trained, and a plan prints it.
#[test]
fn a_search_chooses_the_division_of_a_run() {
    let run = inputs();
    let settings = ["parallel.auto=true", "global_batch_size=4"];
    go(&run, &[&["max_steps=2"], &settings[..]].concat(), &["--ranks", "2"]);
    assert_eq!(steps(&run.path("run/metrics.jsonl")), (0..=2).collect::<Vec<_>>());
    let settings: Vec<&str> = settings.into_iter().flat_map(|setting| ["--set", setting]).collect();
    let plan = run.succeed(&[&["plan", "run.toml", "--ranks", "2"], &settings[..]].concat());
    for part in ["Fastest divisions among 2 ranks", " tokens/s, "] {
        assert!(plan.contains(part), "no {part:?} in {plan}");
    }
    run.fail(
        &["plan", "run.toml", "--set", "parallel.auto=true", "--set", "parallel.tensor=2"],
        1,
        &["leave them out"],
    );
    run.fail(&["plan", "run.toml", "--set", "parallel.auto=true"], 1, &["set `training.global_batch_size`"]);
}

/// Creates a mixture whose experts have biases and are stacked in the folder. Its attention has sinks.
fn stacked() -> Run {
    let run = Run::new();
    run.write(
        "model/config.json",
        br#"{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 100, "hidden_size": 64,
            "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
            "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
            "tie_word_embeddings": false, "eos_token_id": 0}"#,
    );
    run
}

/// Tests that ranks that divide the tensors and experts of a model have the same loss and generate the same texts as one process.
#[test]
fn ranks_divide_experts_for_inference() {
    for run in [inputs(), stacked()] {
        go(&run, &["max_steps=2", "global_batch_size=4"], &[]);
        let model = "run/checkpoints/checkpoint-2";
        expect_losses_of_one_process(&run, model, "2");
        let prompt = ["generate", model, "--prompt", "line 4", "--recipe", "fp32", "--max-new-tokens", "16"];
        let [alone, divided] = alone_and_divided(&run, "2", &prompt);
        assert_eq!(divided, alone);
    }
}

#[test]
fn a_plan_shows_the_ranks_of_experts() {
    let plan = inputs().succeed(&[
        "plan",
        "run.toml",
        "--details",
        "--set",
        "parallel.expert=2",
        "--set",
        "recipe=fp8-delayed",
    ]);
    for part in [
        "data 2, context 1, tensor 1, pipeline 1, expert 2\n  data: ranks 0, 1\n  expert: ranks 0, 1\n",
        "each of 2 ranks has 2 and gathers the tokens of all",
        "calls of send",
        " casts of input: the maximum over data x context x expert x tensor",
    ] {
        assert!(plan.contains(part), "no {part:?} in {plan}");
    }
    let settings = ["--set", "parallel.expert=2", "--set", "parallel.tensor=2"];
    let plan = inputs().succeed(&[&["plan", "run.toml", "--details"], &settings[..]].concat());
    assert!(plan.contains("each of 4 ranks has 1 and gathers the tokens of all"), "{plan}");
}

#[test]
fn experts_that_do_not_divide_are_errors() {
    let run = inputs();
    let fails = |run: &Run, settings: &[&str], ranks: &str, words: &str| {
        let args = args(settings, &["--ranks", ranks]);
        run.fail(&args.iter().map(String::as_str).collect::<Vec<_>>(), 1, &[words]);
    };
    fails(&run, &["parallel.expert=3", "global_batch_size=3"], "3", "does not divide the 4 experts");
    fails(&run, &["parallel.expert=2"], "3", "set it to a divisor of 3");
    let both = ["parallel.tensor=4", "parallel.expert=2", "global_batch_size=4"];
    fails(
        &run,
        &both,
        "8",
        "the product of `parallel.expert` and `parallel.tensor` is 8, which does not divide the 4 experts",
    );
    fails(&Run::new(), &["parallel.expert=2"], "2", "has no experts");
}
