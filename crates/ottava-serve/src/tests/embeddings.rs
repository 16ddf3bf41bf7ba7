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
    let server = start_with(|_, _| {}, |model| model.channels = 1 << 13);
    for (field, value, words) in [
        ("dimensions", json!(2), "`dimensions` is not implemented; leave it out"),
        ("encoding_format", json!("hex"), "it is float or base64"),
        ("input", Value::Null, "`input` is missing"),
        ("input", json!([]), "`input` has a text without tokens"),
        ("input", json!([[1], [5000]]), "there is no token 5000"),
        ("input", json!(["a", [1]]), "values of several kinds"),
        ("input", json!(vec![1; MODEL_LEN]), "with one new token, the server has room for 200"),
        ("input", json!(vec!["a"; 513]), "the embeddings would have 4202496 values"),
        ("max_tokens", json!(1), "this is not a field of this request"),
        ("prompt", json!("a"), "this is not a field of this request"),
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
