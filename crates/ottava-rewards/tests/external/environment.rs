//! Commands as environments.

use crate::with_samples;
use ottava_common::Error;
use ottava_rewards::{CommandConfig, Deadline, Environment, Episode, OnError, Prompt, Sample, Step, Steps};
use serde_json::json;
use std::time::{Duration, Instant};

fn answer(config: &CommandConfig) -> ottava_common::Result<Steps> {
    let mut environment: Box<dyn Environment> = config.environment("game")?;
    let messages = [json!({ "role": "assistant", "content": "left" })];
    with_samples(2, |samples| {
        let episodes: Vec<_> = samples
            .iter()
            .map(|sample| Episode {
                sample: Sample { environment: Some(0.5), ..*sample },
                turn: 1,
                last: false,
                messages: &messages,
            })
            .collect();
        environment.step(&episodes, Deadline::never())
    })
}

fn steps(script: &str, on_error: OnError) -> ottava_common::Result<Steps> {
    answer(&CommandConfig { on_error, attempts: 1, ..CommandConfig::new(&["sh", "-c", script]) })
}

#[test]
fn an_environment_answers_turns() {
    let script = r#"read -r line
        case "$line" in *'"type":"step"'*'"completion":"c0"'*'"environment":0.5'*'"turn":1,"last":false,"messages":[{"role":"assistant","content":"left"}]'*) ;; *) exit 1;; esac
        echo '{"id":0,"steps":[{"done":false,"message":"a wall"},{"done":true,"reward":1.5}],"metrics":{"walls":3}}'"#;
    let found = steps(script, OnError::Stop).unwrap();
    let expected = [
        Step { done: false, message: Some(Prompt::Text("a wall".into())), reward: None },
        Step { done: true, message: None, reward: Some(1.5) },
    ];
    assert_eq!(found.steps, expected);
    assert_eq!(found.metrics, [("failed".into(), 0.0), ("walls".into(), 3.0)].into());
}

#[test]
fn wrong_steps_are_named_and_the_policy_decides() {
    let write = |steps: &str| format!("read -r line; echo '{{\"id\":0,\"steps\":{steps}}}'; sleep 60");
    for (script, words) in [
        (
            write(r#"[{"done":true},{"done":false}]"#),
            "the step of completion 1 of prompt 7 is not done and has no message",
        ),
        (write(r#"[{"done":true}]"#), "the answer has 1 steps for 2 samples"),
        (
            write(r#"[{"done":true},{"done":false,"message":3}]"#),
            "the message of completion 1 of prompt 7 is 3; it is a text",
        ),
        (write(r#"[{"done":true},{"done":false,"message":[]}]"#), "is []; it is a text, or a list of messages"),
        (write(r#"[{"done":true},{"done":false,"message":[{"content":"a"}]}]"#), "a list of messages with `role`"),
        (write(r#"[{"done":true},{"done":true,"reward":NaN}]"#), "NaN and Infinity are no JSON"),
        (write(r#"[{"done":true},{"done":true,"reward":1e999}]"#), "the answer is none"),
        (write(r#"[{"done":true},{"done":true,"text":"a"}]"#), "unknown field `text`"),
        (r#"read -r line; echo '{"id":0,"rewards":[1,1]}'"#.into(), "the answer has no `steps`"),
        ("echo 'Traceback: boom' >&2; exit 3".into(), "it ended with exit code 3"),
        ("exec >&-; sleep 60".into(), "it closed its output"),
    ] {
        let began = Instant::now();
        let error = steps(&script, OnError::Stop).unwrap_err();
        assert!(matches!(error, Error::External(_)), "{error:?}");
        assert!(error.to_string().contains(words), "{script}: {error}");
        assert!(began.elapsed() < Duration::from_secs(10), "{script}: {:?}", began.elapsed());
    }
    let failed = "read -r line; exit 1";
    for (on_error, reward) in [(OnError::Zero, Some(0.0)), (OnError::Skip, None)] {
        let Steps { steps, metrics } = steps(failed, on_error).unwrap();
        assert_eq!(steps, vec![Step { done: true, message: None, reward }; 2]);
        assert_eq!(metrics["failed"], 1.0);
    }
}

#[test]
fn an_environment_that_hangs_is_replaced() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hang-{}", std::process::id()));
    std::fs::remove_file(&file).ok();
    let script = format!(
        r#"[ -e {0} ] || {{ touch {0}; sleep 60; }}
        while read -r line; do id=${{line#*:}}; id=${{id%%,*}}; echo "{{\"id\":$id,\"steps\":[{{\"done\":true}},{{\"done\":true}}]}}"; done"#,
        file.display()
    );
    let config = CommandConfig { timeout: 0.3, attempts: 2, ..CommandConfig::new(&["sh", "-c", &script]) };
    assert_eq!(answer(&config).unwrap().steps.len(), 2);
}
