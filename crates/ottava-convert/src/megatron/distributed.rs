//! Checkpoints of Megatron-LM in the format `torch_dist`. Their tensors cover the whole model. The weights of blocks are either rows of one tensor
//! for all blocks, `decoder.layers.NAME` of `[blocks, …]`, or separate tensors with the number of the block, `decoder.layers.N.NAME`.
//!
//! Sources: `sharded_state_dict` of Megatron core's `TransformerBlock`, `MLP` and `GPTModel`, and its `dist_checkpointing`.

use super::args::Args;
use super::layout::{Division, EMBEDDING, OUTPUT, Weight, without_wrappers};
use crate::torch::TorchFile;
use crate::torch::distributed::{Distributed as Files, ShardedTensor};
use ottava_common::error::{Error, Result};
use ottava_common::input;
use ottava_models::DecoderConfig;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The file that names the format. It is written last.
const BACKEND: &str = "metadata.json";

/// The file (in later versions the object) with everything except tensors and objects of single ranks. It has the arguments, for example.
const COMMON_FILE: &str = "common.pt";
const COMMON_OBJECT: &str = "common_state/shard_0_1";

/// The prefix of the names of blocks.
const BLOCKS: &str = "decoder.layers.";

/// An open checkpoint.
#[derive(Debug)]
pub struct Distributed {
    files: Files,
    /// The weights of the model, by name.
    tensors: BTreeMap<String, ShardedTensor>,
    common: Option<TorchFile>,
}

/// The location of a weight.
struct Place<'a> {
    name: String,
    tensor: &'a ShardedTensor,
    /// The index of the weight's block on the first axis.
    block: Option<usize>,
    part: Division,
}

impl Distributed {
    /// Opens the checkpoint in the folder `path`.
    ///
    /// Errors with [`Error::Model`] if files are missing or damaged, and for other formats of Megatron core.
    pub fn open(path: &Path) -> Result<Distributed> {
        let backend = path.join(BACKEND);
        if !backend.exists() {
            let text = format!("it has no {BACKEND}: it is not whole, or its format is not `torch_dist`");
            return Err(Error::Model(format!("{}: {text}", path.display())));
        }
        let text = input::read(&backend, 1 << 20).map_err(Error::io(&backend))?;
        let found: Value = serde_json::from_slice(&text).unwrap_or_default();
        if found["sharded_backend"] != "torch_dist" {
            let text =
                format!("its `sharded_backend` is {}; only \"torch_dist\" is converted", found["sharded_backend"]);
            return Err(Error::Model(format!("{}: {text}", backend.display())));
        }
        let files = Files::open(path)?;
        let mut tensors = BTreeMap::new();
        // States of the optimizer, and states that Transformer Engine stores beside weights.
        let other = |name: &str| {
            ["optimizer.", "chained_"].iter().any(|start| name.starts_with(start)) || name.contains("_extra_state")
        };
        for name in files.names().filter(|name| !other(name)) {
            let Some(tensor) = files.tensor(name)? else { continue };
            if tensors.insert(without_wrappers(name).to_string(), tensor).is_some() {
                return Err(files.error(&format!("`{name}` occurs with and without the prefix `module.`")));
            }
        }
        let common = path.join(COMMON_FILE);
        let common = match common.exists() {
            true => Some(TorchFile::open(&common)?),
            false => files.object(COMMON_OBJECT)?,
        };
        Ok(Distributed { files, tensors, common })
    }

