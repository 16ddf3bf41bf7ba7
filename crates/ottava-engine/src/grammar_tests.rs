//! Draws from the tokens that grammars allow. Draws are uniform, as from a model at an infinite temperature, so each construct is tested without a model.

use super::*;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

const DRAWS: u64 = 200;
const MOST_TOKENS: usize = 400;

static TOKENIZER: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap());
static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| Grammars::new(&TOKENIZER, 4096).unwrap());

/// Pseudo-random numbers (Knuth's 64-bit linear congruential generator).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end
    }
}

/// Draws a text. A quarter of the draws ends the text where it may end, and a quarter begins one of `hints`, which free text would not write by chance.
fn draw(grammar: &Grammar, seed: u64, hints: &[&str]) -> String {
    let (mut grammar, mut numbers, mut tokens) = (grammar.clone(), Numbers(seed), Vec::new());
    let ends = TOKENIZER.eos_ids();
    let mut planned: Vec<u32> = Vec::new();
    while tokens.len() < MOST_TOKENS {
        let allowed = match grammar.allowed() {
            Ok(allowed) => allowed,
            Err(Place::Complete) => break,
            Err(place) => panic!("{place:?} after {:?}", TOKENIZER.decode(&tokens)),
        };
        let choices: Vec<u32> = (0..4096).filter(|&token| allowed.allows(token)).collect();
        if planned.is_empty() && !hints.is_empty() && numbers.below(4) == 0 {
            planned = TOKENIZER.encode(hints[numbers.below(hints.len())]).unwrap();
            planned.reverse();
        }
        let end = choices.iter().find(|token| ends.contains(token)).filter(|_| numbers.below(4) == 0).copied();
        let token = planned.pop().filter(|token| allowed.allows(*token)).or(end);
        let token = token.unwrap_or_else(|| choices[numbers.below(choices.len())]);
        if !ends.contains(&token) {
            tokens.push(token);
        }
        match grammar.push(token) {
            Place::Open if ends.contains(&token) => break,
            Place::Open => {}
            Place::Complete => break,
            Place::Stuck => panic!("stuck after {:?}", TOKENIZER.decode(&tokens)),
        }
    }
    assert!(tokens.len() < MOST_TOKENS, "no end: {:?}", TOKENIZER.decode(&tokens));
    TOKENIZER.decode(&tokens).unwrap()
}

/// Draws texts, and asserts that all of them are valid. Returns them.
fn expect_valid(grammar: Grammar, hints: &[&str], is_valid: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let texts: Vec<String> = (0..DRAWS).map(|seed| draw(&grammar, seed, hints)).collect();
    for text in &texts {
        assert!(is_valid(text), "{text:?} does not match {:?}", grammar.source);
    }
    texts.into_iter().collect()
}

/// Whether a text is a sum of numbers and of sums in brackets. Removes what it reads.
fn is_sum(text: &mut &str) -> bool {
    loop {
        if let Some(inside) = text.strip_prefix('(') {
            *text = inside;
            if !is_sum(text) || !text.starts_with(')') {
                return false;
            }
            *text = &text[1..];
        } else {
            let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
            if rest.len() == text.len() {
                return false;
            }
            *text = rest;
        }
        match text.strip_prefix(" + ") {
            Some(rest) => *text = rest,
            None => return true,
        }
    }
}

fn is_whole_sum(mut text: &str) -> bool {
    is_sum(&mut text) && text.is_empty()
}

#[test]
fn draws_match_grammars_of_gbnf_and_ebnf() {
    let regular = "root ::= [0-9]{1,3} (\"-\" part)? \"ü!\" # a comment\npart ::= [^0-9\\x00-\\x7f] | \"q\\\"\"\n";
    let texts = expect_valid(GRAMMARS.rules(regular).unwrap(), &[], |text| {
        let Some(inside) = text.strip_suffix("ü!") else { return false };
        let (number, part) = inside.split_once('-').map_or((inside, None), |(number, part)| (number, Some(part)));
        let is_part = |part: &str| part == "q\"" || part.chars().count() == 1 && !part.is_ascii();
        (1..=3).contains(&number.len()) && number.parse::<u16>().is_ok() && part.is_none_or(is_part)
    });
    assert!(texts.len() > 50, "{texts:?}");
    let sums = "root ::= term (\" + \" term)*\n\nterm ::= [0-9]+ | \"(\" root \")\"";
    let texts = expect_valid(GRAMMARS.rules(sums).unwrap(), &[], is_whole_sum);
    assert!(texts.iter().any(|text| text.contains('(')) && texts.iter().any(|text| text.contains(" + ")));
    // Each alternative can be reached, though one begins like another.
    let prefixes = "root ::= pair | \"(\" root \")\"\npair ::= [ab] \"bd\" | \"abc\"";
    let pairs = ["abd", "bbd", "abc"];
    let texts = expect_valid(GRAMMARS.rules(prefixes).unwrap(), &pairs, |text| {
        let pair = text.trim_matches(|c| "()".contains(c));
        text.matches('(').count() == text.matches(')').count() && pairs.contains(&pair)
    });
    assert!(pairs.iter().all(|pair| texts.contains(*pair)), "{texts:?}");
}

