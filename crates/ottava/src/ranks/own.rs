//! What a process and the ranks that it starts share.

use ottava_common::fs::{RealFs, create_dirs, expect_regular};
use ottava_common::{Error, Result};
use std::fs::File;
use std::path::Path;

/// A text that all ranks of a job share, so that no stranger joins it.
pub const SECRET: &str = "OTTAVA_SECRET";

/// The log of a rank, opened at its end.
pub fn open_log(folder: &Path, rank: usize) -> Result<File> {
    create_dirs(&RealFs, folder)?;
    let path = folder.join(format!("rank-{rank}.log"));
    expect_regular(&path).map_err(Error::io(&path))?;
    File::options().create(true).append(true).open(&path).map_err(Error::io(&path))
}
