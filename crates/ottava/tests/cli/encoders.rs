//! Tests commands with encoders: `plan`, `train`, `eval` and `serve`.

use crate::serve::Server;
use crate::setup::{Run, json};
use serde_json::json;

/// Creates a run of a model of these `keys` and `settings` on pairs of texts.
fn run_of(keys: &str, settings: &str) -> Run {
    let run = Run::new();
    let sizes = r#""hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 64, "pad_token_id": 0"#;
    run.write("model/config.json", format!("{{{keys}, {sizes}}}").as_bytes());
    let pair = |i: usize| {
        let digits = format!("{}", i * i * 37 % 1000);
        let document = if i.is_multiple_of(2) { digits.clone() } else { "f e d c".to_string() };
        json!({"query": "1 2", "document": document, "label": (i + 1) % 2, "anchor": digits, "positive": format!("{i} b")})
    };
    run.write("pairs.jsonl", (0..40).map(|i| format!("{}\n", pair(i))).collect::<String>().as_bytes());
    run.replace("run.toml", "text.txt", "pairs.jsonl");
    run.replace("run.toml", "[training]", &format!("[optimizer]\nlearning_rate = 1e-2\n{settings}\n[training]"));
    run.replace("run.toml", "max_steps = 2", "max_steps = 20");
    run
}

fn serve(run: &Run) -> Server {
    let mut command = run.command(&["serve", "run", "--port", "0", "--device", "cpu", "--recipe", "fp32"]);
    command.env("OTTAVA_LOG", "warn");
    Server::spawn(command)
}

fn refused(server: &Server, path: &str) -> String {
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut server.send(path, &json!({"prompt": "a"})), &mut answer).unwrap();
    answer
}

#[test]
fn a_reranker_with_modernbert_is_trained_evaluated_and_served() {
    let run = run_of(
        r#""model_type": "modernbert", "local_attention": 6, "classifier_pooling": "mean""#,
        "[classification]\nproblem_type = \"multi_label_classification\"\nnum_labels = 1",
    );
    run.succeed(&["plan", "run.toml"]);
    run.succeed(&["train", "run.toml"]);
    let found = json(&run.succeed(&["eval", "run", "--data", "pairs.jsonl", "--recipe", "fp32", "--json"]));
    assert_eq!((&found["texts"], &found["accuracy"]), (&json!(40), &json!(1.0)), "{found}");
    let server = serve(&run);
    let answer = server.post("/rerank", json!({"query": "1 2", "documents": ["f e d c", "592"], "top_n": 1}));
    assert_eq!(answer["results"][0]["index"], 1, "{answer}");
    let answer = server.post("/classify", json!({"input": ["1 2592", "1 2f e d c"]}));
    let probabilities = [0, 1].map(|i| answer["data"][i]["probs"][0].as_f64().unwrap());
    assert!(probabilities[0] > 0.5 && probabilities[1] < 0.5, "{answer}");
    let words = "the model is a classifier, which writes no text";
    assert!(refused(&server, "/v1/completions").contains(words));
    run.fail(&["generate", "run", "--prompt", "a"], 1, &["whose head computes a score and no tokens"]);
}

#[test]
fn an_embedding_model_with_bert_is_trained_and_served() {
    let run = run_of(r#""model_type": "bert", "initializer_range": 0.1"#, "[embedding]\npooling = \"cls\"");
    run.succeed(&["train", "run.toml"]);
    let words = ["this is an encoder, which writes no text"];
    run.fail(&["generate", "run", "--prompt", "a"], 1, &words);
    run.fail(&["eval", "run", "--data", "text.txt"], 1, &words);
    let server = serve(&run);
    let answer = server.post("/v1/embeddings", json!({"input": ["12", "12 and a longer text", "12"]}));
    let of = |i: usize| -> Vec<f64> {
        answer["data"][i]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    assert!(of(0) == of(2) && of(0) != of(1) && of(0).len() == 32, "{answer}");
    let norm = of(0).iter().map(|x| x * x).sum::<f64>();
    assert!((norm - 1.0).abs() < 1e-5, "{norm}");
    let answer = server.post("/rerank", json!({"query": "12", "documents": ["zz z", "12"]}));
    assert_eq!(answer["results"][0]["index"], 1, "{answer}");
    for path in ["/v1/completions", "/inference/v1/generate"] {
        let answer = refused(&server, path);
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("the model is an encoder"), "{path}: {answer}");
    }
}
