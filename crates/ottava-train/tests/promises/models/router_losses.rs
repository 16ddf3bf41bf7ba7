//! Compares losses of routers with transformers: gradient norms of steps with masked prompts, padding, packed documents, several micro-batches and
//! DPO, on one rank and on several ranks.

use crate::models::recorded::Recorded;
use crate::objectives::preference::{load_preferences, with_preference};
use crate::parallel::mesh::{Mesh, MeshRank};
use crate::setup::{on_ranks, recipe};
use ottava_data::{Batch, PreferenceBatch};
use ottava_models::layers::RouterLossFactors;
use ottava_parallel::{LayerAxes, Schedule, SentActivations, Zero};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::MemoryPolicy;
use ottava_recipe::scaling::RouterLoad;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::ops::{IGNORE_INDEX, PreferenceLoss};
use ottava_train::objective::preference::Preference;
use serde::Deserialize;
use std::rc::Rc;

const TOKENS: usize = 16;

/// The results that `scripts/make_router_referee.py` recorded.
#[derive(Deserialize)]
struct Referee {
    balance: f64,
    z: f64,
    beta: f64,
    cases: Vec<Case>,
}

/// A step: the documents of each micro-batch, and the gradient norm.
#[derive(Clone, Deserialize)]
struct Case {
    name: String,
    micro_batches: Vec<Vec<Document>>,
    /// The log-probabilities of a reference model, for DPO.
    reference: Option<Vec<Vec<f64>>>,
    grad_norm: f64,
}

#[derive(Clone, Deserialize)]
struct Document {
    ids: Vec<i32>,
    /// The index of the first token of `ids` that is a target.
    first_target: usize,
}

fn referee() -> Referee {
    serde_json::from_str(include_str!("../../data/router_losses.json")).expect("the recorded file is whole")
}

/// Returns rows of `TOKENS` tokens, one for each document. If a document leaves room in its row and `packed` is set, the next document is packed into
/// this row.
fn rows(documents: &[Document], packed: bool) -> Batch {
    let mut batch = Batch {
        inputs: vec![],
        targets: vec![],
        rows: 0,
        seq_len: TOKENS,
        documents: packed.then(Vec::new),
        padding: vec![],
    };
    let mut room = 0;
    let pad = |batch: &mut Batch, room: usize| {
        batch.inputs.extend(vec![1; room]);
        batch.targets.extend(vec![IGNORE_INDEX; room]);
        batch.padding.push(room);
        batch.documents.iter_mut().filter(|_| room > 0).for_each(|lengths| lengths.push(room));
    };
    for Document { ids, first_target } in documents {
        let length = ids.len() - 1;
        if !packed || length > room {
            if batch.rows > 0 {
                pad(&mut batch, room);
            }
            batch.rows += 1;
            room = TOKENS;
        }
        room -= length;
        batch.inputs.extend(&ids[..length]);
        let target = |(at, &id): (usize, &i32)| if at >= *first_target { id } else { IGNORE_INDEX };
        batch.targets.extend(ids.iter().enumerate().skip(1).map(target));
        batch.documents.iter_mut().for_each(|lengths| lengths.push(length));
    }
    pad(&mut batch, room);
    batch
}

