//! Loads and writes the weights of Hugging Face model folders.

use crate::adapter::AdapterWeights;
use crate::new_rows::NewRows;
use crate::{AdapterFolder, TensorInfo, WeightFiles, stacks};
use ottava_common::error::{Error, Result};
use ottava_common::hash::{MIX_STEP, mix, name_hash};
use ottava_common::{interrupt, python_json};
use ottava_models::layers::{ExpertStacks, ScoreSpec, VALUE, expert_stack};
use ottava_models::{ConfigFile, Decoder, DecoderConfig, decoder_config};
use ottava_recipe::Recipe;
use ottava_recipe::lora::{MAGNITUDE, PEFT_PREFIX, is_of_adapter};
use ottava_recipe::param::{FolderCodes, FolderLayout, FolderTensor, Init, Shard, StackOrder, Stacked, WeightSource};
use ottava_tensor::element::Real;
use ottava_tensor::ops::{normal_from, row_norms, transpose};
use ottava_tensor::{DType, Device, Granularity, Nf4Tensor, Staging, Tensor};
use serde_json::Value;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The ends of the names of constants in folders of older writers: angles of rotary positions, and causal masks
/// of GPT-2 and GPT-NeoX.
pub const MASKS_AND_ANGLES: &[&str] =
    &["rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"];

/// The prefixes of names that a folder of a model without its head omits: of GPT-2, BERT, RoBERTa and ModernBERT.
const PREFIXES: [&str; 4] = [crate::adapter::DECODER, "bert.", "roberta.", "model."];

/// The weights of a model folder.
pub struct FolderWeights {
    files: WeightFiles,
    staging: Staging,
    used: BTreeSet<String>,
    /// The tables that have fewer rows than the model, if there are any.
    new_rows: Option<NewRows>,
    /// The last tensor or part of a tensor that was transposed: its name, its first element and its values. It is kept since ranks may read many
    /// ranges of it.
    transposed: Option<(String, usize, Tensor)>,
}

impl FolderWeights {
    /// Opens the safetensors files of `folder` and checks that they are complete.
    pub fn open(folder: &Path) -> Result<FolderWeights> {
        let (files, staging) = (WeightFiles::open(folder)?, Staging::new(&Device::Cpu));
        Ok(FolderWeights { files, staging, used: BTreeSet::new(), new_rows: None, transposed: None })
    }

    /// Opens the weights of `folder` for a model of these `sizes`, which may have more tokens than the folder. The rows of embedding and head of each new
    /// token are the mean of the rows of the folder.
    ///
    /// Errors as [`FolderWeights::open`], and if config.json cannot be read.
    pub fn open_for(folder: &Path, sizes: &DecoderConfig) -> Result<FolderWeights> {
        let own = decoder_config(&ConfigFile::read(folder)?)?.vocabulary;
        Ok(FolderWeights { new_rows: NewRows::of(sizes, own), ..FolderWeights::open(folder)? })
    }

    /// Returns the same weights, which are read to the memory of `device`.
    pub fn on(self, device: &Device) -> FolderWeights {
        FolderWeights { staging: Staging::new(device), ..self }
    }

    /// Checks that `folder` has exactly the weights of the model of these `sizes`, each in its shape, like loading. Values are read only if the
    /// folder has a second copy of a tied head.
    pub fn check(folder: &Path, sizes: &DecoderConfig, recipe: &Recipe) -> Result<()> {
        let mut weights = FolderWeights::open(folder)?;
        Decoder::folder_tensors(sizes, recipe)?.iter().try_for_each(|tensor| weights.expect(tensor))?;
        weights.finish(sizes)
    }

