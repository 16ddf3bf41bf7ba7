//! The memory of a host: a folder of a memory file system with the shares that the host stores.
//!
//! A share is a folder with the files that the ranks of a place wrote into a snapshot, in the format of checkpoints, and `listing.json`. A share appears
//! under its name only when it is complete. Folders outlive the processes that write them. Files are hashed in chunks by all processors, since a hash
//! of a whole file takes longer than its copy.

use crate::message::{Digest, Epoch, Share, Stored};
use ottava_common::fs::is_relative_path;
use ottava_common::hash::{sha256_of, sha256_of_chunks};
use ottava_common::input;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file that a keeper locks.
const LOCK: &str = "lock";

/// The folder of the complete shares.
const SHARES: &str = "shares";

/// The name of the list of the files of a share.
const LISTING: &str = "listing.json";

/// The file in the folder of new snapshots whose memory the list of the next snapshot takes.
const RESERVE: &str = "reserve";

/// The size of this file in bytes.
const RESERVED: usize = 1 << 16;

/// The maximum size of a list of files, in bytes.
const LONGEST_LISTING: u64 = 16 << 20;

/// The beginning of the name of a folder from which workers resume.
const RESUME: &str = "resume-";

/// A file of a share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The size in bytes.
    pub size: u64,
    /// The hash of the content, by [`sha256_of_chunks`].
    pub hash: String,
}

/// The files of a share, by their paths in the folder of the checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing(pub BTreeMap<String, FileEntry>);

impl Listing {
    /// Returns the digest of the share: of the names, sizes and hashes of its files.
    pub fn digest(&self) -> Digest {
        let text = serde_json::to_vec(self).expect("plain data");
        let [a, b, c, d, e, f, g, h, ..] = sha256_of(&[&text]);
        Digest::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Errors if a name leaves the folder. Names come from other hosts.
    fn expect_names(&self) -> io::Result<()> {
        match self.0.keys().find(|name| !is_relative_path(name) || *name == LISTING) {
            Some(name) => Err(io::Error::new(ErrorKind::InvalidData, format!("{name:?} is no file of a snapshot"))),
            None => Ok(()),
        }
    }
}

/// Takes memory for the list of the next snapshot, in the folder `snapshots` in which workers write snapshots. A complete snapshot can then be stored even
/// if the folder has become full.
pub fn reserve(snapshots: &Path) -> io::Result<()> {
    let path = snapshots.join(RESERVE);
    match fs::metadata(&path).is_ok_and(|found| found.len() == RESERVED as u64) {
        true => Ok(()),
        false => fs::write(path, vec![0; RESERVED]),
    }
}

/// The folder of a host.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    folder: PathBuf,
    /// Held while the keeper lives, so that no second keeper uses the folder.
    _lock: Arc<File>,
}

