//! Objects of stores that an address in settings names.

use ottava_common::{Error, Result};
use ottava_hub::matches;
use ottava_store::{Bucket, Object};

/// Whether `text` is the address of a file of a web server.
pub(super) fn is_page(text: &str) -> bool {
    ["https://", "http://"].iter().any(|scheme| text.starts_with(scheme))
}

/// Returns the bucket of an address of the setting `setting`, and the pattern in it. Has the errors of [`Bucket::from_env`].
pub(super) fn bucket(setting: &str, text: &str) -> Result<(Bucket, String)> {
    let (scheme, rest) = text.split_once("://").expect("the address of a store has a scheme");
    let (bucket, pattern) = rest.split_once('/').unwrap_or((rest, ""));
    let bucket = Bucket::from_env(setting, &format!("{scheme}://{bucket}"))?;
    Ok((bucket, pattern.trim_end_matches('/').to_string()))
}

/// The objects that a pattern names; at least one.
pub(super) struct Listed {
    pub objects: Vec<Object>,
    /// The beginning of all names, which names of copies leave out.
    pub start: String,
    /// Whether the pattern is the name of a folder, whose files the reader of the data chooses.
    pub is_folder: bool,
}

/// Lists what `pattern` names in `bucket`. Errors with [`Error::Data`] if it names nothing.
pub(super) fn listed(bucket: &Bucket, pattern: &str) -> Result<Listed> {
    let plain = &pattern[..pattern.find(['*', '?']).unwrap_or(pattern.len())];
    let mut objects = bucket.list(plain)?;
    // Some programs make empty objects for folders.
    objects.retain(|object| !object.name.ends_with('/'));
    let folder = if pattern.is_empty() { String::new() } else { format!("{pattern}/") };
    let is_folder = plain == pattern && objects.iter().all(|object| object.name != pattern);
    let start = if is_folder { folder.clone() } else { plain[..plain.rfind('/').map_or(0, |at| at + 1)].to_string() };
    match is_folder {
        true => objects.retain(|object| object.name.starts_with(&folder)),
        false => {
            let below = format!("{pattern}/**");
            objects
                .retain(|object| matches(pattern, &object.name) || plain != pattern && matches(&below, &object.name));
        }
    }
    match objects.is_empty() {
        true => Err(Error::Data(format!("{}: no object has a name of this pattern", bucket.place(pattern)))),
        false => Ok(Listed { objects, start, is_folder }),
    }
}

/// Returns the objects that belong to `names` without being named: the index of tokens of Megatron-LM, or the tokens of an index.
pub(super) fn partners(bucket: &Bucket, names: &[String]) -> Result<Vec<Object>> {
    let mut found = Vec::new();
    for name in names {
        let partner = match name.rsplit_once('.') {
            Some((stem, "bin")) => format!("{stem}.idx"),
            Some((stem, "idx")) => format!("{stem}.bin"),
            _ => continue,
        };
        if !names.contains(&partner) {
            found.extend(bucket.list(&partner)?.into_iter().filter(|object| object.name == partner));
        }
    }
    Ok(found)
}