#[test]
fn draws_match_grammars_of_lark() {
    let sums = "start: term (\" + \" term)*\nterm: INT | \"(\" start \")\"\n%import common.INT\n";
    expect_valid(GRAMMARS.rules(sums).unwrap(), &[], is_whole_sum);
    let json = "start: \"v=\" %json {\"type\": \"boolean\"}";
    let texts = expect_valid(GRAMMARS.rules(json).unwrap(), &[], |text| ["v=true", "v=false"].contains(&text));
    assert_eq!(texts.len(), 2);
    for (text, words) in [
        ("start: \"a\"\nb: %nothing", "line 2, column "),
        ("start: a", "line 1, column 8: "),
        ("root ::= (", "line 1, column 10: "),
    ] {
        let error = GRAMMARS.rules(text).unwrap_err().to_string();
        assert!(error.contains(words) && !error.contains('\n'), "{text}: {error}");
    }
}

/// Whether all texts that begin with `trigger` are calls `<f=NAME>JSON</f>`, with a number as `at`.
fn has_valid_calls(text: &str) -> bool {
    text.split("<f=").skip(1).all(|call| {
        let Some((name, rest)) = call.split_once('>') else { return false };
        let Some((inside, _)) = rest.split_once("</f>") else { return false };
        let json: Value = serde_json::from_str(inside).unwrap_or_default();
        match name {
            "dive" => json["at"].is_u64() && json.as_object().is_some_and(|fields| fields.len() == 1),
            "rise" => json == json!({}),
            _ => false,
        }
    })
}

#[test]
fn draws_match_structural_tags() {
    let at = json!({"type": "object", "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["at"],
        "additionalProperties": false});
    let none = json!({"type": "object", "additionalProperties": false});
    let structures = json!([{"begin": "<f=dive>", "schema": at, "end": "</f>"}, {"begin": "<f=rise>", "schema": none, "end": "</f>"}]);
    let earlier = json!({"type": "structural_tag", "structures": structures, "triggers": ["<f="]});
    let hints = ["<f=", "<f=dive>", " so "];
    let texts = expect_valid(GRAMMARS.structural_tag(&earlier).unwrap(), &hints, has_valid_calls);
    assert!(texts.iter().filter(|text| text.contains("</f>")).count() > 20, "{texts:?}");
    assert!(texts.iter().any(|text| !text.contains('<')));

    let tag = |name: &str, schema: &Value| json!({"type": "tag", "begin": format!("<f={name}>"), "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"});
    let tags = json!([tag("dive", &at), tag("rise", &none)]);
    let calls = |text: &str| text.matches("</f>").count();
    let with = |fields: Value| {
        let mut format = json!({"type": "triggered_tags", "triggers": ["<f="], "tags": tags});
        format.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        GRAMMARS.structural_tag(&json!({"format": format})).unwrap()
    };
    let one = with(json!({"at_least_one": true, "stop_after_first": true}));
    expect_valid(one, &hints, |text| has_valid_calls(text) && calls(text) == 1 && text.ends_with("</f>"));
    expect_valid(with(json!({"at_least_one": true})), &hints, |text| has_valid_calls(text) && calls(text) >= 1);

    let separated = json!({"type": "tags_with_separator", "tags": tags, "separator": ", ", "at_least_one": true});
    let sequence = json!({"format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "a\"/"}, {"type": "or", "elements": [{"type": "regex", "pattern": "[/x]{2}"},
            {"type": "grammar", "grammar": "root ::= \"[\" root \"]\" | \"y\""}]},
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "</s>"]}, separated]}});
    expect_valid(GRAMMARS.structural_tag(&sequence).unwrap(), &["</t>", "</s>", "<f="], |text| {
        let Some((begin, rest)) = text.split_once("<t>") else { return false };
        let ends = ["</t>", "</s>"].map(|end| rest.find(end)).into_iter().flatten().min();
        let Some(tags) = ends.map(|end| &rest[end + 4..]) else { return false };
        let begin = begin.strip_prefix("a\"/").unwrap_or_default();
        let is_begin =
            begin.len() == 2 && begin.chars().all(|c| "/x".contains(c)) || begin.trim_matches(['[', ']']) == "y";
        let parts: Vec<&str> = tags.split(", <").collect();
        is_begin
            && parts.len() == calls(tags)
            && tags.starts_with("<f=")
            && tags.ends_with("</f>")
            && has_valid_calls(tags)
    });
}

