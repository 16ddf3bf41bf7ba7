//! Reads and loads adapters in the format of PEFT: a folder with `adapter_config.json`, and with the matrices in `adapter_model.safetensors`.

use crate::safetensors::{ModelFiles, TensorInfo};
use crate::{adapter_config, expert_adapters, stacks};
use ottava_common::error::{Error, Result};
use ottava_hub::is_name;
use ottava_models::layers::SCORE;
use ottava_models::{Adapters, ConfigFile, Decoder, DecoderConfig, TextNames};
use ottava_recipe::lora::{Exceptions, Lora, MAGNITUDE, PEFT_PREFIX, Targets, is_of_adapter, module_of};
use ottava_recipe::param::{ExpertAdapter, FolderLayout, FolderTensor, Init, WeightSource};
use ottava_tensor::{Device, Tensor};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The name of the file with an adapter's settings.
pub const CONFIG_FILE: &str = "adapter_config.json";

/// The name of the file with the matrices in older versions of PEFT.
const PICKLE_FILE: &str = "adapter_model.bin";

/// The beginning of names in a decoder that a folder of the decoder without its head omits, such as GPT-2's.
pub(super) const DECODER: &str = "transformer.";

/// The name of the file with an adapter's matrices.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// A PEFT folder with adapters of a model.
pub struct AdapterFolder {
    /// The rank, the factor and the targets of the adapters.
    pub lora: Lora,
    /// Whether the folder also has the head of a reward model.
    pub has_score: bool,
    files: ModelFiles,
    path: PathBuf,
    /// The last matrix of all experts of a layer that was read, with its name.
    of_experts: RefCell<Option<(String, Vec<f32>)>>,
}

/// The tensors of the adapter of a linear, in F32.
pub struct LinearAdapter {
    /// The matrix `A`, `[r, K]`.
    pub a: Tensor,
    /// The matrix `B`, `[N, r]`.
    pub b: Tensor,
    /// The magnitudes, `[N]`; `None` without DoRA.
    pub magnitude: Option<Tensor>,
    /// The factor of the product `B · A`.
    pub scale: f64,
}

impl AdapterFolder {
    /// Opens `folder`. Names in `target_modules` are ignored if no matrix matches them, as in PEFT. Names in `modules_to_save` are ignored if another of
    /// these names has a tensor.
    ///
    /// Errors as [`AdapterFolder::expect_config`], and with [`Error::Model`] if the settings need something that is not implemented, or if no module of
    /// `modules_to_save` has a tensor.
    pub fn open(folder: &Path) -> Result<AdapterFolder> {
        AdapterFolder::expect_config(folder)?;
        let config = ConfigFile::read(&folder.join(CONFIG_FILE))?;
        let mut lora = adapter_config::settings(&config)?;
        let weights = folder.join(WEIGHTS_FILE);
        if !weights.exists() && folder.join(PICKLE_FILE).exists() {
            return Err(Error::Model(format!(
                "{}: holds {PICKLE_FILE} and no {WEIGHTS_FILE}; a pickle can run code and is not read: save the adapter anew with PEFT, \
                 `PeftModel.from_pretrained(base, \"{0}\").save_pretrained(\"{0}\")`",
                folder.display()
            )));
        }
        let files = ModelFiles::open_file(&weights)?;
        let has_prefix = files.names().any(|name| own_name(name) != name);
        let [files, _] = files.divide(|name| Some(own_name(name)))?;
        if has_prefix {
            // Targets and exceptions name modules of a larger model, and all that they select has matrices in the folder.
            lora.targets = targets_with_matrices(Targets::AllLinear, &files);
            lora.exceptions =
                Exceptions { ranks: lora.exceptions.ranks, alphas: lora.exceptions.alphas, ..Exceptions::default() };
            lora.parameters.iter_mut().for_each(|name| *name = TextNames::without_prefix(name));
        }
        let names: BTreeSet<String> = files.names().map(String::from).collect();
        let has = |name: &str| names.contains(name);
        let [files, _] = files.divide(|name| Some(expert_adapters::own_name(name, &lora.parameters, has)))?;
        let linears: Vec<String> = files.names().filter_map(expert_adapters::linear_of).map(String::from).collect();
        let is_used = |target: &String| {
            let target = Lora { parameters: vec![target.clone()], ..Lora::of_no_linear() };
            linears.iter().any(|linear| target.has(linear) || target.has_parameter(linear))
        };
        lora.parameters.retain(is_used);
        lora = expert_adapters::with_parameters(lora, &linears).map_err(|problem| config.error(&problem))?;
        // The file has the adapters of experts under the names of their parameters.
        lora.experts_by_name = false;
        lora.targets = targets_with_matrices(lora.targets, &files);
        if lora.targets == Targets::NONE && lora.parameters.is_empty() {
            return Err(config.error("`target_modules` names no linear that has matrices in the folder"));
        }
        let has_score = adapter_config::has_score(&config)?;
        lora.modules_to_save = modules_with_tensors(lora.modules_to_save, &files, has_prefix).map_err(|end| {
            config.error(&format!("`modules_to_save` names `{end}`, and {WEIGHTS_FILE} has no tensor of it"))
        })?;
        Ok(AdapterFolder { lora, has_score, files, path: folder.to_path_buf(), of_experts: RefCell::default() })
    }

