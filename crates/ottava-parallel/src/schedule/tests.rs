use super::simulation::Simulation;
use super::{Message, Part, Schedule, ScheduleKind, Task};
use std::collections::HashMap;

/// Returns all small schedules of all kinds.
fn schedules() -> Vec<Schedule> {
    let mut all = Vec::new();
    for kind in ScheduleKind::ALL {
        for ranks in 1..=6 {
            for stages in if kind == ScheduleKind::Interleaved { 2..=4 } else { 1..=1 } {
                for micro_batches in 1..=16 {
                    let schedule = Schedule { kind, ranks, stages, micro_batches };
                    // A single rank has only one stage.
                    let exists = schedule.check().is_ok() && (ranks > 1 || stages == 1);
                    all.extend(exists.then_some(schedule));
                }
            }
        }
    }
    all
}

/// Errors unless each micro-batch passes each stage of `tasks` once in forward and then once in backward, with wgrad after dgrad.
fn passes_once(schedule: &Schedule, tasks: &[Task]) -> Result<(), String> {
    let mut place: HashMap<Task, usize> = HashMap::new();
    for (at, &task) in tasks.iter().enumerate() {
        if place.insert(task, at).is_some() {
            return Err(format!("{task:?} twice"));
        }
    }
    let at = |task: Task| place.get(&task).copied();
    for stage in 0..schedule.stages {
        let mut last = None;
        for micro_batch in 0..schedule.micro_batches {
            let backward = |part| at(Task::Backward { stage, micro_batch, part });
            let forward = at(Task::Forward { stage, micro_batch });
            let (dgrad, wgrad) = match (backward(Part::Both), backward(Part::Dgrad), backward(Part::Wgrad)) {
                (Some(both), None, None) => (both, both),
                (None, Some(dgrad), Some(wgrad)) => (dgrad, wgrad),
                other => return Err(format!("backward of stage {stage}, micro-batch {micro_batch}: {other:?}")),
            };
            if forward.is_none_or(|forward| forward >= dgrad) || wgrad < dgrad {
                return Err(format!("stage {stage}, micro-batch {micro_batch}: {forward:?} {dgrad} {wgrad}"));
            }
            if Some([dgrad, wgrad]) <= last || last.is_some_and(|[_, before]| wgrad <= before) {
                return Err(format!("stage {stage} adds gradients of micro-batch {micro_batch} too early"));
            }
            last = Some([dgrad, wgrad]);
        }
    }
    let passes = tasks.iter().filter(|task| matches!(task, Task::Forward { .. } | Task::Backward { .. })).count();
    let parts = if tasks.iter().any(|task| matches!(task, Task::Backward { part: Part::Wgrad, .. })) { 3 } else { 2 };
    match passes == parts * schedule.stages * schedule.micro_batches {
        true => Ok(()),
        false => Err(format!("{passes} passes")),
    }
}

/// Errors if a task of `tasks` reads a value that is missing, or if a result is sent before it is computed.
fn reads_what_is_there(schedule: &Schedule, rank: usize, tasks: &[Task]) -> Result<(), String> {
    let end = schedule.all_stages() - 1;
    let mut there: HashMap<(Message, usize, usize, bool), bool> = HashMap::new();
    for task in tasks {
        let (message, stage, micro_batch) = match *task {
            Task::Forward { stage, micro_batch } => (Message::Activation, stage, micro_batch),
            Task::Backward { part: Part::Wgrad, .. } => continue,
            Task::Backward { stage, micro_batch, .. } => (Message::Gradient, stage, micro_batch),
            Task::Send { message, stage, micro_batch } => {
                match there.insert((message, stage, micro_batch, true), false) {
                    Some(true) => continue,
                    _ => return Err(format!("{task:?} has nothing to send")),
                }
            }
            Task::Receive { message, stage, micro_batch } => {
                there.insert((message, stage, micro_batch, false), true);
                continue;
            }
        };
        let starts = schedule.number(rank, stage) == if message == Message::Activation { 0 } else { end };
        if !starts && there.insert((message, stage, micro_batch, false), false) != Some(true) {
            return Err(format!("{task:?} has nothing to read"));
        }
        there.insert((message, stage, micro_batch, true), true);
    }
    Ok(())
}

