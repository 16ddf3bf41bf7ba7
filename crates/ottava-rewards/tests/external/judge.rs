//! The reward `judge`.

use crate::score;
use ottava_http::testing::{Server, reply};
use ottava_rewards::{Deadline, Scored};
use serde_json::{Value, json};

/// Scores two completions by a judge who writes what `judgement` makes of the number of the request and of its message.
fn run(
    judgement: impl Fn(usize, &str) -> Value + Send + Sync + 'static,
    more: &str,
) -> (ottava_common::Result<Scored>, Server) {
    let server = Server::start(move |number, request| {
        let body: Value = serde_json::from_str(&request.body).unwrap();
        let message = body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap().to_string();
        reply(200, "", &json!({ "choices": [{ "message": { "content": judgement(number, &message) } }] }).to_string())
    });
    let template = "Q: {prompt}\nA: {completion}\nRight: {answer}\nRubric: {rubric} {{1}}";
    let settings =
        format!("type = 'judge'\nurl = '{}'\nmodel = 'm'\ntemplate = '''{template}'''\n{more}", server.url("/v1/"));
    (score(&settings, 2, Deadline::never()), server)
}

#[test]
fn a_judge_is_asked_by_the_template_and_its_last_score_counts() {
    let judgement = |_: usize, message: &str| {
        let expected = |index| format!("Q: user: two?\nA: c{index}\nRight: 2\nRubric: be {{brief}} {{1}}");
        let index = usize::from(message.contains("c1"));
        assert_eq!(message, expected(index));
        json!(format!("Score: 1? No.\n**Score:** {}.5", index + 6))
    };
    let (scored, server) = run(judgement, "system = 'You judge.'\nconcurrency = 1");
    assert_eq!(scored.unwrap().totals, [Some(6.5), Some(7.5)]);
    let request = server.received().remove(0);
    assert!(request.head.starts_with("POST /v1/chat/completions "), "{}", request.head);
    let body: Value = serde_json::from_str(&request.body).unwrap();
    assert_eq!((&body["model"], &body["temperature"]), (&json!("m"), &json!(0.0)));
    assert_eq!(body["messages"][0], json!({ "role": "system", "content": "You judge." }));
}

#[test]
fn a_judgement_without_a_score_in_range_is_a_failed_attempt() {
    let (scored, server) = run(|number, _| json!(if number < 2 { "Score: 11" } else { "score 3" }), "attempts = 2");
    assert_eq!((scored.unwrap().totals, server.received().len()), (vec![Some(3.0); 2], 4));
    for (judgement, words) in [
        (json!("fine"), "the judgement has no score that `score_pattern` matches: fine"),
        (json!("Score: -1"), "score -1 is outside of `score_range`"),
        (json!(null), "the answer has no choices[0].message.content"),
    ] {
        let own = judgement.clone();
        let (scored, _server) = run(move |_, _| own.clone(), "attempts = 1");
        let error = scored.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        let (scored, _server) = run(move |_, _| judgement.clone(), "attempts = 1\non_error = 'skip'");
        assert_eq!(scored.unwrap().totals, [None, None]);
    }
}

#[test]
fn a_template_with_a_missing_column_is_an_error_of_the_data() {
    let settings = "type = 'judge'\nurl = 'http://127.0.0.1:1'\nmodel = 'm'\ntemplate = '{criteria}'";
    let error = score(settings, 1, Deadline::never()).unwrap_err();
    assert!(matches!(error, ottava_common::Error::Data(_)), "{error:?}");
    assert!(error.to_string().contains("completion 0 of prompt 7 has no column `criteria`"), "{error}");
}
