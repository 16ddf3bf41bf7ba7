//! A checkpoint that ranks of a mesh have saved can be reopened under any other mesh.

use crate::parallel::latent_ranks::deepseek;
use crate::parallel::mesh::{Mesh, MeshRank, Seen, distance, rows};
use crate::setup::{config, on_ranks, progress, recipe, rotated, save_checkpoint};
use ottava_checkpoint::slices::{FOLDER, SliceFiles};
use ottava_checkpoint::{FolderWeights, ModelFiles, training};
use ottava_parallel::optim::{Per, optimizer_tensors};
use ottava_parallel::{LayerAxes, Schedule, ScheduleKind, SentActivations, Zero};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::MemoryPolicy;
use ottava_recipe::storage::Storage;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::{DType, Device, Tensor};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Sums are in another order.
const F32: f64 = 2e-5;

/// In addition, AdamW divides small gradients by their size.
const NEXT: f64 = 5e-4;

/// Returns a run on one rank. The model has linears that a folder fuses (Phi-3), or transposes and stores with biases (GPT-2), or experts that a
/// folder stores one by one (Qwen3) or stacked, with biases (gpt-oss), or latent attention (DeepSeek-V2).
pub fn alone(family: &str, width: usize, storage: Storage) -> Mesh {
    let keys = match family {
        "phi3" => json!({
            "architectures": ["Phi3ForCausalLM"], "vocab_size": 96, "hidden_size": width, "intermediate_size": width,
            "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": if width == 64 { 2 } else { 1 },
            "max_position_embeddings": 64,
            "tie_word_embeddings": false,
        }),
        "qwen3_moe" => json!({
            "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": if width == 64 { 32 } else { 64 },
            "max_position_embeddings": 64, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": width, "norm_topk_prob": true, "tie_word_embeddings": false,
        }),
        "gpt_oss" => json!({
            "model_type": "gpt_oss", "vocab_size": 96, "hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9,
        }),
        "deepseek_v2" => deepseek(true, json!({"hidden_size": width})),
        "deepseek_v2 without a latent of queries" => deepseek(false, json!({"hidden_size": width})),
        _ => json!({
            "architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": width, "n_layer": 2, "n_head": 4,
            "n_positions": 64, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }),
    };
    // The formats of the other storages are for weights of 16 bits.
    let name = if storage == Storage::Float32 { RecipeName::Fp32 } else { RecipeName::Fp8Delayed };
    let (sizes, recipe) = (config(keys), recipe(name, Fp8Format::Auto));
    let memory = MemoryPolicy { formats: storage.formats(), ..MemoryPolicy::FULL };
    let schedule = Schedule::of_one_rank(4);
    Mesh {
        sizes,
        recipe,
        memory,
        schedule,
        context: 1,
        expert: 1,
        tensor: 1,
        data: 1,
        zero: Zero::Nothing,
        shard: 0,
        gathers_values: false,
        sent: SentActivations::Auto,
        rows: [1, 64],
        muon: false,
    }
}

/// Returns the same run on `data` x `pipeline` x `tensor` ranks.
pub fn on(alone: &Mesh, [data, pipeline, tensor]: [usize; 3], zero: Zero) -> Mesh {
    let kind = ScheduleKind::default();
    let schedule = Schedule { kind, ranks: pipeline, stages: 1, micro_batches: 4 / data };
    Mesh { schedule, tensor, data, zero, ..alone.clone() }
}

fn meshes(alone: &Mesh) -> Vec<Mesh> {
    let shapes = [
        ([1, 1, 2], Zero::Nothing),
        ([1, 1, 4], Zero::Nothing),
        ([2, 1, 2], Zero::Nothing),
        ([2, 1, 2], Zero::OptimizerStates),
        ([2, 1, 2], Zero::Weights),
        ([1, 2, 2], Zero::Nothing),
        ([2, 2, 2], Zero::OptimizerStates),
        ([4, 1, 1], Zero::Gradients),
    ];
    let mut meshes = shapes.map(|(shape, zero)| on(alone, shape, zero)).to_vec();
    meshes.push(Mesh { shard: 2, ..on(alone, [4, 1, 1], Zero::Weights) });
    meshes
}

