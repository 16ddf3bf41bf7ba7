//! The sampling that a model folder suggests.

use crate::sampling::{Field, Parameter, Sampling, tokens};
use ottava_common::error::{Error, Result};
use ottava_common::input;
use serde_json::{Map, Value};
use std::path::Path;

/// The maximum number of bytes of the file.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The name of the file.
const FILE: &str = "generation_config.json";

impl Sampling {
    /// Returns [`Sampling::unchanged`] with the values that `generation_config.json` of `folder` suggests ([`Parameter::is_suggested`]); `None` if the
    /// file is missing or suggests no value. `do_sample` is not read, as in vLLM; [`Sampling::of_chat`] reads it.
    ///
    /// Errors with [`Error::Model`] for a file or value that cannot be used.
    pub fn of_folder(folder: &Path) -> Result<Option<Sampling>> {
        let path = folder.join(FILE);
        let Some(config) = read(&path)? else { return Ok(None) };
        let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
        let (mut sampling, mut suggests) = (Sampling::unchanged(), false);
        for parameter in Parameter::ALL.iter().filter(|parameter| parameter.is_suggested) {
            let name = parameter.name;
            let Some(value) = config.get(name).filter(|value| !value.is_null()) else { continue };
            suggests = true;
            let is_no_number = || wrong(format!("`{name}` is {value}; it is a number"));
            match parameter.field {
                Field::Number(field, _) => *field(&mut sampling) = value.as_f64().ok_or_else(is_no_number)?,
                Field::Tokens(field) => {
                    *field(&mut sampling) = tokens(value.as_i64().ok_or_else(is_no_number)?);
                }
            }
        }
        match sampling.problem() {
            Some((_, problem)) => Err(wrong(problem)),
            None => Ok(suggests.then_some(sampling)),
        }
    }

    /// Like [`Sampling::of_folder`], with `do_sample` as transformers reads it: with `"do_sample": false`, or with neither `temperature` nor
    /// `"do_sample": true`, the temperature is 0.
    pub fn of_chat(folder: &Path) -> Result<Option<Sampling>> {
        let Some(mut sampling) = Sampling::of_folder(folder)? else { return Ok(None) };
        let config = read(&folder.join(FILE))?.unwrap_or_default();
        let samples = config.get("do_sample").and_then(Value::as_bool);
        let has_temperature = config.get("temperature").is_some_and(|value| !value.is_null());
        if !samples.unwrap_or(has_temperature) {
            sampling.temperature = 0.0;
        }
        Ok(Some(sampling))
    }
}

/// Reads the file at `path`; `None` if there is none.
fn read(path: &Path) -> Result<Option<Map<String, Value>>> {
    if !path.exists() {
        return Ok(None);
    }
    let wrong = |reason: String| Error::Model(format!("{}: {reason}", path.display()));
    let bytes = input::read(path, MAX_FILE_BYTES).map_err(|error| wrong(error.to_string()))?;
    Ok(Some(serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chats_draw_only_if_the_file_says_so() {
        let folder = tempfile::tempdir().unwrap();
        for (text, temperature) in [
            (r#"{"temperature": 0.6}"#, Some(0.6)),
            (r#"{"temperature": 0.6, "do_sample": false}"#, Some(0.0)),
            (r#"{"top_k": 20}"#, Some(0.0)),
            (r#"{"top_k": 20, "do_sample": true}"#, Some(1.0)),
            (r#"{"do_sample": true}"#, None),
        ] {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            let sampling = Sampling::of_chat(folder.path()).unwrap();
            assert_eq!(sampling.map(|sampling| sampling.temperature), temperature, "{text}");
        }
    }

    #[test]
    fn a_folder_suggests_sampling() {
        let folder = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            std::fs::write(folder.path().join("generation_config.json"), text).unwrap();
            Sampling::of_folder(folder.path())
        };
        let text =
            r#"{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null, "do_sample": true, "eos_token_id": 3}"#;
        let expected = Sampling { temperature: 0.6, top_k: Some(20), top_p: 0.95, ..Sampling::unchanged() };
        assert_eq!(read(text).unwrap(), Some(expected));
        assert_eq!(read(r#"{"top_k": -1, "repetition_penalty": 1.1}"#).unwrap().unwrap().repetition_penalty, 1.1);
        assert_eq!(read(r#"{"temperature": 1.0}"#).unwrap(), Some(Sampling::unchanged()));
        assert_eq!(read(r#"{"do_sample": true, "top_p": null}"#).unwrap(), None);
        for (text, part) in [
            (r#"{"temperature": "hot"}"#, r#"generation_config.json: `temperature` is "hot"; it is a number"#),
            (r#"{"top_p": 1.5}"#, "generation_config.json: `top_p` is 1.5"),
            ("[]", "generation_config.json: invalid type"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(Sampling::of_folder(&folder.path().join("none")).unwrap(), None);
    }
}
