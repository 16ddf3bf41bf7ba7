//! Models and data sets by their names on the Hugging Face Hub: names, the cache on disk, downloads and uploads.
//!
//! ```
//! use ottava_hub::{Kind, RepoId};
//! use std::path::Path;
//!
//! let id = RepoId::parse(Kind::Model, "Qwen/Qwen3-0.6B@main").unwrap();
//! assert_eq!((id.name.as_str(), id.revision()), ("Qwen/Qwen3-0.6B", "main"));
//! assert_eq!(id.folder(), Path::new("models--Qwen--Qwen3-0.6B"));
//! ```
//!
//! - A [`RepoId`] is the name of a repository, with a revision: a branch, a tag or a commit.
//! - A [`Hub`] has the address of the server, the token, and the folder of the cache, all from the environment variables of Hugging Face's programs.
//!   The cache has the layout of these programs, so both use the same files.
//! - [`Hub::model`] and [`Hub::data_files`] return local paths. What the cache lacks is downloaded. Without a network, a complete copy in the cache is
//!   enough.
//! - [`Pins`] are the commits that names stand for. A [`Hub`] keeps the commits that it has asked for, and uses given ones without asking.
//! - Downloads (`blob.rs`) fetch ranges of files in parallel, and record the finished ranges. A download that was killed resumes. A file gets its name
//!   in the cache only after its SHA-256 (files of Git LFS) or its Git SHA-1 (other files) was checked.
//! - [`Hub::push`] uploads files as one commit.
//!
//! Requests use `ottava-http`. A redirect to another server never carries the token.
#![forbid(unsafe_code)]

mod api;
mod blob;
mod cache;
mod commit;
mod content;
mod data;
mod download;
mod entry;
mod files;
mod glob;
mod hash;
mod id;
mod pins;
mod push;
mod ranges;
pub mod testing;
mod upload;

pub use api::Hub;
pub use content::Content;
pub use download::Watch;
pub use entry::Entry;
pub use glob::matches;
pub use hash::git_sha1;
pub use id::{DataId, Kind, RepoId, is_name};
pub use pins::Pins;
pub use push::{PushOptions, Pushed};