    /// Finds a tensor in the layout that [`FolderWeights::in_folder`] returns, and returns its name and its first element there.
    ///
    /// Errors if the folder does not have the tensor, or has it in another shape.
    fn find(&mut self, tensor: &FolderTensor) -> Result<(String, usize)> {
        if let FolderLayout::Stacked(Stacked { expert, linear, order, .. }) = tensor.layout {
            let (name, shape) = (tensor.stored_name(), tensor.stored_shape());
            self.expect_shape(&name, &shape)?;
            // Only with outputs first, the elements of a linear are neighbours.
            let within = if order == StackOrder::OutputsFirst { linear * tensor.elements() } else { 0 };
            return Ok((name, expert * shape[1..].iter().product::<usize>() + within));
        }
        let name = self.name_of(&tensor.name).to_string();
        let mut shape = tensor.stored_shape();
        shape[0] = self.new_rows.as_ref().and_then(|rows| rows.of_folder(tensor)).unwrap_or(shape[0]);
        self.expect_shape(&name, &shape)?;
        Ok((name, 0))
    }

    /// Returns the name in the folder of the tensor `name`. A folder of a model without its head may omit the prefix of its names.
    fn name_of<'a>(&self, name: &'a str) -> &'a str {
        let short = || PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).filter(|short| self.has(short));
        if self.has(name) { name } else { short().unwrap_or(name) }
    }

    fn has(&self, name: &str) -> bool {
        self.files.info(name).is_ok()
    }

    /// Returns `tensor` with the layout that the folder has. A folder may have the matrices of all experts of a layer in one tensor or in a tensor
    /// each, and stacked matrices with inputs and outputs exchanged.
    fn in_folder(&self, tensor: &FolderTensor) -> FolderTensor {
        let with = |layout| FolderTensor { layout, ..tensor.clone() };
        let stack = match tensor.layout {
            FolderLayout::Stacked(_) if !self.has(&tensor.stored_name()) && self.has(&tensor.name) => {
                return with(FolderLayout::Same);
            }
            FolderLayout::Stacked(stack) => stack,
            FolderLayout::Same if !self.has(&tensor.name) => match self.stack_of(tensor) {
                Some(stack) => stack,
                None => return tensor.clone(),
            },
            _ => return tensor.clone(),
        };
        let in_order = |order| with(FolderLayout::Stacked(Stacked { order, ..stack }));
        let own = in_order(stack.order);
        let Some(order) = stack.order.exchanged() else { return own };
        let (other, Ok(info)) = (in_order(order), self.files.info(&own.stored_name())) else { return own };
        match [&own, &other].map(|tensor| tensor.stored_shape() == info.shape) {
            [false, true] => other,
            // The stack of the other linears of these experts tells the order of square matrices.
            [true, true] if self.has_other_stack(tensor, order) => other,
            _ => own,
        }
    }

    /// Returns whether the folder has the other stack of the experts of `tensor` in this `order`.
    fn has_other_stack(&self, tensor: &FolderTensor, order: StackOrder) -> bool {
        let [gate_up, down] = ExpertStacks::NAMES;
        let Some((mixture, _)) = tensor.name.rsplit_once(".experts.") else { return false };
        let info = |name: &str| self.files.info(&format!("{mixture}.{name}")).map(|info| info.shape);
        let (Ok(of_gate_up), Ok(of_down), [outputs, inputs]) = (info(gate_up), info(down), &tensor.shape[..]) else {
            return false;
        };
        // The outputs of the linear before the activation are the inputs of the linear after it.
        let is_down = expert_stack(tensor.name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default())
            .is_some_and(|(name, _)| name == down);
        let (stored, [rows, columns]) = match is_down {
            true => (of_gate_up, [2 * inputs, *outputs]),
            false => (of_down, [*inputs, *outputs]),
        };
        let exchanged = if order == StackOrder::InputsFirst { [columns, rows] } else { [rows, columns] };
        stored.get(1..) == Some(&exchanged[..])
    }

    /// Returns the place of `tensor` in a tensor of the folder that stacks the matrices of all experts of a layer as in the memory of transformers,
    /// if `tensor` is a matrix of an expert and the folder has such a tensor.
    fn stack_of(&self, tensor: &FolderTensor) -> Option<Stacked> {
        let (_, rest) = tensor.name.strip_suffix(".weight")?.rsplit_once(".experts.")?;
        let (expert, linear) = rest.split_once('.')?;
        let (name, [linear, linears]) = expert_stack(linear)?;
        let stack = Stacked {
            name,
            order: StackOrder::OutputsFirst,
            expert: expert.parse().ok()?,
            experts: 0,
            linear,
            linears,
        };
        let of_all = FolderTensor { layout: FolderLayout::Stacked(stack), ..tensor.clone() };
        let experts = *self.files.info(&of_all.stored_name()).ok()?.shape.first()?;
        Some(Stacked { experts, ..stack }).filter(|stack| stack.expert < experts)
    }

    /// Marks the tensor `name` as used. Errors if the folder does not have it, or has it in another shape.
    fn expect_shape(&mut self, name: &str, shape: &[usize]) -> Result<()> {
        let info = self.files.info(name)?;
        if info.shape != shape {
            return Err(Error::Model(format!(
                "tensor `{name}` has shape {:?}, config.json makes it {shape:?}",
                info.shape
            )));
        }
        self.used.insert(name.to_string());
        Ok(())
    }

    /// Errors if the folder holds weights that the model of these `sizes` did not read. Some weights are ignored: known constants of older writers,
    /// a second copy of a tied head, and the head of the folder if a classifier with a new head reads only its decoder.
    pub fn finish(self, sizes: &DecoderConfig) -> Result<()> {
        let head = format!("{}.weight", sizes.stream.names.head);
        let expected = |name: &str| {
            self.used.contains(name)
                || MASKS_AND_ANGLES.iter().any(|end| name.ends_with(end))
                || ((sizes.head.tied || sizes.head.labels.is_some()) && name == head)
                || (sizes.head.labels.is_some() && name == format!("{}.weight", sizes.head.scores.name))
                || sizes.folder.other_heads.iter().any(|beginning| name.starts_with(beginning))
        };
        if let Some(name) = self.files.names().into_iter().find(|name| !expected(name)) {
            return Err(Error::Model(format!(
                "the model folder holds a tensor `{name}` that config.json has no place for; is config.json of another model?"
            )));
        }
        if let Some(notice) = self.files.carried().notice() {
            tracing::warn!("{notice}");
        }
        let scales: Vec<_> = self.files.cache_scales().collect();
        if let Some(first) = scales.first() {
            let more = if scales.len() > 1 { format!(" and {} more", scales.len() - 1) } else { String::new() };
            tracing::warn!("`{first}`{more} are ignored: scales of a cache of keys and values in FP8");
        }
        if sizes.head.pooled {
            return Ok(());
        }
        let table = format!("{}.weight", sizes.stream.names.embedding);
        let table = self.used.iter().find(|used| table.ends_with(used.as_str()));
        match table.filter(|_| sizes.head.tied && self.files.names().any(|name| name == head)) {
            Some(table) if self.values(table)?.read_bytes()? != self.values(&head)?.read_bytes()? => {
                Err(Error::Model(format!(
                    "config.json ties the head to `{table}` (`tie_word_embeddings`), and the folder holds another `{head}`; set \
                     `tie_word_embeddings` to false to use both, as transformers does with a warning, or remove `{head}`"
                )))
            }
            _ => Ok(()),
        }
    }

    fn values(&self, name: &str) -> Result<Tensor> {
        self.files.values(name)
    }

    /// Reads `elements` of a vector that the folder divides into a tensor for each head.
    fn read_heads(&mut self, tensor: &FolderTensor, elements: Range<usize>) -> Result<Tensor> {
        let (mut values, mut first) = (Tensor::empty(&Device::Cpu, &[elements.len()], DType::F32)?, 0);
        for head in tensor.in_folder() {
            let (name, _) = self.find(&head)?;
            let [start, end] = [elements.start, elements.end].map(|at| at.clamp(first, first + head.elements()));
            if start < end {
                let own = self.files.values_of(&name, start - first..end - first)?;
                values.copy_from(start - elements.start, &own)?;
            }
            first += head.elements();
        }
        Ok(values)
    }

    /// Returns the flat values that `read` returns for the tensor `name` from the element `first` on. Keeps the last values for the next call.
    fn transposed(
        &mut self,
        (name, first): (String, usize),
        read: impl FnOnce(&WeightFiles, &str) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let values = match self.transposed.take() {
            Some((last, at, values)) if last == name && at == first => values,
            _ => read(&self.files, &name)?,
        };
        let flat = values.reshape(&[values.len()])?;
        self.transposed = Some((name, first, values));
        Ok(flat)
    }
}

