//! Drills of jobs with `[recovery]`: ranks and hosts are killed, and the job goes on to the bits of a run that nothing disturbed.

use crate::kill::log;
use crate::ranks::{children, children_of, lives, signal, train};
use crate::setup::{Run, json};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The settings of all runs. Ranks divide the optimizer states, so each rank has bytes that no other rank has. Two or three ranks divide the rows of a
/// step, which are so many that a step takes longer than a message.
const SETTINGS: [&str; 6] = [
    "recipe=fp8-delayed",
    "parallel.zero=1",
    "max_steps=60",
    "eval_steps=9",
    "lr_scheduler.type=constant",
    "global_batch_size=24",
];

/// The settings of a job that recovers.
const RECOVERY: [&str; 3] = ["recovery.snapshot_steps=3", "recovery.silence_timeout=4", "recovery.host_timeout=20"];

/// The time limit of a drill.
const LIMIT: Duration = Duration::from_secs(60);

/// Returns the arguments of a run with `ranks` on each host and these `settings`.
pub fn arguments(ranks: &str, settings: &[&str], more: &[&str]) -> Vec<String> {
    let settings = SETTINGS.iter().chain(settings).flat_map(|setting| ["--set", setting]);
    let arguments: Vec<&str> = settings.chain(["--ranks", ranks]).chain(more.iter().copied()).collect();
    train(&arguments).into_iter().map(String::from).collect()
}

/// Returns the arguments of a job in `run` that recovers.
pub fn job(run: &Run, ranks: &str, more: &[&str]) -> Vec<String> {
    let memory = format!("recovery.memory_dir={}", run.path("memory").display());
    arguments(ranks, &[&RECOVERY[..], &[&memory]].concat(), more)
}

pub fn spawn(run: &Run, arguments: &[String], variables: &[(&str, String)]) -> Child {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    start(run, run.command(&arguments).envs(variables.iter().cloned()))
}

/// Starts `command`, whose messages go to the file `errors` of `run`.
pub fn start(run: &Run, command: &mut Command) -> Child {
    let errors = fs::File::options().create(true).append(true).open(run.path("errors")).unwrap();
    command.stdout(Stdio::null()).stderr(errors).spawn().unwrap()
}

