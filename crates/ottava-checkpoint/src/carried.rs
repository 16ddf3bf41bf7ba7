//! The tensors of a model folder that are not trained: the parts of a vision-language model beside its text model, and layers that predict further
//! tokens. A folder that Ottava writes has these tensors with the same names and bytes.

use crate::{ModelFiles, TensorInfo, WeightFiles};
use ottava_common::error::{Error, Result};
use ottava_models::{ConfigFile, TextNames, decoder_config};
use ottava_recipe::lora::PEFT_PREFIX;
use ottava_tensor::DType;
use std::collections::BTreeMap;
use std::path::Path;

/// The tensors of a model folder beside the model that is trained, and the names that the folder gives to the tensors of the trained model. The files
/// stay open, so the folder may be removed.
#[derive(Clone, Debug)]
pub struct Carried {
    /// The names of the text model's tensors in the folder.
    names: TextNames,
    /// The names of the text model's modules in transformers.
    modules: TextNames,
    /// The beginnings of the names of tensors that predict further tokens, in a text model's own folder.
    further: Vec<String>,
    /// The tensors, or `None` if there are none.
    files: Option<Box<WeightFiles>>,
}

impl Default for Carried {
    /// Returns the tensors beside a text model that has a folder of its own: none.
    fn default() -> Carried {
        Carried { names: TextNames::PLAIN, modules: TextNames::PLAIN, further: Vec::new(), files: None }
    }
}

impl Carried {
    /// Opens the tensors beside the model of `folder` that is trained. `config` describes the folder. A folder may have no weights, unless it is the
    /// folder of a larger model.
    ///
    /// Errors with [`Error::Model`] if the folder of a larger model has no weights, or no text model.
    pub fn open(folder: &Path, config: &ConfigFile) -> Result<Carried> {
        match (ModelFiles::open(folder), config.is_wrapper()?) {
            (Ok(_), _) => Ok(WeightFiles::open(folder)?.into_carried()),
            (Err(_), false) => Ok(Carried::default()),
            (Err(error), true) => Err(Error::Model(format!(
                "{error}; the model has parts beside its text model, whose weights are copied: name a folder with its weights, or make a config.json \
                 of `text_config` alone"
            ))),
        }
    }

    /// Divides the tensors of a folder into the tensors of its text model, under the names of a text model in a folder of its own, and all others,
    /// which `open` opens.
    pub(super) fn divide(
        files: ModelFiles,
        config: &ConfigFile,
        open: impl FnOnce(ModelFiles) -> WeightFiles,
    ) -> Result<(ModelFiles, Carried)> {
        let (mut names, mut modules) = (TextNames::PLAIN, TextNames::PLAIN);
        if config.is_wrapper()? {
            names = TextNames::of_folder(|name| files.has(name)).ok_or_else(|| {
                config.error("the weights beside this file have no embedding of a text model, `language_model.model.embed_tokens.weight` or alike")
            })?;
            modules = TextNames::MODULES;
        }
        let is_wrapper = modules != TextNames::PLAIN;
        // The model itself is read elsewhere, with better messages.
        let further = decoder_config(config).map(|sizes| sizes.folder.carried).unwrap_or_default();
        let is_further = |name: &str| further.iter().any(|beginning| name.starts_with(beginning));
        let [text, others] = files.divide(|name| {
            let of_text = if is_wrapper { names.of_text(name) } else { Some(name.to_string()) };
            of_text.filter(|name| !is_further(name))
        })?;
        let has_others = others.names().next().is_some();
        let files = has_others.then(|| Box::new(open(others)));
        Ok((text, Carried { names, modules, further, files }))
    }

    /// Returns whether the text model is part of a larger model.
    pub fn is_wrapper(&self) -> bool {
        self.modules != TextNames::PLAIN
    }

    /// Returns the name in a folder of the text model's tensor `name`. Tensors of adapters are named after modules, as in PEFT.
    pub fn stored(&self, name: &str) -> String {
        match name.strip_prefix(PEFT_PREFIX) {
            Some(name) => format!("{PEFT_PREFIX}{}", self.module(name)),
            None => self.names.stored(name),
        }
    }

    /// Returns the name in transformers of the text model's module `name`.
    pub fn module(&self, name: &str) -> String {
        self.modules.stored(name)
    }

    /// Returns the tensors, by their names in the folder. Weights in FP8 are dequantized like all weights of the folder, since a written folder has
    /// no FP8.
    ///
    /// Errors if a tensor has a type that is not written, or is in FP8 without scales.
    pub fn infos(&self) -> Result<Vec<TensorInfo>> {
        let Some(files) = &self.files else { return Ok(Vec::new()) };
        let info = |name: &str| {
            let info = files.info(name)?;
            let is_unscaled = files.is_fp8(name)? && files.scales(name).is_err() || info.dtype == DType::E5M2;
            match is_unscaled {
                true => Err(Error::Model(format!(
                    "tensor `{name}` is in FP8 without scales and not of the text model; such tensors are copied, and a folder with them is not \
                     written: dequantize it with transformers first"
                ))),
                false => Ok(info),
            }
        };
        files.names().map(info).collect()
    }

    /// Returns the bytes of the tensor that `info` of [`Carried::infos`] describes.
    pub fn bytes(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        let files = self.files.as_ref().expect("only these tensors are described");
        files.bytes(info)
    }

    /// Returns a sentence that names the tensors, or `None` if there are none.
    pub fn notice(&self) -> Option<String> {
        let mut counts = BTreeMap::<&str, usize>::new();
        for name in self.files.iter().flat_map(|files| files.names()) {
            let further = self.further.iter().find(|beginning| name.starts_with(&self.stored(beginning)));
            let own = name.strip_prefix("model.").unwrap_or(name);
            let part = further.map_or_else(
                || own.split('.').next().unwrap_or(own),
                |beginning| beginning.trim_end_matches(['.', '_']),
            );
            *counts.entry(part).or_default() += 1;
        }
        let parts: Vec<_> = counts.iter().map(|(part, count)| format!("`{part}` ({count} tensors)")).collect();
        let what = if self.is_wrapper() {
            "only the text model is used"
        } else {
            "predictions of further tokens are not used"
        };
        (!parts.is_empty()).then(|| format!("{what}; copied unchanged when a folder is written: {}", parts.join(", ")))
    }
}