impl Memory {
    /// Opens the folder. Removes what earlier processes left, except complete shares if `keeps_shares`.
    pub fn open(folder: &Path, keeps_shares: bool) -> io::Result<Memory> {
        // The snapshots of a model are only for its owner.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        expect_own(folder)?;
        let lock = File::create(folder.join(LOCK))?;
        if lock.try_lock().is_err() {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "another process of this run uses this folder"));
        }
        let memory = Memory { folder: folder.to_path_buf(), _lock: Arc::new(lock) };
        memory.remove_except(if keeps_shares { &[LOCK, SHARES] } else { &[LOCK] })?;
        for folder in [memory.shares(), memory.new_snapshots(), memory.incoming()] {
            fs::create_dir_all(folder)?;
        }
        Ok(memory)
    }

    /// Removes all entries of the folder except these.
    fn remove_except(&self, kept: &[&str]) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if !kept.iter().any(|kept| entry.file_name() == *kept) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Removes everything, at the end of the job.
    pub fn clear(&self) -> io::Result<()> {
        self.remove_except(&[])?;
        fs::remove_dir(&self.folder)
    }

    /// The folder in which workers write snapshots.
    pub fn new_snapshots(&self) -> PathBuf {
        self.folder.join("new")
    }

    /// The socket of workers.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("keeper.sock")
    }

    /// The folder from which the workers of an epoch resume.
    pub fn resume(&self, epoch: Epoch) -> PathBuf {
        self.folder.join(format!("{RESUME}{epoch}"))
    }

    fn shares(&self) -> PathBuf {
        self.folder.join(SHARES)
    }

    fn incoming(&self) -> PathBuf {
        self.folder.join("incoming")
    }

    /// The folder with the bytes of a share that arrive in an epoch.
    fn incoming_share(&self, epoch: Epoch, share: &Share) -> PathBuf {
        self.incoming().join(format!("{epoch}-{}", name_of(share)))
    }

    /// Returns the complete shares. Their bytes are not read.
    pub fn stored(&self) -> io::Result<Vec<Stored>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.shares())? {
            let path = entry?.path();
            let share = path.file_name().and_then(|name| name.to_str()).and_then(share_of);
            if let (Some(share), Ok(listing)) = (share, read_listing(&path)) {
                found.push(Stored { share, digest: listing.digest() });
            }
        }
        found.sort_by_key(|stored| stored.share);
        Ok(found)
    }

    /// Takes over the snapshot in the folder `written` as the bytes of `share`. Returns its digest.
    pub fn adopt(&self, written: &Path, share: Share, listing: &Listing) -> io::Result<Digest> {
        listing.expect_names()?;
        self.write_listing(written, listing)?;
        let target = self.shares().join(name_of(&share));
        remove(&target)?;
        fs::rename(written, target)?;
        Ok(listing.digest())
    }

    /// Writes `listing` into `folder`, into the memory of [`reserve`] if there is some.
    fn write_listing(&self, folder: &Path, listing: &Listing) -> io::Result<()> {
        let (text, target) = (serde_json::to_vec(listing).expect("plain data"), folder.join(LISTING));
        let reserved = self.new_snapshots().join(RESERVE);
        match fs::OpenOptions::new().write(true).open(&reserved) {
            Ok(mut file) => {
                file.write_all(&text)?;
                file.set_len(text.len() as u64)?;
                fs::rename(reserved, target)
            }
            Err(_) => fs::write(target, text),
        }
    }

    /// Removes the shares that are not in `stored`.
    pub fn retain(&self, stored: &[Stored]) -> io::Result<()> {
        for entry in fs::read_dir(self.shares())? {
            let path = entry?.path();
            let share = path.file_name().and_then(|name| name.to_str()).and_then(share_of);
            if !share.is_some_and(|share| stored.iter().any(|stored| stored.share == share)) {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// Removes snapshots that workers have not completed.
    pub fn discard_new(&self) -> io::Result<()> {
        remove(&self.new_snapshots())?;
        fs::create_dir_all(self.new_snapshots())
    }

    /// Returns the folder and the files of a share. Errors if its list is not the one with this digest.
    pub fn find(&self, stored: &Stored) -> io::Result<(PathBuf, Listing)> {
        let path = self.shares().join(name_of(&stored.share));
        let listing = read_listing(&path)?;
        match listing.digest() == stored.digest {
            true => Ok((path, listing)),
            false => Err(damaged(&path.join(LISTING))),
        }
    }

    /// Checks all bytes of a share.
    pub fn verify(&self, stored: &Stored) -> io::Result<(PathBuf, Listing)> {
        let (path, listing) = self.find(stored)?;
        for (name, entry) in &listing.0 {
            let file = path.join(name);
            expect_bytes(&file, entry)?;
        }
        Ok((path, listing))
    }

    /// Receives the bytes of a share in `epoch`, in the order of `listing`, and checks them. Returns the folder with the files, which is not a share yet.
    pub fn receive(
        &self,
        epoch: Epoch,
        stored: &Stored,
        listing: &Listing,
        stream: &mut impl Read,
    ) -> io::Result<PathBuf> {
        listing.expect_names()?;
        let folder = self.incoming_share(epoch, &stored.share);
        if listing.digest() != stored.digest {
            return Err(damaged(&folder.join(LISTING)));
        }
        remove(&folder)?;
        let received = receive_files(&folder, listing, stream);
        if received.is_err() {
            remove(&folder)?;
        }
        received.map(|()| folder)
    }

    /// Removes the received files of a share that is not stored here.
    pub fn forget_incoming(&self, folder: &Path) {
        let _ = remove(folder);
    }

    /// Makes the files of a share that were received in `epoch`, if there are any, a share of this memory.
    pub fn admit(&self, epoch: Epoch, stored: &Stored) -> io::Result<()> {
        let received = self.incoming_share(epoch, &stored.share);
        if !received.is_dir() {
            return Ok(());
        }
        let target = self.shares().join(name_of(&stored.share));
        remove(&target)?;
        fs::rename(received, target)
    }

    /// Links the files of a share into the folder from which the workers of `epoch` resume. Files of several shares with the same name must be equal.
    pub fn link(&self, epoch: Epoch, from: &Path, listing: &Listing, linked: &mut Listing) -> io::Result<()> {
        link_files(from, listing, &self.resume(epoch), linked)
    }

    /// Makes `share` from all files of `parts`, which are shares of another number of places. The files are links, which take no further memory. All hosts
    /// that have the same parts make the same share.
    pub fn combine(&self, share: Share, parts: &[Stored]) -> io::Result<Stored> {
        let (folder, mut all) = (self.incoming_share(share.epoch, &share), Listing::default());
        remove(&folder)?;
        for part in parts {
            let (path, listing) = self.find(part)?;
            link_files(&path, &listing, &folder, &mut all)?;
        }
        Ok(Stored { share, digest: self.adopt(&folder, share, &all)? })
    }

    /// Removes the folders from which the workers of epochs up to `epoch` have resumed, and what arrived in earlier epochs for nothing.
    pub fn clear_resumed(&self, epoch: Epoch) -> io::Result<()> {
        let is_old =
            |number: Option<&str>| number.and_then(|number| number.parse().ok()).is_some_and(|old: Epoch| old <= epoch);
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if is_old(path.file_name().and_then(|name| name.to_str()?.strip_prefix(RESUME))) {
                remove(&path)?;
            }
        }
        for entry in fs::read_dir(self.incoming())? {
            let path = entry?.path();
            let arrived = path.file_name().and_then(|name| name.to_str()?.split('-').next()?.parse::<Epoch>().ok());
            if arrived.is_none_or(|arrived| arrived < epoch) {
                remove(&path)?;
            }
        }
        Ok(())
    }
}

/// Links the files of a share into the folder `to`, which has the files `linked` already.
fn link_files(from: &Path, listing: &Listing, to: &Path, linked: &mut Listing) -> io::Result<()> {
    for (name, entry) in &listing.0 {
        match linked.0.get(name) {
            Some(other) if other == entry => continue,
            Some(_) => return Err(damaged(&from.join(name))),
            None => {}
        }
        let target = to.join(name);
        fs::create_dir_all(target.parent().unwrap_or(&target))?;
        fs::hard_link(from.join(name), &target)?;
        linked.0.insert(name.clone(), entry.clone());
    }
    Ok(())
}

/// Errors if the file at `path` has another size or hash than `entry`. A signal to the job does not stop it, because a share that was read only in part
/// would count as damaged.
fn expect_bytes(path: &Path, entry: &FileEntry) -> io::Result<()> {
    let (size, hash) = sha256_of_chunks(path)?;
    if size == entry.size && hash == entry.hash { Ok(()) } else { Err(damaged(path)) }
}

fn receive_files(folder: &Path, listing: &Listing, stream: &mut impl Read) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join(LISTING), serde_json::to_vec(listing).expect("plain data"))?;
    let mut buffer = vec![0; 1 << 20];
    for (name, entry) in &listing.0 {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        let (mut file, mut left) = (File::create_new(&path)?, entry.size);
        while left > 0 {
            let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let count = stream.read(&mut buffer[..most])?;
            if count == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            file.write_all(&buffer[..count])?;
            left -= count as u64;
        }
        expect_bytes(&path, entry)?;
    }
    Ok(())
}

