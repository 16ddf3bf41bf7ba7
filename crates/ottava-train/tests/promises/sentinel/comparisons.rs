//! Comparisons of a recipe with BF16: their findings, and that they do not change the run.

use crate::parallel::divided::{Fault, exchange_of, llama};
use crate::parallel::mesh::{Mesh, MeshRank};
use crate::setup::{Seeded, config, gradients, on_device, on_ranks, recipe, recipes, rotated, sequences, text};
use crate::step::steps::LEAN;
use ottava_data::Batch;
use ottava_models::Decoder;
use ottava_models::layers::RouterLossFactors;
use ottava_parallel::{Partition, Schedule, ScheduleKind, SentActivations, Zero};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::{MemoryPolicy, Purpose};
use ottava_recipe::scaling::{Observer, OneRank, Quantity};
use ottava_recipe::{Fp8Format, Recipe, RecipeName};
use ottava_sentinel::{Bounds, Finding, Measure, Verdict};
use ottava_tensor::planted::{Damage, ProductFault, plant};
use ottava_tensor::testing::values;
use ottava_tensor::{DType, Device, Tensor};
use ottava_train::step::{LossScale, MicroBatch, NextTokenLoss, Program, ProgramInputs, TrainStep};
use serde_json::json;
use std::collections::BTreeMap;

const ROWS: [usize; 2] = [2, 32];
const BOUNDS: Bounds = Bounds { loss_gap: 0.05, cosine: 0.8 };
const MICRO_BATCHES: usize = 2;

fn mesh(recipe: &Recipe) -> Mesh {
    let sizes = config(llama(json!({"vocab_size": 256, "intermediate_size": 224})));
    let (schedule, zero, memory) = (Schedule::of_one_rank(MICRO_BATCHES), Zero::Nothing, MemoryPolicy::FULL);
    let (recipe, gathers_values) = (recipe.clone(), true);
    Mesh {
        sizes,
        recipe,
        memory,
        schedule,
        context: 1,
        expert: 1,
        tensor: 1,
        data: 1,
        zero,
        shard: 0,
        gathers_values,
        sent: SentActivations::Auto,
        rows: ROWS,
        muon: false,
    }
}

fn fp8_recipes() -> Vec<(String, Recipe)> {
    // The bounds of the sentinel are for FP8.
    let is_fp8 = |recipe: &Recipe| recipe.casts.is_some() && recipe.name != RecipeName::Nvfp4;
    recipes().into_iter().filter(|(_, recipe)| is_fp8(recipe)).collect()
}

/// Returns rows of text, which differ between numbers.
fn text_rows(number: usize) -> Batch {
    let ([rows, seq_len], text) = (ROWS, text());
    let ids = |shift: usize| -> Vec<i32> {
        let starts = (0..rows).map(|row| (number * rows + row) * 7919 % (text.len() - seq_len - 1) + shift);
        starts.flat_map(|start| &text[start..start + seq_len]).copied().collect()
    };
    Batch::whole(ids(0), ids(1), rows)
}

/// Runs a run on ranks of a mesh. `change` is called before each step.
fn run<T: Send + 'static>(
    mesh: &Mesh,
    fault: Option<Fault>,
    steps: usize,
    change: impl Fn(usize, &mut MeshRank) -> Option<T> + Clone + Send + 'static,
) -> Vec<(Vec<T>, MeshEnd)> {
    let mesh = mesh.clone();
    on_ranks(mesh.ranks(), move |comm| {
        let ranks = mesh.join(comm);
        let spans = mesh.spans(ranks.pipeline().rank());
        let mut own = mesh.build(&ranks, &spans, exchange_of(&ranks, fault), &mut Seeded { std: 0.1 });
        own.work.partition().quantize_weights(&mut own.model).unwrap();
        let mut seen = Vec::new();
        for step in 0..steps {
            own.load(|number| text_rows(MICRO_BATCHES * step + number));
            seen.extend(change(step, &mut own));
            let MeshRank { model, optimizer, work, .. } = &mut own;
            work.run(model, &mut **optimizer, 3e-3, StepPrecision::Recipe).unwrap();
        }
        let end = MeshEnd::of(&mut own);
        ranks.finish().unwrap();
        (seen, end)
    })
}

