//! Tests that a job survives losses in every order: of hosts, ranks, the hub, messages and copies.

mod faults;
mod world;

use faults::{Fault, Move, Settings};
use ottava_elastic::{HostId, Phase, Policy, Step, Straggler};
use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use world::World;

/// Returns a job of `places` hosts and `spares`.
fn job(places: u32, spares: u32, last: Step) -> Settings {
    let hosts = places + spares;
    let policy = Policy {
        sizes: vec![places],
        hosts,
        quorum: 0,
        snapshots: true,
        straggler: Straggler::Warn,
        most_recoveries: 12,
    };
    Settings { policy, interval: 1, save_steps: 1000, last }
}

/// Explores all orders of messages, with at most `faults` of the faults that `faults_of` allows in a state. Returns the number of states.
fn explore(settings: &Settings, faults: usize, faults_of: fn(&World) -> Vec<Fault>) -> usize {
    let mut seen = HashSet::new();
    let mut open = vec![(World::new(settings), faults)];
    while let Some((world, left)) = open.pop() {
        if world.is_over(settings) {
            continue;
        }
        let faults = if left > 0 { faults_of(&world) } else { Vec::new() };
        let moves = world.moves(settings).into_iter().map(|next| (next, left));
        for (next, left) in moves.chain(faults.into_iter().map(|fault| (Move::Fault(fault), left.saturating_sub(1)))) {
            let mut after = world.clone();
            if let Err(problem) = after.make(next, settings) {
                panic!("{problem}\nafter {next:?} in {world:#?}");
            }
            let mut hasher = DefaultHasher::new();
            (&after, left).hash(&mut hasher);
            if seen.insert(hasher.finish()) {
                open.push((after, left));
            }
        }
    }
    seen.len()
}

/// The loss of any host or worker.
fn losses(world: &World) -> Vec<Fault> {
    let of = |host: HostId| [Fault::Host(host, false), Fault::Host(host, true), Fault::Worker(host)];
    world.living().into_iter().flat_map(of).collect()
}

#[test]
fn every_order_of_a_loss_and_of_messages_ends_with_the_last_step() {
    let states = explore(&job(2, 1, 2), 2, losses);
    println!("{states} states");
}

/// The job goes on with one host, and snapshots overwrite older ones.
#[test]
fn every_order_of_a_loss_without_a_spare() {
    let mut settings = job(2, 0, 4);
    settings.policy.sizes = vec![2, 1];
    let states = explore(&settings, 1, losses);
    println!("{states} states");
}

#[test]
fn every_order_of_two_losses_of_one_host_and_a_spare() {
    let states = explore(&job(1, 1, 2), 2, |world| {
        let hub = [Fault::Hub, Fault::EarlyTimeout];
        let host =
            |host: HostId| [Fault::HostAndHub(host), Fault::Silent(host), Fault::Damage(host), Fault::Corrupt(host)];
        losses(world).into_iter().chain(hub).chain(world.living().into_iter().flat_map(host)).collect()
    });
    println!("{states} states");
}

/// Returns a job of two hosts and a spare that has taken two snapshots. The last snapshot is damaged on these hosts without a report.
fn corrupted(hosts: &[HostId]) -> (Settings, World) {
    let settings = job(2, 1, 6);
    let mut world = World::new(&settings);
    make_moves(&mut world, &settings, |world| world.sealed() == Some(2));
    for host in hosts {
        world.make(Move::Fault(Fault::Corrupt(*host)), &settings).unwrap();
    }
    world.make(Move::Fault(Fault::Worker(0)), &settings).unwrap();
    (settings, world)
}

/// Makes moves, steps last, until `is_done`.
fn make_moves(world: &mut World, settings: &Settings, is_done: impl Fn(&World) -> bool) {
    for _ in 0..1000 {
        if is_done(world) {
            return;
        }
        let moves = world.moves(settings);
        let next = moves.iter().find(|next| **next != Move::Step).unwrap_or(&Move::Step);
        world.make(*next, settings).unwrap();
    }
    panic!("no progress: {world:#?}");
}