impl WeightSource for FolderWeights {
    fn expect(&mut self, tensor: &FolderTensor) -> Result<()> {
        tensor.in_folder().iter().try_for_each(|tensor| self.find(&self.in_folder(tensor)).map(drop))
    }

    fn codes(&mut self, tensor: &FolderTensor, granularity: Granularity) -> Result<FolderCodes> {
        let tensor = &self.in_folder(tensor);
        let (name, _) = self.find(tensor)?;
        if !self.files.is_fp8(&name)? {
            return Ok(FolderCodes::None);
        }
        let scales = self.files.scales(&name)?;
        if tensor.layout != FolderLayout::Same || scales.granularity() != Some(granularity) {
            return Ok(FolderCodes::Other);
        }
        interrupt::check("loading the model")?;
        Ok(FolderCodes::Codes { codes: self.files.codes(&mut self.staging, &name)?, scale_inv: scales.into_values() })
    }

    fn packed(&mut self, tensor: &FolderTensor, device: &Device) -> Result<Option<Nf4Tensor>> {
        let tensor = &self.in_folder(tensor);
        let (name, _) = self.find(tensor)?;
        if tensor.layout == FolderLayout::Same { self.files.packed(&name, device) } else { Ok(None) }
    }

    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, _: Init) -> Result<Tensor> {
        interrupt::check("loading the model")?;
        if let FolderLayout::Heads(_) = tensor.layout {
            return self.read_heads(tensor, elements);
        }
        let tensor = &self.in_folder(tensor);
        let (name, first) = self.find(tensor)?;
        if let Some(rows) = self.new_rows.as_mut().filter(|rows| rows.of_folder(tensor).is_some()) {
            return rows.read(&self.files, &mut self.staging, (tensor, &name), elements);
        }
        match tensor.layout {
            FolderLayout::Same
            | FolderLayout::Rows(_)
            | FolderLayout::Heads(_)
            // A model folder has no adapters, so `find` has failed.
            | FolderLayout::ExpertAdapter(_)
            | FolderLayout::Stacked(Stacked { order: StackOrder::OutputsFirst, .. }) => {
                self.files.read_of(&mut self.staging, &name, first + elements.start..first + elements.end)
            }
            // Elements that are neighbours in memory form a column in the file, so the whole tensor or the tensor of an expert is read.
            FolderLayout::Transposed => {
                let values = self.transposed((name, first), |files, name| Ok(transpose(&files.values(name)?)?))?;
                Ok(values.rows(elements.start, elements.end)?)
            }
            FolderLayout::ByHead(heads) => {
                let read = |files: &WeightFiles, name: &str| stacks::regrouped(&files.values(name)?, [heads, 3]);
                Ok(self.transposed((name, first), read)?.rows(elements.start, elements.end)?)
            }
            FolderLayout::Stacked(Stacked { linear, linears, order, .. }) => {
                let outputs = linears * tensor.shape[0];
                let inputs = tensor.elements() / tensor.shape[0];
                let values = self.transposed((name, first), |files, name| {
                    let part = files.values_of(name, first..first + inputs * outputs)?;
                    stacks::divide(&part.reshape(&[inputs, outputs])?, linears, order)
                })?;
                let start = linear * tensor.elements();
                Ok(values.rows(start + elements.start, start + elements.end)?)
            }
        }
    }
}