    /// Returns the arguments of the run, if the checkpoint has arguments.
    pub fn args(&self) -> Option<Args<'_>> {
        let file = self.common.as_ref()?;
        // An object is a list with one entry per writing rank.
        let root = file.pickle.root();
        let state = file.pickle.items(root).and_then(|states| states.first().copied()).unwrap_or(root);
        Args::read(file, state)
    }

    /// Returns the number of rows of the embedding.
    pub fn vocabulary(&self) -> Result<usize> {
        let table = self.tensors.get(EMBEDDING[0]).and_then(|table| table.shape.first().copied());
        table.ok_or_else(|| self.files.error(&format!("the weight {} is missing", EMBEDDING[0])))
    }

    /// Returns the number of weight tensors of each type.
    pub fn types(&self) -> BTreeMap<&'static str, usize> {
        let mut types = BTreeMap::new();
        for tensor in self.tensors.values() {
            *types.entry(tensor.dtype.name()).or_default() += 1;
        }
        types
    }

    /// Checks the tensors that store `weights`, which are all weights of a model of these `sizes`.
    ///
    /// Errors if a weight is missing or has another shape, and if the checkpoint has other weights.
    pub fn check(&self, weights: &[Weight], sizes: &DecoderConfig) -> Result<()> {
        let blocks = self.blocks();
        if blocks != sizes.layers.len() {
            return Err(self.files.error(&format!("it has {blocks} blocks, and config.json {}", sizes.layers.len())));
        }
        let mut used = BTreeSet::new();
        for weight in weights {
            let Place { name, tensor, block, part } = self.place(weight)?;
            let rows = part.stored_rows(weight.shape[0], sizes, 1);
            let mut expected: Vec<_> = block.map(|_| sizes.layers.len()).into_iter().chain([rows]).collect();
            expected.extend(&weight.shape[1..]);
            // Embedding and head are padded.
            let fits = match part {
                Division::Rows => tensor.shape.len() == 2 && tensor.shape[1] == expected[1] && tensor.shape[0] >= rows,
                _ => tensor.shape == expected,
            };
            if !fits {
                let text = format!("`{name}` has shape {:?}, and config.json makes it {expected:?}", tensor.shape);
                return Err(self.files.error(&text));
            }
            used.insert(name);
        }
        // If the head is tied to the embedding, the checkpoint may have a copy of the embedding.
        let copy = |name: &str| sizes.head.tied && OUTPUT.contains(&name);
        match self.tensors.keys().find(|name| !used.contains(*name) && !copy(name)) {
            Some(name) => Err(self.files.error(&format!("`{name}` has no place in a model of this config.json"))),
            None => Ok(()),
        }
    }

    /// Returns the values of a weight in row-major order.
    pub fn values(&self, weight: &Weight, sizes: &DecoderConfig) -> Result<Vec<f32>> {
        let Place { tensor, block, part, .. } = self.place(weight)?;
        let block = block.map(|block| block..block + 1);
        let stored = tensor.shape[block.iter().len()];
        let mut values = Vec::with_capacity(weight.shape.iter().product());
        for (start, rows) in part.rows(stored, sizes, 1) {
            // Excludes the padding of embedding and head.
            let end = if part == Division::Rows { weight.shape[0] } else { start + rows };
            let columns = weight.shape[1..].iter().map(|columns| 0..*columns);
            let region: Vec<_> = block.iter().cloned().chain(std::iter::once(start..end)).chain(columns).collect();
            values.extend(self.files.read(tensor, &region)?);
        }
        Ok(values)
    }

    /// Returns the number of blocks.
    fn blocks(&self) -> usize {
        let blocks = self.tensors.iter().filter_map(|(name, tensor)| {
            let number = name.strip_prefix(BLOCKS)?.split('.').next()?.parse::<usize>();
            Some(number.map_or_else(|_| tensor.shape.first().copied().unwrap_or(0), |number| number.saturating_add(1)))
        });
        blocks.max().unwrap_or(0)
    }

    fn place(&self, weight: &Weight) -> Result<Place<'_>> {
        let mut names = Vec::new();
        for stored in weight.stored {
            let Some(block) = weight.block else {
                names.push((stored.to_string(), None, weight.part));
                continue;
            };
            names.push((format!("{BLOCKS}{stored}"), Some(block), weight.part));
            let numbered = format!("{BLOCKS}{block}.{stored}");
            if let Division::Gate(which) = weight.part {
                names.push((numbered.clone() + ["_w", "_v"][which], None, Division::Whole));
            }
            names.push((numbered, None, weight.part));
        }
        for (name, block, part) in &names {
            if let Some(tensor) = self.tensors.get(name) {
                return Ok(Place { name: name.clone(), tensor, block: *block, part: *part });
            }
        }
        let names: Vec<_> = names.into_iter().map(|(name, ..)| name).collect();
        Err(self.files.error(&format!("the weight {} is missing", names.join(" or "))))
    }
}
