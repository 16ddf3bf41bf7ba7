//! Which snapshots the hosts still have, and from which step the job can go on.

use crate::message::{Digest, Epoch, HostId, Membership, Share, Step, Stored, Want};
use std::collections::BTreeMap;

/// A step for which a share of each place is in the memory of some host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommonStep {
    /// The step.
    pub step: Step,
    /// The share of each place, with the hosts that store it.
    shares: Vec<Held>,
}

/// A share, and the hosts that store it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    stored: Stored,
    hosts: Vec<HostId>,
}

/// The copies of the shares of one snapshot, by place: each with its digest and its host.
type Found = BTreeMap<u32, Vec<(Digest, HostId)>>;

impl CommonStep {
    /// Returns the newest step for which `memories` have a share of each place. Shares of different epochs are not combined. Two copies of a share with
    /// different digests both count as missing, since nothing says which copy is right.
    pub fn newest<'a>(memories: impl Iterator<Item = (HostId, &'a [Stored])>) -> Option<CommonStep> {
        let mut snapshots: BTreeMap<(Step, Epoch, u32), Found> = BTreeMap::new();
        for (host, memory) in memories {
            for Stored { share: Share { step, epoch, places, place }, digest } in memory {
                snapshots.entry((*step, *epoch, *places)).or_default().entry(*place).or_default().push((*digest, host));
            }
        }
        let common = |((step, epoch, places), found): ((Step, Epoch, u32), Found)| {
            // A report with a place that does not exist, or with no places, gives no complete snapshot.
            if found.is_empty() || !found.keys().copied().eq(0..places) {
                return None;
            }
            let of_place = |(place, copies): (u32, Vec<(Digest, HostId)>)| {
                let &(digest, _) = copies.first()?;
                let agree = copies.iter().all(|(other, _)| *other == digest);
                let stored = Stored { share: Share { step, epoch, places, place }, digest };
                agree.then(|| Held { stored, hosts: copies.into_iter().map(|(_, host)| host).collect() })
            };
            let shares = found.into_iter().map(of_place).collect::<Option<Vec<_>>>()?;
            Some(CommonStep { step, shares })
        };
        snapshots.into_iter().rev().find_map(common)
    }

    /// Returns the shares that the host at `place` of `members` needs. A share that the host stores already is read from the host itself.
    ///
    /// If `members` have as many places as the snapshot, these are the share of `place` and the share whose copy the host stores. Otherwise they are
    /// all shares that overlap with these two parts of the state.
    pub fn wants(&self, members: &Membership, place: u32) -> Vec<Want> {
        let host = members.hosts[place as usize];
        let parts = [Some(place), members.copied_place(place)];
        let mut old: Vec<usize> =
            parts.into_iter().flatten().flat_map(|place| self.overlapping(place, members.places())).collect();
        old.sort_unstable();
        old.dedup();
        let want = |place: usize| {
            let Held { stored, hosts } = &self.shares[place];
            let from = hosts.iter().copied().find(|at| *at == host).unwrap_or(hosts[place % hosts.len()]);
            Want { stored: *stored, from }
        };
        old.into_iter().map(want).collect()
    }

    /// Returns a share of each place, from a host that has it.
    pub fn all(&self) -> Vec<Want> {
        let want = |Held { stored, hosts }: &Held| Want { stored: *stored, from: hosts[0] };
        self.shares.iter().map(want).collect()
    }

    /// Returns the places of the snapshot that overlap with `place` of `places`.
    fn overlapping(&self, place: u32, places: u32) -> std::ops::Range<usize> {
        let old = overlapping(place, places, self.shares.len() as u32);
        old.start as usize..old.end as usize
    }
}

/// Returns the places of a state that was divided among `old` places, which overlap with `place` of `places`.
pub(crate) fn overlapping(place: u32, places: u32, old: u32) -> std::ops::Range<u32> {
    let (place, places, old) = (u64::from(place), u64::from(places), u64::from(old));
    let (first, end) = (place * old / places, ((place + 1) * old).div_ceil(places));
    first as u32..end as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(step: Step, epoch: Epoch, places: u32, place: u32) -> Stored {
        Stored { share: Share { step, epoch, places, place }, digest: u64::from(place) + step * 10 }
    }

    fn newest(memories: &[(HostId, Vec<Stored>)]) -> Option<CommonStep> {
        CommonStep::newest(memories.iter().map(|(host, memory)| (*host, memory.as_slice())))
    }

    #[test]
    fn the_newest_complete_step_is_chosen() {
        let of = |place| [stored(4, 1, 2, place), stored(8, 1, 2, place)];
        let both = [(7, of(0).to_vec()), (9, of(1).to_vec())];
        assert_eq!(newest(&both).map(|common| common.step), Some(8));
        let one_lags = [(7, of(0).to_vec()), (9, vec![of(1)[0]])];
        assert_eq!(newest(&one_lags).map(|common| common.step), Some(4));
        assert_eq!(newest(&both[..1]), None, "place 1 is in no memory");
    }

    #[test]
    fn shares_of_two_epochs_or_two_digests_are_not_combined() {
        let epochs = [(7, vec![stored(8, 1, 2, 0)]), (9, vec![stored(8, 2, 2, 1)])];
        assert_eq!(newest(&epochs), None);
        let damaged = Stored { digest: 1, ..stored(8, 1, 2, 0) };
        let copies = [(7, vec![stored(8, 1, 2, 0)]), (9, vec![stored(8, 1, 2, 1), damaged])];
        assert_eq!(newest(&copies), None);
    }

    #[test]
    fn a_wrong_report_neither_panics_nor_takes_memory() {
        let good = [(7, vec![stored(8, 1, 2, 0)]), (9, vec![stored(8, 1, 2, 1)])];
        for (places, place) in [(0, 0), (1, 5), (0, u32::MAX), (u32::MAX, u32::MAX - 1), (2, 2)] {
            let wrong = (11, vec![stored(9, 1, places, place)]);
            assert_eq!(newest(&[good[0].clone(), good[1].clone(), wrong]).map(|common| common.step), Some(8));
        }
    }

    #[test]
    fn a_host_reads_what_it_lacks_and_what_a_new_division_needs() {
        let memory = |place: u32, copied: u32| vec![stored(8, 1, 4, place), stored(8, 1, 4, copied)];
        let hosts = [(0, memory(0, 3)), (1, memory(1, 0)), (2, memory(2, 1)), (3, memory(3, 2))];
        let common = newest(&hosts[1..]).expect("place 0 has a copy on host 1");
        let spare = Membership { epoch: 2, hosts: vec![9, 1, 2, 3], step: 8 };
        let wants = |members: &Membership, place| -> Vec<(u32, HostId)> {
            common.wants(members, place).iter().map(|want| (want.stored.share.place, want.from)).collect()
        };
        assert_eq!(wants(&spare, 0), [(0, 1), (3, 3)], "the spare reads its share, and the share whose copy it stores");
        assert_eq!(wants(&spare, 2), [(1, 2), (2, 2)], "a host that stays reads its own memory");
        // Place 1 of three has the elements from 4/3 to 8/3 of the old places, and place 0 the elements up to 4/3.
        let fewer = Membership { epoch: 2, hosts: vec![1, 2, 3], step: 8 };
        assert_eq!(wants(&fewer, 1), [(0, 1), (1, 2), (2, 2)]);
    }
}