#[test]
fn a_damaged_share_is_read_from_its_copy_or_an_older_step_is_taken() {
    for (hosts, step) in [(&[0][..], 2), (&[0, 1], 1)] {
        let (settings, mut world) = corrupted(hosts);
        let first = world.hub.as_ref().and_then(|hub| hub.members()).map_or(0, |members| members.epoch);
        let formed = |world: &World| world.hub.as_ref().and_then(|hub| hub.members().cloned());
        make_moves(&mut world, &settings, |world| {
            world.phase() == Some(Phase::Run) && formed(world).is_some_and(|members| members.epoch > first)
                || world.phase() == Some(Phase::Replay)
        });
        assert_eq!(formed(&world).map(|members| members.step), Some(step), "{hosts:?}");
        make_moves(&mut world, &settings, |world| world.is_over(&settings));
    }
}

#[test]
fn a_job_that_only_recovers_ends() {
    let settings = job(2, 0, 6);
    let mut world = World::new(&settings);
    let mut failures = 0;
    while !world.has_ended() {
        make_moves(&mut world, &settings, |world| world.has_ended() || world.phase() == Some(Phase::Run));
        if !world.has_ended() {
            world.make(Move::Fault(Fault::Worker(0)), &settings).unwrap();
            make_moves(&mut world, &settings, |world| world.phase() != Some(Phase::Run));
            failures += 1;
        }
        assert!(failures < 20, "the job goes on");
    }
    assert_eq!(failures, settings.policy.most_recoveries + 1);
    assert_eq!(world.reason, Some("the job recovered too often without a new snapshot or checkpoint"));
}

#[test]
fn a_job_ends_with_the_code_of_its_workers() {
    for (codes, expected) in [([0, 0], 0), ([75, 75], 75), ([0, 4], 4)] {
        let settings = job(2, 1, 6);
        let mut world = World::new(&settings);
        make_moves(&mut world, &settings, |world| world.sealed() == Some(2));
        for (host, code) in [0, 1].into_iter().zip(codes) {
            assert_eq!(world.phase(), Some(Phase::Run), "all workers end before the job");
            world.end_workers(host, code);
            make_moves(&mut world, &settings, |world| world.phase() != Some(Phase::Run) || !world.waits());
        }
        assert_eq!(world.phase(), Some(Phase::Ended(expected)));
    }
}

/// If the workers of a host fail, the workers of the other hosts lose them.
#[test]
fn lost_workers_do_not_hide_why_others_failed() {
    let settings = job(2, 1, 6);
    let mut world = World::new(&settings);
    make_moves(&mut world, &settings, |world| world.sealed() == Some(2));
    world.end_workers(0, 4);
    make_moves(&mut world, &settings, |world| !world.waits());
    world.make(Move::Fault(Fault::Worker(1)), &settings).unwrap();
    make_moves(&mut world, &settings, |world| world.phase() != Some(Phase::Run));
    assert_eq!(world.phase(), Some(Phase::Ended(4)));
}

#[test]
fn a_spare_takes_the_place_of_a_host_that_loses_its_workers_again_and_again() {
    let settings = job(2, 1, 6);
    let mut world = World::new(&settings);
    let hosts = |world: &World| world.hub.as_ref().and_then(|hub| Some(hub.members()?.hosts.clone()));
    make_moves(&mut world, &settings, |world| world.sealed() == Some(2));
    for expected in [[0, 1], [0, 2]] {
        world.make(Move::Fault(Fault::Worker(1)), &settings).unwrap();
        make_moves(&mut world, &settings, |world| world.phase() != Some(Phase::Run));
        make_moves(&mut world, &settings, |world| world.phase() == Some(Phase::Run));
        assert_eq!(hosts(&world), Some(expected.to_vec()));
    }
}

#[test]
fn a_hub_without_its_quorum_ends_the_job() {
    let mut settings = job(2, 2, 6);
    settings.policy.quorum = 3;
    for (lost, phase) in [(&[0][..], Phase::Run), (&[2, 0], Phase::Ended(5))] {
        let mut world = World::new(&settings);
        make_moves(&mut world, &settings, |world| world.sealed() == Some(2));
        for host in lost {
            world.make(Move::Fault(Fault::Host(*host, false)), &settings).unwrap();
        }
        make_moves(&mut world, &settings, |world| !matches!(world.phase(), Some(Phase::Run)));
        make_moves(&mut world, &settings, |world| world.has_ended() || world.phase() == Some(Phase::Run));
        assert_eq!(world.phase(), Some(phase));
        let is_short = world.reason == Some("too few of all hosts are left: the others may go on without them");
        assert_eq!(is_short, phase == Phase::Ended(5), "{:?}", world.reason);
    }
}

