use super::inputs::DAY;
use super::*;
use crate::Straggler;

/// A job of `gpus` GPUs with `rate` failures of processes per 1,000 GPUs and day. Formulas hold for it, since it needs no spares. 16 hosts have the
/// failures of as many GPUs as are wanted.
fn job(gpus: u32, rate: f64, restart: f64, failures: f64) -> Inputs {
    let causes = vec![Cause { name: "process", per_1000_gpu_days: rate, scope: Scope::Process }];
    let inputs = Inputs::disk(16, gpus / 16, causes, restart, 0.0);
    Inputs { days: failures * inputs.mean_time_between_failures() / DAY, ..inputs }
}

/// A job of 16 hosts with snapshots that loses a host `per_day` times a day.
fn losing_hosts(per_day: f64, spares: u32) -> Inputs {
    let causes = vec![Cause { name: "host", per_1000_gpu_days: per_day / 128.0 * 1000.0, scope: Scope::Host }];
    let inputs = Inputs::disk(16, 8, causes, 600.0, 100.0).with_memory(0.01, 30.0);
    Inputs { spares, ..inputs }
}

#[track_caller]
fn close(measured: f64, expected: f64, tolerance: f64) {
    assert!((measured - expected).abs() <= tolerance, "{measured:.4}, not {expected:.4}");
}

/// GPUs, failures per 1,000 GPUs and day; goodput in percent with checkpoints and a restart of 10 min and of 2 min, and with snapshots and 30 s.
const TABLE: [(u32, f64, [f64; 3]); 4] = [
    (1024, 3.0, [95.0, 96.7, 98.9]),
    (16_384, 0.47, [90.3, 94.2, 98.7]),
    (16_384, 0.8, [86.2, 92.1, 98.6]),
    (100_000, 0.8, [47.0, 74.0, 96.3]),
];

#[test]
fn goodput_is_within_one_point_of_the_table_of_formulas() {
    for (gpus, rate, [slow, fast, memory]) in TABLE {
        for (restart, expected) in [(600.0, slow), (120.0, fast)] {
            close(run_seeds(&job(gpus, rate, restart, 2000.0), 2).goodput.mean * 100.0, expected, 1.0);
        }
        close(run_seeds(&job(gpus, rate, 30.0, 2000.0).with_memory(0.01, 30.0), 2).goodput.mean * 100.0, memory, 1.0);
    }
    let rare = job(1024, 3.0, 600.0, 4000.0);
    let formula = rare.as_disk().goodput(rare.saves.interval);
    close(run_seeds(&rare, 4).goodput.mean, formula, 0.003);
    close(memory_goodput(0.01, 30.0, rare.mean_time_between_failures()), 0.989, 0.0005);
}

#[test]
fn the_best_interval_is_the_best() {
    let inputs = job(16_384, 0.47, 600.0, 4000.0);
    let goodput = |factor: f64| {
        let saves = Saves { interval: inputs.saves.interval * factor, ..inputs.saves };
        run_seeds(&Inputs { saves, ..inputs.clone() }, 2).goodput.mean
    };
    assert!(goodput(1.0) > goodput(0.3) && goodput(1.0) > goodput(3.0));
    close(inputs.saves.interval, 10.0 + (2.0_f64 * 10.0 * (11_220.0 + 600.0) + 100.0).sqrt(), 5.0);
}

/// The published number, and the largest difference in points that the page states.
#[test]
fn published_runs_are_met_without_fitting() {
    for (case, within) in published().iter().zip([1.0, 3.0, 5.0, 2.0, 1.0]) {
        let summary = run_seeds(&case.inputs, 1);
        println!("{}: {:.1} %, published {}", case.name, summary.goodput.mean * 100.0, case.published);
        close(summary.goodput.mean * 100.0, case.goodput * 100.0, within);
    }
}

#[test]
fn the_seed_alone_decides() {
    let inputs = Inputs { in_pairs: 0.3, smallest: 12, ..losing_hosts(3.0, 2) };
    assert_eq!(run(&inputs, 7), run(&inputs, 7));
    assert_ne!(run(&inputs, 7), run(&inputs, 8));
    assert_eq!(run_seeds(&inputs, 5), run_seeds(&inputs, 5));
}

