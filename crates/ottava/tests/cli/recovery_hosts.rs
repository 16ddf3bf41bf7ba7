//! Drills of jobs with `[recovery]` on fewer hosts, with a connection that is cut, with a full memory folder, and with a slow host.

use crate::kill::log;
use crate::ranks::{children, signal};
use crate::recovery::{
    Hosts, arguments, checkpoint_hashes, code, errors, expect_bits, job, joined, memory_of, spawn, step, train_further,
    undisturbed, wait_until,
};
use crate::setup::Run;
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns the steps from which the job in `run` has started its ranks, with the number of hosts.
pub fn starts(run: &Run) -> Vec<(usize, u64)> {
    let number = |text: &str| text.split_whitespace().next().and_then(|number| number.parse().ok());
    let of_line = |line: &str| {
        let (hosts, step) = line.split_once(" train from step ")?;
        Some((hosts.matches("host ").count(), number(step)?))
    };
    errors(run).lines().filter_map(of_line).collect()
}

/// Returns the lines of metrics after `step`.
fn after(lines: &[Value], step: u64) -> Vec<Value> {
    lines.iter().filter(|line| line["step"].as_u64() > Some(step)).cloned().collect()
}

/// After the loss of one of three hosts, two hosts train the same rows, to the bits of two ranks that resume from a checkpoint of the same step.
#[test]
fn fewer_hosts_go_on_as_a_run_that_is_resumed_with_fewer_ranks() {
    let settings = ["--set", "recovery.min_hosts=2", "--set", "recovery.host_timeout=8"];
    let mut hosts = Hosts::start(3, 0, &settings);
    hosts.wait_for_copies(3);
    hosts.lose(2);
    hosts.expect_end(&[2], 0);
    let said = errors(&hosts.run);
    assert!(said.contains("the job goes on with 2 hosts"), "{said}");
    let starts = starts(&hosts.run);
    assert_eq!(starts.iter().map(|(hosts, _)| *hosts).collect::<Vec<_>>(), [3, 2], "{said}");
    let snapshot = starts[1].1 - 1;
    assert!(snapshot > 0 && snapshot.is_multiple_of(3), "after a snapshot: {snapshot}");
    let lines = log(&hosts.run.path("run"), "metrics.jsonl");
    let (metrics, _) = undisturbed("3");
    let before = |lines: &[Value]| lines.iter().filter(|line| line["step"].as_u64() <= Some(snapshot)).count();
    assert_eq!(lines[..before(&lines)], metrics[..before(metrics)], "three hosts");
    // Two ranks that resume from a checkpoint.
    let run = Run::new();
    let go = |ranks: &str, steps: u64, more: &[&str]| {
        let steps = format!("max_steps={steps}");
        let arguments = arguments(ranks, &[&steps], more);
        run.succeed(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    };
    go("3", snapshot, &[]);
    go("2", 60, &["--resume"]);
    let resumed = log(&run.path("run"), "metrics.jsonl");
    assert_eq!(after(&lines, snapshot), after(&resumed, snapshot), "two hosts");
    let [got, expected] = [&hosts.run, &run].map(|run| checkpoint_hashes(&run.path("run/checkpoints/checkpoint-60")));
    assert_eq!(got, expected, "weights and states");
}

/// One of two hosts goes on alone. A loss before its first own snapshot costs no step, since it has shares of the snapshot for one host. The host that comes
/// back trains again.
#[test]
fn a_job_that_has_shrunk_recovers_and_grows() {
    let settings = ["--set", "recovery.min_hosts=1", "--set", "recovery.host_timeout=8", "--set", "max_steps=100000"];
    let mut hosts = Hosts::start(2, 0, &settings);
    hosts.wait_for_copies(2);
    hosts.lose(1);
    wait_until(&hosts.run, "one host", || starts(&hosts.run).len() == 2);
    let mut ranks = Vec::new();
    wait_until(&hosts.run, "its rank", || {
        ranks = children(&hosts.keepers[0]);
        !ranks.is_empty()
    });
    signal("-KILL", ranks[0]);
    wait_until(&hosts.run, "the next start", || starts(&hosts.run).len() == 3);
    let seen = starts(&hosts.run);
    assert_eq!((seen[1].0, seen[2].0), (1, 1));
    assert!(seen[2].1 >= seen[1].1 && seen[1].1 > 1, "no step before the snapshot is trained again: {seen:?}");
    train_further(&hosts.run, 5);
    hosts.keepers[1] = hosts.keeper(1, 2);
    wait_until(&hosts.run, "two hosts", || starts(&hosts.run).last().is_some_and(|(hosts, _)| *hosts == 2));
    train_further(&hosts.run, 5);
    for keeper in &hosts.keepers {
        signal("-TERM", keeper.id());
    }
    hosts.expect_end(&[], 75);
    let said = errors(&hosts.run);
    assert!(!said.contains("so the job goes back to"), "{said}");
}

#[test]
fn a_smallest_number_of_hosts_that_cannot_be_is_refused() {
    let run = Run::new();
    let refused = |more: &[&str], words: &str| {
        let arguments = job(&run, "1", more);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let variables = [
            ("RANK", "0"),
            ("WORLD_SIZE", "3"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "1"),
            ("OTTAVA_SECRET", "x"),
        ];
        let output = run.command(&arguments).envs(variables).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(words), "{said}");
    };
    refused(&["--set", "recovery.min_hosts=4"], "`recovery.min_hosts` is 4, and 3 hosts train");
    // 9 rows are divided by three hosts, and not by two.
    let rows = ["--set", "recovery.min_hosts=2", "--set", "global_batch_size=9"];
    refused(&rows, "no number of hosts from 2 to 2 can divide the run");
}

