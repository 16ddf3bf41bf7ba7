//! The tensors of a model folder that are not built: the parts of a vision-language model beside its text model, layers that predict further tokens,
//! and indexers of sparse attention. A folder that Ottava writes has these tensors with the same names and bytes.

use crate::{DequantizedFiles, TensorInfo};
use ottava_common::error::{Error, Result};
use ottava_models::{ConfigFile, FolderNotes, TextNames, decoder_config};
use ottava_recipe::lora::PEFT_PREFIX;
use ottava_tensor::DType;
use std::collections::BTreeMap;

/// The tensors of a model folder beside the model that is trained, and the names that the folder gives to the tensors of the trained model. The files
/// stay open, so the folder may be removed.
#[derive(Clone, Debug)]
pub struct Carried {
    /// The names of the text model's tensors in the folder.
    names: TextNames,
    /// The names of the text model's modules in transformers.
    modules: TextNames,
    /// The beginnings of the names of tensors of the text model that are not built, in a text model's own folder.
    beginnings: Vec<String>,
    /// The constants of the text model, in its own folder, with their values.
    constants: Vec<(String, f32)>,
    /// The tensors, or `None` if there are none.
    files: Option<DequantizedFiles>,
}

impl Default for Carried {
    /// Returns the tensors beside a text model that has a folder of its own: none.
    fn default() -> Carried {
        Carried {
            names: TextNames::PLAIN,
            modules: TextNames::PLAIN,
            beginnings: Vec::new(),
            constants: Vec::new(),
            files: None,
        }
    }
}

/// Returns the notes about the folder of `config`. The model itself is read elsewhere, with better messages.
fn notes(config: &ConfigFile) -> FolderNotes {
    decoder_config(config).map(|sizes| sizes.folder).unwrap_or_default()
}

impl Carried {
    /// Returns the tensors of a folder without weights: the constants of the model of `config`.
    pub(super) fn without_files(config: &ConfigFile) -> Carried {
        Carried { constants: notes(config).constants, ..Carried::default() }
    }

    /// Divides the tensors of a folder into the tensors of the model that is built, under the names of a text model in a folder of its own, and all
    /// others.
    ///
    /// Errors with [`Error::Model`] if the folder of a larger model has no text model, or if a constant has another value.
    pub(super) fn divide(files: DequantizedFiles, config: &ConfigFile) -> Result<(DequantizedFiles, Carried)> {
        let (mut names, mut modules) = (TextNames::PLAIN, TextNames::PLAIN);
        if config.is_wrapper()? {
            names = TextNames::of_folder(|name| files.has(name)).ok_or_else(|| {
                config.error("the weights beside this file have no embedding of a text model, `language_model.model.embed_tokens.weight` or alike")
            })?;
            modules = TextNames::MODULES;
        }
        let is_wrapper = modules != TextNames::PLAIN;
        let FolderNotes { carried: beginnings, constants, .. } = notes(config);
        let is_built = |name: &String| {
            !beginnings.iter().any(|beginning| name.starts_with(beginning))
                && !constants.iter().any(|(constant, _)| constant == name)
        };
        let [text, others] = files.divide(|name| {
            let of_text = if is_wrapper { names.of_text(name) } else { Some(name.to_string()) };
            of_text.filter(is_built)
        })?;
        let has_others = others.names().next().is_some();
        let files = has_others.then_some(others);
        let carried = Carried { names, modules, beginnings, constants, files };
        carried.expect_constants()?;
        Ok((text, carried))
    }

    /// Errors if the folder has another value of a constant. Values of 16 bits have roundings.
    fn expect_constants(&self) -> Result<()> {
        for (name, expected) in &self.constants {
            let name = self.stored(name);
            let Some(files) = self.files.as_ref().filter(|files| files.info(&name).is_ok()) else { continue };
            let found = files.values(&name)?.to_vec::<f32>()?;
            if !matches!(found[..], [found] if (found / expected - 1.0).abs() < 0.01) {
                return Err(Error::Model(format!("tensor `{name}` is {found:?}; {expected} is implemented")));
            }
        }
        Ok(())
    }

    /// Returns the constants that the folder lacks, with their names in the folder.
    fn missing_constants(&self) -> impl Iterator<Item = (String, f32)> {
        let named = self.constants.iter().map(|(name, value)| (self.stored(name), *value));
        named.filter(|(name, _)| self.files.as_ref().is_none_or(|files| files.info(name).is_err()))
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

    /// Returns the tensors, by their names in the folder. Constants that the folder lacks are among them. Weights in FP8 are dequantized like all weights of the folder, since a written folder has
    /// no FP8.
    ///
    /// Errors if a tensor has a type that is not written, or is in FP8 without scales.
    pub fn infos(&self) -> Result<Vec<TensorInfo>> {
        let of_constant = |(name, _)| TensorInfo { name, dtype: DType::F32, shape: Vec::new() };
        let mut infos: Vec<_> = self.missing_constants().map(of_constant).collect();
        let Some(files) = &self.files else { return Ok(infos) };
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
        for name in files.names() {
            infos.push(info(name)?);
        }
        Ok(infos)
    }

    /// Returns the bytes of the tensor that `info` of [`Carried::infos`] describes.
    pub fn bytes(&self, info: &TensorInfo) -> Result<Vec<u8>> {
        match self.missing_constants().find(|(name, _)| *name == info.name) {
            Some((_, value)) => Ok(value.to_le_bytes().to_vec()),
            None => self.files.as_ref().expect("only these tensors are described").bytes(info),
        }
    }

    /// Returns a sentence that names the tensors, or `None` if there are none.
    pub fn notice(&self) -> Option<String> {
        let mut counts = BTreeMap::<String, usize>::new();
        let is_constant = |name: &str| self.constants.iter().any(|(constant, _)| self.stored(constant) == name);
        for name in self.files.iter().flat_map(|files| files.names()).filter(|name| !is_constant(name)) {
            *counts.entry(self.part_of(name)).or_default() += 1;
        }
        let parts: Vec<_> = counts.iter().map(|(part, count)| format!("`{part}` ({count} tensors)")).collect();
        let what = if self.is_wrapper() { "only the text model is used" } else { "some tensors are not used" };
        (!parts.is_empty()).then(|| format!("{what}; copied unchanged when a folder is written: {}", parts.join(", ")))
    }

    /// Returns the name of the part of the model to which the folder's tensor `name` belongs. Parts of layers have one name for all layers.
    fn part_of(&self, name: &str) -> String {
        match self.beginnings.iter().find(|beginning| name.starts_with(&self.stored(beginning))) {
            Some(beginning) => {
                let any = |segment: &str| if segment.parse::<usize>().is_ok() { "N" } else { segment }.to_string();
                let segments: Vec<_> = beginning.trim_end_matches(['.', '_']).split('.').map(any).collect();
                segments.join(".")
            }
            None => {
                let own = name.strip_prefix("model.").unwrap_or(name);
                own.split('.').next().unwrap_or(own).to_string()
            }
        }
    }
}
