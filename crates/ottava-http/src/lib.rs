//! Connections to HTTP servers: the one crate that opens them, and only to servers that a setting names.
//!
//! ```
//! use ottava_http::Url;
//!
//! assert!(Url::new("url", "https://example.com/score").unwrap().is_https());
//! assert!(Url::new("url", "localhost:80").is_err());
//! ```
//!
//! - A [`Url`] is `https://`, or `http://` where the user wrote it; it holds no user name and no password.
//! - A [`Secret`] comes from an environment variable. No message and no log has its value.
//! - [`Client`] sends one request, with limits on its time and on the size of the answer. It follows no redirect. Proxies come from the environment
//!   (`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`), root certificates from the system (or `SSL_CERT_FILE`, `SSL_CERT_DIR`).
//! - [`Retry`] repeats a request after a [`Fault`] that may pass.
//! - With `OTTAVA_OFFLINE=1`, no client can be made.
//!
//! The client is ureq with rustls and graviola: blocking, without C, and without an asynchronous runtime.
#![forbid(unsafe_code)]

mod client;
mod retry;
mod secret;
pub mod testing;
mod tls;
mod url;

pub use client::Client;
pub use retry::{Fault, Retry};
pub use secret::Secret;
pub use url::Url;
