//! Commands as environments.

use crate::with_samples;
use ottava_rewards::{CommandConfig, Deadline, Environment, Episode, OnError, Step};
use serde_json::json;

fn steps(script: &str, on_error: OnError) -> ottava_common::Result<Vec<Step>> {
    let config = CommandConfig { on_error, attempts: 1, ..CommandConfig::new(&["sh", "-c", script]) };
    let mut environment: Box<dyn Environment> = config.environment("game")?;
    let messages = [json!({ "role": "assistant", "content": "left" })];
    with_samples(2, |samples| {
        let episodes: Vec<_> =
            samples.iter().map(|sample| Episode { sample: *sample, turn: 1, messages: &messages }).collect();
        environment.step(&episodes, Deadline::never())
    })
}

#[test]
fn an_environment_answers_turns() {
    let script = r#"read -r line
        case "$line" in *'"type":"step"'*'"completion":"c0"'*'"turn":1,"messages":[{"role":"assistant","content":"left"}]'*) ;; *) exit 1;; esac
        echo '{"id":0,"steps":[{"done":false,"message":"a wall"},{"done":true,"reward":1.5}]}'"#;
    let found = steps(script, OnError::Stop).unwrap();
    let expected = [
        Step { done: false, message: Some("a wall".into()), reward: None },
        Step { done: true, message: None, reward: Some(1.5) },
    ];
    assert_eq!(found, expected);
}

#[test]
fn wrong_steps_are_named_and_the_policy_decides() {
    let silent = r#"read -r line; echo '{"id":0,"steps":[{"done":true},{"done":false}]}'"#;
    let error = steps(silent, OnError::Stop).unwrap_err().to_string();
    assert!(error.contains("the step of completion 1 of prompt 7 is not done and has no message"), "{error}");
    let rewards = r#"read -r line; echo '{"id":0,"rewards":[1,1]}'"#;
    let error = steps(rewards, OnError::Stop).unwrap_err().to_string();
    assert!(error.contains("the answer has no `steps`"), "{error}");
    for (on_error, reward) in [(OnError::Zero, Some(0.0)), (OnError::Skip, None)] {
        assert_eq!(steps(rewards, on_error).unwrap(), vec![Step { done: true, message: None, reward }; 2]);
    }
}
