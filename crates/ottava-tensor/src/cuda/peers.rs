//! Copies to the GPUs of other processes of a machine. Copy engines make these copies and need no multiprocessors.
//!
//! A copy to a peer begins when the peer's memory may be written. A rank reads its memory when the copies to it are complete. Streams signal these
//! states with words in device memory, which they write and wait for. Each pair of ranks has two words for each direction. Only one stream waits for
//! a word, and then clears it. Because of the order of the calls, the next write of a word follows its clearing. A call can be captured in a graph,
//! because its words have the same values in each replay.
//!
//! A rank that is lost never writes its words. Streams of other ranks then wait forever, as kernels of NCCL do.

use super::device::CudaDevice;
use super::driver::{self, Context, Exported, IpcHandle, PeerLink, Stream};
use super::dry;
use super::lock::lock;
use super::symmetric::Place;
use super::transfer::Transfer;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The number of bytes between words. Two ranks never write to the same cache line.
const WORD_BYTES: usize = 128;

/// The state of a rank that a word signals to another rank.
#[derive(Clone, Copy)]
enum Word {
    /// The memory of the rank may be written.
    Ready,
    /// The copy of the rank to the other rank is complete.
    Complete,
}

/// A copy to another rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerCopy {
    /// The rank that receives the copy.
    pub(crate) peer: usize,
    /// The address of memory of this device.
    pub(crate) from: u64,
    /// The symmetric memory of the peer.
    pub(crate) to: Place,
    pub(crate) bytes: usize,
}

/// The ranks of a group whose GPUs copy to each other's memory.
pub(crate) struct Peers {
    device: Arc<CudaDevice>,
    rank: usize,
    /// The addresses of the words of each rank, including this rank. Other ranks write the words of this rank.
    words: Vec<u64>,
    /// The addresses of each block of symmetric memory in each rank, by the number of the block.
    blocks: Mutex<Vec<Vec<u64>>>,
    /// The open allocations of other processes. They are locked while a call is enqueued, so that calls of two threads do not mix.
    opened: Mutex<HashMap<IpcHandle, Opened>>,
}

/// An open allocation of another process.
#[derive(Clone, Copy)]
struct Opened {
    /// The address of its first byte in this process.
    base: u64,
    /// Whether it stays open until the process ends.
    lasts: bool,
}

impl Peers {
    /// Creates rank `rank` of `size`, which has not met the other ranks. Also returns the bytes that this rank exports for [`Peers::meet`].
    ///
    /// If this GPU cannot export memory, an error is returned.
    pub(crate) fn new(device: &Arc<CudaDevice>, rank: usize, size: usize) -> Result<(Peers, Vec<u8>)> {
        device.context().ok_or_else(|| dry::unsupported("copies between GPUs"))?;
        let (blocks, opened) = (Mutex::default(), Mutex::default());
        let mut peers = Peers { device: device.clone(), rank, words: Vec::new(), blocks, opened };
        let (own, exported) = peers.allocate(2 * size * WORD_BYTES)?;
        peers.words = vec![own; size];
        Ok((peers, exported))
    }

    /// Opens the words of the other ranks. `all` has the export of each rank.
    ///
    /// If the GPUs cannot reach each other's memory, an error is returned.
    pub(crate) fn meet(&mut self, all: &[Vec<u8>]) -> Result<()> {
        self.words = self.open_for_good(self.words[self.rank], all)?;
        Ok(())
    }

