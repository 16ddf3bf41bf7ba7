//! The ranks that share the rows of a step, and what they tell each other.

use crate::error::{Error, Result};
use ottava_tensor::comm::{Group, Stopper, Traffic};
use ottava_tensor::{Device, RankFault};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The ranks that share the rows of a step.
pub struct DataParallel {
    comm: Group,
}

impl DataParallel {
    /// One process with all rows.
    pub fn solo() -> DataParallel {
        DataParallel { comm: Group::solo() }
    }

    /// The ranks of `comm`, of which each trains on `device`: several on GPUs by NCCL. From here on until [`DataParallel::finish`] or the
    /// drop, a lost rank may end a process on a GPU with [`Error::RANKS`]; see [`Group::with_gpu`].
    pub fn new(comm: Group, device: &Device) -> Result<DataParallel> {
        let comm = match device {
            Device::Cuda(gpu) => comm.with_gpu(gpu, Error::RANKS)?,
            Device::Cpu | Device::DryCpu(_) => comm,
        };
        Ok(DataParallel { comm })
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

    /// The collectives of this rank.
    pub(super) fn comm(&self) -> &Group {
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

    /// Errors on all ranks where they have different texts, with both.
    pub fn expect_equal(&self, what: &str, text: &str) -> Result<()> {
        let all = self.comm.agree(what, text.as_bytes())?;
        let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        let text = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
        let message = format!(
            "{what} of rank 0 is {}, and that of rank {rank} is {}; start all ranks with the same files",
            text(0),
            text(rank)
        );
        Err(ottava_tensor::Error::Ranks { fault: RankFault::Desync, message, recent: Vec::new() }.into())
    }

    /// The sums of `numbers` over ranks, which have as many of them.
    pub fn sum(&self, what: &str, numbers: &[i64]) -> Result<Vec<i64>> {
        let all = self.comm.agree(what, bytemuck::cast_slice(numbers))?;
        let mut sums = vec![0; numbers.len()];
        for of_rank in all {
            let numbers = of_rank.chunks_exact(size_of::<i64>());
            if numbers.len() != sums.len() {
                return Err(different(what));
            }
            for (sum, number) in sums.iter_mut().zip(numbers) {
                *sum += i64::from_ne_bytes(number.try_into().expect("eight bytes"));
            }
        }
        Ok(sums)
    }

    /// Errors on all ranks, before their hosts wait for their GPUs, unless all have started the same collectives there in `what`.
    pub fn compare_gpu_calls(&self, what: &str) -> Result<()> {
        Ok(self.comm.compare_gpu_calls(what)?)
    }

    /// Passes requests to stop on to all ranks.
    pub fn stopper(&self) -> Stopper {
        self.comm.stopper()
    }

    /// Waits for all ranks after their last step. They may leave then in any order.
    pub fn finish(&self) -> Result<()> {
        Ok(self.comm.finish()?)
    }

    /// What each rank has come to, by rank. Errors on all ranks where one has failed: there with its error, elsewhere with its words. Where
    /// one was stopped by a signal, all are.
    pub fn all<T: Serialize + DeserializeOwned>(&self, what: &str, mine: Result<T>) -> Result<Vec<T>> {
        let told = mine.as_ref().map_err(|error| (matches!(error, Error::Cancelled(_)), error.to_string()));
        let text = serde_json::to_vec(&told).expect("results of ranks are plain data");
        let all = self.comm.agree(what, &text);
        // Where the group has failed meanwhile, this rank's own error says more.
        mine?;
        let read = |(rank, bytes): (usize, Vec<u8>)| {
            let told: Result<T, (bool, String)> = serde_json::from_slice(&bytes).map_err(|_| different(what))?;
            told.map_err(|(stopped, words)| match stopped {
                true => Error::Cancelled(words),
                false => Error::Rank { rank, words },
            })
        };
        all?.into_iter().enumerate().map(read).collect()
    }

    /// Waits until all ranks have come to an end of `what`, and returns `mine`. Errors as [`DataParallel::all`].
    pub fn together<T>(&self, what: &str, mine: Result<T>) -> Result<T> {
        let (mine, told) = match mine {
            Ok(mine) => (Some(mine), Ok(())),
            Err(error) => (None, Err(error)),
        };
        self.all(what, told)?;
        Ok(mine.expect("an error of this rank was returned"))
    }

    /// Bytes that this rank has sent.
    pub fn traffic(&self) -> Traffic {
        self.comm.traffic()
    }
}

fn different(what: &str) -> Error {
    Error::Config(format!("ranks of different builds disagree about {what}; start all with the same binary"))
}
