//! Ranks build a model from slices and write its weights together. The result equals the result of one rank that holds the whole model.

use crate::setup::{Seeded, on_ranks, recipe, save_checkpoint, tiny_llama};
use ottava_models::Decoder;
use ottava_parallel::optim::{AdamWConfig, AdamWOptimizer, Optimizer, optimizer_tensors};
use ottava_parallel::{Partition, Ranks, ReduceFormat, Zero};
use ottava_recipe::param::{FolderTensor, Init, MemoryPolicy, Purpose, WeightSource};
use ottava_recipe::storage::Storage;
use ottava_recipe::{Fp8Format, RecipeName};
use ottava_tensor::comm::{Group, MeshShape};
use ottava_tensor::{Device, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

const ADAMW: AdamWConfig =
    AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0 };

/// A source of weights that counts the elements of matrices that are read.
struct Counted {
    weights: Seeded,
    read: usize,
}

impl WeightSource for Counted {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> ottava_common::Result<Tensor> {
        self.read += if tensor.shape.len() > 1 { elements.len() } else { 0 };
        self.weights.read(tensor, elements, init)
    }
}

/// Makes a model with the storage formats of `storage` on one of the ranks of `comm`. Returns it with the optimizer, the partition, and the number of
/// elements of matrices that were read.
fn build(storage: Storage, zero: Zero, comm: Group) -> (Decoder, AdamWOptimizer, Partition, usize) {
    let recipe = recipe(RecipeName::Fp8Delayed, Fp8Format::Auto);
    let purpose = Purpose::Train(MemoryPolicy { formats: storage.formats(), ..MemoryPolicy::FULL });
    let shape = MeshShape::of_data(comm.size());
    let ranks = Rc::new(Ranks::new(comm, shape, &Device::Cpu).unwrap());
    let mut model = Decoder::unloaded(&tiny_llama(), &recipe, &Device::Cpu, purpose, 32).unwrap();
    let partition = Partition::new(&mut model, ranks, zero, ReduceFormat::Stored, false).unwrap();
    let mut weights = Counted { weights: Seeded { std: 0.1 }, read: 0 };
    partition.load(&mut model, &mut weights).unwrap();
    let optimizer = AdamWOptimizer::new(ADAMW, &model.parameters()).unwrap();
    (model, optimizer, partition, weights.read)
}

/// Returns the bytes of master weights and their scales, by name, with the first element of this rank.
fn masters(model: &mut Decoder, optimizer: &mut AdamWOptimizer) -> Vec<(String, usize, Vec<u8>)> {
    let mut all = Vec::new();
    for (param, states) in model.parameters().into_iter().zip(optimizer.states()) {
        let (name, slice) = (param.identity.name().to_string(), param.slice());
        for kept in optimizer_tensors(&mut param.weights, states) {
            if kept.kind.starts_with("master") {
                all.push((format!("{name} {}", kept.kind), slice.start, kept.tensor.read_bytes().unwrap()));
            }
        }
    }
    all
}

/// Ranks load master weights of all formats as slices, with the same bits as one rank that loads them whole. Each rank reads only its share.
#[test]
fn slices_are_loaded_with_the_bits_of_the_whole() {
    for storage in [Storage::Float32, Storage::MsampO1, Storage::MsampO2, Storage::MsampO3] {
        let whole: BTreeMap<_, _> = {
            let (mut model, mut optimizer, ..) = build(storage, Zero::Nothing, Group::solo());
            masters(&mut model, &mut optimizer).into_iter().map(|(name, _, bytes)| (name, bytes)).collect()
        };
        for (ranks, zero) in [(2, Zero::OptimizerStates), (3, Zero::Gradients), (4, Zero::Weights)] {
            let seen = on_ranks(ranks, move |comm| {
                let (mut model, mut optimizer, _, read) = build(storage, zero, comm);
                let elements = model.parameters().iter().map(|param| param.slice().len()).sum::<usize>();
                (masters(&mut model, &mut optimizer), read, elements)
            });
            for (rank, (masters, read, elements)) in seen.into_iter().enumerate() {
                // These are the elements of the embedding, the head, and seven linears in two blocks.
                let digested = 1024 * (2 + 7 * 2);
                assert!(read <= elements + digested, "{storage:?}, rank {rank} of {ranks} reads {read} of {elements}");
                for (name, start, bytes) in masters {
                    let (all, is_scale) = (&whole[&name], name.ends_with("scale_inv"));
                    let size = if name.ends_with("master") && storage == Storage::Float32 { 4 } else { 2 };
                    let at = if is_scale { 0 } else { start * size };
                    let same = bytes.is_empty() || all[at..at + bytes.len()] == bytes;
                    assert!(same, "{storage:?}, rank {rank} of {ranks}, {name}");
                }
            }
        }
    }
}

/// Writes the folder of a model, with files of at most 20,000 bytes, from `ranks` ranks. Returns the names of the files that each rank has written.
fn save(folder: &Path, ranks: usize, zero: Zero) -> Vec<Vec<String>> {
    let folder = folder.to_path_buf();
    on_ranks(ranks, move |comm| {
        let (mut model, mut optimizer, partition, _) = build(Storage::Float32, zero, comm);
        partition.quantize_weights(&mut model).unwrap();
        save_checkpoint(&folder, 1, 20_000, &mut model, &mut optimizer, &partition)
    })
}

/// Returns the weights of a folder, by name.
fn weights_in(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = ottava_checkpoint::ModelFiles::open(folder).unwrap();
    files.names().map(|name| (name.to_string(), files.read(name).unwrap())).collect()
}

#[test]
fn ranks_write_the_files_of_the_weights_together() {
    let one = tempfile::tempdir().unwrap();
    let written = save(one.path(), 1, Zero::Nothing);
    assert!(written[0].len() > 6, "several files and an index: {written:?}");
    let expected = weights_in(&one.path().join("checkpoint-1"));
    for (ranks, zero) in [(2, Zero::Nothing), (3, Zero::OptimizerStates), (3, Zero::Weights)] {
        let folder = tempfile::tempdir().unwrap();
        let mut all = save(folder.path(), ranks, zero);
        assert!(all.iter().all(|files| files.len() >= 2), "each rank writes some: {all:?}");
        assert!(all[0].contains(&"model.safetensors.index.json".to_string()));
        let mut files = all.drain(..).flatten().collect::<Vec<_>>();
        files.sort();
        assert_eq!(files, written[0], "the files do not depend on the number of ranks");
        assert!(weights_in(&folder.path().join("checkpoint-1")) == expected, "{ranks} ranks, {zero:?}");
    }
}
