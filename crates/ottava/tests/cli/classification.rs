//! Tests commands with classifiers and averages of weights: `train`, `eval`, `serve` and `average`.

use crate::serve::Server;
use crate::setup::{Run, json};
use serde_json::{Value, json};

/// Creates a run of a classifier with `settings` on texts of digits and of letters.
fn labeled_run(settings: &str) -> Run {
    let run = Run::new();
    let text = |i: usize| {
        if i.is_multiple_of(2) {
            format!("{}", i * i * 37 % 1000)
        } else {
            "a b c d e f".chars().rev().skip(i % 5).collect()
        }
    };
    let record = |i: usize| {
        let (kind, text) = (["digits", "letters"][i % 2], text(i));
        json!({"text": text, "label": kind, "query": "1 2", "document": text, "relevant": (i + 1) % 2})
    };
    let records: String = (0..40).map(|i| format!("{}\n", record(i))).collect();
    run.write("labeled.jsonl", records.as_bytes());
    run.replace("run.toml", "text.txt", "labeled.jsonl");
    let settings = format!("[optimizer]\nlearning_rate = 1e-2\n{settings}\n[training]");
    run.replace("run.toml", "[training]", &settings);
    run.replace("run.toml", "max_steps = 2", "max_steps = 20");
    run
}

#[test]
fn a_classifier_is_trained_evaluated_and_served() {
    let run = labeled_run("[classification]\nlabel_names = [\"digits\", \"letters\"]");
    run.succeed(&["plan", "run.toml"]);
    run.succeed(&["train", "run.toml"]);
    let eval = ["eval", "run", "--data", "labeled.jsonl", "--recipe", "fp32"];
    let found = json(&run.succeed(&[&eval[..], &["--json"]].concat()));
    assert_eq!((&found["texts"], &found["accuracy"], &found["f1"]), (&json!(40), &json!(1.0), &json!(1.0)), "{found}");
    let text = run.succeed(&eval);
    assert!(text.contains("accuracy 1.00000  f1 1.00000") && text.contains("over 40 texts (single_label"), "{text}");
    run.succeed(&[&eval[..], &["--output", "predictions.jsonl"]].concat());
    let predictions = std::fs::read_to_string(run.path("predictions.jsonl")).unwrap();
    let rows: Vec<_> = predictions.lines().map(json).collect();
    assert!(rows.len() == 40 && rows.iter().all(|row| row["label"] == row["prediction"]), "{predictions}");
    assert_eq!(rows[0]["scores"].as_array().unwrap().len(), 2);
    // The fields of a chat would be read as a preference, if the model were no classifier.
    run.write(
        "chats.jsonl",
        b"{\"conversations\": [{\"from\": \"human\", \"value\": \"12\"}], \"label\": \"digits\"}\n",
    );
    let args = ["eval", "run", "--data", "chats.jsonl", "--recipe", "fp32", "--json"];
    run.fail(&args, 2, &["has no chat template for this conversation"]);
    let words = ["this is a classifier, whose head computes scores of 2 labels and no tokens"];
    run.fail(&["generate", "run", "--prompt", "a"], 1, &words);
    let mut command = run.command(&["serve", "run", "--port", "0", "--device", "cpu", "--recipe", "fp32"]);
    command.env("OTTAVA_LOG", "warn");
    let server = Server::spawn(command);
    let answer = server.post("/classify", json!({"input": ["123", "f e d"]}));
    assert_eq!([&answer["data"][0]["label"], &answer["data"][1]["label"]], ["digits", "letters"], "{answer}");
    let probs: Vec<f64> = answer["data"][0]["probs"].as_array().unwrap().iter().map(|p| p.as_f64().unwrap()).collect();
    assert!((probs.iter().sum::<f64>() - 1.0).abs() < 1e-9 && probs[0] > 0.5, "{probs:?}");
    assert_eq!((&answer["data"][0]["num_classes"], &answer["usage"]["prompt_tokens"]), (&json!(2), &json!(8)));
    let mut refused = String::new();
    std::io::Read::read_to_string(&mut server.send("/v1/completions", &json!({"prompt": "a"})), &mut refused).unwrap();
    assert!(refused.starts_with("HTTP/1.1 400") && refused.contains("the model is a classifier"), "{refused}");
}