/// A source of random weights. Each tensor depends only on the seed and on its name.
pub struct RandomWeights {
    /// The seed of the run.
    pub seed: u64,
    /// The device that generates the weights. The values do not depend on it.
    pub device: Device,
}

impl WeightSource for RandomWeights {
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> Result<Tensor> {
        interrupt::check("drawing the weights")?;
        let (shape, seed) = ([elements.len()], name_hash(self.seed, &tensor.name));
        Ok(match init {
            Init::Normal(std) => normal_from(&self.device, &shape, std, seed, elements.start)?,
            Init::Zeros => Tensor::zeros(&self.device, &shape, DType::F32)?,
            Init::Uniform(bound) => {
                let values: Vec<f32> = elements.map(|i| bound * draw(seed, i)).collect();
                Tensor::from_slice(&self.device, &shape, &values)?
            }
            Init::LogUniform(bound) => {
                let of = |i| Real::ln((bound * (draw(seed, i) + 1.0) / 2.0).max(0.01));
                Tensor::from_slice(&self.device, &shape, &elements.map(of).collect::<Vec<f32>>())?
            }
            Init::Ones => Tensor::from_slice(&self.device, &shape, &vec![1f32; elements.len()])?,
            Init::Constant(value) => Tensor::from_slice(&self.device, &shape, &vec![value; elements.len()])?,
            Init::RowNorms { columns, layout, std } => norms_of_weight(self, tensor, elements, (columns, layout), std)?,
        })
    }
}

