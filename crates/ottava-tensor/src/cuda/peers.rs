//! Copies to the GPUs of other processes of a machine by copy engines, which take no multiprocessors.
//!
//! A copy to a peer begins when its memory may be written, and memory is read when the copies to it are complete. Streams tell each other so by words
//! in device memory, which they write and wait for. Each pair of ranks has two words for each direction. Only one stream waits for a word, and clears
//! it then; by the order of the calls, the next write of a word follows its clearing. So a call can be captured in a graph: its words have the same
//! values in each replay.
//!
//! A rank that is lost never writes its words. Then streams wait for ever, as kernels of NCCL do.

use super::device::CudaDevice;
use super::driver::{Context, Exported, IpcHandle, Stream};
use super::dry;
use super::lock::lock;
use super::symmetric::Place;
use super::transfer::Transfer;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Bytes between words, so that no two ranks write to one line of a cache.
const WORD_BYTES: usize = 128;

/// What one rank tells another.
#[derive(Clone, Copy)]
enum Word {
    /// Its memory may be written.
    Ready,
    /// Its copy to the other is complete.
    Complete,
}

/// A copy to another rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerCopy {
    /// The rank.
    pub(crate) peer: usize,
    /// Memory of this device.
    pub(crate) from: u64,
    /// Symmetric memory of the peer.
    pub(crate) to: Place,
    pub(crate) bytes: usize,
}

/// The ranks of a group whose GPUs copy to each other's memory.
pub(crate) struct Peers {
    device: Arc<CudaDevice>,
    rank: usize,
    /// The addresses of the words of all ranks, own ones included. Other ranks write the words of this rank.
    words: Vec<u64>,
    /// By number, the addresses of a block of symmetric memory in all ranks.
    blocks: Mutex<Vec<Vec<u64>>>,
    /// The allocations of other processes that are open. Locked while a call is enqueued, so that calls of two threads do not mix.
    opened: Mutex<HashMap<IpcHandle, u64>>,
}

impl Peers {
    /// Rank `rank` of `size`, which has not met the others. Also returns what it exports for [`Peers::meet`].
    ///
    /// Errors if this GPU cannot export memory.
    pub(crate) fn new(device: &Arc<CudaDevice>, rank: usize, size: usize) -> Result<(Peers, Vec<u8>)> {
        let context = device.context().ok_or_else(|| dry::unsupported("copies between GPUs"))?;
        let bytes = 2 * size * WORD_BYTES;
        // It lives until the process ends, since others have opened it.
        let own = context.allocate(bytes)?.ok_or_else(|| Error::Value("no memory for copies between GPUs".into()))?;
        // SAFETY: the memory has these bytes, and nothing else uses it.
        unsafe { context.fill(own, 0, bytes)? };
        context.synchronize()?;
        let (blocks, opened) = (Mutex::default(), Mutex::default());
        let peers = Peers { device: device.clone(), rank, words: vec![own; size], blocks, opened };
        let exported = peers.export(own)?;
        Ok((peers, exported))
    }

    /// Opens the words of the other ranks; each rank has exported `all`.
    ///
    /// Errors if the GPUs cannot reach each other's memory.
    pub(crate) fn meet(&mut self, all: &[Vec<u8>]) -> Result<()> {
        self.words = self.open(self.words[self.rank], all)?;
        Ok(())
    }

    /// This rank's device.
    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Forgets the blocks, and closes the memory of other ranks in which they lie.
    pub(crate) fn close_blocks(&self) -> Result<()> {
        let context = self.device.context().expect("a dry run has no peers");
        lock(&self.blocks).clear();
        let mut opened = lock(&self.opened);
        let has_words = |base: &u64| self.words.contains(base);
        let (kept, closed): (HashMap<_, _>, HashMap<_, _>) = opened.drain().partition(|(_, base)| has_words(base));
        *opened = kept;
        // SAFETY: the device is at rest, and what lay there is forgotten.
        closed.into_values().try_for_each(|base| unsafe { context.close_exported(base) })
    }

    /// What other ranks need to open the memory at `address`.
    pub(crate) fn export(&self, address: u64) -> Result<Vec<u8>> {
        let context = self.device.context().expect("a dry run has no peers");
        Ok(context.export(address)?.to_bytes().to_vec())
    }

    /// Adds the next block, which lies at `own` in this rank, and which ranks have exported as `all`.
    pub(crate) fn add_block(&self, own: u64, all: &[Vec<u8>]) -> Result<()> {
        let addresses = self.open(own, all)?;
        lock(&self.blocks).push(addresses);
        Ok(())
    }

    /// The addresses of memory that lies at `own` in this rank.
    fn open(&self, own: u64, all: &[Vec<u8>]) -> Result<Vec<u64>> {
        let context = self.device.context().expect("a dry run has no peers");
        let mut opened = lock(&self.opened);
        let mut address = |(rank, exported): (usize, &Vec<u8>)| {
            if rank == self.rank {
                return Ok(own);
            }
            let wrong = || Error::Value(format!("rank {rank} sent no memory; start all ranks with the same binary"));
            let Exported { handle, offset } = Exported::from_bytes(exported).ok_or_else(wrong)?;
            let base = match opened.get(&handle) {
                Some(&base) => base,
                None => *opened.entry(handle).or_insert(context.open_exported(handle)?),
            };
            Ok(base + offset)
        };
        all.iter().enumerate().map(&mut address).collect()
    }

    /// Enqueues copies to other ranks. Each of them copies to block number `block` of this rank if it is among `senders`. All ranks call it in the
    /// same order.
    ///
    /// # Safety
    /// What is copied lives until the transfer ends, and so does the memory to which ranks copy; no other work of a side stream uses them.
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
            // SAFETY: the words are memory of all ranks that only these calls use.
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

    /// # Safety
    /// Only [`Peers::copy`] calls it.
    unsafe fn tell(&self, context: &Context, peer: usize, word: Word, value: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { context.write_word(Stream::Communication, word_at(self.words[peer], self.rank, word), value) }
    }

    /// Waits for a word of `peer`, and clears it.
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

/// The address of a word that rank `writer` writes, among the words at `words`.
fn word_at(words: u64, writer: usize, word: Word) -> u64 {
    words + ((2 * writer + word as usize) * WORD_BYTES) as u64
}
