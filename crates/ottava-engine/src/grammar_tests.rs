//! Draws from the tokens that grammars allow. Draws are uniform, as from a model at an infinite temperature, so each construct is tested without a model.

use super::*;
use crate::grammar_limits::MOST_CHAINED;
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

/// Draws a text. A quarter of the draws ends the text if it may end. Another quarter begins one of `hints`, because uniform draws of free text almost never
/// write a hint.
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
    let some = with(json!({"at_least_one": true}));
    let texts = expect_valid(some, &hints, |text| has_valid_calls(text) && text.starts_with("<f="));
    assert!(texts.iter().any(|text| calls(text) > 1) && texts.iter().any(|text| !text.ends_with("</f>")), "{texts:?}");

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
    let triggered = |fields: Value| {
        let mut format = json!({"type": "triggered_tags", "triggers": ["<a"], "tags": [tag]});
        format.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        format
    };
    // Values without effect are no errors.
    GRAMMARS.structural_tag(&json!({"format": triggered(json!({"excludes": [], "stop_after_first": null}))})).unwrap();
    for (format, words) in [
        (json!({}), "the `type` of a format"),
        (json!({"type": "dance"}), "`dance` is not implemented"),
        (json!({"type": "triggered_tags", "triggers": ["<b"], "tags": [tag]}), "no trigger begins the tag \"<a>\""),
        (json!({"type": "triggered_tags", "triggers": [], "tags": [tag]}), "`triggers` is missing or empty"),
        (json!({"type": "sequence", "elements": [{"type": "any_text"}, tag]}), "`any_text` is for the end"),
        (json!({"type": "tag", "begin": "a", "content": {"type": "any_text"}}), "`end` of a tag"),
        (json!({"type": "json_schema", "json_schema": 3}), "the schema is no object"),
        (
            json!({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}),
            "`json_schema` has \"qwen_xml\" as `style`",
        ),
        (json!({"type": "json_schema", "json_schema": {}, "any_order": true}), "has true as `any_order`"),
        (json!({"type": "any_text", "excludes": ["a"]}), "has [\"a\"] as `excludes`"),
        (json!({"type": "any_text", "max_chars": -3}), "has -3 as `max_chars`"),
        (
            json!({"type": "repeat", "content": {"type": "const_string", "value": "a"}, "min": 2, "max": 1}),
            "`max` from `min`",
        ),
        (json!({"type": "star", "content": {"type": "any_text"}}), "`any_text` is for the end"),
        (json!({"type": "dispatch", "rules": [["a"]]}), "no pair of a text and a format"),
        (
            json!({"type": "dispatch", "rules": [["", {"type": "const_string", "value": "a"}]]}),
            "a trigger is an empty text",
        ),
        (json!({"type": "sequence", "elements": [triggered(json!({})), tag]}), "`triggered_tags` is for the end"),
        (
            json!({"type": "tag", "begin": "", "content": triggered(json!({})), "end": "<"}),
            "the trigger \"<a\" contains the end",
        ),
        (
            json!({"type": "tag", "begin": "", "content": triggered(json!({})), "end": "-<a"}),
            "contains the trigger \"<a\"",
        ),
        (json!({"type": "regex", "pattern": "\\bfoo"}), "at character 2: boundaries of words"),
        (json!({"type": "any_text", "max_tokens": 3}), "has 3 as `max_tokens`"),
        (triggered(json!({"excludes": ["a"]})), "`triggered_tags` has [\"a\"] as `excludes`"),
        (triggered(json!({"stop": true})), "`triggered_tags` has no field `stop`"),
        (triggered(json!({"at_least_one": "true"})), "`at_least_one` is \"true\""),
        (triggered(json!({"triggers": ["<a", "<a>"]})), "the trigger \"<a>\" contains the trigger \"<a\""),
        (triggered(json!({"triggers": ["<a", "<a"]})), "contains the trigger"),
        (
            triggered(json!({"tags": [{"begin": "<a>", "content": {"type": "any_text"}, "end": "", "x": 1}]})),
            "`tag` has no field `x`",
        ),
        (
            triggered(json!({"tags": [{"begin": "<a>", "content": {"type": "any_text"}, "end": ""}]})),
            "`any_text` is for the end",
        ),
        (
            triggered(json!({"tags": [{"begin": "<a>", "content": {"type": "any_text"}, "end": ["", "b"]}]})),
            "an empty text beside",
        ),
        (triggered(json!({"tags": [{"type": "or", "begin": "<a>"}]})), "has \"or\" as `type`"),
        (json!({"type": "regex", "pattern": "a("}), "a("),
    ] {
        let error = GRAMMARS.structural_tag(&json!({"format": format})).unwrap_err().to_string();
        // The user has not written the rules, so errors name none of their lines.
        assert!(error.contains(words) && !error.contains("line 1") && !error.contains('\n'), "{error}");
    }
    GRAMMARS.structural_tag(&json!({"type": "structural_tag"})).unwrap_err();
    let structure = json!({"begin": "<a>", "schema": {}, "end": "</a>", "strict": true});
    let error = GRAMMARS.structural_tag(&json!({"structures": [structure], "triggers": ["<a"]})).unwrap_err();
    assert!(error.to_string().contains("a structure has no field `strict`"), "{error}");
}