/// Returns value `i` of a uniform distribution between -1 and 1.
fn draw(seed: u64, i: usize) -> f32 {
    (mix(seed.wrapping_add((i as u64).wrapping_mul(MIX_STEP))) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// Returns the norms of `rows` of the weight with `columns` columns that belongs to the magnitudes `tensor`, in F32.
fn norms_of_weight(
    weights: &mut dyn WeightSource,
    tensor: &FolderTensor,
    rows: Range<usize>,
    (columns, layout): (usize, FolderLayout),
    std: f32,
) -> Result<Tensor> {
    let linear = tensor.name.strip_prefix(PEFT_PREFIX).unwrap_or(&tensor.name).strip_suffix(MAGNITUDE);
    let linear = linear.expect("magnitudes are named after their linear");
    let weight = FolderTensor { name: format!("{linear}weight"), shape: vec![tensor.shape[0], columns], layout };
    let values = weights.read(&weight, rows.start * columns..rows.end * columns, Init::Normal(std))?;
    Ok(row_norms(&values.reshape(&[rows.len(), columns])?)?)
}

/// A source of weights from `base` with adapters. The adapters and the head of a reward model come from a folder, or are new from a seed. Modules that are
/// trained whole come from the folder of the adapters, or from `base`. A value head is always new: no folder has it, and a run that resumes restores it
/// from its training state.
pub struct AdaptedWeights<'a> {
    base: &'a mut dyn WeightSource,
    adapter: Option<AdapterWeights>,
    new: RandomWeights,
    new_score: bool,
    /// The names of the scores.
    scores: ScoreSpec,
    /// The beginnings of the names of the tensors of a pooler, which are new if the base does not have them.
    of_pooler: Vec<String>,
    divided_head: Option<[String; 2]>,
}

/// The source of a tensor.
enum Origin<'a> {
    Base(FolderTensor),
    Adapter(&'a mut AdapterWeights),
    New(FolderTensor),
}

impl<'a> AdaptedWeights<'a> {
    /// Makes a source of the weights of `base`. Adapters come from the folder `adapter`, or from `new` without a folder. With `new_score`, the base
    /// is a language model, and `new` makes the head of a reward model unless the adapter has it.
    pub fn new(
        base: &'a mut dyn WeightSource,
        adapter: Option<AdapterFolder>,
        new: RandomWeights,
        new_score: bool,
    ) -> AdaptedWeights<'a> {
        let adapter = adapter.map(AdapterWeights::new);
        let (scores, of_pooler) = (ScoreSpec::OF_DECODERS, Vec::new());
        AdaptedWeights { base, adapter, new, new_score, scores, of_pooler, divided_head: None }
    }

    /// Returns the same weights for a model of these `sizes`. If the base has one tensor for head and embedding, and the model has two, the head starts from
    /// this tensor too. The pooler of the model is new if the base lacks it.
    pub fn for_model(self, sizes: &DecoderConfig) -> AdaptedWeights<'a> {
        let pooler = sizes.head.pooler.iter();
        let of_pooler = pooler.flat_map(|spec| [Some(spec.name), spec.norm]).flatten().map(|name| format!("{name}."));
        AdaptedWeights {
            divided_head: sizes.divided_head(),
            scores: sizes.head.scores,
            of_pooler: of_pooler.collect(),
            ..self
        }
    }

    /// Returns `tensor` with its name in the base.
    fn in_base(&self, tensor: FolderTensor) -> FolderTensor {
        match &self.divided_head {
            Some([head, table]) if tensor.name == *head => FolderTensor { name: table.clone(), ..tensor },
            _ => tensor,
        }
    }

    /// Returns the source of `tensor`, with its name there. A new head of a reward model is the same with and without adapters.
    fn origin(&mut self, tensor: &FolderTensor) -> Origin<'_> {
        if tensor.name == VALUE {
            return Origin::New(tensor.clone());
        }
        let beside = tensor.name.strip_prefix(PEFT_PREFIX);
        let is_score = self.is_score(beside.unwrap_or(&tensor.name));
        let named = || FolderTensor { name: beside.unwrap_or(&tensor.name).to_string(), ..tensor.clone() };
        let (in_base, new_score) = (self.in_base(named()), self.new_score);
        let is_missing = self.is_missing_pooler(&in_base);
        // An adapter may lack the head of a reward model, or modules that are trained whole from now on.
        let has = |adapter: &&mut AdapterWeights| match is_score {
            true => adapter.has_score(),
            false => is_of_adapter(&tensor.name) || adapter.has_whole(&tensor.name),
        };
        match (beside, self.adapter.as_mut().filter(has)) {
            (Some(_), Some(adapter)) => Origin::Adapter(adapter),
            _ if is_score && new_score => Origin::New(named()),
            _ if is_missing => Origin::New(named()),
            (Some(_), None) if is_of_adapter(&tensor.name) => Origin::New(tensor.clone()),
            _ => Origin::Base(in_base),
        }
    }

    /// Returns whether `name` is a tensor of the scores.
    fn is_score(&self, name: &str) -> bool {
        [".weight", ".bias"].iter().any(|ending| name.strip_suffix(ending) == Some(self.scores.name))
    }

    /// Returns whether `tensor` belongs to a pooler, and the base does not have it.
    fn is_missing_pooler(&mut self, tensor: &FolderTensor) -> bool {
        self.of_pooler.iter().any(|beginning| tensor.name.starts_with(beginning)) && self.base.expect(tensor).is_err()
    }

    /// Marks the tensor of the base that a module from the folder of adapters replaces as used.
    fn mark_replaced(&mut self, tensor: &FolderTensor) -> Result<()> {
        let module = tensor.name.strip_prefix(PEFT_PREFIX).filter(|name| !is_of_adapter(name));
        // The language model below a new reward model has no score.
        let is_new = |name: &&str| self.new_score && self.is_score(name);
        let Some(name) = module.filter(|name| !is_new(name)) else { return Ok(()) };
        self.base.expect(&self.in_base(FolderTensor { name: name.to_string(), ..tensor.clone() }))
    }

    /// Errors if the folder of the adapters has matrices that were not read.
    pub fn finish(&self) -> Result<()> {
        self.adapter.as_ref().map_or(Ok(()), AdapterWeights::finish)
    }
}

