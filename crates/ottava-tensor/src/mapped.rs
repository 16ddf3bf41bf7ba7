//! Read-only memory-mapped files, so that token shards larger than memory can be read at random.

use std::fs::File;
use std::path::Path;

/// A file mapped into memory, read-only. It must not be truncated while it is open: we map only files
/// that this program wrote under their final name by rename, and never writes again.
pub struct MappedFile(Option<memmap2::Mmap>);

impl MappedFile {
    /// Maps `path`; an empty file maps to an empty slice.
    pub fn open(path: &Path) -> std::io::Result<MappedFile> {
        let file = File::open(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(MappedFile(None));
        }
        // SAFETY: the map is read-only and private to this struct; the files are immutable once renamed (above).
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(MappedFile(Some(map)))
    }

    /// The bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}