/// The bits of the final state of a run.
#[derive(Debug, PartialEq)]
struct MeshEnd {
    weights: Vec<Vec<f64>>,
    scaling: Vec<(String, Vec<f64>)>,
    casts: String,
}

impl MeshEnd {
    fn of(own: &mut MeshRank) -> MeshEnd {
        let MeshRank { model, work, .. } = own;
        let partition = work.partition();
        let weights = model.parameters().into_iter().map(|param| values(&partition.value(param).unwrap())).collect();
        let floats = |(name, array): (String, Tensor)| (array.dtype() == DType::F32).then(|| (name, values(&array)));
        let scaling = model.scaling().arrays().unwrap().into_iter().filter_map(floats).collect();
        MeshEnd { weights, scaling, casts: format!("{:?}", model.scaling().measured(&OneRank).unwrap()) }
    }
}

/// Returns the verdict before a step on this rank's rows.
fn check(step: usize, own: &mut MeshRank) -> Verdict {
    let (rank, ranks) = own.ranks.rows();
    let batch = text_rows(MICRO_BATCHES * step / ranks * ranks + rank).first_rows(1);
    Verdict::of(&own.work.compare(&mut own.model, &batch).unwrap(), BOUNDS, &[], false)
}

/// Returns the verdicts of all checks of a run, and checks that all ranks have equal verdicts.
fn verdicts(
    mesh: &Mesh,
    fault: Option<Fault>,
    steps: usize,
    every: usize,
    change: impl Fn(usize, &mut MeshRank) + Clone + Send + 'static,
) -> Vec<Verdict> {
    let mut all = run(mesh, fault, steps, move |step, own| {
        change(step, own);
        step.is_multiple_of(every).then(|| check(step, own))
    });
    let (first, _) = all.remove(0);
    assert!(all.iter().all(|(other, _)| *other == first), "ranks judge differently");
    first
}

/// Returns the losses of one micro-batch by the recipe and in BF16. Each has the loss of a comparison, and the loss of a step in the same precision.
fn losses_of_both(mesh: &Mesh) -> Vec<[f64; 2]> {
    let mesh = Mesh { schedule: Schedule { micro_batches: 1, ..mesh.schedule }, ..mesh.clone() };
    let all = on_ranks(mesh.ranks(), move |comm| {
        let ranks = mesh.join(comm);
        let mut own = mesh.run(&ranks);
        own.work.partition().quantize_weights(&mut own.model).unwrap();
        let mut losses = Vec::new();
        for step in 0..4 {
            let number = step * ranks.rows().1 + ranks.rows().0;
            let batch = text_rows(number);
            own.work.load(0, &batch).unwrap();
            let MeshRank { model, optimizer, work, .. } = &mut own;
            let compared = work.compare(model, &batch).unwrap().losses;
            let precision = [StepPrecision::Recipe, StepPrecision::High][step % 2];
            let done = work.run(model, &mut **optimizer, 3e-3, precision).unwrap();
            losses.push([compared[step % 2], done.loss]);
        }
        ranks.finish().unwrap();
        losses
    });
    all.into_iter().next().expect("there is a rank")
}

/// The numbers on which demotions depend equal the numbers of the run.
#[test]
fn comparisons_have_the_losses_of_the_run() {
    for (number, (name, recipe)) in fp8_recipes().into_iter().enumerate() {
        for memory in [MemoryPolicy::FULL, LEAN] {
            let alone = Mesh { memory, ..mesh(&recipe) };
            let mut meshes = vec![alone.clone()];
            if memory == MemoryPolicy::FULL {
                let ranks = rotated(&[[2, 1, 1], [1, 2, 1], [1, 1, 2]], 1, number);
                meshes.extend(ranks.into_iter().map(|[data, context, tensor]| Mesh {
                    data,
                    context,
                    tensor,
                    ..alone.clone()
                }));
            }
            for mesh in meshes {
                for (step, [compared, run]) in losses_of_both(&mesh).into_iter().enumerate() {
                    let ranks = [mesh.data, mesh.context, mesh.tensor];
                    assert_eq!(compared, run, "{name}, step {step} on {ranks:?} ranks of data, context, tensor");
                }
            }
        }
    }
}

