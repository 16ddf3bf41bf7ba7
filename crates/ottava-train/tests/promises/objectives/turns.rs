//! Completions of several turns, which an environment answers.

use super::rollouts::{config, values_of, write_inputs};
use crate::runs::resume::{metrics, train};
use crate::setup::on_ranks;
use ottava_common::Error;
use ottava_recipe::RecipeName;
use ottava_rewards::{EnvironmentConfig, OnError};
use ottava_settings::{CorrectionMode, RunConfig};
use ottava_tensor::Device;
use ottava_train::trainer::{Start, Trainer};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Answers each request of one turn. The first turn is right if it begins with `a`, and the environment says `is b`. The second turn is right if it
/// begins with `b`, and then the conversation is over. A right turn has a reward of 0.5, or of 1 if it ends by itself.
const GAME: &str = r#"
while read -r line; do
    id=${line#*:}; id=${id%%,*}
    right=0 whole=0
    case $line in
        *'"completion":"a'*'"turn":0'*|*'"completion":"b'*'"turn":1'*) right=5 ;;
    esac
    case $right$line in 5*'"truncated":false'*) whole=5 ;; esac
    case $line in *'"turn":0'*) done=false ;; *) done=true ;; esac
    reward=$((right + whole))
    echo "{\"id\":$id,\"steps\":[{\"done\":$done,\"message\":\"is b\",\"reward\":${reward}e-1}],\"metrics\":{\"right\":$right}}"
done"#;

/// Returns a run of `steps` steps with the environment `script`.
fn run(inputs: &Path, output: &Path, recipe: RecipeName, steps: u64, script: &str) -> RunConfig {
    let mut config = config(inputs, output, recipe, steps);
    config.data.max_length = 24;
    let reward = "type = 'environment'".parse::<toml::Table>().unwrap().try_into().unwrap();
    let r = &mut config.reinforcement;
    (r.max_completion_length, r.rewards) = (3, vec![reward]);
    r.environment = EnvironmentConfig {
        command: ["sh", "-c", script].map(String::from).to_vec(),
        max_turns: 3,
        batch_size: 1,
        attempts: 1,
        ..EnvironmentConfig::default()
    };
    config
}

fn lines_of(run: &Path) -> Vec<Value> {
    let log = std::fs::read_to_string(run.join("completions.jsonl")).unwrap();
    log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_model_learns_from_an_environment() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let output = folder.path().join("run");
    let mut config = run(folder.path(), &output, RecipeName::Fp8Row, 30, GAME);
    (config.evaluation.num_generations, config.optimizer.learning_rate) = (2, 4e-3);
    train(&config, &Device::Cpu, &Start::New, u64::MAX).unwrap();
    let [rewards, turns, right] = ["reward", "turns/mean", "environment/right"].map(|name| values_of(&output, name));
    assert!(rewards[0] < 0.2 && *rewards.last().unwrap() > 0.9, "{rewards:?}");
    assert!(turns[0] < 1.5 && *turns.last().unwrap() > 1.6 && turns.iter().all(|turns| *turns <= 2.0), "{turns:?}");
    assert!(right.last() > right.first(), "{right:?}");
    let ended = values_of(&output, "turns/ended_by_environment");
    assert!(ended[0] < ended[ended.len() - 1], "{ended:?}");
    // The log-probabilities of the tokens of all turns equal the log-probabilities that the first step of a generation computes.
    let apart = values_of(&output, "sampling/sampling_logp_difference/max");
    assert!(apart.iter().step_by(2).all(|apart| *apart == 0.0), "{apart:?}");
    assert_eq!(values_of(&output, "eval_turns/mean").len(), 2, "evaluations have turns too");
    assert!(values_of(&output, "eval_reward")[1] > 0.9);
    let mut several = 0;
    for line in lines_of(&output) {
        let turns = line["turns"].as_array().unwrap();
        let roles: Vec<&str> = turns.iter().map(|message| message["role"].as_str().unwrap()).collect();
        assert!(roles.iter().step_by(2).all(|role| *role == "assistant"), "{line}");
        assert!(turns.iter().skip(1).step_by(2).all(|message| message["content"] == "is b"), "{line}");
        assert!(roles.len() % 2 == 1 && roles.len() <= 3, "the game has two turns: {line}");
        if roles.len() == 3 {
            several += 1;
            let text = line["completion"].as_str().unwrap();
            assert!(text.contains("is b"), "rewards see the whole conversation: {line}");
            // The tokens of the environment are not counted.
            assert!(line["tokens"].as_u64().unwrap() <= 6, "{line}");
        }
    }
    assert!(several > 10, "{several}");
}