#[test]
fn regular_contents_of_tags_end_before_the_text_that_follows() {
    let tag = |content: Value, end: &str| json!({"type": "tag", "begin": "<t>", "content": content, "end": end});
    let any = json!({"type": "grammar", "grammar": "root ::= .*"});
    let parts = json!({"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "[a-z/]*"}]});
    let last = json!({"type": "const_string", "value": "!"});
    for content in [any, parts] {
        let format = json!({"type": "sequence", "elements": [tag(content, "</t>"), last]});
        let grammar = GRAMMARS.structural_tag(&json!({"format": format})).unwrap();
        expect_valid(grammar, &["</t>", "a</t>"], |text| text.find("</t>").is_some_and(|at| &text[at..] == "</t>!"));
    }
    // A tag without an end reaches to the end of the text.
    let format = tag(json!({"type": "any_text"}), "");
    let texts =
        expect_valid(GRAMMARS.structural_tag(&json!({"format": format})).unwrap(), &[], |text| text.starts_with("<t>"));
    assert!(texts.iter().any(|text| text.len() > "<t>".len()), "{texts:?}");
}

#[test]
fn formats_within_a_tag_end_where_the_tag_ends() {
    let at = json!({"type": "object", "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["at"],
        "additionalProperties": false});
    let call = json!({"type": "tag", "begin": "<f=dive>", "content": {"type": "json_schema", "json_schema": at}, "end": "</f>"});
    let around = |content: Value| {
        let tag = json!({"type": "tag", "begin": "<t>", "content": content, "end": ["</t>", "</s>"]});
        let last = json!({"type": "const_string", "value": "!"});
        GRAMMARS.structural_tag(&json!({"format": {"type": "sequence", "elements": [tag, last]}})).unwrap()
    };
    let inside = |text: &str| {
        let inside = text.strip_prefix("<t>")?;
        let end = ["</t>!", "</s>!"].into_iter().find(|end| inside.ends_with(end))?;
        let inside = &inside[..inside.len() - end.len()];
        (!inside.contains("</t>") && !inside.contains("</s>")).then(|| inside.to_string())
    };
    let calls = |text: &str| text.matches("</f>").count();
    // Two ends of three hints keep texts short.
    let hints = ["<f=dive>", "</t>", "</s>"];
    let expect = |content: Value, is_valid: &dyn Fn(&str) -> bool| {
        let texts = expect_valid(around(content), &hints, |text| inside(text).is_some_and(|inside| is_valid(&inside)));
        texts.iter().filter_map(|text| inside(text)).collect::<BTreeSet<String>>()
    };
    let triggered = |at_least_one: bool, stop: bool| {
        json!({"type": "triggered_tags", "triggers": ["<f="], "tags": [call], "at_least_one": at_least_one,
            "stop_after_first": stop, "excludes": ["</t>"]})
    };
    let texts = expect(triggered(false, false), &has_valid_calls);
    assert!(texts.iter().any(|text| calls(text) > 1) && texts.iter().any(|text| !text.contains("<f=")), "{texts:?}");
    expect(triggered(true, false), &|text| has_valid_calls(text) && text.starts_with("<f="));
    expect(triggered(true, true), &|text| has_valid_calls(text) && calls(text) == 1 && text.ends_with("</f>"));
    let texts = expect(triggered(false, true), &|text| has_valid_calls(text) && calls(text) < 2);
    assert!(texts.iter().any(|text| text.ends_with("</f>")) && texts.contains(""), "{texts:?}");
    // Patterns that are followed by any format.
    let rules = json!([["<f=dive>", {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": at},
        {"type": "const_string", "value": "</f>"}]}]]);
    expect(json!({"type": "dispatch", "rules": rules}), &|text| {
        text.split("<f=dive>").skip(1).all(|call| call.contains("</f>"))
    });
    // The inner tag may have the end of the tag around it, which ends after the inner tag only.
    let free = json!({"type": "triggered_tags", "triggers": ["<f="], "tags": [call]});
    let nested = around(json!({"type": "tag", "begin": "<u>", "content": free, "end": "</u>"}));
    let texts = expect_valid(nested, &["<f=dive>", "</u>", "</t>", "</u>"], |text| {
        let rest = text.strip_prefix("<t><u>").and_then(|text| text.split_once("</u>"));
        rest.is_some_and(|(inside, end)| has_valid_calls(inside) && ["</t>!", "</s>!"].contains(&end))
    });
    assert!(texts.iter().any(|text| calls(text) > 0), "{texts:?}");
    let or = json!({"type": "or", "elements": [call, {"type": "sequence", "elements": [
        {"type": "const_string", "value": "x"}, {"type": "any_text", "max_chars": 3}]}]});
    let texts = expect(or, &|text| {
        text.strip_prefix('x').map_or(has_valid_calls(text) && calls(text) == 1, |rest| rest.chars().count() <= 3)
    });
    assert!(texts.iter().any(|text| text.starts_with('x')) && texts.iter().any(|text| calls(text) == 1), "{texts:?}");
    // Repetitions, of expressions and of other formats.
    let letter = json!({"type": "const_string", "value": "x"});
    expect(json!({"type": "repeat", "content": letter, "min": 2, "max": 3}), &|text| ["xx", "xxx"].contains(&text));
    let texts = expect(json!({"type": "star", "content": call}), &|text| {
        has_valid_calls(text) && text.split("</f>").all(|part| part.is_empty() || part.starts_with("<f="))
    });
    assert!(texts.contains("") && texts.iter().any(|text| calls(text) > 1), "{texts:?}");
    let texts = expect(json!({"type": "optional", "content": call}), &|text| has_valid_calls(text) && calls(text) < 2);
    assert!(texts.contains("") && texts.len() > 1, "{texts:?}");
}

#[test]
fn draws_match_expressions_of_other_servers() {
    let texts = expect_valid(GRAMMARS.regex(r"^[\d-x][a&&b]\d\Z").unwrap(), &["-", "x"], |text| {
        let [first, second, third] = text.as_bytes() else { return false };
        (first.is_ascii_digit() || b"-x".contains(first)) && b"a&b".contains(second) && third.is_ascii_digit()
    });
    assert!(texts.iter().any(|text| text.starts_with('-')) && texts.iter().any(|text| text.contains('&')), "{texts:?}");
    let error = GRAMMARS.regex("a)").unwrap_err().to_string();
    assert!(error.contains("unopened group") && !error.contains('\n'), "{error}");
}

#[test]
fn deep_rules_are_compiled_or_refused() {
    let groups = |inside: &str| format!("{}{inside}{}", "(".repeat(28), ")?".repeat(28));
    let chain = |length: usize| {
        let rules = (1..length).map(|i| format!("r{}: {}\n", i - 1, groups(&format!("\"b\" r{i}"))));
        format!("start: r0\n{}r{}: \"a\"\n", rules.collect::<String>(), length - 1)
    };
    GRAMMARS.rules(&chain(MOST_CHAINED - 1)).unwrap();
    let error = GRAMMARS.rules(&chain(MOST_CHAINED)).unwrap_err().to_string();
    assert!(error.contains(&format!("a chain of {} rules", MOST_CHAINED + 1)), "{error}");
    let long = (0..20_000).map(|i| format!("r{i}: \"b\" r{}\n", i + 1)).collect::<String>();
    let long = format!("start: r0\n{long}r20000: \"a\"");
    for tag in [
        json!({"type": "grammar", "grammar": long}),
        json!({"type": "grammar", "grammar": long.replace("start", "root").replace(": ", " ::= ")}),
    ] {
        let error = GRAMMARS.structural_tag(&json!({"format": tag})).unwrap_err().to_string();
        assert!(error.contains("a chain of 2000"), "{error}");
    }
    let tokens = (0..MOST_CHAINED - 2).map(|i| format!("T{i}: \"b\"? T{}\n", i + 1)).collect::<String>();
    let tokens = GRAMMARS.rules(&format!("start: T0\n{tokens}T{}: \"a\"", MOST_CHAINED - 2)).unwrap();
    assert!(draw(&tokens, 0, &["a"]).ends_with('a'));
    // All groups that GBNF allows can be compiled, though Lark and regular expressions allow fewer.
    let nested = format!("root ::= {}\"a\" root?{}", "(\"b\" ".repeat(64), " \"c\")?".repeat(64));
    expect_valid(GRAMMARS.rules(&nested).unwrap(), &["b", "a"], |text| {
        text.matches('b').count() == text.matches('c').count()
    });
}

#[test]
fn remainders_are_limited_in_rules_and_over_all_schemas_of_a_tag() {
    let schema = |number: u64| json!({"type": "integer", "multipleOf": number});
    let error = GRAMMARS.rules(&format!("start: %json {}", schema(20_000))).unwrap_err().to_string();
    assert!(error.contains("20000 remainders"), "{error}");
    let tag = |numbers: [u64; 2]| {
        let elements: Vec<Value> =
            numbers.iter().map(|&number| json!({"type": "json_schema", "json_schema": schema(number)})).collect();
        GRAMMARS.structural_tag(&json!({"format": {"type": "or", "elements": elements}}))
    };
    tag([50, 7]).unwrap();
    let error = tag([6000, 6001]).unwrap_err().to_string();
    assert!(error.contains("12001 remainders"), "{error}");
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