/// Returns what a job of `ranks` ranks leaves if nothing disturbs it: its metrics, and the hashes of its last checkpoint.
pub fn undisturbed(ranks: &'static str) -> &'static (Vec<Value>, Value) {
    static TWO: OnceLock<(Vec<Value>, Value)> = OnceLock::new();
    static THREE: OnceLock<(Vec<Value>, Value)> = OnceLock::new();
    let of = if ranks == "2" { &TWO } else { &THREE };
    of.get_or_init(|| {
        let run = Run::new();
        let arguments = arguments(ranks, &[], &[]);
        run.succeed(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        (log(&run.path("run"), "metrics.jsonl"), checkpoint_hashes(&run.path("run/checkpoints/checkpoint-60")))
    })
}

/// Returns the SHA-256 of the files of a checkpoint, without logs, which have times.
pub fn checkpoint_hashes(checkpoint: &Path) -> Value {
    let manifest = fs::read_to_string(checkpoint.join("manifest.json")).unwrap();
    let mut files = serde_json::from_str::<Value>(&manifest).unwrap()["files"].take();
    files.as_object_mut().unwrap().retain(|name, _| !name.ends_with(".jsonl"));
    files
}

/// Expects that the job in `run` left what an undisturbed job of `ranks` ranks leaves.
pub fn expect_bits(run: &Run, ranks: &'static str) {
    let (metrics, hashes) = undisturbed(ranks);
    assert_eq!(&log(&run.path("run"), "metrics.jsonl"), metrics, "{}", errors(run));
    assert_eq!(&checkpoint_hashes(&run.path("run/checkpoints/checkpoint-60")), hashes, "{}", errors(run));
}

pub fn errors(run: &Run) -> String {
    fs::read_to_string(run.path("errors")).unwrap_or_default()
}

/// Returns the last step of the metrics.
pub fn step(run: &Run) -> u64 {
    let last = log(&run.path("run"), "metrics.jsonl").pop();
    last.and_then(|line| line["step"].as_u64()).unwrap_or(0)
}

pub fn wait_until(run: &Run, what: &str, mut is_true: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_true() {
        assert!(begin.elapsed() < LIMIT, "{what} does not happen: {}", errors(run));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for the end of a process, and returns its code.
pub fn code(run: &Run, child: &mut Child) -> Option<i32> {
    wait_until(run, "the end", || child.try_wait().unwrap().is_some());
    child.wait().unwrap().code()
}

/// Waits until the job has trained `steps` further steps, in at most the steps of the drill.
pub fn train_further(run: &Run, steps: u64) {
    let target = step(run) + steps;
    wait_until(run, "progress", || step(run) >= target);
}

/// Waits for two ranks of the keeper `pid` that are none of `before`.
fn new_ranks(run: &Run, pid: u32, before: &[u32], count: usize) -> Vec<u32> {
    let mut found = Vec::new();
    wait_until(run, "a new rank", || {
        found = children_of(pid).into_iter().filter(|pid| !before.contains(pid)).collect();
        found.len() == count
    });
    found
}

#[test]
fn a_job_goes_on_after_the_loss_of_ranks_to_the_same_bits() {
    let run = Run::new();
    let mut keeper = spawn(&run, &job(&run, "2", &[]), &[]);
    memory_of(&run, 0, 1);
    let first = children(&keeper);
    signal("-KILL", first[1]);
    // The next ranks are killed while they start.
    let second = new_ranks(&run, keeper.id(), &first, 2);
    signal("-KILL", second[0]);
    let third = new_ranks(&run, keeper.id(), &[&first[..], &second].concat(), 2);
    train_further(&run, 3);
    signal("-KILL", third[0]);
    assert_eq!(code(&run, &mut keeper), Some(0), "{}", errors(&run));
    expect_bits(&run, "2");
    let said = errors(&run);
    assert_eq!(said.matches("was killed by signal 9").count(), 3, "{said}");
    assert!(said.matches("the run goes on after the snapshot of step").count() >= 2, "{said}");
    let left: Vec<PathBuf> = files(&run);
    assert!(left.is_empty(), "snapshots are left: {left:?}");
}

/// Returns the files in the memory of all hosts.
fn files(run: &Run) -> Vec<PathBuf> {
    let hosts = fs::read_dir(run.path("memory")).into_iter().flatten().flatten();
    hosts
        .flat_map(|hosts| fs::read_dir(hosts.path()).into_iter().flatten().flatten())
        .map(|entry| entry.path())
        .collect()
}

/// Returns the memory folder of `host`, after it has `count` complete snapshots.
pub fn memory_of(run: &Run, host: u32, count: usize) -> PathBuf {
    let name = format!("host-{host}");
    let mut found = None;
    wait_until(run, "a snapshot", || {
        found = files(run).into_iter().find(|path| path.ends_with(&name));
        found.as_ref().is_some_and(|path| fs::read_dir(path.join("shares")).is_ok_and(|shares| shares.count() >= count))
    });
    found.unwrap()
}

#[test]
fn damaged_and_unwritable_memory_costs_steps_and_no_bits() {
    let run = Run::new();
    let mut keeper = spawn(&run, &job(&run, "2", &[]), &[]);
    let memory = memory_of(&run, 0, 2);
    // No further snapshot can be written, as in a full folder.
    let _ = fs::remove_dir_all(memory.join("new"));
    fs::write(memory.join("new"), "").unwrap();
    wait_until(&run, "a warning", || errors(&run).contains("no snapshot in memory was written"));
    let mut shares: Vec<_> = fs::read_dir(memory.join("shares")).unwrap().map(|share| share.unwrap().path()).collect();
    shares.sort_by_key(|path| {
        path.file_name().unwrap().to_str().unwrap().split('-').next().unwrap().parse::<u64>().unwrap()
    });
    let newest = shares.last().unwrap().join("training/optimizer-00001-of-00002.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&newest, bytes).unwrap();
    signal("-KILL", children(&keeper)[1]);
    assert_eq!(code(&run, &mut keeper), Some(0), "{}", errors(&run));
    assert!(errors(&run).contains("optimizer-00001-of-00002.safetensors is damaged"), "{}", errors(&run));
    expect_bits(&run, "2");
}

#[test]
fn a_rank_that_is_stopped_is_replaced() {
    let run = Run::new();
    let short = ["--set", "parallel.communication.silence_timeout=1"];
    let mut keeper = spawn(&run, &job(&run, "2", &short), &[]);
    memory_of(&run, 0, 1);
    let ranks = children(&keeper);
    signal("-STOP", ranks[1]);
    assert_eq!(code(&run, &mut keeper), Some(0), "{}", errors(&run));
    assert!(ranks.iter().all(|pid| !lives(*pid)));
    assert!(errors(&run).contains("rank 1 (pid "), "the rank is named: {}", errors(&run));
    expect_bits(&run, "2");
}

#[test]
fn a_signal_to_a_keeper_saves_a_checkpoint_from_which_the_job_goes_on() {
    let run = Run::new();
    let mut keeper = spawn(&run, &job(&run, "2", &[]), &[]);
    wait_until(&run, "progress", || step(&run) >= 8);
    let ranks = children(&keeper);
    signal("-TERM", keeper.id());
    assert_eq!(code(&run, &mut keeper), Some(75), "{}", errors(&run));
    assert!(ranks.iter().all(|pid| !lives(*pid)));
    let mut keeper = spawn(&run, &job(&run, "2", &["--resume=auto"]), &[]);
    assert_eq!(code(&run, &mut keeper), Some(0), "{}", errors(&run));
    expect_bits(&run, "2");
}

/// The launcher starts the job again after the loss of the keeper itself.
#[test]
fn a_job_that_starts_again_takes_the_snapshots_that_are_left_in_memory() {
    let run = Run::new();
    let mut keeper = spawn(&run, &job(&run, "2", &[]), &[]);
    memory_of(&run, 0, 1);
    let ranks = children(&keeper);
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    wait_until(&run, "the end of ranks", || ranks.iter().all(|pid| !lives(*pid)));
    assert!(!run.path("run/checkpoints/checkpoint-60").exists());
    let mut keeper = spawn(&run, &job(&run, "2", &["--resume=auto"]), &[]);
    assert_eq!(code(&run, &mut keeper), Some(0), "{}", errors(&run));
    assert!(errors(&run).contains("the run goes on after the snapshot of step"), "{}", errors(&run));
    expect_bits(&run, "2");
}

/// Returns a port that no process uses.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The keepers of a job on several hosts, which are emulated on this machine.
pub struct Hosts {
    pub run: Run,
    pub port: u16,
    arguments: Vec<String>,
    pub keepers: Vec<Child>,
}

impl Hosts {
    /// Starts `count` hosts with a rank each. `spares` of them are spare hosts.
    pub fn start(count: usize, spares: usize, more: &[&str]) -> Hosts {
        let mut hosts = Hosts::new(spares, more);
        hosts.keepers = (0..count).map(|host| hosts.keeper(host, count)).collect();
        hosts
    }

    /// Returns a job whose hosts have not started.
    pub fn new(spares: usize, more: &[&str]) -> Hosts {
        let run = Run::new();
        let port = free_port();
        let spares = format!("recovery.spares={spares}");
        let arguments = job(&run, "1", &[&["--set", &spares], more].concat());
        Hosts { run, port, arguments, keepers: Vec::new() }
    }

    /// Starts the keeper of `host`, as torchrun does on one of `count` hosts.
    pub fn keeper(&self, host: usize, count: usize) -> Child {
        self.keeper_by(host, count, self.port)
    }

    /// Starts the keeper of `host`, which reaches host 0 at `port`.
    pub fn keeper_by(&self, host: usize, count: usize, port: u16) -> Child {
        start(&self.run, &mut self.command(host, count, "127.0.0.1", port))
    }

    /// Returns the command of the keeper of `host`, which reaches host 0 at `address`, `port`.
    pub fn command(&self, host: usize, count: usize, address: &str, port: u16) -> Command {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let mut command = self.run.command(&arguments);
        command.envs([
            ("RANK", host.to_string()),
            ("WORLD_SIZE", count.to_string()),
            ("MASTER_ADDR", address.into()),
            // torchrun itself listens at the port before this port.
            ("MASTER_PORT", (port - 1).to_string()),
            ("OTTAVA_SECRET", "secret".into()),
        ]);
        command
    }

    /// Kills the keeper of a host, after which its ranks end.
    pub fn lose(&mut self, host: usize) {
        let ranks = children(&self.keepers[host]);
        self.keepers[host].kill().unwrap();
        self.keepers[host].wait().unwrap();
        wait_until(&self.run, "the end of ranks", || ranks.iter().all(|pid| !lives(*pid)));
    }

    /// Waits until all hosts of `places` have a snapshot, and the copy of another one.
    pub fn wait_for_copies(&self, places: u32) {
        (0..places).for_each(|host| drop(memory_of(&self.run, host, 2)));
    }

    /// Expects that all hosts except `lost` end with `expected`.
    pub fn expect_end(&mut self, lost: &[usize], expected: i32) {
        for (host, keeper) in self.keepers.iter_mut().enumerate().filter(|(host, _)| !lost.contains(host)) {
            assert_eq!(code(&self.run, keeper), Some(expected), "host {host}: {}", errors(&self.run));
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for keeper in &mut self.keepers {
            let _ = keeper.kill();
            let _ = keeper.wait();
        }
    }
}

#[test]
fn a_spare_takes_the_place_of_the_host_of_rank_0_and_of_the_hub() {
    let mut hosts = Hosts::start(3, 1, &[]);
    hosts.wait_for_copies(2);
    hosts.lose(0);
    hosts.expect_end(&[0], 0);
    expect_bits(&hosts.run, "2");
    let said = errors(&hosts.run);
    assert!(said.contains("the hub is lost, and starts again on this host"), "{said}");
    assert_eq!(said.lines().filter(|line| line.contains("train from step 1 ")).count(), 1, "{said}");
}

#[test]
fn a_spare_takes_the_place_of_a_host_and_a_half_of_the_hosts_does_not_train() {
    let mut hosts = Hosts::start(4, 2, &["--set", "max_steps=100000", "--set", "recovery.host_timeout=4"]);
    hosts.wait_for_copies(2);
    hosts.lose(1);
    train_further(&hosts.run, 10);
    hosts.lose(0);
    hosts.expect_end(&[0, 1], 5);
    let said = errors(&hosts.run);
    assert!(said.contains("too few of all hosts are left: the others may go on without them"), "{said}");
    assert!(said.matches("train from step").count() >= 2, "{said}");
}

#[test]
fn a_lost_host_comes_back_as_a_spare_host() {
    let mut hosts = Hosts::start(3, 1, &["--set", "max_steps=100000"]);
    hosts.wait_for_copies(2);
    hosts.lose(0);
    train_further(&hosts.run, 5);
    // The hub is on host 1 now, and host 2 has place 0.
    hosts.keepers[0] = hosts.keeper(0, 3);
    wait_until(&hosts.run, "host 0", || joined(&hosts.run, 0) == 2);
    hosts.lose(2);
    train_further(&hosts.run, 5);
    for keeper in [0, 1] {
        signal("-TERM", hosts.keepers[keeper].id());
    }
    hosts.expect_end(&[2], 75);
    assert!(!hosts.run.path("run/.hub").exists(), "the job has ended");
}

/// Returns how often a host has joined a hub.
pub fn joined(run: &Run, host: u32) -> usize {
    let name = format!("host {host} (");
    errors(run).lines().filter(|line| line.contains(&name) && line.ends_with("has joined")).count()
}

#[test]
fn lost_copies_cost_the_steps_since_the_checkpoint() {
    let mut hosts = Hosts::start(5, 2, &["--set", "save_steps=10"]);
    hosts.wait_for_copies(3);
    wait_until(&hosts.run, "a checkpoint", || hosts.run.path("run/checkpoints/checkpoint-10").exists());
    // Host 2 has the copies of host 1.
    hosts.keepers[1].kill().unwrap();
    hosts.lose(2);
    hosts.expect_end(&[1, 2], 0);
    expect_bits(&hosts.run, "3");
}

/// A generator of reproducible random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Jobs of two hosts and two spare hosts lose a rank or a host at random moments. The number of losses is `OTTAVA_DRILLS`, by default 1.
#[test]
fn losses_at_random_moments_change_no_bit() {
    let mut random = Random(7);
    let mut left: u64 = std::env::var("OTTAVA_DRILLS").map_or(1, |count| count.parse().unwrap());
    while left > 0 {
        let mut hosts = Hosts::start(4, 2, &["--set", "recovery.max_recoveries=20"]);
        wait_until(&hosts.run, "a job", || errors(&hosts.run).contains("train from step"));
        let mut lost = Vec::new();
        for _ in 0..(1 + random.below(3)).min(left) {
            std::thread::sleep(Duration::from_millis(random.below(2500)));
            left -= 1;
            // More than half of all hosts must be left if the hub is lost, so at most one host is.
            let victim = random.below(4) as usize;
            match lost.is_empty() && random.below(2) == 0 {
                true => {
                    hosts.lose(victim);
                    lost.push(victim);
                }
                false => {
                    let ranks = if lost.contains(&victim) { Vec::new() } else { children(&hosts.keepers[victim]) };
                    ranks.first().into_iter().for_each(|rank| try_kill(*rank));
                }
            }
        }
        hosts.expect_end(&lost, 0);
        expect_bits(&hosts.run, "2");
    }
}

/// Kills a process that may have ended already.
fn try_kill(pid: u32) {
    let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).stderr(Stdio::null()).status().unwrap();
}

#[test]
fn a_plan_counts_the_memory_of_snapshots() {
    let run = Run::new();
    let bytes = |more: &[&str]| {
        let plan = json(&run.succeed(&[&["plan", "run.toml", "--json"][..], more].concat()));
        ["recovery_bytes", "checkpoint_bytes"].map(|key| plan["memory"][key].as_u64().unwrap())
    };
    assert_eq!(bytes(&[])[0], 0);
    let [memory, checkpoint] = bytes(&["--set", "recovery.snapshot_steps=5"]);
    assert!(memory >= 4 * checkpoint && checkpoint > 0, "two snapshots and two copies: {memory}, {checkpoint}");
}

#[test]
fn jobs_that_cannot_recover_are_refused() {
    let run = Run::new();
    let refused = |more: &[&str], variables: &[(&str, &str)], words: &str| {
        let arguments = job(&run, "1", more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let output = run.command(&arguments).envs(variables.iter().copied()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(words), "{said}");
    };
    refused(&["--set", "recovery.spares=1"], &[], "more hosts than spares");
    refused(&["--resume=model"], &[], "use --resume=auto");
    let hosts = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
    refused(&[], &hosts, "OTTAVA_SECRET is not set");
    refused(&["--set", "parallel.auto=true"], &[], "instead of `parallel.auto`");
    assert!(!run.path("run").exists(), "nothing has started");
}