/// A connection through which bytes pass until it is cut. A cut connection stays open, as in a network that drops packets.
struct Proxy {
    port: u16,
    is_cut: Arc<AtomicBool>,
}

impl Proxy {
    fn to(port: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy { port: listener.local_addr().unwrap().port(), is_cut: Arc::default() };
        let is_cut = proxy.is_cut.clone();
        std::thread::spawn(move || {
            for from in listener.incoming().flatten() {
                // Host 0 may not listen yet. The keeper tries again.
                let Ok(to) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                for (from, to) in [(from.try_clone(), to.try_clone()), (to.try_clone(), from.try_clone())] {
                    let (from, to, is_cut) = (from.unwrap(), to.unwrap(), is_cut.clone());
                    std::thread::spawn(move || pass(from, to, &is_cut));
                }
            }
        });
        proxy
    }
}

/// Passes bytes on until `is_cut`. Then they are lost.
fn pass(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let mut buffer = [0; 1 << 14];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if !is_cut.load(Ordering::Relaxed) && to.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
    if !is_cut.load(Ordering::Relaxed) {
        let _ = to.shutdown(std::net::Shutdown::Both);
    }
}

/// The connection of host 1 to the hub is cut without an end, so that only silence tells of it. A spare host takes the place, and only one epoch trains at a
/// time: losses and weights keep their bits, and no step is written twice.
#[test]
fn a_host_whose_connection_is_cut_is_replaced() {
    let mut hosts = Hosts::new(1, &["--set", "recovery.silence_timeout=2"]);
    let proxy = Proxy::to(hosts.port);
    hosts.keepers = vec![hosts.keeper(0, 3), hosts.keeper_by(1, 3, proxy.port), hosts.keeper(2, 3)];
    hosts.wait_for_copies(2);
    proxy.is_cut.store(true, Ordering::Relaxed);
    wait_until(&hosts.run, "the loss", || starts(&hosts.run).len() >= 2);
    hosts.expect_end(&[], 0);
    expect_bits(&hosts.run, "2");
    assert!(joined(&hosts.run, 1) >= 2, "the host joins again, by the address of the hub: {}", errors(&hosts.run));
}

/// A memory file system that is unmounted at the end. `None` if this process may not mount one.
struct Small<'a>(&'a Path);

