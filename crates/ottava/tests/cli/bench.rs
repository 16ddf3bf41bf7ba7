//! `ottava bench` with small models on a CPU.

use crate::serve::Server;
use crate::setup::{Run, json};
use serde_json::Value;

/// The sizes of a small GPT-2.
fn gpt2() -> Value {
    serde_json::json!({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 500, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
    })
}

/// The sizes of a small Qwen2 with 14 query heads, as Qwen2.5-0.5B has.
fn qwen2() -> Value {
    serde_json::json!({
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 512, "hidden_size": 448, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 128,
    })
}

#[test]
fn bench_times_a_small_model_in_every_recipe() {
    let run = Run::new();
    run.write("small/config.json", &serde_json::to_vec(&gpt2()).unwrap());
    let output = run.ottava(&[
        "bench",
        "train",
        "--model",
        "small",
        "--layers",
        "1",
        "--max-length",
        "8",
        "--micro-batch",
        "1",
        "--steps",
        "1",
        "--compare",
        "fp8-delayed,bf16",
        "--set",
        "first_layers_bf16=1",
        "--levels",
        "bf16",
        "--device",
        "cpu",
        "--json",
    ]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("4 of 4 linears stay in bfloat16: first_layers_bf16 = 1"), "{said}");
    let result = json(&String::from_utf8(output.stdout).unwrap());
    let row = &result["rows"][0];
    assert!(row["tokens_per_second"].as_f64().unwrap() > 0.0);
    let loss = row["loss"].as_f64().unwrap();
    assert!((loss - 500f64.ln()).abs() < 2.0, "random tokens cost the logarithm of the vocabulary: {loss}");
    assert_eq!(loss, result["rows"][1]["loss"].as_f64().unwrap(), "the only block is left in BF16");
    run.fail(
        &["bench", "train", "--set", "max_steps=3", "--device", "cpu"],
        1,
        &["only keys of [precision], [sentinel], [optimizer], [memory], [parallel] and [lora]"],
    );
    run.fail(&["bench", "train", "--model", "gpt-9", "--device", "cpu"], 1, &["`gpt-9`", "llama-2-7b"]);
}

