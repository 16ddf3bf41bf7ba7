//! Reads records of columnar files (Parquet and Arrow) as JSON objects.
//!
//! ```
//! use ottava_files::{Format, Rows};
//! use std::fs::File;
//! use std::sync::Arc;
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("texts.parquet");
//! let texts = arrow_array::StringArray::from(vec!["one", "two"]);
//! let batch = arrow_array::RecordBatch::try_from_iter([("text", Arc::new(texts) as arrow_array::ArrayRef)]).unwrap();
//! let mut writer = parquet::arrow::ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
//! writer.write(&batch).unwrap();
//! writer.close().unwrap();
//!
//! let rows: Result<Vec<_>, String> = Rows::open(File::open(&path).unwrap(), Format::Parquet).unwrap().collect();
//! assert_eq!(rows.unwrap()[1]["text"], "two");
//! ```
//!
//! This is a separate crate because `arrow` and `parquet` are large and generic. Only this crate instantiates them, so changes in other crates do not
//! compile their code again.
#![forbid(unsafe_code)]

mod arrow;
mod bomb;
mod rows;
mod value;
mod zstandard;

pub use bomb::{bomb, most_unpacked_bytes};
pub use rows::{Format, Rows};