    /// Allocates `bytes` zeros for [`Peers::open_for_good`]. Returns their address and the bytes with which other ranks open them. The memory lives
    /// until the process ends, because other ranks have opened it.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<(u64, Vec<u8>)> {
        let context = self.context();
        let own = context.allocate(bytes)?;
        let own = own.ok_or_else(|| Error::Value(format!("no memory for {bytes} bytes that other GPUs write")))?;
        // SAFETY: the memory has these bytes, and nothing else uses it.
        unsafe { context.fill(own, 0, bytes)? };
        context.synchronize()?;
        Ok((own, self.export(own)?))
    }

    /// Opens memory of [`Peers::allocate`]. Its address in this rank is `own`, and `all` has the export of each rank. Returns its address in each
    /// rank, which is valid until the process ends.
    pub(crate) fn open_for_good(&self, own: u64, all: &[Vec<u8>]) -> Result<Vec<u64>> {
        self.open(own, all, true)
    }

    /// Returns the UUID of this rank's GPU, for [`Peers::have_nvlink`].
    pub(crate) fn uuid(&self) -> [u8; 16] {
        self.context().uuid
    }

    /// Returns whether NVLink connects this rank's GPU with each of the other GPUs. `uuids` has the UUID of each rank's GPU.
    pub(crate) fn have_nvlink(&self, uuids: &[Vec<u8>]) -> Result<bool> {
        for (rank, uuid) in uuids.iter().enumerate() {
            if rank != self.rank {
                let Some(other) = driver::ordinal_of(uuid)? else { return Ok(false) };
                if driver::peer_link(self.device.ordinal(), other)? != PeerLink::NvLink {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Returns whether this process sees the GPUs of all ranks. `uuids` has the UUID of each rank's GPU.
    pub(crate) fn sees_all(&self, uuids: &[Vec<u8>]) -> Result<bool> {
        uuids.iter().try_fold(true, |all, uuid| Ok(all && driver::ordinal_of(uuid)?.is_some()))
    }

    fn context(&self) -> &Context {
        self.device.context().expect("a dry run has no peers")
    }

    /// Returns this rank's device.
    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Forgets the blocks, and closes the memory of other ranks that contains them.
    pub(crate) fn close_blocks(&self) -> Result<()> {
        lock(&self.blocks).clear();
        let mut opened = lock(&self.opened);
        let (kept, closed): (HashMap<_, _>, HashMap<_, _>) = opened.drain().partition(|(_, memory)| memory.lasts);
        *opened = kept;
        // SAFETY: the device is idle, and the blocks in this memory are forgotten.
        closed.into_values().try_for_each(|memory| unsafe { self.context().close_exported(memory.base) })
    }

    /// Returns the bytes with which other ranks open the memory at `address`.
    pub(crate) fn export(&self, address: u64) -> Result<Vec<u8>> {
        Ok(self.context().export(address)?.to_bytes().to_vec())
    }

    /// Adds the next block. Its address in this rank is `own`, and `all` has the export of each rank.
    pub(crate) fn add_block(&self, own: u64, all: &[Vec<u8>]) -> Result<()> {
        let addresses = self.open(own, all, false)?;
        lock(&self.blocks).push(addresses);
        Ok(())
    }

    /// Returns the addresses of memory in each rank. Its address in this rank is `own`. Memory that `lasts` stays open until the process ends.
    fn open(&self, own: u64, all: &[Vec<u8>], lasts: bool) -> Result<Vec<u64>> {
        let mut opened = lock(&self.opened);
        let mut address = |(rank, exported): (usize, &Vec<u8>)| {
            if rank == self.rank {
                return Ok(own);
            }
            let wrong = || Error::Value(format!("rank {rank} sent no memory; start all ranks with the same binary"));
            let Exported { handle, offset } = Exported::from_bytes(exported).ok_or_else(wrong)?;
            let memory = match opened.get_mut(&handle) {
                Some(memory) => memory,
                None => {
                    let base = self.context().open_exported(handle)?;
                    opened.entry(handle).or_insert(Opened { base, lasts })
                }
            };
            memory.lasts |= lasts;
            Ok(memory.base + offset)
        };
        all.iter().enumerate().map(&mut address).collect()
    }

    /// Enqueues copies to other ranks. Each rank in `senders` copies to block number `block` of this rank. The ranks must make their calls in the
    /// same order.
    ///
    /// # Safety
    /// The copied memory and the memory that ranks copy to live until the transfer ends, and no other work of a side stream uses them.
    pub(crate) unsafe fn copy(
        &self,
        name: &'static str,
        copies: &[PeerCopy],
        senders: &[usize],
        block: usize,
    ) -> Result<Transfer> {
        let _order = lock(&self.opened);
        Transfer::by_copies(&self.device, Stream::Communication, name, |context| {
            context.record_launch(name);
            // SAFETY: the words are memory of the ranks that only these calls use.
            unsafe {
                for &sender in senders {
                    self.tell(context, sender, Word::Ready, block as u32 + 1)?;
                }
                for copy in copies {
                    self.await_word(context, copy.peer, Word::Ready, copy.to.block as u32 + 1)?;
                    let to = lock(&self.blocks)[copy.to.block][copy.peer] + copy.to.offset;
                    context.copy_on_device(Stream::Communication, to, copy.from, copy.bytes)?;
                    self.tell(context, copy.peer, Word::Complete, 1)?;
                }
                senders.iter().try_for_each(|&sender| self.await_word(context, sender, Word::Complete, 1))
            }
        })
    }

    /// Writes a word of `peer`.
    ///
    /// # Safety
    /// Only [`Peers::copy`] calls it.
    unsafe fn tell(&self, context: &Context, peer: usize, word: Word, value: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { context.write_word(Stream::Communication, word_at(self.words[peer], self.rank, word), value) }
    }

    /// Waits for a word of `peer`, then clears it.
    ///
    /// # Safety
    /// Only [`Peers::copy`] calls it.
    unsafe fn await_word(&self, context: &Context, peer: usize, word: Word, value: u32) -> Result<()> {
        let word = word_at(self.words[self.rank], peer, word);
        // SAFETY: the caller's promise.
        unsafe {
            context.wait_for_word(Stream::Communication, word, value)?;
            context.write_word(Stream::Communication, word, 0)
        }
    }
}

/// Returns the address of a word that rank `writer` writes. `words` is the address of the first word.
fn word_at(words: u64, writer: usize, word: Word) -> u64 {
    words + ((2 * writer + word as usize) * WORD_BYTES) as u64
}