/// Gradients of routers include the losses of routers.
#[test]
fn comparisons_have_the_gradients_of_the_run() {
    let dense = mesh(&fp8_recipes()[0].1).sizes;
    let mut experts = crate::models::experts::sizes();
    experts.vocabulary = 256;
    experts.experts_mut().for_each(|experts| experts.losses = RouterLossFactors { balance: 0.5, z: 0.1 });
    for sizes in [dense, experts] {
        for (name, recipe) in fp8_recipes() {
            // Some recipes name linears that only a dense model has.
            if Decoder::describe(&sizes, &recipe).is_err() {
                assert!(sizes.experts().is_some(), "{name}");
                continue;
            }
            let purpose = Purpose::Train(MemoryPolicy::FULL);
            let mut model = Decoder::new(&sizes, &recipe, &Device::Cpu, purpose, 64, &mut Seeded { std: 0.1 }).unwrap();
            model.quantize_weights().unwrap();
            let [rows, tokens] = ROWS;
            let (batch, step) = (text_rows(0), TrainStep::new(&model, 1, rows, tokens).unwrap());
            let observer = Some(Observer::new(&["*.gradient".into()]));
            let (_, observed) = step.compare_observed(&mut model, &batch, observer).unwrap();
            let ids = |ids: &[i32]| Tensor::from_slice(&Device::Cpu, &[ids.len()], ids).unwrap();
            let (inputs, targets) = (ids(&batch.inputs), ids(&batch.targets));
            let units = (rows * tokens) as f64;
            let sequences = sequences(&Device::Cpu, rows, rows * tokens);
            let scale = LossScale {
                per_unit: on_device(&recipe, &Device::Cpu, 1.0 / units),
                per_micro_batch: on_device(&recipe, &Device::Cpu, 1.0),
            };
            let micro_batches = &[MicroBatch { inputs, targets, sequences, loss: Box::new(NextTokenLoss) }];
            let (loss_scale, partition) = (Some(&scale), &Partition::solo());
            let inputs = ProgramInputs { micro_batches, loss_scale, precision: StepPrecision::Recipe, partition };
            Program::gradients(1).run(&mut model, &inputs, None).unwrap();
            let of_run: BTreeMap<String, Vec<f64>> = gradients(&mut model).into_iter().collect();
            assert!(observed.len() > 10);
            for (tensor, compared) in observed {
                let parameter = tensor.strip_suffix(".gradient").expect("only gradients are observed");
                assert!(values(&compared) == of_run[parameter], "{name}: {parameter}");
            }
        }
    }
}

#[test]
fn comparisons_change_no_bit() {
    for (number, (name, recipe)) in fp8_recipes().into_iter().enumerate() {
        for memory in rotated(&[MemoryPolicy::FULL, LEAN], 1, number) {
            let mesh = Mesh { memory, ..mesh(&recipe) };
            let compared = run(&mesh, None, 4, |step, own| Some(check(step, own)));
            let alone = run(&mesh, None, 4, |_, _| None::<()>);
            assert!(compared[0].1 == alone[0].1, "{name}");
        }
    }
}

#[test]
fn healthy_runs_have_no_findings() {
    for (name, recipe) in fp8_recipes() {
        for verdict in verdicts(&mesh(&recipe), None, 21, 5, |_, _| {}) {
            assert_eq!(verdict.findings, [], "{name}");
            assert!(verdict.loss_gap != 0.0 || name.contains("Fprop"), "{name}");
        }
    }
}

/// Returns whether a finding names `linear` or one of its casts, and the first check with such a finding.
fn found(verdicts: &[Verdict], linear: &str, measure: impl Fn(Measure) -> bool) -> Option<usize> {
    let names = |verdict: &Verdict| {
        let mut named = verdict.findings.iter().filter(|finding| finding.linear() == Some(linear));
        named.any(|finding| measure(finding.measure))
    };
    verdicts.iter().position(names)
}