    /// Returns the sizes of a model with these adapters on a base model of `sizes`. If embedding and head were trained whole with rows for new tokens, the
    /// vocabulary has these tokens.
    pub fn on(&self, sizes: DecoderConfig) -> DecoderConfig {
        let names = sizes.stream.names;
        let rows = [names.embedding, names.head].map(|module| {
            let name = self.name_of_whole(&format!("{module}.weight"))?;
            self.files.info(&name).ok()?.shape.first().copied()
        });
        let vocabulary = match rows {
            [Some(embedding), Some(head)] if embedding == head => embedding.max(sizes.vocabulary),
            // A reward model has no head with a row for each token.
            [Some(embedding), None] if self.has_score => embedding.max(sizes.vocabulary),
            _ => sizes.vocabulary,
        };
        DecoderConfig { lora: Some(self.lora.clone()), vocabulary, ..sizes }
    }

    /// Errors with [`Error::Io`] of the kind [`ErrorKind::NotFound`] if the folder has no settings of an adapter.
    pub fn expect_config(folder: &Path) -> Result<()> {
        if folder.join(CONFIG_FILE).is_file() {
            return Ok(());
        }
        let reason =
            format!("there is no {CONFIG_FILE}; an adapter is a folder of PEFT with {CONFIG_FILE} and {WEIGHTS_FILE}");
        Err(Error::io(folder)(std::io::Error::new(ErrorKind::NotFound, reason)))
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder of the base model on which the adapters were trained, or its name on the Hub with its revision, as the settings name it.
    pub fn base(folder: &Path) -> Result<PathBuf> {
        let config = ConfigFile::read(&folder.join(CONFIG_FILE))?;
        let base: String = config.required("base_model_name_or_path")?;
        let revision: Option<String> = config.optional("revision", None)?;
        Ok(match revision.filter(|_| is_name(&base) && !Path::new(&base).exists()) {
            Some(revision) => PathBuf::from(format!("{base}@{revision}")),
            None => PathBuf::from(base),
        })
    }

    /// Returns the adapter of the linear whose weight has the name `weight` in a folder. Returns `None` if this linear does not have an adapter.
    pub fn of_weight(&self, weight: &str) -> Result<Option<LinearAdapter>> {
        let Some((linear, names)) = self.names_of(weight) else { return Ok(None) };
        let (a, b) = (self.files.values(&names[0])?, self.files.values(&names[1])?);
        let (found, rank) = (a.shape()[0], self.lora.rank(&linear));
        if found != rank {
            let path = self.path.display();
            return Err(Error::Model(format!(
                "{path}: `{}` has rank {found}, and {CONFIG_FILE} says {rank}",
                names[0]
            )));
        }
        let magnitude = names.get(2).map(|name| self.files.values(name)).transpose()?;
        Ok(Some(LinearAdapter { a, b, magnitude, scale: self.lora.scale(&linear) }))
    }

    /// Returns the values of the weight with the name `weight` in a folder, in F32, if its module was trained whole beside the adapters.
    pub fn whole(&self, weight: &str) -> Result<Option<Tensor>> {
        self.name_of_whole(weight).map(|name| self.files.values(&name)).transpose()
    }

    /// Returns whether the folder has the tensor `name` of a module that was trained whole.
    fn has_whole(&self, name: &str) -> bool {
        self.lora.saves(module_of(name)) && self.files.info(name).is_ok()
    }

    /// Returns the name in this folder of the weight with the name `weight` in a model folder, if its module was trained whole.
    fn name_of_whole(&self, weight: &str) -> Option<String> {
        let names = ["", DECODER].map(|around| format!("{PEFT_PREFIX}{around}{weight}"));
        names.into_iter().find(|name| self.has_whole(name))
    }

    /// Returns the linear of a weight, and the names of its `A`, `B` and, with DoRA, magnitudes. Returns `None` if the linear is not a target.
    fn names_of(&self, weight: &str) -> Option<(String, Vec<String>)> {
        let linear = weight.strip_suffix(".weight").filter(|linear| !expert_adapters::is_of_experts(linear))?;
        let ends = ["lora_A.weight", "lora_B.weight", MAGNITUDE];
        let ends = &ends[..if self.lora.use_dora { 3 } else { 2 }];
        ["", DECODER].into_iter().find_map(|around| {
            let linear = format!("{around}{linear}");
            let names = ends.iter().map(|end| self.file_name(&format!("{PEFT_PREFIX}{linear}.{end}")));
            let names: Vec<_> = names.collect();
            let is_adapted = self.lora.has(&linear) && names.iter().all(|name| self.files.info(name).is_ok());
            is_adapted.then_some((linear, names))
        })
    }

    /// Returns the number of labels of the head of a classifier, which the folder has instead of the base model.
    ///
    /// Errors with [`Error::Model`] if the folder names such a head and does not have it.
    pub fn labels(&self) -> Result<Option<usize>> {
        let of_score = || Ok(self.files.info(&AdapterFolder::name_of_score())?.shape.first().copied().unwrap_or(1));
        self.has_score.then(of_score).transpose()
    }

    /// Returns the head of a classifier or reward model, `[L, C]`, which the folder has instead of the base model.
    pub(super) fn score(&self) -> Result<Option<Tensor>> {
        self.has_score.then(|| self.files.values(&AdapterFolder::name_of_score())).transpose()
    }

    /// Returns the name in the folder of the head of a classifier or reward model.
    fn name_of_score() -> String {
        format!("{PEFT_PREFIX}{SCORE}.weight")
    }

    /// Errors if the folder has matrices of weights that are neither in `weights` nor matrices of the adapters `of_experts`, nor the head of a classifier or
    /// reward model.
    pub(super) fn expect_weights(&self, weights: &[TensorInfo], of_experts: &[FolderTensor]) -> Result<()> {
        let names = |info: &TensorInfo| {
            let of_adapter = self.names_of(&info.name).into_iter().flat_map(|(_, names)| names);
            of_adapter.chain(self.name_of_whole(&info.name)).collect::<Vec<_>>()
        };
        let of_expert = |tensor: &FolderTensor| match &tensor.layout {
            FolderLayout::ExpertAdapter(place) => self.names_of_expert(tensor, place),
            _ => Vec::new(),
        };
        let used = weights.iter().flat_map(names).chain(of_experts.iter().flat_map(of_expert));
        self.expect_used(&used.chain(self.has_score.then(AdapterFolder::name_of_score)).collect())
    }

    /// Loads the adapters for `model`, which must be built with [`Lora::of_no_linear`].
    ///
    /// Errors in the same cases as [`Decoder::load_adapters`]. Errors with [`Error::Model`], which names the folder, if the adapters belong to
    /// another model or have the head of a reward model.
    pub fn load(self, model: &Decoder) -> Result<Adapters> {
        let path = self.path.display().to_string();
        if self.has_score {
            return Err(Error::Model(format!(
                "{path}: the adapter has the head of a classifier or a reward model, which draws no tokens; evaluate it with `ottava eval BASE --adapter {path}`"
            )));
        }
        let (lora, mut weights) = (self.lora.clone(), AdapterWeights::new(self));
        let adapters = model.load_adapters(&lora, &mut weights).map_err(|error| match error {
            Error::Config(text) => Error::Model(format!("{path}: {text}")),
            error => error,
        })?;
        weights.finish()?;
        Ok(adapters)
    }

    /// Returns the name in this folder of the tensor `name` of a model, which may call the mixture differently.
    fn file_name(&self, name: &str) -> String {
        let [own, other] = expert_adapters::file_names(name);
        if !self.files.has(&own) && self.files.has(&other) { other } else { own }
    }

    /// Returns the names in this folder of the matrices that have the matrix `tensor` of an expert's adapter.
    fn names_of_expert(&self, tensor: &FolderTensor, place: &ExpertAdapter) -> Vec<String> {
        let (of_all, of_linears) = expert_adapters::names_of(tensor, place);
        let of_all = self.file_name(&of_all);
        let of_linears: Vec<String> = of_linears.iter().map(|name| self.file_name(name)).collect();
        if !self.files.has(&of_all) && of_linears.iter().all(|name| self.files.has(name)) {
            return of_linears;
        }
        vec![of_all]
    }

    /// Reads the matrix `tensor` of an expert's adapter in F32, `[rows, columns]`.
    pub(super) fn of_expert(&self, tensor: &FolderTensor, place: &ExpertAdapter) -> Result<Tensor> {
        let (names, shape) = (self.names_of_expert(tensor, place), &tensor.shape);
        let values = match &names[..] {
            [of_all] if !expert_adapters::names_of(tensor, place).1.contains(of_all) => {
                let mut last = self.of_experts.borrow_mut();
                if last.as_ref().is_none_or(|(name, _)| name != of_all) {
                    let values = self.values(of_all, &tensor.stored_shape())?.to_vec::<f32>()?;
                    *last = Some((of_all.clone(), values));
                }
                let (_, all) = last.as_ref().expect("it was read");
                expert_adapters::of_expert(all, shape, place)
            }
            of_linears => {
                let parts = of_linears.iter().map(|name| self.files.values(name)).collect::<Result<Vec<_>>>()?;
                let values = expert_adapters::of_linears(&parts, shape, place.matrix);
                values.map_err(|reason| expert_adapters::wrong(&self.path, &reason))?
            }
        };
        Ok(Tensor::from_slice(&Device::Cpu, shape, &values)?)
    }

    /// Reads a matrix of this shape in F32.
    fn values(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let wrong = |reason: String| Error::Model(format!("{}: the adapter {reason}", self.path.display()));
        let found = self.files.info(name).map_err(|_| {
            wrong(format!(
                "has no `{name}`; `target_modules` names the linears that have adapters, which are those of its file"
            ))
        })?;
        if found.shape != shape {
            return Err(wrong(format!("has `{name}` of shape {:?}, and the model makes it {shape:?}", found.shape)));
        }
        self.files.values(name)
    }

    /// Errors if the folder has matrices that are not in `used`.
    fn expect_used(&self, used: &BTreeSet<String>) -> Result<()> {
        match self.files.names().find(|name| !used.contains(*name)) {
            Some(name) => Err(Error::Model(format!(
                "{}: the adapter has `{name}`, which the base model has no place for, or neither `target_modules` nor `modules_to_save` names; is it of another model?",
                self.path.display()
            ))),
            None => Ok(()),
        }
    }
}

/// The weights in the folder of an adapter, by their names in this folder.
pub struct AdapterWeights {
    folder: AdapterFolder,
    /// The names of the matrices that were read.
    used: BTreeSet<String>,
}

impl AdapterWeights {
    /// Makes a source of the weights in `folder`.
    pub fn new(folder: AdapterFolder) -> AdapterWeights {
        AdapterWeights { folder, used: BTreeSet::new() }
    }

