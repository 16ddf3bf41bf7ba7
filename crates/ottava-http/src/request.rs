//! Requests.

use std::io::Read;

/// A request without its address, which is the address of the client that sends it.
pub struct Request<'a> {
    pub(crate) method: &'static str,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Option<Box<dyn Read + 'a>>,
}

impl<'a> Request<'a> {
    /// Creates a request for the page itself.
    pub fn get() -> Request<'static> {
        Request { method: "GET", headers: Vec::new(), body: None }
    }

    /// Creates a request that posts `body`.
    pub fn post(body: &'a [u8]) -> Request<'a> {
        let headers = vec![("Content-Length".to_string(), body.len().to_string())];
        Request { method: "POST", headers, body: Some(Box::new(body)) }
    }

    /// Creates a request that uploads the `length` bytes of `body`.
    pub fn put(body: impl Read + 'a, length: u64) -> Request<'a> {
        let headers = vec![("Content-Length".to_string(), length.to_string())];
        Request { method: "PUT", headers, body: Some(Box::new(body.take(length))) }
    }

    /// Creates a request that deletes the page.
    pub fn delete() -> Request<'static> {
        Request { method: "DELETE", headers: Vec::new(), body: None }
    }

    /// Sets a header. A header with the same name is replaced, because servers refuse or ignore a second `Authorization` or `Content-Type`.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Request<'a> {
        let name = name.into();
        self.headers.retain(|(known, _)| !known.eq_ignore_ascii_case(&name));
        self.headers.push((name, value.into()));
        self
    }

    /// Whether the request has a header with this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name))
    }
}
