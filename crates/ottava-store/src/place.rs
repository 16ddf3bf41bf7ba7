//! The address of a bucket in settings.

use ottava_common::{Error, Result};

/// A kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// Amazon S3, and stores with its protocol.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Blobs of Azure.
    Azure,
}

/// The beginnings of addresses, and how addresses of this kind are written.
const SCHEMES: [(&str, Scheme, &str); 3] = [
    ("s3://", Scheme::S3, "s3://BUCKET/PREFIX"),
    ("gs://", Scheme::Google, "gs://BUCKET/PREFIX"),
    ("az://", Scheme::Azure, "az://CONTAINER/PREFIX"),
];

/// Whether `text` is the address of a store.
pub fn is_store(text: &str) -> bool {
    SCHEMES.iter().any(|(start, ..)| text.starts_with(start))
}

/// A bucket, and a prefix of the names of its objects.
#[derive(Debug, PartialEq)]
pub(crate) struct Place<'a> {
    pub(crate) scheme: Scheme,
    pub(crate) bucket: &'a str,
    pub(crate) prefix: &'a str,
}

impl<'a> Place<'a> {
    /// Reads the address `text` of the setting `setting`. Errors with [`Error::Config`] for an address of another form.
    pub(crate) fn read(setting: &str, text: &'a str) -> Result<Place<'a>> {
        let forms = SCHEMES.map(|(.., form)| form).join(", ");
        let wrong = |why: &str| Error::Config(format!("`{setting}` is {text:?}, {why}; write {forms}"));
        let found = SCHEMES.iter().find_map(|(start, scheme, _)| Some((*scheme, text.strip_prefix(start)?)));
        let (scheme, rest) = found.ok_or_else(|| wrong("which is no address of a store"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let is_known = |c: char| {
            let is_other = if scheme == Scheme::Google { "-._" } else { "-." }.contains(c);
            c.is_ascii_lowercase() || c.is_ascii_digit() || is_other
        };
        if bucket.len() < 3 || !bucket.chars().all(is_known) {
            return Err(wrong("whose bucket is not 3 or more small letters, digits, `-` and `.`"));
        }
        let prefix = prefix.trim_matches('/');
        if prefix.split('/').any(|part| [".", ".."].contains(&part)) || prefix.contains("//") {
            return Err(wrong("whose prefix has an empty part, `.` or `..`"));
        }
        Ok(Place { scheme, bucket, prefix })
    }
}