/// Only the dgrad of down_proj has as many columns as the MLP is wide. Backward reaches layer 1 first.
#[test]
fn a_factor_in_one_dgrad_is_found_and_named() {
    for (name, recipe) in fp8_recipes().into_iter().filter(|(name, _)| !name.contains("but") && !name.contains("and")) {
        for factor in [1.02, 0.98] {
            let all = verdicts(&mesh(&recipe), None, 7, 3, move |step, _| {
                let damage = Damage::Factor(factor);
                plant((step >= 3).then_some(ProductFault { shape: [32, 224], first: 1, every: 2, damage }));
            });
            let down = "model.layers.0.mlp.down_proj";
            assert_eq!(found(&all, down, |m| m == Measure::Slope(Quantity::Dgrad)), Some(1), "{name}: {all:?}");
            assert!(all.iter().all(|verdict| verdict.findings.iter().all(|f| f.linear().is_none_or(|l| l == down))));
        }
    }
}

/// Returns a mesh for two blocks of experts. In a comparison, their rows have room for 640 choices.
fn mesh_with_experts(recipe: &Recipe) -> Mesh {
    let sizes = config(json!({
        "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": true,
    }));
    Mesh { sizes, ..mesh(recipe) }
}

#[test]
fn a_factor_in_one_product_of_experts_is_found_and_named() {
    let faults = [
        (Quantity::Fprop, "gate_up_proj", [640, 128]),
        (Quantity::Dgrad, "down_proj", [640, 64]),
        (Quantity::Wgrad, "down_proj", [1280, 64]),
    ];
    let recipes = fp8_recipes().into_iter().filter(|(name, _)| !name.contains("but") && !name.contains("and"));
    for (number, (name, recipe)) in recipes.enumerate() {
        let mesh = mesh_with_experts(&recipe);
        for (which, linear, shape) in rotated(&faults, 1, number) {
            let all = verdicts(&mesh, None, 4, 3, move |step, _| {
                let damage = Damage::Factor(1.02);
                plant((step >= 3).then_some(ProductFault { shape, first: 0, every: 1, damage }));
            });
            plant(None);
            for layer in 0..2 {
                let linear = format!("model.layers.{layer}.mlp.experts.{linear}");
                assert_eq!(found(&all, &linear, |m| m == Measure::Slope(which)), Some(1), "{name}: {all:?}");
            }
            assert!(all[0].findings.iter().all(|finding| finding.linear().is_none()), "{name}: {all:?}");
            let named = |finding: &Finding| finding.linear().is_none_or(|named| named.ends_with(linear));
            assert!(all[1].findings.iter().all(named), "{name}: {all:?}");
        }
    }
}

/// Changes an array of the scaling state.
fn set_scales(own: &mut MeshRank, change: impl Fn(&[String], &mut Vec<f32>)) {
    let scaling = own.model.scaling();
    let names = scaling.names();
    let mut arrays = scaling.arrays().unwrap();
    for (name, array) in &mut arrays {
        if name == "scaling.scale" {
            let mut scales = array.to_vec::<f32>().unwrap();
            change(&names, &mut scales);
            *array = Tensor::from_slice(&Device::Cpu, &[scales.len()], &scales).unwrap();
        }
    }
    let array = |wanted: &str| {
        let found = arrays.iter().find(|(name, _)| name == wanted).map(|(_, array)| array.clone());
        found.ok_or_else(|| ottava_common::Error::Checkpoint("no such array".into()))
    };
    scaling.restore(&names, array).unwrap();
}

fn at(names: &[String], name: &str) -> usize {
    names.iter().position(|other| other == name).expect("the cast exists")
}