/// Returns the first problem of the tasks of all ranks, or `None` if they have no problem.
fn problem(schedule: Schedule, tasks: Vec<Vec<Task>>) -> Option<String> {
    let of_rank = |(rank, tasks): (usize, &Vec<Task>)| {
        passes_once(&schedule, tasks).and_then(|()| reads_what_is_there(&schedule, rank, tasks)).err()
    };
    if let Some(problem) = tasks.iter().enumerate().find_map(of_rank) {
        return Some(problem);
    }
    let simulation = Simulation::of(schedule, tasks);
    simulation.messages_match().and_then(|()| simulation.run().map(drop)).err()
}

fn tasks_of(schedule: Schedule) -> Vec<Vec<Task>> {
    (0..schedule.ranks).map(|rank| schedule.tasks(rank)).collect()
}

#[test]
fn every_schedule_runs_each_pass_once_without_a_deadlock() {
    for schedule in schedules() {
        assert_eq!(problem(schedule, tasks_of(schedule)), None, "{schedule:?}");
    }
}

#[test]
fn memory_is_bounded() {
    for schedule in schedules() {
        let simulation = Simulation::new(schedule);
        let bounds: Vec<usize> = (0..schedule.ranks).map(|rank| schedule.most_in_flight(rank)).collect();
        assert_eq!(simulation.most_in_flight(), bounds, "{schedule:?}");
        // Deferred wgrads keep operands. No rank holds them for more micro-batches than 1F1B has on the first rank.
        let operands = simulation.most_with_operands();
        match schedule.kind {
            ScheduleKind::ZeroBubble => {
                let most = schedule.ranks.min(schedule.micro_batches);
                assert!(operands.iter().all(|&held| held <= most), "{schedule:?}: {operands:?}");
            }
            _ => assert_eq!(operands, bounds, "{schedule:?}"),
        }
    }
}

#[test]
fn the_bubble_is_that_of_the_formula() {
    for schedule in schedules() {
        let times = Simulation::new(schedule).run().unwrap();
        let busy = 3 * schedule.stages * schedule.micro_batches;
        assert!(times.iter().all(|time| time.busy == busy), "{schedule:?}");
        let end = times.iter().map(|time| time.end).max().unwrap();
        let bubble = (end - busy) as f64 / busy as f64;
        if schedule.kind == ScheduleKind::ZeroBubble && schedule.micro_batches < schedule.ranks {
            // There are too few wgrads to fill the gaps.
            let other = Schedule { kind: ScheduleKind::OneForwardOneBackward, ..schedule };
            assert!(bubble <= other.bubble() && bubble >= schedule.bubble(), "{schedule:?}: {bubble}");
            continue;
        }
        assert!((bubble - schedule.bubble()).abs() < 1e-12, "{schedule:?}: {bubble}, formula {}", schedule.bubble());
    }
}

#[test]
fn one_rank_runs_one_micro_batch_after_the_other() {
    for kind in [ScheduleKind::OneForwardOneBackward, ScheduleKind::ZeroBubble] {
        let both = |micro_batch| {
            let part = Part::Both;
            [Task::Forward { stage: 0, micro_batch }, Task::Backward { stage: 0, micro_batch, part }]
        };
        let tasks = Schedule { kind, ranks: 1, stages: 1, micro_batches: 3 }.tasks(0);
        assert_eq!(tasks, (0..3).flat_map(both).collect::<Vec<_>>());
    }
}

#[test]
fn forward_tasks_send_each_micro_batch_through_all_stages() {
    for schedule in schedules() {
        let tasks: Vec<_> = (0..schedule.ranks).map(|rank| schedule.forward_tasks(rank)).collect();
        let simulation = Simulation::of(schedule, tasks);
        simulation.messages_match().and_then(|()| simulation.run().map(drop)).unwrap();
    }
}