/// Writes the bytes of the files of a share to `stream`.
pub(super) fn send_files(folder: &Path, listing: &Listing, stream: &mut impl Write) -> io::Result<()> {
    for (name, entry) in &listing.0 {
        let mut file = File::open(folder.join(name))?.take(entry.size);
        if io::copy(&mut file, stream)? != entry.size {
            return Err(damaged(&folder.join(name)));
        }
    }
    stream.flush()
}

fn read_listing(folder: &Path) -> io::Result<Listing> {
    let path = folder.join(LISTING);
    serde_json::from_slice(&input::read(&path, LONGEST_LISTING)?).map_err(|_| damaged(&path))
}

fn damaged(path: &Path) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("{} is damaged: its hash has changed", path.display()))
}

/// Errors if `folder` or its parent is a link or belongs to another user, who could then change snapshots. The folder of the file system above them, such
/// as /dev/shm, may belong to anyone.
fn expect_own(folder: &Path) -> io::Result<()> {
    for path in folder.ancestors().take(2) {
        let found = fs::symlink_metadata(path)?;
        if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
            let words =
                format!("{} is no folder of this user; remove it, or set `recovery.memory_dir`", path.display());
            return Err(io::Error::new(ErrorKind::PermissionDenied, words));
        }
    }
    Ok(())
}

