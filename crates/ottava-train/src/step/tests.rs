use super::{Action, Places, Program, Reductions};
use Action::{Norm, Reduce, SumTied, Update};
use ottava_parallel::{Message, Part, Schedule, ScheduleKind, Zero};
use ottava_recipe::mode::Pass;

fn forward(stage: usize, micro_batch: usize) -> Action {
    Action::Forward { stage, micro_batch }
}

fn loss(micro_batch: usize) -> Action {
    Action::Loss { micro_batch }
}

fn backward(stage: usize, micro_batch: usize) -> Action {
    Action::Backward { stage, micro_batch, part: Part::Both, reduces: false }
}

fn reducing(stage: usize, micro_batch: usize) -> Action {
    Action::Backward { stage, micro_batch, part: Part::Both, reduces: true }
}

fn dgrad(stage: usize, micro_batch: usize) -> Action {
    Action::Backward { stage, micro_batch, part: Part::Dgrad, reduces: false }
}

fn wgrad(stage: usize, micro_batch: usize) -> Action {
    Action::Backward { stage, micro_batch, part: Part::Wgrad, reduces: false }
}

fn send(message: Message, stage: usize, micro_batch: usize) -> Action {
    Action::Send { message, stage, micro_batch }
}

fn store(micro_batch: usize) -> Action {
    Action::StoreLosses { micro_batch }
}

/// Returns the reason why the actions of a training program are rejected. Returns an empty string if they are accepted.
fn problem(stages: usize, micro_batches: usize, actions: &[Action]) -> String {
    let program = Program { pass: Pass::Training, actions: actions.to_vec() };
    program.check(&Places::new(1, 0, stages), micro_batches).map_or_else(|error| error.to_string(), |()| String::new())
}

#[test]
fn the_programs_of_runs_are_valid() {
    for micro_batches in 1..5 {
        for (ranks, zero) in [1, 2, 8].into_iter().flat_map(|ranks| Zero::ALL.map(|zero| (ranks, zero))) {
            let program = Program::step(micro_batches, Reductions::for_step(ranks, zero));
            program.check(&Places::new(1, 0, 1), micro_batches).unwrap();
            assert_eq!(program.reduces(), ranks > 1);
        }
        Program::gradients(micro_batches).check(&Places::new(1, 0, 1), micro_batches).unwrap();
    }
    Program::evaluation().check(&Places::new(1, 0, 1), 1).unwrap();
}

#[test]
fn the_last_micro_batch_reduces_unless_ranks_keep_slices_of_gradients() {
    for (ranks, zero, expected) in [
        (1, Zero::Weights, [false, false, false]),
        (2, Zero::Nothing, [false, false, true]),
        (2, Zero::OptimizerStates, [false, false, true]),
        (2, Zero::Gradients, [true, true, true]),
        (2, Zero::Weights, [true, true, true]),
    ] {
        let program = Program::step(3, Reductions::for_step(ranks, zero));
        let reduces = |action: &Action| match action {
            Action::Backward { reduces, .. } => Some(*reduces),
            _ => None,
        };
        assert_eq!(program.actions.iter().filter_map(reduces).collect::<Vec<_>>(), expected, "{ranks} {zero:?}");
    }
}

#[test]
fn micro_batches_of_stages_may_interleave() {
    let one_forward_one_backward = [
        forward(0, 0),
        forward(0, 1),
        forward(1, 0),
        loss(0),
        backward(1, 0),
        forward(1, 1),
        backward(0, 0),
        loss(1),
        backward(1, 1),
        backward(0, 1),
    ];
    assert_eq!(problem(2, 2, &one_forward_one_backward), "");
}

