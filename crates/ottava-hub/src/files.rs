//! The files of a model that are downloaded.

use crate::entry::Entry;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Endings of configurations, tokenizers and templates.
const ENDINGS: [&str; 5] = [".json", ".jinja", ".txt", ".model", ".tiktoken"];

/// Whether the file is a configuration, a part of the tokenizer, or a template. Other files in folders are of other programs.
pub(crate) fn is_metadata(entry: &Entry) -> bool {
    let is_here = !entry.path.contains('/') || entry.path.starts_with("additional_chat_templates/");
    is_here && ENDINGS.iter().any(|ending| entry.path.ends_with(ending))
}

/// Returns the files with weights: the files that the index in `folder` names, or `model.safetensors`, and the weights of an adapter. Files that repeat the
/// weights in another form are left out.
///
/// Errors with the reason if the model has no safetensors, or if the index names absent files.
pub(crate) fn weights<'a>(folder: &Path, entries: &'a [Entry]) -> Result<Vec<&'a Entry>, String> {
    let find = |name: &str| entries.iter().find(|entry| entry.path == name);
    let mut chosen: Vec<&Entry> = find("adapter_model.safetensors").into_iter().collect();
    if let Some(whole) = find("model.safetensors") {
        chosen.push(whole);
    } else if find("model.safetensors.index.json").is_some() {
        let text = std::fs::read_to_string(folder.join("model.safetensors.index.json")).unwrap_or_default();
        let index: Value = serde_json::from_str(&text).unwrap_or_default();
        let names: BTreeSet<&str> =
            index["weight_map"].as_object().into_iter().flatten().filter_map(|(_, file)| file.as_str()).collect();
        if names.is_empty() {
            return Err("its model.safetensors.index.json names no files".into());
        }
        for name in names {
            chosen.push(find(name).ok_or_else(|| format!("its index names {name}, which is not there"))?);
        }
    }
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let single: Vec<&Entry> =
        entries.iter().filter(|entry| !entry.path.contains('/') && entry.path.ends_with(".safetensors")).collect();
    let ends = |ending: &str| entries.iter().any(|entry| entry.name().ends_with(ending));
    match single.len() {
        0 if ends(".gguf") => Err("it has GGUF files and no .safetensors; download one with `ottava download ID --include FILE`, and make a folder of it with `ottava convert`".into()),
        0 if ends(".bin") || ends(".pt") || ends(".pth") => {
            Err("its weights are pickle files and no .safetensors; look for a revision or another upload with safetensors".into())
        }
        0 => Err("it has no weights (.safetensors); set `model.init = \"random\"` to train from random weights".into()),
        _ => Ok(single),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(paths: &[&str]) -> Vec<Entry> {
        paths.iter().map(|path| Entry::new(path, 1, "a".repeat(40), None).unwrap()).collect()
    }

    #[test]
    fn weights_are_downloaded_once_and_programs_never() {
        let folder = tempfile::tempdir().unwrap();
        let all = entries(&[
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "additional_chat_templates/rag.jinja",
            "model.safetensors.index.json",
            "model-1.safetensors",
            "model-2.safetensors",
            "consolidated.safetensors",
            "original/params.json",
            "pytorch_model.bin",
            "modeling.py",
            "onnx/model.onnx",
        ]);
        let metadata: Vec<&str> =
            all.iter().filter(|entry| is_metadata(entry)).map(|entry| entry.path.as_str()).collect();
        assert_eq!(
            metadata,
            [
                "config.json",
                "tokenizer.json",
                "chat_template.jinja",
                "additional_chat_templates/rag.jinja",
                "model.safetensors.index.json"
            ]
        );
        let index =
            r#"{"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}"#;
        std::fs::write(folder.path().join("model.safetensors.index.json"), index).unwrap();
        let paths = |entries: &[Entry]| {
            weights(folder.path(), entries)
                .map(|chosen| chosen.iter().map(|entry| entry.path.clone()).collect::<Vec<_>>())
        };
        assert_eq!(paths(&all).unwrap(), ["model-1.safetensors", "model-2.safetensors"]);
        assert_eq!(paths(&entries(&["consolidated.safetensors", "model.safetensors"])).unwrap(), ["model.safetensors"]);
        for (files, words) in
            [(&["pytorch_model.bin"][..], "pickle"), (&["a-Q4.gguf"], "GGUF"), (&["config.json"], "random")]
        {
            assert!(paths(&entries(files)).unwrap_err().contains(words));
        }
        assert!(paths(&all[..6]).unwrap_err().contains("model-2.safetensors"));
    }
}