/// Removes a file, or a folder with everything in it, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn name_of(Share { step, epoch, places, place }: &Share) -> String {
    format!("{step}-{epoch}-{places}-{place}")
}

fn share_of(name: &str) -> Option<Share> {
    let numbers: Vec<u64> = name.split('-').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    let [step, epoch, places, place] = numbers[..] else { return None };
    Some(Share { step, epoch, places: places.try_into().ok()?, place: place.try_into().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: Share = Share { step: 3, epoch: 1 << 32 | 2, places: 2, place: 1 };

    /// Stores a share with two files, as workers do.
    fn stored(memory: &Memory) -> Stored {
        let written = memory.new_snapshots().join("checkpoint-3");
        let mut listing = Listing::default();
        for (name, text) in [("model.safetensors", "weights"), ("training/optimizer.safetensors", "states")] {
            let path = written.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            let (size, hash) = sha256_of_chunks(&path).unwrap();
            listing.0.insert(name.into(), FileEntry { size, hash });
        }
        Stored { share: SHARE, digest: memory.adopt(&written, SHARE, &listing).unwrap() }
    }

    #[test]
    fn a_share_outlives_its_process_and_is_copied_with_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let [here, there] = ["a", "b"].map(|name| Memory::open(&folder.path().join(name), true).unwrap());
        let share = stored(&here);
        assert!(Memory::open(&folder.path().join("a"), true).is_err(), "another keeper uses it");
        drop(here);
        // The next process finds it, unless it starts a new run.
        let here = Memory::open(&folder.path().join("a"), true).unwrap();
        assert_eq!(here.stored().unwrap(), [share]);
        let (path, listing) = here.verify(&share).unwrap();
        let mut bytes = Vec::new();
        send_files(&path, &listing, &mut bytes).unwrap();
        there.receive(1, &share, &listing, &mut &bytes[..]).unwrap();
        assert_eq!(there.stored().unwrap(), [], "it is no share before it is admitted");
        there.admit(1, &share).unwrap();
        assert!(there.verify(&share).is_ok());
        there.retain(&[]).unwrap();
        assert_eq!(there.stored().unwrap(), []);
        drop(here);
        let here = Memory::open(&folder.path().join("a"), false).unwrap();
        assert_eq!(here.stored().unwrap(), []);
        here.clear().unwrap();
        assert!(!folder.path().join("a").exists());
    }

    #[test]
    fn a_list_takes_the_memory_that_was_reserved_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::open(&folder.path().join("host"), true).unwrap();
        let reserved = memory.new_snapshots().join(RESERVE);
        (0..2).for_each(|_| reserve(&memory.new_snapshots()).unwrap());
        let inode = fs::metadata(&reserved).unwrap().ino();
        let share = stored(&memory);
        let (path, _) = memory.verify(&share).unwrap();
        assert_eq!(fs::metadata(path.join(LISTING)).unwrap().ino(), inode, "no new memory is taken");
        assert!(!reserved.exists());
        memory.retain(&[]).unwrap();
        assert!(memory.verify(&stored(&memory)).is_ok(), "without a reserve, too");
    }

    /// The flag is the flag of the whole process. No other test of this program reads it.
    #[test]
    fn a_signal_makes_no_share_look_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::open(&folder.path().join("host"), true).unwrap();
        let share = stored(&memory);
        ottava_common::interrupt::request();
        assert!(memory.verify(&share).is_ok());
    }

    /// Three hosts become two, and one of the two hosts comes back to three. Both hosts that store a share make the same one.
    #[test]
    fn shares_for_another_number_of_hosts_have_the_files_of_all_parts() {
        let folder = tempfile::tempdir().unwrap();
        let [here, there] = ["a", "b"].map(|name| Memory::open(&folder.path().join(name), true).unwrap());
        let store = |memory: &Memory, place: u32| {
            let written = memory.new_snapshots().join("checkpoint-3");
            fs::create_dir_all(&written).unwrap();
            let mut listing = Listing::default();
            for (name, text) in
                [("manifest.json".into(), "all".to_string()), (format!("{place}"), format!("of {place}"))]
            {
                fs::write(written.join(&name), &text).unwrap();
                let (size, hash) = sha256_of_chunks(&written.join(&name)).unwrap();
                listing.0.insert(name, FileEntry { size, hash });
            }
            let share = Share { step: 3, epoch: 7, places: 3, place };
            Stored { share, digest: memory.adopt(&written, share, &listing).unwrap() }
        };
        let share = Share { step: 3, epoch: 8, places: 2, place: 0 };
        let [first, second] = [&here, &there].map(|memory| {
            let parts = [0, 1].map(|place| store(memory, place));
            memory.combine(share, &parts).unwrap()
        });
        assert_eq!(first, second);
        let (_, listing) = here.verify(&first).unwrap();
        assert_eq!(listing.0.keys().collect::<Vec<_>>(), ["0", "1", "manifest.json"]);
        here.retain(&[first]).unwrap();
        assert!(here.verify(&first).is_ok(), "the files outlive the parts");
        assert!(here.combine(share, &[]).is_err());
        let other = Stored { digest: 1, ..first };
        assert!(here.combine(share, &[other]).is_err());
    }

    #[test]
    fn a_link_in_place_of_the_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", folder.path().join("run")).unwrap();
        let error = Memory::open(&folder.path().join("run/host-0"), true).err().map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains("run is no folder of this user")));
    }

    #[test]
    fn changed_bytes_names_and_lists_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::open(&folder.path().join("host"), true).unwrap();
        let share = stored(&memory);
        let (path, listing) = memory.find(&share).unwrap();
        let mut bytes = Vec::new();
        send_files(&path, &listing, &mut bytes).unwrap();
        let mut changed = bytes.clone();
        changed[2] ^= 1;
        for wrong in [&changed[..], &bytes[..3]] {
            assert!(memory.receive(1, &share, &listing, &mut &wrong[..]).is_err());
        }
        assert_eq!(fs::read_dir(memory.incoming()).unwrap().count(), 0, "nothing is left");
        let mut outside = Listing::default();
        outside.0.insert("../x".into(), FileEntry { size: 0, hash: String::new() });
        let of = Stored { digest: outside.digest(), ..share };
        assert!(memory.receive(1, &of, &outside, &mut &b""[..]).is_err());
        assert!(memory.find(&Stored { digest: 1, ..share }).is_err());
        fs::write(path.join("model.safetensors"), "weightz").unwrap();
        assert!(memory.verify(&share).unwrap_err().to_string().contains("model.safetensors is damaged"));
    }
}