#[test]
fn wrong_scales_are_found_and_named() {
    let setup = mesh(&recipe(RecipeName::Fp8Delayed, Fp8Format::Auto));
    let (gate_up, down) = ("model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.down_proj");
    let is_cast = |measure| measure == Measure::CastError;
    // The scale does not follow its tensor.
    for stuck in [1e6, 1e-6] {
        let all = verdicts(&setup, None, 7, 3, move |step, own| {
            if step >= 3 {
                set_scales(own, |names, scales| scales[at(names, &format!("{down}.input"))] = stuck);
            }
        });
        assert_eq!(found(&all, down, is_cast), Some(1), "{stuck}: {all:?}");
        let before = all[0].loss_costs.iter().find(|(name, _)| name == down).expect("it has a cost").1;
        assert_eq!(all[1].loss_costs[0].0, down, "{stuck}: {:?}", all[1].loss_costs);
        assert!(all[1].loss_costs[0].1 > 20.0 * before, "{stuck}: {before} before, {:?}", all[1].loss_costs);
    }
    // The scales of two tensors of different size are swapped.
    let all = verdicts(&setup, None, 7, 3, move |step, own| {
        if step >= 3 {
            set_scales(own, |names, scales| {
                scales.swap(at(names, &format!("{gate_up}.input")), at(names, &format!("{gate_up}.grad_output")));
            });
        }
    });
    assert_eq!(found(&all, gate_up, is_cast), Some(1), "{all:?}");
}

#[test]
fn a_weight_that_saturates_is_found_and_named() {
    let setup = mesh(&recipe(RecipeName::Fp8Delayed, Fp8Format::Auto));
    let name = "model.layers.0.self_attn.o_proj";
    let all = verdicts(&setup, None, 7, 3, move |step, own| {
        if step == 3 {
            let mut params = own.model.parameters();
            let param = params.iter_mut().find(|param| param.identity.name() == format!("{name}.weight")).unwrap();
            let mut weights: Vec<f32> = values(&param.weights.value().unwrap()).iter().map(|x| *x as f32).collect();
            weights.iter_mut().step_by(97).for_each(|x| *x *= 50.0);
            let shape = param.weights.shape().to_vec();
            let weights = Tensor::from_slice(&Device::Cpu, &shape, &weights).unwrap();
            param.weights.set_value(ottava_tensor::ops::cast(&weights, DType::BF16).unwrap());
            own.work.partition().quantize_weights(&mut own.model).unwrap();
        }
    });
    assert_eq!(found(&all, name, |measure| measure == Measure::CastError), Some(1), "{all:?}");
}

/// Ranks that gather codes need equal scales.
#[test]
fn a_wrong_amax_group_is_found() {
    for name in [RecipeName::Fp8Current, RecipeName::Fp8Delayed] {
        let setup = Mesh { tensor: 2, ..mesh(&recipe(name, Fp8Format::Auto)) };
        assert!(verdicts(&setup, None, 1, 1, |_, _| {}).iter().all(|verdict| verdict.findings.is_empty()));
        // The first step has no history, so both recipes compute scales from the tensors.
        let all = verdicts(&setup, Some(Fault::OwnScale), 1, 1, |_, _| {});
        assert!(all[0].findings.iter().any(|finding| finding.measure == Measure::CastError), "{name:?}: {all:?}");
    }
}

#[test]
fn ranks_compare_as_one_rank() {
    for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Row] {
        let one = mesh(&recipe(name, Fp8Format::Auto));
        let expected = verdicts(&one, None, 5, 2, |_, _| {});
        let pipeline = |kind, stages| {
            let sizes = config(llama(json!({"vocab_size": 256, "intermediate_size": 224, "num_hidden_layers": 4})));
            Mesh { sizes, schedule: Schedule { kind, ranks: 2, stages, micro_batches: MICRO_BATCHES }, ..one.clone() }
        };
        let two = Schedule { micro_batches: 1, ..one.schedule };
        let meshes = [
            ("ZeRO 1", Mesh { data: 2, zero: Zero::OptimizerStates, schedule: two, ..one.clone() }),
            ("ZeRO 3", Mesh { data: 2, zero: Zero::Weights, schedule: two, ..one.clone() }),
            ("tensor", Mesh { tensor: 2, rows: ROWS, ..one.clone() }),
            ("context", Mesh { context: 2, ..one.clone() }),
            ("pipeline", pipeline(ScheduleKind::OneForwardOneBackward, 1)),
            ("zero-bubble", pipeline(ScheduleKind::ZeroBubble, 1)),
            ("interleaved", pipeline(ScheduleKind::Interleaved, 2)),
        ];
        for (what, mesh) in meshes {
            let got = verdicts(&mesh, None, 5, 2, |_, _| {});
            let of_model = match mesh.schedule.ranks {
                1 => expected.clone(),
                _ => {
                    let one = Mesh { schedule: Schedule::of_one_rank(MICRO_BATCHES), ..mesh.clone() };
                    verdicts(&one, None, 5, 2, |_, _| {})
                }
            };
            for (got, expected) in got.iter().zip(&of_model) {
                assert_eq!(got.findings, [], "{what}, {name:?}");
                assert_eq!(got.ranking.len(), expected.ranking.len(), "{what}");
                // Data-parallel ranks compare one row each, and all other ranks compare the same row.
                let apart = if mesh.data == 1 { 0.01 } else { 0.1 };
                assert!((got.cosine - expected.cosine).abs() < apart, "{what}, {name:?}: {got:?} {expected:?}");
            }
            if mesh.schedule.ranks > 1 {
                assert!(got.iter().zip(&of_model).all(|(a, b)| a.loss_gap == b.loss_gap), "{what}, {name:?}");
            }
        }
    }
}