/// Returns meshes for mixtures: data, pipeline, context and tensor, experts, and the stage of ZeRO.
fn expert_meshes(alone: &Mesh) -> Vec<Mesh> {
    let shapes = [
        ([2, 1, 1, 1], 2, Zero::Nothing),
        ([1, 1, 1, 2], 1, Zero::Nothing),
        ([4, 1, 1, 1], 4, Zero::OptimizerStates),
        ([2, 1, 1, 2], 2, Zero::Nothing),
        ([4, 1, 1, 1], 2, Zero::Weights),
        ([2, 2, 1, 1], 2, Zero::OptimizerStates),
        ([2, 1, 1, 2], 1, Zero::Weights),
        ([2, 1, 2, 1], 2, Zero::Gradients),
        ([2, 1, 1, 1], 1, Zero::OptimizerStates),
    ];
    let mesh = |([data, pipeline, context, tensor], expert, zero): ([usize; 4], usize, Zero)| Mesh {
        expert,
        context,
        ..on(alone, [data, pipeline, tensor], zero)
    };
    let mut meshes = shapes.map(mesh).to_vec();
    // The ranks of a shard group have different experts.
    meshes.push(Mesh { shard: 2, ..mesh(([4, 1, 1, 1], 2, Zero::OptimizerStates)) });
    meshes
}

fn step(own: &mut MeshRank, mesh: &Mesh, number: usize) {
    own.load(|row| rows(&format!("reopen {number} {row}"), mesh.rows, 0..3, &mesh.sizes));
    let MeshRank { model, optimizer, work, .. } = own;
    work.run(model, &mut **optimizer, 1e-3, StepPrecision::Recipe).unwrap();
}

fn save(own: &mut MeshRank, folder: &Path, step: u64) {
    let MeshRank { model, optimizer, work, ranks } = own;
    save_checkpoint(folder, step, 1 << 30, model, &mut **optimizer, work.partition());
    ranks.finish().unwrap();
}

/// Returns the values that belong to a whole parameter, by name: scales of master weights and moments.
fn scales(MeshRank { model, optimizer, .. }: &mut MeshRank) -> Seen {
    let mut seen = Seen::new();
    for (param, states) in model.parameters().into_iter().zip(optimizer.states()) {
        let (name, has_some) = (param.identity.name().to_string(), !param.slice().is_empty());
        let kept = optimizer_tensors(&mut param.weights, states).into_iter();
        for scale in kept.filter(|kept| kept.per == Per::Parameter && has_some) {
            seen.insert(format!("{} of {name}", scale.kind), ottava_tensor::testing::values(scale.tensor));
        }
    }
    seen
}

/// Trains a step and saves. Returns the checkpoint. Checks that all ranks with elements of a parameter have its scales.
pub fn train(mesh: &Mesh, folder: &Path) -> PathBuf {
    let (own_mesh, own_folder) = (mesh.clone(), folder.to_path_buf());
    let all = on_ranks(mesh.ranks(), move |comm| {
        let mut own = own_mesh.run(&own_mesh.join(comm));
        own.work.partition().quantize_weights(&mut own.model).unwrap();
        step(&mut own, &own_mesh, 1);
        let seen = scales(&mut own);
        save(&mut own, &own_folder, 1);
        seen
    });
    let mut known = Seen::new();
    for (name, scale) in all.into_iter().flatten() {
        assert_eq!(*known.entry(name.clone()).or_insert(scale.clone()), scale, "{name} differs between ranks");
    }
    folder.join("checkpoint-1")
}

/// Reopens a checkpoint, trains `more` steps and saves. Returns the new checkpoint.
pub fn reopen(saved: &Path, mesh: &Mesh, more: usize, folder: &Path) -> PathBuf {
    let (own_mesh, own_folder, saved) = (mesh.clone(), folder.to_path_buf(), saved.to_path_buf());
    on_ranks(mesh.ranks(), move |comm| {
        let ranks = own_mesh.join(comm);
        let (axis, spans) = (Rc::new(LayerAxes::new(ranks.clone())), own_mesh.spans(ranks.pipeline().rank()));
        let mut own = own_mesh.build(&ranks, &spans, axis, &mut FolderWeights::open(&saved).unwrap());
        let mut progress = progress(1, &mut own.model);
        progress.scaling_slots = own.work.partition().cast_names(&own.model);
        training::restore(&saved, &progress, &mut own.model, &mut *own.optimizer).unwrap();
        own.work.partition().quantize_weights(&mut own.model).unwrap();
        (0..more).for_each(|number| step(&mut own, &own_mesh, 2 + number));
        save(&mut own, &own_folder, 2);
    });
    folder.join("checkpoint-2")
}

/// Returns the types and the bytes of all tensors of a checkpoint, by name.
pub fn tensors(checkpoint: &Path) -> BTreeMap<String, (DType, Vec<u8>)> {
    let weights = ModelFiles::open(checkpoint).unwrap();
    let weights = weights.names().map(|name| (name.to_string(), weights.info(name).unwrap().dtype, weights.read(name)));
    let states = SliceFiles::open(&checkpoint.join(FOLDER)).unwrap();
    let states = states.names().map(|name| (name.to_string(), states.info(name).unwrap().dtype, states.read(name)));
    weights.chain(states).map(|(name, dtype, bytes)| (name, (dtype, bytes.unwrap()))).collect()
}

