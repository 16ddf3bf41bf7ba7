//! Tests the texts of tokens that depend on their neighbours: spaces of SentencePiece, parts of characters, special tokens.

use super::*;
use crate::logprobs::{Place, entry};

/// Returns a tokenizer like Llama 2's: words begin with spaces, unknown characters become bytes, and each text begins with a token.
fn sentencepiece() -> Tokenizer {
    let mut vocabulary: Vec<(String, f64)> = ["<unk>", "<s>", "</s>"].map(|token| (token.to_string(), 0.0)).into();
    vocabulary.extend((0..=255).map(|byte| (format!("<0x{byte:02X}>"), -9.0)));
    vocabulary.extend(["▁the", "▁otter", "▁sw", "im", "▁"].map(|token| (token.to_string(), -1.0)));
    vocabulary.extend(('a'..='z').map(|letter| (letter.to_string(), -5.0)));
    let special = |id: usize| {
        json!({"id": id, "content": vocabulary[id].0, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": true})
    };
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let steps = json!([replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]);
    let file = json!({"version": "1.0", "added_tokens": [special(0), special(1), special(2)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]},
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": true}});
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let config = json!({"bos_token": "<s>", "add_bos_token": true, "eos_token": "</s>"});
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    Tokenizer::load(folder.path()).unwrap()
}

fn server() -> Server {
    start_with(|_, _| {}, |model| model.tokenizer = sentencepiece())
}

/// Returns the text of a choice, joined from the events of a stream, and one list of its log-probabilities.
fn streamed(server: &Server, path: &str, mut body: Value, text: &str) -> String {
    body["stream"] = true.into();
    let (events, done) = server.stream(path, body);
    assert!(done, "{events:?}");
    events.iter().filter_map(|event| event["choices"][0].pointer(text)?.as_str().map(str::to_string)).collect()
}

#[test]
fn continuations_keep_the_space_before_their_first_word() {
    let server = server();
    // The stand-in repeats the prompt: a special token, which is not part of the text, and two words.
    let body = json!({"prompt": "the otter", "max_tokens": 3, "logprobs": 1});
    for (echo, text, tokens, offsets) in [
        (false, " the otter", json!(["<s>", " the", " otter"]), json!([0, 0, 4])),
        (
            true,
            "the otter the otter",
            json!(["<s>", "the", " otter", "<s>", " the", " otter"]),
            json!([0, 0, 3, 9, 9, 13]),
        ),
    ] {
        let mut body = body.clone();
        body["echo"] = echo.into();
        let choice = server.post("/v1/completions", body.clone())["choices"][0].clone();
        let lists = &choice["logprobs"];
        assert_eq!((&choice["text"], &lists["tokens"], &lists["text_offset"]), (&json!(text), &tokens, &offsets));
        assert_eq!(streamed(&server, "/v1/completions", body, "/text"), text);
    }
    let ids = json!([1, 259, 260]);
    let choice =
        server.post("/v1/completions", json!({"prompt": ids, "max_tokens": 3, "echo": true}))["choices"][0].clone();
    assert_eq!(choice["text"], "<s> the otter the otter", "ids are decoded as they came");
    let scored = server.post("/v1/completions", json!({"prompt": "the otter", "max_tokens": 1, "prompt_logprobs": 0}));
    let scored = &scored["choices"][0]["prompt_logprobs"];
    let decoded: Vec<&Value> = [(1, "259"), (2, "260")].map(|(at, id)| &scored[at][id]["decoded_token"]).into();
    assert_eq!(decoded, ["the", " otter"]);
    let strings = server.post("/tokenize", json!({"prompt": "the otter", "return_token_strs": true}));
    assert_eq!(strings["token_strs"], json!(["<s>", " the", " otter"]));
}

#[test]
fn chats_and_continued_messages_keep_spaces() {
    let server = server();
    let messages = json!([{"role": "user", "content": "the"}, {"role": "assistant", "content": "the otter"}]);
    let body = json!({"messages": messages, "max_tokens": 4, "logprobs": true, "continue_final_message": true,
        "add_generation_prompt": false});
    let prompt = server.post(
        "/tokenize",
        json!({"messages": messages, "continue_final_message": true,
        "add_generation_prompt": false, "return_token_strs": true}),
    );
    let strings: Vec<&str> =
        prompt["token_strs"].as_array().unwrap().iter().take(4).map(|text| text.as_str().unwrap()).collect();
    let choice = server.post("/v1/chat/completions", body.clone())["choices"][0].clone();
    let content = choice["message"]["content"].as_str().unwrap();
    assert_eq!(content, format!(" {}", strings.concat()), "{prompt}");
    let tokens = choice["logprobs"]["content"].as_array().unwrap().iter().map(|entry| entry["token"].as_str().unwrap());
    assert_eq!(tokens.collect::<String>(), content);
    assert_eq!(streamed(&server, "/v1/chat/completions", body, "/delta/content"), content);
}

/// In OpenAI's API, a token has its bytes, so that a client can join the bytes of a character.
#[test]
fn parts_of_characters_have_their_own_bytes() {
    let of = |tokenizer: &Tokenizer, before: &[u32], token: u32| {
        let place = Place::after(tokenizer, before).ok().unwrap();
        let top = [(token, -1.0), (before[0], -2.0)].into();
        let text = entry(&TokenLogprob { token, logprob: -1.0, top }, &place, tokenizer).ok().unwrap();
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let (level, pieces) = (tokenizer(), sentencepiece());
    let byte = |tokenizer: &Tokenizer, name: &str| tokenizer.token_id(name).unwrap();
    for (tokenizer, name) in [(&level, "Á"), (&pieces, "<0xC1>")] {
        let before = tokenizer.encode("the").unwrap();
        let found = of(tokenizer, &before, byte(tokenizer, name));
        assert_eq!((&found["token"], &found["bytes"]), (&json!("\u{fffd}"), &json!([193])), "{found}");
        assert_eq!(found["top_logprobs"][0]["bytes"], json!([193]));
    }
    let found = of(&pieces, &pieces.encode("the").unwrap(), byte(&pieces, "▁sw"));
    assert_eq!((&found["token"], &found["bytes"]), (&json!(" sw"), &json!(b" sw")));
    let server = server();
    let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": true});
    assert!(server.post("/v1/chat/completions", body)["choices"][0]["logprobs"]["content"][0]["bytes"].is_array());
}

/// An incomplete character counts as one character of the text.
#[test]
fn text_offsets_count_broken_characters() {
    let id = |tokenizer: &Tokenizer, name: &str| tokenizer.token_id(name).unwrap();
    let check = |server: &Server, prompt: Vec<u32>, text: &str, offsets: Value| {
        let mut body = json!({"prompt": prompt, "max_tokens": 1, "echo": true, "logprobs": 0});
        let choice = server.post("/v1/completions", body.clone())["choices"][0].clone();
        assert_eq!((&choice["text"], &choice["logprobs"]["text_offset"]), (&json!(text), &offsets));
        // Without the prompt, offsets count from the beginning of the answer.
        body["echo"] = false.into();
        body["max_tokens"] = prompt.len().into();
        let choice = server.post("/v1/completions", body)["choices"][0].clone();
        let offsets: Vec<u64> = offsets.as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
        assert_eq!(choice["logprobs"]["text_offset"], json!(offsets[..prompt.len()]), "{choice}");
    };
    let level = start(|_, _| {});
    let prompt = ["a", "Á", "/", "æ", "Ĺ", "/", "æ", "Ĺ", "¥"].map(|name| id(&tokenizer(), name)).into();
    check(&level, prompt, "a\u{fffd}/\u{fffd}/日a", json!([0, 1, 2, 3, 3, 4, 5, 5, 5, 6]));
    let pieces = server();
    let names = ["a", "<0xC1>", "i", "<0xE6>", "<0x97>", "im", "<0xE6>", "<0x97>", "<0xA5>"];
    let prompt = names.map(|name| id(&sentencepiece(), name)).into();
    check(&pieces, prompt, "a\u{fffd}i\u{fffd}im日a", json!([0, 1, 2, 3, 3, 4, 6, 6, 6, 7]));
}

#[test]
fn echo_returns_the_prompt_as_it_was_sent() {
    let server = server();
    for text in ["the otter", " the", "日 the", "the  otter", "x"] {
        let body = json!({"prompt": text, "max_tokens": 0, "echo": true, "logprobs": 0});
        let choice = server.post("/v1/completions", body)["choices"][0].clone();
        assert_eq!(choice["text"], text);
        assert_eq!(choice["logprobs"]["tokens"][0], "<s>", "the model reads it, and the lists have it");
        let offsets = choice["logprobs"]["text_offset"].as_array().unwrap();
        assert_eq!((offsets[0].as_u64(), offsets[1].as_u64()), (Some(0), Some(0)));
        let last = offsets.last().unwrap().as_u64().unwrap() as usize;
        assert!(last < text.chars().count(), "{choice}");
    }
    let empty = server.post("/v1/completions", json!({"prompt": "", "max_tokens": 0, "echo": true}));
    assert_eq!(empty["choices"][0]["text"], "");
}

#[test]
fn an_empty_grammar_is_no_constraint() {
    let server = start(|_, _| {});
    for field in ["grammar", "guided_grammar"] {
        server.post("/v1/completions", json!({"prompt": TEXT, "max_tokens": 3, field: ""}));
        assert!(server.log.get(|log| log.requests.last().unwrap().grammar.is_none()), "{field}");
    }
}