#[test]
fn ten_thousand_ranks_recover() {
    let causes = per_1000_gpu_days(2.0);
    let inputs = Inputs::disk(10_000, 1, causes, 600.0, 1.0).with_memory(0.01, 30.0);
    let outcome = run(&inputs, 3);
    assert!(outcome.failures > 10, "{outcome:?}");
    assert_eq!((outcome.copies_lost, outcome.ended, outcome.most_lost_steps), (0, 0, 0), "{outcome:?}");
    close(outcome.goodput(), memory_goodput(0.01, 30.0, inputs.mean_time_between_failures()), 0.005);
}

#[test]
fn no_failure_loses_more_steps_than_a_snapshot_that_is_not_sealed() {
    for (every, seal) in [(1, 0.0), (10, 20.0), (10, 120.0)] {
        let inputs = losing_hosts(2.0, 16);
        let snapshots = Some(Snapshots { every, seal, cost: 0.01 });
        let outcome = run(&Inputs { snapshots, ..inputs }, 1);
        // A step takes 5 s. A snapshot that takes 120 s is taken every 30 steps.
        let interval = if seal > 50.0 { 30 } else { every };
        let unsealed = (seal / 5.0) as u64;
        assert_eq!((outcome.copies_lost, outcome.ended), (0, 0), "{outcome:?}");
        assert!(outcome.most_lost_steps <= interval + unsealed, "{outcome:?}");
        assert!(every == 1 || outcome.most_lost_steps >= interval / 2, "{outcome:?}");
    }
}

#[test]
fn spares_decide_how_long_a_job_waits() {
    let none = run(&losing_hosts(0.5, 0), 1);
    let some = run(&losing_hosts(0.5, 4), 1);
    assert!(none.goodput() < 0.6 && none.waited > 0.3 * none.wall && none.exhausted > 10, "{none:?}");
    assert!(some.goodput() > 0.95 && some.exhausted < none.exhausted, "{some:?}");
    let shrinking = run(&Inputs { smallest: 12, ..losing_hosts(0.5, 0) }, 1);
    assert!(shrinking.goodput() > none.goodput() + 0.2 && shrinking.goodput() < some.goodput(), "{shrinking:?}");
    assert_eq!(spares(128.0 * 6.5 / 1000.0 * 2.0, 0.99), 5);
    assert_eq!(spares(0.0, 0.99), 0);
    // The distribution of 2,000 lost hosts is close to the normal one, with a quantile of 2.33 standard deviations.
    close(f64::from(spares(2000.0, 0.99)), 2000.0 + 2.33 * 2000.0_f64.sqrt(), 2.0);
}

#[test]
fn default_spares_are_enough_although_spares_fail() {
    let inputs = Inputs::disk(16, 8, losing_hosts(4.0, 0).causes, 600.0, 1000.0);
    // Half of a host fails in two days, so a third of all hosts are being repaired.
    let in_repair = f64::from(16 + inputs.spares) / 3.0;
    assert!(spares(in_repair, 0.99) <= inputs.spares && spares(16.0 / 3.0, 0.99) < inputs.spares, "{}", inputs.spares);
    let outcome = run(&inputs, 1);
    assert!(outcome.waited < 0.01 * outcome.wall, "{outcome:?}");
}

#[test]
fn a_loss_of_both_copies_goes_back_to_the_checkpoint() {
    let inputs = losing_hosts(2.0, 16);
    assert_eq!(run(&inputs, 1).copies_lost, 0);
    let pairs = run(&Inputs { in_pairs: 0.5, ..inputs }, 1);
    assert!(pairs.copies_lost > 3 && pairs.most_lost_steps > 100, "{pairs:?}");
    assert!(pairs.most_lost_steps <= 2 * 3600 / 5, "{pairs:?}");
}

#[test]
fn a_slow_host_costs_less_if_it_is_swapped() {
    let stragglers = Stragglers { per_1000_gpu_days: 3.0, slowdown: 1.3, notice: 600.0, lasts: DAY };
    let with = |policy| run(&Inputs { stragglers: Some(stragglers), policy, ..losing_hosts(0.1, 4) }, 2);
    let (warn, swap) = (with(Straggler::Warn), with(Straggler::Swap));
    assert!(warn.stragglers > 10 && warn.goodput() < 0.95, "{warn:?}");
    assert!(swap.goodput() > warn.goodput() + 0.02, "{warn:?} {swap:?}");
}
