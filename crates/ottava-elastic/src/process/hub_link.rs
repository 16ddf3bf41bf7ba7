//! The connection of a keeper to the hub.
//!
//! Host 0 starts the first hub. A keeper first tries the hub that it knows. After the loss of a hub, it then tries the other hosts in their order. If it reaches itself, it starts
//! the next hub. All keepers have the same list of hosts, so they meet at the first host that lives. Each place in the list has a term of its own, so
//! no two hubs have the same term. When such a hub has formed an epoch, it writes its address into a file of the run's folder, where hosts that start later look first.

use super::events::Input;
use super::transfer::Peers;
use super::wire::{Down, Purpose, Roster, receive};
use crate::message::{HostId, Term};
use std::fs;
use std::io::{self, BufReader, ErrorKind};
use std::net::TcpStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// The number of attempts to reach a hub that has moved before host 0 starts a new job.
const ROUNDS: u32 = 5;

/// The numbers that are left for the hubs that replace the first hub of a job, if the wall clock shows a time in the far future.
const LATER_HUBS: u64 = 1 << 24;

/// The time between attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// What a keeper knows when it looks for a hub.
pub(super) struct Search {
    /// The number of the connection, which its inputs carry.
    pub number: u64,
    /// The address of the first hub, from the launcher.
    pub address: String,
    /// The hub that was lost, if there was one.
    pub lost: Option<(Term, Roster)>,
    /// The highest number of a hub whose snapshots this host has.
    pub after: Term,
    /// The file with the address of a hub that has replaced a lost one.
    pub notice: PathBuf,
    /// The ports of this keeper: for keepers, and for rank 0.
    pub ports: [u16; 2],
    /// The name of this host.
    pub name: String,
    /// The time after which the search ends.
    pub limit: Duration,
}

/// A host that may have the hub.
struct Candidate {
    address: String,
    /// The term of the hub that this host starts, if it starts one.
    term: Option<Term>,
    host: Option<HostId>,
}

impl Search {
    /// Starts a thread that connects to a hub and passes its messages on.
    pub fn start(self, peers: Peers) {
        let work = move || {
            let number = self.number;
            let input = match self.find(&peers) {
                Err(reason) => Input::HubMissing { number, reason },
                Ok((stream, term)) => match stream.try_clone() {
                    Err(error) => Input::HubMissing { number, reason: error.to_string() },
                    Ok(writer) => {
                        let _ = peers.inputs.send(Input::Connected { number, term, stream: writer });
                        let mut reader = BufReader::new(stream);
                        while let Ok(message) = receive(&mut reader) {
                            if peers.inputs.send(Input::Down { number, message }).is_err() {
                                return;
                            }
                        }
                        Input::HubClosed { number }
                    }
                },
            };
            let _ = peers.inputs.send(input);
        };
        thread::Builder::new().name("hub link".into()).spawn(work).expect("the system starts a thread");
    }

    fn candidates(&self) -> Vec<Candidate> {
        let moved = fs::read_to_string(&self.notice).ok().filter(|address| *address != self.address);
        let moved = moved.map(|address| Candidate { address, term: None, host: None });
        let Some((term, roster)) = &self.lost else {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |time| time.as_secs());
            let term = Some(self.first_term(now));
            let first = Candidate { address: self.address.clone(), term, host: Some(0) };
            return moved.into_iter().chain([first]).collect();
        };
        let known = roster.contact(roster.hub).map_or(&self.address, |contact| &contact.address);
        let first = Candidate { address: known.clone(), term: None, host: None };
        let others = roster.contacts.iter().filter(|contact| contact.host != roster.hub);
        let others = others.zip(term + 1..).map(|(contact, term)| Candidate {
            address: contact.address.clone(),
            term: Some(term),
            host: Some(contact.host),
        });
        [first].into_iter().chain(others).chain(moved).collect()
    }

    /// Returns the number of the first hub of a job that starts `now`, in seconds of the wall clock. A clock that was set back gives a number after the
    /// hubs of earlier jobs of this host, too. Nothing else depends on the wall clock.
    fn first_term(&self, now: u64) -> Term {
        // The upper half of an epoch has the number.
        now.min(u64::from(u32::MAX) - LATER_HUBS).max(self.after + 1)
    }

    fn find(&self, peers: &Peers) -> Result<(TcpStream, Term), String> {
        let (deadline, mut reason) = (Instant::now() + self.limit, String::new());
        for round in 0.. {
            let candidates = self.candidates();
            // A hub that has moved may be slow to answer, and a second one must not start meanwhile.
            let waits = self.lost.is_none() && candidates.len() > 1 && round < ROUNDS;
            for Candidate { address, term, host } in candidates.into_iter().take(if waits { 1 } else { usize::MAX }) {
                if let (Some(term), true) = (term, host == Some(peers.host)) {
                    let _ = peers.inputs.send(Input::BecomeHub { term });
                }
                match self.connect(peers, &address) {
                    Ok(found) => return Ok(found),
                    Err(error) => reason = format!("no hub at {address}: {error}"),
                }
            }
            if Instant::now() > deadline {
                return Err(reason);
            }
            thread::sleep(PAUSE);
        }
        unreachable!("rounds have no end")
    }

    fn connect(&self, peers: &Peers, address: &str) -> io::Result<(TcpStream, Term)> {
        let [port, ranks_port] = self.ports;
        let purpose = Purpose::Follow { port, ranks_port, name: self.name.clone() };
        let mut stream = peers.credentials.connect(address, peers.host, purpose, 2 * peers.silence)?;
        match receive(&mut stream)? {
            Down::Welcome(term) if self.lost.as_ref().is_none_or(|(lost, _)| term >= *lost) => {
                super::wire::prepare(&stream, peers.silence)?;
                Ok((stream, term))
            }
            _ => Err(ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wall clock that was set back to 1970, or forward by a century, gives numbers of hubs that increase and fit into epochs.
    #[test]
    fn a_clock_jump_gives_the_next_number_of_a_hub() {
        let search = |after| Search {
            number: 1,
            address: "n0:1".into(),
            lost: None,
            after,
            notice: PathBuf::from("/nonexistent"),
            ports: [1, 2],
            name: String::new(),
            limit: PAUSE,
        };
        let today = 1_800_000_000;
        assert_eq!(search(0).first_term(today), today);
        assert_eq!([0, 1, today].map(|now| search(today).first_term(now)), [today + 1; 3]);
        for now in [today + 100 * 366 * 86_400, u64::MAX] {
            let term = search(today).first_term(now);
            assert!(term > today && term + 1_000_000 <= u64::from(u32::MAX), "{term}");
        }
        assert!(search(today).candidates()[0].term > Some(today));
    }
}