/// The pass for corrections computes the log-probabilities of the tokens of all turns, and a checkpoint holds conversations.
#[test]
fn a_run_with_turns_resumes_in_the_middle_of_a_generation() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let [unbroken, broken] = ["unbroken", "broken"].map(|name| folder.path().join(name));
    let config = |output: &Path| {
        let mut config = run(folder.path(), output, RecipeName::Fp8Block, 4, GAME);
        config.reinforcement.correction.mode = CorrectionMode::TokenMask;
        (config.reinforcement.dynamic_sampling, config.data.val_set_size) = (true, 0.0);
        config
    };
    train(&config(&unbroken), &Device::Cpu, &Start::New, u64::MAX).unwrap();
    assert!(train(&config(&broken), &Device::Cpu, &Start::New, 3).is_err_and(|error| error.is_stop()));
    train(&config(&broken), &Device::Cpu, &Start::Resume, u64::MAX).unwrap();
    assert_eq!(metrics(&unbroken), metrics(&broken));
    assert_eq!(lines_of(&unbroken), lines_of(&broken));
    let ratios = values_of(&unbroken, "sampling/importance_sampling_ratio/mean");
    assert_eq!(ratios, [1.0; 4]);
    assert!(values_of(&unbroken, "turns/mean")[0] > 1.0);
}

#[test]
fn ranks_draw_the_turns_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let logged = |ranks: usize| {
        let output = folder.path().join(format!("ranks-{ranks}"));
        let mut config = run(folder.path(), &output, RecipeName::Fp32, 2, GAME);
        (config.training.per_device_train_batch_size, config.data.val_set_size) = (64 / ranks, 0.0);
        on_ranks(ranks, move |group| {
            let mut trainer = Trainer::shared(config.clone(), &Device::Cpu, &Start::New, group, None).unwrap();
            trainer.run(&AtomicBool::new(false), &mut |_| {}).unwrap();
        });
        ["reward", "turns/mean", "turns/ended_by_environment"].map(|name| values_of(&output, name))
    };
    assert_eq!(logged(2), logged(1));
}

#[test]
fn an_environment_that_fails_ends_the_run_or_its_conversations() {
    let folder = tempfile::tempdir().unwrap();
    write_inputs(folder.path());
    let of = |name: &str, script: &str, on_error: OnError| {
        let mut config = run(folder.path(), &folder.path().join(name), RecipeName::Fp32, 2, script);
        (config.reinforcement.environment.on_error, config.data.val_set_size) = (on_error, 0.0);
        config.reinforcement.environment.timeout = 0.5;
        train(&config, &Device::Cpu, &Start::New, u64::MAX)
    };
    let messages = GAME.replace(r#"\"is b\""#, r#"[{\"role\":\"user\",\"content\":\"b\"}]"#);
    for (name, script, words) in [
        ("crash", "exit 3".to_string(), "it ended with exit code 3"),
        ("hang", "sleep 60".into(), "it did not answer in time"),
        ("garbage", "yes".into(), "print other texts to stderr: y"),
        ("messages", messages, "the prompt is a text, so a message is a text too"),
    ] {
        let error = of(name, &script, OnError::Stop).unwrap_err();
        assert!(matches!(error, Error::External(_)), "{name}: {error:?}");
        let error = error.to_string();
        assert!(error.contains("`reinforcement.environment`: ") && error.contains(words), "{name}: {error}");
    }
    let zero = GAME.replace("while read", "read -r line; exit 1\nwhile read");
    of("zero", &zero, OnError::Zero).unwrap();
    let output = folder.path().join("zero");
    assert_eq!(values_of(&output, "environment/failed"), [1.0]);
    assert_eq!(values_of(&output, "reward"), [0.0]);
    assert_eq!(lines_of(&output)[0]["turns"].as_array().unwrap().len(), 1);
    assert_eq!(lines_of(&output)[0]["rewards"], json!({"environment": 0.0}));
}
