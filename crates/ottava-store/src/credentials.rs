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

/// Returns the address of a bucket, without a slash at the end.
pub(crate) fn address(bucket: &str, region: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Url> {
    for name in ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"] {
        if let Some(endpoint) = variable(name) {
            return Ok(Url::new(name, endpoint.trim_end_matches('/'))?.join(bucket));
        }
    }
    // A certificate of Amazon is not valid for a bucket with a dot as a part of the host.
    let text = match bucket.contains('.') {
        true => format!("https://s3.{region}.amazonaws.com/{bucket}"),
        false => format!("https://{bucket}.s3.{region}.amazonaws.com"),
    };
    Url::new("AWS_REGION", &text)
}