impl Small<'_> {
    fn mount(folder: &Path, megabytes: u32) -> Option<Small<'_>> {
        fs::create_dir_all(folder).unwrap();
        let size = format!("size={megabytes}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "none"]).arg(folder).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Small(folder))
    }
}

impl Drop for Small<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

/// The memory folder is full after the first snapshots. The message names the folder, training goes on, and a loss goes back to the older snapshot.
#[test]
fn a_full_memory_folder_keeps_the_older_snapshots() {
    let run = Run::new();
    let folder = run.path("memory");
    let Some(_small) = Small::mount(&folder, 64) else {
        println!("skipped: this test mounts a file system, which only root may do");
        return;
    };
    let mut keeper = spawn(&run, &job(&run, "2", &[]), &[]);
    memory_of(&run, 0, 1);
    // A file takes the rest of the folder, and the memory of snapshots that are removed.
    let mut rest = fs::File::create(folder.join("rest")).unwrap();
    let full = "no snapshot in memory was written, and earlier ones stay";
    wait_until(&run, "a warning", || {
        while rest.write_all(&[0; 1 << 16]).is_ok() {}
        errors(&run).contains(full)
    });
    let at = step(&run);
    wait_until(&run, "training", || step(&run) > at);
    wait_until(&run, "a snapshot that is left out", || errors(&run).contains("this snapshot in memory is left out"));
    let said = errors(&run);
    let line = said.lines().find(|line| line.contains(full)).unwrap();
    assert!(line.contains(&folder.display().to_string()), "the folder is named: {line}");
    fs::remove_file(folder.join("rest")).unwrap();
    drop(rest);
    signal("-KILL", children(&keeper)[1]);
    assert_eq!(code(&run, &mut keeper), Some(0), "{}", errors(&run));
    expect_bits(&run, "2");
}

/// A process that gets a small part of the time of a processor until the end of the test.
struct Slowed {
    ends: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Slowed {
    fn start(pid: u32) -> Slowed {
        let ends = Arc::<AtomicBool>::default();
        let is_over = ends.clone();
        let work = move || {
            let send = |name: &str| {
                let sent =
                    Command::new("kill").args([name, &pid.to_string()]).stderr(std::process::Stdio::null()).status();
                sent.is_ok_and(|status| status.success())
            };
            while !is_over.load(Ordering::Relaxed) && send("-STOP") {
                std::thread::sleep(std::time::Duration::from_millis(50));
                send("-CONT");
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        };
        Slowed { ends, thread: Some(std::thread::spawn(work)) }
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().map(std::thread::JoinHandle::join);
    }
}

/// The rank of host 1 is slow. It is named, and after the next snapshot a spare host has its place.
#[test]
fn a_slow_host_gives_its_place_to_a_spare_host() {
    let settings =
        ["parallel.straggler_steps=1", "parallel.straggler_ratio=3", "recovery.stragglers=swap", "max_steps=100000"];
    let settings: Vec<&str> = settings.into_iter().flat_map(|setting| ["--set", setting]).collect();
    let mut hosts = Hosts::start(3, 1, &settings);
    hosts.wait_for_copies(2);
    let slowed = Slowed::start(children(&hosts.keepers[1])[0]);
    wait_until(&hosts.run, "another host", || starts(&hosts.run).len() == 2);
    drop(slowed);
    train_further(&hosts.run, 3);
    let said = errors(&hosts.run);
    let line = said.lines().find(|line| line.contains("rank 1 on host ")).unwrap_or_else(|| panic!("no name: {said}"));
    assert!(
        line.contains(" is slow: the same products take ") && line.contains("times the median of all ranks"),
        "{line}"
    );
    let last = said.lines().rfind(|line| line.contains(" train from step ")).unwrap();
    assert!(last.contains("host 0 (") && last.contains("host 2 (") && !last.contains("host 1 ("), "{last}");
    for keeper in [0, 2] {
        signal("-TERM", hosts.keepers[keeper].id());
    }
    hosts.expect_end(&[], 75);
}
