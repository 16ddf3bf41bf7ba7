//! Tests that runs that are killed repeatedly at random moments end like uninterrupted runs.

use crate::setup::Run;
use serde_json::Value;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The arguments of a run of 36 steps.
const TRAIN: [&str; 12] = [
    "train",
    "run.toml",
    "--set",
    "recipe=fp8-delayed",
    "--set",
    "max_steps=36",
    "--set",
    "save_steps=4",
    "--set",
    "eval_steps=7",
    "--set",
    "save_total_limit=3",
];

/// Returns the whole lines of a log of a run, without times and memory.
pub fn log(run: &Path, name: &str) -> Vec<Value> {
    // A killed run may leave half a line at the end.
    let text = std::fs::read_to_string(run.join(name)).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let mut lines: Vec<Value> = whole.map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &mut lines {
        line.as_object_mut().unwrap().retain(|key, _| {
            !["tokens_per_second", "peak_memory_bytes"].contains(&key.as_str()) && !key.starts_with("timing_s/")
        });
    }
    lines
}

/// Returns the steps of the checkpoints that have their final names.
fn checkpoints(run: &Path) -> Vec<u64> {
    let names = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().map(|e| e.unwrap().file_name());
    let mut steps: Vec<u64> =
        names.filter_map(|name| name.to_str()?.strip_prefix("checkpoint-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// Returns the last step that a log reports as saved.
fn last_saved(log: &str) -> Option<u64> {
    log.lines().filter_map(|line| line.split_once("  saved ")?.0.strip_prefix("step ")?.parse().ok()).next_back()
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// The number of kills: `OTTAVA_KILLS`, or `default`.
fn kills(default: u64) -> u64 {
    std::env::var("OTTAVA_KILLS").map_or(default, |count| count.parse().unwrap())
}

/// Kills runs of `steps` steps at random moments until they were killed `kills` times. `new` makes the inputs of a run, and `train` are the arguments. A run
/// that ends in spite of kills must equal an unbroken run, and another run follows it.
fn kill_at_random_moments(new: impl Fn() -> Run, train: &[&str], steps: u64, kills: u64) {
    let unbroken = new();
    let begin = Instant::now();
    unbroken.succeed(train);
    let whole = begin.elapsed();
    let logs = |run: &Run| ["metrics.jsonl", "completions.jsonl"].map(|name| log(&run.path("run"), name));
    let expected = logs(&unbroken);
    let end = |run: &Run| {
        let folder = run.path(&format!("run/checkpoints/checkpoint-{steps}"));
        let files = ["model.safetensors", "training/optimizer.safetensors", "training/scaling.safetensors"];
        files.map(|name| std::fs::read(folder.join(name)).unwrap_or_default())
    };
    assert!(!end(&unbroken)[0].is_empty());
    let (mut random, mut run, mut killed, mut finished, mut went_back) = (Random(7), new(), 0, 0, 0);
    while killed < kills {
        let folder = run.path("run");
        let saved = checkpoints(&folder);
        let back =
            saved.first().filter(|_| random.below(5) == 0).map(|step| format!("run/checkpoints/checkpoint-{step}"));
        let resume: &[&str] = match (&back, saved.is_empty()) {
            (_, true) => &[],
            (Some(path), _) => &["--resume", path],
            (None, _) => &["--resume"],
        };
        went_back += u64::from(back.is_some());
        let mut child =
            run.command(&[train, resume].concat()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(random.below(whole.as_micros() as u64 * 2 / 3)));
        let over = child.try_wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let mut log = String::new();
        child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        if let Some(status) = over {
            assert!(status.success(), "{log}");
        } else {
            killed += 1;
        }
        let found = logs(&run);
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found, &expected[..found.len()], "{log}");
        }
        let saved = checkpoints(&folder);
        assert!(saved.last().copied() >= last_saved(&log), "{saved:?} after {log}");
        assert!(!log.contains("damaged"), "{log}");
        if over.is_some() {
            assert_eq!(found, expected);
            assert!(end(&run) == end(&unbroken), "the weights differ after {killed} kills");
            finished += 1;
            run = new();
        }
    }
    // The last killed run is resumed to its end.
    let resume: &[&str] = if checkpoints(&run.path("run")).is_empty() { &[] } else { &["--resume"] };
    run.succeed(&[train, resume].concat());
    assert_eq!(logs(&run), expected);
    assert!(end(&run) == end(&unbroken));
    eprintln!("{killed} kills, {finished} runs finished in spite of them, {went_back} went back");
}

/// The run is killed `OTTAVA_KILLS` times (30 by default) at random moments: during its start, its first save, later saves, steps and evaluations,
/// and after it has resumed from an older checkpoint.
#[test]
fn a_run_killed_at_random_moments_ends_as_the_unbroken_one() {
    kill_at_random_moments(Run::new, &TRAIN, 36, kills(30));
}

/// Scores a completion by its first token, after a moment.
const REWARD: &str = r#"while read -r line; do
    id=${line#*:}; id=${id%%,*}; sleep 0.002
    case $line in *'"completion":"1'*) reward=1 ;; *'"completion":"'[2-9]*) reward=0.5 ;; *) reward=0 ;; esac
    echo "{\"id\":$id,\"rewards\":[$reward]}"
