//! Drills of jobs with `[recovery]` whose hosts are network namespaces: the link of a host goes down, for good or for a while. Only root may make such hosts.

use crate::kill::log;
use crate::ranks::{children, signal};
use crate::recovery::{Hosts, code, errors, expect_bits, start, train_further, undisturbed, wait_until};
use crate::recovery_hosts::starts;
use crate::setup::Run;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Hosts with a link each to a switch. They are removed at the end.
struct Network {
    name: String,
    hosts: usize,
}

impl Network {
    /// Makes a network. Prints a sentence and returns `None` if this process may not make one.
    fn new(hosts: usize) -> Option<Network> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("ottava-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let network = Network { name, hosts };
        let made = network.make();
        if !made {
            println!("skipped: this test makes network namespaces with `ip`, which only root may do");
        }
        made.then_some(network)
    }

    fn make(&self) -> bool {
        let Network { name: switch, hosts } = self;
        ip(&format!("netns add {switch}"))
            && ip(&format!("-n {switch} link add switch type bridge"))
            && ip(&format!("-n {switch} link set switch up"))
            && (0..*hosts).all(|host| {
                let (name, address) = (self.host(host), Network::address(host));
                ip(&format!("netns add {name}"))
                    && ip(&format!("-n {switch} link add port{host} type veth peer name eth0 netns {name}"))
                    && ip(&format!("-n {switch} link set port{host} master switch up"))
                    && ip(&format!("-n {name} address add {address}/24 dev eth0"))
                    && ip(&format!("-n {name} link set eth0 up"))
                    && ip(&format!("-n {name} link set lo up"))
            })
    }

    fn host(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }

    /// Returns the address of `host`.
    fn address(host: usize) -> String {
        format!("10.0.0.{}", host + 1)
    }

    /// Returns `command` as a command on `host`.
    fn at(&self, host: usize, command: &Command) -> Command {
        let mut there = Command::new("ip");
        there.args(["netns", "exec", &self.host(host)]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => there.env(name, value),
                None => there.env_remove(name),
            };
        }
        there.current_dir(command.get_current_dir().expect("commands of drills have a folder"));
        there
    }

    /// Sets the link of `host` `up` or `down`.
    fn set_link(&self, host: usize, state: &str) {
        assert!(ip(&format!("-n {} link set port{host} {state}", self.name)));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Links of a namespace are removed with it.
        for name in (0..self.hosts).map(|host| self.host(host)).chain([self.name.clone()]) {
            ip(&format!("netns delete {name}"));
        }
    }
}

/// Runs `ip`. Returns whether it has done what the words say.
fn ip(words: &str) -> bool {
    Command::new("ip").args(words.split(' ')).output().is_ok_and(|output| output.status.success())
}

/// Starts a job of `count` hosts with a rank each in `network`, `spares` of which are spare hosts, and waits for snapshots of two hosts.
fn job(network: &Network, count: usize, spares: usize, settings: &[&str]) -> Hosts {
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    let mut hosts = Hosts::new(spares, &settings);
    let keeper = |host| network.at(host, &hosts.command(host, count, &Network::address(0), hosts.port));
    hosts.keepers = (0..count).map(|host| start(&hosts.run, &mut keeper(host))).collect();
    hosts.wait_for_copies(2);
    hosts
}

/// Waits until ranks have started for the second time. Returns the numbers of hosts of both starts.
fn second_start(run: &Run) -> Vec<usize> {
    wait_until(run, "the next start", || starts(run).len() >= 2);
    starts(run).iter().map(|(hosts, _)| *hosts).collect()
}

/// Expects that the metrics have each step once, from the losses before the first step on.
fn expect_each_step_once(run: &Run) {
    let steps: Vec<u64> =
        log(&run.path("run"), "metrics.jsonl").iter().filter_map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps, (0..steps.len() as u64).collect::<Vec<_>>(), "{}", errors(run));
}

