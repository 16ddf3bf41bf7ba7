//! The parts of a vision-language model that are not trained. A folder that Ottava writes has their tensors with the same names and bytes.

use crate::{ModelFiles, TensorInfo};
use ottava_common::error::{Error, Result};
use ottava_models::{ConfigFile, TextNames};
use ottava_recipe::lora::PEFT_PREFIX;
use ottava_tensor::DType;
use std::collections::BTreeMap;
use std::path::Path;

/// The tensors of a model folder beside its text model, and the names that the folder gives to the tensors of its text model. The files stay open, so
/// the folder may be removed.
#[derive(Clone, Debug)]
pub struct Carried {
    /// The names of the text model's tensors in the folder.
    names: TextNames,
    /// The names of the text model's modules in transformers.
    modules: TextNames,
    /// The text model's tensors in the folder, by the text model's names.
    text: ModelFiles,
    files: ModelFiles,
}

impl Default for Carried {
    /// Returns the parts beside a text model that has a folder of its own: none.
    fn default() -> Carried {
        Carried {
            names: TextNames::PLAIN,
            modules: TextNames::PLAIN,
            text: ModelFiles::default(),
            files: ModelFiles::default(),
        }
    }
}

impl Carried {
    /// Opens the parts beside the text model of `folder`, which `config` describes.
    ///
    /// Errors with [`Error::Model`] if the folder of a larger model has no weights, or no text model.
    pub fn open(folder: &Path, config: &ConfigFile) -> Result<Carried> {
        if !config.is_wrapper()? {
            return Ok(Carried::default());
        }
        let files = ModelFiles::open(folder).map_err(|error| {
            Error::Model(format!(
                "{error}; the model has parts beside its text model, whose weights are copied: name a folder with its weights, or make a config.json \
                 of `text_config` alone"
            ))
        })?;
        Carried::divide(files, config).map(|(_, carried)| carried)
    }

    /// Divides the tensors of a folder into the tensors of its text model, under the names of a text model in a folder of its own, and all others.
    pub(super) fn divide(files: ModelFiles, config: &ConfigFile) -> Result<(ModelFiles, Carried)> {
        if !config.is_wrapper()? {
            return Ok((files, Carried::default()));
        }
        let names = TextNames::of_folder(|name| files.has(name)).ok_or_else(|| {
            config.error("the weights beside this file have no embedding of a text model, `language_model.model.embed_tokens.weight` or alike")
        })?;
        let [text, files] = files.divide(|name| names.of_text(name))?;
        Ok((text.clone(), Carried { names, modules: TextNames::MODULES, text, files }))
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

    /// Returns the description in the folder of the text model's tensor `info`. If the folder has the last two dimensions of stacked experts
    /// exchanged, a written folder has them exchanged too.
    pub fn stored_info(&self, info: &TensorInfo) -> TensorInfo {
        let exchanged =
            |shape: &[usize]| matches!((shape, &info.shape[..]), ([e, a, b], [f, c, d]) if (e, a, b) == (f, d, c));
        let source = self.text.info(&info.name).map(|source| source.shape).ok().filter(|shape| exchanged(shape));
        TensorInfo {
            name: self.stored(&info.name),
            shape: source.unwrap_or_else(|| info.shape.clone()),
            ..info.clone()
        }
    }

    /// Returns the name in transformers of the text model's module `name`.
    pub fn module(&self, name: &str) -> String {
        self.modules.stored(name)
    }

    /// Returns the tensors, by their names in the folder.
    ///
    /// Errors if a tensor has a type that is not written, or is in FP8: a written folder does not say how weights are quantized.
    pub fn infos(&self) -> Result<Vec<TensorInfo>> {
        let infos: Vec<_> = self.files.names().map(|name| self.files.info(name)).collect::<Result<_>>()?;
        match infos.iter().find(|info| matches!(info.dtype, DType::E4M3 | DType::E5M2)) {
            Some(TensorInfo { name, dtype, .. }) => Err(Error::Model(format!(
                "tensor `{name}` is {dtype} and not of the text model; such tensors are copied, and a folder with weights in FP8 beside the text \
                 model is not written: dequantize it with transformers first"
            ))),
            None => Ok(infos),
        }
    }

    /// Returns the bytes of the tensor `name`.
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        self.files.read(name)
    }

    /// Returns a sentence that names the parts, or `None` if there are none.
    pub fn notice(&self) -> Option<String> {
        let mut counts = BTreeMap::<&str, usize>::new();
        for name in self.files.names() {
            let own = name.strip_prefix("model.").unwrap_or(name);
            *counts.entry(own.split('.').next().unwrap_or(own)).or_default() += 1;
        }
        let parts: Vec<_> = counts.iter().map(|(part, count)| format!("`{part}` ({count} tensors)")).collect();
        let sentence =
            || format!("only the text model is used; copied unchanged when a folder is written: {}", parts.join(", "));
        (!parts.is_empty()).then(sentence)
    }
}