/// Runs a step of `case` on ranks of data x context x tensor, where `expert` ranks have different experts. Returns the gradient norm of the leading
/// rank, and the choices of routers.
fn step(case: &Case, [data, context, tensor]: [usize; 3], expert: usize) -> (f64, Vec<RouterLoad>) {
    let Referee { balance, z, beta, .. } = referee();
    let recorded = Recorded::open("referee_qwen3_moe", "qwen3_moe");
    let mut sizes = recorded.sizes();
    sizes.experts_mut().for_each(|experts| experts.losses = RouterLossFactors { balance, z });
    let packed = case.name == "packed";
    let batches: Vec<Batch> = case.micro_batches.iter().map(|documents| rows(documents, packed)).collect();
    let mesh = Mesh {
        sizes,
        recipe: recipe(RecipeName::Fp32, Fp8Format::Auto),
        memory: MemoryPolicy::FULL,
        schedule: Schedule::of_one_rank(batches.len() / data),
        context,
        expert,
        tensor,
        data,
        zero: Zero::Nothing,
        sent: SentActivations::default(),
        shard: 0,
        gathers_values: false,
        rows: [batches[0].rows, TOKENS],
        muon: false,
    };
    let case = case.clone();
    on_ranks(mesh.ranks(), move |comm| {
        let ranks = mesh.join(comm);
        let axis = Rc::new(LayerAxes::new(ranks.clone()));
        let spans = mesh.spans(0);
        let MeshRank { mut model, mut optimizer, mut work, .. } =
            mesh.build(&ranks, &spans, axis, &mut recorded.clone());
        if packed {
            work = work.with_documents(3).unwrap();
        }
        if case.reference.is_some() {
            let loss = PreferenceLoss::Sigmoid { label_smoothing: 0.0 };
            work = with_preference(work, &Preference::of(loss, beta));
        }
        let (rank, world) = ranks.rows();
        for own in 0..work.schedule().micro_batches {
            let number = own * world + rank;
            match &case.reference {
                None => work.load(own, &batches[number]).unwrap(),
                Some(reference) => {
                    let (batch, chosen) = (batches[number].clone(), [true, false].repeat(batches[number].rows / 2));
                    let pairs = PreferenceBatch { documents: vec![0; batch.rows], batch, chosen, mismatched: None };
                    load_preferences(&mut work, own, &pairs, Some(&reference[number]));
                }
            }
        }
        let done = work.run(&mut model, &mut *optimizer, 0.0, StepPrecision::Recipe).unwrap();
        let loads = work.partition().router_loads(&mut model).unwrap();
        ranks.finish().unwrap();
        (done.grad_norm, loads)
    })
    .swap_remove(0)
}

#[test]
fn gradient_norms_with_losses_of_routers_are_those_of_transformers() {
    for case in referee().cases {
        let (norm, _) = step(&case, [1, 1, 1], 1);
        let apart = (norm / case.grad_norm - 1.0).abs();
        // Sums are in F32, and so is the norm.
        assert!(apart < 1e-6, "{}: {norm}, {} in transformers", case.name, case.grad_norm);
    }
}

#[test]
fn ranks_have_the_gradient_norms_of_transformers() {
    let cases = referee().cases;
    let case = |name: &str| cases.iter().find(|case| case.name == name).expect("it was recorded");
    for (name, mesh, expert) in [
        ("four micro-batches", [2, 1, 1], 1),
        ("four micro-batches", [4, 1, 1], 1),
        ("four micro-batches", [2, 1, 1], 2),
        ("four micro-batches", [1, 1, 2], 1),
        ("four micro-batches", [2, 1, 2], 1),
        ("four micro-batches", [1, 2, 1], 1),
        ("padded", [1, 2, 1], 2),
        ("packed", [1, 1, 2], 1),
        ("dpo", [2, 1, 1], 1),
    ] {
        let case = case(name);
        let (norm, _) = step(case, mesh, expert);
        let apart = (norm / case.grad_norm - 1.0).abs();
        // Sums in F32 over ranks have another order, and the norm of all gradients averages their roundings: differences of up to 5e-7 are seen.
        assert!(apart < 1e-6, "{name} on {mesh:?}, expert {expert}: {norm}, {} in transformers", case.grad_norm);
    }
}

/// The test checks the updates of router biases, and the logged loads.
#[test]
fn routers_do_not_count_padding() {
    let cases = referee().cases;
    let padded = cases.iter().find(|case| case.name == "padded").expect("it was recorded");
    let tokens: usize = padded.micro_batches[0].iter().map(|document| document.ids.len() - 1).sum();
    for mesh in [[1, 1, 1], [1, 1, 2], [1, 2, 1]] {
        let (_, loads) = step(padded, mesh, 1);
        assert_eq!(loads.len(), 2);
        for load in loads {
            assert_eq!(load.counts.iter().sum::<i64>() as usize, 2 * tokens, "{mesh:?}: {load:?}");
            assert!(load.entropy / tokens as f64 <= (load.counts.len() as f64).ln(), "{mesh:?}: {load:?}");
        }
    }
}
