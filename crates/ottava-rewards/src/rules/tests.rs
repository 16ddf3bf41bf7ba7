//! Each rule by a table of completions, and hostile completions.

use crate::spec::RewardSpec;
use crate::{Deadline, Prompt, Sample};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The score of a completion of `tokens` tokens by the reward of these settings.
fn score_of_length(settings: &str, completion: &str, answer: &Value, tokens: usize) -> Option<f64> {
    let spec: RewardSpec = toml::from_str(settings).unwrap();
    let mut rewards = RewardSpec::build(&[spec]).unwrap();
    let (prompt, record) = (Prompt::Text(String::new()), json!({ "answer": answer }).as_object().unwrap().clone());
    let sample = Sample {
        prompt: &prompt,
        completion,
        completion_ids: &vec![1; tokens],
        model_scores: &[],
        truncated: false,
        group: 7,
        index: 2,
        step: 0,
        environment: None,
        record: &record,
    };
    rewards.score(&[sample], Deadline::never()).unwrap().totals[0]
}

fn score(settings: &str, completion: &str, answer: &Value) -> Option<f64> {
    score_of_length(settings, completion, answer, 0)
}

/// Checks `(completion, right answer, score)` by the reward of these settings.
fn check(settings: &str, cases: &[(&str, Value, Option<f64>)]) {
    for (completion, answer, expected) in cases {
        assert_eq!(score(settings, completion, answer), *expected, "{settings}: {completion} for {answer}");
    }
}

const RIGHT: Option<f64> = Some(1.0);
const WRONG: Option<f64> = Some(0.0);

#[test]
fn a_name_with_dots_is_a_field_of_an_object() {
    let of = |answer: &str| {
        let spec = toml::from_str::<RewardSpec>(&format!("type = 'exact'\nanswer = '{answer}'")).unwrap();
        let record = json!({"reward_model": {"style": "rule", "ground_truth": "4"}, "a.b": "4", "a": {"b": "5"}});
        let (prompt, record) = (Prompt::Text(String::new()), record.as_object().unwrap().clone());
        let (completion, completion_ids) = ("4", &[1][..]);
        let (truncated, group, index, step, environment, model_scores) = (false, 7, 2, 0, None, &[][..]);
        let (prompt, record) = (&prompt, &record);
        let sample = Sample {
            prompt,
            completion,
            completion_ids,
            truncated,
            group,
            index,
            step,
            environment,
            record,
            model_scores,
        };
        let scored = RewardSpec::build(&[spec]).unwrap().score(&[sample], Deadline::never());
        scored.map(|scored| scored.totals[0]).map_err(|error| error.to_string())
    };
    assert_eq!(of("reward_model.ground_truth"), Ok(RIGHT));
    assert_eq!(of("a.b"), Ok(RIGHT), "a column of this name comes first");
    assert!(of("reward_model.other").unwrap_err().contains("has no column `reward_model.other`"));
}

#[test]
fn exact_compares_letters_and_ignores_what_it_is_told() {
    check(
        "type = 'exact'",
        &[
            (" Paris\n", json!("Paris"), RIGHT),
            ("paris", json!("Paris"), WRONG),
            ("Paris.", json!("Paris"), WRONG),
            ("3", json!(3), RIGHT),
            ("true", json!(true), RIGHT),
            ("b", json!(["a", "b"]), RIGHT),
        ],
    );
    let lenient = "type = 'exact'\nignore_case = true\nignore_whitespace = true\nignore_punctuation = true";
    check(lenient, &[("  new \n york!", json!("New York"), RIGHT), ("new-york", json!("New York"), WRONG)]);
    check(
        "type = 'exact'\nextract = 'tag:answer'",
        &[
            ("<answer>no</answer> <answer> yes </answer>", json!("yes"), RIGHT),
            ("yes", json!("yes"), WRONG),
            ("</answer>yes<answer>", json!("yes"), WRONG),
        ],
    );
    check(
        "type = 'exact'\nextract = 'boxed'",
        &[
            ("\\boxed{a} then \\boxed{b{c}\\}d}", json!("b{c}\\}d"), RIGHT),
            ("\\boxed{a", json!("a"), WRONG),
            ("\\boxed a", json!("a"), WRONG),
        ],
    );
}