/// Ranks of the tensor axis compare the products of their own experts.
#[test]
fn ranks_that_divide_experts_compare_as_one_rank() {
    for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Row] {
        let mut one = mesh_with_experts(&recipe(name, Fp8Format::Auto));
        one.sizes.experts_mut().for_each(|experts| experts.count = 4);
        let expected = verdicts(&one, None, 3, 2, |_, _| {});
        let got = verdicts(&Mesh { tensor: 2, rows: ROWS, ..one }, None, 3, 2, |_, _| {});
        for (got, expected) in got.iter().zip(&expected) {
            assert!(got.findings.iter().all(|finding| finding.linear().is_none()), "{name:?}: {got:?}");
            assert_eq!(got.ranking.len(), expected.ranking.len(), "{name:?}");
            // Rounding changes the choices of a few tokens.
            assert!((got.cosine - expected.cosine).abs() < 0.05, "{name:?}: {got:?} {expected:?}");
        }
    }
}

/// Returns the differences between two computations of the micro-batch of each step, by step.
fn differences(
    mesh: &Mesh,
    steps: usize,
    fault: impl Fn(usize) -> Option<ProductFault> + Clone + Send + 'static,
) -> Vec<Option<String>> {
    let mut all = run(mesh, None, steps, move |step, own| {
        let (rank, ranks) = own.ranks.rows();
        // The fault is on the last rank.
        plant(fault(step).filter(|_| own.ranks.rank() + 1 == own.ranks.size()));
        let batch = text_rows(MICRO_BATCHES * step / ranks * ranks + rank);
        let repeated = own.work.repeat(&mut own.model, &batch, StepPrecision::Recipe, true).unwrap();
        plant(None);
        Some(repeated.different)
    });
    let (first, _) = all.remove(0);
    assert!(all.iter().all(|(other, _)| *other == first), "ranks see different things");
    first
}

#[test]
fn a_flipped_bit_is_found_at_the_next_check_and_named() {
    let flip =
        |shape, first, bit| ProductFault { shape, first, every: usize::MAX, damage: Damage::Flip { element: 77, bit } };
    // Low bits of activations that are cast to FP8 next have no effect. There are 64 tokens. A forward has the products of two layers, and both
    // passes of a layer follow each other.
    let faults = [
        (flip([64, 448], 3, 13), "`output of model.layers.1`"),
        (flip([64, 448], 0, 14), "`output of model.layers.0`"),
        // In backward, fprop of gate_up is recomputed, followed by its dgrad and wgrad.
        (flip([64, 224], 1, 3), "`gradient of model.layers.1."),
        (flip([448, 64], 0, 12), "`gradient of model.layers.1.mlp.gate_proj.weight`"),
        (flip([448, 64], 3, 5), "`gradient of model.layers.0.mlp.gate_proj.weight`"),
    ];
    for name in [RecipeName::Fp8Delayed, RecipeName::Fp8Block] {
        let one = mesh(&recipe(name, Fp8Format::Auto));
        for (fault, words) in faults {
            let found = differences(&one, 3, move |step| (step == 1).then_some(fault));
            assert_eq!([&found[0], &found[2]], [&None, &None], "{name:?}, {words}");
            assert!(found[1].as_ref().is_some_and(|text| text.starts_with(words)), "{name:?}, {words}: {found:?}");
        }
    }
    let two =
        Mesh { data: 2, schedule: Schedule::of_one_rank(1), ..mesh(&recipe(RecipeName::Fp8Row, Fp8Format::Auto)) };
    let (fault, _) = faults[0];
    let found = differences(&two, 2, move |step| (step == 1).then_some(fault));
    assert_eq!(found, [None, Some("`output of model.layers.1` on rank 1".into())]);
}

