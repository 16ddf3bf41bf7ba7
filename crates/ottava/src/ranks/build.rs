//! The build of this program, which must be the same on all ranks of a job.

use object::{Object, ReadCache};
use ottava_common::hash::{hex, sha256_file};
use ottava_common::{Error, Result};
use std::fs::File;
use std::path::Path;

/// Returns the build ID of this program, which differs between builds. Linkers write it as a hash of what they link (`man ld`, `--build-id`). If there is
/// no build ID, returns the SHA-256 of the file, which takes longer to compute.
pub(super) fn identity_of_program() -> Result<String> {
    let path = Path::new("/proc/self/exe");
    let file = ReadCache::new(File::open(path).map_err(Error::io(path))?);
    let build_id = object::File::parse(&file).and_then(|program| Ok(program.build_id()?.map(hex)));
    // A parse error means that the file is no ELF file, so it has no build ID.
    build_id.ok().flatten().map_or_else(|| Ok(sha256_file(path)?.1), Ok)
}