#[test]
fn structural_tags_that_cannot_be_used_are_errors() {
    let tag = json!({"begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"});
    for (format, words) in [
        (json!({}), "the `type` of a format"),
        (json!({"type": "dance"}), "`dance` is not implemented"),
        (json!({"type": "triggered_tags", "triggers": ["<b"], "tags": [tag]}), "no trigger begins the tag \"<a>\""),
        (json!({"type": "triggered_tags", "triggers": [], "tags": [tag]}), "`triggers` is missing or empty"),
        (json!({"type": "sequence", "elements": [{"type": "any_text"}, tag]}), "`any_text` is for the end"),
        (json!({"type": "tag", "begin": "a", "content": {"type": "any_text"}}), "`end` of a tag"),
        (json!({"type": "json_schema", "json_schema": 3}), "the schema is no object"),
    ] {
        let error = GRAMMARS.structural_tag(&json!({"format": format})).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    GRAMMARS.structural_tag(&json!({"type": "structural_tag"})).unwrap_err();
}

#[test]
fn draws_match_nested_schemas() {
    let schema = json!({
        "$defs": {"tree": {"type": "object", "required": ["name", "of"], "additionalProperties": false, "properties": {
            "name": {"type": "string", "maxLength": 3},
            "of": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/tree"}}}}},
        "type": "object", "required": ["kind", "trees"], "additionalProperties": false, "properties": {
            "kind": {"anyOf": [{"const": "a"}, {"type": "null"}, {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}]},
            "day": {"type": "string", "format": "date"},
            "trees": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/tree"}}},
    });
    fn is_tree(tree: &Value) -> bool {
        let of = tree["of"].as_array();
        tree["name"].as_str().is_some_and(|name| name.chars().count() <= 3)
            && tree.as_object().unwrap().len() == 2
            && of.is_some_and(|of| of.len() <= 1 && of.iter().all(is_tree))
    }
    let texts = expect_valid(GRAMMARS.json(&schema).unwrap(), &["\"", "]", "]}"], |text| {
        let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
        let is_kind = match &value["kind"] {
            Value::Array(list) => (1..=2).contains(&list.len()) && list.iter().all(Value::is_boolean),
            kind => *kind == "a" || kind.is_null(),
        };
        let day = value.get("day").map_or("2026-11-30", |day| day.as_str().unwrap_or_default());
        let is_day = day.len() == 10 && day.split('-').map(|part| part.parse::<u16>().is_ok()).eq([true; 3]);
        let trees = value["trees"].as_array();
        is_kind && is_day && trees.is_some_and(|trees| (1..=2).contains(&trees.len()) && trees.iter().all(is_tree))
    });
    assert!(texts.iter().any(|text| text.contains("day")) && texts.iter().any(|text| !text.contains("day")));
}

#[test]
fn a_constraint_begins_after_reasoning() {
    let choice = || GRAMMARS.choice(&["yes", "no"]).unwrap();
    let marks = |open| ReasoningMarks { open, close: "</t>", then: None };
    let thinking = choice().after_reasoning(marks(None));
    expect_valid(thinking.clone(), &["</t>", "</t"], |text| {
        let end = text.find("</t>").map(|at| text[at + 4..].trim_start());
        end.is_some_and(|end| ["yes", "no"].contains(&end))
    });
    assert_ne!(thinking, choice());
    // A marker that is no token cannot be told from the beginning of the text; a token can.
    assert_eq!(choice().after_reasoning(marks(Some("<nothing like this>"))), choice());
    let may_think = choice().after_reasoning(marks(Some("line")));
    let texts = expect_valid(may_think, &["line", "</t>"], |text| match text.strip_prefix("line") {
        Some(rest) => rest.split_once("</t>").is_some_and(|(_, end)| ["yes", "no"].contains(&end.trim_start())),
        None => ["yes", "no"].contains(&text),
    });
    assert!(texts.iter().any(|text| text.starts_with("line")) && texts.contains("yes"));
}
