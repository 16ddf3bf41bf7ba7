//! The weights of a model folder, divided into the weights of the model and tensors that are not built.

use crate::{Carried, DequantizedFiles, ModelFiles};
use ottava_common::error::{Error, Result};
use ottava_models::ConfigFile;
use std::ops::Deref;
use std::path::Path;

/// The weights of a model folder, open for reading in any order. Tensors of a text model within a larger model have the names of a text model in a
/// folder of its own.
#[derive(Clone, Debug)]
pub struct WeightFiles {
    files: DequantizedFiles,
    /// The tensors of the folder that are not built.
    carried: Carried,
}

impl WeightFiles {
    /// Opens the weights of `folder` as [`DequantizedFiles::open`] does, and divides them by its `config.json`.
    pub fn open(folder: &Path) -> Result<WeightFiles> {
        let files = DequantizedFiles::open(folder)?;
        if !folder.join("config.json").is_file() {
            return Ok(WeightFiles { files, carried: Carried::default() });
        }
        let (files, carried) = Carried::divide(files, &ConfigFile::read(folder)?)?;
        Ok(WeightFiles { files, carried })
    }

    /// Opens the tensors of `folder` that are not built. `config` describes the folder. A folder may have no weights, unless it is the folder of a
    /// larger model.
    ///
    /// Errors with [`Error::Model`] if the folder of a larger model has no weights, or no text model.
    pub fn open_carried(folder: &Path, config: &ConfigFile) -> Result<Carried> {
        match (ModelFiles::open(folder), config.is_wrapper()?) {
            (Ok(_), _) => Ok(WeightFiles::open(folder)?.carried),
            (Err(_), false) => Ok(Carried::without_files(config)),
            (Err(error), true) => Err(Error::Model(format!(
                "{error}; the model has parts beside its text model, whose weights are copied: name a folder with its weights, or make a config.json \
                 of `text_config` alone"
            ))),
        }
    }

    /// Returns the tensors of the folder that are not built.
    pub fn carried(&self) -> &Carried {
        &self.carried
    }
}

impl Deref for WeightFiles {
    type Target = DequantizedFiles;

    fn deref(&self) -> &DequantizedFiles {
        &self.files
    }
}