    /// Returns whether the folder has the head of a reward model.
    pub fn has_score(&self) -> bool {
        self.folder.has_score
    }

    /// Returns whether the folder has the tensor `name` of a module that was trained whole.
    pub fn has_whole(&self, name: &str) -> bool {
        self.folder.has_whole(name)
    }

    /// Errors if the folder has matrices that were not read.
    pub fn finish(&self) -> Result<()> {
        self.folder.expect_used(&self.used)
    }
}

impl WeightSource for AdapterWeights {
    fn expect(&mut self, tensor: &FolderTensor) -> Result<()> {
        match &tensor.layout {
            FolderLayout::ExpertAdapter(place) => self.used.extend(self.folder.names_of_expert(tensor, place)),
            _ => drop(self.used.insert(self.folder.file_name(&tensor.name))),
        }
        Ok(())
    }

    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, _: Init) -> Result<Tensor> {
        self.expect(tensor)?;
        let values = match &tensor.layout {
            FolderLayout::ExpertAdapter(place) => self.folder.of_expert(tensor, place)?,
            layout => {
                let values = self.folder.values(&self.folder.file_name(&tensor.name), &tensor.stored_shape())?;
                match layout {
                    FolderLayout::ByHead(heads) => stacks::regrouped(&values, [*heads, 3])?,
                    _ => values,
                }
            }
        };
        Ok(values.reshape(&[values.len()])?.rows(elements.start, elements.end)?)
    }
}