/// Returns the name of a tensor of a checkpoint that the other checkpoint lacks or has with other bytes.
fn changed(before: &Path, after: &Path) -> Option<String> {
    let (before, after) = (tensors(before), tensors(after));
    assert!(before.keys().eq(after.keys()), "both have the same tensors");
    before.into_iter().find(|(name, bytes)| after[name] != *bytes).map(|(name, _)| name)
}

/// Returns the values of all F32 tensors of a checkpoint.
fn values(checkpoint: &Path) -> Seen {
    let all = tensors(checkpoint).into_iter().filter(|(_, (dtype, _))| *dtype == DType::F32);
    let read = |(name, (dtype, bytes)): (String, (DType, Vec<u8>))| {
        let tensor = Tensor::from_bytes(&Device::Cpu, &[bytes.len() / dtype.size()], dtype, &bytes).unwrap();
        (name, ottava_tensor::testing::values(&tensor))
    };
    all.map(read).collect()
}

/// The momentum of Muon is saved and read on meshes that divide matrices or experts, and each mesh computes the same next step again.
#[test]
fn muon_reopens_on_meshes_that_divide_matrices() {
    let folder = tempfile::tempdir().unwrap();
    for (family, meshes) in [("phi3", [0, 1]), ("qwen3_moe", [0, 3])] {
        let mut alone = alone(family, 64, Storage::Float32);
        alone.muon = true;
        let expert = expert_meshes(&alone);
        let plain = [on(&alone, [1, 1, 2], Zero::Nothing), on(&alone, [2, 1, 2], Zero::OptimizerStates)];
        let of = |at: usize| if family == "phi3" { plain[at].clone() } else { expert[at].clone() };
        let meshes = meshes.map(of);
        for (i, mesh) in meshes.iter().enumerate() {
            let at = |what: &str| folder.path().join(format!("{family} {i}, {what}"));
            let saved = train(mesh, &at("saved"));
            for (other, name) in [(mesh, "same"), (&alone, "alone"), (&meshes[1 - i], "other")] {
                let same = reopen(&saved, other, 0, &at(name));
                assert_eq!(changed(&saved, &same), None, "{family}, mesh {i}, reopened: {name}");
            }
            let [next, again] = ["next", "again"].map(|what| reopen(&saved, mesh, 1, &at(what)));
            assert_eq!(changed(&next, &again), None, "{family}, mesh {i}");
            assert!(changed(&saved, &next).is_some(), "{family}, mesh {i}: a step changes weights");
        }
    }
}

/// In F32, a mesh saves after a step what one rank saves. One rank that reopens either checkpoint computes the same next step.
#[test]
fn each_mesh_saves_what_one_rank_saves() {
    let folder = tempfile::tempdir().unwrap();
    let of_latents = ["deepseek_v2", "deepseek_v2 without a latent of queries"];
    for family in ["phi3", "gpt2", "qwen3_moe", "gpt_oss"].into_iter().chain(of_latents) {
        let alone = alone(family, 64, Storage::Float32);
        let expected = train(&alone, &folder.path().join(format!("{family} alone")));
        let next = reopen(&expected, &alone, 1, &folder.path().join(format!("{family} alone, next")));
        // The exact gradient of a bias of keys is zero. AdamW divides the rounding errors by their size, so they are not compared.
        let compared = |checkpoint: &Path| {
            let mut seen = values(checkpoint);
            seen.retain(|name, _| !name.ends_with("c_attn.bias"));
            seen
        };
        let has_experts = alone.sizes.experts().is_some() && alone.sizes.latent().is_none();
        let meshes = if has_experts { expert_meshes(&alone) } else { meshes(&alone) };
        for (i, mesh) in meshes.iter().enumerate() {
            let saved = train(mesh, &folder.path().join(format!("{family} {i}")));
            let (apart, name) = distance(&compared(&expected), &compared(&saved));
            assert!(apart < F32, "{family}, mesh {i}: {name} is {apart:.1e} apart");
            let went_on = reopen(&saved, &alone, 1, &folder.path().join(format!("{family} {i}, next")));
            let (apart, name) = distance(&compared(&next), &compared(&went_on));
            assert!(apart < NEXT, "{family}, mesh {i}, next step: {name} is {apart:.1e} apart");
        }
    }
}

