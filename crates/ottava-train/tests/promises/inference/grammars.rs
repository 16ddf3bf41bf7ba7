//! Constrained output: a request gets only text within its grammar, whatever the model computes.

use crate::inference::engine::ROOMY;
use crate::setup::{decoder, recipe, tiny_llama};
use ottava_data::Tokenizer;
use ottava_engine::{Engine, EngineOptions, Event, FinishReason, Grammar, Grammars, Request, Sampling};
use ottava_models::DecoderConfig;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::Device;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// The number of rows of the embedding. It exceeds the vocabulary of the tokenizer.
pub const VOCABULARY: usize = 4100;

pub fn tokenizer() -> Tokenizer {
    Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap()
}

fn engine(kv_cache_tokens: usize, max_batch: usize) -> Engine {
    engine_of(VOCABULARY, kv_cache_tokens, max_batch)
}

fn engine_of(vocabulary: usize, kv_cache_tokens: usize, max_batch: usize) -> Engine {
    let config = DecoderConfig { vocabulary, ..tiny_llama() };
    let model = decoder(&config, &recipe(RecipeName::Fp32, Fp8Format::Auto), &Device::Cpu, 0.3);
    let options = EngineOptions { max_batch, kv_cache_tokens, ..ROOMY };
    Engine::new(model, &options).unwrap()
}

fn request(seed: u64, grammar: Option<Grammar>) -> Request {
    let sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
    let stop_ids = tokenizer().eos_ids().to_vec();
    Request { prompt: vec![5; 3], sampling, max_new_tokens: 90, stop_ids, grammar, ..Request::default() }
}

/// Computes all requests together, and returns their tokens and how they ended.
fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<(Vec<u32>, FinishReason)> {
    let ids: Vec<_> = requests.into_iter().map(|request| engine.add(request).unwrap()).collect();
    let (mut tokens, mut ends) = (BTreeMap::<_, Vec<u32>>::new(), BTreeMap::new());
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            match event {
                Event::Token { id, token, .. } => tokens.entry(id).or_default().push(token),
                Event::Finished { id, reason, .. } => drop(ends.insert(id, reason)),
                Event::Prompt { .. } | Event::Embedding { .. } => {}
            }
        }
    }
    ids.iter().map(|id| (tokens.remove(id).unwrap_or_default(), ends[id])).collect()
}

fn text(tokens: &[u32]) -> String {
    let tokenizer = tokenizer();
    let tokens: Vec<u32> = tokens.iter().copied().filter(|id| !tokenizer.eos_ids().contains(id)).collect();
    tokenizer.decode(&tokens).unwrap()
}

fn schema() -> Value {
    json!({"type": "object", "required": ["kind", "ok", "tags", "at"], "additionalProperties": false, "properties": {
        "kind": {"enum": ["otter", "sea \"lion\"", "ä日"]},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
        "at": {"$ref": "#/$defs/at"}},
        "$defs": {"at": {"type": "integer", "minimum": -20, "maximum": 300}}})
}

fn expect_valid(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let kinds = [json!("otter"), json!("sea \"lion\""), json!("ä日")];
    let tags = value["tags"].as_array().unwrap();
    let is_short = |tag: &Value| tag.as_str().is_some_and(|tag| tag.chars().count() <= 2);
    assert!(kinds.contains(&value["kind"]) && value["ok"].is_boolean(), "{text}");
    assert!(tags.len() <= 2 && tags.iter().all(is_short), "{text}");
    assert!((-20..=300).contains(&value["at"].as_i64().unwrap()) && value.as_object().unwrap().len() == 4, "{text}");
}