#[test]
fn number_compares_values() {
    check(
        "type = 'number'",
        &[
            ("so 3 of 4, that is 1,200.50 in all.", json!("1200.5"), RIGHT),
            ("0.5", json!("1/2"), RIGHT),
            ("It is 50%", json!(50), RIGHT),
            ("It is 50%", json!("0.5"), RIGHT),
            ("-3", json!(3), WRONG),
            ("no idea", json!(3), WRONG),
            ("3", json!("no number"), None),
            ("4", json!([3, 4]), RIGHT),
        ],
    );
    check(
        "type = 'number'\nextract = 'after:####'",
        &[("2+2\n#### 4\nthen 5", json!("reasons 9\n#### 4"), RIGHT), ("4", json!("#### 4"), WRONG)],
    );
    check("type = 'number'\ntolerance = 0.01", &[("3.14", json!(3.15), RIGHT), ("3.10", json!(3.15), WRONG)]);
}

#[test]
fn math_is_not_scored_only_if_the_right_answer_is_outside_of_the_grammar() {
    check(
        "type = 'math'",
        &[
            ("so \\boxed{\\frac{2}{4}}.", json!("0.5"), RIGHT),
            ("\\boxed{2\\sqrt3}", json!("We get $\\boxed{\\sqrt{12}}$."), RIGHT),
            ("\\boxed{0.333}", json!("1/3"), WRONG),
            ("0.5", json!("0.5"), WRONG),
            ("\\boxed{I refuse}", json!("0.5"), WRONG),
            ("\\boxed{ x + 1}", json!("x+1"), RIGHT),
            ("\\boxed{1+x}", json!("x+1"), None),
            ("\\boxed{1+x}", json!(["x+1", "2"]), None),
            ("\\boxed{2}", json!(["x+1", "2"]), RIGHT),
            ("nothing", json!("x+1"), WRONG),
        ],
    );
    check("type = 'math'\nunits = ['apples']", &[("\\boxed{3\\text{ apples}}", json!("3"), RIGHT)]);
    check("type = 'math'", &[("\\boxed{3\\text{ apples}}", json!("3"), WRONG)]);
}

#[test]
fn regex_matches_the_whole_or_a_part() {
    check(
        "type = 'regex'\npattern = 'a.c|d'",
        &[("a\nc", json!(""), RIGHT), ("xd", json!(""), WRONG), ("d", json!(""), RIGHT)],
    );
    check("type = 'regex'\npattern = 'd$'\nmatch = 'search'", &[("xd", json!(""), RIGHT), ("dx", json!(""), WRONG)]);
    check("type = 'regex'\npattern = 'a.c'\ndot_matches_new_line = false", &[("a\nc", json!(""), WRONG)]);
}

#[test]
fn format_wants_each_tag_once_and_nothing_else() {
    check(
        "type = 'format'",
        &[
            ("<think>a</think><answer>b</answer>", json!(""), RIGHT),
            ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", json!(""), RIGHT),
            ("<answer>b</answer><think>a</think>", json!(""), WRONG),
            ("<think>a</think> so <answer>b</answer>", json!(""), WRONG),
            ("<think>a</think><answer>b</answer> more", json!(""), WRONG),
            ("<think>a<think></think><answer>b</answer>", json!(""), WRONG),
            ("<think>a</think><answer>b</answer><answer>b</answer>", json!(""), WRONG),
            ("<think>a<answer></think><answer>b</answer>", json!(""), WRONG),
            ("a</think><answer>b</answer>", json!(""), WRONG),
        ],
    );
    let open = "type = 'format'\nfirst_tag_in_prompt = true";
    check(
        open,
        &[("a</think><answer>b</answer>", json!(""), RIGHT), ("<think>a</think><answer>b</answer>", json!(""), WRONG)],
    );
}