#[test]
fn a_reranker_scores_pairs() {
    let run = labeled_run("[classification]\nproblem_type = \"multi_label_classification\"\nnum_labels = 1");
    // Records of pairs: the fields `text` and `label`, as in the other test.
    run.replace(
        "run.toml",
        "[data.records]",
        "[data.records]\nfields = { text = \"query\", text_pair = \"document\", label = \"relevant\" }",
    );
    run.succeed(&["train", "run.toml"]);
    // Records as the page shows them.
    let documents = ["f e d c", "592"];
    let pair = |i: usize| json!({"query": "1 2", "document": documents[i % 2], "label": i % 2});
    run.write("pairs.jsonl", (0..6).map(|i| format!("{}\n", pair(i))).collect::<String>().as_bytes());
    let found = json(&run.succeed(&["eval", "run", "--data", "pairs.jsonl", "--recipe", "fp32", "--json"]));
    assert_eq!((&found["texts"], &found["accuracy"]), (&json!(6), &json!(1.0)), "{found}");
    let server = Server::spawn(run.command(&["serve", "run", "--port", "0", "--device", "cpu", "--recipe", "fp32"]));
    let answer = server.post("/v1/rerank", json!({"query": "1 2", "documents": ["f e d c", "592"], "top_n": 1}));
    assert_eq!(answer["results"][0]["index"], 1, "{answer}");
    let best = answer["results"][0]["relevance_score"].as_f64().unwrap();
    let answer = server.post("/score", json!({"text_1": "1 2", "text_2": ["f e d c", "592"]}));
    let scores = [0, 1].map(|i| answer["data"][i]["score"].as_f64().unwrap());
    assert!(scores[0] < 0.5 && scores[1] > 0.5 && scores[1] == best, "{answer}");
}

/// Adapters, merged models and averages of an embedding model are pooled as the run has pooled.
#[test]
fn embedding_models_keep_their_pooling() {
    let run = Run::new();
    let pair = |i: usize| json!({"anchor": format!("{i} a"), "positive": format!("{i} b")});
    run.write("pairs.jsonl", (0..20).map(|i| format!("{}\n", pair(i))).collect::<String>().as_bytes());
    run.replace("run.toml", "text.txt", "pairs.jsonl");
    run.replace("run.toml", "[training]", "[embedding]\npooling = \"mean\"\n[training]");
    run.succeed(&["train", "run.toml"]);
    let model = run.path("run/checkpoints/checkpoint-2").display().to_string();
    run.succeed(&["average", &model, &model, "--output", "averaged"]);
    run.replace("run.toml", "[training]", "[lora]\nr = 2\n[training]");
    let path = format!("model.path={model}");
    run.succeed(&[
        "train",
        "run.toml",
        "--set",
        &path,
        "--set",
        "model.init=pretrained",
        "--set",
        "output_dir=adapted",
    ]);
    run.succeed(&["merge", &model, "adapted", "merged"]);
    for folder in ["averaged", "adapted/checkpoints/checkpoint-2", "merged"] {
        let file = std::fs::read_to_string(run.path(folder).join("1_Pooling/config.json")).unwrap();
        let file: Value = serde_json::from_str(&file).unwrap();
        assert_eq!(file["pooling_mode_mean_tokens"], true, "{folder}");
        assert!(run.path(folder).join("modules.json").is_file(), "{folder}");
    }
}

#[test]
fn models_are_averaged() {
    let run = Run::new();
    run.replace(
        "run.toml",
        "[training]",
        "[ema]\ndecay = 0.5\n[checkpoint]\nsave_steps = 1\nsave_total_limit = 0\n[training]",
    );
    run.succeed(&["train", "run.toml"]);
    let [first, second] =
        [1, 2].map(|step| run.path(&format!("run/checkpoints/checkpoint-{step}")).display().to_string());
    let found = json(&run.succeed(&["average", &first, &second, "--output", "averaged", "--weights", "1,3", "--json"]));
    assert_eq!(found["models"], 2);
    let eval =
        |model: &str| json(&run.succeed(&["eval", model, "--data", "text.txt", "--json"]))["loss"].as_f64().unwrap();
    let losses = [first.as_str(), "averaged", &second, "run/ema/checkpoint-2"].map(eval);
    assert!(losses[0] > losses[1] && losses[1] > losses[2] && losses[3] != losses[2], "{losses:?}");
    run.fail(&["average", &first, &second, "--output", "other", "--weights", "1"], 1, &["--weights has 1 numbers"]);
    run.fail(&["average", &first, "--output", "averaged"], 1, &["this exists already"]);
}
