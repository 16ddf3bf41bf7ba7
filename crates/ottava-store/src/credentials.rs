//! Keys and addresses from the environment.

use ottava_common::{Error, Result};
use ottava_http::Url;

/// The keys of an account, and the region.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub(crate) id: String,
    pub(crate) secret: String,
    /// The token of temporary keys.
    pub(crate) token: Option<String>,
    pub(crate) region: String,
}

impl Credentials {
    /// Reads the keys. Errors with [`Error::Config`] if they are missing.
    pub(crate) fn new(variable: &dyn Fn(&str) -> Option<String>) -> Result<Credentials> {
        let read = |name: &str| -> Result<String> {
            let found = variable(name).map(|value| value.trim().to_string()).filter(|value| !value.is_empty());
            found.filter(|value| value.bytes().all(|byte| byte.is_ascii_graphic())).ok_or_else(|| {
                let remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to the keys of the store";
                Error::Config(format!(
                    "{name} is not set, or contains spaces or other characters that cannot be printed; {remedy}"
                ))
            })
        };
        let region = variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION"));
        Ok(Credentials {
            id: read("AWS_ACCESS_KEY_ID")?,
            secret: read("AWS_SECRET_ACCESS_KEY")?,
            token: variable("AWS_SESSION_TOKEN"),
            region: region.unwrap_or_else(|| "us-east-1".into()),
        })
    }
}

/// The shortest key that is redacted in bytes. A store with shorter keys is a store of tests.
const SHORTEST: usize = 8;

impl Credentials {
    /// Replaces the keys in `text` by the names of their variables, because stores may repeat keys in their answers. The end of a key may be cut off.
    pub(crate) fn redact(&self, text: &str) -> String {
        let keys = [
            ("$AWS_SECRET_ACCESS_KEY", Some(&self.secret)),
            ("$AWS_SESSION_TOKEN", self.token.as_ref()),
            ("$AWS_ACCESS_KEY_ID", Some(&self.id)),
        ];
        keys.into_iter().fold(text.to_string(), |text, (name, key)| match key {
            Some(key) => without(&text, key, name),
            None => text,
        })
    }
}

/// Replaces each beginning of `key` in `text`, of at least [`SHORTEST`] bytes, by `name`.
pub(crate) fn without(text: &str, key: &str, name: &str) -> String {
    let Some(start) = key.get(..SHORTEST) else { return text.to_string() };
    let (mut found, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(start) {
        let same = rest[at..].chars().zip(key.chars()).take_while(|(of_text, of_key)| of_text == of_key);
        let end = at + same.map(|(c, _)| c.len_utf8()).sum::<usize>();
        found += &rest[..at];
        found += name;
        rest = &rest[end..];
    }
    found + rest
}

/// Returns the address of a bucket of S3, without a slash at the end.
pub(crate) fn address(bucket: &str, region: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Url> {
    if let Some(url) = endpoint(bucket, variable)? {
        return Ok(url);
    }
    // A certificate of Amazon is not valid for a bucket with a dot as a part of the host.
    let text = match bucket.contains('.') {
        true => format!("https://s3.{region}.amazonaws.com/{bucket}"),
        false => format!("https://{bucket}.s3.{region}.amazonaws.com"),
    };
    Url::new("AWS_REGION", &text)
}

/// Returns the address of a bucket in the store that a variable names.
fn endpoint(bucket: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Url>> {
    let named = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"];
    let found = named.into_iter().find_map(|name| Some((name, variable(name)?)));
    found.map(|(name, endpoint)| Ok(Url::new(name, endpoint.trim_end_matches('/'))?.join(bucket))).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_not_repeated_even_if_their_end_is_cut_off() {
        let credentials = Credentials {
            id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG".into(),
            token: Some("FwoGZXIvYXdzEJr1234567890".into()),
            region: String::new(),
        };
        let text = "<Token>FwoGZXIvYXdzEJr1234567890</Token> wJalrXUtnFEMI/K7MDENG AKIAIOSFODNN7EXAMPLE FwoGZXIvYX";
        let expected = "<Token>$AWS_SESSION_TOKEN</Token> $AWS_SECRET_ACCESS_KEY $AWS_ACCESS_KEY_ID $AWS_SESSION_TOKEN";
        assert_eq!(credentials.redact(text), expected);
        let short = Credentials { secret: "e".into(), token: None, id: "id".into(), region: String::new() };
        assert_eq!(short.redact("an invalid key"), "an invalid key");
    }
}