impl WeightSource for AdaptedWeights<'_> {
    fn codes(&mut self, tensor: &FolderTensor, granularity: Granularity) -> Result<FolderCodes> {
        match self.origin(tensor) {
            Origin::Base(tensor) => self.base.codes(&tensor, granularity),
            Origin::Adapter(_) | Origin::New(_) => Ok(FolderCodes::None),
        }
    }

    fn packed(&mut self, tensor: &FolderTensor, device: &Device) -> Result<Option<Nf4Tensor>> {
        match self.origin(tensor) {
            Origin::Base(tensor) => self.base.packed(&tensor, device),
            Origin::Adapter(_) | Origin::New(_) => Ok(None),
        }
    }

    fn expect(&mut self, tensor: &FolderTensor) -> Result<()> {
        match self.origin(tensor) {
            Origin::Base(tensor) => return self.base.expect(&tensor),
            Origin::New(_) => return Ok(()),
            Origin::Adapter(adapter) => adapter.expect(tensor)?,
        }
        self.mark_replaced(tensor)
    }

    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> Result<Tensor> {
        match self.origin(tensor) {
            Origin::Base(tensor) => self.base.read(&tensor, elements, init),
            Origin::Adapter(adapter) => {
                let values = adapter.read(tensor, elements, init)?;
                self.mark_replaced(tensor)?;
                Ok(values)
            }
            Origin::New(tensor) => match init {
                Init::RowNorms { columns, layout, std } => {
                    norms_of_weight(self.base, &tensor, elements, (columns, layout), std)
                }
                _ => self.new.read(&tensor, elements, init),
            },
        }
    }
}

