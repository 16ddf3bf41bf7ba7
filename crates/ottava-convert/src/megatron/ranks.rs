//! Checkpoints of Megatron-LM in the format `torch`: one file of `torch.save` for each rank, `mp_rank_TT[_PPP]/model_optim_rng.pt`.

use super::args::Args;
use super::layout::{Division, EMBEDDING, OUTPUT, Weight, without_wrappers};
use crate::torch::Id;
use crate::torch::{TorchFile, TorchTensor};
use ottava_common::error::{Error, Result};
use ottava_models::DecoderConfig;
use ottava_tensor::ops::cast;
use ottava_tensor::{DType, Device, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The name of a rank's file.
pub(super) const FILE: &str = "model_optim_rng.pt";

/// The maximum number of tensor parallel ranks and of pipeline parallel ranks.
const MAX_RANKS: usize = 1024;

/// An open checkpoint.
#[derive(Debug)]
pub struct RankFiles {
    path: PathBuf,
    /// The tensor parallel ranks of each pipeline stage.
    stages: Vec<Vec<Rank>>,
}

/// The file of a rank.
#[derive(Debug)]
struct Rank {
    file: TorchFile,
    /// The weights of the model, by Megatron's names.
    tensors: BTreeMap<String, Id>,
    /// The number of blocks in the file.
    blocks: usize,
}

impl RankFiles {
    /// Opens the checkpoint in the folder `path`.
    ///
    /// Errors with [`Error::Model`] if files of ranks are missing or damaged.
    pub fn open(path: &Path) -> Result<RankFiles> {
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let mut ranks = BTreeMap::new();
        for entry in std::fs::read_dir(path).map_err(Error::io(path))? {
            let name = entry.map_err(Error::io(path))?.file_name();
            if let Some(rank) = name.to_str().and_then(rank_of) {
                ranks.insert(rank, path.join(name).join(FILE));
            }
        }
        let [mut tensor, mut pipeline] = [0, 0];
        for [stage, rank] in ranks.keys() {
            (tensor, pipeline) = (tensor.max(rank + 1), pipeline.max(stage + 1));
        }
        if ranks.is_empty() || tensor > MAX_RANKS || pipeline > MAX_RANKS {
            return Err(wrong(format!(
                "there are no folders mp_rank_00, mp_rank_01 and so on with {FILE}; a checkpoint of Megatron-LM has them in iter_0000001 or release"
            )));
        }
        let mut stages = Vec::new();
        for stage in 0..pipeline {
            let open = |rank| match ranks.get(&[stage, rank]) {
                Some(file) => Rank::open(file),
                None => {
                    Err(wrong(format!("the file of rank {rank} of {tensor} in stage {stage} of {pipeline} is missing")))
                }
            };
            stages.push((0..tensor).map(open).collect::<Result<Vec<_>>>()?);
        }
        Ok(RankFiles { path: path.to_path_buf(), stages })
    }

    /// Returns an error about this checkpoint.
    fn error(&self, text: &str) -> Error {
        Error::Model(format!("{}: {text}", self.path.display()))
    }

    /// Returns the arguments of the run, if the checkpoint has arguments.
    pub fn args(&self) -> Option<Args<'_>> {
        let file = &self.stages[0][0].file;
        Args::read(file, file.pickle.root())
    }

    /// Returns the number of rows of the embedding.
    pub fn vocabulary(&self) -> Result<usize> {
        self.stages[0].iter().map(|rank| Ok(rank.shape(EMBEDDING[0])?.first().copied().unwrap_or(0))).sum()
    }

    /// Returns the number of weight tensors of each type.
    pub fn types(&self) -> Result<BTreeMap<&'static str, usize>> {
        let mut types = BTreeMap::new();
        for rank in self.stages.iter().flatten() {
            for name in rank.tensors.keys() {
                *types.entry(rank.tensor(name)?.dtype.name()).or_default() += 1;
            }
        }
        Ok(types)
    }

    /// Checks the tensors that store `weights`, which are all weights of a model of these `sizes`.
    ///
    /// Errors if a weight is missing or has another shape, and if the checkpoint has other weights.
    pub fn check(&self, weights: &[Weight], sizes: &DecoderConfig) -> Result<()> {
        let ranks = self.stages[0].len();
        let kv_heads = sizes.heads().map_or(0, |heads| heads.kv_heads);
        let hidden = sizes.mlp().map_or(0, |mlp| mlp.hidden);
        if !kv_heads.is_multiple_of(ranks) || !hidden.is_multiple_of(ranks) {
            return Err(self.error(&format!("{ranks} ranks do not divide {kv_heads} key heads and {hidden} channels")));
        }
        let mut used: Vec<BTreeSet<String>> = vec![BTreeSet::new(); self.stages.len()];
        for weight in weights {
            let (stage, name) = self.place(weight, sizes)?;
            for rank in &self.stages[stage] {
                let (shape, expected) = (rank.shape(&name)?, self.expected(weight, sizes));
                // Embedding and head are padded.
                let fits = match weight.part {
                    Division::Rows => shape.len() == 2 && shape[1] == expected[1] && shape[0] >= expected[0],
                    _ => shape == expected,
                };
                if !fits {
                    let text = format!(
                        "`{name}` has shape {shape:?}, and config.json makes it {expected:?} on each of {ranks} ranks"
                    );
                    return Err(rank.file.error(&text));
                }
            }
            used[stage].insert(name);
        }
        // If the head is tied to the embedding, the last stage has a copy of the embedding.
        let copy = |name: &str| sizes.head.tied && OUTPUT.contains(&name);
        for (stage, used) in self.stages.iter().zip(used) {
            let other = stage[0].tensors.keys().find(|name| !used.contains(*name) && !copy(name));
            if let Some(name) = other {
                return Err(stage[0].file.error(&format!("`{name}` has no place in a model of this config.json")));
            }
        }
        Ok(())
    }

    /// Returns the values of a weight in row-major order.
    pub fn values(&self, weight: &Weight, sizes: &DecoderConfig) -> Result<Vec<f32>> {
        let (stage, name) = self.place(weight, sizes)?;
        let ranks = &self.stages[stage];
        let parts = match weight.part {
            Division::Whole => &ranks[..1],
            _ => &ranks[..],
        };
        let parts =
            parts.iter().map(|rank| rank.values(&name, weight.part, sizes, ranks.len())).collect::<Result<Vec<_>>>()?;
        let elements: usize = weight.shape.iter().product();
        let mut values = match weight.part {
            Division::Columns => {
                let width = weight.shape[1] / parts.len();
                let row = |row: usize| parts.iter().flat_map(move |part| &part[row * width..(row + 1) * width]);
                (0..weight.shape[0]).flat_map(row).copied().collect()
            }
            _ => parts.concat(),
        };
        // Excludes the padding of embedding and head.
        values.truncate(elements);
        Ok(values)
    }

    /// Returns the stage that has a weight, and the name of the weight in this stage.
    fn place(&self, weight: &Weight, sizes: &DecoderConfig) -> Result<(usize, String)> {
        let last = self.stages.len() - 1;
        let (stage, prefix) = match weight.block {
            None => (if weight.stored == EMBEDDING { 0 } else { last }, String::new()),
            Some(block) => {
                // Blocks are numbered within their stage.
                let (mut first, mut found) = (0usize, None);
                for (stage, ranks) in self.stages.iter().enumerate() {
                    let blocks = ranks[0].blocks;
                    if found.is_none() && block < first.saturating_add(blocks) {
                        found = Some((stage, format!("decoder.layers.{}.", block - first)));
                    }
                    first = first.saturating_add(blocks);
                }
                match found.filter(|_| first == sizes.layers.len()) {
                    Some(found) => found,
                    None => {
                        let text = format!("it has {first} blocks, and config.json {}", sizes.layers.len());
                        return Err(self.error(&text));
                    }
                }
            }
        };
        let names = weight.stored.iter().map(|name| format!("{prefix}{name}"));
        let found = names.clone().find(|name| self.stages[stage][0].tensors.contains_key(name));
        let missing = || format!("the weight {} is missing in stage {stage}", names.collect::<Vec<_>>().join(" or "));
        Ok((stage, found.ok_or_else(|| self.error(&missing()))?))
    }

    /// Returns the shape of a rank's tensor. For a padded tensor, the number of rows is the minimum.
    fn expected(&self, weight: &Weight, sizes: &DecoderConfig) -> Vec<usize> {
        let ranks = self.stages[0].len();
        let mut shape = weight.shape.clone();
        shape[0] = weight.part.stored_rows(shape[0], sizes, ranks);
        if weight.part == Division::Columns {
            shape[1] /= ranks;
        }
        shape
    }
}

