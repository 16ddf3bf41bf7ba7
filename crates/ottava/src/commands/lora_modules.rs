//! Adapters that requests choose by name.

use super::newest::with_checkpoint;
use super::remote;
use ottava_checkpoint::{AdapterFolder, verify_model};
use ottava_common::{Error, Result};
use ottava_engine::LoadAdapters;
use ottava_settings::RunConfig;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// An adapter and its name, `NAME=FOLDER`.
#[derive(Clone, Debug)]
pub struct LoraModule {
    /// The name by which clients choose the model with this adapter.
    pub name: String,
    /// A PEFT folder, or the folder of a run that trained an adapter.
    pub folder: PathBuf,
}

impl FromStr for LoraModule {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<LoraModule, String> {
        match text.split_once('=') {
            Some((name, folder)) if !name.is_empty() && !folder.is_empty() => {
                Ok(LoraModule { name: name.into(), folder: folder.into() })
            }
            _ => Err("it is NAME=FOLDER, such as `sql=adapters/sql`; name MODEL before this flag".into()),
        }
    }
}

/// The opened folder of an adapter.
pub struct OpenModule {
    pub name: String,
    pub folder: AdapterFolder,
    /// The configuration of the run that trained the adapter, and the names of its casts.
    pub saved: Option<(RunConfig, Vec<String>)>,
}

impl LoraModule {
    /// Opens the adapter of a folder, or the adapter of the newest checkpoint of a run. The weights of a folder that is no adapter are neither
    /// downloaded nor verified.
    pub fn open(&self) -> Result<OpenModule> {
        if let Some(folder) = remote::shapes(&self.folder)? {
            AdapterFolder::expect_config(&folder)?;
        }
        with_checkpoint(&self.folder, |folder| {
            AdapterFolder::expect_config(folder)?;
            verify_model(folder)?;
            let (name, saved) = (self.name.clone(), RunConfig::saved_in(folder)?);
            Ok(OpenModule { name, folder: AdapterFolder::open(folder)?, saved })
        })
    }

    /// Errors if two of `modules` have the same name, or if one has the name of the model.
    pub fn expect_distinct(modules: &[LoraModule], model: &[String]) -> Result<()> {
        let mut names: Vec<&str> = model.iter().map(String::as_str).collect();
        for LoraModule { name, .. } in modules {
            if names.contains(&name.as_str()) {
                return Err(Error::Config(format!(
                    "--lora-modules: there are two models `{name}`; requests choose by name, so give each adapter another one than \
                     the others and the model (--served-model-name) have"
                )));
            }
            names.push(name);
        }
        Ok(())
    }
}

/// Opens the adapter at `path`, which is a folder or a name on the Hub.
pub fn open_adapters(path: &Path) -> Result<LoadAdapters> {
    let module = LoraModule { name: path.display().to_string(), folder: path.into() };
    let folder = module.open()?.folder;
    Ok(Box::new(|model| folder.load(model)))
}