/// Returns the shards of a parameter, each with its rows of the stack.
pub(super) fn rows_of(shards: &[Shard]) -> impl Iterator<Item = (&Shard, Range<usize>)> {
    let mut end = 0;
    shards.iter().map(move |shard| {
        let start = end;
        end += shard.shape()[0];
        (shard, start..end)
    })
}

/// Errors with [`Error::Config`] if `output` exists, or would be inside one of the `sources` from which it is made.
pub fn expect_new_folder(output: &Path, sources: &[&Path]) -> Result<()> {
    if output.symlink_metadata().is_ok() {
        return Err(Error::Config(format!("{}: this exists already; name a new folder", output.display())));
    }
    let above = output.ancestors().skip(1).map(|path| if path.as_os_str().is_empty() { Path::new(".") } else { path });
    let existing = above.into_iter().find_map(|path| path.canonicalize().ok()).unwrap_or_default();
    let around = sources.iter().find(|source| source.canonicalize().is_ok_and(|source| existing.starts_with(source)));
    match around {
        Some(source) => Err(Error::Config(format!(
            "{}: this is inside the model folder {}, which would be changed; name another place",
            output.display(),
            source.display()
        ))),
        None => Ok(()),
    }
}

/// Errors with [`Error::NonFinite`] if a weight in these bytes is infinite or NaN.
pub(super) fn expect_finite(info: &TensorInfo, bytes: &[u8]) -> Result<()> {
    match all_finite(info.dtype, bytes) {
        true => Ok(()),
        false => Err(Error::NonFinite(format!(
            "`{}` holds a weight that is not finite, so no checkpoint was saved; \
             resume from the last one with a lower `learning_rate`",
            info.name
        ))),
    }
}

/// Returns whether all elements of a tensor in a compute type are finite. Infinities and NaNs have all exponent bits set.
fn all_finite(dtype: DType, bytes: &[u8]) -> bool {
    let (exponent, size) = match dtype {
        DType::F32 => (0x7f80_0000_u32, 4),
        DType::BF16 => (0x7f80, 2),
        DType::F16 => (0x7c00, 2),
        _ => unreachable!("models compute in F32, BF16 or F16"),
    };
    bytes.chunks_exact(size).all(|element| {
        let bits = element.iter().rev().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte));
        bits & exponent != exponent
    })
}

/// Returns JSON with two spaces of indentation, as Hugging Face writes it.
pub fn as_json(value: Value) -> Arc<[u8]> {
    python_json::write(&value).into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ottava_tensor::DType;

    #[test]
    fn infinities_and_nans_are_found_in_every_compute_type() {
        let fine = [0.0, -1.5, f32::MAX, f32::MIN_POSITIVE / 2.0];
        for bad in [None, Some(f32::INFINITY), Some(f32::NEG_INFINITY), Some(f32::NAN)] {
            let values: Vec<f32> = fine.into_iter().chain(bad).collect();
            let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            assert_eq!(all_finite(DType::F32, &f32s), bad.is_none());
            // F16 and BF16 would round the largest F32 value to infinity.
            let narrow: Vec<f32> = values.iter().map(|v| if *v == f32::MAX { 60_000.0 } else { *v }).collect();
            let bf16s: Vec<u8> = narrow.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
            assert_eq!(all_finite(DType::BF16, &bf16s), bad.is_none());
            let f16s: Vec<u8> = narrow.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
            assert_eq!(all_finite(DType::F16, &f16s), bad.is_none());
        }
    }
}