/// Each swap of two neighbouring tasks that depend on each other, and each missing task, is detected.
#[test]
fn planted_faults_are_noticed() {
    let four = |kind, stages| Schedule { kind, ranks: 4, stages, micro_batches: 8 };
    for kind in ScheduleKind::ALL {
        let schedule = four(kind, if kind == ScheduleKind::Interleaved { 2 } else { 1 });
        for rank in 0..schedule.ranks {
            let tasks = tasks_of(schedule);
            for at in 0..tasks[rank].len() {
                let mut missing = tasks.clone();
                let gone = missing[rank].remove(at);
                assert!(problem(schedule, missing).is_some(), "{schedule:?}, rank {rank}: without {gone:?}");
                let mut twice = tasks.clone();
                twice[rank].insert(at, gone);
                assert!(problem(schedule, twice).is_some(), "{schedule:?}, rank {rank}: {gone:?} twice");
            }
            // Swap a receive with the task after it, and a send with the task before it.
            for at in 0..tasks[rank].len() - 1 {
                let pair = [tasks[rank][at], tasks[rank][at + 1]];
                let depends = match pair {
                    [Task::Receive { stage, micro_batch, .. }, Task::Forward { stage: s, micro_batch: m }]
                    | [Task::Receive { stage, micro_batch, .. }, Task::Backward { stage: s, micro_batch: m, .. }]
                    | [Task::Forward { stage, micro_batch }, Task::Send { stage: s, micro_batch: m, .. }]
                    | [Task::Backward { stage, micro_batch, .. }, Task::Send { stage: s, micro_batch: m, .. }] => {
                        (stage, micro_batch) == (s, m)
                    }
                    _ => false,
                };
                if depends {
                    let mut swapped = tasks.clone();
                    swapped[rank].swap(at, at + 1);
                    assert!(problem(schedule, swapped).is_some(), "{schedule:?}, rank {rank}: {pair:?} swapped");
                }
            }
        }
        // Swap two micro-batches on only one rank.
        let mut swapped = tasks_of(schedule);
        let other = |micro_batch: &mut usize| match micro_batch {
            2 => *micro_batch = 3,
            3 => *micro_batch = 2,
            _ => {}
        };
        for task in &mut swapped[1] {
            match task {
                Task::Forward { micro_batch, .. }
                | Task::Backward { micro_batch, .. }
                | Task::Send { micro_batch, .. }
                | Task::Receive { micro_batch, .. } => other(micro_batch),
            }
        }
        assert!(problem(schedule, swapped).is_some(), "{schedule:?}: micro-batches 2 and 3 swapped");
    }
    // A rank waits for a gradient before it has sent the activation on which the gradient depends.
    let schedule = four(ScheduleKind::OneForwardOneBackward, 1);
    let mut stuck = tasks_of(schedule);
    let first = |tasks: &[Task], wanted: Message| {
        tasks.iter().position(|task| matches!(task, Task::Receive { message, .. } if *message == wanted)).unwrap()
    };
    let at = first(&stuck[0], Message::Gradient);
    let receive = stuck[0].remove(at);
    stuck[0].insert(0, receive);
    let text = problem(schedule, stuck).unwrap();
    assert!(text.starts_with("deadlock: "), "{text}");
}

#[test]
fn numbers_that_a_kind_does_not_support_are_refused_with_the_key() {
    let refused = |kind, ranks, stages, micro_batches| {
        Schedule { kind, ranks, stages, micro_batches }
            .check()
            .map_or_else(|error| error.to_string(), |()| String::new())
    };
    assert_eq!(refused(ScheduleKind::Interleaved, 4, 2, 8), "");
    assert!(refused(ScheduleKind::Interleaved, 4, 2, 6).contains("gradient_accumulation_steps` to a multiple of 4"));
    assert!(refused(ScheduleKind::Interleaved, 4, 1, 8).contains("`parallel.pipeline_stages` to 2 or more"));
    assert!(refused(ScheduleKind::GPipe, 4, 2, 8).contains("schedule gpipe has one stage per rank"));
}