/// If an update has changed nothing, weights are cast again. If their scales are computed from their values, no bit changes.
#[test]
fn casting_the_weights_again_changes_no_bit() {
    for name in [RecipeName::Fp8Current, RecipeName::Fp8Row, RecipeName::Fp8Block] {
        let one = mesh(&recipe(name, Fp8Format::Auto));
        let two = Mesh { data: 2, schedule: Schedule::of_one_rank(1), ..one.clone() };
        let meshes = [
            one,
            Mesh { zero: Zero::OptimizerStates, ..two.clone() },
            Mesh { zero: Zero::Weights, gathers_values: false, ..two },
        ];
        for mesh in meshes {
            let (zero, ranks) = (mesh.zero, mesh.data);
            let once = run(&mesh, None, 3, |_, _| None::<()>);
            let again = run(&mesh, None, 3, |_, own| {
                own.work.partition().quantize_weights(&mut own.model).unwrap();
                None::<()>
            });
            for (once, again) in once.iter().zip(&again) {
                assert!(once.1.weights == again.1.weights, "{name:?}, {zero:?}, {ranks} ranks");
            }
        }
    }
}

/// Runs `checks` repeated passes before each of `steps` steps. Returns the number of all repeated passes, and how many of them found a difference.
pub fn differences_of_checks(steps: usize, checks: usize) -> (usize, usize) {
    let setup = mesh(&recipe(RecipeName::Fp8Delayed, Fp8Format::Auto));
    let all = run(&setup, None, steps, move |step, own| {
        let found = (0..checks).map(|check| {
            let batch = text_rows(checks * step + check);
            own.work.repeat(&mut own.model, &batch, StepPrecision::Recipe, true).unwrap().different
        });
        Some(found.collect::<Vec<_>>())
    });
    let found: Vec<_> = all.into_iter().flat_map(|(seen, _)| seen).flatten().collect();
    (found.len(), found.iter().flatten().count())
}

#[test]
fn a_flipped_bit_of_one_ranks_weight_is_found_and_named() {
    for name in [RecipeName::Bf16, RecipeName::Fp8Delayed] {
        let setup = Mesh { data: 2, schedule: Schedule::of_one_rank(1), ..mesh(&recipe(name, Fp8Format::Auto)) };
        let tensor = "model.layers.1.self_attn.o_proj.weight";
        let all = run(&setup, None, 2, move |step, own| {
            if step == 1 && own.ranks.rank() == 1 {
                let mut params = own.model.parameters();
                let param = params.iter_mut().find(|param| param.identity.name() == tensor).unwrap();
                let value = param.weights.value().unwrap();
                let mut bytes = value.read_bytes().unwrap();
                bytes[100] ^= 1;
                param
                    .weights
                    .set_value(Tensor::from_bytes(&Device::Cpu, value.shape(), value.dtype(), &bytes).unwrap());
            }
            let MeshRank { model, optimizer, work, .. } = &mut *own;
            let compared =
                work.partition().compare_replicas(model, &mut **optimizer, &format!("before step {}", step + 1));
            // Both ranks continue with the same weights.
            Some(compared.map_err(|error| error.to_string()).err())
        });
        for (rank, (found, _)) in all.iter().enumerate() {
            assert_eq!(found[0], None, "{name:?}, rank {rank}");
            let text = found[1].as_deref().unwrap_or_default();
            let words = format!("`{tensor}` (weight) of rank 1 differs from that of rank 0 before step 2");
            assert!(text.contains(&words), "{name:?}, rank {rank}: {text}");
        }
    }
}