done"#;

/// Answers turns, after a moment. A turn that begins with a digit is right, and a second turn ends the conversation.
const GAME: &str = r#"while read -r line; do
    id=${line#*:}; id=${id%%,*}; sleep 0.002
    case $line in *'"completion":"'[0-9]*) reward=1 ;; *) reward=0 ;; esac
    case $line in *'"turn":0'*) done=false ;; *) done=true ;; esac
    echo "{\"id\":$id,\"steps\":[{\"done\":$done,\"message\":\"and\",\"reward\":$reward}]}"
done"#;

/// Returns the inputs of a run of twelve steps whose generations have the completions of three steps. `tables` say what scores and answers completions.
fn policy(tables: &str) -> Run {
    let run = Run::new();
    run.write_problems();
    run.write("reward.sh", REWARD.as_bytes());
    run.write("game.sh", GAME.as_bytes());
    let text = format!(
        r#"output_dir = "run"
device = "cpu"
[model]
path = "problems/model"
init = "random"
[data]
train_files = ["problems/problems.jsonl"]
val_set_size = 6
max_length = 24
[reinforcement]
num_generations = 4
prompts_per_generation = 6
max_completion_length = 4
{tables}
[training]
max_steps = 12
per_device_train_batch_size = 8
[evaluation]
eval_steps = 5
num_generations = 2
[checkpoint]
save_steps = 2
save_total_limit = 2
[optimizer]
learning_rate = 1e-2
[precision]
recipe = "fp8-delayed"
skip_slow_linears = false
"#
    );
    run.write("run.toml", text.as_bytes());
    run
}

/// Kills hit draws, rewards, steps, saves and evaluations. A run that resumes in the middle of a generation has the completions of the checkpoint.
#[test]
fn a_run_with_a_command_as_reward_survives_kills() {
    let tables = "[[reinforcement.rewards]]\ntype = 'command'\nbatch_size = 1\ncommand = ['sh', 'reward.sh']";
    kill_at_random_moments(|| policy(tables), &["train", "run.toml"], 12, kills(5));
}

/// Kills hit turns of conversations too.
#[test]
fn a_run_with_an_environment_survives_kills() {
    let tables = "[reinforcement.environment]\nbatch_size = 1\ncommand = ['sh', 'game.sh']\nmax_turns = 3\n\
                  [[reinforcement.rewards]]\ntype = 'environment'";
    kill_at_random_moments(|| policy(tables), &["train", "run.toml"], 12, kills(5));
}