/// With all storages, a mesh that reopens the checkpoint of another mesh has each byte of it.
#[test]
fn every_mesh_reopens_the_checkpoint_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let of_dense = [Storage::MsampO1, Storage::MsampO2, Storage::Coat].map(|storage| (storage, "phi3"));
    let all = of_dense.into_iter().chain([Storage::MsampO2, Storage::Coat].map(|storage| (storage, "qwen3_moe")));
    for (number, (storage, family)) in all.enumerate() {
        let alone = alone(family, 256, storage);
        let of_family = if family == "phi3" { meshes(&alone) } else { expert_meshes(&alone) };
        let mut all = [of_family, vec![alone.clone()]].concat();
        // Groups of 128 moments do not divide 64 columns.
        all.retain(|mesh| mesh.tensor < 4);
        for (i, mesh) in rotated(&all.iter().enumerate().collect::<Vec<_>>(), all.len().div_ceil(2), number) {
            let saved = train(mesh, &folder.path().join(format!("{family} {storage:?} {i}")));
            let other = (i + 1 + number) % all.len();
            let again = reopen(&saved, &all[other], 0, &folder.path().join(format!("{family} {storage:?} {i}, again")));
            assert_eq!(
                changed(&saved, &again),
                None,
                "{family}, {storage:?}: mesh {other} has reopened what {i} has saved"
            );
        }
    }
}

/// Returns `alone` with its states in the formats of `storage`, computing in BF16.
fn at(alone: &Mesh, storage: Storage) -> Mesh {
    let recipe = recipe(RecipeName::Fp8Delayed, Fp8Format::Auto);
    Mesh { recipe, memory: MemoryPolicy { formats: storage.formats(), ..MemoryPolicy::FULL }, ..alone.clone() }
}

/// A checkpoint of any storage can be reopened with any other storage. Back in its own storage, it differs by the error of the formats. All meshes
/// convert alike, byte for byte.
#[test]
fn checkpoints_reopen_at_other_levels() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: String| folder.path().join(name.replace(' ', "-"));
    // With one scale per matrix, squares of gradients far below the largest are lost.
    let storages =
        [(Storage::MsampO1, 1e-3), (Storage::MsampO2, 0.05), (Storage::Coat, 0.05), (Storage::Bfloat16, 5e-3)];
    for family in ["phi3", "qwen3_moe"] {
        let alone = at(&alone(family, 256, Storage::MsampO1), Storage::Float32);
        let saved = train(&alone, &place(family.to_string()));
        let states = |checkpoint: &Path| {
            let mut seen = values(checkpoint);
            seen.retain(|name, _| name.starts_with("m.") || name.starts_with("v."));
            seen
        };
        for (storage, error) in storages {
            let other = reopen(&saved, &at(&alone, storage), 0, &place(format!("{family} {storage:?}")));
            let back = reopen(&other, &alone, 0, &place(format!("{family} {storage:?} back")));
            let (apart, name) = distance(&states(&saved), &states(&back));
            assert!(apart < error, "{family}, {storage:?}: {name} is {apart:.1e} apart");
            assert!(storage == Storage::MsampO1 || apart > 0.0, "{family}, {storage:?}: states were rounded");
            let trained = reopen(&saved, &at(&alone, storage), 1, &place(format!("{family} {storage:?} next")));
            assert!(tensors(&trained) != tensors(&other), "{family}, {storage:?}: a step changes weights");
            let of_family = if family == "phi3" { meshes(&alone) } else { expert_meshes(&alone) };
            for (i, mesh) in of_family.iter().enumerate().filter(|(_, mesh)| mesh.tensor < 4).step_by(2) {
                let again = reopen(&saved, &at(mesh, storage), 0, &place(format!("{family} {storage:?} {i}")));
                assert_eq!(changed(&other, &again), None, "{family}, {storage:?}, mesh {i}");
            }
        }
    }
}

/// If the checkpoint has no master weights, master weights of all storages are made from its weights.
#[test]
fn checkpoints_without_master_weights_reopen_at_other_levels() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: String| folder.path().join(name.replace(' ', "-"));
    for (number, (from, to)) in [
        (Storage::Coat, Storage::MsampO2),
        (Storage::Bfloat16, Storage::Float32),
        (Storage::Bfloat16, Storage::Coat),
        (Storage::MsampO3, Storage::Bfloat16),
    ]
    .into_iter()
    .enumerate()
    {
        let alone = at(&alone("qwen3_moe", 256, Storage::MsampO1), from);
        let saved = train(&alone, &place(format!("{number}")));
        let other = reopen(&saved, &at(&alone, to), 0, &place(format!("{number} alone")));
        let meshes: Vec<_> = expert_meshes(&alone).into_iter().filter(|mesh| mesh.tensor < 4).enumerate().collect();
        for (i, mesh) in rotated(&meshes.iter().collect::<Vec<_>>(), meshes.len().div_ceil(2), number) {
            let again = reopen(&saved, &at(mesh, to), 0, &place(format!("{number} {i}")));
            assert_eq!(changed(&other, &again), None, "{from:?} to {to:?}, mesh {i}");
        }
    }
}
