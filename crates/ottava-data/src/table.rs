//! A table of numbers in a file. Only recently used pages are in memory.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ottava_common::{Error, Result, input};

/// The number of bytes of a page.
const PAGE_BYTES: u64 = 4096;

/// The maximum number of pages in memory: 32 MiB.
const MAX_PAGES: usize = 8192;

/// A file of items with `N` bytes each. `N` divides [`PAGE_BYTES`].
pub(super) struct Table<const N: usize> {
    file: File,
    path: PathBuf,
    items: u64,
    pages: Mutex<HashMap<u64, Box<[u8]>>>,
}

impl<const N: usize> Table<N> {
    /// Opens the table `name` with `items` items in `folder`. Has the errors of [`open_exactly`].
    pub(super) fn open(folder: &Path, name: &str, items: u64) -> Result<Table<N>> {
        let path = folder.join(name);
        let file = open_exactly(&path, items.saturating_mul(N as u64), "meta.json")?;
        Ok(Table { file, path, items, pages: Mutex::default() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns item `index`. Errors with [`Error::Data`] if the file can no longer be read. Panics beyond the end, which the caller must exclude.
    pub(super) fn get(&self, index: u64) -> Result<[u8; N]> {
        assert!(index < self.items, "item {index} of {}", self.items);
        let at = index * N as u64;
        let (page, start) = (at / PAGE_BYTES, (at % PAGE_BYTES) as usize);
        // The pages are always in a valid state when the lock is free, even after a panic.
        let mut pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        if !pages.contains_key(&page) {
            if pages.len() == MAX_PAGES {
                pages.clear();
            }
            let begin = page * PAGE_BYTES;
            let mut bytes = vec![0; PAGE_BYTES.min(self.items * N as u64 - begin) as usize];
            self.file
                .read_exact_at(&mut bytes, begin)
                .map_err(|e| Error::Data(format!("{}: it cannot be read any more: {e}", self.path.display())))?;
            pages.insert(page, bytes.into());
        }
        Ok(pages[&page][start..start + N].try_into().expect("an item does not cross pages"))
    }
}

/// Opens a file that must have `bytes` bytes, because the file `promised_by` says so. Errors with [`Error::Data`] if it has another size.
pub(super) fn open_exactly(path: &Path, bytes: u64, promised_by: &str) -> Result<File> {
    let (file, found) = input::open(path).map_err(Error::io(path))?;
    if found != bytes {
        return Err(Error::Data(format!(
            "{}: {found} bytes, {promised_by} promises {bytes}; delete the folder to prepare it again",
            path.display()
        )));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_those_of_the_file_beyond_the_pages_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.bin");
        // The table has two pages more than memory holds, and an incomplete page.
        let items = (MAX_PAGES as u64 + 2) * PAGE_BYTES / 8 + 3;
        let bytes: Vec<u8> = (0..items).flat_map(|i| ottava_common::hash::mix(i).to_le_bytes()).collect();
        std::fs::write(&path, &bytes).unwrap();
        let table = Table::<8>::open(folder.path(), "table.bin", items).unwrap();
        for index in (0..items).step_by(509).chain([items - 1, 0, items / 2]) {
            assert_eq!(u64::from_le_bytes(table.get(index).unwrap()), ottava_common::hash::mix(index), "{index}");
            assert!(table.pages.lock().unwrap().len() <= MAX_PAGES);
        }
        File::options().write(true).open(&path).unwrap().set_len(8).unwrap();
        let error = (0..items).find_map(|index| table.get(index).err()).unwrap();
        assert!(error.to_string().contains("table.bin: it cannot be read any more"), "{error}");
    }
}
