//! `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters that change while the server runs, as in vLLM.

use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::models::{OpenAdapters, ServedModel};
use crate::preparing::opening;
use crate::served::Served;
use axum::http::StatusCode;
use ottava_common::Error;
use std::io::ErrorKind;
use std::path::PathBuf;

/// The fields of both requests.
pub const LOAD: &[&str] = &["lora_name", "lora_path", "load_inplace"];
pub const UNLOAD: &[&str] = &["lora_name"];

/// Loads an adapter. Returns a sentence for the client.
pub async fn load(served: &Served, body: &Body) -> Result<String> {
    let open = opener(served)?.clone();
    let (name, path) = (named(body, "lora_name")?, named(body, "lora_path")?);
    let replaces = body.flag("load_inplace")?;
    let taken = || {
        let message = format!("there is already a model `{name}`; unload this adapter first, or set `load_inplace`");
        ApiError::field("lora_name", message)
    };
    // A name that is taken is refused before the adapter is opened.
    if served.models.named(name).is_ok_and(|model| !replaces || model.adapter.is_none()) {
        return Err(taken());
    }
    let folder = PathBuf::from(path);
    let opened = opening(move || open(&folder)).await?.map_err(|error| failed(&error))?;
    let adapter = Some(served.worker.load_adapters(opened).await?.map_err(|error| failed(&error))?);
    let parent = Some(served.models.first().name.clone());
    let model = ServedModel { name: name.into(), root: path.into(), parent, adapter };
    match served.models.add(model, replaces) {
        Ok(replaced) => {
            replaced.into_iter().for_each(|model| served.worker.remove_adapters(model));
            Ok(format!("Success: the adapter `{name}` is loaded."))
        }
        Err(model) => {
            served.worker.remove_adapters(model.into());
            Err(taken())
        }
    }
}

/// Unloads an adapter. Requests that use it are completed. Returns a sentence for the client.
pub fn unload(served: &Served, body: &Body) -> Result<String> {
    opener(served)?;
    let name = named(body, "lora_name")?;
    let Some(model) = served.models.remove(name) else {
        let message = format!("there is no adapter `{name}`");
        return Err(ApiError::refused(StatusCode::NOT_FOUND, message));
    };
    served.worker.remove_adapters(model);
    Ok(format!("Success: the adapter `{name}` is unloaded."))
}

/// What opens adapters. Errors if adapters are not changed at run time.
fn opener(served: &Served) -> Result<&OpenAdapters> {
    served.open_adapters.as_ref().ok_or_else(|| {
        let message = "adapters are not changed at run time; start the server with --allow-runtime-lora-updating";
        ApiError::refused(StatusCode::NOT_FOUND, message)
    })
}

/// The error for an adapter that cannot be loaded.
fn failed(error: &Error) -> ApiError {
    let failed = ApiError::field("lora_path", format!("the adapter cannot be loaded: {error}"));
    match error {
        Error::Io { source, .. } if source.kind() == ErrorKind::NotFound => failed.with_status(StatusCode::NOT_FOUND),
        _ => failed,
    }
}

/// A text that must be there.
fn named<'a>(body: &'a Body, name: &str) -> Result<&'a str> {
    let text = body.text(name)?.filter(|text| !text.is_empty());
    text.ok_or_else(|| ApiError::field(name, format!("`{name}` is missing")))
}
