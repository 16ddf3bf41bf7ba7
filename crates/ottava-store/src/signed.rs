//! What authorizations read of a request.

use ottava_http::Url;

/// What is signed of a request.
pub(crate) struct Signed<'a> {
    pub(crate) method: &'a str,
    pub(crate) url: &'a Url,
    /// The SHA-256 of the body.
    pub(crate) payload: &'a str,
    /// The size of the body in bytes.
    pub(crate) length: usize,
    /// Further headers, by their names in lower case.
    pub(crate) headers: &'a [(&'a str, String)],
    /// Seconds since 1970.
    pub(crate) time: u64,
}
