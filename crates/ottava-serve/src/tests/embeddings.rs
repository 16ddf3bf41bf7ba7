//! Tests embeddings. The stand-in of the engine returns vectors that depend on the text.

use super::*;

#[test]
fn embeddings_have_the_shape_of_openai_in_the_order_of_the_texts() {
    let server = start(|_, _| {});
    let texts = ["a bird of the sea", "a stone", "b"];
    let tokens: Vec<Vec<u32>> = texts.iter().map(|text| tokenizer().encode_prompt(text).unwrap()).collect();
    let total: usize = tokens.iter().map(Vec::len).sum();
    let vector = |tokens: &Vec<u32>| vec![tokens.len() as f32, tokens[0] as f32, -0.1, 1e-7];
    let usage = json!({"prompt_tokens": total, "total_tokens": total});
    for input in [json!(texts), json!(tokens)] {
        let (status, text) = server.call("/v1/embeddings", Some(&json!({"model": "parrot", "input": input})), None);
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &answer["object"], &answer["model"]), (200, &json!("list"), &json!("parrot")));
        assert_eq!(answer["usage"], usage);
        for (index, (entry, tokens)) in answer["data"].as_array().unwrap().iter().zip(&tokens).enumerate() {
            assert_eq!((&entry["object"], &entry["index"]), (&json!("embedding"), &json!(index)));
            let values: Vec<f32> = serde_json::from_value(entry["embedding"].clone()).unwrap();
            assert_eq!(values, vector(tokens));
        }
        assert!(text.contains("-0.1,") && !text.contains("0.10000000149"), "values are no longer than F32: {text}");
    }
    let answer = server.post("/v1/embeddings", json!({"input": texts[0], "encoding_format": "base64", "user": "me"}));
    assert_eq!(answer["data"][0]["embedding"].as_str().unwrap().len(), 24, "16 bytes in groups of three");
    let text = answer["data"][0]["embedding"].as_str().unwrap().trim_end_matches('=');
    let digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits: String = text.chars().map(|c| format!("{:06b}", digits.find(c).unwrap())).collect();
    let bytes: Vec<u8> = (0..16).map(|i| u8::from_str_radix(&bits[8 * i..8 * i + 8], 2).unwrap()).collect();
    let values: Vec<f32> = bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    assert_eq!(values, vector(&tokens[0]));
    server.log.get(|log| assert!(log.requests.iter().all(|request| request.pooling == Some(Pooling::Mean))));
}

#[test]
fn requests_for_embeddings_that_cannot_be_answered_are_refused() {
    let server = start_with(|options, _| options.strict = true, |model| model.channels = 1 << 13);
    for (field, value, words) in [
        ("dimensions", json!(0), "embeddings of this model have 1 to 8192 values"),
        ("dimensions", json!(8193), "embeddings of this model have 1 to 8192 values"),
        ("encoding_format", json!("hex"), "it is float or base64"),
        ("input", Value::Null, "`input` is missing"),
        ("input", json!([]), "`input` has a text without tokens"),
        ("input", json!([[1], [5000]]), "there is no token 5000"),
        ("input", json!(["a", [1]]), "values of several kinds"),
        ("input", json!(vec![1; MODEL_LEN]), "with one new token, the server has room for 200"),
        ("input", json!(vec!["a"; 513]), "the embeddings would have 4202496 values"),
        ("max_tokens", json!(1), "is not a field of this request"),
        ("prompt", json!("a"), "is not a field of this request"),
    ] {
        let mut request = json!({"input": "a"});
        request[field] = value;
        let (status, error) = server.refused("/v1/embeddings", &request);
        assert_eq!((status, error["param"].as_str()), (400, Some(field)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    let (status, _) = server.refused("/v1/embeddings", &json!({"model": "owl", "input": "a"}));
    assert_eq!(status, 404);
}

/// The stand-in's embedding of a text is its length, its first token and two small numbers.
#[test]
fn embeddings_can_be_shortened() {
    let server = start(|_, _| {});
    let answer = server.post("/v1/embeddings", json!({"input": [[4, 7], [3, 1, 1]], "dimensions": 2}));
    for (entry, whole) in answer["data"].as_array().unwrap().iter().zip([[2.0_f64, 4.0], [3.0, 3.0]]) {
        let values: Vec<f64> = serde_json::from_value(entry["embedding"].clone()).unwrap();
        let norm = (whole[0] * whole[0] + whole[1] * whole[1]).sqrt();
        assert!(values.len() == 2 && (values[0] - whole[0] / norm).abs() < 1e-6, "{values:?}");
    }
}

#[test]
fn documents_are_ranked_by_the_cosine_of_embeddings() {
    let server = start(|_, _| {});
    let documents = ["a stone", "a bird of the sea", "a bird"];
    let cosine = |a: &str, b: &str| {
        let vector = |text: &str| {
            let ids = tokenizer().encode_prompt(text).unwrap();
            [ids.len() as f64, f64::from(ids[0]), -0.1, 1e-7]
        };
        let dot = |a: [f64; 4], b: [f64; 4]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let (a, b) = (vector(a), vector(b));
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    let body = json!({"query": "a bird", "documents": documents, "top_n": 2});
    let answer = server.post("/v1/rerank", body.clone());
    let results = answer["results"].as_array().unwrap();
    let mut expected: Vec<(usize, f64)> = documents.iter().map(|text| cosine("a bird", text)).enumerate().collect();
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));
    assert_eq!(results.len(), 2);
    for (result, (index, score)) in results.iter().zip(expected) {
        assert_eq!((&result["index"], &result["document"]["text"]), (&json!(index), &json!(documents[index])));
        assert!((result["relevance_score"].as_f64().unwrap() - score).abs() < 1e-6, "{result}");
    }
    assert_eq!(server.call("/rerank", Some(&body), None).0, 200);
    let scores = server.post("/score", json!({"text_1": ["a bird", "a stone"], "text_2": ["a stone", "a stone"]}));
    assert!((scores["data"][1]["score"].as_f64().unwrap() - 1.0).abs() < 1e-6, "{scores}");
    let (status, error) = server.refused("/score", &json!({"text_1": ["a", "b"], "text_2": ["c"]}));
    assert_eq!((status, error["param"].as_str()), (400, Some("text_1")));
    assert_eq!(server.refused("/rerank", &json!({"query": "a"})).1["param"], "documents");
}