impl Rank {
    fn open(path: &Path) -> Result<Rank> {
        let file = TorchFile::open(path)?;
        let pickle = &file.pickle;
        if pickle.get(pickle.root(), "model0").is_some() {
            return Err(
                file.error("it has several models (`model0`): checkpoints of interleaved pipelines are not converted")
            );
        }
        let model = pickle.get(pickle.root(), "model").and_then(|model| pickle.entries(model));
        let model = model.ok_or_else(|| file.error("it has no `model`; this is not a checkpoint of Megatron-LM"))?;
        let mut tensors = BTreeMap::new();
        for (name, value) in model {
            let name = pickle.text(*name).ok_or_else(|| file.error("the name of a weight is no text"))?;
            if name == "language_model" {
                return Err(file.error("it is of a model before Megatron core (`language_model`); let Megatron convert it (`--use-mcore-models`)"));
            }
            // States that Transformer Engine stores beside weights are skipped.
            if name.ends_with("_extra_state") || name.ends_with("inv_freq") {
                continue;
            }
            if tensors.insert(without_wrappers(name).to_string(), *value).is_some() {
                return Err(file.error(&format!("`{name}` occurs with and without the prefix `module.`")));
            }
        }
        let block = |name: &String| name.strip_prefix("decoder.layers.")?.split('.').next()?.parse::<usize>().ok();
        let blocks = tensors.keys().filter_map(block).max().map_or(0, |last| last.saturating_add(1));
        Ok(Rank { file, tensors, blocks })
    }

