//! Objects of Amazon S3, and of stores with its protocol, such as MinIO, Cloudflare R2, and Google Cloud Storage with HMAC keys.
//!
//! A [`Bucket`] is an address `s3://BUCKET/PREFIX`. It puts, gets, lists and deletes objects below the prefix. Files of more than 64 MiB are put in
//! parts. Requests are signed with AWS Signature Version 4, and each carries the SHA-256 of its body, so the store refuses a damaged body. Requests use
//! `ottava-http`, so there is one way to open connections, and no asynchronous runtime. The crate `object_store` would bring its own HTTP client.
//!
//! [`Bucket::copies`] are local copies of objects, for programs that read files.
//!
//! Keys, region and address come from the usual variables: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION` or
//! `AWS_DEFAULT_REGION`, and `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL` for other stores than Amazon's.
#![forbid(unsafe_code)]

mod bucket;
mod copies;
mod credentials;
mod sign;
pub mod testing;
mod xml;

pub use bucket::{Bucket, Object};
