//! The secret and the log files that rank 0 and the ranks that it starts have in common.

use ottava_common::fs::{RealFs, create_dirs, expect_regular};
use ottava_common::{Error, Result};
use std::fs::File;
use std::path::Path;

/// The environment variable with a text that all ranks of a job share. A process without this text cannot join.
pub const SECRET: &str = "OTTAVA_SECRET";

/// Opens the log of a rank to append to it.
pub fn open_log(folder: &Path, rank: usize) -> Result<File> {
    create_dirs(&RealFs, folder)?;
    let path = folder.join(format!("rank-{rank}.log"));
    expect_regular(&path).map_err(Error::io(&path))?;
    File::options().create(true).append(true).open(&path).map_err(Error::io(&path))
}