#[test]
fn lengths_are_shaped_as_in_dapo() {
    let overlong = |tokens| score_of_length("type = 'overlong'\nmax_length = 20\nbuffer = 4", "", &json!(""), tokens);
    let expected = [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (21, -1.0), (900, -1.0)];
    for (tokens, reward) in expected {
        assert_eq!(overlong(tokens), Some(reward), "{tokens}");
    }
    let length = |tokens| score_of_length("type = 'length'\ntarget = 10\ndistance = 4", "", &json!(""), tokens);
    for (tokens, reward) in [(10, 0.0), (9, -0.25), (12, -0.5), (6, -1.0), (99, -1.0)] {
        assert_eq!(length(tokens), Some(reward), "{tokens}");
    }
}

#[test]
fn repeated_ngrams_are_punished() {
    let score = |ngram: usize, tokens: &[u32]| {
        let spec: RewardSpec = toml::from_str(&format!("type = 'repetition'\nngram = {ngram}")).unwrap();
        let (prompt, record) = (Prompt::Text(String::new()), serde_json::Map::new());
        let sample = Sample {
            prompt: &prompt,
            completion: "",
            completion_ids: tokens,
            model_scores: &[],
            truncated: false,
            group: 0,
            index: 0,
            step: 0,
            environment: None,
            record: &record,
        };
        RewardSpec::build(&[spec]).unwrap().score(&[sample], Deadline::never()).unwrap().totals[0].unwrap()
    };
    assert_eq!(score(2, &[1, 2, 3, 4, 5]), 0.0);
    assert_eq!(score(2, &[1, 2, 1, 2, 1]), -0.5, "two of four pairs are new");
    assert_eq!(score(1, &[7; 4]), -0.75);
    assert_eq!((score(3, &[1, 2]), score(1, &[])), (0.0, 0.0), "too short for an n-gram");
}

#[test]
fn a_record_without_the_column_is_an_error_that_names_it() {
    let (prompt, record) =
        (Prompt::Text("p".into()), json!({ "solution": 1, "id": [{}] }).as_object().unwrap().clone());
    let sample = Sample {
        prompt: &prompt,
        completion: "",
        completion_ids: &[],
        model_scores: &[],
        truncated: false,
        group: 7,
        index: 2,
        step: 0,
        environment: None,
        record: &record,
    };
    for (settings, words) in [
        ("type = 'exact'", "the record of completion 2 of prompt 7 has no column `answer`; it has: solution, id"),
        ("type = 'math'\nanswer = 'id'", "column `id` holds neither"),
    ] {
        let mut rewards = RewardSpec::build(&[toml::from_str(settings).unwrap()]).unwrap();
        let error = rewards.score(&[sample], Deadline::never()).unwrap_err();
        assert!(matches!(&error, ottava_common::Error::Data(found) if found.contains(words)), "{error}");
    }
}

#[test]
fn long_completions_are_scored_in_time() {
    let rewards = [
        "type = 'exact'\nignore_case = true\nignore_whitespace = true\nignore_punctuation = true",
        "type = 'number'",
        "type = 'number'\nextract = 'boxed'",
        "type = 'math'",
        "type = 'math'\nextract = 'whole'",
        "type = 'regex'\npattern = '(a|a)*(a|aa)+b?'",
        "type = 'format'",
    ];
    for part in [
        "a",
        "9",
        "1 ",
        "1,",
        "\\boxed{",
        "\\boxed{}",
        "{",
        "<think>",
        "</think>",
        "\u{10348}",
        "-",
        "1/",
        "\\frac{1}{",
        " ",
    ] {
        let completion = part.repeat(500_000 / part.len());
        for settings in rewards {
            let began = Instant::now();
            score(settings, &completion, &json!("1"));
            assert!(began.elapsed() < Duration::from_secs(2), "{settings}, {part}: {:?}", began.elapsed());
        }
    }
}
