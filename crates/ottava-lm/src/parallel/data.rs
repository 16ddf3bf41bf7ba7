//! The ranks that share the rows of a step, and what they tell each other.

use crate::data::Shard;
use crate::error::{Error, Result};
use ottava_tensor::Device;
use ottava_tensor::comm::{Comm, Traffic};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The ranks that share the rows of a step.
pub struct DataParallel {
    comm: Comm,
}

impl DataParallel {
    /// One process with all rows.
    pub fn solo() -> DataParallel {
        DataParallel { comm: Comm::solo() }
    }

    /// The ranks of `comm`, of which each trains on `device`: several on GPUs by NCCL. From here on until [`DataParallel::finish`] or the
    /// drop, a lost rank may end a process on a GPU with [`Error::RANKS`]; see [`Comm::with_gpu`].
    pub fn new(comm: Comm, device: &Device) -> Result<DataParallel> {
        Ok(DataParallel {
            comm: match device {
                Device::Cuda(gpu) => comm.with_gpu(gpu, Error::RANKS)?,
                Device::Cpu | Device::DryCpu(_) => comm,
            },
        })
    }

    /// This process among the ranks.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.comm.size()
    }

    /// Whether this rank writes the run's files: one does, for all.
    pub fn leads(&self) -> bool {
        self.rank() == 0
    }

    /// The rows of this rank.
    pub fn shard(&self) -> Shard {
        Shard { rank: self.rank(), world: self.size() }
    }

    /// The collectives of this rank.
    pub(super) fn comm(&self) -> &Comm {
        &self.comm
    }

    /// The numbers of all ranks, by rank.
    pub fn gather<const N: usize>(&self, what: &str, numbers: [f64; N]) -> Result<Vec<[f64; N]>> {
        let all = self.comm.agree(what, bytemuck::cast_slice(&numbers))?;
        let read = |bytes: Vec<u8>| {
            let numbers =
                bytes.chunks_exact(8).map(|number| f64::from_ne_bytes(number.try_into().expect("eight bytes")));
            numbers.collect::<Vec<_>>().try_into().map_err(|_| different(what))
        };
        all.into_iter().map(read).collect()
    }

    /// Whether the flag is set on any rank.
    pub fn any(&self, what: &str, flag: bool) -> Result<bool> {
        Ok(self.gather(what, [f64::from(flag)])?.iter().any(|[flag]| *flag != 0.0))
    }

    /// The text of the leading rank.
    pub fn follow(&self, what: &str, text: &str) -> Result<String> {
        let first = self.comm.agree(what, text.as_bytes())?.swap_remove(0);
        String::from_utf8(first).map_err(|_| different(what))
    }

    /// The name that the first rank with one has, quoted, and the rank where there are several.
    pub fn first_named(&self, what: &str, name: Option<String>) -> Result<Option<String>> {
        let all = self.comm.agree(what, name.unwrap_or_default().as_bytes())?;
        let Some((rank, bytes)) = all.into_iter().enumerate().find(|(_, bytes)| !bytes.is_empty()) else {
            return Ok(None);
        };
        let name = String::from_utf8(bytes).map_err(|_| different(what))?;
        Ok(Some(if self.size() > 1 { format!("`{name}` on rank {rank}") } else { format!("`{name}`") }))
    }

    /// Errors with [`Error::Config`] where ranks have different texts, with both.
    pub fn expect_equal(&self, what: &str, text: &str) -> Result<()> {
        let all = self.comm.agree(what, text.as_bytes())?;
        match all.iter().position(|other| other != text.as_bytes()) {
            None => Ok(()),
            Some(rank) => Err(Error::Config(format!(
                "{what} of rank {} is {text}, and that of rank {rank} is {}; start all ranks with the same files",
                self.rank(),
                String::from_utf8_lossy(&all[rank])
            ))),
        }
    }

    /// Waits for all ranks after their last step. They may leave then in any order.
    pub fn finish(&self) -> Result<()> {
        Ok(self.comm.finish()?)
    }

    /// What each rank has come to, by rank. Errors on all ranks where one has failed: there with its error, elsewhere with its words.
    pub fn all<T: Serialize + DeserializeOwned>(&self, what: &str, mine: Result<T>) -> Result<Vec<T>> {
        let told = mine.as_ref().map_err(ToString::to_string);
        let text = serde_json::to_vec(&told).expect("results of ranks are plain data");
        let all = self.comm.agree(what, &text)?;
        mine?;
        let read = |(rank, bytes): (usize, Vec<u8>)| {
            let told: Result<T, String> = serde_json::from_slice(&bytes).map_err(|_| different(what))?;
            told.map_err(|words| Error::Rank { rank, words })
        };
        all.into_iter().enumerate().map(read).collect()
    }

    /// Bytes that this rank has sent.
    pub fn traffic(&self) -> Traffic {
        self.comm.traffic()
    }

    /// Waits for all ranks.
    pub fn barrier(&self, what: &str) -> Result<()> {
        Ok(self.comm.barrier(what)?)
    }
}

fn different(what: &str) -> Error {
    Error::Config(format!("ranks of different builds disagree about {what}; start all with the same binary"))
}
