//! Adapters as folders of PEFT: `adapter_config.json`, and `adapter_model.safetensors` with the matrices.

use super::safetensors::{ModelFiles, TensorInfo};
use crate::error::{Error, Result};
use crate::layers::SCORE;
use crate::lora::{Lora, MAGNITUDE, PEFT_PREFIX};
use crate::models::{Adapters, ConfigFile, Decoder};
use crate::param::{FolderTensor, Init, WeightSource};
use ottava_tensor::Tensor;
use serde_json::Value;
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The name of an adapter's settings in its folder.
pub const CONFIG_FILE: &str = "adapter_config.json";

/// The name of an adapter's matrices.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";

/// A PEFT folder with adapters of a model.
pub struct AdapterFolder {
    /// Rank, factor and targets of the adapters.
    pub lora: Lora,
    /// Whether it has the head of a reward model beside its adapters.
    pub has_score: bool,
    files: ModelFiles,
    path: PathBuf,
}

/// The tensors of the adapter of a linear, F32.
pub struct LinearAdapter {
    /// `[r, K]`.
    pub a: Tensor,
    /// `[N, r]`.
    pub b: Tensor,
    /// `[N]`, with DoRA.
    pub magnitude: Option<Tensor>,
}

impl AdapterFolder {
    /// Opens `folder`.
    ///
    /// Errors with [`Error::Model`] where its settings ask for what is not implemented, as ranks by pattern.
    pub fn open(folder: &Path) -> Result<AdapterFolder> {
        let lora = AdapterFolder::settings(folder)?;
        let saved = ConfigFile::read(&folder.join(CONFIG_FILE))?.values().get("modules_to_save").cloned();
        let has_score = saved.is_some_and(|saved| is_score(&saved));
        let files = ModelFiles::open_file(&folder.join(WEIGHTS_FILE))?;
        Ok(AdapterFolder { lora, has_score, files, path: folder.to_path_buf() })
    }

    /// Rank, factor and targets of the adapter in `folder`. Errors as [`AdapterFolder::open`].
    pub fn settings(folder: &Path) -> Result<Lora> {
        let path = folder.join(CONFIG_FILE);
        if !path.is_file() {
            return Err(Error::Model(format!(
                "{}: there is no {CONFIG_FILE}; an adapter is a folder of PEFT with {CONFIG_FILE} and {WEIGHTS_FILE}",
                folder.display()
            )));
        }
        let config = ConfigFile::read(&path)?;
        let kind: String = config.required("peft_type")?;
        if kind != "LORA" {
            return Err(config.error(&format!("`peft_type` is \"{kind}\"; adapters of LORA are implemented")));
        }
        let not_read = ["modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform"];
        let is_set = |key: &&str| match config.values().get(*key) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(saved) if *key == "modules_to_save" && is_score(saved) => false,
            Some(Value::Object(pattern)) => !pattern.is_empty(),
            Some(Value::Array(names)) => !names.is_empty(),
            Some(_) => true,
        };
        if let Some(key) = not_read.iter().find(|key| is_set(key)) {
            return Err(config.error(&format!("`{key}` is set, which is not implemented for adapters")));
        }
        let bias: String = config.optional("bias", "none".to_string())?;
        if bias != "none" {
            return Err(
                config.error(&format!("`bias` is \"{bias}\"; adapters with trained biases are not implemented"))
            );
        }
        let lora = Lora {
            r: config.required("r")?,
            alpha: config.required("lora_alpha")?,
            use_rslora: config.optional("use_rslora", false)?,
            use_dora: config.optional("use_dora", false)?,
            targets: config.required("target_modules")?,
        };
        if lora.r == 0 || lora.r > 1 << 24 {
            return Err(config.error(&format!("`r` is {}", lora.r)));
        }
        Ok(lora)
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of the base model that trained the adapters, as its settings name it.
    pub fn base(folder: &Path) -> Result<PathBuf> {
        ConfigFile::read(&folder.join(CONFIG_FILE))?.required("base_model_name_or_path")
    }