#[test]
fn actions_in_a_wrong_order_are_refused_with_a_reason() {
    let through = |m| [forward(0, m), loss(m), backward(0, m), store(m)];
    let step = |end: &[Action]| [&through(0)[..], end].concat();
    let cases: &[(usize, usize, &[Action], &str)] = &[
        (
            1,
            1,
            &[backward(0, 0)],
            "action 0 of the program (backward of stage 0, micro-batch 0): before it comes: forward of stage 0",
        ),
        (1, 1, &[forward(0, 0), forward(0, 0)], "it has run before"),
        (1, 1, &[forward(0, 0), loss(0), forward(0, 0)], "it has run before"),
        (1, 1, &[forward(0, 0), loss(0), loss(0)], "it has run before"),
        (2, 1, &[forward(1, 0)], "before it comes: forward of stage 0, micro-batch 0"),
        (2, 1, &[forward(0, 0), loss(0)], "before it comes: forward of stage 1"),
        (2, 1, &[forward(0, 0), forward(1, 0), loss(0), backward(0, 0)], "before it comes: backward of stage 1"),
        (1, 1, &[forward(0, 0), loss(0), backward(0, 0), backward(0, 0)], "it has run before"),
        (1, 1, &[forward(1, 0)], "it has 1 stages"),
        (1, 2, &[forward(0, 2)], "micro-batches are 0 to 1"),
        (1, 1, &[store(0)], "the loss of the micro-batch comes first"),
        (1, 1, &[forward(0, 0), loss(0), store(0), store(0)], "they have been stored before"),
        (1, 1, &[Update], "micro-batch 0 has not run"),
        (1, 1, &[forward(0, 0), loss(0), Norm], "micro-batch 0 is still in flight"),
        (1, 1, &[forward(0, 0), loss(0)], "ends too early: micro-batch 0 is still in flight"),
        (1, 2, &through(0), "ends too early: micro-batch 1 has not run"),
        (1, 1, &step(&[Update]), "the action before it has to be: norm of the gradients"),
        (1, 1, &step(&[Norm, Update, Update]), "the action before it has to be: norm of the gradients"),
        (1, 1, &step(&[Norm, Norm]), "it comes after: norm of the gradients"),
        (1, 1, &step(&[Reduce]), "the last backward does not reduce its gradients"),
        (1, 1, &step(&[Norm, forward(0, 0)]), "it comes after: norm of the gradients"),
        (1, 1, &[forward(0, 0), loss(0), backward(0, 0), Norm, Update], "the losses of micro-batch 0 are not stored"),
        (1, 1, &[forward(0, 0), loss(0), reducing(0, 0), Norm], "the action before it has to be: reduce the remaining"),
        (1, 1, &[forward(0, 0), loss(0), reducing(0, 0)], "reductions for which no action waits"),
        (
            1,
            2,
            &[forward(0, 0), loss(0), forward(0, 1), loss(1), reducing(0, 0)],
            "it reduces gradients to which backward of micro-batch 1 still adds",
        ),
        (1, 1, &[forward(0, 0), loss(0), wgrad(0, 0)], "dgrad of the stage comes first"),
        (1, 1, &[forward(0, 0), loss(0), dgrad(0, 0), wgrad(0, 0), wgrad(0, 0)], "leaves its products once"),
        (1, 1, &[forward(0, 0), loss(0), dgrad(0, 0), store(0), Norm], "wgrad of stage 0, micro-batch 0 is left"),
        (1, 1, &[forward(0, 0), loss(0), dgrad(0, 0)], "ends too early: wgrad of stage 0, micro-batch 0 is left"),
        (1, 1, &[forward(0, 0), send(Message::Activation, 0, 0)], "this process has no such action"),
        (1, 1, &step(&[Norm, SumTied]), "it comes after: norm of the gradients"),
    ];
    for (stages, micro_batches, actions, reason) in cases {
        let found = problem(*stages, *micro_batches, actions);
        assert!(found.contains(reason), "{actions:?}: expected {reason:?}, got {found:?}");
    }
}

#[test]
fn an_evaluation_has_nothing_for_backward_and_no_update() {
    for (action, reason) in [
        (backward(0, 0), "an evaluation saves nothing for backward"),
        (store(0), "it returns them"),
        (Norm, "an evaluation has no gradients"),
    ] {
        let mut program = Program::evaluation();
        program.actions.push(action);
        let found = program.check(&Places::new(1, 0, 1), 1).unwrap_err().to_string();
        assert!(found.contains(reason), "{found}");
    }
}

/// Returns all small schedules, each with every rank of its pipeline.
fn ranks_of_schedules() -> Vec<(Schedule, usize)> {
    let mut all = Vec::new();
    for kind in ScheduleKind::ALL {
        for (ranks, micro_batches) in [(2, 2), (2, 5), (3, 6), (4, 3), (4, 8)] {
            let stages = if kind == ScheduleKind::Interleaved { 2 } else { 1 };
            let schedule = Schedule { kind, ranks, stages, micro_batches };
            let of_rank = |rank| (schedule, rank);
            all.extend((0..ranks).filter(|_| schedule.check().is_ok()).map(of_rank));
        }
    }
    all
}

#[test]
fn the_programs_of_pipelines_are_valid() {
    for (schedule, rank) in ranks_of_schedules() {
        let (places, micro_batches) = (Places::new(schedule.ranks, rank, schedule.stages), schedule.micro_batches);
        for (reductions, is_tied) in [(Reductions::Never, true), (Reductions::Last, false), (Reductions::Last, true)] {
            let program = Program::step_of(&schedule, rank, reductions, is_tied);
            program.check(&places, micro_batches).unwrap();
        }
        Program::gradients_of(&schedule, rank).check(&places, micro_batches).unwrap();
        Program::evaluation_of(&schedule, rank).check(&places, micro_batches).unwrap();
    }
}

/// A program of a rank without one of its actions, or with one of its actions twice, is rejected.
#[test]
fn a_program_of_a_pipeline_without_an_action_is_refused() {
    for (schedule, rank) in ranks_of_schedules() {
        let places = Places::new(schedule.ranks, rank, schedule.stages);
        let program = Program::step_of(&schedule, rank, Reductions::Last, false);
        for at in 0..program.actions.len() - 1 {
            let mut missing = program.clone();
            let gone = missing.actions.remove(at);
            assert!(missing.check(&places, schedule.micro_batches).is_err(), "{schedule:?}, rank {rank}: {gone:?}");
            missing.actions.splice(at..at, [gone; 2]);
            assert!(missing.check(&places, schedule.micro_batches).is_err(), "{schedule:?}, rank {rank}: {gone:?}");
        }
        let other = (rank + 1) % schedule.ranks;
        let other = Places::new(schedule.ranks, other, schedule.stages);
        let is_like = schedule.ranks > 2 && other == places;
        assert!(is_like || program.check(&other, schedule.micro_batches).is_err(), "{schedule:?}, rank {rank}");
    }
}
