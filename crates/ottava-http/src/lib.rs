//! Connections to HTTP servers. Only this crate opens such connections, and only to servers that a setting or an argument names.
//!
//! ```
//! use ottava_http::Url;
//!
//! assert!(Url::new("url", "https://example.com/score").unwrap().is_https());
//! assert!(Url::new("url", "localhost:80").is_err());
//! ```
//!
//! - A [`Url`] begins with `https://`, or with `http://` if the user wrote so. It has neither a user name nor a password.
//! - A [`Secret`] is read from an environment variable. Messages and logs never have its value.
//! - [`Client`] sends one [`Request`] at a time, and returns its [`Answer`]. It limits the time and the size of the answer, and does not follow
//!   redirects. [`Client::at`] is a client of another address, which has the key only if the server is the same. Proxies are read from the environment
//!   (`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`), root certificates from the system (or `SSL_CERT_FILE`, `SSL_CERT_DIR`).
//! - [`Retry`] repeats a request after a [`Fault`] that may be temporary.
//! - If `OTTAVA_OFFLINE=1` or `--offline` is set ([`offline`]), no client can be created.
//!
//! The client is ureq with rustls and graviola. It is blocking, and needs neither C nor an asynchronous runtime.
#![forbid(unsafe_code)]

mod client;
mod escape;
pub mod offline;
mod request;
mod retry;
mod secret;
pub mod testing;
mod tls;
mod url;

pub use client::{Answer, Client};
pub use escape::{escape, unescape};
pub use request::Request;
pub use retry::{Fault, Retry};
pub use secret::Secret;
pub use url::Url;