    /// The adapter of the linear whose weight is called `weight` in a folder; `None` if it has none.
    pub fn of_weight(&self, weight: &str) -> Result<Option<LinearAdapter>> {
        let Some(names) = self.names_of(weight) else { return Ok(None) };
        let [a, b] = [&names[0], &names[1]].map(|name| self.files.values(name));
        let magnitude = names.get(2).map(|name| self.files.values(name)).transpose()?;
        Ok(Some(LinearAdapter { a: a?, b: b?, magnitude }))
    }

    /// The names of `A`, `B` and, with DoRA, the magnitudes beside a weight.
    fn names_of(&self, weight: &str) -> Option<Vec<String>> {
        let linear = weight.strip_suffix(".weight")?;
        let ends = ["lora_A.weight", "lora_B.weight", MAGNITUDE];
        let ends = &ends[..if self.lora.use_dora { 3 } else { 2 }];
        // Folders of a decoder without its head, as GPT-2's, leave out the name around it.
        ["", "transformer."].into_iter().find_map(|around| {
            let names: Vec<_> = ends.iter().map(|end| format!("{PEFT_PREFIX}{around}{linear}.{end}")).collect();
            names.iter().all(|name| self.files.info(name).is_ok()).then_some(names)
        })
    }

    /// Errors when there are matrices of other weights than `weights`, or the head of a reward model.
    pub fn expect_weights(&self, weights: &[TensorInfo]) -> Result<()> {
        if self.has_score {
            return Err(Error::Model(format!(
                "{}: the adapter has the head of a reward model, which is not merged; evaluate it with `ottava eval BASE --adapter FOLDER`, or load it with PEFT",
                self.path.display()
            )));
        }
        let used = weights.iter().filter_map(|info| self.names_of(&info.name)).flatten().collect();
        self.expect_used(&used)
    }

    /// Loads the adapters for `model`, which is one beside adapters.
    ///
    /// Errors as [`Decoder::load_adapters`], and with [`Error::Model`] that names the folder when the adapters are of another model, or have
    /// the head of a reward model.
    pub fn load(self, model: &Decoder) -> Result<Adapters> {
        let path = self.path.display().to_string();
        if self.has_score {
            return Err(Error::Model(format!(
                "{path}: the adapter has the head of a reward model, which draws no tokens; evaluate it with `ottava eval BASE --adapter {path}`"
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

    /// A matrix in F32, of this shape.
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

    /// Errors when the folder has matrices that are not among `used`.
    fn expect_used(&self, used: &BTreeSet<String>) -> Result<()> {
        match self.files.names().find(|name| !used.contains(*name)) {
            Some(name) => Err(Error::Model(format!(
                "{}: the adapter has `{name}`, which the base model has no place for; is it of another model?",
                self.path.display()
            ))),
            None => Ok(()),
        }
    }
}

/// The weights of an adapter's folder, by their names there.
pub struct AdapterWeights {
    folder: AdapterFolder,
    /// Names of the matrices that were read.
    used: BTreeSet<String>,
}

impl AdapterWeights {
    /// The weights of `folder`.
    pub fn new(folder: AdapterFolder) -> AdapterWeights {
        AdapterWeights { folder, used: BTreeSet::new() }
    }

    /// Errors when the folder has matrices that were not read.
    pub fn finish(&self) -> Result<()> {
        self.folder.expect_used(&self.used)
    }
}

impl WeightSource for AdapterWeights {
    fn expect(&mut self, tensor: &FolderTensor) -> Result<()> {
        self.used.insert(tensor.name.clone());
        Ok(())
    }

    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, _: Init) -> Result<Tensor> {
        self.used.insert(tensor.name.clone());
        let values = self.folder.values(&tensor.name, &tensor.stored_shape())?;
        Ok(values.reshape(&[values.len()])?.rows(elements.start, elements.end)?)
    }
}

/// Whether a list of saved modules is that of a reward model: its head.
fn is_score(saved: &Value) -> bool {
    matches!(saved, Value::Array(names) if matches!(names.as_slice(), [Value::String(name)] if name == SCORE))
}
