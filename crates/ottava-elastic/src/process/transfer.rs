//! Threads that move the bytes of shares between hosts.

use super::events::Input;
use super::memory::{Listing, Memory, send_files};
use super::wire::{Credentials, Purpose, Roster, receive, send};
use crate::message::{Epoch, HostId, Part, Source, Stored, Want};
use std::io::{self, BufReader};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

/// The time between attempts to reach a host.
const PAUSE: Duration = Duration::from_millis(500);

/// The number of attempts between warnings.
const WARNED: u32 = 60;

/// What threads need to reach other hosts.
#[derive(Clone)]
pub(super) struct Peers {
    pub host: HostId,
    pub credentials: Credentials,
    pub memory: Memory,
    pub silence: Duration,
    pub inputs: Sender<Input>,
    /// The newest epoch. Transfers of earlier epochs end.
    pub epoch: Arc<AtomicU64>,
}

impl Peers {
    fn connect(&self, roster: &Roster, host: HostId, purpose: Purpose) -> io::Result<TcpStream> {
        let contact = roster.contact(host).ok_or_else(|| io::Error::other("its address is not known"))?;
        self.credentials.connect(&contact.address, self.host, purpose, self.silence)
    }

    /// Sends a copy of a share to `host`.
    pub fn copy(&self, roster: Roster, host: HostId, epoch: Epoch, stored: Stored) {
        self.in_thread(roster, move |peers, roster| {
            let copy = || {
                let (folder, listing) = peers.memory.find(&stored)?;
                let purpose = Purpose::Copy { epoch, stored, listing: listing.clone() };
                let mut stream = peers.connect(roster, host, purpose)?;
                send_files(&folder, &listing, &mut stream)?;
                receive::<Result<(), String>>(&mut stream)?.map_err(io::Error::other)
            };
            peers.retry(
                epoch,
                &format!("the copy of the snapshot of step {} to {}", stored.share.step, roster.name(host)),
                copy,
            );
        });
    }

    /// Tells `host` that its copy is stored.
    pub fn confirm(&self, roster: Roster, host: HostId, epoch: Epoch, stored: Stored) {
        self.in_thread(roster, move |peers, roster| {
            let confirm = || peers.connect(roster, host, Purpose::Copied { epoch, stored }).map(drop);
            peers.retry(epoch, &format!("the receipt of a copy to {}", roster.name(host)), confirm);
        });
    }

    /// Collects the shares of a part in the folder from which workers resume, and reports [`Input::Fetched`].
    pub fn fetch(&self, roster: Roster, part: Part) {
        self.in_thread(roster, move |peers, roster| {
            let epoch = part.members.epoch;
            let failed = peers.collect(roster, &part).err();
            let failed = failed.map(|(want, error)| {
                let (step, place) = (want.stored.share.step, want.stored.share.place);
                tracing::warn!("the snapshot of step {step} of place {place} on {}: {error}", roster.name(want.from));
                want
            });
            let _ = peers.inputs.send(Input::Fetched { epoch, failed });
        });
    }

    fn in_thread(&self, roster: Roster, work: impl FnOnce(&Peers, &Roster) + Send + 'static) {
        let peers = self.clone();
        // Without a thread, the snapshot is not sealed, or the hub times out.
        let _ = thread::Builder::new().name("transfer".into()).spawn(move || work(&peers, &roster));
    }

    /// Repeats `work` until it succeeds or another epoch begins. Without the copy, no later snapshot is taken, and the last ones stay.
    fn retry(&self, epoch: Epoch, what: &str, mut work: impl FnMut() -> io::Result<()>) {
        let mut failures = 0;
        while let Err(error) = work() {
            if failures % WARNED == 0 {
                tracing::warn!("{what} failed, and is tried again: {error}");
            }
            failures += 1;
            thread::sleep(PAUSE);
            if self.epoch.load(Ordering::Relaxed) != epoch {
                return;
            }
        }
    }

    fn collect(&self, roster: &Roster, part: &Part) -> Result<(), (Want, io::Error)> {
        if part.source == Source::Disk {
            return Ok(());
        }
        let epoch = part.members.epoch;
        let is_kept = |want: &Want| part.wants.iter().any(|kept| kept.stored == want.stored);
        // The shares that this host stores are read from the places that the hub chose for this host.
        let others = part.all.iter().filter(|want| !is_kept(want));
        let mut linked = Listing::default();
        for want in part.wants.iter().chain(others) {
            let mut link = || -> io::Result<()> {
                let (folder, listing) = self.bytes_of(roster, epoch, want)?;
                let done = self.memory.link(epoch, &folder, &listing, &mut linked);
                if want.from != self.host && !is_kept(want) {
                    self.memory.forget_incoming(&folder);
                }
                done
            };
            link().map_err(|error| (*want, error))?;
        }
        Ok(())
    }

    /// Returns the folder with the checked files of a share.
    fn bytes_of(&self, roster: &Roster, epoch: Epoch, want: &Want) -> io::Result<(PathBuf, Listing)> {
        if want.from == self.host {
            return self.memory.verify(&want.stored);
        }
        let mut stream = self.connect(roster, want.from, Purpose::Fetch { stored: want.stored })?;
        let listing: Listing = receive(&mut stream)?;
        let folder = self.memory.receive(epoch, &want.stored, &listing, &mut BufReader::new(stream))?;
        Ok((folder, listing))
    }
}

/// Sends the bytes of a share that another host asked for.
pub(super) fn serve(memory: &Memory, stored: &Stored, stream: &mut TcpStream) -> io::Result<()> {
    let (folder, listing) = memory.find(stored)?;
    send(stream, &listing)?;
    send_files(&folder, &listing, stream)
}