#[test]
fn bench_times_products_layers_and_attention() {
    let run = Run::new();
    run.write("small/config.json", &serde_json::to_vec(&gpt2()).unwrap());
    let bench = |what: &str, more: &[&str]| {
        let model = ["--model", "small", "--device", "cpu"];
        run.succeed(&[&["bench", what][..], &model, more].concat())
    };
    let positive = |value: &Value| assert!(value.as_f64().unwrap() > 0.0, "{value}");

    let gemm = json(&bench("gemm", &["--tokens", "2", "--json"]));
    let rows = gemm["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4 * 3 * 2, "four linears, three products, two recipes");
    positive(&gemm["rates"]["fp8_flops"]);
    for row in rows {
        positive(&row["milliseconds"]);
        positive(&row["floor_milliseconds"]);
    }
    assert_eq!(rows[1]["out"], "bfloat16");

    let linear = json(&bench("linear", &["--tokens", "2", "--recipes", "bf16,fp8-delayed", "--json"]));
    assert_eq!(linear["rows"].as_array().unwrap().len(), 4 * 2);
    for row in linear["rows"].as_array().unwrap() {
        positive(&row["products_milliseconds"]);
    }
    let table = bench("linear", &["--tokens", "1", "--recipes", "fp8-current"]);
    assert!(table.contains("mlp.c_proj") && table.contains("speed-up"), "{table}");

    let sweep = ["--sweep", "--sizes", "16,24", "--tokens", "1,3"];
    let cells = json(&bench("linear", &[&sweep[..], &["--json"]].concat()));
    assert_eq!(cells["cells"].as_array().unwrap().len(), 8);
    assert_eq!(cells["recipe"], "fp8-delayed");
    assert_eq!(bench("linear", &sweep).lines().count(), 2 * (2 + 2));

    let attention = json(&bench("attention", &["--tokens", "8", "--seq-lens", "4,8", "--json"]));
    assert_eq!(attention["rows"][0]["batch"], 2);
    positive(&attention["rows"][1]["costs"][1]["milliseconds"]);
    run.fail(&["bench", "attention", "--seq-lens", "0", "--device", "cpu"], 1, &["at least 1"]);
    run.fail(&["bench", "attention", "--power", "--device", "cpu"], 1, &["no energy counter for the CPU"]);
}

#[test]
fn bench_times_a_generation_and_its_step() {
    let run = Run::new();
    run.write("small/config.json", &serde_json::to_vec(&gpt2()).unwrap());
    let sizes = [
        "--prompts",
        "2",
        "--num-generations",
        "4",
        "--prompt-length",
        "4",
        "--mean-length",
        "5",
        "--max-length",
        "24",
    ];
    let rollouts = ["bench", "rollouts", "--model", "small", "--micro-batch", "1", "--device", "cpu"];
    let args = [&rollouts[..], &sizes, &["--recipes", "bf16,fp8-row"]].concat();
    let result = json(&run.succeed(&[&args[..], &["--json"]].concat()));
    for row in result["rows"].as_array().unwrap() {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert_eq!(number("completions"), 8.0, "{row}");
        // Eight lengths whose mean is about five; several completions share a row.
        assert!((32.0..48.0).contains(&number("drawn_tokens")) && number("micro_batches") < 8.0, "{row}");
        assert!(number("draw_seconds") > 0.0 && number("step_seconds") > 0.0, "{row}");
    }
    let table = run.succeed(&args);
    assert!(table.starts_with("8 completions of ") && table.lines().count() == 4, "{table}");
    run.fail(
        &[&rollouts[..], &["--prompt-length", "99", "--max-length", "99"]].concat(),
        1,
        &["leaves no room for a completion"],
    );
}

#[test]
fn bench_loads_a_server() {
    let run = Run::new();
    let server = Server::start(&run, &["--max-num-seqs", "4", "--max-length", "40"]);
    let url = format!("http://{}", server.address);
    let small = ["--num-prompts", "6", "--max-concurrency", "3", "--random-input-len", "9", "--random-output-len", "5"];
    let args =
        [&["bench", "serve", "--base-url", &url, "--random-vocab", "64", "--num-warmups", "2"], &small[..]].concat();
    let report = json(&run.succeed(&[&args[..], &["--json", "--request-rate", "200"]].concat()));
    for (key, count) in [("completed", 6), ("failed", 0), ("total_input_tokens", 6 * 9), ("total_output_tokens", 6 * 5)]
    {
        assert_eq!(report[key], count, "{key}: {report}");
    }
    let number = |key: &str| report[key].as_f64().unwrap();
    assert!(number("output_throughput") > 0.0 && number("median_ttft_ms") <= number("median_e2el_ms"), "{report}");
    let table = run.succeed(&args);
    assert!(table.starts_with("6 requests by 3 clients in ") && table.contains("time to the first token"), "{table}");
    run.fail(&[&args[..], &["--model", "another"]].concat(), 6, &["2 of 2 requests to", "another"]);
    run.fail(&["bench", "serve", "--request-rate", "0"], 1, &["a number of requests per second above 0"]);
}

#[test]
fn bench_times_collectives_of_ranks() {
    let run = Run::new();
    let two =
        ["bench", "comm", "--ranks", "2", "--device", "cpu", "--mib", "1,2", "--sum-kib", "8,64", "--beside-mb", "1"];
    let report = &json(&run.succeed(&[&two[..], &["--json"]].concat()))["report"];
    assert_eq!((&report["ranks"], report["rows"].as_array().unwrap().len()), (&2.into(), 5 * 2));
    assert!(report["rows"][9]["bus_bytes_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(report["fits"].as_array().unwrap().len(), 5);
    let table = run.succeed(&two);
    for part in ["bus GB/s", "latency", "reduce-scatter", "slower, %"] {
        assert!(table.contains(part), "no {part:?} in: {table}");
    }
    run.fail(&["bench", "comm", "--device", "cpu"], 1, &["start 2 or more"]);
}

/// Four ranks as two hosts: links within a host and between hosts are between other ranks, and are measured apart.
#[test]
fn bench_times_links_within_and_between_hosts() {
    let run = Run::new();
    let sizes = ["--mib", "1,2", "--sum-kib", "8,64", "--beside-mb", "1"];
    let of = |hosts: &str, more: &[&str]| {
        let job = ["bench", "comm", "--ranks", "4", "--device", "cpu", "--hosts", hosts];
        run.succeed(&[&job[..], &sizes, more].concat())
    };
    let report = json(&of("2", &["--json"]));
    let tiers = report["tiers"].as_array().unwrap();
    let names: Vec<_> = tiers.iter().map(|tier| tier["tier"].as_str().unwrap()).collect();
    assert_eq!((names, &report["hosts"]), (vec!["within a host", "between hosts"], &2.into()));
    for tier in tiers {
        assert_eq!((&tier["report"]["ranks"], tier["report"]["rows"].as_array().unwrap().len()), (&2.into(), 5 * 2));
        let messages = tier["messages"].as_array().unwrap();
        let bytes: Vec<_> = messages.iter().map(|message| message["bytes"].as_u64().unwrap()).collect();
        assert_eq!(bytes, [1 << 20, 2 << 20]);
        assert!(messages.iter().all(|message| message["bytes_per_second"].as_f64() > Some(0.0)));
    }
    // Each of four hosts has one rank, so there are no links within a host.
    let table = of("4", &[]);
    assert!(table.contains("between hosts: groups of 4 ranks") && table.contains("to the next rank"), "{table}");
    assert!(!table.contains("within a host"), "{table}");
    let uneven = ["bench", "comm", "--ranks", "3", "--hosts", "2", "--device", "cpu"];
    run.fail(&uneven, 1, &["--hosts is 2, and the number of ranks is 3"]);
}

/// Each of two ranks reads half of the weights, and keys and values of half of the heads.
#[test]
fn bench_times_decoding_of_ranks() {
    let run = Run::new();
    run.write("small/config.json", &serde_json::to_vec(&qwen2()).unwrap());
    let model = ["bench", "decode", "--model", "small", "--layers", "1", "--device", "cpu", "--steps", "1"];
    let sizes =
        ["--context", "40", "--batch", "1,3", "--prefill", "20", "--recipes", "fp8-row", "--kv-cache-dtype", "fp8"];
    let args = [&model[..], &sizes].concat();
    let two = [&args[..], &["--ranks", "2"]].concat();
    let [alone, divided] = [&args, &two].map(|args| json(&run.succeed(&[&args[..], &["--json"]].concat())));
    assert_eq!([&alone["ranks"], &divided["ranks"]], [1, 2]);
    let rows = |result: &Value| result["rows"].as_array().unwrap().clone();
    assert_eq!(rows(&divided).len(), 3, "two batches and a prompt");
    for (one, of_two) in rows(&alone).iter().zip(&rows(&divided)) {
        for key in ["recipe", "kv_cache_dtype", "batch", "context", "new_tokens"] {
            assert_eq!(one[key], of_two[key], "{key}");
        }
        let [whole, half] = [one, of_two].map(|row| row["bytes"].as_u64().unwrap());
        // The bytes of a sequence's keys and values are rounded down.
        assert!(whole.abs_diff(2 * half) <= 2 * one["batch"].as_u64().unwrap(), "{one} {of_two}");
        assert!(of_two["tokens_per_second"].as_f64().unwrap() > 0.0, "{of_two}");
        assert!(one["all_reduce_milliseconds"].is_null(), "{one}");
        let (all_reduces, step) = (&of_two["all_reduce_milliseconds"], &of_two["milliseconds"]);
        assert!(all_reduces.as_f64().unwrap() > 0.0 && step.as_f64().unwrap() > 0.0, "{of_two}");
    }
    let table = run.succeed(&two);
    assert_eq!(table.lines().count(), 2 + 3, "the other rank prints nothing: {table}");
    assert!(table.starts_with("2 ranks, ") && table.contains("speed-up all-reduces ms"), "{table}");
    let four = ["14 query heads, which 4 ranks cannot divide", "--gpus or --ranks"];
    run.fail(&[&args[..], &["--ranks", "4"]].concat(), 1, &four);
    run.fail(&[&args[..], &["--gpus", "2"]].concat(), 1, &["--gpus 2 uses GPUs, and the device is the CPU"]);
}