/// Requests are computed in batches, with preemption, and with requests without a grammar, whose tokens stay the same.
#[test]
fn completions_stay_within_their_grammar() {
    let grammars = Grammars::new(&tokenizer(), VOCABULARY).unwrap();
    let json = grammars.json(&schema()).unwrap();
    let regex = grammars.regex("[a-f]{3,9}-\\d+!").unwrap();
    let choice = grammars.choice(&["yes", "no.", "日本 (*)", "yes, sir"]).unwrap();
    let of = |seed: u64| match seed % 5 {
        0 => None,
        1 => Some(regex.clone()),
        2 => Some(choice.clone()),
        _ => Some(json.clone()),
    };
    let requests = || (0..60).map(|seed| request(seed, of(seed))).collect::<Vec<_>>();
    let mut small = engine(320, 8);
    let found = run(&mut small, requests());
    assert!(small.stats().preemptions > 0, "{:?}", small.stats());
    for (seed, (tokens, end)) in found.iter().enumerate() {
        let text = text(tokens);
        match seed % 5 {
            0 => assert!(*end == FinishReason::Length || tokens.len() < 90),
            _ if *end == FinishReason::Length => assert_eq!(tokens.len(), 90, "{text}"),
            1 => assert!(text.ends_with('!') && text.contains('-') && "abcdef".contains(&text[..1]), "{text}"),
            2 => assert!(["yes", "no.", "日本 (*)", "yes, sir"].contains(&text.as_str()), "{text}"),
            _ => expect_valid(&text),
        }
    }
    let complete = found.iter().filter(|(_, end)| *end == FinishReason::Stop).count();
    assert!(complete >= 36, "{complete} of 48 are complete");
    // Each request gets the same result alone.
    let mut roomy = engine(2000, 1);
    let alone: Vec<_> = requests().into_iter().flat_map(|request| run(&mut roomy, vec![request])).collect();
    assert_eq!(alone, found);
}

#[test]
fn greedy_completions_and_log_probabilities_work_with_a_grammar() {
    let grammars = Grammars::new(&tokenizer(), VOCABULARY).unwrap();
    let choice = grammars.choice(&["first", "second"]).unwrap();
    let greedy = Request { sampling: Sampling::default(), logprobs: Some(2), ..request(0, Some(choice)) };
    let mut engine = engine(2000, 2);
    let found = run(&mut engine, vec![greedy.clone(), Request { logprobs: None, ..greedy }]);
    assert_eq!(found[0], found[1]);
    assert!(["first", "second"].contains(&text(&found[0].0).as_str()) && found[0].1 == FinishReason::Stop);
}

#[test]
fn grammars_that_cannot_be_used_are_errors() {
    let grammars = Grammars::new(&tokenizer(), VOCABULARY).unwrap();
    for schema in [json!("text"), json!({"type": "nothing"}), json!({"$ref": "https://schemas.example/a"})] {
        grammars.json(&schema).unwrap_err();
    }
    let multiple = |of: Value| json!({"type": "integer", "multipleOf": of});
    let fields =
        |of: u64| json!({"type": "object", "properties": {"a": multiple(of.into()), "b": multiple(of.into())}});
    // Nine million remainders would take minutes and gigabytes.
    let meeting = json!({"allOf": [multiple(97.into()), multiple(101.into()), multiple(103.into())]});
    for schema in [multiple(9_999_991.into()), fields(9_001), meeting] {
        let error = grammars.json(&schema).unwrap_err().to_string();
        assert!(error.contains("`multipleOf`"), "{error}");
    }
    let met = json!({"allOf": [multiple(50.into()), multiple(100.into())]});
    [multiple(0.01.into()), fields(100), met].iter().for_each(|schema| drop(grammars.json(schema).unwrap()));
    for wrong in ["(", "[b-a]", "a)"] {
        grammars.regex(wrong).unwrap_err();
    }
    grammars.choice(&["a", ""]).unwrap_err();
}

/// The tokenizer has tokens for all bytes, but the model has rows for only a few of them.
#[test]
fn a_text_that_cannot_go_on_is_stuck() {
    let (tokenizer, text) = (tokenizer(), "aÿ");
    let ids = tokenizer.encode(text).unwrap();
    let end = |vocabulary| {
        let grammar = Grammars::new(&tokenizer, vocabulary).unwrap().choice(&[text]).unwrap();
        let request = Request { stop_ids: Vec::new(), ..request(0, Some(grammar)) };
        run(&mut engine_of(vocabulary, 64, 1), vec![request]).remove(0)
    };
    let highest = *ids.iter().max().unwrap() as usize;
    assert_eq!(end(highest), (vec![ids[0]], FinishReason::Stuck));
    assert_eq!(end(highest + 1), (ids, FinishReason::Stop));
}
