//! Objects of stores: Amazon S3 and stores with its protocol (such as MinIO and Cloudflare R2), Google Cloud Storage, and blobs of Azure.
//!
//! A [`Bucket`] is an address `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`. It puts, gets, lists and deletes objects below the
//! prefix. Files of more than 64 MiB are put in parts. [`Bucket::copies`] are local copies of objects, for programs that read files, and [`page`] is a
//! local copy of a single file of a web server.
//!
//! | store | protocol | authorization (`access.rs`) |
//! |---|---|---|
//! | S3 | S3's | AWS Signature Version 4 (`sign.rs`), with the SHA-256 of each body, so the store refuses a damaged body |
//! | Google | S3's, which Google calls its XML API | the same with HMAC keys, or a token (`google.rs`) |
//! | Azure | its own: blocks in the place of parts, and other listings | a signature with the key of the account, or a shared access signature (`azure.rs`) |
//!
//! Requests use `ottava-http`, so there is one way to open connections, and no asynchronous runtime. The crate `object_store` would bring its own HTTP
//! client. Keys and addresses come from the usual variables of each store, which docs/checkpoints.md lists.
#![forbid(unsafe_code)]

mod access;
mod azure;
mod base64;
mod bucket;
mod copies;
mod credentials;
mod google;
mod place;
mod sign;
mod signed;
pub mod testing;
mod web;
mod xml;

pub use bucket::{Bucket, Object};
pub use place::is_store;
pub use web::{page, remove_page};