    fn tensor(&self, name: &str) -> Result<TorchTensor> {
        let id = self.tensors.get(name).ok_or_else(|| self.file.error(&format!("there is no weight `{name}`")))?;
        let tensor = self.file.tensor(*id).map_err(|reason| self.file.error(&format!("`{name}` {reason}")))?;
        tensor.ok_or_else(|| self.file.error(&format!("`{name}` is no tensor")))
    }

    fn shape(&self, name: &str) -> Result<Vec<usize>> {
        Ok(self.tensor(name)?.shape)
    }

    /// Returns the rows of a tensor that belong to `part`, in F32.
    fn values(&self, name: &str, part: Division, sizes: &DecoderConfig, ranks: usize) -> Result<Vec<f32>> {
        let tensor = self.tensor(name)?;
        let width: usize = tensor.shape[1..].iter().product();
        let mut values = Vec::new();
        for (start, rows) in part.rows(tensor.shape[0], sizes, ranks) {
            let bytes = self.file.read(&tensor, start * width..(start + rows) * width)?;
            let stored = Tensor::from_bytes(&Device::Cpu, &[rows * width], tensor.dtype, &bytes)?;
            values.extend(cast(&stored, DType::F32)?.to_vec::<f32>()?);
        }
        Ok(values)
    }
}

/// Returns the tensor parallel rank and the pipeline stage in a folder's name.
fn rank_of(name: &str) -> Option<[usize; 2]> {
    let mut numbers = name.strip_prefix("mp_rank_")?.split('_').map(|number| number.parse().ok());
    let (rank, stage) = (numbers.next()??, numbers.next().unwrap_or(Some(0))?);
    numbers.next().is_none().then_some([stage, rank])
}
