//! The models that requests can name. Adapters can be added and removed while requests run.

use crate::error::{ApiError, Result};
use ottava_engine::{AdapterId, LoadAdapters};
use std::path::Path;
use std::sync::{Arc, RwLock};

/// Finds the adapters at a path, verifies and opens them. This may include a download, so it runs beside the engine. What it returns loads the adapters
/// for the model of the engine. Errors with [`Error::Io`](ottava_common::Error::Io) of the kind [`NotFound`](std::io::ErrorKind::NotFound) if there are none.
pub type OpenAdapters = Arc<dyn Fn(&Path) -> ottava_common::Result<LoadAdapters> + Send + Sync>;

/// A model that requests can name. Requests hold it until they are answered.
#[derive(Debug)]
pub struct ServedModel {
    /// The name of the model for clients.
    pub name: String,
    /// The folder of the model.
    pub root: String,
    /// If the model is an adapter, the name of its base model.
    pub parent: Option<String>,
    /// The adapters of the model in the engine.
    pub adapter: Option<AdapterId>,
}

/// The models: the model without adapters, under each of its names, and each of its adapters.
#[derive(Debug)]
pub struct Models(RwLock<Vec<Arc<ServedModel>>>);

impl Models {
    /// Makes a list, which has one model at least.
    pub fn new(models: Vec<ServedModel>) -> Models {
        Models(RwLock::new(models.into_iter().map(Arc::new).collect()))
    }

    /// Returns all models.
    pub fn all(&self) -> Vec<Arc<ServedModel>> {
        self.0.read().expect("no thread panics with it").clone()
    }

    /// Returns the model of requests that name none.
    pub fn first(&self) -> Arc<ServedModel> {
        self.all().swap_remove(0)
    }

    /// Returns the model of this name. Errors if there is no such model.
    pub fn named(&self, name: &str) -> Result<Arc<ServedModel>> {
        let models = self.all();
        let names = || models.iter().map(|model| format!("`{}`", model.name)).collect::<Vec<_>>().join(", ");
        models.iter().find(|model| model.name == name).cloned().ok_or_else(|| ApiError::no_model(name, &names()))
    }

    /// Adds a model. If there is an adapter of its name, and it may be `replaced`, removes and returns the adapter. Errors with the model if its name is
    /// taken.
    pub fn add(
        &self,
        model: ServedModel,
        replaces: bool,
    ) -> std::result::Result<Option<Arc<ServedModel>>, ServedModel> {
        let mut models = self.0.write().expect("no thread panics with it");
        let same = models.iter().position(|known| known.name == model.name);
        let replaced = match same {
            Some(at) if replaces && models[at].adapter.is_some() => Some(models.remove(at)),
            Some(_) => return Err(model),
            None => None,
        };
        models.push(Arc::new(model));
        Ok(replaced)
    }

    /// Removes the adapter of this name, and returns it.
    pub fn remove(&self, name: &str) -> Option<Arc<ServedModel>> {
        let mut models = self.0.write().expect("no thread panics with it");
        let at = models.iter().position(|model| model.name == name && model.adapter.is_some())?;
        Some(models.remove(at))
    }
}