/// The link between two hosts goes down for good. The host with the hub goes on alone, after the rank of the other host has ended. The other host cannot
/// know whether it is alone, and ends with exit code 5.
#[test]
fn one_part_of_a_divided_network_goes_on_and_the_other_part_ends() {
    let Some(network) = Network::new(2) else { return };
    let settings = ["recovery.silence_timeout=2", "recovery.host_timeout=6", "recovery.min_hosts=1"];
    let mut hosts = job(&network, 2, 0, &settings);
    network.set_link(1, "down");
    assert_eq!(second_start(&hosts.run), [2, 1], "{}", errors(&hosts.run));
    assert!(children(&hosts.keepers[1]).is_empty(), "no rank of the earlier epoch is left: {}", errors(&hosts.run));
    assert_eq!(code(&hosts.run, &mut hosts.keepers[1]), Some(5), "{}", errors(&hosts.run));
    hosts.expect_end(&[1], 0);
    assert!(errors(&hosts.run).contains("the job goes on with 1 hosts"), "{}", errors(&hosts.run));
    expect_each_step_once(&hosts.run);
}

/// The link of a host comes back long after a spare host has taken its place, when the host has a hub of its own. This hub lacks hosts, so the host ends with exit
/// code 5. It leaves no notice that would lead hosts to it.
#[test]
fn a_host_whose_link_comes_back_late_does_not_train() {
    let Some(network) = Network::new(3) else { return };
    let mut hosts = job(&network, 3, 1, &["recovery.silence_timeout=2", "recovery.host_timeout=6"]);
    network.set_link(1, "down");
    assert_eq!(second_start(&hosts.run), [2, 2], "{}", errors(&hosts.run));
    let its_hub = "the hub is lost, and starts again on this host";
    wait_until(&hosts.run, "its own hub", || errors(&hosts.run).contains(its_hub));
    network.set_link(1, "up");
    assert!(!hosts.run.path("run/.hub").exists(), "a notice of a hub without hosts");
    assert_eq!(code(&hosts.run, &mut hosts.keepers[1]), Some(5), "{}", errors(&hosts.run));
    hosts.expect_end(&[1], 0);
    assert_eq!(starts(&hosts.run).len(), 2, "{}", errors(&hosts.run));
    expect_bits(&hosts.run, "2");
}

/// The host of the hub is cut off, and may go on alone by `min_hosts`. The other two hosts have a new hub by then, so the first hub ends. It leaves the
/// notice of the new hub, also if its link comes back before.
#[test]
fn a_hub_that_is_cut_off_ends_and_the_other_hosts_go_on() {
    let Some(network) = Network::new(3) else { return };
    let settings = [
        "recovery.silence_timeout=2",
        "recovery.host_timeout=8",
        "recovery.min_hosts=1",
        "recovery.max_recoveries=20",
        "max_steps=100000",
    ];
    let mut hosts = job(&network, 3, 1, &settings);
    network.set_link(0, "down");
    assert_eq!(second_start(&hosts.run), [2, 2], "{}", errors(&hosts.run));
    network.set_link(0, "up");
    assert_eq!(code(&hosts.run, &mut hosts.keepers[0]), Some(5), "{}", errors(&hosts.run));
    assert!(errors(&hosts.run).contains("too few of all hosts are left"), "{}", errors(&hosts.run));
    assert!(hosts.run.path("run/.hub").is_file(), "hosts that start later find the new hub");
    train_further(&hosts.run, 5);
    for keeper in &hosts.keepers[1..] {
        signal("-TERM", keeper.id());
    }
    hosts.expect_end(&[0], 75);
    assert_eq!(starts(&hosts.run).len(), 2, "{}", errors(&hosts.run));
    expect_each_step_once(&hosts.run);
    let (lines, (undisturbed, _)) = (log(&hosts.run.path("run"), "metrics.jsonl"), undisturbed("2"));
    let both = lines.len().min(undisturbed.len() - 1);
    assert!(both > 0 && lines[..both] == undisturbed[..both], "{}", errors(&hosts.run));
}