/// A generator of reproducible random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Returns a random fault that can happen now.
fn fault(world: &World, random: &mut Random) -> Option<Fault> {
    let (living, lost) = (world.living(), world.lost());
    if living.is_empty() {
        return None;
    }
    let host = random.of(&living);
    Some(match random.below(15) {
        0..4 => Fault::Host(host, random.below(2) == 0),
        4..6 => Fault::Worker(host),
        6 => Fault::Hub,
        7 => Fault::HostAndHub(host),
        8 => Fault::Pair(host),
        9 => Fault::Silent(host),
        10 => Fault::Damage(host),
        11 => Fault::Slow(host),
        12 => Fault::Stuck(host),
        13 => Fault::Corrupt(host),
        _ if !lost.is_empty() => Fault::Return(random.of(&lost)),
        _ => Fault::EarlyTimeout,
    })
}

/// What random runs met.
#[derive(Default)]
struct Met {
    /// The number of faults by phase.
    faults: BTreeMap<String, usize>,
    finished: usize,
    ended: usize,
    /// The runs that went on with fewer hosts.
    shrunk: usize,
}

/// Runs a job with random faults in a random order of messages.
fn run(seed: u64, met: &mut Met) {
    let mut random = Random(seed);
    let (places, spares) = (1 + random.below(5) as u32, random.below(4) as u32);
    let sizes = if random.below(2) == 0 { vec![places] } else { (1..=places).rev().collect() };
    let straggler = random.of(&[Straggler::Warn, Straggler::Swap]);
    let policy = Policy {
        sizes,
        hosts: places + spares,
        quorum: 0,
        snapshots: random.below(8) > 0,
        straggler,
        most_recoveries: 100,
    };
    let settings =
        Settings { policy, interval: 1 + random.below(3) as Step, save_steps: 4 + random.below(8) as Step, last: 20 };
    let mut world = World::new(&settings);
    // Half of the runs have faults in quick succession, so that faults meet recoveries.
    let (mut faults, rate) = (random.below(10), [20, 150][random.below(2)]);
    let mut made = Vec::new();
    for _ in 0..20_000 {
        if world.is_over(&settings) {
            break;
        }
        // The hub is rarely in this phase, which only ends by a host that joins or by a timeout.
        let rate = if world.phase() == Some(Phase::Form) { 4 } else { rate };
        let next = match random.below(rate) == 0 && faults > 0 {
            true => fault(&world, &mut random).map(Move::Fault),
            false => None,
        };
        let next = next.unwrap_or_else(|| random.of(&world.moves(&settings)));
        if let Move::Fault(fault) = next {
            faults -= 1;
            let phase = world.phase().map_or("no hub".to_string(), |phase| format!("{phase:?}"));
            let kind = format!("{fault:?}");
            if !["Slow", "Return", "Early"].iter().any(|other| kind.starts_with(other)) {
                *met.faults.entry(phase).or_default() += 1;
            }
        }
        made.push(next);
        if let Err(problem) = world.make(next, &settings) {
            panic!("seed {seed}: {problem}\n{settings:?}\n{made:?}");
        }
    }
    assert!(world.is_over(&settings), "seed {seed}: no progress\n{settings:?}\n{made:?}\n{world:#?}");
    let size = world.hub.as_ref().and_then(|hub| Some(hub.members()?.places()));
    met.shrunk += usize::from(size.is_some_and(|size| size < places));
    match world.has_ended() {
        true => met.ended += 1,
        false => met.finished += 1,
    }
    assert!(
        !world.has_ended() || world.had_to_end(&settings),
        "seed {seed}: ended because {:?}\n{settings:?}\n{made:?}",
        world.reason
    );
}

#[test]
fn random_losses_in_every_phase_end_in_progress_or_with_the_code() {
    let mut met = Met::default();
    for seed in 0..8000 {
        run(seed, &mut met);
    }
    println!("{:?}, {} finished, {} ended, {} shrunk", met.faults, met.finished, met.ended, met.shrunk);
    for phase in ["Hold", "Form", "Fill", "Start", "Replay", "Run", "no hub"] {
        let faults = met.faults.get(phase).copied().unwrap_or(0);
        assert!(faults >= 200, "{phase}: {faults} faults");
    }
    assert!(met.finished > met.ended && met.shrunk > 100, "{} finished, {} ended", met.finished, met.ended);
}