/// Returns the name of a matrix in an adapter of the text model alone, for a matrix in an adapter of a larger model.
fn own_name(name: &str) -> String {
    match name.strip_prefix(PEFT_PREFIX) {
        Some(module) => format!("{PEFT_PREFIX}{}", TextNames::without_prefix(module)),
        None => name.to_string(),
    }
}

/// Returns the modules of the tensors in `files` that belong to no adapter of a linear.
fn modules_of(files: &ModelFiles) -> impl Iterator<Item = &str> {
    files.names().filter(|name| !is_of_adapter(name)).map(module_of)
}

/// Returns the ends of names of modules that were trained whole, without ends that match no tensor in `files`, as in PEFT. `has_prefix` says whether the
/// names are of modules of a larger model.
///
/// Errors with the first of these ends if no end matches a tensor.
fn modules_with_tensors(saved: Vec<String>, files: &ModelFiles, has_prefix: bool) -> Result<Vec<String>, String> {
    let own = |end: String| if has_prefix { TextNames::without_prefix(&end) } else { end };
    let has_module = |end: &String| modules_of(files).any(|module| module.ends_with(end.as_str()));
    let (found, mut missing): (Vec<_>, Vec<_>) = saved.into_iter().map(own).partition(has_module);
    match found.is_empty() && !missing.is_empty() {
        true => Err(missing.swap_remove(0)),
        false => Ok(found),
    }
}

/// Returns `targets` without the names that match no linear with a matrix in `files`. If the targets are all linears, returns the linears that have
/// matrices. A pattern stays unchanged.
fn targets_with_matrices(targets: Targets, files: &ModelFiles) -> Targets {
    let linears = || {
        let linears = files.names().filter_map(expert_adapters::linear_of);
        linears.filter(|linear| !expert_adapters::is_of_experts(linear)).map(String::from)
    };
    match targets {
        Targets::AllLinear => Targets::Names(linears().collect()),
        Targets::Names(names) => {
            let is_used = |name: &String| {
                let target = Targets::Names(vec![name.clone()]);
                linears().any(|linear| target.names(&linear))
            };
            Targets::Names(names.into_iter().filter(is_used).collect())
        }
        Targets::Pattern(pattern) => Targets::Pattern(pattern),
    }
}
